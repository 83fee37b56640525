"""``headlab ablate``, ``patch`` and ``circuit``: causal experiments on the user's prompts or a built-in task."""

from __future__ import annotations

import json as json_
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, cast

import typer

from headlab.cli.options import spread

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal import Effects, Metric
    from headlab.model import Model
    from headlab.tasks import PromptPairs

#: A two-sided sign flip test of n prompts cannot give less than 2 / 2^n.
_SMALLEST_P = 0.05

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
        from headlab.errors import PromptError

        given = [self.text is not None, self.task is not None, self.data is not None]
        if sum(given) != 1:
            raise PromptError("give prompts by exactly one of --text, --task and --data")
        if self.task not in (None, "ioi"):
            raise PromptError(f"there is no task {self.task!r}; there is ioi")
        if self.text is not None and not self.text.strip():
            raise PromptError("the text is empty; give at least one word")
        if self.text is None and (self.answer or self.foil or self.corrupted):
            raise PromptError(
                "--answer, --foil and --corrupted go with --text; a task and --data have their own"
            )
        if self.text is not None and corrupted and self.corrupted is None:
            raise PromptError("give the corrupted prompt with --corrupted")
        if self.foil and not self.answer:
            raise PromptError("--foil needs --answer")
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

    def measured(self, given: PromptPairs) -> Metric:
        """The metric: of the tokens at hand, the most telling one.

        Raises:
            PlanError: It needs tokens that are not given, or there is no such metric.
        """
        from headlab.causal import metrics
        from headlab.errors import PlanError

        name = self.metric.replace("-", "_")
        if name == "auto":
            name = "loss"
            if given.answers:
                name = "logit_difference" if given.foils else "log_probability"
        answers, foils = list(given.answers), list(given.foils)
        if name in ("logit_difference", "probability", "log_probability", "recall") and not answers:
            raise PlanError(f"metric {name} needs --answer")
        if name == "logit_difference" and not foils:
            raise PlanError("metric logit_difference needs --foil")
        made = {
            "logit_difference": lambda: metrics.logit_difference(answers, foils),
            "probability": lambda: metrics.probability(answers),
            "log_probability": lambda: metrics.log_probability(answers),
            "recall": lambda: metrics.recall(answers),
            "loss": metrics.loss,
            "kl": metrics.kl,
        }
        if name not in made:
            raise PlanError(
                f"there is no metric {self.metric!r}; there are auto, {', '.join(made)}"
            )
        return made[name]()


Heads = Annotated[Text, typer.Option(help="Heads, like '18.6, 17.*'; all by default.")]
Site_ = Annotated[str, typer.Option(help="z, q, k, v, result, pattern, mlp_out, resid_pre, …")]
By_ = Annotated[Text, typer.Option(help="head, kv_group or layer.")]
Top = Annotated[int, typer.Option(min=1, help="Rows to print.")]


@spread
def ablate(
    prompts: Prompts,
    heads: Heads = None,
    kind: Annotated[str, typer.Option(help="zero, mean, resample or first.")] = "zero",
    site: Site_ = "z",
    by: By_ = None,
    reference: Annotated[
        Folder,
        typer.Option(help="Text file with one reference prompt a line, for mean and resample."),
    ] = None,
    top: Top = 15,
) -> None:
    """Ablate heads one at a time, and all of them together where some are named."""
    from headlab.causal import Sweep, ablate_each
    from headlab.cli.work import lines_of, progress

    prompts.checked(corrupted=False)
    texts = None if reference is None else lines_of(reference)
    model = prompts.load()
    given = prompts.pairs(model, corrupted=False)
    metric = prompts.measured(given)
    with progress() as tell:
        effects = ablate_each(
            model,
            given.clean,
            metric,
            heads=heads,
            kind=cast(Any, kind),
            site=cast(Any, site),
            by=cast(Any, by),
            reference=texts,
            seed=prompts.seed,
            out=_parts(prompts.out),
            tell=tell,
        )
        together = None
        if heads is not None and len(effects.frame) > 1:
            from headlab.attention import ablate as edit

            every = edit(
                heads, cast(Any, kind), site=cast(Any, site), reference=texts, seed=prompts.seed
            )
            together = float(Sweep(model, given.clean, metric).run([[every]]).mean())
    notes = []
    if together is not None:
        before = float(effects.baseline.mean())
        notes.append(
            f"All {len(effects.frame)} together: {effects.about['metric']} {before:.4g} → {together:.4g}."
        )
    _show(prompts, model, effects, "ablation", top, notes)


