"""What commands share: loading, progress, reading prompts and plans from options."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headlab.attention import keep
from headlab.attention.keep import NAMES, TENSORS, Keep
from headlab.errors import OutputError, PlanError, PromptError
from headlab.model import Model, load

if TYPE_CHECKING:
    from headlab.roles import Scores

#: Statistics that a command line can name without further arguments.
_SIMPLE = tuple(
    name
    for name in NAMES
    if name not in ("feature", "target_mass", "segment_mass", "segment_z", "lag_mass")
)


def loaded(
    model: str, device: str, dtype: str, revision: str | None, trust_remote_code: bool
) -> Model:
    """Load a model, saying so."""
    print(f"loading {model}", file=sys.stderr)
    return load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A live line on a terminal, plain lines in a log; both on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def check_out(folder: Path) -> None:
    """Refuse an output folder that cannot be written before any work is done.

    Raises:
        OutputError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --out"
        ) from error


def prompt_text(text: str | None, file: Path | None) -> str:
    """The prompt from exactly one of two options.

    Raises:
        PromptError: Both or neither are given, the file cannot be read, or there is no text.
    """
    if (text is None) == (file is None):
        raise PromptError("give the prompt with either --text or --file")
    if file is not None:
        try:
            text = sys.stdin.read() if os.fspath(file) == "-" else file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"{file} cannot be read as text: {error}") from error
    assert text is not None
    if not text.strip():
        raise PromptError("the text is empty; give at least one word")
    return text


def lines_of(file: Path) -> list[str]:
    """The lines of a text file that are not empty.

    Raises:
        PromptError: It cannot be read, or has none.
    """
    try:
        found = [line for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{file} cannot be read as text: {error}") from error
    if not found:
        raise PromptError(f"{file} has no text; give one prompt a line")
    return found


def position_list(given: str | None) -> list[int] | Literal["each"] | None:
    """Positions from an option like ``3,-1``, or ``each``.

    Raises:
        PlanError: They are not whole numbers.
    """
    if given is None:
        return None
    if given == "each":
        return "each"
    try:
        return [int(part) for part in given.split(",")]
    except ValueError as error:
        raise PlanError(
            f"--positions {given!r} must be 'each' or whole numbers like '3,-1'"
        ) from error


def named_files(given: Sequence[str]) -> dict[str, str]:
    """Files by role, from options like ``spans=my.jsonl``.

    Raises:
        PlanError: One is not of this form, or a role is named twice.
    """
    files: dict[str, str] = {}
    for option in given:
        role, equals, file = option.partition("=")
        if not (role and equals and file):
            raise PlanError(f"--data {option!r} must be ROLE=FILE, such as spans=my.jsonl")
        if role in files:
            raise PlanError(f"--data names {role!r} twice; put its records into one file")
        files[role] = file
    return files


def plan(names: str, heads: str | None, block: int = 64) -> list[Keep]:
    """A capture plan from a comma-separated option.

    Args:
        names: What to keep.
        heads: Of which heads.
        block: Side of the squares of ``block_map``, in tokens.

    Raises:
        PlanError: A name is unknown, or needs arguments that a command line cannot give.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    statistics = [name for name in wanted if name in _SIMPLE]
    tensors = [name for name in wanted if name in TENSORS]
    for name in wanted:
        if name not in (*_SIMPLE, *TENSORS, "rows"):
            more = "; only Python can, with its arguments" if name in NAMES else ""
            raise PlanError(
                f"--keep cannot take {name!r}{more}; it takes rows, {', '.join((*_SIMPLE, *TENSORS))}"
            )
    made: list[Keep] = []
    if "rows" in wanted:
        made.append(keep.rows(queries=[-1], heads=heads))
    if statistics:
        made.append(keep.statistics(*statistics, heads=heads, block=block))
    if tensors:
        made.append(keep.tensors(*tensors, heads=heads))
    if not made:
        raise PlanError("--keep names nothing to keep")
    return made


def write_scores(scores: Scores, folder: Path) -> None:
    """Write ``scores.parquet``."""
    import pyarrow as pa

    from headlab.report.files import dump_parquet, write_files

    table = pa.Table.from_pandas(scores.frame, preserve_index=False)
    write_files(folder, {"scores.parquet": dump_parquet(table, {})})
