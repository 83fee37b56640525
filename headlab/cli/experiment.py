"""Options that ``headlab ablate``, ``patch`` and ``circuit`` share: which model, prompts and metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from headlab.causal import Metric
    from headlab.model import Model
    from headlab.tasks import PromptPairs

#: The metrics by name, and how many lists of tokens each takes: answers, and foils.
_METRICS = {
    "logit_difference": 2,
    "probability": 1,
    "log_probability": 1,
    "recall": 1,
    "loss": 0,
    "kl": 0,
}

Text = Optional[str]  # noqa: UP045  # typer reads annotations at run time
Folder = Optional[Path]  # noqa: UP045


@dataclass(frozen=True)
class Prompts:
    """Options that say which prompts, model and metric; see :func:`~headlab.cli.options.spread`."""

    model: Annotated[str, typer.Argument(help="Embedded name, hub id, folder or GGUF file.")] = (
        "smollm2-135m"
    )
    text: Annotated[Text, typer.Option("--text", "--clean", help="One prompt.")] = None
    corrupted: Annotated[
        Text, typer.Option(help="The same prompt with what matters changed; as many tokens.")
    ] = None
    answer: Annotated[
        Text, typer.Option(help="What comes next, one token with its space, like ' Paris'.")
    ] = None
    foil: Annotated[Text, typer.Option(help="What to compare it with, like ' Rome'.")] = None
    task: Annotated[Text, typer.Option(help="A built-in task instead of a prompt: ioi.")] = None
    data: Annotated[
        Folder,
        typer.Option(
            help="Your own prompts, JSON Lines with clean, corrupted, answer and foil; "
            "`headlab tasks schema pairs` prints the schema."
        ),
    ] = None
    prompts: Annotated[int, typer.Option("--prompts", "-n", min=1, help="Prompts of a task.")] = 16
    metric: Annotated[
        str,
        typer.Option(
            help="auto, logit_difference, probability, log_probability, recall, loss or kl."
        ),
    ] = "auto"
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0
    out: Annotated[
        Folder,
        typer.Option("--out", "-o", help="Folder for the page, the numbers and finished parts."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto"
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = (
        "auto"
    )
    revision: Annotated[Text, typer.Option(help="Hub revision.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code from the hub run.")
    ] = False

    def checked(self, corrupted: bool) -> None:
        """Whether the options fit each other, before anything is loaded.

        Raises:
            PromptError: They do not.
        """
        from headlab.cli.work import check_out
        from headlab.errors import PlanError, PromptError

        given = [self.text is not None, self.task is not None, self.data is not None]
        if sum(given) != 1:
            raise PromptError("give prompts by exactly one of --text, --task and --data")
        if self.task not in (None, "ioi"):
            raise PromptError(f"there is no task {self.task!r}; there is ioi")
        texts = {"--text": self.text, "--corrupted": self.corrupted}
        for option, text in texts.items():
            if text is not None and not text.strip():
                raise PromptError(f"the text of {option} is empty; give at least one word")
        for option, token in {"--answer": self.answer, "--foil": self.foil}.items():
            if token == "":
                raise PromptError(f"{option} is empty; give one token, or leave the option out")
        if self.corrupted is not None and not corrupted:
            raise PromptError("--corrupted is for patch and circuit; ablate runs one prompt")
        if self.text is None and (self.answer or self.foil or self.corrupted):
            raise PromptError(
                "--answer, --foil and --corrupted go with --text; a task and --data have their own"
            )
        if self.text is not None and corrupted and self.corrupted is None:
            raise PromptError("give the corrupted prompt with --corrupted")
        if self.foil and not self.answer:
            raise PromptError("--foil needs --answer")
        if self._metric not in ("auto", *_METRICS):
            raise PlanError(
                f"there is no metric {self.metric!r}; there are auto, {', '.join(_METRICS)}"
            )
        if self.data is not None:  # a file that cannot be used is told before the model is loaded
            from headlab.tasks import PAIR_SCHEMA, read_records

            read_records(self.data, PAIR_SCHEMA, "pairs")
        if self.out is not None:
            check_out(self.out)

    def load(self) -> Model:
        """The model."""
        from headlab.cli.work import loaded

        return loaded(self.model, self.device, self.dtype, self.revision, self.trust_remote_code)

    def pairs(self, model: Model, corrupted: bool) -> PromptPairs:
        """The prompts."""
        from headlab.tasks import PromptPairs, given_pairs, ioi_pairs

        if self.task is not None:
            return ioi_pairs(model.tokenizer, self.prompts, self.seed, model.bos)
        if self.data is not None:
            return given_pairs(model.tokenizer, self.data, model.bos, corrupted=corrupted)
        assert self.text is not None

        def ids(text: str) -> tuple[int, ...]:
            return tuple(model.tokens(text)[0].tolist())

        other = (ids(self.corrupted),) if self.corrupted else ()
        answers = (self.answer,) if self.answer else ()
        foils = (self.foil,) if self.foil else ()
        return PromptPairs((ids(self.text),), other, answers, foils)

    @property
    def _metric(self) -> str:
        return self.metric.replace("-", "_")

    def measured(self, given: PromptPairs) -> Metric:
        """The metric: of the tokens at hand, the most telling one.

        Raises:
            PlanError: It needs tokens that are not given.
        """
        from headlab.causal import metrics
        from headlab.errors import PlanError

        answers, foils, name = list(given.answers), list(given.foils), self._metric
        if name == "auto":
            # Without an answer: two runs by how far they are apart, one by how well it foresees its own text.
            name = "kl" if given.corrupted else "loss"
            if answers:
                name = "logit_difference" if foils else "log_probability"
        needs = _METRICS[name]
        if (needs and not answers) or (needs == 2 and not foils):
            raise PlanError(f"metric {name} needs --answer{' and --foil' if needs == 2 else ''}")
        made: Callable[..., Metric] = getattr(metrics, name)
        return made(*(answers, foils)[:needs])
