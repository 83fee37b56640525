"""``headlab ablate``, ``patch`` and ``circuit`` on a tiny_folder model: numbers, files, pages and refusals."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headlab as hl
from headlab.causal import Circuit, Effects
from headlab.report.figures_page import PageTable, figures_page

CLEAN, CORRUPTED = "w10 w11 w12 w13 w14 w15", "w10 w11 w20 w13 w14 w15"
ANSWERS = ("--answer", "w30", "--foil", "w31")
PAIR = ("--clean", CLEAN, "--corrupted", CORRUPTED, *ANSWERS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    records = [
        {
            "clean": f"w{at} w11 w12 w13",
            "corrupted": f"w{at + 1} w11 w12 w13",
            "answer": "w40",
            "foil": "w41",
        }
        for at in range(10, 18)
    ]
    path.write_text("\n".join(map(json.dumps, records)), "utf-8")
    return path


def test_ablate_prints_what_ablate_each_gives(run: Callable[..., Any], tiny_folder: Path):
    done = run("ablate", tiny_folder, "--text", CLEAN, *ANSWERS, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    model = hl.load(str(tiny_folder))
    answers, foils = (model.tokenizer(word)["input_ids"] for word in ("w30", "w31"))
    expected = hl.causal.ablate_each(model, CLEAN, hl.metrics.logit_difference(answers, foils))
    found = [row["effect"] for row in document["effects"]]
    np.testing.assert_allclose(found, expected.frame["effect"], atol=1e-6)
    assert document["about"]["metric"] == "logit difference"


def test_named_heads_are_also_ablated_together(run: Callable[..., Any], tiny_folder: Path):
    done = run("ablate", tiny_folder, "--text", CLEAN, *ANSWERS, "--heads", "0.1,1.2")
    assert done.code == 0, done.err
    assert "All 2 together: logit difference" in done.out
    assert (
        "With 1 prompt none of 2 effects can pass correction by itself (q ≤ 0.05); 7 would do"
        in done.out
    )
    model = hl.load(str(tiny_folder))
    with model.edit(hl.ablate("0.1, 1.2")):
        last = model.logits(CLEAN)[0, -1]
    ids = [model.tokenizer(word)["input_ids"][0] for word in ("w30", "w31")]
    assert f"→ {float(last[ids[0]] - last[ids[1]]):.4g}." in done.out


@pytest.mark.parametrize("kind", ["mean", "resample", "first"])
def test_every_kind_of_ablation(
    run: Callable[..., Any], tiny_folder: Path, tmp_path: Path, kind: str
):
    reference = tmp_path / "reference.txt"
    reference.write_text("w50 w51 w52 w53\n\nw60 w61 w62 w63\n", "utf-8")
    more = ("--site", "pattern") if kind == "first" else ("--reference", reference)
    done = run("ablate", tiny_folder, "--text", CLEAN, "--kind", kind, *more, "--json")
    assert done.code == 0, done.err
    assert max(abs(row["effect"]) for row in json.loads(done.out)["effects"]) > 1e-4


def test_patch_writes_numbers_and_a_page_and_resumes(
    run: Callable[..., Any], tiny_folder: Path, file: Path, tmp_path: Path
):
    out = tmp_path / "out"
    done = run("patch", tiny_folder, "--data", file, "--out", out)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == str((out / "patching.html").resolve())
    # One effect alone could pass with 8 prompts; 12 at once cannot.
    assert "With 8 prompts none of 12 effects can pass correction by itself" in done.out
    effects = Effects.load(out / "patching.json")
    assert effects.values.shape == (12, 8)
    page = (out / "patching.html").read_text("utf-8")
    assert "default-src 'none'" in html.unescape(page[:1000])
    assert "Plotly.newPlot" in page
    assert "http-equiv" in page
    stamps = {path: path.stat().st_mtime_ns for path in (out / "parts").rglob("*.npz")}
    assert stamps
    again = run("patch", tiny_folder, "--data", file, "--out", out, "--json")
    assert json.loads(again.out) == json.loads((out / "patching.json").read_text("utf-8"))
    assert {path: path.stat().st_mtime_ns for path in (out / "parts").rglob("*.npz")} == stamps


def test_patching_by_position_and_layers(
    run: Callable[..., Any], tiny_folder: Path, tmp_path: Path
):
    done = run(
        "patch", tiny_folder, *PAIR, "--site", "resid_pre", "--positions", "each", "--out", tmp_path, "--json"
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = json.loads(done.out)["effects"]
    assert {(row["layer"], row["position"]) for row in rows} == {
        (layer, at) for layer in (0, 1) for at in range(2, 6)
    }
    at_first = next(row for row in rows if (row["layer"], row["position"]) == (0, 2))
    assert at_first["normalised"] == pytest.approx(1, abs=1e-4)  # the one token that differs
    assert (tmp_path / "patching.html").exists()


def test_two_prompts_without_an_answer_are_compared_by_kl(
    run: Callable[..., Any], tiny_folder: Path
):
    done = run("patch", tiny_folder, "--clean", CLEAN, "--corrupted", CORRUPTED, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["about"]["metric"] == "KL divergence"
    assert document["clean"] == [pytest.approx(0, abs=1e-6)]
    assert document["corrupted"][0] > 1e-3
    assert document["effects"][0]["ci_low"] is None  # one prompt


def test_pairs_can_be_checked_before_they_are_used(
    run: Callable[..., Any], tiny_folder: Path, file: Path, tmp_path: Path
):
    done = run("tasks", "check", "pairs", file, "--model", tiny_folder)
    assert done.out.startswith("8 records fit the schema of pairs and can be used")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"clean": "w11 w12", "corrupted": "w11", "answer": "w30"}), "utf-8")
    done = run("tasks", "check", "pairs", bad, "--model", tiny_folder)
    assert done.code == 2
    assert "clean prompt 0 has" in done.err


def test_circuit_writes_edges_that_can_be_read_back(
    run: Callable[..., Any], tiny_folder: Path, file: Path, tmp_path: Path
):
    done = run(
        "circuit", tiny_folder, "--data", file, "--edges", "20", "--steps", "2", "--out", tmp_path
    )
    assert done.code == 0, done.err
    assert "Faithfulness of this circuit, run exactly:" in done.out
    assert "CPR" in done.out
    found = Circuit.from_json((tmp_path / "circuit.json").read_text("utf-8"))
    assert 0 < len(found.scores) <= 20
    assert len(found.without_dead_ends().scores) == len(found.scores)
    assert (tmp_path / "circuit.html").read_text("utf-8").count("figure-") >= 2
    fast = run(
        "circuit", tiny_folder, "--data", file, "--method", "eap", "--no-faithfulness", "--json"
    )
    assert json.loads(fast.out)["kind"] == "edges"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ablate",), "exactly one of --text, --task and --data"),
        (("ablate", "--text", "a", "--task", "ioi"), "exactly one of"),
        (("ablate", "--task", "induction"), "there is no task 'induction'"),
        (("ablate", "--text", " "), "the text of --text is empty"),
        (("patch", "--text", CLEAN), "with --corrupted"),
        (("patch", *PAIR, "--positions", "first"), "must be 'each' or whole numbers"),
        (("ablate", "--text", CLEAN, "--foil", "w3"), "--foil needs --answer"),
        (("ablate", "--task", "ioi", "--answer", "w3"), "go with --text"),
        (("ablate", "--data", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("circuit", *PAIR, "--method", "acdc"), "there is no method 'acdc'"),
        (("circuit", *PAIR, "--ranking", "size"), "there is no ranking 'size'"),
        (("ablate", "--text", CLEAN, "--metric", "accuracy"), "there is no metric 'accuracy'"),
        (("ablate", "--text", CLEAN, "--kind", "mean"), "--kind mean needs --reference"),
        (("ablate", "--text", CLEAN, "--kind", "first"), "add --site pattern"),
        (("ablate", "--text", CLEAN, "--site", "everywhere"), "there is no site 'everywhere'"),
        (("ablate", "--text", CLEAN, "--positions", "each"), "is for patch"),
        (("ablate", "--text", CLEAN, "--answer", ""), "--answer is empty"),
        (("ablate", "--text", CLEAN, "--answer", "w30", "--foil", ""), "--foil is empty"),
        (("patch", "--clean", CLEAN, "--corrupted", " "), "the text of --corrupted is empty"),
        (("ablate", *PAIR), "--corrupted is for patch and circuit"),
        (("ablate", "--text", CLEAN, "--kind", "mean", "--reference", "nowhere.txt"), "nowhere.txt cannot be read"),
    ],
)  # fmt: skip
def test_wrong_options_are_told_before_a_model_is_loaded(
    run: Callable[..., Any], words: tuple[str, ...], said: str
):
    command, *rest = words
    done = run(command, "no-such-model", *rest)
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ablate", "--text", CLEAN, "--heads", "7.0"), "L7H0 does not exist"),
        (("ablate", "--text", CLEAN, "--heads", " "), "no head was named"),
        (("ablate", "--text", CLEAN, "--metric", "recall"), "needs --answer"),
        (("ablate", "--text", CLEAN, "--heads", "1.0", "--by", "layer"), "of the 6 heads of L1 only L1H0 is named"),
        (("ablate", "--text", CLEAN, "--positions", "9"), "names position 9, but prompt 0 has 6"),
        (("patch", *PAIR, "--positions", "-9"), "names position -9, but prompt 0 has 6"),
        (("ablate", "--text", CLEAN, "--by", "token"), "by='token' must be"),
        (("patch", "--clean", CLEAN, "--corrupted", "w10 w11", *ANSWERS), "has 6 tokens and its corrupted one 2"),
        (("patch", "--clean", CLEAN, "--corrupted", CLEAN, *ANSWERS), "the same, so patching changes nothing"),
        (("patch", *PAIR, "--direction", "back"), "'denoising' or 'noising'"),
        (("circuit", *PAIR, "--metric", "kl", "--method", "eap"), "has no slope there"),
        (("ablate", "--text", CLEAN, "--answer", "w3 w4"), "splits into 2 tokens"),
    ],
)  # fmt: skip
def test_what_only_the_model_can_tell_is_one_sentence(
    run: Callable[..., Any], tiny_folder: Path, words: tuple[str, ...], said: str
):
    command, *rest = words
    done = run(command, tiny_folder, *rest)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_page_lets_nothing_out_of_its_data():
    import pandas as pd
    import plotly.graph_objects as go

    evil = "</script><script>alert(1)</script>"
    figure = go.Figure(go.Scatter(x=[1], y=[2], text=[evil]))
    table = PageTable.of(pd.DataFrame({"name": [evil], "value": [0.5]}), evil)
    page = figures_page(evil, [evil], [figure], [table], [evil])
    assert "<script>alert" not in page
    assert page.count("<script>") == 2
