"""What the causal commands print and write."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headlab.cli.tables import counted

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal import Circuit, Edges, Effects
    from headlab.causal.circuits.faithfulness import Faithfulness, FaithfulnessCurve
    from headlab.cli.experiment import Prompts
    from headlab.model import Model
    from headlab.report.figures_page import PageTable
    from headlab.tasks import PromptPairs

#: A two-sided sign flip test of n prompts cannot give less than 2 / 2^n.
_SMALLEST_P = 0.05
_MEANING = (
    "effect: the metric under the intervention less without it, a mean over prompts with its 95 % bootstrap interval; "
    "normalised: 1 the clean run, 0 the corrupted one; q: sign-flip p-value, corrected over the table."
)
#: How far from complete the scores may be before one is told.
_INCOMPLETE = 0.1
#: Prompts that a page shows.
_SHOWN = 5


def show_effects(
    prompts: Prompts,
    model: Model,
    given: PromptPairs,
    effects: Effects,
    top: int,
    notes: list[str],
) -> None:
    """Print the effects, and write them where an output folder is given."""
    from headlab.cli.tables import print_frame

    what = str(effects.about["did"])
    frame, n = shown_effects(effects), effects.values.shape[1]
    if 2 * 0.5**n * len(frame) > _SMALLEST_P:
        enough = math.ceil(math.log2(2 * len(frame) / _SMALLEST_P))
        notes.append(
            f"With {counted(n, 'prompt')} none of {len(frame)} effects can pass correction by itself "
            f"(q ≤ {_SMALLEST_P:g}); {enough} would do: give more with --data or --task."
        )
    notes.append(_MEANING)
    facts = [
        model.name,
        f"{effects.about['metric']}: clean {effects.clean.mean():.4g}"
        + ("" if effects.corrupted is None else f", corrupted {effects.corrupted.mean():.4g}"),
        f"{effects.about['site']}, {counted(len(frame), 'intervention')}, {counted(n, 'prompt')}",
    ]
    if prompts.out is not None:
        from headlab import plots
        from headlab.report.figures_page import PageTable, figures_page
        from headlab.report.files import write_files

        by_position = (effects.frame["position"] >= 0).any()
        if by_position:
            one = len(given) == 1  # the tokens of several prompts differ
            tokens = model.token_texts(model.tokens(list(given.clean[0])))[0] if one else ()
            figure = plots.position_map(effects, tokens=tokens)
        else:
            figure = plots.effect_map(effects)
        page = figures_page(
            f"{what.capitalize()} of {model.name}",
            facts,
            [figure],
            [PageTable.of(frame, "Effects, largest first"), _prompts_table(model, given)],
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
    frame["95 % interval"] = [
        f"{a:.3g} … {b:.3g}" if math.isfinite(a) else "–" for a, b in zip(low, high, strict=True)
    ]
    columns = ["where", "position", "value", "effect", "95 % interval", "normalised", "q_value"]
    if (frame["position"] < 0).all():
        columns.remove("position")
    if frame["normalised"].isna().all():
        columns.remove("normalised")
    return frame[columns].rename(columns={"q_value": "q"})


def show_circuit(
    prompts: Prompts,
    model: Model,
    given: PromptPairs,
    scored: Edges,
    found: Circuit,
    own: Faithfulness | None,
    curve: FaithfulnessCurve | None,
    top: int,
) -> None:
    """Print the edges of a circuit, and write them where an output folder is given."""
    from headlab.cli.tables import print_frame

    frame, about = found.to_frame(), scored.about
    facts = [
        model.name,
        f"{len(frame)} of {len(scored)} edges by {found.method}",
        f"{found.metric}: clean {about['clean']:.4g}, corrupted {about['corrupted']:.4g}",
        counted(len(given), "prompt"),
    ]
    notes = _circuit_notes(scored, found, own, curve)
    if prompts.out is not None:
        from headlab import plots
        from headlab.plots.circuit import MOST_EDGES
        from headlab.report.figures_page import PageTable, figures_page
        from headlab.report.files import write_files

        figures = []
        if len(found):
            figures.append(plots.head_graph(found.top(MOST_EDGES, "absolute")))
        if curve is not None:
            figures.append(plots.faithfulness_curve({found.method: curve}))
        tables = [PageTable.of(frame, "Edges"), _prompts_table(model, given)]
        page = figures_page(f"Circuit of {model.name}", facts, figures, tables, notes)
        text = found.to_json(indent=1) + "\n"
        write_files(prompts.out, {"circuit.json": text, "circuit.html": page})
    if prompts.json:
        print(found.to_json())
        return
    print_frame(frame.head(top), " · ".join(facts), len(frame))
    for note in notes:
        print(note)
    if prompts.out is not None:
        print((prompts.out / "circuit.html").resolve())


def _circuit_notes(
    scored: Edges, found: Circuit, own: Faithfulness | None, curve: FaithfulnessCurve | None
) -> list[str]:
    notes = [
        "A positive score: the edge raises the metric. Edges on no path from embedding to logits are left out."
    ]
    if not len(found):
        notes.append("None of the edges kept lies on such a path; keep more with --edges.")
    complete = scored.about.get("completeness")
    if complete is not None and abs(complete - 1) > _INCOMPLETE:
        notes.append(
            f"The edges out of the embedding sum to {complete:.2f} of the metric's change, so these scores are rough; "
            "use more --steps."
        )
    if own is not None:
        notes.append(
            f"Faithfulness of this circuit, run exactly: {own.value:.3f} [{own.ci_low:.3f}, {own.ci_high:.3f}] "
            "(1: the whole model, 0: no edge)."
        )
    if curve is not None:
        (cpr, *around), (cmd, *about) = curve.cpr, curve.cmd
        notes.append(
            f"Over circuits of 0.1 to 100 % of the edges, as MIB: CPR {cpr:.3f} [{around[0]:.3f}, {around[1]:.3f}], "
            f"area under the faithfulness of the best by score; CMD {cmd:.3f} [{about[0]:.3f}, {about[1]:.3f}], area "
            "of its distance from 1, of the best by absolute score; 0 is perfect."
        )
    return notes


def _prompts_table(model: Model, given: PromptPairs) -> PageTable:
    """The first prompts, as they were run."""
    import pandas as pd

    from headlab.report.figures_page import PageTable

    def text(ids: Any) -> str:
        if model.tokenizer is None:
            return " ".join(map(str, ids))
        return model.text(list(ids))

    columns = {"clean": [text(ids) for ids in given.clean[:_SHOWN]]}
    if given.corrupted:
        columns["corrupted"] = [text(ids) for ids in given.corrupted[:_SHOWN]]
    for name, tokens in (("answer", given.answers), ("foil", given.foils)):
        if tokens:
            columns[name] = [
                token if isinstance(token, str) else text([token]) for token in tokens[:_SHOWN]
            ]
    more = f" (the first {_SHOWN} of {len(given)})" if len(given) > _SHOWN else ""
    return PageTable.of(pd.DataFrame(columns), f"Prompts{more}")
