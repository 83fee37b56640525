"""Tables for the terminal, by rich."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headlab.text import printable

if TYPE_CHECKING:
    import pandas as pd

    from headlab.cli.doctor import Finding
    from headlab.models import KnownModel
    from headlab.report.figures_page import PageTable
    from headlab.roles import Role, Scores


def counted(n: int, what: str) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def number(value: float) -> str:
    """Four digits; of numbers too small to tell apart only that they are."""
    return "<1e-99" if 0 < value < 1e-99 else f"{value:.4g}"


def print_scores(scores: Scores, top: int) -> None:
    """The best heads of each role."""
    from headlab.roles import head_label

    console = Console()
    for name in scores.names:
        info, claimed = scores.role(name), scores.claimed(name)
        table = Table(
            title=f"{info.title}: {len(claimed)} claimed at q ≤ {scores.alpha:g}",
            title_justify="left",
            box=None,
        )
        for column in ("head", "score", "95 % interval", "null", "p", "q", "n", ""):
            table.add_column(column, justify="right")
        ranked = scores.ranked(name)
        for row in ranked.head(top).to_dict("records"):
            table.add_row(
                head_label(row["layer"], row["head"]),
                f"{row['score']:.3f}",
                f"{row['ci_low']:.3f}–{row['ci_high']:.3f}",
                f"{row['null_mean']:.3f}",
                f"{row['p_value']:.1e}",
                f"{row['q_value']:.1e}",
                str(row["n"]),
                "claimed" if row["claimed"] else "",
            )
        if ranked["score"].isna().all():
            console.print(f"{info.title}: {ranked['note'].iloc[0]}", markup=False)
            continue
        console.print(table)
        for note in sorted(set(ranked["note"][ranked["note"].str.contains("pass correction")])):
            console.print(f"  {note}", markup=False)
        if len(ranked) > top:
            console.print(f"  {top} of {len(ranked)} heads", style="dim")


def print_frame(frame: pd.DataFrame, title: str, total: int) -> None:
    """The rows of a frame, numbers in four digits."""
    console = Console()
    console.print(title, markup=False, highlight=False)
    table = Table(box=None)
    for column, kind in frame.dtypes.items():
        # A number that is broken over two lines is read as another number.
        table.add_column(
            escape(str(column)), justify="right", overflow="fold", no_wrap=kind.kind in "iufb"
        )
    for row in frame.itertuples(index=False):
        cells = [
            number(value) if isinstance(value, float) else printable(str(value)) for value in row
        ]
        table.add_row(*map(escape, cells))
    console.print(table)
    if total > len(frame):
        console.print(f"  {len(frame)} of {total} rows", style="dim")


def print_table(table: PageTable) -> None:
    """A table of a page."""
    console = Console()
    console.print(printable(table.caption), style="bold", markup=False, highlight=False)
    made = Table(box=None)
    for column in table.columns:
        made.add_column(escape(column), justify="right", overflow="fold")
    for row in table.rows:
        made.add_row(*(escape(printable(cell)) for cell in row))
    console.print(made)


def print_models(models: Sequence[KnownModel], as_json: bool) -> None:
    """The models at hand."""
    if as_json:
        print(json.dumps([asdict(model) for model in models]))
        return
    table = Table(box=None)
    for column in ("model", "kind", "at hand", "size", "about"):
        table.add_column(column, overflow="fold")
    for model in models:
        size = f"{model.size / 1e6:.0f} MB" if model.size else ""
        table.add_row(
            escape(model.name),
            model.kind,
            "yes" if model.available else "no",
            size,
            escape(model.note),
        )
    Console().print(table)


def print_roles(roles: Sequence[Role], as_json: bool) -> None:
    """The roles, and the data each takes."""
    found = []
    for role in roles:
        data = "yours" if role.needs_records else "headlab's" if role.schema is None else "either"
        found.append({"role": role.info.name, "title": role.info.title, "data": data})
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=None)
    for column in ("role", "title", "data"):
        table.add_column(column, overflow="fold")
    said = {
        "yours": "yours, --data {}=FILE",
        "either": "headlab's, or yours",
        "headlab's": "headlab's",
    }
    for row in found:
        table.add_row(
            escape(row["role"]), escape(row["title"]), escape(said[row["data"]].format(row["role"]))
        )
    Console().print(table)
    print(
        "pairs: clean and corrupted prompts for ablate, patch and circuit; headlab's (--task ioi), or yours"
    )


def print_findings(findings: Sequence[Finding], as_json: bool) -> None:
    """What the doctor found."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
        return
    table = Table(box=None, show_header=False)
    for finding in findings:
        mark = {"ok": "[green]ok[/]", "missing": "[red]missing[/]"}.get(
            finding.state, finding.state
        )
        table.add_row(mark, escape(finding.what), escape(finding.detail))
        if finding.mend:
            table.add_row("", "", f"mend: [bold]{escape(finding.mend)}[/]")
    Console().print(table)
