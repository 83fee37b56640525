"""Importance of heads: gates put into another copy of the model, and what is summed before absolute values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact, token_pairs
from tiny_models import build
from torch import Tensor

import headlab as hl
from headlab.causal import metrics
from headlab.causal.attribution.importance import head_importance
from headlab.errors import PlanError, UnsupportedError

LENGTHS = (9, 6, 9)


def prompts() -> Tensor:
    ids, _ = token_pairs(3, 9)
    ids[1, 6:] = -1
    return ids


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean next-token loss of one prompt by hand."""
    chosen = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    return -chosen.mean()


def gate_gradients(module: Any, projections: list[Any], n_heads: int) -> list[list[Tensor]]:
    """Per prompt and layer, the gradient of its loss by a gate on each head at each position, [position, head]."""
    found = []
    for row, length in zip(prompts(), LENGTHS, strict=True):
        ids = row[None, :length]
        gates = [torch.ones(length, n_heads, dtype=torch.float64) for _ in projections]
        gates = [gate.requires_grad_() for gate in gates]
        hooks = [
            part.register_forward_pre_hook(
                lambda m, args, gate=gate: (
                    (args[0].unflatten(-1, (n_heads, -1)) * gate[..., None]).flatten(-2),
                )
            )
            for part, gate in zip(projections, gates, strict=True)
        ]
        total = loss(module(ids).logits, ids)
        found.append(list(torch.autograd.grad(total, gates)))
        for hook in hooks:
            hook.remove()
    return found


def setting(family: str) -> tuple[Any, list[list[Tensor]]]:
    module = exact(family)
    if family == "llama":
        parts = [layer.self_attn.o_proj for layer in module.model.layers]
        return module, gate_gradients(module, parts, 6)
    parts = [layer.attn.c_proj for layer in module.transformer.h]
    return module, gate_gradients(module, parts, 3)


BY_HAND = {
    "token": lambda rows: sum(row.abs().sum(0) for row in rows) / sum(LENGTHS),
    "example": lambda rows: sum(row.sum(0).abs() for row in rows) / len(LENGTHS),
    "batch": lambda rows: sum(row.sum(0) for row in rows).abs() / sum(LENGTHS),
}


@pytest.mark.parametrize("reduction", BY_HAND)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_importance_is_the_gradient_of_gates(family: str, reduction: Any) -> None:
    module, gates = setting(family)
    frame = head_importance(hl.load(module), prompts(), reduction=reduction, normalise=None)
    for layer in range(2):
        expected = BY_HAND[reduction]([prompt[layer] for prompt in gates]).numpy()
        found = frame.loc[frame["layer"] == layer, "importance"].to_numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_three_reductions_rank_heads_apart() -> None:
    module, _ = setting("llama")
    model = hl.load(module)
    ranks = {
        reduction: tuple(head_importance(model, prompts(), reduction=reduction)["rank"])  # type: ignore[arg-type]
        for reduction in BY_HAND
    }
    assert len(set(ranks.values())) > 1


def test_a_layer_is_divided_by_its_norm() -> None:
    model = hl.load(exact("llama"))
    plain = head_importance(model, prompts(), normalise=None)
    frame = head_importance(model, prompts())
    for layer in range(2):
        of = frame["layer"] == layer
        raw = plain.loc[of, "importance"].to_numpy()
        np.testing.assert_allclose(frame.loc[of, "importance"], raw / np.sqrt((raw**2).sum()))
    order = frame.sort_values("importance")["rank"]
    assert list(order) == list(range(12))


def test_batches_and_lengths_change_nothing() -> None:
    model = hl.load(exact("gpt2"))
    for reduction in BY_HAND:
        whole = head_importance(model, prompts(), reduction=reduction)  # type: ignore[arg-type]
        parts = head_importance(model, prompts(), reduction=reduction, tokens_at_once=1)  # type: ignore[arg-type]
        np.testing.assert_allclose(whole["importance"], parts["importance"], rtol=1e-9)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gpt_oss", "deepseek_v3", "bert"])
def test_a_gate_moves_the_metric_as_its_gradient_says(family: str) -> None:
    """The gradient of one gate on a head, by finite differences of hl.scale."""
    model = hl.load(build(family))
    ids = prompts()[:1]
    frame = head_importance(
        model, ids, metrics.logit_difference(5, 7), reduction="example", normalise=None
    )

    def value(by: float) -> float:
        with torch.no_grad(), model.edit(hl.scale("L1H1", by=by)):
            logits = model.logits(ids)
        return float(logits[0, -1, 5] - logits[0, -1, 7])

    slope = (value(1.01) - value(0.99)) / 0.02
    found = frame.loc[(frame["layer"] == 1) & (frame["head"] == 1), "importance"].iloc[0]
    assert found == pytest.approx(abs(slope), rel=2e-2, abs=2e-3)


def test_bad_input_is_explained() -> None:
    model = hl.load(build("gpt2"))
    with pytest.raises(PlanError, match="reduction='mean'"):
        head_importance(model, prompts(), reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="normalise='all'"):
        head_importance(model, prompts(), normalise="all")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no gradient"):
        head_importance(model, prompts(), metrics.recall(5))
    with pytest.raises(PlanError, match="compares with the clean run"):
        head_importance(model, prompts(), metrics.kl())
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        head_importance(hl.load(build("bart")), prompts())
