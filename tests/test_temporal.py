"""Temporal heads: the facts, the attributions behind the score, and planted heads that turn a time into its object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from scipy.stats import spearmanr
from test_planted_roles import random_gpt2, random_llama
from tiny_models import BOS, build
from torch import nn

import headlab as hl
from headlab import planted
from headlab.attention.heads import Head
from headlab.causal.attribution.gradients import embeddings_replaced
from headlab.roles.base import Probing
from headlab.roles.integrated_gradients import head_attributions
from headlab.roles.temporal import Temporal
from headlab.roles.year_effects import differences, followed, patched_effects
from headlab.tasks.temporal import (
    TimePair,
    TimePrompts,
    facts_of_records,
    temporal_pairs,
)

HEADS = {"L0H2": "sink", "L1H0": "previous_token", "L2H1": "induction", "L2H2": "temporal"}
ROLE = Temporal()


@cache
def planted_temporal(family: str = "llama") -> planted.Planted:
    return planted.model(family, HEADS, distractors=6, max_context=160)


@cache
def records() -> list[dict[str, Any]]:
    return planted_temporal().records("temporal", n=16)


def scored(model: planted.Planted, n_prompts: int = 12) -> hl.Scores:
    opened = hl.load(model.module, tokenizer=model.tokenizer)
    return hl.score(opened, roles=[ROLE], n_prompts=n_prompts, data={"temporal": records()})


# -- attributions ------------------------------------------------------------------------------------------------


@contextmanager
def projection_inputs(projections: list[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """What goes into each layer's W_O: z with its heads joined."""
    found: list[torch.Tensor] = []
    hooks = [
        part.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        for part in projections
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


PROJECTIONS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "llama": lambda m: [block.self_attn.o_proj for block in m.model.layers],
    "mistral": lambda m: [block.self_attn.o_proj for block in m.model.layers],
    "gemma2": lambda m: [block.self_attn.o_proj for block in m.model.layers],
    "gpt2": lambda m: [block.attn.c_proj for block in m.transformer.h],
}
VALUES: dict[str, Callable[[Any], list[nn.Module]]] = {
    "llama": lambda m: [block.self_attn.v_proj for block in m.model.layers],
    "mistral": lambda m: [block.self_attn.v_proj for block in m.model.layers],
    "gemma2": lambda m: [block.self_attn.v_proj for block in m.model.layers],
}
CLEAN, CORRUPTED = [BOS, 11, 42, 43, 50, 60, 61, 17], [BOS, 11, 52, 53, 50, 60, 61, 17]


def difference(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, 30] - logits[:, 31]


@pytest.mark.parametrize("family", PROJECTIONS)
def test_attributions_are_the_formula_computed_without_headlab(family: str):
    module = build(family).double()
    module.set_attn_implementation("eager")
    projections, steps = PROJECTIONS[family](module), 3
    with torch.no_grad(), projection_inputs(projections) as inputs:
        embedded = module.get_input_embeddings()(torch.tensor([CLEAN, CORRUPTED]))
        module(inputs_embeds=embedded)
        change = [z[0] - z[1] for z in inputs]
    slopes = [torch.zeros_like(z) for z in change]
    for step in range(1, steps + 1):
        at = embedded[1] + step / steps * (embedded[0] - embedded[1])
        with projection_inputs(projections) as inputs:
            logits = module(inputs_embeds=at[None].requires_grad_()).logits[:, -1]
            for slope, z in zip(
                slopes, torch.autograd.grad(difference(logits).sum(), inputs), strict=True
            ):
                slope += z[0] / steps
    n_heads = module.config.num_attention_heads
    expected = torch.stack(
        [
            (a * b).unflatten(-1, (n_heads, -1)).sum(-1).T
            for a, b in zip(change, slopes, strict=True)
        ]
    )
    model = hl.load(build(family).double())
    found = head_attributions(model, CLEAN, CORRUPTED, difference, steps)
    np.testing.assert_allclose(found.own, expected.numpy(), rtol=1e-4, atol=1e-5)
    if family in VALUES:
        window = getattr(module.config, "sliding_window", None)
        kinds = getattr(module.config, "layer_types", None) or ["sliding_attention"] * 2
        windows = [window if kind.startswith("sliding") else None for kind in kinds]
        even = even_attributions(module, embedded, VALUES[family](module), slopes, windows)
        np.testing.assert_allclose(found.even, even, rtol=1e-4, atol=1e-5)


