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
#: Pixels: the least a colour bar takes, the most a map takes across.
_BAR, _WIDEST = 130, 1240
#: Half the side of a frame, in cells.
_HALF = 0.43


def effect_map(
    effects: Effects, column: Column = "effect", *, alpha: float = 0.05, title: str | None = None
) -> go.Figure:
    """Effect of an intervention at every head: layers down, from the first to the last that was swept, heads across.

    Interventions on whole layers (an MLP's output, the stream) stand in columns of their own beside the heads. Cells of
    q ≤ ``alpha`` are framed in orange. Point at a cell for its interval and p-value.

    Args:
        effects: What a sweep over heads returned.
        column: What to show: ``"effect"`` (0 is no effect), ``"normalised"`` (clean 1, corrupted 0) or ``"value"``.
        alpha: Corrected p-value up to which cells are framed.
        title: Title of the figure.

    Raises:
        PlanError: These are no effects, there is no such column, or heads have several rows, as in sweeps over
            positions.
    """
    rows = _records(effects, column, "effect_map")
    layers = [row["layer"] for row in rows]
    first, last = min(layers, default=0), max(layers, default=-1)
    heads = [f"H{head}" for head in range(max((row["head"] for row in rows), default=-1) + 1)]
    across = heads + list(dict.fromkeys(str(row["site"]) for row in rows if row["head"] < 0))
    down = [f"L{layer}" for layer in range(first, last + 1)]
    places = {name: at for at, name in enumerate(across)}
    cells = [
        (row["layer"] - first, places[f"H{row['head']}" if row["head"] >= 0 else str(row["site"])], row)
        for row in rows
    ]  # fmt: skip
    names = [style.shown(name) for name in across]
    figure = _heat(cells, down, names, column, alpha)
    upright = not _fit(names, CELL)
    figure.update_xaxes(side="top", constrain="domain", tickangle=-90 if upright else 0)
    figure.update_yaxes(scaleanchor="x", constrain="domain")
    room = 8 * max(map(len, across), default=0) if upright else 16
    return _sized(figure, effects, title, alpha, (len(down), len(across)), above=room)


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

    Only layers or heads that were swept have a row. Cells of q ≤ ``alpha`` are framed in orange.

    Args:
        effects: What a sweep over positions returned.
        tokens: Text of every position of one prompt, to label them by; shown as text, whatever it holds.
        column: ``"effect"``, ``"normalised"`` or ``"value"``.
        top: Where rows are heads, show only those of the largest effect at any position.
        alpha: Corrected p-value up to which cells are framed.
        title: Title of the figure.

    Raises:
        PlanError: These are no effects, there is no such column, the sweep was not over positions, there are more or
            fewer tokens than positions, or a cell has several rows.
    """
    rows = [row for row in _records(effects, column, "position_map") if row["position"] >= 0]
    if not rows:
        raise PlanError(
            "these effects are not by position; sweep with positions=, as patch_each(…, positions='each')"
        )
    length = max(row["position"] for row in rows) + 1
    if len(tokens) not in (0, length):
        raise PlanError(
            f"there are {len(tokens)} tokens but {length} positions, 0–{length - 1}; pass one token for each"
        )
    units = _units(rows, top)
    at = {unit: place for place, unit in enumerate(units)}
    down = [f"L{layer}H{head}" if head >= 0 else f"L{layer}" for layer, head in units]
    across = [
        f"{place} {style.shown(tokens[place], LABEL)}" if tokens else str(place)
        for place in range(length)
    ]
    cells = [
        (at[row["layer"], row["head"]], row["position"], row)
        for row in rows
        if (row["layer"], row["head"]) in at
    ]
    figure = _heat(cells, down, across, column, alpha)
    step = -(-length // TICKS)
    level = _fit(across, step * min(CELL, _WIDEST / length))
    figure.update_xaxes(tickangle=0 if level else -60, title="position")
    room = 50 if level else 50 + 6 * max(map(len, across))
    return _sized(figure, effects, title, alpha, (len(down), length), below=room)


def _records(effects: Effects, column: str, name: str) -> list[dict[Any, Any]]:
    from headlab.causal.effects import Effects

    if not isinstance(effects, Effects):
        raise PlanError(
            f"{name} draws Effects, as hl.causal.ablate_each and patch_each return, not {type(effects).__name__}"
        )
    if column not in _COLUMNS:
        raise PlanError(f"column={column!r} must be one of {', '.join(_COLUMNS)}")
    return effects.frame.to_dict("records")


def _units(rows: Sequence[Mapping[Any, Any]], top: int) -> list[tuple[int, int]]:
    """Layer and head of each row of a map; of many heads, those of the largest effects."""
    units = sorted({(row["layer"], row["head"]) for row in rows})
    if len(units) <= top or all(head < 0 for _, head in units):
        return units
    largest = dict.fromkeys(units, 0.0)
    for row in rows:
        unit = (row["layer"], row["head"])
        size = abs(row["effect"]) if math.isfinite(row["effect"]) else 0.0
        largest[unit] = max(largest[unit], size)
    return sorted(sorted(units, key=lambda unit: -largest[unit])[:top])


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
    diverging = column != "value"
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
            colorbar={
                "title": {"text": column},
                "thickness": 12,
                "outlinewidth": 0,
                "lenmode": "pixels",
                "len": max(_BAR, CELL * len(down)),
                "y": 1,
                "yanchor": "top",
            },
            **scale,
        )
    )
    # Frames are drawn in cells, not in pixels, since the cells of long prompts are narrow.
    frames: tuple[list[float | None], list[float | None]] = ([], [])
    for y, x, row in cells:
        if row["q_value"] <= alpha:
            frames[0].extend([*(x + side * _HALF for side in (-1, 1, 1, -1, -1)), None])
            frames[1].extend([*(y + side * _HALF for side in (-1, -1, 1, 1, -1)), None])
    figure.add_trace(
        go.Scatter(
            x=frames[0],
            y=frames[1],
            mode="lines",
            name=f"q ≤ {alpha:g}",
            line={"width": 2, "color": style.ORANGE},
            hoverinfo="skip",
        )
    )
    figure.update_xaxes(**_axis(across), range=[-0.5, max(len(across), 1) - 0.5])
    figure.update_yaxes(**_axis(down), range=[max(len(down), 1) - 0.5, -0.5])
    return figure


def _sized(
    figure: go.Figure,
    effects: Effects,
    title: str | None,
    alpha: float,
    shape: tuple[int, int],
    *,
    above: int = 0,
    below: int = 20,
) -> go.Figure:
    """The figure in a size that gives each cell :data:`CELL` pixels, and the colour bar room."""
    rows, columns = shape
    left, right = 75, 90
    across, down = min(_WIDEST, CELL * columns), CELL * rows
    below = max(below, _BAR + 20 - down)
    figure = style.dressed(figure, "", left + across + right, 70 + down + below)
    figure.update_layout(margin={"l": left, "r": right, "b": below})
    framed = bool(figure.data[1].x)
    note = f"framed in orange: q ≤ {alpha:g}" if framed else f"no cell has q ≤ {alpha:g}"
    return style.headed(figure, _title(effects, title), note, above)


def _axis(names: list[str]) -> dict[str, Any]:
    """Every name at its place; of very many, some. Names can be equal, so places are numbers."""
    places = list(range(0, len(names), max(1, -(-len(names) // TICKS))))
    labels = [names[place] for place in places]
    return {"tickvals": places, "ticktext": labels, "showgrid": False, "zeroline": False}


def _fit(names: Sequence[str], pixels: float) -> bool:
    """Whether labels stand side by side, so many pixels apart, without being turned."""
    return 8 * max(map(len, names), default=0) + 3 <= pixels


def _hover(row: Mapping[Any, Any]) -> str:
    head = f"L{row['layer']}H{row['head']}" if row["head"] >= 0 else f"L{row['layer']}"
    place = f" at position {row['position']}" if row["position"] >= 0 else ""
    normalised, low, high = row["normalised"], row["ci_low"], row["ci_high"]
    more = f"<br>normalised {normalised:.3f}" if math.isfinite(normalised) else ""
    interval = f" [{low:.4g}, {high:.4g}]" if math.isfinite(low) else ""  # none of a single prompt
    return (
        f"<b>{head}</b> {style.shown(str(row['site']))}{place}"
        f"<br>effect {row['effect']:.4g}{interval}"
        f"<br>value {row['value']:.4g}{more}<br>q {row['q_value']:.2g}, n {row['n']}"
    )


def _title(effects: Effects, title: str | None) -> str:
    if title is None:
        about = effects.about
        parts = [about.get("did"), about.get("direction") or about.get("kind"), about.get("metric")]
        title = " · ".join(str(part) for part in parts if part)
    return title or "Effects"
