"""``headlab lookback fit``, ``score`` and ``generate``: what the Python API gives, and refusals in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headlab as hl
from headlab.lookback import LOOKBACK_SCHEMA, Lens, fit, generate, read_examples

FIT = ("--permutations", "3", "--window", "3")
PROMPT = "w10 w11 w12 w13 w14"


def records(n: int = 12) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = []
    for at in range(n):
        words = [f"w{i}" for i in rng.permutation(np.arange(4, 97))[:14]]
        response = words[2:7] if at % 2 else words[8:13]
        prompt = " ".join(words[:8]) + " w50 w51"
        made.append({"prompt": prompt, "response": " ".join(response), "label": at % 2})
        made[-1] |= {"document": f"d{at}", "cue": "w50 w51"}
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, records())), "utf-8")
    return path


@pytest.fixture
def lens(data: Path, tmp_path: Path, tiny_folder: Path) -> Path:
    model = hl.load(str(tiny_folder))
    return fit(model, read_examples(data), window=3, n_permutations=0).save(tmp_path / "made.json")


def test_fit_writes_what_fit_gives(
    run: Callable[..., Any], tiny_folder: Path, data: Path, tmp_path: Path
):
    out = tmp_path / "new" / "lens.json"
    done = run("lookback", "fit", tiny_folder, "--data", data, "--out", out, *FIT, "--json")
    assert done.code == 0, done.err
    model = hl.load(str(tiny_folder))
    expected = fit(model, read_examples(data), window=3, n_permutations=3)
    assert json.loads(done.out) == json.loads(expected.to_json())
    assert Lens.load(out).to_json() == expected.to_json()


def test_fit_says_what_it_found(
    run: Callable[..., Any], tiny_folder: Path, data: Path, tmp_path: Path
):
    out = tmp_path / "lens.json"
    options = ("--split", "paper", "--calibration", "isotonic", "--scaling", "standard")
    done = run(
        "lookback", "fit", tiny_folder, "--data", data, "-o", out, *FIT, *options, "--top", 2
    )
    assert done.code == 0, done.err
    assert "6 of 12 responses borne out, 18 of 36 spans; spans held out, documents not." in done.out
    assert "2 of 12 rows" in done.out
    assert str(out) in done.out
    about = Lens.load(out).about
    assert (about["split"], about["calibration"], about["scaling"]) == options[1::2]


def test_score_gives_what_score_gives(run: Callable[..., Any], tiny_folder: Path, lens: Path):
    given = ("--text", PROMPT, "--response", "w20 w21 w22 w23", "--cue", "w13 w14")
    done = run("lookback", "score", tiny_folder, "--lens", lens, *given, "--json")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)
    model = hl.load(str(tiny_folder))
    expected = Lens.load(lens).score(model, PROMPT, "w20 w21 w22 w23", cue="w13 w14")
    assert found["probability"] == pytest.approx(expected.probability)
    np.testing.assert_allclose(found["token_probability"], expected.token_probability)
    assert found["tokens"] == ["w20", "w21", "w22", "w23"]
    assert [(one["start"], one["stop"]) for one in found["windows"]] == [(0, 3), (1, 4)]
    own = run("lookback", "score", tiny_folder, "--lens", lens, "--text", PROMPT, "--tokens", 4)
    assert own.code == 0, own.err
    assert "Scored(" in own.out


def test_score_takes_a_file_of_responses(
    run: Callable[..., Any], tiny_folder: Path, lens: Path, data: Path
):
    done = run("lookback", "score", tiny_folder, "--lens", lens, "--data", data, "--json")
    assert done.code == 0, done.err
    found = [one["probability"] for one in json.loads(done.out)]
    model, made = hl.load(str(tiny_folder)), Lens.load(lens)
    expected = [made.score(model, one).probability for one in read_examples(data)]
    np.testing.assert_allclose(found, expected)


def test_generate_gives_what_generate_gives(
    run: Callable[..., Any], tiny_folder: Path, lens: Path, tmp_path: Path
):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, "utf-8")
    options = ("--tokens", 6, "--chunk", 3, "--candidates", 2, "--seed", 5, "--temperature", 1.5)
    command = ("lookback", "generate", tiny_folder, "--lens", lens, "--file", file, *options)
    done = run(*command, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    model = hl.load(str(tiny_folder))
    expected = generate(
        model, Lens.load(lens), PROMPT, 6, chunk=3, n_candidates=2, seed=5, temperature=1.5
    )
    assert found["ids"] == list(expected.ids)
    assert found["chunks"] == expected.chunks.to_dict("records")
    assert run(*command).out.strip() == expected.text.strip()


def test_the_schema_is_printed_and_data_checked(
    run: Callable[..., Any], tiny_folder: Path, data: Path
):
    assert json.loads(run("tasks", "schema", "lookback").out) == LOOKBACK_SCHEMA
    done = run("tasks", "check", "lookback", data, "--model", tiny_folder)
    assert (
        done.out.strip()
        == f"12 records fit the schema of lookback and can be used with {tiny_folder}"
    )
    data.write_text(json.dumps({"prompt": "w5 w6", "response": "w7", "cue": "w9"}), "utf-8")
    assert run("tasks", "check", "lookback", data).code == 0
    refused = run("tasks", "check", "lookback", data, "--model", tiny_folder)
    assert refused.code == 2
    assert "is not the end of the prompt" in refused.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("fit",), "with --data FILE"),
        (("fit", "--data", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("fit", "--data", "DATA", "--split", "random"), "split='random' must be one of"),
        (("fit", "--data", "DATA", "--scaling", "wide"), "scaling='wide' must be one of"),
        (("fit", "--data", "DATA", "--out", "FOLDER"), "is a folder"),
        (("fit", "--data", "ONE CLASS"), "every span is borne out"),
        (("score", "--text", PROMPT), "name a lens with --lens FILE"),
        (("score", "--lens", "nowhere.json", "--text", PROMPT), "nowhere.json holds no readable"),
        (("score", "--lens", "LENS"), "either --text or --file"),
        (("score", "--lens", "LENS", "--text", PROMPT, "--data", "DATA"), "either --data, or"),
        (("score", "--lens", "LENS", "--text", PROMPT, "--response", " "), "response is empty"),
        (("score", "--lens", "OTHER", "--text", PROMPT), "a model of 3 layers × 6 heads"),
        (("generate", "--lens", "LENS"), "either --text or --file"),
        (("generate", "--lens", "LENS", "--text", PROMPT, "--top-p", "2"), "top_p=2.0"),
        (("generate", "--lens", "LENS", "--text", PROMPT, "--tokens", "900"), "do not fit"),
    ],
)
def test_a_mistake_ends_in_one_sentence(
    command: tuple[str, ...],
    said: str,
    run: Callable[..., Any],
    tiny_folder: Path,
    data: Path,
    lens: Path,
    tmp_path: Path,
):
    one_class, other = tmp_path / "good.jsonl", tmp_path / "other.json"
    one_class.write_text("\n".join(json.dumps(one) for one in records()[1::2]), "utf-8")
    document = json.loads(lens.read_text("utf-8"))
    document |= {"shape": [3, 6], "weights": [0.0] * 18, "heads": []}
    other.write_text(json.dumps(document), "utf-8")
    words = {"DATA": data, "LENS": lens, "FOLDER": tmp_path, "ONE CLASS": one_class, "OTHER": other}
    done = run("lookback", command[0], tiny_folder, *(words.get(one, one) for one in command[1:]))
    assert done.code == 2
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("headlab: ")
    assert said in last
    assert done.out == ""
