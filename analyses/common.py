"""What the scripts share: the command line, and a table of published figures beside ours.

Each script holds ``run(model, seed, n_prompts)``, which measures one model and returns :class:`Figure` rows, and
ends in ``main(run, __doc__)``. A published figure belongs to the model named beside it: on another model it is
something to look at, not a target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import headlab as hl
from headlab.errors import HeadlabError


@dataclass(frozen=True)
class Figure:
    """One figure of a paper beside ours.

    Attributes:
        what: What it is, with its unit.
        ours: Measured on the model at hand; None where it could not be.
        published: The paper's figure, or None where it gives none.
        published_for: The model the published figure belongs to.
        comparable: Whether that is the model at hand, so that the two should agree.
        note: What a reader must know to compare them.
    """

    what: str
    ours: float | str | None
    published: float | str | None = None
    published_for: str = ""
    comparable: bool = False
    note: str = ""


Run = Callable[[hl.Model, int, int], Sequence[Figure]]


def is_model(model: hl.Model, *names: str) -> bool:
    """Whether the model at hand goes by one of these hub names; folders count by their last part."""
    at_hand = model.name.rstrip("/").rsplit("/", 1)[-1].lower()
    return at_hand in {name.rsplit("/", 1)[-1].lower() for name in names}


def main(run: Run, doc: str, arguments: Sequence[str] | None = None) -> None:
    """Run a script from the command line."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="embedded name, hub id, folder or GGUF file"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument("--prompts", type=int, default=20, help="prompts per probe")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    try:
        figures = run(hl.load(given.model, device=given.device), given.seed, given.prompts)
    except HeadlabError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    if given.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
    else:
        show(given.model, doc, figures)


def show(model: str, doc: str, figures: Sequence[Figure]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=doc.strip().splitlines()[0], title_justify="left")
    for column in ("what", f"ours ({model})", "published", "for", "note"):
        table.add_column(column, overflow="fold")
    for figure in figures:
        mark = " (same model)" if figure.comparable else ""
        table.add_row(
            figure.what,
            _text(figure.ours),
            _text(figure.published),
            figure.published_for + mark,
            figure.note,
        )
    Console().print(table)


def _text(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.3g}"
