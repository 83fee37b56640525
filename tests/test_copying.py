"""Copying read off the weights, against the eigenvalues of the whole token-by-token matrix."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from real_model import planted_llama, planted_model
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.errors import PlanError, UnsupportedError
from headlab.parameters import copying, eigenvalue_copying


@cache
def tiny(family: str) -> hl.Model:
    return hl.load(build(family), tokenizer=tiny_tokenizer())


def direct_ratio(matrix: np.ndarray) -> float:
    eigenvalues = np.linalg.eigvals(matrix)
    return float(eigenvalues.real.sum() / np.abs(eigenvalues).sum())


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("embedding", ["raw", "unit"])
def test_eigenvalues_equal_those_of_the_whole_token_by_token_matrix(embedding, centre, fold):
    module = build("llama")
    found = eigenvalue_copying(tiny("llama"), embedding, fold, centre)
    e = module.model.embed_tokens.weight.detach().double().numpy()
    u = module.lm_head.weight.detach().double().numpy()
    if embedding == "unit":
        e = e / np.linalg.norm(e, axis=1, keepdims=True)
    if centre:
        u = u - u.mean(0)
    if fold:
        u = u * module.model.norm.weight.detach().double().numpy()
    for layer, block in enumerate(module.model.layers):
        v = block.self_attn.v_proj.weight.detach().double().numpy()
        o = block.self_attn.o_proj.weight.detach().double().numpy()
        for head in range(6):
            group = head // 3  # 2 key/value heads of width 10
            circuit = o[:, 10 * head : 10 * head + 10] @ v[10 * group : 10 * group + 10]
            # atol: transformers' RMSNorm works in float32, whatever it is given
            assert found[layer, head] == pytest.approx(direct_ratio(u @ circuit @ e.T), abs=1e-5)


def test_a_layernorms_centring_is_folded_too():
    module = build("gpt2")
    found = eigenvalue_copying(tiny("gpt2"))
    e = module.transformer.wte.weight.detach().double().numpy()
    gain = module.transformer.ln_f.weight.detach().double().numpy()
    centring = np.eye(36) - 1 / 36
    for layer, block in enumerate(module.transformer.h):
        v = block.attn.c_attn.weight.detach().double().numpy()[:, 72:]
        o = block.attn.c_proj.weight.detach().double().numpy()
        for head in range(3):
            part = slice(12 * head, 12 * head + 12)
            whole = e @ v[:, part] @ o[part] @ centring @ np.diag(gain) @ e.T
            assert found[layer, head] == pytest.approx(direct_ratio(whole), abs=1e-5)


def test_the_planted_induction_head_copies_by_its_weights_until_they_are_scrambled():
    assert eigenvalue_copying(planted_model())[2, 1] > 0.99
    broken = planted.scramble(planted_llama(), "L2H1", part="ov")
    model = hl.load(broken.module, tokenizer=broken.tokenizer)
    assert abs(eigenvalue_copying(model)[2, 1]) < 0.5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_the_planted_head_copies_more_than_rotated_heads_do(family):
    table = copying(hl.load(planted.model(family=family, seed=3)), n_null=2000)
    best = table.loc[table["score"].idxmax()]
    assert (best["layer"], best["head"]) == (2, 1)
    assert best["kind"] == "copies"
    assert best["p_value"] <= 2 / 2001
    assert best["claimed"]
    assert set(table["kind"]) == {"copies", ""}
    assert (table["kind"] == "copies").sum() == 1


def test_a_significant_but_weak_leaning_is_not_claimed():
    model = hl.load(planted.model())
    every = copying(model, n_null=2000, min_effect=0.0)
    strong = copying(model, n_null=2000, min_effect=1.01)
    assert every["claimed"].sum() >= 1
    assert not strong["claimed"].any()
    assert strong["q_value"].equals(every["q_value"])


def test_a_head_of_the_opposite_sign_anti_copies():
    made = planted.model()
    with torch.no_grad():
        made.module.model.layers[2].self_attn.o_proj.weight[:, 64:128].neg_()
    table = copying(hl.load(made), n_null=2000)
    row = table.query("layer == 2 and head == 1")
    assert row["kind"].item() == "anti-copies"
    assert row["score"].item() < -0.99
    assert row["p_value"].item() <= 2 / 2001


def test_the_null_of_narrow_heads_has_mean_zero():
    """Rotations that are not uniform would lean to one side in heads of few dimensions."""
    module = build("llama", hidden_size=24, head_dim=4, tie_word_embeddings=True)
    with torch.no_grad():
        for layer in module.model.layers:
            wide = torch.randn(24, 24)
            layer.self_attn.v_proj.weight.copy_(wide[:8])
            layer.self_attn.o_proj.weight.copy_(torch.cat([wide[:4]] * 3 + [wide[4:8]] * 3).T)
    table = copying(hl.load(module, tokenizer=tiny_tokenizer()), fold_norm=False, n_null=2000)
    assert table["score"].min() > 0.99  # every head copies
    assert abs(table["null_mean"][0]) < 0.05


def test_nan_in_one_head_is_its_own_alone():
    clean, module = copying(tiny("llama"), n_null=50), build("llama")
    with torch.no_grad():
        module.model.layers[0].self_attn.o_proj.weight[0, :10] = float("nan")
    table = copying(hl.load(module, tokenizer=tiny_tokenizer()), n_null=50)
    assert table["score"].isna().tolist() == [True] + [False] * 11
    assert "NaN" in table["note"][0]
    np.testing.assert_allclose(table["score"][1:], clean["score"][1:])
    assert table["p_value"][1:].notna().all()


def test_rows_beyond_the_tokenizer_do_not_count():
    module = build("llama", vocab_size=120)
    before = copying(hl.load(module, tokenizer=tiny_tokenizer()), n_null=20)["score"]
    with torch.no_grad():
        module.get_input_embeddings().weight[97:] = 5.0
        module.get_output_embeddings().weight[97:] = float("nan")
    np.testing.assert_allclose(
        copying(hl.load(module, tokenizer=tiny_tokenizer()), n_null=20)["score"], before
    )


def test_the_null_is_drawn_by_seed_and_wrong_arguments_are_refused():
    first, again = (copying(tiny("llama"), n_null=20, seed=4) for _ in range(2))
    assert first.equals(again)
    assert first["null_mean"][0] != copying(tiny("llama"), n_null=20, seed=5)["null_mean"][0]
    with pytest.raises(PlanError, match="n_null"):
        copying(tiny("llama"), n_null=0)
    with pytest.raises(PlanError, match="alpha"):
        copying(tiny("llama"), alpha=2)
    with pytest.raises(PlanError, match="'raw' or 'unit'"):
        copying(tiny("llama"), embedding="bare")
    with pytest.raises(UnsupportedError, match="multi-head latent attention"):
        copying(tiny("deepseek_v3"))


def test_a_family_whose_values_cannot_be_read_has_no_eigenvalues_but_is_scored():
    scores = hl.score(tiny("deepseek_v3"), "copying", n_prompts=2)
    assert scores.frame["score"].notna().all()
    assert "ov_eigenvalue_copying" not in set(scores.details["detail"])
    readable = hl.score(tiny("llama"), "copying", n_prompts=2)
    assert len(readable.detail("copying", "ov_eigenvalue_copying")) == 12
