"""Layers by heads, for one role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from headlab.plots import style
from headlab.roles.scores import Scores, head_label

CELL = 20
"""Side of a cell in pixels."""


def role_map(scores: Scores, role: str) -> go.Figure:
    """Effect over null of every head for one role: layers down, heads across.

    Claimed heads are framed, heads that could not be measured crossed out. Point at a cell for the
    score, its interval, the null and the corrected p-value.

    Args:
        scores: What scoring returned.
        role: Name of a role in ``scores``.

    Returns:
        A figure with the axes ``L0 …`` and ``H0 …``; show or save it yourself.

    Raises:
        OutputError: The role was not scored.
    """
    info = scores.role(role)
    rows = scores.ranked(role).to_dict("records")
    n_layers = max((row["layer"] for row in rows), default=0) + 1
    n_heads = max((row["head"] for row in rows), default=0) + 1
    effects = np.full((n_layers, n_heads), np.nan, dtype=np.float32)
    hover = np.full((n_layers, n_heads), "", dtype=object)
    for row in rows:
        effects[row["layer"], row["head"]] = row["effect"]
        hover[row["layer"], row["head"]] = _hover(row)
    layers = [f"L{layer}" for layer in range(n_layers)]
    heads = [f"H{head}" for head in range(n_heads)]
    finite = np.abs(effects[np.isfinite(effects)])
    # Never below what a clear claim would show, so that noise stays pale; as in report.html.
    wanted = [value for value in (2 * info.min_effect, info.min_score) if math.isfinite(value)]
    limit = max(float(finite.max()) if finite.size else 0.0, *wanted, 0.0) or 1.0
    figure = go.Figure(
        go.Heatmap(
            z=effects,
            x=heads,
            y=layers,
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            colorscale=style.DIVERGING,
            zmid=0,
            zmin=-limit,
            zmax=limit,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": "effect"}, "thickness": 12, "outlinewidth": 0},
        )
    )
    claimed = [row for row in rows if row["claimed"]]
    unmeasured = [row for row in rows if not math.isfinite(row["effect"])]
    figure.add_trace(_marks(claimed, "square-open", CELL - 5, "claimed", style.INK))
    figure.add_trace(_marks(unmeasured, "x-thin-open", 7, "not measurable", style.SOFT))
    figure.update_xaxes(
        type="category", categoryarray=heads, side="top", showgrid=False, constrain="domain"
    )
    figure.update_yaxes(
        type="category",
        categoryarray=layers,
        autorange="reversed",
        scaleanchor="x",
        constrain="domain",
        showgrid=False,
    )
    title = f"{style.shown(info.title)} · {len(claimed)} claimed at q ≤ {scores.alpha:g}"
    return style.dressed(figure, title, 240 + CELL * n_heads, 140 + CELL * n_layers)


def _marks(rows: list[dict[Any, Any]], symbol: str, size: int, name: str, color: str) -> go.Scatter:
    return go.Scatter(
        x=[f"H{row['head']}" for row in rows],
        y=[f"L{row['layer']}" for row in rows],
        text=[_hover(row) for row in rows],
        hovertemplate="%{text}<extra></extra>",
        mode="markers",
        name=name,
        marker={
            "symbol": symbol,
            "size": size,
            "color": color,
            "line": {"width": 2, "color": color},
        },
    )


def _hover(row: Mapping[Any, Any]) -> str:
    title = f"<b>{head_label(row['layer'], row['head'])}</b>"
    note = f"<br>{style.shown(row['note'], 120)}" if row["note"] else ""
    if not math.isfinite(row["score"]):
        return f"{title}<br>not measurable{note}"
    return (
        f"{title}{' claimed' if row['claimed'] else ''}"
        f"<br>score {row['score']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
        f"<br>null {row['null_mean']:.3f}, effect {row['effect']:.3f}"
        f"<br>q {row['q_value']:.2g}, n {row['n']}{note}"
    )