def even_attributions(
    module: Any,
    embedded: torch.Tensor,
    projections: list[nn.Module],
    slopes: list[torch.Tensor],
    windows: list[int | None],
) -> np.ndarray:
    values: list[torch.Tensor] = []
    hooks = [
        part.register_forward_hook(lambda module, args, out: values.append(out))
        for part in projections
    ]
    with torch.no_grad():
        module(inputs_embeds=embedded)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        attentions = module(inputs_embeds=embedded, output_attentions=True).attentions
    n_heads, n_groups = module.config.num_attention_heads, module.config.num_key_value_heads
    length = embedded.shape[1]
    found = np.zeros((len(values), n_heads, length))
    for layer, window in enumerate(windows):
        v = values[layer].unflatten(-1, (n_groups, -1))
        slope = slopes[layer].unflatten(-1, (n_heads, -1))
        for head in range(n_heads):
            for query in range(length):
                first = 1 if window is None else max(1, query - window + 1)
                ends = []
                for end in (0, 1):
                    row, keys = (
                        attentions[layer][end, head, query],
                        v[end, :, head * n_groups // n_heads],
                    )
                    z = row[0] * keys[0]
                    if query:
                        z = z + row[1:].sum() * keys[first : query + 1].mean(0)
                    ends.append(z)
                found[layer, head, query] = slope[query, head] @ (ends[0] - ends[1])
    return found


def test_where_logits_are_linear_in_z_an_attribution_is_an_exact_patch():
    """The last layer of a model without its MLP and final norm: D is a linear function of its z."""
    module = build("llama").double()
    module.model.norm = nn.Identity()
    nn.init.zeros_(module.model.layers[-1].mlp.down_proj.weight)
    model = hl.load(module)
    pair = TimePair(tuple(CLEAN), tuple(CORRUPTED), (2, 4), (30, 31), "", ("", ""), ("", ""))
    heads = [Head(1, head) for head in range(6)]
    exact = patched_effects(model, [pair], heads)[:, 0]
    found = head_attributions(model, CLEAN, CORRUPTED, difference, 2).own[1].sum(-1)
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-5)


def test_embeddings_are_replaced_only_within_the_block(lab: Callable[..., Any]):
    model = lab("gpt2")
    before = model.logits([CLEAN])
    with torch.no_grad():
        other = model.module.get_input_embeddings()(torch.tensor([CORRUPTED]))
    with embeddings_replaced(model, other):
        inside = model.logits([CLEAN])
    assert torch.equal(inside, model.logits([CORRUPTED]))
    assert torch.equal(model.logits([CLEAN]), before)


# -- planted and random models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_exactly_the_planted_head_is_claimed(family: str):
    scores = scored(planted_temporal(family))
    assert scores.claimed("temporal") == ["L2H2"]
    row = scores.frame.set_index(["layer", "head"]).loc[(2, 2)]
    assert row["score"] == pytest.approx(1, abs=0.02)  # it carries the whole effect
    details = scores.details.set_index(["detail", "layer", "head"])["value"]
    assert details["patched_effect", 2, 2] == pytest.approx(1, abs=0.02)
    assert details["share_at_end", 2, 2] == pytest.approx(1, abs=0.02)
    assert details["share_at_time", 2, 2] == pytest.approx(0, abs=0.02)
    assert details["ablation_temporal", 2, 2] < -20
    assert details["patched_effect"].drop((2, 2)).abs().max() < 0.05


