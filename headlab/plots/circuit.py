"""A circuit as a layered graph: the embedding at the bottom, the logits at the top, heads across."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from headlab.errors import PlanError
from headlab.plots import style

if TYPE_CHECKING:
    from headlab.causal.circuits.circuit import Circuit

#: More edges than this are a tangle that says nothing.
MOST_EDGES = 500
BROWN = style.DIVERGING[0][1]
_DASHES = {"q": "solid", "k": "dash", "v": "dot", "": "solid"}
_INPUTS = {"solid": "into q, an MLP or the logits", "dash": "into k", "dot": "into v"}
#: Width of the strongest edge, and steps of width, in pixels.
_WIDEST, _STEP = 5.0, 0.5
#: How far an edge bends aside, in heads per layer it crosses, and how many straight pieces draw it.
_BEND, _STEPS = 0.07, 12


def head_graph(circuit: Circuit, *, title: str | None = None) -> go.Figure:
    """Nodes and edges of a circuit; layers go up, heads across, MLPs to the right.

    Edges run upward. They are blue where they raise the metric and brown where they lower it, wider with the square
    root of the size of their score, and dashed where they end at a head's k, dotted at its v. A circuit of heads has no
    edges; its heads are coloured by their score. Point at a node or at the middle of an edge for its score.

    Args:
        circuit: The circuit, of 500 edges at most: take ``circuit.top(100, "absolute").without_dead_ends()``.
        title: Title of the figure.

    Raises:
        PlanError: The circuit is empty or has too many edges.
    """
    if not len(circuit):
        raise PlanError("the circuit is empty, so there is nothing to draw; take more with top(n)")
    if circuit.kind == "edges" and len(circuit) > MOST_EDGES:
        raise PlanError(
            f"the circuit has {len(circuit)} edges, and a graph of more than {MOST_EDGES} says nothing; draw "
            "circuit.top(100, 'absolute').without_dead_ends()"
        )
    figure = go.Figure()
    places = {name: _place(name, circuit) for name in circuit.nodes}
    if circuit.kind == "edges":
        _add_edges(figure, circuit, places)
    _add_nodes(figure, circuit, places)
    layers = sorted({int(y) for _, y in places.values() if 0 <= y < len(circuit.n_heads)})
    # Bent edges can run beyond the last column, and names stand beside it.
    drawn = [x for trace in figure.data for x in trace.x if x is not None]
    low, high = min(y for _, y in places.values()), max(y for _, y in places.values())
    figure.update_xaxes(visible=False, range=[-0.8, max(*drawn, max(circuit.n_heads)) + 0.8])
    figure.update_yaxes(
        title="layer",
        tickvals=layers,
        ticktext=[f"L{layer}" for layer in layers],
        showgrid=False,
        zeroline=False,
        range=[low - 0.8, high + 0.8],
    )
    if title is None:
        said = [part for part in (circuit.model, circuit.method, circuit.metric) if part]
        title = f"{len(circuit)} {circuit.kind} · " + " · ".join(said)
    rows = high - low + 1.6
    # Of rows closer than 44 pixels, names would cover nodes.
    height = int(150 + max(44 * rows, min(60 * rows, 1400)))
    figure = style.dressed(figure, "", 900, height)
    if circuit.kind == "heads":
        return style.headed(figure, title)
    figure.update_layout(
        showlegend=True,
        legend={
            "orientation": "h",
            "y": 0,
            "yanchor": "top",
            "x": 0,
            "itemclick": False,
            "itemdoubleclick": False,
        },
    )
    return style.headed(
        figure, title, "edges run upward, from what writes to what reads; width grows with √|score|"
    )


def _place(name: str, circuit: Circuit) -> tuple[float, float]:
    """Where a node stands: x counts heads, y layers."""
    widest = max(circuit.n_heads)
    if name == "embed":
        return (widest - 1) / 2, -1.0
    if name == "logits":
        return (widest - 1) / 2, float(len(circuit.n_heads))
    if name.startswith("mlp"):
        return float(widest), int(name[3:]) + (0.0 if circuit.parallel else 0.4)
    layer, head = name[1:].split("H")
    return float(head), float(layer)


def _add_edges(figure: go.Figure, circuit: Circuit, places: dict[str, tuple[float, float]]) -> None:
    largest = max(abs(score) for score in circuit.edges.values()) or 1.0
    # One trace for all edges that look alike: a trace each would take the browser seconds.
    alike: dict[tuple[bool, str, float], tuple[list[float | None], list[float | None]]] = {}
    middles: list[tuple[float, float, str]] = []
    for edge, score in circuit.edges.items():
        (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
        # Bent to one side, so that an edge along a column does not run through the nodes between.
        bend = _BEND * (y1 - y0)
        # By the square root, so that beside one strong edge the others still differ.
        width = max(_STEP, round(_WIDEST * math.sqrt(abs(score) / largest) / _STEP) * _STEP)
        xs, ys = alike.setdefault((score >= 0, _DASHES[edge.input], width), ([], []))
        steps = [at / _STEPS for at in range(_STEPS + 1)]
        xs.extend([*(x0 + t * (x1 - x0) + 4 * t * (1 - t) * bend for t in steps), None])
        ys.extend([*(y0 + t * (y1 - y0) for t in steps), None])
        middles.append(((x0 + x1) / 2 + bend, (y0 + y1) / 2, f"{edge}<br>score {score:.4g}"))
    for (positive, dash, width), (xs, ys) in alike.items():
        figure.add_trace(
            go.Scatter(
                x=xs,
                y=ys,
                mode="lines",
                line={
                    "color": style.BLUE if positive else BROWN,
                    "width": width,
                    "dash": dash,
                },
                opacity=0.7,
                hoverinfo="skip",
                showlegend=False,
            )
        )
    looks = [("raises the metric", style.BLUE, "solid"), ("lowers the metric", BROWN, "solid")]
    looks += [(said, style.SOFT, dash) for dash, said in _INPUTS.items()]
    for name, colour, dash in looks:
        line = {"color": colour, "width": 2, "dash": dash}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="lines", name=name, line=line))
    figure.add_trace(
        go.Scatter(
            x=[x for x, _, _ in middles],
            y=[y for _, y, _ in middles],
            text=[text for _, _, text in middles],
            hovertemplate="%{text}<extra></extra>",
            mode="markers",
            name="edges",
            marker={"size": 8, "opacity": 0},
            showlegend=False,
        )
    )


def _add_nodes(figure: go.Figure, circuit: Circuit, places: dict[str, tuple[float, float]]) -> None:
    names = list(places)
    marker: dict[str, object] = {
        "size": 22,
        "color": "#ffffff",
        "line": {"width": 1.5, "color": style.INK},
    }
    hover = list(names)
    if circuit.kind == "heads":
        scores = [float(circuit.scores[name]) for name in names]
        limit = max(abs(score) for score in scores) or 1.0
        marker |= {
            "color": scores,
            "colorscale": style.DIVERGING,
            "cmin": -limit,
            "cmax": limit,
            "colorbar": {"title": {"text": "score"}, "thickness": 12, "outlinewidth": 0},
        }
        hover = [f"{name}<br>score {score:.4g}" for name, score in zip(names, scores, strict=True)]
    figure.add_trace(
        go.Scatter(
            x=[places[name][0] for name in names],
            y=[places[name][1] for name in names],
            mode="markers+text",
            name="nodes",
            text=names,
            textposition=[_beside(name) for name in names],
            textfont={"size": 10, "color": style.INK},
            hovertext=hover,
            hovertemplate="%{hovertext}<extra></extra>",
            marker=marker,
            showlegend=False,
        )
    )


def _beside(name: str) -> str:
    """Where a node's name is out of the way of other nodes."""
    if name.startswith("mlp"):
        return "middle right"
    return "bottom center" if name == "embed" else "top center"


__all__ = ["MOST_EDGES", "head_graph"]
