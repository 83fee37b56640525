"""``headlab steer`` on a tiny model: continuations, tables, files and refusals."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headlab as hl
from headlab.steering.recipes import BEHAVIOURS, RECIPES

TEXT = "w10 w11 w12 w13 w14 w15"
Run = Callable[..., Any]


def test_a_prompt_is_continued_without_and_with_the_method(run: Run, tiny_folder: Path) -> None:
    method = ("--method", "pasta", "--span", "w11 w12", "--strength", "0.001", "--heads", "0.*")
    done = run("steer", tiny_folder, *method, "--text", TEXT, "--tokens", 6, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    model = hl.load(str(tiny_folder))
    assert found["unsteered"] == str(model.generate(TEXT, max_new_tokens=6))
    with hl.steer(model, hl.steering.Pasta(spans=["w11 w12"], heads="0.*", alpha=0.001)):
        assert found["steered"] == str(model.generate(TEXT, max_new_tokens=6))
    assert found["steered"] != found["unsteered"]
    plain = run("steer", tiny_folder, *method, "--text", TEXT, "--tokens", 6)
    assert plain.out.splitlines()[0] == f"unsteered: {found['unsteered']}"


def test_an_evaluation_is_printed_and_written(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "fv.safetensors"
    options = ("--method", "function_vector", "--task", "plural", "--heads", "0.1,1.2")
    rest = ("--eval", "auto", "--strengths", "1,2", "-n", 6, "--controls", 2, "--out", out)
    done = run("steer", tiny_folder, *options, *rest, "--save", file)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == str((out / "steer.html").resolve())
    assert done.out.count("random") >= 2
    found = hl.steering.Evaluation.load(out / "evaluation.json")
    assert found.about["behaviour"] == "plural"
    assert list(found.frame["kind"]) == [
        "unsteered", "method", "random_direction", "method", "random_direction"
    ]  # fmt: skip
    assert found.frame["n"].tolist() == [6] * 5
    page = (out / "steer.html").read_text("utf-8")
    assert "default-src 'none'" in html.unescape(page[:1000])
    # What was saved is what was measured.
    again = run("steer", tiny_folder, "--load", file, "--task", "plural", *rest[:-2], "--json")
    assert again.code == 0, again.err
    rows = json.loads(again.out)["rows"]
    np.testing.assert_allclose([row["value"] for row in rows], found.frame["value"])
    learned = hl.steering.load(file)
    assert learned.heads == "L0H1, L1H2"


def test_a_learned_method_continues_a_prompt(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    model = hl.load(str(tiny_folder))
    vectors = hl.steering.HeadVectors.fit(model, [TEXT], ["w20 w21"], "1.*", factor=40.0)
    file = vectors.save(tmp_path / "v.safetensors")
    done = run("steer", tiny_folder, "--load", file, "--text", TEXT, "--tokens", 5, "--json")
    assert done.code == 0, done.err
    with hl.steer(model, vectors):
        assert json.loads(done.out)["steered"] == str(model.generate(TEXT, max_new_tokens=5))


def test_methods_are_listed_with_a_behaviour_that_exists(run: Run) -> None:
    done = run("steer", "--method", "list", "--json")
    assert done.code == 0
    rows = json.loads(done.out)
    assert [row["method"] for row in rows] == list(RECIPES)
    assert {row["behaviour"] for row in rows} <= set(BEHAVIOURS)
    assert "pasta" in run("steer", "--method", "list").out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "either --method or --load"),
        (("--method", "pasta", "--load", "x"), "either --method or --load"),
        (("--method", "nothing", "--text", TEXT), "there is no method 'nothing'"),
        (("--method", "pasta"), "give a prompt"),
        (("--method", "pasta", "--text", TEXT, "--eval", "auto"), "give a prompt"),
        (("--method", "pasta", "--text", TEXT), "name it with --span"),
        (("--method", "pasta", "--text", TEXT, "--span", "w99"), "is not in the prompt"),
        (("--method", "pasta", "--text", TEXT, "--span", "w11", "--heads", "9.9"), "9"),
        (("--method", "pasta", "--text", TEXT, "--span", "w11", "--strength", "0"), "above 0"),
        (("--method", "pasta", "--text", TEXT, "--strengths", "1"), "go with --eval"),
        (("--method", "pasta", "--eval", "zero_shot"), "marks no text of its own"),
        (("--method", "june", "--eval", "what"), "there is no behaviour 'what'"),
        (("--method", "june", "--eval", "auto", "--strengths", "a"), "must be numbers"),
        (("--method", "function_vector", "--eval", "auto", "--task", "x"), "x"),
        (("--load", "missing.safetensors", "--text", TEXT), "missing.safetensors"),
        (("--method", "pasta", "--text", TEXT, "--span", "w11", "--save", "x"), "learns nothing"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run, tiny_folder: Path, words: tuple[str, ...], sentence: str
) -> None:
    done = run("steer", tiny_folder, *words)
    assert done.code == 2
    assert done.out == ""
    said = done.err.strip().splitlines()
    assert sentence in said[-1]
    assert sum(line.startswith("headlab:") for line in said) == 1
