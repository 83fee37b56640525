"""Attention rollout and flow, against hand-made graphs, brute force and plain transformers."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab.attention import Head
from headlab.causal.attribution.rollout import (
    FLOW_TOKENS,
    FLOW_UNITS,
    attention_flow,
    attention_rollout,
    largest_flows,
    rolled_out,
    with_residual,
    without_first_token,
)
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError


def made(family: str) -> hl.Model:
    return hl.load(build(family), tokenizer=tiny_tokenizer())


def drawn(n: int) -> list[list[int]]:
    return torch.randint(4, 97, (1, n), generator=torch.Generator().manual_seed(1)).tolist()


def patterns(family: str, ids: list[list[int]]) -> np.ndarray:
    """[layer, head, query, key] from plain transformers."""
    module = build(family)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        found = module(torch.tensor(ids), output_attentions=True).attentions
    return torch.stack(found)[:, 0].double().numpy()


def random_steps(layers: int, n: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).dirichlet(np.full(n, 0.7), (layers, n))
    return with_residual(rows)


def smallest_cut(steps: np.ndarray, query: int, token: int) -> float:
    """By going through every set of nodes that holds the source and not the sink."""
    layers, n, _ = steps.shape
    nodes = [(m, i) for m in range(-1, layers) for i in range(n)]
    source, sink = (layers - 1, query), (-1, token)
    others = [node for node in nodes if node not in (source, sink)]
    sets = chain.from_iterable(combinations(others, k) for k in range(len(others) + 1))
    best = np.inf
    for chosen in sets:
        inside = {source, *chosen}
        cut = sum(
            steps[m, a, b]
            for m, a in inside
            if m >= 0
            for b in range(n)
            if (m - 1, b) not in inside
        )
        best = min(best, cut)
    return best


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert"])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_rollout_is_the_product_of_mean_patterns_with_the_residual(family: str, share: float):
    ids = drawn(9)
    w = patterns(family, ids).mean(1)
    a = [share * np.eye(9) + (1 - share) * layer for layer in w]
    found = attention_rollout(made(family), ids, residual_share=share, heads="*.1")
    np.testing.assert_allclose(found.values[0], a[0], atol=1e-6)
    np.testing.assert_allclose(found.values[1], a[1] @ a[0], atol=1e-6)
    one = patterns(family, ids)[:, 1]
    np.testing.assert_allclose(found.heads[Head(0, 1)], one[0], atol=1e-6)
    np.testing.assert_allclose(found.heads[Head(1, 1)], one[1] @ a[0], atol=1e-6)
    if family != "bert":
        assert not np.triu(found.values, 1).any()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text", "gpt_oss", "bert"])
@pytest.mark.parametrize("without_first", [False, True])
def test_rows_sum_to_one(family: str, without_first: bool):
    found = attention_rollout(made(family), drawn(9), without_first=without_first)
    np.testing.assert_allclose(found.values.sum(-1), 1, atol=1e-12)
    if without_first:
        assert not found.values[:, 1:, 0].any()
        assert (found.values[:, 0, 0] == 1).all() or family == "bert"


def test_sinks_take_their_part_of_a_heads_rollout():
    found = attention_rollout(made("gpt_oss"), drawn(9), heads="0.0")
    np.testing.assert_allclose(
        found.heads[Head(0, 0)], patterns("gpt_oss", drawn(9))[0, 0], atol=1e-6
    )
    assert (found.heads[Head(0, 0)].sum(-1) < 0.999).all()


def test_identity_attention_rolls_out_to_the_identity():
    steps = with_residual(np.tile(np.eye(5), (4, 1, 1)))
    np.testing.assert_allclose(rolled_out(steps), np.tile(np.eye(5), (4, 1, 1)))
    np.testing.assert_allclose(largest_flows(steps, 3, 2), np.eye(5)[2])


def test_leaving_out_the_first_token_keeps_what_rows_sum_to():
    rows = np.array([[1.0, 0, 0], [1.0, 0, 0], [0.5, 0.1, 0.3]])
    wanted = [[1, 0, 0], [0, 1, 0], [0, 0.225, 0.675]]
    np.testing.assert_allclose(without_first_token(rows), wanted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gpt_oss"])
def test_flow_of_the_first_layer_is_the_rollout(family: str):
    model, ids = made(family), drawn(6)
    flow = attention_flow(model, ids, layers=[0])
    np.testing.assert_allclose(
        flow.values[0], attention_rollout(model, ids).values[0], atol=10 / FLOW_UNITS
    )


@pytest.mark.parametrize(("layers", "n", "seed"), [(2, 3, 0), (2, 3, 1), (3, 2, 2), (2, 4, 3)])
def test_flow_equals_the_smallest_cut(layers: int, n: int, seed: int):
    steps = random_steps(layers, n, seed)
    for query in range(n):
        wanted = [smallest_cut(steps, query, token) for token in range(n)]
        found = largest_flows(steps, layers - 1, query)
        np.testing.assert_allclose(found, wanted, atol=layers * n * n / FLOW_UNITS)


def test_flow_by_hand():
    """Through two positions, each path as wide as its narrowest edge."""
    first = np.array([[1.0, 0.0], [0.3, 0.7]])
    second = np.array([[1.0, 0.0], [0.6, 0.4]])
    # From position 1: 0.6 over position 0, which passes all on; 0.4 over position 1, which passes 0.3 and 0.7.
    np.testing.assert_allclose(largest_flows(np.stack([first, second]), 1, 1), [0.9, 0.4])


def test_flow_rows_are_shares_of_the_chosen_layers_and_positions():
    model, ids = made("llama"), drawn(7)
    every = attention_flow(model, ids)
    some = attention_flow(model, ids, layers=[-1], queries=[-1, 2])
    assert some.layers == (1,)
    assert some.queries == (6, 2)
    np.testing.assert_array_equal(some.values[0], every.values[1, [6, 2]])
    np.testing.assert_allclose(every.values.sum(-1), 1)
    assert not every.values[1, 2, 3:].any()


def test_bad_input_is_named():
    model = made("llama")
    with pytest.raises(PromptError, match=f"shorten the prompt to {FLOW_TOKENS}"):
        attention_flow(model, drawn(FLOW_TOKENS + 1))
    with pytest.raises(PromptError, match="one prompt, not 2"):
        attention_rollout(model, [[5, 6], [7, 8]])
    with pytest.raises(PlanError, match="layers names 2"):
        attention_flow(model, drawn(4), layers=[2])
    with pytest.raises(PlanError, match=r"must lie in \[0, 1\]"):
        attention_rollout(model, drawn(4), residual_share=1.5)
    with pytest.raises(HeadError, match="L2H0 does not exist"):
        attention_rollout(model, drawn(4), heads="2.0")


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_two_stacks_are_refused(family: str):
    with pytest.raises(UnsupportedError, match="encoder and a decoder"):
        attention_rollout(made(family), drawn(4))
