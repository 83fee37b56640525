"""Value edits: what is taken of the source and where it is put, against a twin steered by hand in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exact_pair import pair, singles
from oracle import assert_close
from test_capture import ids_of, ragged
from torch import Tensor

import headlab as hl
from headlab.errors import HeadError, PlanError, PromptError
from headlab.steering import ValueEdit

FAMILIES = {"llama": ((0, 1), (1, 4)), "gpt2": ((0, 1), (1, 2))}
CLOSE = 1e-5  # values are kept in float32
SOURCE = ids_of(7, 1, seed=4)
SPANS = [(1, 4), (-2, -1)]


def learned(family: str, **options: Any) -> ValueEdit:
    heads = ", ".join(f"{layer}.{head}" for layer, head in FAMILIES[family])
    return ValueEdit.fit(pair(family).model, SOURCE, heads, **{"spans": SPANS} | options)


def by_hand(family: str, heads: tuple[tuple[int, int], ...], factor: float) -> Any:
    """v + c·(mean v of the source) at the last token of each span of a prompt of ``start`` tokens."""
    source = pair(family).values("v", SOURCE[0])

    def rewrites(start: int) -> dict[str, Any]:
        def change(v: Tensor, layer: int) -> Tensor:
            v = v.clone()
            for where, head in heads:
                if where == layer:
                    v[0, [3, start - 2], head] += factor * source[layer][:, head].mean(0)
            return v

        return {"v": change}

    return rewrites


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_means_over_all_tokens_of_the_source(family: str) -> None:
    method = learned(family)
    v = pair(family).values("v", SOURCE[0])
    expected = torch.stack([v[layer][:, head].mean(0) for layer, head in FAMILIES[family]])
    assert_close(method.values, expected, CLOSE)
    with pair(family).model.edit(hl.scale("*.*", "z", by=3.0)):
        assert torch.equal(learned(family).values, method.values)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_added_at_the_last_token_of_each_span(family: str, padding: str) -> None:
    this, ids = pair(family), ragged((9, 6, 7), padding=padding)
    rewrites = by_hand(family, FAMILIES[family], 3.0)
    with hl.steer(this.model, learned(family, factor=3.0)):
        last = this.model.trace(ids, logits="last").logits[:, 0]
        new = this.model.generate(ids, max_new_tokens=6, eos_token_id=None).ids
        whole = this.model.logits(ids)
    for at, row in enumerate(singles(ids)):
        expected = this.logits(row, **rewrites(len(row)))
        assert_close(last[at], expected[-1], CLOSE)
        if padding == "right":
            assert_close(whole[at, : len(row)], expected, CLOSE)
        assert new[at].tolist() == this.greedy(row, 6, rewrites)
        change = (expected - this.logits(row)).abs().amax(-1)
        assert float(change[:3].max()) < CLOSE  # nothing before the first span ends
        assert float(change[3:].max()) > 1e-3


def test_other_heads_of_a_group_keep_their_values_unless_all_are_wanted() -> None:
    # Of the 6 query heads 0, 1, 2 share a value head, as do 3, 4, 5.
    this, row = pair("llama"), ids_of(9, 1)[0]
    groups = (*((0, head) for head in (0, 1, 2)), *((1, head) for head in (3, 4, 5)))
    found = []
    for whole, heads in ((False, FAMILIES["llama"]), (True, groups)):
        method = learned("llama", factor=-2.0, whole_group=whole)
        assert method.heads == ", ".join(f"L{layer}H{head}" for layer, head in heads)
        with hl.steer(this.model, method):
            found.append(this.model.logits(row[None])[0])
        assert_close(found[-1], this.logits(row, **by_hand("llama", heads, -2.0)(9)), CLOSE)
    assert float((found[0] - found[1]).abs().max()) > 1e-3


def test_heads_of_one_group_are_edited_once() -> None:
    one = ValueEdit.fit(pair("llama").model, SOURCE, "0.1", SPANS, whole_group=True)
    two = ValueEdit.fit(pair("llama").model, SOURCE, "0.1, 0.2", SPANS, whole_group=True)
    assert sorted(one.heads.split(", ")) == sorted(two.heads.split(", "))


def test_every_prompt_may_have_a_source_of_its_own() -> None:
    this, ids, sources = pair("llama"), ragged((9, 6, 7)), ragged((5, 8, 4), seed=3)
    method = ValueEdit.fit(this.model, sources, "0.1, 1.4", SPANS, factor=2.0)
    assert method.values.shape == (3, 2, 10)
    with hl.steer(this.model, method):
        last = this.model.trace(ids, logits="last").logits[:, 0]
        new = this.model.generate(ids, max_new_tokens=4, eos_token_id=None).ids
    for at, (row, source) in enumerate(zip(singles(ids), singles(sources), strict=True)):
        v = this.values("v", source)

        def rewrites(start: int, v: list[Tensor] = v) -> dict[str, Any]:
            def change(x: Tensor, layer: int) -> Tensor:
                x, head = x.clone(), (1, 4)[layer]
                x[0, [3, start - 2], head] += 2 * v[layer][:, head].mean(0)
                return x

            return {"v": change}

        assert_close(last[at], this.logits(row, **rewrites(len(row)))[-1], CLOSE)
        assert new[at].tolist() == this.greedy(row, 4, rewrites)


def test_words_are_found_in_every_prompt() -> None:
    this = pair("llama")
    tokenizer = this.model.tokenizer
    row = ids_of(9, 1)[0]
    word = tokenizer.decode([int(row[3])]).strip()
    method = ValueEdit.fit(this.model, SOURCE, "0.1", [word], factor=4.0)
    moved = torch.cat([row[3:4], row[:3], row[4:]])  # the same word first
    with hl.steer(this.model, method):
        got = this.model.logits(torch.stack([row, moved]))
    source = this.values("v", SOURCE[0])[0][:, 1].mean(0)
    for at, (ids, place) in enumerate(((row, 3), (moved, 0))):

        def change(v: Tensor, layer: int, place: int = place) -> Tensor:
            v = v.clone()
            if layer == 0:
                v[:, place, 1] += 4 * source
            return v

        assert_close(got[at], this.logits(ids, v=change), CLOSE)


def test_other_spans_and_random_directions() -> None:
    method = learned("llama")
    assert method.marking([(0, 1)]).spans == [(0, 1)]
    turned = method.randomised(1)
    assert_close(turned.values.norm(dim=-1), method.values.norm(dim=-1), 1e-6)
    assert not torch.equal(turned.values, method.values)
    assert torch.equal(turned.values, method.randomised(1).values)
    assert method.at(6.0).factor == 6.0


def test_the_model_is_bit_equal_afterwards() -> None:
    model, ids = pair("llama").model, ids_of()
    plain = model.logits(ids)
    with hl.steer(model, learned("llama", factor=9.0)):
        assert not torch.equal(model.logits(ids), plain)
        with pytest.raises(PromptError):
            model.logits(ids[:, :2])
    assert torch.equal(model.logits(ids), plain)


@pytest.mark.parametrize("spans", [SPANS, [[(1, 4)], [(0, 2), (5, 6)]], ["Paris"]])
def test_it_is_the_same_after_a_round_trip(tmp_path: Path, spans: Any) -> None:
    model, ids = pair("llama").model, ids_of()
    method = learned("llama", spans=spans, factor=3.0)
    found = hl.steering.load(method.save(tmp_path / "edit.safetensors"))
    assert isinstance(found, ValueEdit)
    assert torch.equal(found.values, method.values)
    assert (found.heads, found.factor) == (method.heads, 3.0)
    if spans == ["Paris"]:
        assert list(found.spans) == spans
        return
    with hl.steer(model, method):
        expected = model.logits(ids)
    with hl.steer(model, found):
        assert torch.equal(model.logits(ids), expected)


def test_bad_input_is_refused_in_one_sentence() -> None:
    model = pair("llama").model
    with (
        hl.steer(model, learned("llama")._with(values=torch.ones(3, 2, 10))),
        pytest.raises(PlanError, match="3 sources, but 2 prompts"),
    ):
        model.logits(ids_of(9))
    with pytest.raises(HeadError, match="7"):
        ValueEdit.fit(model, SOURCE, "7.0", SPANS)
    with pytest.raises(PlanError, match="spans='Paris'"):
        learned("llama", spans="Paris")
    with pytest.raises(PlanError, match="NaN"):
        learned("llama")._with(values=torch.full((2, 10), torch.nan))
    outside = learned("llama", spans=[(0, 99)])
    with hl.steer(model, outside), pytest.raises(PromptError, match="9 tokens"):
        model.logits(ids_of(9))
    with hl.steer(model, learned("llama")), pytest.raises(PlanError, match="whole prompts"):
        model.module(ids_of())
