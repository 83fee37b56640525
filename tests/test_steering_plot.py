"""The figure of a sweep says what the evaluation says, and shows hostile text as text."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from headlab import plots
from headlab.steering import Evaluation
from headlab.steering.results import COLUMNS


def made(kinds: tuple[str, ...]) -> Evaluation:
    keys = [("unsteered", np.nan)] + [(kind, s) for s in (0.1, 3.0) for kind in kinds]
    rng = np.random.default_rng(0)
    table = rng.standard_normal((len(keys), len(COLUMNS)))
    frame = pd.DataFrame(table, columns=list(COLUMNS)).astype(object)
    frame["kind"], frame["strength"] = zip(*keys, strict=True)
    frame = frame.astype({name: float for name in COLUMNS if name != "kind"})
    about = {
        "model": "<img src=x>",
        "method": "pasta",
        "heads": "L0H1",
        "behaviour": "b",
        "measures": "$x$ <b>logit</b>",
    }
    return Evaluation(frame, np.zeros((len(keys), 2)), np.zeros((len(keys), 2)), about)


@pytest.mark.parametrize("kinds", [("method",), ("method", "random_heads", "random_direction")])
def test_every_row_is_a_point_with_its_interval(kinds: tuple[str, ...]) -> None:
    evaluation = made(kinds)
    figure = plots.steering_sweep(evaluation)
    assert len(figure.data) == 2 * len(kinds)
    for at, trace in enumerate(figure.data):
        kind, lower = kinds[at // 2], at % 2 == 1
        for strength, y, up, down in zip(
            trace.x, trace.y, trace.error_y.array, trace.error_y.arrayminus, strict=True
        ):
            row = evaluation.row(kind, float(strength))
            value, name = ("loss_change", "loss") if lower else ("value", "value")
            assert y == row[value]
            assert y + up == pytest.approx(row[f"{name}_high"])
            assert y - down == pytest.approx(row[f"{name}_low"])
    lines = [shape.y0 for shape in figure.layout.shapes]
    assert lines == [evaluation.row("unsteered")["value"], 0.0]


def test_text_is_shown_as_text() -> None:
    figure = plots.steering_sweep(made(("method",)))
    assert "<img" not in figure.layout.title.text
    assert "<b>" not in figure.layout.yaxis.title.text
    assert "$" not in figure.layout.yaxis.title.text
    assert "mine" in plots.steering_sweep(made(("method",)), title="mine").layout.title.text
