"""Focus directions against shifted scores in float64; what training raises, and what a key-side direction does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from exact_pair import pair, singles
from test_capture import ids_of, ragged
from test_generate import padded
from tiny_models import tiny_tokenizer
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import HeadError, PlanError, PromptError
from headlab.steering import FocusDirections, compare_sides, gold_mass
from headlab.steering.learned import shape_of
from headlab.tasks import DocumentPrompt, DocumentQuestion, document_prompt

Lab = Callable[..., Any]
FAMILIES = ["llama", "gpt2"]
HEADS_OF = {0: (1,), 1: (0, 2)}
HEADS = "L0H1, L1H0, L1H2"
FACTOR = 0.7


def directions(model: hl.Model, factor: float = FACTOR) -> FocusDirections:
    drawn = torch.randn(3, model.spec.d_head, generator=torch.Generator().manual_seed(4))
    return FocusDirections(HEADS, shape_of(model), drawn.double(), HEADS, (), factor)


def shifted(model: hl.Model, factor: float = FACTOR) -> Callable[[int], dict[str, Any]]:
    """Scores plus scaling · factor · q̂·k, by a line of its own."""
    vectors = dict(zip(["01", "10", "12"], directions(model).directions, strict=True))
    keys: dict[int, Tensor] = {}

    def look(k: Tensor, layer: int) -> Tensor:
        keys[layer] = k.clone()
        return k

    def scores(s: Tensor, layer: int) -> Tensor:
        s = s.clone()
        for head in HEADS_OF[layer]:
            drawn = keys[layer][:, :, head] @ vectors[f"{layer}{head}"]  # [batch, key]
            s[:, head] += model.spec.layers[layer].scaling * factor * drawn[:, None]
        return s

    return lambda start: {"k": look, "scores": scores}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_shifted_scores(family: str) -> None:
    both, ids = pair(family), ragged((11, 6, 8))
    plain = both.model.logits(ids)
    with hl.steer(both.model, directions(both.model)):
        steered = both.model.logits(ids)
    for row, tokens in enumerate(singles(ids)):
        n = len(tokens)
        expected = both.logits(tokens, **shifted(both.model)(n))
        torch.testing.assert_close(steered[row, :n], expected, atol=1e-10, rtol=0)
        assert float((expected - plain[row, :n]).abs().max()) > 1e-3
    assert torch.equal(both.model.logits(ids)[ids >= 0], plain[ids >= 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_single_passes_token_for_token(family: str) -> None:
    both, ids = pair(family), ragged((11, 6, 8), seed=3)
    rows = [both.greedy(tokens, 7, shifted(both.model, 3.0)) for tokens in singles(ids)]
    with hl.steer(both.model, directions(both.model, 3.0)):
        new = both.model.generate(ids, max_new_tokens=7, eos_token_id=None).ids
    assert new.tolist() == padded(rows, 7)
    assert (
        new.tolist() != both.model.generate(ids, max_new_tokens=7, eos_token_id=None).ids.tolist()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_direction_added_to_every_key_cancels(family: str) -> None:
    model, ids = pair(family).model, ragged((11, 6))
    vector = 3 * torch.randn(model.spec.d_head, generator=torch.Generator().manual_seed(1)).double()
    plain = model.logits(ids)
    with model.edit(hl.add("*.*", vector, "k")):
        torch.testing.assert_close(model.logits(ids), plain, atol=1e-9, rtol=0, equal_nan=True)
    with model.edit(hl.add("*.*", vector, "q")):
        assert float((model.logits(ids) - plain).nan_to_num().abs().max()) > 0.1
    found = compare_sides(model, ids, "*.*", vector)
    assert found["key"] < 1e-9
    assert found["query"] > 0.1


def test_under_a_soft_cap_a_key_side_direction_does_not_cancel() -> None:
    model = hl.load(exact("gemma2"), tokenizer=tiny_tokenizer())
    assert compare_sides(model, ids_of(), "*.*", torch.ones(model.spec.d_head))["key"] > 1e-3


# -- training ----------------------------------------------------------------------------------------------------------


def examples(n: int, length: int = 12, seed: int = 0) -> list[DocumentPrompt]:
    ids = ids_of(length, n, seed)
    return [
        DocumentPrompt(tuple(row.tolist()), 9, ((1, 4), (4, 7)), at % 2, "w9", None)
        for at, row in enumerate(ids)
    ]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("rows", ["token", "predicting"])
def test_the_training_loss_is_the_mass_that_the_model_pays(
    lab: Lab, family: str, rows: Any
) -> None:
    """Heads of one layer do not see each other, so that what training computes is what steering does."""
    model, given = lab(family), examples(3)
    found = FocusDirections.fit(model, given, "1.*", rows=rows, epochs=1, lr=0.0, factor=1.0)
    large = found._with(directions=40 * found.directions)
    for method, losses in ((found, found.losses), (large, None)):
        with hl.steer(model, method):
            mass = gold_mass(model, given, "1.*", rows=rows)
        if losses is not None:
            assert losses[0] == pytest.approx(-mass.mean(), abs=1e-6)
    plain = gold_mass(model, given, "1.*", rows=rows)
    assert float(np.abs(mass - plain).max()) > 1e-3  # directions that are felt
    shift = 0 if rows == "token" else 1
    for at, example in enumerate(given):
        start, stop = example.documents[example.gold]
        ids = torch.tensor([example.ids])
        trace = model.trace(ids, keep=hl.keep.tensors("pattern", layers=[1]), logits="none")
        by_hand = (
            trace.tensor("pattern", 1)[0, :, 9 - shift : 12 - shift, start:stop].sum(-1).mean(-1)
        )
        np.testing.assert_allclose(plain[at], by_hand, atol=1e-6)


def test_training_raises_the_mass_and_is_the_same_for_a_seed(lab: Lab) -> None:
    model, given = lab("llama"), examples(4)
    settings: dict[str, Any] = {"epochs": 30, "lr": 0.05, "factor": 1.0}
    told: list[str] = []
    found = FocusDirections.fit(model, given, "1.*", tell=told.append, **settings)
    assert len(told) == 4 + 30
    assert len(found.losses) == 30
    assert found.losses[-1] < found.losses[0] - 0.05
    with hl.steer(model, found):
        mass = gold_mass(model, given, "1.*").mean()
    assert mass == pytest.approx(-found.losses[-1], abs=0.02)
    assert torch.equal(
        FocusDirections.fit(model, given, "1.*", **settings).directions, found.directions
    )
    other = FocusDirections.fit(model, given, "1.*", seed=1, **settings)
    assert not torch.equal(other.directions, found.directions)


@cache
def reader() -> hl.Model:
    heads = {"L0H2": "sink", "L1H1": "contextual"}
    made = planted.model("llama", heads, distractors=2, max_context=192, n_layers=2)
    return hl.load(made.module, tokenizer=made.tokenizer)


def water(n: int, seed: int, scrambled: bool = False) -> list[DocumentPrompt]:
    """One document of planted topic words and three of plain ones, whose places vary, and a response of that topic."""
    model, rng = reader(), np.random.default_rng(seed)
    plain = [
        "stone",
        "garden",
        "market",
        "summer",
        "paper",
        "bread",
        "forest",
        "valley",
        "bridge",
        "road",
    ]
    found = []
    for at in range(n):
        texts = [" ".join(rng.choice(plain, 6, replace=False)) for _ in range(4)]
        gold = at % 4
        texts[gold] = " ".join(
            rng.permutation(["river", "rain", "fish", "ship", *rng.choice(plain, 2)])
        )
        called = int((gold + rng.integers(1, 4)) % 4) if scrambled else gold
        template = "{documents} {question}"
        asked = DocumentQuestion(tuple(texts), called, "the small village", "fish", template)
        found.append(document_prompt(model.tokenizer, asked, response="rain ship"))
    return found


def test_directions_raise_held_out_mass_and_scrambled_labels_do_not() -> None:
    model, held_out = reader(), water(4, seed=9)
    before = gold_mass(model, held_out, "1.1").mean()

    def gained(train: list[DocumentPrompt], held: list[DocumentPrompt]) -> float:
        found = FocusDirections.fit(model, train, "1.1", epochs=12, lr=0.1, factor=1.0)
        plain = gold_mass(model, held, "1.1").mean()
        with hl.steer(model, found):
            return float(gold_mass(model, held, "1.1").mean() - plain)

    assert 0.05 < before < 0.9
    right = gained(water(8, seed=1), held_out)
    assert right > 0.05
    wrong = gained(water(8, seed=1, scrambled=True), held_out)
    assert wrong < 0.2 * right


# -- as a learned method -----------------------------------------------------------------------------------------------


def test_it_is_put_at_other_trained_heads_saved_and_randomised(lab: Lab, tmp_path: Path) -> None:
    model, ids = lab("llama"), ids_of()
    found = FocusDirections.fit(model, examples(2), "*.*", epochs=2, factor=5.0)
    assert found.heads == found.trained
    one = found.on([(1, 2), "0.1"])
    assert one.heads == "L0H1, L1H2"
    assert found.on((1, 2)).heads == "L1H2"
    assert found.on("1.*").heads == "1.*"
    with hl.steer(model, one):
        expected = model.logits(ids)
    rows = [hl.parse_heads("*.*", model.spec).index(head) for head in [(0, 1), (1, 2)]]
    edits = [
        hl.add(name, 5.0 * found.directions[row], "q")
        for name, row in zip(["0.1", "1.2"], rows, strict=True)
    ]
    with model.edit(*edits):
        torch.testing.assert_close(model.logits(ids), expected, atol=1e-6, rtol=0)
    again = hl.steering.load(one.save(tmp_path / "focus.safetensors"))
    assert isinstance(again, FocusDirections)
    assert (again.factor, again.losses) == (5.0, found.losses)
    with hl.steer(model, again):
        assert torch.equal(model.logits(ids), expected)
    turned = found.randomised(3)
    torch.testing.assert_close(turned.directions.norm(dim=-1), found.directions.norm(dim=-1))
    cosine = torch.cosine_similarity(turned.directions, found.directions, dim=-1)
    assert float(cosine.abs().mean()) < 0.6
    assert found.at(0.5).factor == 0.5


def test_what_cannot_be_learned_or_steered_is_refused(lab: Lab) -> None:
    model, given = lab("llama"), examples(2)
    with pytest.raises(PlanError, match="at least one example"):
        FocusDirections.fit(model, [])
    with pytest.raises(PromptError, match="no response"):
        FocusDirections.fit(model, [replace(given[0], start=12)])
    with pytest.raises(HeadError, match="L7H0"):
        FocusDirections.fit(model, given, "7.0")
    with pytest.raises(PlanError, match="'token' or 'predicting'"):
        FocusDirections.fit(model, given, rows="last")  # type: ignore[arg-type]
    for family, why in (("gpt_oss", "sink logits"), ("t5", "decoders")):
        with pytest.raises(PlanError, match=why):
            FocusDirections.fit(lab(family), given)
    found = FocusDirections.fit(model, given, "1.*", epochs=1)
    with pytest.raises(PlanError, match="L0H1 has no focus direction"):
        found.on("L0H1")
    with pytest.raises(PlanError, match="has no focus direction"), hl.steer(model, found.on("*.*")):
        pass
    with pytest.raises(PlanError, match="d_head"), hl.steer(lab("gpt2"), found):
        pass
