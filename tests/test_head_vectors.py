"""Head vectors: what they are, and where they are added, against a twin steered by hand in float64."""

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
from headlab.errors import HeadError, PlanError
from headlab.steering import HeadVectors

HEADS = ((0, 1), (1, 0), (1, 2))
TEXT = "0.1, 1.0, 1.2"
FAMILIES = ["llama", "gpt2"]  # grouped heads; a projection with a bias
CLOSE = 1e-5  # vectors are kept in float32


def learned(family: str, **options: Any) -> HeadVectors:
    positive, negative = ragged((9, 5, 7), seed=1), ragged((6, 8), seed=2)
    return HeadVectors.fit(pair(family).model, positive, negative, TEXT, **options)


def mean_by_hand(family: str, ids: Tensor, over: str) -> Tensor:
    """Mean z [head, d_value]: of last tokens, or of all tokens of all prompts together."""
    kept = []
    for row in singles(ids):
        z = pair(family).values("z", row)
        z = torch.stack([z[layer][:, head] for layer, head in HEADS], 1)
        kept.append(z[-1:] if over == "last" else z)
    return torch.cat(kept).mean(0)


def added(method: HeadVectors, rows: str) -> Any:
    """z + factor·v at the rows meant, for a prompt of ``start`` tokens."""

    def rewrites(start: int) -> dict[str, Any]:
        def change(z: Tensor, layer: int) -> Tensor:
            z = z.clone()
            at = {
                "prompt_end": slice(start - 1, start),
                "from_end": slice(start - 1, None),
                "all": slice(None),
            }[rows]
            for place, (where, head) in enumerate(HEADS):
                if where == layer:
                    z[:, at, head] += method.factor * method.vectors[place].double()
            return z

        return {"z": change}

    return rewrites


@pytest.mark.parametrize("over", ["last", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_differences_of_means(family: str, over: str) -> None:
    positive, negative = (
        mean_by_hand(family, ragged(*a), over) for a in (((9, 5, 7), 1), ((6, 8), 2))
    )
    method = learned(family, over=over)
    assert_close(method.vectors, positive - negative, CLOSE)
    assert method.heads == "L0H1, L1H0, L1H2"


def test_vectors_are_learned_from_the_plain_model() -> None:
    model = pair("llama").model
    plain = learned("llama")
    with model.edit(hl.scale("*.*", "z", by=3.0)):
        assert torch.equal(learned("llama").vectors, plain.vectors)


@pytest.mark.parametrize("rows", ["prompt_end", "from_end", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_added_to_z_at_the_rows_meant(family: str, rows: str) -> None:
    model, by_hand = pair(family).model, pair(family)
    method, ids = learned(family, rows=rows, factor=-2.5), ragged((9, 4, 6))
    rewrites = added(method, rows)
    with hl.steer(model, method):
        logits, last = model.logits(ids), model.trace(ids, logits="last").logits[:, 0]
        new = model.generate(ids, max_new_tokens=6, eos_token_id=None).ids
    for at, row in enumerate(singles(ids)):
        expected = by_hand.logits(row, **rewrites(len(row)))
        plain = by_hand.logits(row)
        assert_close(logits[at, : len(row)], expected, CLOSE)
        assert_close(last[at], expected[-1], CLOSE)
        before = expected[:-1] - plain[:-1]
        assert bool((before.abs().max() > 1e-3) == (rows == "all"))
        assert float((expected[-1] - plain[-1]).abs().max()) > 1e-3
        assert new[at].tolist() == by_hand.greedy(row, 6, rewrites)


def test_the_three_kinds_of_rows_are_three_things() -> None:
    model, ids = pair("llama").model, ragged((9, 4, 6))
    found = set()
    for rows in ("prompt_end", "from_end", "all"):
        with hl.steer(model, learned("llama", rows=rows, factor=4.0)):
            found.add(str(model.generate(ids, max_new_tokens=12, eos_token_id=None).ids.tolist()))
    assert len(found) == 3


def test_padding_on_the_left_is_padding_on_the_right() -> None:
    model, method = pair("llama").model, learned("llama", factor=3.0)
    left, right = ragged((9, 4, 6), padding="left"), ragged((9, 4, 6))
    with hl.steer(model, method):
        new = [
            model.generate(ids, max_new_tokens=5, eos_token_id=None).ids for ids in (left, right)
        ]
        one, other = (model.trace(ids, logits="last").logits for ids in (left, right))
    assert torch.equal(*new)
    assert_close(one, other, 1e-9)


def test_the_model_is_bit_equal_afterwards() -> None:
    model, ids = pair("llama").model, ids_of()
    plain = model.logits(ids)
    with hl.steer(model, learned("llama", factor=9.0)):
        assert not torch.equal(model.logits(ids), plain)
        with pytest.raises(PlanError):
            model.module(ids)
    assert torch.equal(model.logits(ids), plain)


def test_they_compose_with_other_edits() -> None:
    model, method, row = pair("llama").model, learned("llama", rows="all"), ids_of(batch=1)[0]
    change = added(method, "all")(len(row))["z"]
    with model.edit(hl.scale(TEXT, "z", by=2.0)), hl.steer(model, method):
        got = model.logits(row[None])[0]

    def both(z: Tensor, layer: int) -> Tensor:
        z = z.clone()
        for where, head in HEADS:
            if where == layer:
                z[:, :, head] *= 2
        return change(z, layer)

    assert_close(got, pair("llama").logits(row, z=both), CLOSE)


def test_random_directions_keep_each_norm() -> None:
    method = learned("llama")
    one, again, other = (method.randomised(seed).vectors for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert_close(one.norm(dim=-1), method.vectors.norm(dim=-1), 1e-6)
    cosines = torch.cosine_similarity(one, method.vectors)
    assert float(cosines.abs().max()) < 0.95


def test_they_are_the_same_after_a_round_trip(tmp_path: Path) -> None:
    model, method, ids = pair("llama").model, learned("llama", rows="all", factor=1.5), ids_of()
    found = hl.steering.load(method.save(tmp_path / "vectors.safetensors"))
    assert isinstance(found, HeadVectors)
    assert (found.heads, found.rows, found.factor) == (method.heads, "all", 1.5)
    with hl.steer(model, method):
        expected = model.logits(ids)
    with hl.steer(model, found):
        assert torch.equal(model.logits(ids), expected)


def test_bad_input_is_refused_in_one_sentence() -> None:
    model, ids = pair("llama").model, ids_of()
    method = learned("llama")
    with pytest.raises(PlanError, match="rows='first'"):
        learned("llama", rows="first")
    with pytest.raises(PlanError, match="over='some'"):
        learned("llama", over="some")
    with pytest.raises(HeadError, match="9"):
        HeadVectors.fit(model, ids, ids, "9.9")
    with pytest.raises(PlanError, match="NaN"):
        HeadVectors(method.heads, method.shape, method.vectors * torch.nan)
    with pytest.raises(PlanError, match="fit it at other heads"):
        method.on("0.0")
    with pytest.raises(PlanError, match="fit it on"), hl.steer(pair("gpt2").model, method):
        pass
    with hl.steer(model, method), pytest.raises(PlanError, match="headlab runs the prompt"):
        model.module(ids)
