"""What ``headlab steer`` prints and writes."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headlab.text import printable

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model
    from headlab.steering import Evaluation, Method

_MEANING = (
    "effect: change of the mean from the unsteered model; excess: the method's effect less the controls' mean; q: "
    "two-sided sign-flip p-value over cases, corrected over the table; loss change: nats per token of plain text. "
    "Intervals are 95 %."
)


def show_continuations(
    model: Model, method: Method, prompt: str, tokens: int, as_json: bool
) -> None:
    """Print how the model goes on without and with the method."""
    from headlab.steering import steer

    plain = str(model.generate(prompt, max_new_tokens=tokens))
    with steer(model, method):
        new = str(model.generate(prompt, max_new_tokens=tokens))
    if as_json:
        found = {"method": method.name, "unsteered": plain, "steered": new}
        print(json.dumps(found, ensure_ascii=False))
        return
    print(f"unsteered: {printable(plain)}")
    print(f"steered:   {printable(new)}")


def show_evaluation(found: Evaluation, out: Path | None, as_json: bool) -> None:
    """Print the table, and write it where a folder is given."""
    from headlab.cli.tables import print_frame

    frame = shown_frame(found)
    about = found.about
    facts = [
        str(about["model"]),
        f"{about['method']}{' at ' + about['heads'] if about['heads'] else ''}",
        f"{about['behaviour']}: {about['measures']}",
        f"{int(found.frame['n'].iloc[0])} cases",
    ]
    notes = [note for note in (str(about["note"]), _MEANING) if note]
    if out is not None:
        from headlab import plots
        from headlab.report.figures_page import PageTable, figures_page
        from headlab.report.files import write_files

        page = figures_page(
            f"{about['method']} on {about['model']}",
            facts,
            [plots.steering_sweep(found)],
            [PageTable.of(frame, "Strengths and controls")],
            notes,
        )
        write_files(out, {"evaluation.json": found.to_json() + "\n", "steer.html": page})
    if as_json:
        print(found.to_json())
        return
    print_frame(frame, " · ".join(facts), len(frame))
    for note in notes:
        print(note)
    if out is not None:
        print((out / "steer.html").resolve())


def shown_frame(found: Evaluation) -> pd.DataFrame:
    """The table as people read it."""
    import pandas as pd

    rows = []
    for row in found.frame.to_dict("records"):
        rows.append(
            {
                "": str(row["kind"]).replace("_", " "),
                "strength": "" if math.isnan(row["strength"]) else f"{row['strength']:g}",
                "value": _number(row["value"]),
                "effect": _with_interval(row, "effect"),
                "q": _number(row["q_value"]),
                "excess": _with_interval(row, "excess"),
                "excess q": _number(row["excess_q"]),
                "loss change": _number(row["loss_change"]),
            }
        )
    return pd.DataFrame(rows)


def show_methods(as_json: bool) -> None:
    """Print the methods, and what each is measured on."""
    from headlab.steering.recipes import RECIPES

    rows = [
        {"method": name, "does": one.about, "behaviour": one.behaviour, "marks text": one.marks}
        for name, one in RECIPES.items()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    import pandas as pd

    from headlab.cli.tables import print_frame

    frame = pd.DataFrame(rows)
    frame["marks text"] = ["--span" if marks else "" for marks in frame["marks text"]]
    print_frame(frame, "Methods of steering, and the behaviour each is measured on", len(frame))


def _with_interval(row: dict[Hashable, Any], name: str) -> str:
    value = row[name]
    if math.isnan(value):
        return ""
    return f"{value:.3g} [{row[f'{name}_low']:.3g}, {row[f'{name}_high']:.3g}]"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"