@spread
def patch(
    prompts: Prompts,
    heads: Heads = None,
    site: Site_ = "z",
    by: By_ = None,
    positions: Annotated[Text, typer.Option(help="'each', or numbers like '3,-1'.")] = None,
    direction: Annotated[str, typer.Option(help="denoising or noising.")] = "denoising",
    align: Annotated[
        Text, typer.Option(help="start or end, for prompts of different lengths.")
    ] = None,
    top: Top = 15,
) -> None:
    """Patch heads one at a time from the clean run into the corrupted one, or the other way round."""
    from headlab.causal import patch_each
    from headlab.cli.work import position_list, progress

    prompts.checked(corrupted=True)
    places = position_list(positions)
    model = prompts.load()
    given = prompts.pairs(model, corrupted=True)
    metric = prompts.measured(given)
    with progress() as tell:
        effects = patch_each(
            model,
            given.clean,
            given.corrupted,
            metric,
            heads=heads,
            site=cast(Any, site),
            by=cast(Any, by),
            positions=places,
            direction=cast(Any, direction),
            align=cast(Any, align),
            seed=prompts.seed,
            out=_parts(prompts.out),
            tell=tell,
        )
    _show(prompts, model, effects, "patching", top, [])


def _parts(out: Path | None) -> Path | None:
    return None if out is None else out / "parts"


def _show(
    prompts: Prompts,
    model: Model,
    effects: Effects,
    what: Literal["ablation", "patching"],
    top: int,
    notes: list[str],
) -> None:
    """Print the effects, and write them where an output folder is given."""
    from headlab.cli.tables import print_frame

    frame, n = shown_effects(effects), effects.values.shape[1]
    if 2 * 0.5**n > _SMALLEST_P:
        notes.append(
            f"With {n} prompt{'s' if n > 1 else ''} no effect can be told from chance; give more with --data or --task."
        )
    facts = [
        model.name,
        f"{effects.about['metric']}: clean {effects.clean.mean():.4g}"
        + ("" if effects.corrupted is None else f", corrupted {effects.corrupted.mean():.4g}"),
        f"{effects.about['site']}, {len(effects.frame)} interventions, {n} prompt{'s' if n > 1 else ''}",
    ]
    if prompts.out is not None:
        from headlab import plots
        from headlab.report.causal_page import PageTable, causal_page
        from headlab.report.files import write_files

        by_position = (effects.frame["position"] >= 0).any()
        figure = plots.position_map(effects) if by_position else plots.effect_map(effects)
        page = causal_page(
            f"{what.capitalize()} of {model.name}",
            facts,
            [figure],
            [PageTable.of(frame, "Effects, largest first")],
            notes,
        )
        write_files(prompts.out, {f"{what}.json": effects.to_json() + "\n", f"{what}.html": page})
    if prompts.json:
        print(effects.to_json())
        return
    print_frame(frame.head(top), " · ".join(facts), len(frame))
    for note in notes:
        print(note)
    if prompts.out is not None:
        print((prompts.out / f"{what}.html").resolve())


