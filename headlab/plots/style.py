"""What the figures share: colours and the escaping of text."""

from __future__ import annotations

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
