"""What a method of steering does at each strength, beside its controls and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headlab.plots import style

if TYPE_CHECKING:
    from headlab.steering import Evaluation

#: Colour and name of each kind of row.
_KINDS = {
    "method": (style.BLUE, "the method"),
    "random_heads": ("#d55e00", "at random heads"),
    "random_direction": ("#009e73", "along random directions"),
}


def steering_sweep(evaluation: Evaluation, *, title: str = "") -> go.Figure:
    """Behaviour by strength above, change of the loss on plain text below; the dotted lines are the unsteered model.

    Bars are 95 % intervals: of the mean over cases above, of the mean change over texts below. Strengths stand in the
    order in which they were run, evenly spaced.

    Args:
        evaluation: What :func:`headlab.steering.evaluate` returned.
        title: Title of the figure; by default the method's name and heads.
    """
    about, frame = evaluation.about, evaluation.frame
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.62, 0.38])
    for kind, (colour, name) in _KINDS.items():
        rows = frame[frame["kind"] == kind]
        if not len(rows):
            continue
        strengths = [f"{strength:g}" for strength in rows["strength"]]
        for at, column in ((1, "value"), (2, "loss")):
            y = rows["value" if at == 1 else "loss_change"]
            low, high = rows[f"{column}_low"], rows[f"{column}_high"]
            figure.add_trace(
                go.Scatter(
                    x=strengths,
                    y=y.to_numpy(),
                    name=name,
                    legendgroup=kind,
                    showlegend=at == 1,
                    mode="lines+markers",
                    line={"color": colour, "width": 2 if kind == "method" else 1},
                    error_y={
                        "type": "data",
                        "array": (high - y).to_numpy(),
                        "arrayminus": (y - low).to_numpy(),
                        "thickness": 1,
                    },
                    hovertemplate=f"{name}, strength %{{x}}<br>%{{y:.4g}}<extra></extra>",
                ),
                row=at,
                col=1,
            )
    base = float(evaluation.row("unsteered")["value"])
    for at, level in ((1, base), (2, 0.0)):
        figure.add_hline(y=level, line={"color": style.SOFT, "width": 1, "dash": "dot"}, row=at)
    figure.update_yaxes(title=style.shown(str(about["measures"]), 60), row=1)
    figure.update_yaxes(title="change of loss<br>(nats per token)", row=2)
    figure.update_xaxes(title="strength", type="category", row=2)
    figure.update_xaxes(type="category", row=1)
    where = f" at {about['heads']}" if about["heads"] else ""
    text = title or f"{about['method']}{where}: {about['behaviour']} of {about['model']}"
    figure = style.headed(style.dressed(figure, "", 720, 520), text)
    return figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.16, "x": 0})
