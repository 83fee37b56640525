"""What interventions did: layers by heads, and heads or layers by token position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from headlab.errors import PlanError
from headlab.plots import style
from headlab.plots.heatmap import CELL
from headlab.plots.pattern import LABEL, TICKS

if TYPE_CHECKING:
    from headlab.causal import Effects

Column = Literal["effect", "normalised", "value"]
_COLUMNS = ("effect", "normalised", "value")


def effect_map(
    effects: Effects, column: Column = "effect", *, alpha: float = 0.05, title: str | None = None
) -> go.Figure:
    """Effect of an intervention at every head: layers down, heads across.

    Interventions on whole layers (an MLP's output, the stream) stand in columns of their own beside the heads. Cells of
    q ≤ ``alpha`` are framed. Point at a cell for its interval and p-value.

    Args:
        effects: What a sweep over heads returned.
        column: What to show: ``"effect"`` (0 is no effect), ``"normalised"`` (clean 1, corrupted 0) or ``"value"``.
        alpha: Corrected p-value up to which cells are framed.
        title: Title of the figure.

    Raises:
        PlanError: There is no such column, or heads have several rows, as in sweeps over positions.
    """
    rows = _records(effects, column)
    heads = [f"H{head}" for head in range(max((row["head"] for row in rows), default=-1) + 1)]
    across = heads + list(dict.fromkeys(str(row["site"]) for row in rows if row["head"] < 0))
    down = [f"L{layer}" for layer in range(max((row["layer"] for row in rows), default=-1) + 1)]
    places = {name: at for at, name in enumerate(across)}
    cells = [
        (row["layer"], places[f"H{row['head']}" if row["head"] >= 0 else str(row["site"])], row)
        for row in rows
    ]
    figure = _heat(cells, down, [style.shown(name) for name in across], column, alpha)
    figure.update_xaxes(side="top", constrain="domain", tickangle=-90)
    figure.update_yaxes(scaleanchor="x", constrain="domain")
    width, height = 260 + CELL * len(across), 150 + CELL * len(down)
    figure = style.dressed(figure, _title(effects, title), width, height)
    room = 8 * max(map(len, across), default=0)  # labels stand upright below the title
    return figure.update_layout(margin={"t": 55 + room}, height=height + room)


def position_map(
    effects: Effects,
    tokens: Sequence[str] = (),
    column: Column = "effect",
    *,
    top: int = 30,
    alpha: float = 0.05,
    title: str | None = None,
) -> go.Figure:
    """Effect of an intervention at every position: layers or heads down, positions across.

    Args:
        effects: What a sweep over positions returned.
        tokens: Text of the positions of one prompt, to label them by; shown as text, whatever it holds.
        column: ``"effect"``, ``"normalised"`` or ``"value"``.
        top: Where rows are heads, show only those of the largest effect at any position.
        alpha: Corrected p-value up to which cells are framed.
        title: Title of the figure.

    Raises:
        PlanError: There is no such column, the sweep was not over positions, or a cell has several rows.
    """
    rows = [row for row in _records(effects, column) if row["position"] >= 0]
    if not rows:
        raise PlanError(
            "these effects are not by position; sweep with positions=, as patch_each(…, positions='each')"
        )
    units = sorted({(row["layer"], row["head"]) for row in rows})
    if any(head >= 0 for _, head in units) and len(units) > top:
        largest: dict[tuple[int, int], float] = {}
        for row in rows:
            size = abs(row["effect"]) if math.isfinite(row["effect"]) else 0.0
            unit = (row["layer"], row["head"])
            largest[unit] = max(largest.get(unit, 0.0), size)
        units = sorted(sorted(units, key=lambda unit: -largest[unit])[:top])
    at = {unit: place for place, unit in enumerate(units)}
    down = [f"L{layer}H{head}" if head >= 0 else f"L{layer}" for layer, head in units]
    length = max(max(row["position"] for row in rows) + 1, len(tokens))
    across = [
        f"{place} {style.shown(tokens[place], LABEL)}" if place < len(tokens) else str(place)
        for place in range(length)
    ]
    cells = [
        (at[row["layer"], row["head"]], row["position"], row)
        for row in rows
        if (row["layer"], row["head"]) in at
    ]
    figure = _heat(cells, down, across, column, alpha)
    figure.update_xaxes(tickangle=-60, title="position")
    width, height = min(1400, 280 + CELL * length), 220 + CELL * len(down)
    return style.dressed(figure, _title(effects, title), width, height)


def _records(effects: Effects, column: str) -> list[dict[Any, Any]]:
    if column not in _COLUMNS:
        raise PlanError(f"column={column!r} must be one of {', '.join(_COLUMNS)}")
    return effects.frame.to_dict("records")


def _heat(
    cells: Sequence[tuple[int, int, Mapping[Any, Any]]],
    down: list[str],
    across: list[str],
    column: str,
    alpha: float,
) -> go.Figure:
    values = np.full((len(down), len(across)), np.nan)
    hover = np.full((len(down), len(across)), "", dtype=object)
    for y, x, row in cells:
        if hover[y, x]:
            raise PlanError(
                f"{down[y]} {across[x]} has several rows, of several positions or sites; use position_map, or select "
                "rows of effects.frame first"
            )
        values[y, x] = row[column]
        hover[y, x] = _hover(row)
    # Values have no zero to diverge from: they are shown from lowest to highest.
    diverging = column == "effect"
    finite = values[np.isfinite(values)]
    limit = float(abs(finite).max()) if finite.size else 1.0
    scale = {"zmin": -limit, "zmax": limit, "zmid": 0} if diverging else {}
    figure = go.Figure(
        go.Heatmap(
            z=values,
            x=list(range(len(across))),
            y=list(range(len(down))),
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            colorscale=style.DIVERGING if diverging else style.SEQUENTIAL,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": column}, "thickness": 12, "outlinewidth": 0},
            **scale,
        )
    )
    clear = [(y, x, row) for y, x, row in cells if row["q_value"] <= alpha]
    figure.add_trace(
        go.Scatter(
            x=[x for _, x, _ in clear],
            y=[y for y, _, _ in clear],
            text=[_hover(row) for _, _, row in clear],
            hovertemplate="%{text}<extra></extra>",
            mode="markers",
            name=f"q ≤ {alpha:g}",
            marker={
                "symbol": "square-open",
                "size": CELL - 5,
                "color": style.INK,
                "line": {"width": 2, "color": style.INK},
            },
        )
    )
    figure.update_xaxes(**_axis(across))
    figure.update_yaxes(**_axis(down), autorange="reversed")
    return figure


def _axis(names: list[str]) -> dict[str, Any]:
    """Every name at its place; of very many, some. Names can be equal, so places are numbers."""
    places = list(range(0, len(names), max(1, -(-len(names) // TICKS))))
    labels = [names[place] for place in places]
    return {"tickvals": places, "ticktext": labels, "showgrid": False, "zeroline": False}


def _hover(row: Mapping[Any, Any]) -> str:
    head = f"L{row['layer']}H{row['head']}" if row["head"] >= 0 else f"L{row['layer']}"
    place = f" at position {row['position']}" if row["position"] >= 0 else ""
    normalised = row["normalised"]
    more = f"<br>normalised {normalised:.3f}" if math.isfinite(normalised) else ""
    return (
        f"<b>{head}</b> {style.shown(str(row['site']))}{place}"
        f"<br>effect {row['effect']:.4g} [{row['ci_low']:.4g}, {row['ci_high']:.4g}]"
        f"<br>value {row['value']:.4g}{more}<br>q {row['q_value']:.2g}, n {row['n']}"
    )


def _title(effects: Effects, title: str | None) -> str:
    if title is None:
        about = effects.about
        parts = [about.get("did"), about.get("direction") or about.get("kind"), about.get("metric")]
        title = " · ".join(str(part) for part in parts if part)
    return style.shown(title, 200) if title else ""
