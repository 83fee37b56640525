"""What the figures share: colours and the escaping of text."""

from __future__ import annotations

import textwrap
from html import escape

import plotly.graph_objects as go

from headlab.roles.scores import visible

# Brown below zero, paper at zero, blue above, as in report.html: distinct with any colour vision.
DIVERGING = (
    (0.0, "#8a5a2b"),
    (0.25, "#bb9a78"),
    (0.5, "#f1f1ed"),
    (0.625, "#c2d9e6"),
    (0.75, "#80b2d2"),
    (0.875, "#3f7eae"),
    (1.0, "#12325a"),
)
SEQUENTIAL = (
    (0.0, "#f7f7f4"),
    (0.25, "#c2d9e6"),
    (0.5, "#80b2d2"),
    (0.75, "#3f7eae"),
    (1.0, "#12325a"),
)
INK = "#1b1e23"
SOFT = "#666e79"
BLUE = "#17578f"
ORANGE = "#ff8c00"
"""Shows on the palest and the darkest cells of both scales."""


def shown(text: str, limit: int = 40) -> str:
    """Text as plotly shows it literally: nothing invisible, no markup, no formula.

    Plotly reads ``<b>``-like tags in every label and hands ``$…$`` to MathJax.
    """
    return escape(visible(text, limit), quote=False).replace("$", "&#36;")


def dressed(figure: go.Figure, title: str, width: int, height: int) -> go.Figure:
    """The figure with the package's plain look; the template is set on this figure alone."""
    figure.update_layout(
        template="plotly_white",
        title={"text": title, "x": 0, "xref": "paper", "font": {"size": 16}},
        width=width,
        height=height,
        margin={"l": 60, "r": 20, "t": 70, "b": 50},
        showlegend=False,
    )
    return figure


def headed(figure: go.Figure, title: str, note: str = "", room: int = 0) -> go.Figure:
    """Give a dressed figure a title of any length: it wraps, and the figure grows beside and above its plot to hold it.

    Args:
        figure: The figure.
        title: Title, as it is; shown as text.
        note: A smaller line below it.
        room: Pixels that labels above the plot take.
    """
    shape = figure.layout
    text = visible(title, 200)
    beside = shape.margin.l + 10
    width = max(shape.width, beside + min(9 * len(text), 560), beside + 7 * len(note))
    lines = textwrap.wrap(text, (width - beside) // 9)
    top = 24 + 21 * len(lines) + (20 if note else 0) + room
    start = 12 if len(lines) == 1 else 23  # plotly begins titles of several lines higher
    return figure.update_layout(
        title={
            "text": "<br>".join(shown(line, 200) for line in lines),
            "subtitle": {"text": shown(note, 200) if note else "", "font": {"size": 12}},
            "yref": "container",
            "yanchor": "top",
            "y": 1 - start / (shape.height + top - shape.margin.t),
        },
        width=width,
        height=shape.height + top - shape.margin.t,
        margin={"r": shape.margin.r + width - shape.width, "t": top},
    )
