"""Heads by operations, as MAPS finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from headlab.arguments import whole_number
from headlab.errors import PlanError
from headlab.plots import style
from headlab.plots.heatmap import CELL

if TYPE_CHECKING:
    from headlab.parameters import Maps
    from headlab.parameters.row_ends import Direction

#: Heads to show where none is worth a look.
_LEAST = 5
#: Half the side of a frame, in cells.
_HALF = 0.43


def operation_map(
    maps: Maps, direction: Direction = "promotes", *, top: int = 40, title: str | None = None
) -> go.Figure:
    """φ of heads for operations: operations down, grouped by kind, heads across in order of layers.

    Only heads with a claim or an effect worth a look have a column, and of these those with the largest effects.
    Claimed cells are framed in orange. Point at a cell for its interval, null and corrected p-value.

    Args:
        maps: What :func:`headlab.parameters.maps` returned.
        direction: ``"promotes"`` or ``"suppresses"``.
        top: Heads to show at most.
        title: Title of the figure.

    Raises:
        PlanError: That direction was not mapped, or no head has a score.
    """
    effects = maps.matrix(direction, "effect").dropna(how="all")
    top = whole_number(top, "top", 1)
    if effects.empty:
        raise PlanError(f"no head of {maps.about['model']} has a score, so there is no map to draw")
    most = effects.max(axis=1).nlargest(top, keep="first")
    worth = most >= maps.about["min_effect"] / 2
    best = most.index[worth] if worth.any() else most.index[:_LEAST]
    heads = [head for head in effects.index if head in set(best)]
    kinds = {relation.name: relation.kind for relation in maps.relations}
    operations = sorted(maps.names, key=lambda name: kinds[name])  # stable within a kind
    rows = maps.frame[maps.frame["direction"] == direction]
    places = {head: at for at, head in enumerate(heads)}
    down = {name: at for at, name in enumerate(operations)}
    z = np.full((len(operations), len(heads)), np.nan, np.float32)
    hover = np.full(z.shape, "", dtype=object)
    frames = []
    for row in rows.to_dict("records"):
        across = places.get(f"L{row['layer']}H{row['head']}")
        if across is None or np.isnan(row["score"]):
            continue
        at = down[row["relation"]]
        z[at, across] = row["score"]
        hover[at, across] = _hover(row)
        if row["claimed"]:
            frames.append(
                {
                    "type": "rect",
                    "x0": across - _HALF,
                    "x1": across + _HALF,
                    "y0": at - _HALF,
                    "y1": at + _HALF,
                    "line": {"color": style.ORANGE, "width": 1.5},
                }
            )
    names = [f"{style.shown(name)} · {kinds[name]}" for name in operations]
    figure = go.Figure(
        go.Heatmap(
            z=z,
            x=list(range(len(heads))),
            y=list(range(len(operations))),
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            colorscale=style.SEQUENTIAL,
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "φ"}, "thickness": 12, "outlinewidth": 0},
        )
    )
    figure.update_xaxes(
        tickvals=list(range(len(heads))),
        ticktext=heads,
        side="top",
        tickangle=-90,
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(
        tickvals=list(range(len(operations))),
        ticktext=names,
        autorange="reversed",
        showgrid=False,
        zeroline=False,
    )
    room = 10 + 7 * max(map(len, names))
    style.dressed(figure, "", room + 110 + CELL * len(heads), 120 + CELL * len(operations))
    figure.update_layout(shapes=frames, margin={"l": room, "b": 20})
    n_claimed = int(rows["claimed"].sum())
    what = {"promotes": "raised", "suppresses": "lowered"}[direction]
    found = f"Operations in the weights of {maps.about['model']}: targets {what}"
    note = (
        f"{n_claimed} claimed at q ≤ {maps.about['alpha']:g}; {len(heads)} of {len(effects)} heads"
    )
    return style.headed(figure, title or found, note, room=56)


def _hover(row: dict[Any, Any]) -> str:
    return (
        f"<b>L{row['layer']}H{row['head']} · {style.shown(row['relation'])}</b>{' claimed' if row['claimed'] else ''}"
        f"<br>φ {row['score']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}], top {row['k']} of {row['n']} pairs"
        f"<br>chance {row['null_mean']:.3f}, q {row['q_value']:.2g}"
    )
