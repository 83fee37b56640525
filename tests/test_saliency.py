"""Attention times its gradient: against autograd through patterns written out, and a head whose job is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact, token_pairs
from oracle import assert_close, by_hand
from tiny_models import build
from torch import Tensor

import headlab as hl
from headlab.errors import PlanError, UnsupportedError

LENGTHS = (9, 6, 9)
SPANS = {"start": (0, 2), "own": [(3, 5), (2, 4), (6, 8)]}


def prompts() -> Tensor:
    ids, _ = token_pairs(3, 9)
    ids[1, 6:] = -1
    return ids


def by_autograd(model: Any, queries: list[int] | None) -> dict[str, list[np.ndarray]]:
    """Σ A ∂m/∂A per segment, layer and head, [prompt, head], with A a leaf of the graph of a hand-written pass."""
    found: dict[str, list[list[np.ndarray]]] = {name: [] for name in SPANS}
    for prompt, length in enumerate(LENGTHS):
        ids = prompts()[prompt : prompt + 1, :length]
        patterns: dict[int, Tensor] = {}

        def keep(p: Tensor, layer: int, patterns: dict[int, Tensor] = patterns) -> Tensor:
            patterns[layer] = p if p.requires_grad else p.requires_grad_()
            return patterns[layer]

        with by_hand(model.module, list(model.weights.attention_modules), pattern=keep):
            logits = model.module(ids, use_cache=False).logits
        lead = logits[0, -1, 7] - logits[0, -1, 11]
        slopes = torch.autograd.grad(lead, list(patterns.values()))
        for name, span in SPANS.items():
            start, stop = span if isinstance(span, tuple) else span[prompt]
            rows = list(range(length)) if queries is None else queries
            found[name].append(
                [
                    (p * slope)[0, :, rows, start:stop].sum((1, 2)).detach().numpy()
                    for p, slope in zip(patterns.values(), slopes, strict=True)
                ]
            )
    return {
        name: [np.stack([prompt[layer] for prompt in rows]) for layer in range(len(rows[0]))]
        for name, rows in found.items()
    }


@pytest.mark.parametrize("queries", [None, [-1]])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "gemma2"])
def test_saliency_is_the_pattern_times_its_gradient(family: str, queries: list[int] | None) -> None:
    module = exact(family) if family in ("llama", "gpt2") else build(family)
    model = hl.load(module)
    metric = hl.metrics.logit_difference([7] * 3, [11] * 3)
    found = hl.causal.attention_saliency(
        model, prompts(), metric, SPANS, queries=queries, tokens_at_once=18
    )
    expected = by_autograd(model, queries)
    atol = 1e-12 if module.dtype == torch.float64 and family == "gpt2" else 1e-6
    for name in SPANS:
        effects = found[name]
        change = effects.baseline - effects.values  # removing takes away what the attention brings
        for layer, theirs in enumerate(expected[name]):
            at = effects.frame.index[effects.frame["layer"] == layer]
            size = max(1.0, np.abs(theirs).max())
            assert_close(change[at].T, theirs, atol=atol * size, what=f"{name}, layer {layer}")
            assert np.abs(theirs).max() > 1e-6


def test_the_induction_head_carries_the_answer_from_where_it_stood() -> None:
    planted = hl.planted.model(heads={"L1H0": "previous_token", "L2H1": "induction"}, distractors=4)
    model = hl.load(planted)
    ids = torch.randint(5, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 11] = ids[:, 4]  # the last token stood at 4, so 5 is what follows
    metric = hl.metrics.log_probability(ids[:, 5].tolist())
    spans = {"answer": (5, 6), "other": (7, 9)}
    found = hl.causal.attention_saliency(model, ids, metric, spans, queries=[-1])
    top = found["answer"].top(1).iloc[0]
    assert (top["layer"], top["head"]) == (2, 1)
    assert top["effect"] < 0  # without it the answer is less likely
    assert abs(found["other"].of("L2H1")["effect"].iloc[0]) < 0.05 * -top["effect"]


def test_what_cannot_be_attributed_is_refused() -> None:
    model = hl.load(build("llama"))
    metric = hl.metrics.logit_difference([7] * 3, [11] * 3)
    with pytest.raises(PlanError, match="has 2 spans; give one, or one for each of 3"):
        hl.causal.attention_saliency(model, prompts(), metric, {"a": [(0, 1), (1, 2)]})
    with pytest.raises(PlanError, match="segment 'a' ends at 7, but prompt 1 has 6 tokens"):
        hl.causal.attention_saliency(model, prompts(), metric, {"a": (4, 7)})
    with pytest.raises(PlanError, match="its gradient is 0"):
        hl.causal.attention_saliency(model, prompts(), hl.metrics.kl(), {"a": (0, 1)})
    other = hl.load(build("t5"))
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        hl.causal.attention_saliency(other, prompts(), metric, {"a": (0, 1)})


def test_plans_say_what_is_wrong_with_a_gradient() -> None:
    model = hl.load(build("llama"))
    z = model.trace(prompts()[:1], keep=hl.keep.tensors("z"))
    gradient = {layer: z.tensor("z", layer) for layer in range(model.spec.n_layers)}
    with pytest.raises(PlanError, match="entropy cannot be weighted by gradients"):
        hl.keep.statistics("entropy", z_gradient=gradient)
    with pytest.raises(PlanError, match="must hold a tensor per layer"):
        hl.keep.rows(z_gradient=gradient[0])  # type: ignore[arg-type]
    keep = hl.keep.statistics("received", z_gradient={0: gradient[0]})
    with pytest.raises(PlanError, match="has no layer 1"):
        model.trace(prompts()[:1], keep=keep)
    short = {layer: x[:, 1:] for layer, x in gradient.items()}
    with pytest.raises(PlanError, match=r"is \[1, 8, .*but z is \[1, 9, "):
        model.trace(prompts()[:1], keep=hl.keep.rows(z_gradient=short))


def test_queries_of_one_statistic_may_be_an_array_beside_another() -> None:
    model = hl.load(build("llama"))
    some = hl.keep.statistics("max", queries=np.array([1, 3]))
    trace = model.trace(prompts()[:1], keep=[some, hl.keep.statistics("entropy")])
    assert trace.statistic("max").shape[3] == 2
    assert trace.statistic("entropy").shape[3] == 9


def test_rows_can_be_weighted_by_gradients() -> None:
    model = hl.load(exact("gpt2"))
    ids = prompts()[:1]
    trace = model.trace(ids, keep=[hl.keep.rows(), hl.keep.tensors("v", "z")])
    gradient = {
        layer: torch.randn(
            trace.tensor("z", layer).shape, generator=torch.Generator().manual_seed(layer)
        ).double()
        for layer in range(model.spec.n_layers)
    }
    weighted = model.trace(ids, keep=hl.keep.rows(z_gradient=gradient))
    for layer, upstream in gradient.items():
        slope = torch.einsum("bqhd,bkhd->bhqk", upstream, trace.tensor("v", layer))
        assert_close(weighted.rows[:, layer], trace.rows[:, layer] * slope, 1e-12)