@pytest.mark.parametrize("part", ["qk", "ov"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_scrambled_head_is_not_claimed(part: str, seed: int):
    broken = planted.scramble(planted_temporal(), "L2H2", part=part, seed=seed)
    scores = scored(broken)
    assert scores.claimed("temporal") == []
    if part == "ov":
        assert scores.frame["note"].str.startswith("not measurable: the model follows").all()
    else:  # it still tells of the time, wherever it looks; only not by looking
        row = scores.frame.set_index(["layer", "head"]).loc[(2, 2)]
        assert row["score"] > 0.9
        assert abs(row["effect"]) < 0.05


def test_a_model_with_nothing_planted_gets_no_claims():
    model = planted.model("llama", {}, distractors=8, max_context=160, seed=3)
    assert scored(model).claimed("temporal") == []


@pytest.mark.parametrize("make", [random_llama, random_gpt2])
def test_randomly_initialised_heads_are_claimed_for_nothing(make: Callable[[int, float], Any]):
    model = hl.load(make(0, 0.12), tokenizer=smollm2().tokenizer)
    scores = hl.score(model, roles=[ROLE], n_prompts=12)
    assert scores.claimed("temporal") == []


def test_ablating_the_planted_head_takes_the_lead_of_the_right_object():
    made = planted_temporal()
    model = hl.load(made.module, tokenizer=made.tokenizer)
    probing = Probing(model, n_prompts=4, records=tuple(records()))
    assert ROLE.behaviour is not None
    intact = ROLE.behaviour.measure(probing)
    assert intact.shape == (16,)
    assert intact.min() > 3
    with model.edit(ROLE.ablation([Head(2, 2)])):
        assert np.abs(ROLE.behaviour.measure(probing)).max() < 0.2
    with model.edit(ROLE.ablation([Head(2, 3)])):
        assert ROLE.behaviour.measure(probing).min() > 3


def test_followed_pairs_share_no_prompt_and_are_as_many_as_asked_for():
    made = planted_temporal()
    probing = Probing(hl.load(made.module, tokenizer=made.tokenizer), n_prompts=10)
    prompts = TimePrompts(made.tokenizer, probing.bos)
    groups = list(temporal_pairs(prompts, facts_of_records(prompts, records()), 0))
    found = followed(probing, groups)
    used = [ids for pair in found.pairs for ids in (pair.clean, pair.corrupted)]
    assert len(found.pairs) == 10
    assert len(set(used)) == 20
    assert (found.ends[:, 0] > 0).all()
    assert (found.ends[:, 1] < 0).all()
    np.testing.assert_allclose(found.ends, differences(probing.model, found.pairs), atol=1e-3)


def test_a_model_that_goes_against_the_time_is_not_measured():
    """Objects exchanged: what it says in winter is called right in summer, and the other way round."""
    other = {"king": "queen", "queen": "king", "doctor": "teacher", "teacher": "doctor"}
    turned = [
        {**record, "answers": {time: other[name] for time, name in record["answers"].items()}}
        if "answers" in record
        else record
        for record in records()
    ]
    made = planted_temporal()
    model = hl.load(made.module, tokenizer=made.tokenizer)
    frame = hl.score(model, roles=[ROLE], n_prompts=12, data={"temporal": turned}).frame
    assert frame["note"].str.startswith("not measurable: the model follows the year in none").all()


@pytest.mark.parametrize("family", ["llama", "bert", "mistral", "gpt_oss"])
def test_models_that_cannot_be_asked_get_a_note(family: str):
    for tokenizer in (None, planted_temporal().tokenizer):
        model = hl.load(build(family), tokenizer=tokenizer)
        frame = hl.score(model, roles=[ROLE], n_prompts=4).frame
        assert frame["note"].str.startswith("not measurable: ").all()
        assert frame["score"].isna().all()


# -- the real model ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attributions_agree_with_exact_patches_on_the_real_model():
    model = smollm2()
    question = ("In {time}, the leader of the Soviet Union was", ("1948", "1988"))
    prompts = TimePrompts(model.tokenizer, model.tokenizer.bos_token_id)
    pair = prompts.pair(*question, ("Joseph Stalin", "Mikhail Gorbachev"))
    ((clean, corrupted),) = differences(model, [pair])
    assert clean > 0 > corrupted

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, pair.objects[0]] - logits[:, pair.objects[1]]

    found = head_attributions(model, pair.clean, pair.corrupted, metric, 5).own.sum(-1)
    top = [Head(int(at) // 9, int(at) % 9) for at in np.argsort(-np.abs(found).ravel())[:10]]
    exact = patched_effects(model, [pair], top)[:, 0]
    guessed = np.array([found[head.layer, head.head] for head in top])
    assert top[0] == Head(23, 5)
    assert exact.argmax() == 0
    assert (np.sign(guessed) == np.sign(exact)).mean() >= 0.8
    assert spearmanr(guessed, exact).statistic > 0.8
