"""The best heads of a role, with their uncertainty."""

from __future__ import annotations

import plotly.graph_objects as go

from headlab.plots import style
from headlab.roles.scores import Scores, head_label


def profile(scores: Scores, role: str, *, top: int = 20) -> go.Figure:
    """Score, 95% interval and null mean of the best heads of one role, best at the top.

    Filled dots are claimed heads; the bar beside each dot is its null mean.

    Args:
        scores: What scoring returned.
        role: Name of a role in ``scores``.
        top: Heads to show: claimed ones first, then by score.

    Raises:
        OutputError: The role was not scored.
    """
    info = scores.role(role)
    ranked = scores.ranked(role)
    measured = ranked[ranked["score"].notna()]
    rows = measured.head(top)
    names = [
        head_label(layer, head) for layer, head in zip(rows["layer"], rows["head"], strict=True)
    ]
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=rows["null_mean"],
            y=names,
            mode="markers",
            name="null mean",
            marker={"symbol": "line-ns-open", "size": 12, "color": style.SOFT},
            hovertemplate="%{y} null mean %{x:.3f}<extra></extra>",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=rows["score"],
            y=names,
            mode="markers",
            name="score",
            error_x={
                "type": "data",
                "symmetric": False,
                "array": rows["ci_high"] - rows["score"],
                "arrayminus": rows["score"] - rows["ci_low"],
                "color": style.SOFT,
                "thickness": 1.5,
                "width": 0,
            },
            marker={
                "size": 9,
                "color": [style.BLUE if claimed else "#ffffff" for claimed in rows["claimed"]],
                "line": {"width": 1.5, "color": style.BLUE},
            },
            customdata=rows[["ci_low", "ci_high", "q_value"]],
            hovertemplate=(
                "<b>%{y}</b><br>score %{x:.3f} [%{customdata[0]:.3f}, %{customdata[1]:.3f}]"
                "<br>q %{customdata[2]:.2g}<extra></extra>"
            ),
        )
    )
    figure.update_yaxes(type="category", categoryarray=names, autorange="reversed")
    figure.update_xaxes(title="score", rangemode="tozero")
    title = f"{style.shown(info.title)} · {len(rows)} of {len(measured)} measured heads"
    return style.dressed(figure, title, 640, 150 + 22 * max(len(rows), 1))
