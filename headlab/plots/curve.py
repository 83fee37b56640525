"""Curves over circuit sizes and over heads pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import plotly.graph_objects as go

from headlab.errors import PlanError
from headlab.plots import style

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal.circuits.faithfulness import FaithfulnessCurve
    from headlab.causal.head_sets.pruning import PruningCurve

_Curve = TypeVar("_Curve")
#: Distinct with any colour vision (Okabe and Ito, without the yellow that fades on white).
COLOURS = (style.BLUE, "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", style.INK)


def faithfulness_curve(
    curves: FaithfulnessCurve | Mapping[str, FaithfulnessCurve], *, title: str = "Faithfulness"
) -> go.Figure:
    """Faithfulness over the share of edges or heads, with CPR and CMD in the legend.

    Solid: the best by score (CPR is the area under it). Dashed: the best by absolute score (CMD is the area between it
    and 1). At 0 a circuit carries no more than the empty one, at 1 as much as the whole model. Bands
    are 95 % intervals over prompts. The axis is logarithmic, the areas are not.

    Args:
        curves: One curve, or several by name.
        title: Title of the figure.

    Raises:
        PlanError: There is no curve.
    """
    figure = go.Figure()
    for at, (name, curve) in enumerate(_named(curves).items()):
        colour = COLOURS[at % len(COLOURS)]
        shown = f"{style.shown(name)} · " if name else ""
        for ranking, dash, label, area in (
            ("score", "solid", "by score: CPR", curve.cpr),
            ("absolute", "dash", "by absolute score: CMD", curve.cmd),
        ):
            frame = curve.frame[curve.frame["ranking"] == ranking]
            value, low, high = area
            legend = f"{shown}{label} {value:.3f} [{low:.3f}, {high:.3f}]"
            columns = ("faithfulness", "ci_low", "ci_high")
            _add_line(figure, frame, "share", columns, legend, colour, dash, ("n_kept",))
    for level in (0, 1):
        figure.add_hline(y=level, line={"color": style.SOFT, "width": 1, "dash": "dot"})
    figure.update_xaxes(
        type="log", title="share of edges or heads", tickvals=[0.001, 0.01, 0.1, 1], tickformat="~%"
    )
    figure.update_yaxes(title="faithfulness<br>(0: empty circuit, 1: whole model)")
    return _legend(style.dressed(figure, style.shown(title, 200), 720, 460))


def pruning_curve(
    curves: PruningCurve | Mapping[str, PruningCurve],
    *,
    column: Literal["metric", "retained"] = "metric",
    title: str = "Pruning",
) -> go.Figure:
    """The metric over the share of heads taken out.

    Args:
        curves: One curve, or several by name.
        column: ``"metric"``, with its 95 % interval over prompts, or ``"retained"``, as a share of the whole model's.
        title: Title of the figure.

    Raises:
        PlanError: There is no curve, or no such column.
    """
    if column not in ("metric", "retained"):
        raise PlanError(f"column={column!r} must be 'metric' or 'retained'")
    named = _named(curves)
    figure = go.Figure()
    for at, (name, curve) in enumerate(named.items()):
        band = ("metric", "ci_low", "ci_high") if column == "metric" else ("retained",)
        colour = COLOURS[at % len(COLOURS)]
        _add_line(
            figure,
            curve.frame,
            "share",
            band,
            style.shown(name or column),
            colour,
            "solid",
            ("removed",),
        )
    figure.update_xaxes(title="share of heads taken out", tickformat="~%")
    figure.update_yaxes(title=column)
    figure = style.dressed(figure, style.shown(title, 200), 720, 460)
    return _legend(figure) if len(named) > 1 else figure


def _named(curves: _Curve | Mapping[str, _Curve]) -> Mapping[str, _Curve]:
    named = curves if isinstance(curves, Mapping) else {"": curves}
    if not named:
        raise PlanError("there is no curve to draw; pass one, or several by name")
    return named


def _add_line(
    figure: go.Figure,
    frame: pd.DataFrame,
    across: str,
    columns: tuple[str, ...],
    name: str,
    colour: str,
    dash: str,
    more: tuple[str, ...],
) -> None:
    """A line with, where columns name them, a band between the two bounds beside it."""
    x, y = frame[across].to_numpy(), frame[columns[0]].to_numpy()
    bounds = [frame[column].to_numpy() for column in columns[1:]]
    if bounds and all(np.isfinite(bound).all() for bound in bounds):
        low, high = bounds
        figure.add_trace(
            go.Scatter(
                x=np.concatenate([x, x[::-1]]),
                y=np.concatenate([high, low[::-1]]),
                fill="toself",
                fillcolor=colour,
                opacity=0.12,
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
            )
        )
    label = columns[0].replace("_", " ")
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name=name,
            legendgroup=name,
            line={"color": colour, "dash": dash, "width": 2},
            marker={"size": 5},
            customdata=frame[list(more)].to_numpy(),
            hovertemplate=f"%{{x:.3%}} ({more[0].replace('_', ' ')} %{{customdata[0]}})<br>{label} %{{y:.4g}}",
        )
    )


def _legend(figure: go.Figure) -> go.Figure:
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.2, "x": 0})
    return figure
