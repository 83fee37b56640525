"""Detectors find exactly the planted heads, and next to nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_model import PLANTED_HEADS as HEADS
from real_model import planted_llama, planted_model, smollm2
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import headlab as hl
from headlab import planted

PROBED = ("previous_token", "duplicate_token", "induction", "sink")
#: Twice as many, of every role two or more, and in other places.
MORE = {
    "L0H0": "previous_token",
    "L0H1": "duplicate_token",
    "L1H2": "sink",
    "L1H3": "previous_token",
    "L2H0": "induction",
    "L2H3": "duplicate_token",
    "L3H1": "induction",
    "L3H2": "sink",
}
LAYOUTS = [
    pytest.param(family, n_kv_heads, heads, seed, id=f"{name}-{seed}")
    for name, family, n_kv_heads, heads in (
        ("llama", "llama", None, HEADS),
        ("llama-grouped", "llama", 2, MORE),
        ("gpt2", "gpt2", None, MORE),
    )
    for seed in (0, 1)
]


def opened(model: planted.Planted) -> hl.Model:
    return hl.load(model.module, tokenizer=model.tokenizer)


def claims(scores: hl.Scores) -> dict[str, str]:
    """Role by claimed head; a head claimed for two roles fails."""
    found: dict[str, str] = {}
    for role in scores.names:
        for head in scores.claimed(role):
            assert head not in found, f"{head} is claimed for {found[head]} and {role}"
            found[head] = role
    return found


@pytest.mark.parametrize(("family", "n_kv_heads", "heads", "seed"), LAYOUTS)
def test_exactly_the_planted_heads_are_claimed(
    family: str, n_kv_heads: int | None, heads: dict[str, str], seed: int
):
    model = planted.model(
        family, heads, distractors=6, n_kv_heads=n_kv_heads, max_context=160, seed=seed
    )
    assert len(model.distractors) == 6
    scores = hl.score(opened(model), roles=PROBED, seed=seed)
    assert claims(scores) == model.truth == heads
    assert (scores.frame["n"] == 20).all()


@pytest.mark.parametrize(
    ("head", "gone"),
    [
        ("L0H2", {"L0H2"}),
        ("L1H3", {"L1H3"}),
        ("L1H0", {"L1H0", "L2H1"}),  # the induction head reads what this one writes
        ("L2H1", {"L2H1"}),
    ],
)
def test_a_head_whose_qk_circuit_is_scrambled_is_not_claimed(head: str, gone: set[str]):
    model = planted.scramble(planted_llama(), head, part="qk")
    wanted = {name: role for name, role in HEADS.items() if name not in gone}
    assert model.truth == wanted
    assert claims(hl.score(opened(model), roles=PROBED, n_prompts=12)) == wanted


def test_a_scrambled_previous_token_output_takes_the_induction_head_along():
    model = planted.scramble(planted_llama(), "L1H0", part="ov")
    wanted = {name: role for name, role in HEADS.items() if name != "L2H1"}
    assert claims(hl.score(opened(model), roles=PROBED, n_prompts=12)) == wanted


def test_a_planted_induction_head_copies_and_one_with_a_scrambled_output_does_not():
    scores = hl.score(planted_model(), roles="copying")
    assert scores.claimed("copying") == ["L2H1"]
    broken = planted.scramble(planted_llama(), "L2H1", part="ov")
    scores = hl.score(opened(broken), roles="copying")
    assert scores.claimed("copying") == []
    row = scores.frame.set_index(["layer", "head"]).loc[(2, 1)]
    assert abs(row["effect"]) < 0.04


def test_a_model_with_nothing_planted_gets_no_claims():
    model = planted.model("llama", {}, distractors=8, max_context=160, seed=3)
    assert model.truth == {}
    assert claims(hl.score(opened(model), roles=PROBED)) == {}


def test_batches_of_another_size_give_the_same_scores():
    """n_prompts that no batch divides: the last, smaller batch is neither lost nor counted twice."""
    model = planted_model()
    whole = hl.score(model, roles=PROBED, n_prompts=13)
    assert (whole.frame["n"] == 13).all()
    assert claims(whole) == HEADS


# -- random initialisation -----------------------------------------------------------------------

NO_GENERATION = (
    "copying,local,long_range,duplicate_token,induction,previous_token,sink"  # all but retrieval
)


def random_llama(seed: int, scale: float) -> LlamaForCausalLM:
    """SmolLM2's shape made small: 9 query heads, 3 key/value heads, tied embeddings."""
    config = LlamaConfig(
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=smollm2().spec.n_vocab,
        max_position_embeddings=512,
        initializer_range=scale,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def random_gpt2(seed: int, scale: float) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=144,
        n_layer=5,
        n_head=9,
        vocab_size=smollm2().spec.n_vocab,
        n_positions=512,
        initializer_range=scale,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


# SmolLM2's own standard deviation, and one at which attention is far from even.
@pytest.mark.parametrize("scale", [1 / 24, 0.12])
@pytest.mark.parametrize("make", [random_llama, random_gpt2])
def test_randomly_initialised_heads_are_claimed_for_nothing(
    make: Callable[[int, float], Any], scale: float
):
    model = hl.load(make(0, scale), tokenizer=smollm2().tokenizer)
    scores = hl.score(model, roles=NO_GENERATION)
    n_heads = model.spec.n_layers * model.spec.n_heads
    for role in scores.names:
        assert len(scores.claimed(role)) <= scores.alpha * n_heads, role
        assert scores.frame.query("role == @role")["score"].notna().all()


@pytest.mark.slow
def test_a_random_model_of_the_real_shape_is_claimed_for_nothing():
    real = smollm2()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LlamaForCausalLM(real.module.config).eval()
    model = hl.load(module, tokenizer=real.tokenizer)
    assert (model.spec.n_layers, model.spec.n_heads, model.spec.n_kv_heads) == (30, 9, 3)
    scores = hl.score(model, roles=NO_GENERATION, n_prompts=20)
    assert claims(scores) == {}