def shown_effects(effects: Effects) -> pd.DataFrame:
    """The table as people read it, largest effects first."""
    from headlab.roles import head_label

    frame = effects.top(len(effects.frame))
    named = [
        f"L{layer}" if head < 0 else head_label(layer, head)
        for layer, head in zip(frame["layer"], frame["head"], strict=True)
    ]
    frame.insert(0, "where", named)
    low, high = frame["ci_low"], frame["ci_high"]
    frame["95 % interval"] = [f"{a:.3g} … {b:.3g}" for a, b in zip(low, high, strict=True)]
    columns = ["where", "position", "value", "effect", "95 % interval", "normalised", "q_value"]
    if (frame["position"] < 0).all():
        columns.remove("position")
    if frame["normalised"].isna().all():
        columns.remove("normalised")
    return frame[columns].rename(columns={"q_value": "q"})


@spread
def circuit(
    prompts: Prompts,
    method: Annotated[str, typer.Option(help="eap-ig or eap.")] = "eap-ig",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the integrated gradients.")] = 5,
    edges: Annotated[
        int, typer.Option(min=1, help="Edges to keep, by absolute score; dead ends among them go.")
    ] = 200,
    faithfulness: Annotated[
        bool,
        typer.Option("--faithfulness/--no-faithfulness", help="Run circuits of several sizes too."),
    ] = True,
    top: Top = 15,
) -> None:
    """Score every edge between heads, MLPs, embedding and logits, and keep the largest as a circuit."""
    from headlab.causal import Circuit, EdgeRuns, eap, eap_ig, faithfulness_curve
    from headlab.cli.work import progress
    from headlab.errors import PlanError

    prompts.checked(corrupted=True)
    if method not in ("eap-ig", "eap"):
        raise PlanError(f"there is no method {method!r}; there are eap-ig and eap")
    model = prompts.load()
    given = prompts.pairs(model, corrupted=True)
    metric = prompts.measured(given)
    with progress() as tell:
        if method == "eap":
            scored = eap(model, given.clean, given.corrupted, metric, tell=tell)
        else:
            scored = eap_ig(model, given.clean, given.corrupted, metric, steps=steps, tell=tell)
        every = Circuit.of_edges(model, scored)
        found = every.top(edges, "absolute").without_dead_ends()
        curve = None
        if faithfulness:
            runs = EdgeRuns(model, given.clean, given.corrupted, metric, tell=tell)
            curve = faithfulness_curve(runs, every, seed=prompts.seed)
    _show_circuit(prompts, model, found, curve, top)


def _show_circuit(prompts: Prompts, model: Model, found: Any, curve: Any, top: int) -> None:
    from headlab.cli.tables import print_frame

    frame = found.to_frame()
    facts = [model.name, f"{len(frame)} edges by {found.method}", f"metric: {found.metric}"]
    notes = [
        "A positive score raises the metric; edges on no path from embedding to logits are left out."
    ]
    if curve is not None:
        (cpr, *around), (cmd, *about) = curve.cpr, curve.cmd
        notes.append(
            f"Faithfulness over shares of the edges, as MIB: CPR {cpr:.3f} [{around[0]:.3f}, {around[1]:.3f}], "
            f"CMD {cmd:.3f} [{about[0]:.3f}, {about[1]:.3f}]."
        )
    document = json_.loads(found.to_json())
    if prompts.out is not None:
        from headlab import plots
        from headlab.plots.circuit import MOST_EDGES
        from headlab.report.causal_page import PageTable, causal_page
        from headlab.report.files import write_files

        figures = []
        if len(found):
            figures.append(plots.head_graph(found.top(MOST_EDGES, "absolute")))
        if curve is not None:
            figures.append(plots.faithfulness_curve({found.method: curve}))
        page = causal_page(
            f"Circuit of {model.name}", facts, figures, [PageTable.of(frame, "Edges")], notes
        )
        write_files(prompts.out, {"circuit.json": found.to_json() + "\n", "circuit.html": page})
    if prompts.json:
        print(json_.dumps(document))
        return
    print_frame(frame.head(top), " · ".join(facts), len(frame))
    for note in notes:
        print(note)
    if prompts.out is not None:
        print((prompts.out / "circuit.html").resolve())
