"""The analyses run on any model, and say which published figure belongs to which model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import headlab as hl
from headlab import planted

FOLDER = Path(__file__).resolve().parent.parent / "analyses"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in (*SCRIPTS, "common"):
        sys.modules.pop(name, None)


@cache
def small() -> hl.Model:
    heads = {"L0H2": "sink", "L1H0": "previous_token", "L2H1": "induction"}
    made = planted.model("llama", heads, n_heads=8, distractors=6, max_context=768)
    return hl.load(made.module, tokenizer=made.tokenizer)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_sets_figures_beside_published_ones(name: str):
    script = load(name)
    figures = script.run(small(), 0, 3)
    assert figures
    assert all(figure.what for figure in figures)
    measured = not figures[0].note.startswith("not measurable")
    assert any(figure.published is not None for figure in figures) or not measured
    for figure in figures:
        # A planted model is nobody's published model.
        assert not figure.comparable
        if figure.published is not None:
            assert figure.published_for, figure.what
    assert script.__doc__
    json.dumps([vars(figure) for figure in figures])


def test_a_script_ends_a_mistake_in_one_sentence(capsys: pytest.CaptureFixture[str]):
    common = load("common")
    with pytest.raises(SystemExit) as ended:
        common.main(load(SCRIPTS[0]).run, "About.", ["--model", "no-such-folder/anywhere"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert "no-such-folder/anywhere" in said


def test_models_are_known_by_the_last_part_of_their_name():
    common = load("common")
    module = small().module
    assert common.is_model(hl.Model(module, name="openai-community/gpt2"), "gpt2")
    assert common.is_model(hl.Model(module, name="/models/GPT2/"), "openai-community/gpt2")
    assert not common.is_model(hl.Model(module, name="gpt2-medium"), "gpt2")


def test_the_table_shows_ours_beside_the_published(capsys: pytest.CaptureFixture[str]):
    common = load("common")
    figures = [
        common.Figure("heads", 0.25, 0.5, "gpt2", True, "as asked"),
        common.Figure("none", None, None),
    ]
    common.show("mine", "A title.\n\nMore.", figures)
    said = capsys.readouterr().out
    for part in ("A title.", "0.25", "0.5", "gpt2 (same model)", "as asked", "–"):
        assert part in said
