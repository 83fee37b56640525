"""Rows of an attention pattern over their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from headlab.errors import PlanError
from headlab.plots import style

TICKS = 80
"""Tokens that still get their own axis label."""

LABEL = 20
"""Characters of a token that are shown."""


def pattern(
    rows: Any,
    tokens: Sequence[str],
    *,
    queries: Sequence[int] | None = None,
    query_tokens: Sequence[str] | None = None,
    title: str = "Attention",
) -> go.Figure:
    """Attention from queries (down) to keys (across).

    Args:
        rows: Weights ``[query, key]`` or one row ``[key]``, such as ``trace.rows[0, layer, head]``;
            a tensor, an array or lists. Keys a query cannot see may be 0 or NaN.
        tokens: Text of each key. Shown with invisible characters escaped, never as markup.
        queries: Position of each row's query; negative ones count from the end. By default the
            rows belong to the last positions.
        query_tokens: Text of each position queries count in, where it differs from the keys'
            (cross-attention).
        title: Title of the figure.

    Returns:
        A heat map; show or save it yourself.

    Raises:
        PlanError: Shapes of rows, tokens and queries do not fit.
    """
    weights = _weights(rows)
    n_queries, n_keys = weights.shape
    if n_keys != len(tokens):
        raise PlanError(
            f"the rows have {n_keys} keys but there are {len(tokens)} tokens: pass one per key"
        )
    sources = tokens if query_tokens is None else query_tokens
    places = _positions(queries, n_queries, len(sources))
    keys = [style.shown(token, LABEL) for token in tokens]
    names = [style.shown(sources[place], LABEL) for place in places]
    figure = go.Figure(
        go.Heatmap(
            z=weights,
            customdata=[
                [f"{place} {name}" for _ in keys] for place, name in zip(places, names, strict=True)
            ],
            text=[[f"{place} {name}" for place, name in enumerate(keys)]] * n_queries,
            hovertemplate="from %{customdata}<br>to %{text}<br>weight %{z:.4f}<extra></extra>",
            hoverongaps=False,
            colorscale=style.SEQUENTIAL,
            zmin=0,
            zmax=max(float(np.nanmax(weights)), 1e-6) if np.isfinite(weights).any() else 1.0,
            colorbar={"title": {"text": "weight"}, "thickness": 12, "outlinewidth": 0},
        )
    )
    # Positions are the axis and tokens its labels: the same token may stand at many positions.
    figure.update_xaxes(**_axis(keys), title="key", tickangle=-60)
    figure.update_yaxes(**_axis(names), title="query", autorange="reversed")
    width = min(1400, 240 + 18 * n_keys)
    return style.dressed(figure, style.shown(title, 200), width, min(1200, 260 + 20 * n_queries))


def _weights(rows: Any) -> np.ndarray:
    if hasattr(rows, "detach"):  # a tensor, perhaps on a GPU, perhaps bfloat16
        rows = rows.detach().float().cpu().numpy()
    weights = np.asarray(rows, dtype=np.float32)
    if weights.ndim == 1:
        weights = weights[None]
    if weights.ndim != 2 or 0 in weights.shape:
        raise PlanError(
            f"rows of shape {list(weights.shape)} are not [query, key]: "
            "select one sequence and one head first"
        )
    return weights


def _positions(queries: Sequence[int] | None, n_rows: int, length: int) -> list[int]:
    if queries is None:
        queries = range(length - n_rows, length)
    places = [query + length if query < 0 else query for query in queries]
    if len(places) != n_rows:
        raise PlanError(f"there are {n_rows} rows but {len(places)} queries: pass one per row")
    if any(not 0 <= place < length for place in places):
        raise PlanError(f"queries {list(queries)} do not all lie within {length} tokens")
    return places


def _axis(names: list[str]) -> dict[str, Any]:
    every = -(-len(names) // TICKS)
    places = list(range(0, len(names), every))
    labels = [names[place] for place in places]
    return {"tickvals": places, "ticktext": labels, "showgrid": False, "zeroline": False}
