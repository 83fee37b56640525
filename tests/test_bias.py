"""A bias on the scores: against hand-written scores, in one pass, in batches, in generation, and beside capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_capture import N, ids_of, ragged, sides
from test_generate import padded
from test_interventions import HEADS, HEADS_OF, check, hand, rewrite
from torch import Tensor

import headlab as hl
from headlab.errors import PlanError

__all__ = ["hand"]
Lab = Callable[..., Any]
FAMILIES = ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3"]
PER_KEY = torch.randn(N, generator=torch.Generator().manual_seed(3)) * 2


def per_key(x: Tensor, where: Any) -> Tensor:
    """A bias that depends on the key's position in its sequence; none for generated tokens."""
    known = (where.keys >= 0) & (where.keys < N)
    value = PER_KEY[where.keys.clamp(0, N - 1)].where(known, 0.0)
    return x + value[:, None, None, :].to(x)


def added(x: Tensor, layer: int, head: int) -> Tensor:
    """The same on scores [batch, query, key] of one head of an unpadded prompt."""
    n = x.shape[-1]
    return x + torch.cat([PER_KEY, torch.zeros(max(0, n - N))])[:n]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bias_equals_scores_written_by_hand(lab: Lab, hand: Lab, family: str) -> None:
    model, ids = lab(family), ids_of()
    expected = hand(family).logits(ids, scores=rewrite(added, rows=True))
    with model.edit(hl.apply(HEADS, per_key, site="bias")):
        check(model.logits(ids), expected, ids, model.logits(ids) * 0)
    with model.edit(hl.add(HEADS, PER_KEY, site="bias")):
        check(model.logits(ids), expected, ids)


def test_a_bias_comes_on_top_of_the_models_own(lab: Lab, hand: Lab) -> None:
    model, (ids, decoder) = lab("t5"), sides("t5")
    assert decoder is not None
    heads = {layer: (1,) for layer in range(model.spec.n_layers)}
    expected = hand("t5").logits(ids, decoder, scores=rewrite(added, heads, rows=True))
    with model.edit(hl.apply("*.1", per_key, site="bias")):
        got = model.logits(ids, decoder=decoder)
    check(got, expected, decoder, model.logits(ids, decoder=decoder))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_bias_at_some_queries(lab: Lab, hand: Lab, family: str) -> None:
    model, ids = lab(family), ids_of()
    at = [[3, N - 1]] * 2
    expected = hand(family).logits(ids, scores=rewrite(added, rows=True, at=at))
    with model.edit(hl.add(HEADS, PER_KEY, site="bias", positions=[3, -1])):
        check(model.logits(ids), expected, ids)
    rows = torch.zeros(N, N)
    rows[[3, N - 1]] = PER_KEY
    with model.edit(hl.add(HEADS, rows, site="bias")):
        check(model.logits(ids), expected, ids)


def test_biases_compose_in_the_order_given(lab: Lab, hand: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    expected = hand("llama").logits(
        ids, scores=rewrite(lambda x, *_: x + 0.5 * PER_KEY + 0.25 * PER_KEY.flip(0), rows=True)
    )
    edits = [
        hl.add(HEADS, PER_KEY, site="bias"),
        hl.scale(HEADS, "bias", by=0.5),
        hl.add(HEADS, 0.25 * PER_KEY.flip(0), site="bias"),
    ]
    with model.edit(*edits):
        check(model.logits(ids), expected, ids)


def test_minus_infinity_hides_keys(lab: Lab, hand: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    hidden = torch.zeros(N)
    hidden[2:5] = -torch.inf
    rows = torch.zeros(N, N) + hidden
    rows[2:5] = 0  # these queries would see nothing but the first keys; they keep theirs
    expected = hand("llama").logits(ids, scores=rewrite(lambda x, *_: x + rows, rows=True))
    with model.edit(hl.add(HEADS, rows, site="bias")):
        check(model.logits(ids), expected, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_of_a_padded_batch_equals_hand_written_scores(
    lab: Lab, hand: Lab, family: str
) -> None:
    model, ids = lab(family), ragged((N, 6, 9))
    by_hand = hand(family)
    rows = []
    for row in ids:
        tokens = row[row >= 0][None]
        n = tokens.shape[1]
        for _ in range(6):
            logits = by_hand.logits(tokens, scores=rewrite(added, rows=True))
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        rows.append(tokens[0, n:].tolist())
    with model.edit(hl.apply(HEADS, per_key, site="bias")):
        new = model.generate(ids, max_new_tokens=6, eos_token_id=None).ids
    assert new.tolist() == padded(rows, 6)


def test_capture_sees_the_bias(lab: Lab, hand: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    keep = [hl.keep.statistics("entropy", "received"), hl.keep.rows(queries=[-1])]
    with model.edit(hl.apply(HEADS, per_key, site="bias")):
        trace = model.trace(ids, keep=keep)
        logits = model.logits(ids)
    seen = hand("llama")
    plain = model.trace(ids, keep=keep)
    expected = seen.logits(ids, scores=rewrite(added, rows=True))
    check(logits, expected, ids)
    patterns: dict[int, Tensor] = {}

    def look(x: Tensor, layer: int) -> Tensor:
        patterns[layer] = x.clone()
        return x

    seen.logits(ids, scores=rewrite(added, rows=True), pattern=look)
    for layer, heads in HEADS_OF.items():
        pattern = patterns[layer]
        torch.testing.assert_close(trace.rows[:, layer, :, 0], pattern[:, :, -1], atol=1e-5, rtol=0)
        entropy = -(pattern * pattern.clamp(min=1e-30).log()).sum(-1)
        torch.testing.assert_close(trace.statistic("entropy")[:, layer], entropy, atol=1e-5, rtol=0)
        changed = trace.rows[:, layer, list(heads)] - plain.rows[:, layer, list(heads)]
        assert float(changed.abs().max()) > 1e-2


def test_gradients_pass_through_a_bias(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(batch=1)

    def loss(value: Tensor) -> Tensor:
        with model.edit(hl.apply(HEADS, lambda x, where: x + value.to(x), site="bias")):
            return model.logits(ids, grad=True)[0, -1, 7]

    value = PER_KEY.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(value), value)
    step = torch.zeros(N)
    step[4] = 1e-2
    with torch.no_grad():
        measured = (loss(PER_KEY + step) - loss(PER_KEY - step)) / 2e-2
    assert float(slope[4]) == pytest.approx(float(measured), rel=2e-2, abs=1e-4)


def test_what_a_bias_cannot_be(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of()
    with pytest.raises(PlanError, match="nothing to ablate"):
        hl.ablate(HEADS, site="bias")
    with (
        pytest.raises(PlanError, match="does not fit"),
        model.edit(hl.add(HEADS, torch.zeros(5, 4), site="bias")),
    ):
        model.logits(ids)
    with (
        pytest.raises(PlanError, match="one row for all queries"),
        model.edit(hl.apply(HEADS, lambda x, where: x.expand(-1, -1, 3, -1), site="bias")),
    ):
        model.logits(ids)


def test_operations_are_told_the_prompt(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((N, 6))
    told: list[Tensor] = []

    def note(x: Tensor, where: Any) -> Tensor:
        told.append(where.prompt)
        return x

    with model.edit(hl.apply("*.*", note, site="bias")):
        model.generate(ids, max_new_tokens=3)
        generated = list(told)
        told.clear()
        model.logits(ids)
    assert all(torch.equal(prompt, ids) for prompt in (*generated, *told))
    assert len({id(prompt) for prompt in generated}) == 1
