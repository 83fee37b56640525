from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

BUDGET = 1_500_000
#: Where absolute paths of the machines notebooks are run on begin.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/~-])/(?:home|root|Users|work|tmp|mnt|opt|usr|var|private|workspace)/|\b[A-Z]:\\\w"
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "run.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def code_cells(path: Path) -> list[Any]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def outputs(path: Path) -> Iterator[Any]:
    for cell in code_cells(path):
        yield from cell.outputs


def strings(value: Any) -> Iterator[str]:
    """Every text in a notebook; figures' packed numbers are not text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key != "bdata":
                yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def written(folder: Path, *sources: str) -> Path:
    path = folder / "made.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


# -- the notebooks ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_notebook
def test_notebook_runs_and_stays_as_it_was(path: Path) -> None:
    before = path.read_bytes()
    ran = run(path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert path.name in ran.stdout
    assert path.read_bytes() == before


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@every_notebook
def test_notebook_was_run_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    results = [out for out in outputs(path) if out.output_type == "execute_result"]
    counts = {cell.execution_count for cell in cells}
    assert all(out.execution_count in counts for out in results)


@every_notebook
def test_notebook_stores_neither_errors_nor_warnings(path: Path) -> None:
    found = list(outputs(path))
    assert not [out for out in found if out.output_type == "error"]
    assert not [out.text for out in found if out.output_type == "stream" and out.name == "stderr"]


@every_notebook
def test_notebook_names_no_place_on_the_machine_it_ran_on(path: Path) -> None:
    texts = strings(nbformat.read(path, as_version=4))
    found = [text[:200] for text in texts if MACHINE_PATH.search(text)]
    assert not found


@every_notebook
def test_notebook_is_small_and_its_figures_are_data(path: Path) -> None:
    assert path.stat().st_size < BUDGET
    kinds = {kind for out in outputs(path) for kind in out.get("data", {})}
    assert "application/vnd.plotly.v1+json" in kinds
    # Figures as HTML would bring all of plotly.js along, and show nothing where scripts are not trusted.
    pages = [out.data["text/html"] for out in outputs(path) if "text/html" in out.get("data", {})]
    assert not [page[:200] for page in pages if "<script" in page]


@every_notebook
def test_figures_have_a_title_and_named_axes(path: Path) -> None:
    kind = "application/vnd.plotly.v1+json"
    for out in outputs(path):
        if kind not in out.get("data", {}):
            continue
        layout = out.data[kind]["layout"]
        title = layout["title"]["text"]
        assert title
        # A map of layers by heads has them on its ticks, L0 … and H0 …; a graph's places mean nothing.
        for axis in (layout["xaxis"], layout["yaxis"]):
            named = axis.get("title", {}).get("text") or axis.get("ticktext")
            hidden = axis.get("visible") is False
            assert named or hidden or axis.get("type") == "category", f"{title}: {axis}"


@every_notebook
def test_notebook_differs_between_runs_in_outputs_only(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert not [cell.metadata for cell in notebook.cells if cell.metadata]
    assert notebook.metadata.language_info == {"name": "python"}


# -- the runner ------------------------------------------------------------------------------------------------


def test_cells_run_in_this_python_and_an_empty_folder(tmp_path: Path) -> None:
    made = written(
        tmp_path,
        "import os, sys",
        f"assert sys.executable == {sys.executable!r}, sys.executable",
        "assert os.listdir() == []",
    )
    before = made.read_bytes()
    ran = run(made)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert re.fullmatch(r"made\.ipynb  \d+ s\n", ran.stdout)
    assert made.read_bytes() == before


def test_a_failing_cell_shows_its_traceback_and_leaves_the_file_alone(tmp_path: Path) -> None:
    made = written(tmp_path, "x = 1", "assert x == 2, 'x is not two'", "print('never')")
    before = made.read_bytes()
    ran = run("--write", made)
    assert ran.returncode == 1
    assert "assert x == 2" in ran.stderr
    assert "AssertionError: x is not two" in ran.stderr
    assert "\x1b" not in ran.stderr
    assert "failed" in ran.stdout
    assert made.read_bytes() == before
    assert list(tmp_path.iterdir()) == [made]


def test_a_cell_that_takes_too_long_fails(tmp_path: Path) -> None:
    made = written(tmp_path, "import time; time.sleep(60)")
    ran = run("--timeout", 1, made)
    assert ran.returncode == 1
    assert "time.sleep(60)" in ran.stderr


def test_write_stores_outputs(tmp_path: Path) -> None:
    made = written(tmp_path, "print('said')", "1 + 1")
    assert run("--write", made).returncode == 0
    said, two = outputs(made)
    assert said.text == "said\n"
    assert two.data["text/plain"] == "2"
    assert [cell.execution_count for cell in code_cells(made)] == [1, 2]
    assert not [cell.metadata for cell in code_cells(made) if cell.metadata]
    assert list(tmp_path.iterdir()) == [made]


@pytest.mark.parametrize("content", [None, "not a notebook", "{}"])
def test_what_is_no_notebook_is_refused_in_one_sentence(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "other.ipynb"
    if content is not None:
        path.write_text(content, "utf-8")
    ran = run(path)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith(f"{path} ")
    assert len(ran.stderr.splitlines()) == 1
