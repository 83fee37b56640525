"""The positional part of W_QK, against queries and keys that the seam sees in layer 0, where they are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import build

import headlab as hl
from headlab import planted
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters.positions import learned_positions, positional_patterns, previous_token

LENGTH = 7


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(
            (family, {})
            for family in (
                "llama",
                "gpt2",
                "gpt_neox",
                "opt",
                "mistral",
                "qwen3",
                "olmo2",
                "smollm3",
            )
        ),
        ("gemma2", {"attn_logit_softcapping": 0.2}),
    ],
)
def test_layer_0_has_the_softmax_of_its_mean_scores(family: str, changes: dict[str, Any]) -> None:
    model = hl.load(build(family, vocab_size=96, **changes))
    facts = model.spec.layers[0]
    # A run of one token repeated gives its query and key at every position; layer 0 depends on nothing else.
    runs = torch.arange(96)[:, None].expand(-1, LENGTH)
    trace = model.trace(runs, keep=hl.keep.tensors("q", "k", layers=[0]), logits="none")
    q, k = (trace.tensor(name, 0).double().mean(0) for name in "qk")  # [position, head, d_head]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * facts.scaling
    if facts.softcap is not None:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (lag < 0) | (lag >= (facts.window or LENGTH))
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    ours = positional_patterns(model, length=LENGTH, n_tokens=96)
    np.testing.assert_allclose(ours[0], expected.numpy(), atol=2e-5)
    table = previous_token(model, length=LENGTH, n_tokens=96, n_null=50)
    of_layer = table[table["layer"] == 0]["score"]
    before = expected[:, range(1, LENGTH), range(LENGTH - 1)].mean(-1)
    np.testing.assert_allclose(of_layer, before, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_only_the_planted_previous_token_head_is_claimed(family: str) -> None:
    made = planted.model(family=family)
    table = previous_token(hl.load(made), embedding="raw", n_tokens=128)
    claimed = table[table["claimed"]]
    assert [f"L{row.layer}H{row.head}" for row in claimed.itertuples()] == ["L1H0"]
    assert claimed["score"].item() > 0.9
    assert claimed["p_value"].item() < 1e-3
    assert (claimed["ci_low"] <= claimed["score"]).all()
    assert (claimed["score"] <= claimed["ci_high"]).all()


def test_scores_thousands_of_nats_apart() -> None:
    """Rows share one sum over distances; its terms must not vanish beside those of distances a row does not see."""
    module = build("llama")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(module.model.layers[0].self_attn, name).weight.mul_(300)
    model = hl.load(module)
    options = {"length": 12, "n_tokens": 32}
    table = previous_token(model, n_null=20, **options)
    whole = positional_patterns(model, **options)[0]
    expected = whole[:, range(1, 12), range(11)].mean(-1)
    np.testing.assert_allclose(table["score"][:6], expected, atol=1e-4)


def test_nan_in_one_head_is_its_own_alone() -> None:
    module = build("llama")
    with torch.no_grad():
        module.model.layers[1].self_attn.q_proj.weight[0] = float("nan")
    table = previous_token(hl.load(module), length=8, n_tokens=32, n_null=50)
    clean = previous_token(hl.load(build("llama")), length=8, n_tokens=32, n_null=50)
    assert table.index[table["score"].isna()].tolist() == [6]
    assert "NaN" in table["note"][6]
    assert table["p_value"].notna().sum() == 11
    np.testing.assert_allclose(table["score"].drop(6), clean["score"].drop(6))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_float64_models_and_edits_in_force(family: str) -> None:
    model = hl.load(build(family).double())
    options = {"length": 6, "n_tokens": 32, "n_null": 20}
    plain = previous_token(model, **options)
    with model.edit(hl.scale("*.*", site="k", by=0.0), hl.scale("0.*", site="resid_pre", by=3.0)):
        edited = previous_token(model, **options)
    np.testing.assert_allclose(plain["score"], edited["score"])
    single = previous_token(hl.load(build(family)), **options)
    np.testing.assert_allclose(plain["score"], single["score"], atol=1e-5)


def test_chunks_and_sinks_are_said() -> None:
    chunked = previous_token(hl.load(build("llama4_text")), length=10, n_tokens=32, n_null=20)
    assert "within chunks of 6 tokens" in chunked["note"][0]
    assert chunked["score"][0] != chunked["score"][0]
    short = previous_token(hl.load(build("llama4_text")), length=6, n_tokens=32, n_null=20)
    assert short["score"].notna().all()
    sinks = previous_token(hl.load(build("gpt_oss")), length=6, n_tokens=32, n_null=20)
    assert sinks["note"].str.contains("learned sink").all()


def test_p_values_are_uniform_in_every_layer_of_random_models() -> None:
    p = np.concatenate(
        [
            previous_token(hl.load(build("gpt2", seed=seed)), length=12, n_tokens=48, n_null=200)[
                ["p_value"]
            ].to_numpy()
            for seed in range(12)
        ],
        1,
    )  # [head of both layers, model]
    for layer in (p[:3], p[3:]):
        assert 0.3 < layer.mean() < 0.7
        assert (layer < 0.1).mean() < 0.3


def test_same_seed_same_table() -> None:
    model = hl.load(build("llama"))
    first, again = (previous_token(model, length=8, n_tokens=32, n_null=20) for _ in range(2))
    assert first.equals(again)
    other = previous_token(model, length=8, n_tokens=32, n_null=20, seed=1)
    assert not np.allclose(first["score"], other["score"])


def test_learned_positions_are_the_rows_of_the_table() -> None:
    module = build("gpt2")
    found = learned_positions(hl.load(module), 5)
    torch.testing.assert_close(found, module.transformer.wpe.weight[:5].detach())


def test_what_cannot_be_read_is_noted_or_refused() -> None:
    with pytest.raises(UnsupportedError, match="multi-head latent attention"):
        previous_token(hl.load(build("deepseek_v3")))
    with pytest.raises(UnsupportedError, match="decoder-only"):
        positional_patterns(hl.load(build("bert")))
    model = hl.load(build("llama"))
    for wrong in ({"length": 1}, {"length": 1000}, {"n_tokens": 3}):
        with pytest.raises(PlanError):
            positional_patterns(model, **wrong)
    with pytest.raises(PlanError, match="n_null"):
        previous_token(model, n_null=0)
