"""``headlab maps``: numbers equal the API's, files and pages hold them, and wrong input is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relation_models import words

import headlab as hl
from headlab.parameters import Maps, maps


@pytest.fixture
def file(tmp_path: Path) -> Path:
    relation = words(name="mine")
    path = tmp_path / "mine.jsonl"
    record = {
        "name": "mine",
        "about": relation.about,
        "pairs": [list(pair) for pair in relation.pairs],
    }
    path.write_text(json.dumps(record) + "\n", "utf-8")
    return path


def test_json_is_what_maps_gives(run: Callable[..., Any], tiny_folder: Path, file: Path) -> None:
    done = run("maps", tiny_folder, "--relations", file, "--json")
    assert done.code == 0, done.err
    found = Maps.from_json(done.out)
    expected = maps(hl.load(str(tiny_folder)), str(file))
    np.testing.assert_allclose(found.frame["score"], expected.frame["score"], atol=1e-9)
    np.testing.assert_allclose(found.frame["p_value"], expected.frame["p_value"], rtol=1e-6)
    assert len(found.frame) == 2 * len(expected.frame[["layer", "head"]].drop_duplicates())


def test_files_and_page(
    run: Callable[..., Any], tiny_folder: Path, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("maps", tiny_folder, "-r", file, "--out", out)
    assert done.code == 0, done.err
    assert str(out / "maps.html") in done.out
    claimed = maps(hl.load(str(tiny_folder)), str(file)).frame["claimed"].sum()
    assert f"1 relation · {claimed} claim" in done.out
    assert Maps.from_json((out / "maps.json").read_text("utf-8")).names == ("mine",)
    page = (out / "maps.html").read_text("utf-8")
    assert "Operations in the weights of" in page
    assert page.count('id="figure-') == 2


def test_one_head_gets_a_card(
    run: Callable[..., Any], tiny_folder: Path, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("maps", tiny_folder, "-r", file, "--head", "L1H2", "--out", out)
    assert done.code == 0, done.err
    assert "L1H2 of" in done.out
    assert "Composition with other heads" in done.out
    card = json.loads((out / "card.json").read_text("utf-8"))
    assert card["head"] == "L1H2"
    assert card["behaviour"] == card["causal"] == []
    printed = run("maps", tiny_folder, "-r", file, "--head", "1.2", "--json")
    assert json.loads(printed.out) == card


def test_several_heads_are_mapped_alone(
    run: Callable[..., Any], tiny_folder: Path, file: Path
) -> None:
    done = run("maps", tiny_folder, "-r", file, "--head", "0.1, 1.*", "--json")
    heads = {(row["layer"], row["head"]) for row in json.loads(done.out)["rows"]}
    assert (0, 1) in heads
    assert (0, 0) not in heads


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-r", "no_such_relation"), "no_such_relation"),
        (("-r", "missing.jsonl"), "missing.jsonl"),
        (("-r", "antonym"), "no relation has 30 pairs"),
        (("--head", "L99H0", "-r", "FILE"), "L99H0"),
        (("--embedding", "other", "-r", "FILE"), "'auto', 'raw' or 'mlp'"),
        (("--multi-token", "guess", "-r", "FILE"), "must be skip or ends"),
        (("--min-pairs", "41", "-r", "FILE"), "40"),
    ],
)
def test_wrong_input_is_one_sentence(
    run: Callable[..., Any], tiny_folder: Path, file: Path, options: tuple[str, ...], says: str
) -> None:
    done = run("maps", tiny_folder, *(str(file) if part == "FILE" else part for part in options))
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
