"""A lens scores, is kept as JSON, is carried to another model, and guides decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from planted_lookback import answers, reads

import headlab as hl
from headlab.errors import OutputError, PlanError, PromptError
from headlab.lookback import (
    Calibrator,
    Example,
    Guided,
    Lens,
    Linear,
    fit,
    generate,
    ratios,
    transfer,
)
from headlab.lookback.statistics import auroc


@pytest.fixture(scope="module")
def model() -> hl.Model:
    return hl.load(reads())


@pytest.fixture(scope="module")
def lens(model: hl.Model) -> Lens:
    return fit(model, answers(40, seed=0), n_permutations=0)


def by_hand(lens: Lens, features: np.ndarray) -> np.ndarray:
    """Probabilities by the calibrated logistic, one span a row."""
    slope, offset = lens.calibrator.x
    logit = features.astype(float) @ lens.linear.weights + lens.linear.intercept
    return 1 / (1 + np.exp(-(slope * logit + offset)))


def test_a_score_is_the_logistic_of_mean_ratios(model: hl.Model, lens: Lens):
    example = answers(2, seed=3)[1]
    scored = lens.score(model, example)
    flat = ratios(model, example)[0].reshape(14, -1)
    np.testing.assert_allclose(scored.token_probability, by_hand(lens, flat), atol=1e-9)
    assert scored.probability == pytest.approx(by_hand(lens, flat.mean(0)), abs=1e-6)
    windows = np.stack([flat[at : at + 8].mean(0) for at in range(7)])
    np.testing.assert_allclose(scored.windows["probability"], by_hand(lens, windows), atol=1e-6)
    assert scored.windows["start"].tolist() == list(range(7))
    assert (scored.windows["stop"] - scored.windows["start"] == 8).all()
    assert list(scored.tokens) == [model.text([token]) for token in example.response]


def test_text_alone_is_a_prompt_that_the_model_answers_itself(model: hl.Model, lens: Lens):
    prompt = "river stone house garden window market winter summer river stone"
    scored = lens.score(model, prompt, max_new_tokens=5)
    own = model.generate(prompt, max_new_tokens=5).texts[0]
    assert scored.response == own
    assert scored.response.startswith("house garden")
    given = lens.score(model, prompt, own)
    assert given.probability == pytest.approx(scored.probability)
    assert "probability" in repr(scored)


def test_an_answer_that_ends_at_once_is_refused(
    model: hl.Model, lens: Lens, monkeypatch: pytest.MonkeyPatch
):
    prompt = "river stone house garden river stone"
    house = model.tokens("house")[0, -1]
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", int(house))
    with pytest.raises(PromptError, match="answers this prompt with nothing"):
        lens.score(model, prompt)


def test_a_lens_comes_back_from_its_file(model: hl.Model, lens: Lens, tmp_path: Path):
    path = lens.save(tmp_path / "new" / "lens.json")
    again = Lens.load(path)
    np.testing.assert_array_equal(again.linear.weights, lens.linear.weights)
    assert again.linear.intercept == lens.linear.intercept
    assert (again.calibrator, again.shape, again.window) == (
        lens.calibrator,
        lens.shape,
        lens.window,
    )
    pd.testing.assert_frame_equal(again.heads, lens.heads, check_dtype=False)
    assert again.about == lens.about
    np.testing.assert_equal(again.figures, lens.figures)  # NaN, where nothing was shuffled, too
    assert again.to_json() == lens.to_json()
    example = answers(2, seed=3)[0]
    assert again.score(model, example).probability == lens.score(model, example).probability


@pytest.mark.parametrize("calibration", ["isotonic", "none"])
def test_every_calibration_comes_back(model: hl.Model, calibration: Any, tmp_path: Path):
    made = fit(model, answers(20, seed=0), calibration=calibration, n_permutations=0)
    again = Lens.load(made.save(tmp_path / "lens.json"))
    assert again.calibrator == made.calibrator


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.pop(key)


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.update({key: value})


@pytest.mark.parametrize(
    "tamper",
    [
        _with("format", "headlab-lookback-9"),
        _with("shape", [4, 5]),
        _with("shape", [-4, -4]),
        _with("shape", [4]),
        _with("weights", [float("nan")] * 16),
        _with("weights", ["x"] * 16),
        _with("intercept", float("inf")),
        _with("intercept", "1"),
        _with("window", 0),
        _with("window", 1.5),
        _with("calibrator", {"kind": "platt", "x": [1.0], "y": []}),
        _with("calibrator", {"kind": "isotonic", "x": [1.0, 0.0], "y": [0.0, 1.0]}),
        _with("calibrator", {"kind": "isotonic", "x": [0.0, 1.0], "y": [0.0, 1.5]}),
        _with("calibrator", {"kind": ["platt"], "x": [1.0, 0.0], "y": []}),
        _with("heads", [{"layer": 0}]),
        _with("heads", 3),
        _with("figures", [1]),
        _with("about", 3),
        _without("weights"),
        _without("calibrator"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused(
    tamper: Callable[[dict[str, Any]], Any], lens: Lens, tmp_path: Path
):
    document = json.loads(lens.to_json())
    tamper(document)
    path = tmp_path / "lens.json"
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(OutputError, match=r"lens\.json") as refused:
        Lens.load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"format": 1}', "[" * 100_000, "\x80\x04K\x01."]
)
def test_a_file_that_holds_no_lens_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "lens.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OutputError, match=r"lens\.json"):
        Lens.load(path)
    with pytest.raises(OutputError, match="nowhere"):
        Lens.load(tmp_path / "nowhere.json")


def test_a_model_of_another_shape_is_refused(lens: Lens):
    other = hl.load(reads("gpt2", n_heads=6, seed=3))
    said = r"a model of 4 layers × 4 heads, and .* has 4 × 6"
    for act in (
        lambda: lens.score(other, answers(1, seed=0)[0]),
        lambda: generate(other, lens, "river stone"),
        lambda: transfer(lens, other, other, answers(6, seed=0)),
    ):
        with pytest.raises(PlanError, match=said):
            act()


def test_a_lens_is_carried_to_another_model_without_labels(model: hl.Model, lens: Lens):
    other = hl.load(reads("gpt2", n_heads=6, seed=3))
    unlabelled = [
        Example(one.prompt, one.response, document=one.document) for one in answers(40, seed=5)
    ]
    carried = lens.transfer(other, model, unlabelled)
    assert carried.shape == (4, 6)
    assert carried.figures["map_r2"] > 0.8
    assert "auroc" not in carried.figures
    new = answers(40, seed=9)
    found = np.array([carried.score(other, one).probability for one in new])
    assert auroc(found, np.arange(40) % 2) == 1.0
    again = transfer(lens, other, model, answers(40, seed=5))
    np.testing.assert_array_equal(again.linear.weights, carried.linear.weights)
    assert again.figures["auroc"] == 1.0
    assert again.about["transferred_from"] == model.name


def test_a_map_of_unrelated_answers_explains_nothing(model: hl.Model, lens: Lens):
    """The held-out share explained is not bought by fitting: with the copying head gone there is nothing to map."""
    blind = hl.load(hl.planted.scramble(reads("gpt2", n_heads=6, seed=3), "L2H1", "qk"))
    assert transfer(lens, blind, model, answers(40, seed=5)).figures["map_r2"] < 0.3


def test_transfer_needs_documents(model: hl.Model, lens: Lens):
    with pytest.raises(PlanError, match="4 documents are too few"):
        transfer(lens, model, model, answers(4, seed=0))


def continued(prompt: tuple[int, ...], new: tuple[int, ...]) -> float:
    """Share of new tokens that follow the one before them somewhere in the prompt."""
    pairs = set(pairwise(prompt))
    said = [prompt[-1], *new]
    return float(np.mean([pair in pairs for pair in pairwise(said)]))


def test_guided_decoding_keeps_to_the_context_more_than_sampling(model: hl.Model, lens: Lens):
    # The last word is nowhere in the context, so that nothing but chance begins a copy.
    prompts = [one.prompt for one in answers(12, seed=77)[::2]]
    guided, plain = (
        [
            continued(
                prompt, generate(model, lens, prompt, 16, chunk=4, n_candidates=n, seed=at).ids
            )
            for at, prompt in enumerate(prompts)
        ]
        for n in (8, 1)
    )
    assert min(guided) >= 0.8
    assert np.mean(guided) > np.mean(plain) + 0.1


def test_a_chosen_chunk_is_the_best_and_scored_as_in_one_pass(model: hl.Model, lens: Lens):
    prompt = answers(1, seed=8)[0].prompt
    made = generate(model, lens, prompt, 10, chunk=4, n_candidates=5, seed=3)
    assert isinstance(made, Guided)
    assert len(made.ids) == 10
    assert str(made) == made.text == model.text(made.ids, special=False)
    assert made.chunks.groupby("chunk").size().tolist() == [5, 5, 5]
    flat = ratios(model, Example(prompt, made.ids))[0].reshape(10, -1)
    for at, part in made.chunks.groupby("chunk"):
        best = part[part["chosen"]]
        assert len(best) == 1
        assert best["probability"].item() == part["probability"].max()
        own = flat[at * 4 : at * 4 + 4].mean(0)
        assert best["probability"].item() == pytest.approx(by_hand(lens, own), abs=1e-4)
    same = generate(model, lens, prompt, 10, chunk=4, n_candidates=5, seed=3)
    assert same.ids == made.ids
    assert generate(model, lens, prompt, 10, chunk=4, n_candidates=5, seed=4).ids != made.ids


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gpt_oss"])
def test_a_chunk_from_a_cache_is_scored_as_in_one_pass(family: str, lab: Callable[..., Any]):
    model = lab(family)  # windows of mistral and gpt_oss are shorter than the prompt
    shape = (model.spec.n_layers, model.spec.layers[0].n_heads)
    weights = np.random.default_rng(0).normal(size=shape[0] * shape[1])
    lens = Lens(Linear(weights, 0.3), Calibrator(), shape, 3, pd.DataFrame(), {}, {})
    prompt = "w20 w21 w22 w23 w24 w25 w26 w27 w28"
    made = generate(model, lens, prompt, 9, cue="w27 w28", chunk=3, n_candidates=4, seed=1)
    flat = ratios(model, Example(prompt, made.ids, cue="w27 w28"))[0].reshape(len(made.ids), -1)
    best = made.chunks[made.chunks["chosen"]]["probability"]
    logits = [flat[at : at + 3].mean(0) @ weights + 0.3 for at in range(0, len(made.ids), 3)]
    np.testing.assert_allclose(best, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)


def test_guided_decoding_stops_where_the_model_does(
    model: hl.Model, lens: Lens, monkeypatch: pytest.MonkeyPatch
):
    copied = answers(2, seed=8)[1]
    end = copied.response[5]
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", end)
    made = generate(model, lens, copied.prompt, 14, chunk=4, temperature=0.2, seed=0)
    assert made.ids == copied.response[:6]
    assert made.chunks["chunk"].max() == 1


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"chunk": 0}, PlanError, "chunk=0"),
        ({"n_candidates": 0}, PlanError, "n_candidates=0"),
        ({"top_p": 0}, PlanError, "top_p=0"),
        ({"top_p": 1.2}, PlanError, "top_p=1.2"),
        ({"temperature": 0.0}, PlanError, "temperature=0.0"),
        ({"temperature": "hot"}, PlanError, "temperature='hot'"),
        ({"max_new_tokens": 0}, PlanError, "max_new_tokens=0"),
        ({"max_new_tokens": 600}, PromptError, "do not fit the context of 512"),
        ({"seed": -1}, PlanError, "seed=-1"),
        ({"prompt": " "}, PromptError, "the text is empty"),
        ({"cue": "stone house"}, PromptError, "is not the end of the prompt"),
    ],
)
def test_guided_decoding_that_cannot_be_is_refused(
    change: dict[str, Any], error: type[Exception], said: str, model: hl.Model, lens: Lens
):
    with pytest.raises(error, match=said):
        generate(model, lens, **{"prompt": "river stone", **change})


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("river stone", " "), PromptError, "the response is empty"),
        (("", "river"), PromptError, "the text is empty"),
        ((7, "river"), PromptError, "a prompt is"),
        ((["river stone", "house"], "river"), PromptError, "one prompt and one response"),
        ((Example("river stone", "house"), "garden"), PlanError, "its own response and cue"),
    ],
)
def test_a_score_that_cannot_be_is_refused(
    given: tuple[Any, ...], error: type[Exception], said: str, model: hl.Model, lens: Lens
):
    with pytest.raises(error, match=said):
        lens.score(model, *given)
