"""What an experiment found, as one self-contained page: figures that can be pointed at, and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from headlab.report.html import digest, environment

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True)
class PageTable:
    """A table of the page: the first rows of a frame.

    Attributes:
        caption: What it shows.
        columns: Names of the columns.
        rows: Cells as text.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(frame: pd.DataFrame, caption: str, limit: int = 100) -> PageTable:
        """The first ``limit`` rows of a frame, numbers in four digits."""
        rows = tuple(
            tuple(_cell(value) for value in row)
            for row in frame.head(limit).itertuples(index=False)
        )
        more = f" ({limit} of {len(frame)} rows)" if len(frame) > limit else ""
        return PageTable(caption + more, tuple(map(str, frame.columns)), rows)


def figures_page(
    title: str,
    facts: Sequence[str],
    figures: Sequence[go.Figure],
    tables: Sequence[PageTable],
    notes: Sequence[str] = (),
) -> str:
    """The whole page as text; it loads nothing from elsewhere, and its policy lets only its own scripts run."""
    from plotly.offline import get_plotlyjs

    # plotly escapes what could end the script, which the tests hold it to.
    drawn = ",\n".join(str(figure.to_json()) for figure in figures)
    script = (
        f"[{drawn}].forEach((figure, at) => Plotly.newPlot(`figure-${{at}}`, figure.data, figure.layout, "
        "{responsive: false, displaylogo: false}));"
    )
    library = get_plotlyjs()
    directives = {
        "default-src": "'none'",
        "script-src": f"{digest(library)} {digest(script)}",
        "style-src": "'unsafe-inline'",  # plotly sets styles of the elements it draws
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return (
        environment()
        .get_template("figures.html.j2")
        .render(
            title=title,
            facts=list(facts),
            notes=list(notes),
            figures=list(figures),
            tables=list(tables),
            policy="; ".join(f"{name} {value}" for name, value in directives.items()),
            library=Markup(library),
            script=Markup(script),
        )
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        small = 0 < value < 1e-99
        return "<1e-99" if small else f"{value:.4g}" if math.isfinite(value) else "–"
    return str(value)
