"""``headlab lookback``: fit, use and decode by a detector of what the context does not bear out."""

from __future__ import annotations

import json as js
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, cast

import typer

from headlab.cli.options import EMBEDDED, Device, Dtype, Json, Model_, Revision, Trust, spread

if TYPE_CHECKING:
    from headlab.lookback import Example, Lens, Scored
    from headlab.model import Model

lookback = typer.Typer(
    help="Tell from lookback ratios what of a response the context bears out.",
    no_args_is_help=True,
)
Text = Optional[str]  # noqa: UP045  # typer reads annotations at run time
Folder = Optional[Path]  # noqa: UP045
Data = Annotated[
    Folder,
    typer.Option(
        help="JSON Lines with prompt and response; `headlab tasks schema lookback` prints the schema."
    ),
]
LensFile = Annotated[Folder, typer.Option("--lens", help="What `headlab lookback fit` wrote.")]
PromptText = Annotated[Text, typer.Option("--text", help="The prompt.")]
PromptFile = Annotated[Folder, typer.Option("--file", help="File with the prompt.")]
Cue = Annotated[
    str,
    typer.Option(
        help="The prompt's end that counts as new text, like 'Answer:'; else its last token does."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Tokens_ = Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate at most.")]


@dataclass(frozen=True)
class Opening:
    """The model and how to open it; see :func:`spread`."""

    model: Model_ = EMBEDDED
    device: Device = "auto"
    dtype: Dtype = "auto"
    revision: Revision = None
    trust_remote_code: Trust = False

    def load(self) -> Model:
        """The model."""
        from headlab.cli.work import loaded

        return loaded(self.model, self.device, self.dtype, self.revision, self.trust_remote_code)


@lookback.command()
@spread
def fit(
    opening: Opening,
    data: Data = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write the lens to.")] = Path(
        "lens.json"
    ),
    spans: Annotated[
        str, typer.Option(help="window: every full window; given: the labelled spans.")
    ] = "window",
    window: Annotated[int, typer.Option(min=1, help="Tokens of a window.")] = 8,
    split: Annotated[
        str, typer.Option(help="grouped: by document; paper: by span, which leaks.")
    ] = "grouped",
    calibration: Annotated[str, typer.Option(help="platt, isotonic or none.")] = "platt",
    scaling: Annotated[str, typer.Option(help="none, as in the paper, or standard.")] = "none",
    permutations: Annotated[
        int, typer.Option(min=0, help="Shuffles of labels behind the p-value.")
    ] = 99,
    top: Annotated[int, typer.Option(min=1, help="Heads to print.")] = 10,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Fit a lens to labelled responses and write it; figures are of spans held out."""
    from headlab.cli.tables import print_frame
    from headlab.cli.work import check_out, progress
    from headlab.errors import OutputError
    from headlab.lookback import check_settings
    from headlab.lookback import fit as make

    check_settings(spans, split, calibration, scaling)
    examples = _examples(data)
    if out.is_dir():
        raise OutputError(f"{out} is a folder; give a file to write the lens to with --out")
    check_out(out.parent)
    model = opening.load()
    with progress() as tell:
        lens = make(
            model,
            examples,
            spans=cast(Any, spans),
            window=window,
            split=cast(Any, split),
            calibration=cast(Any, calibration),
            scaling=cast(Any, scaling),
            n_permutations=permutations,
            seed=seed,
            tell=tell,
        )
    lens.save(out)
    if json:
        print(lens.to_json())
        return
    print(lens)
    print(_judged(lens))
    ranked = lens.heads.sort_values(["p_value", "auroc"], kind="stable")
    print_frame(ranked.head(top), "Heads by the p-value of their ratio alone", len(ranked))
    print(out.resolve())


@lookback.command()
@spread
def score(
    opening: Opening,
    lens: LensFile = None,
    text: PromptText = None,
    file: PromptFile = None,
    response: Annotated[
        Text, typer.Option(help="What was answered; by default what the model answers, greedily.")
    ] = None,
    data: Data = None,
    cue: Cue = "",
    tokens: Tokens_ = 64,
    json: Json = False,
) -> None:
    """Score a response, or every response of a file, by a lens."""
    from headlab.cli.tables import print_frame
    from headlab.cli.work import progress, prompt_text
    from headlab.errors import PromptError

    found = _lens(lens)
    if data is not None:
        if text is not None or file is not None or response is not None or cue:
            raise PromptError("give either --data, or a prompt with --text or --file")
        examples = _examples(data)
        model = opening.load()
        with progress() as tell:
            scored = []
            for at, example in enumerate(examples):
                tell(f"scoring response {at + 1} of {len(examples)}")
                scored.append(found.score(model, example))
    else:
        prompt = prompt_text(text, file)
        scored = [found.score(opening.load(), prompt, response, cue=cue, max_new_tokens=tokens)]
    if json:
        print(js.dumps([_told(one) for one in scored], ensure_ascii=False))
        return
    for one in scored:
        print_frame(one.windows, str(one), len(one.windows))


@lookback.command()
@spread
def generate(
    opening: Opening,
    lens: LensFile = None,
    text: PromptText = None,
    file: PromptFile = None,
    cue: Cue = "",
    tokens: Tokens_ = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 8,
    candidates: Annotated[int, typer.Option(min=1, help="Continuations to choose from.")] = 8,
    top_p: Annotated[float, typer.Option(help="Nucleus of the sampling.")] = 0.95,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampling.")] = 0.9,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Continue a prompt chunk by chunk, each time with what the lens finds best borne out."""
    from headlab.cli.work import progress, prompt_text
    from headlab.lookback import generate as make
    from headlab.text import printable

    found = _lens(lens)
    prompt = prompt_text(text, file)
    model = opening.load()
    with progress() as tell:
        made = make(
            model,
            found,
            prompt,
            tokens,
            cue=cue,
            chunk=chunk,
            n_candidates=candidates,
            top_p=top_p,
            temperature=temperature,
            seed=seed,
            tell=lambda said: tell(printable(said)),
        )
    if json:
        document = asdict(made) | {"chunks": made.chunks.to_dict("records")}
        print(js.dumps(document, ensure_ascii=False))
    else:
        print(printable(made.text))


def _lens(file: Path | None) -> Lens:
    from headlab.errors import PlanError
    from headlab.lookback import Lens

    if file is None:
        raise PlanError("name a lens with --lens FILE; `headlab lookback fit` makes one")
    return Lens.load(os.fspath(file))


def _examples(data: Path | None) -> tuple[Example, ...]:
    from headlab.errors import PlanError
    from headlab.lookback import read_examples

    if data is None:
        raise PlanError(
            "name a file of prompts and responses with --data FILE; `headlab tasks schema lookback` says what it holds"
        )
    return read_examples(data)


def _judged(lens: Lens) -> str:
    """What the figures say, in words."""
    known = lens.figures
    split = {"grouped": "documents held out", "paper": "spans held out, documents not"}
    return (
        f"{int(known['responses_positive'])} of {int(known['responses'])} responses borne out, "
        f"{int(known['positive'])} of {int(known['spans'])} spans; {split[str(lens.about['split'])]}.\n"
        f"Shuffled labels: AUROC {known['null_mean']:.3f}, p {known['p_value']:.2g}; on spans fitted on "
        f"{known['auroc_train']:.3f}.\n"
        f"Brier score {known['brier']:.3f}, calibrated {known['brier_calibrated']:.3f}; calibration error "
        f"{known['calibration_error']:.3f}, calibrated {known['calibration_error_calibrated']:.3f}."
    )


def _told(scored: Scored) -> dict[str, Any]:
    return {
        "response": scored.response,
        "probability": scored.probability,
        "tokens": list(scored.tokens),
        "token_probability": scored.token_probability.tolist(),
        "windows": scored.windows.to_dict("records"),
    }
