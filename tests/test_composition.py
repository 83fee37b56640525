"""Composition scores are the dense Frobenius formula; so is their null; planted pairs stand out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_models import exact

import headlab as hl
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.composition import KINDS, composition
from headlab.parameters.composition_null import tail_bound
from headlab.parameters.factored import FactoredMatrix
from headlab.parameters.virtual_weights import (
    channel,
    top_token_pairs,
    virtual_ov,
    virtual_qk,
)

FAMILIES = [
    "llama",
    "gpt2",
    "gpt_neox",
    "opt",
    "mistral",
    "gemma2",
    "gemma3_text",
    "qwen3",
    "gpt_oss",
    "olmo2",
]


def dense(model: hl.Model, layer: int, distance: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """W_QK and W_OV of a layer's heads in float64, by multiplying out."""
    made = circuits(model, dtype=torch.float64)
    qk, ov = made.qk(layer, distance), made.ov(layer)
    return qk.left @ qk.right, ov.left @ ov.right


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_dense_formula(lab, family):
    model = lab(family)
    found = composition(circuits(model, dtype=torch.float64), draws=2)
    (_, ov), (qk, ov2) = dense(model, 0), dense(model, 1)
    products = {
        "Q": torch.einsum("eab,lbc->elac", ov, qk),
        "K": torch.einsum("lab,ecb->elac", qk, ov),
        "V": torch.einsum("eab,lbc->elac", ov, ov2),
    }
    for at, kind in enumerate(KINDS):
        late = ov2 if kind == "V" else qk
        size = ov.flatten(1).norm(dim=1)[:, None] * late.flatten(1).norm(dim=1)
        wanted = products[kind].flatten(2).norm(dim=2) / size
        np.testing.assert_allclose(found.scores[at, 0, :, 1], wanted, rtol=1e-9)
    later = np.zeros(found.scores.shape, bool)
    later[:, 0, :, 1] = True
    assert (np.isnan(found.scores) == ~later).all()
    assert (np.isnan(found.q_value) == ~later).all()


def test_weights_by_hand_give_the_scores_of_raw_gpt2_matrices(lab):
    """Against the module's own parameters: LayerNorm's gain and centring in front of W_Q, W_K and W_V."""
    model = lab("gpt2")
    found = composition(circuits(model, dtype=torch.float64), draws=1)
    circuit = []
    for block in model.module.transformer.h:
        d = block.ln_1.weight.shape[0]
        fold = (torch.eye(d) - 1 / d).double() @ torch.diag(block.ln_1.weight.detach().double())
        q, k, v = (fold @ block.attn.c_attn.weight.detach().double()).split(d, 1)
        o = block.attn.c_proj.weight.detach().double()
        heads = [slice(at, at + d // 3) for at in range(0, d, d // 3)]
        circuit.append([(q[:, h] @ k[:, h].T, v[:, h] @ o[h]) for h in heads])
    for early, (_, ov) in enumerate(circuit[0]):
        for late, (qk, ov2) in enumerate(circuit[1]):
            for at, (product, other) in enumerate(
                ((ov @ qk, qk), (qk @ ov.T, qk), (ov @ ov2, ov2))
            ):
                wanted = product.norm() / (ov.norm() * other.norm())
                assert found.scores[at, 0, early, 1, late] == pytest.approx(float(wanted), rel=1e-6)


def test_transformer_lens_gives_the_same_scores():
    bridge = pytest.importorskip("transformer_lens.utilities.matrix")
    lens = pytest.importorskip("transformer_lens")
    model = hl.load(exact("gpt2"))
    made = circuits(model, dtype=torch.float64)
    found = composition(made, draws=1)

    def as_lens(matrix: FactoredMatrix):
        return lens.FactoredMatrix(matrix.left[None], matrix.right[None])

    ov, qk = made.ov(0), made.qk(1)
    theirs = {
        "Q": bridge.composition_scores(as_lens(ov), as_lens(qk)),
        "K": bridge.composition_scores(as_lens(ov), as_lens(qk.T)),
        "V": bridge.composition_scores(as_lens(ov), as_lens(made.ov(1))),
    }
    for at, kind in enumerate(KINDS):
        np.testing.assert_allclose(found.scores[at, 0, :, 1], theirs[kind].squeeze(), rtol=1e-5)


def test_rotations_give_the_stated_mean_and_deviation_of_squared_scores():
    """Dense: rotate W_OV in the stream with random orthogonal matrices, many times."""
    model = hl.load(exact("llama"))
    made = circuits(model, dtype=torch.float64)
    found = composition(made, draws=4000, seed=3)
    ov, qk = made.ov(0)[1].dense(), made.qk(1, 0)[2].dense()
    generator, d = torch.Generator().manual_seed(1), len(ov)
    draws = []
    for _ in range(4000):
        q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        draws.append((ov @ (q * r.diagonal().sign()) @ qk).norm() / (ov.norm() * qk.norm()))
    drawn = torch.stack(draws).numpy()
    score = found.scores[0, 0, 1, 1, 2]
    assert (drawn**2).mean() == pytest.approx(1 / d, rel=0.02)
    assert drawn.mean() == pytest.approx(found.null_mean[0, 0, 1, 1, 2], rel=0.01)
    z = (score**2 - 1 / d) / (drawn**2).std()
    assert found.z[0, 0, 1, 1, 2] == pytest.approx(z, rel=0.05)
    assert found.p_value[0, 0, 1, 1, 2] == pytest.approx((drawn >= score).mean(), abs=0.03)


def test_random_weights_give_no_pair_that_stands_out(lab):
    found = composition(lab("llama"), draws=1000)
    assert (found.frame["q_value"] > 0.05).all()
    assert found.frame["p_value"].mean() == pytest.approx(0.5, abs=0.15)
    assert found.frame["score"].mean() == pytest.approx(found.baseline, rel=0.1)


def test_the_bound_on_the_tail_is_the_product_formula_and_lies_above_the_tail():
    generator = torch.Generator().manual_seed(0)
    writes = torch.rand(3, 4, generator=generator, dtype=torch.float64) ** 3
    reads = torch.rand(3, 2, 5, generator=generator, dtype=torch.float64) ** 3
    writes, reads = writes / writes.sum(-1, keepdim=True), reads / reads.sum(-1, keepdim=True)
    d = 24
    q = torch.linalg.qr(torch.randn(20000, d, 5, generator=generator, dtype=torch.float64)).Q
    drawn = torch.einsum("ea,nab,klb->kenl", writes, q[:, :4].square(), reads).transpose(2, 3)
    for level in (0.5, 0.9, 0.99, 0.999):
        square = drawn.quantile(level, -1)
        bound = tail_bound(writes, reads, square, d, 0)
        assert (bound >= (1 - level) * 0.97).all()
    mean = torch.linalg.svdvals(
        torch.randn(200, d, 5, generator=generator, dtype=torch.float64)
    ).mean()
    weights = torch.einsum("a,b->ab", writes[1], reads[2, 0])
    x = float(square[2, 1, 0])
    least = 1.0
    for part in np.linspace(0, 0.99, 100):
        factor = part * mean**2 / (2 * weights.max())
        product = (1 - 2 * factor * weights / mean**2).pow(-0.5).prod()
        least = min(least, float(product * torch.exp(-factor * x)))
    assert least <= float(bound[2, 1, 0]) <= 1.4 * least


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_induction_by_k_composition_stands_out_among_all_pairs(family):
    heads = {"L0H2": "sink", "L1H0": "previous_token", "L2H1": "induction"}
    model = hl.load(hl.planted.model(family, heads))
    found = composition(model, draws=2000)
    best = found.strongest(n=1).iloc[0]
    assert (best.kind, best.early, best.late) == ("K", "L1H0", "L2H1")
    assert best.p_value < 0.001
    assert best.q_value < 0.001
    assert found.frame.nlargest(1, "z").iloc[0][["kind", "early", "late"]].tolist() == [
        "K",
        "L1H0",
        "L2H1",
    ]


def test_the_same_seed_gives_the_same_numbers_and_distances_matter_where_layers_rotate(lab):
    one, two = (composition(lab("llama"), draws=20, seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.p_value, two.p_value)
    far = composition(lab("llama"), draws=20, distance=7)
    assert not np.allclose(one.scores[0, 0, :, 1], far.scores[0, 0, :, 1])
    np.testing.assert_array_equal(one.scores[2], far.scores[2])
    still, other = (composition(lab("gpt2"), draws=5, distance=at) for at in (0, 7))
    np.testing.assert_array_equal(still.scores, other.scores)


def test_a_virtual_head_moves_what_two_heads_move_in_turn(lab):
    model = lab("llama")
    made = circuits(model, dtype=torch.float64)
    (qk0, ov0), (qk, ov) = dense(model, 0), dense(model, 1)
    del qk0
    wanted = ov0[3] @ ov[2]
    torch.testing.assert_close(virtual_ov(made, "L0H3", "L1H2").dense(), wanted)
    both = virtual_qk(made, "L1H2", q_from="L0H1", k_from="L0H3")
    torch.testing.assert_close(both.dense(), ov0[1] @ qk[2] @ ov0[3].T)
    torch.testing.assert_close(virtual_qk(made, "L1H2", k_from="L0H3").dense(), qk[2] @ ov0[3].T)
    assert both.rank <= model.spec.d_head


def test_a_channel_has_the_principal_angles_of_written_and_read_space(lab):
    from scipy.linalg import subspace_angles

    model = lab("llama")
    made = circuits(model, dtype=torch.float64)
    (_, ov), (qk, _) = dense(model, 0), dense(model, 1)
    found = channel(made, "L0H3", "L1H2", "K")
    writes = np.linalg.svd(ov[3])[2][: made.ov(0).rank].T
    reads = np.linalg.svd(qk[2].T)[0][:, : made.qk(1, 0).rank]
    angles = np.sort(np.cos(subspace_angles(writes, reads)))[::-1]
    np.testing.assert_allclose(found.cosines, angles, atol=1e-8)
    square = np.linalg.svd(qk[2] @ ov[3].T)[1][: len(found.shares)] ** 2
    np.testing.assert_allclose(found.shares, square / square.sum(), atol=1e-10)
    assert found.chance == pytest.approx(10 / 36)
    assert "L0H3 → L1H2" in repr(found)


def test_token_pairs_are_the_largest_entries_of_the_dense_matrix(lab, monkeypatch):
    monkeypatch.setattr("headlab.parameters.virtual_weights._BUDGET", 500)  # five sources at a time
    model = lab("gpt2")
    made = circuits(model, dtype=torch.float64)
    matrix = made.qk(1)[2]
    W_E = model.weights.W_E.double()
    full = W_E @ matrix.dense() @ W_E.T
    found = top_token_pairs(model, matrix, 7)
    np.testing.assert_allclose(found["value"], full.flatten().topk(7).values, rtol=1e-6)
    for row in found.itertuples():
        assert float(full[row.source, row.target]) == pytest.approx(row.value, rel=1e-6)
    assert found["source_text"][0] == f"w{found['source'][0]}" or found["source"][0] < 4
    norm = model.module.transformer.ln_f
    matrix = made.ov(0)[1]
    right = (matrix.right - matrix.right.mean(-1, keepdim=True)) * norm.weight.double()
    logits = (W_E[[9, 30]] @ matrix.left @ right @ model.weights.W_U.double()).detach()
    written = top_token_pairs(model, matrix, 3, target="unembedding", sources=torch.tensor([9, 30]))
    ours, theirs = written["value"].to_numpy(), logits.flatten().topk(3).values.numpy()
    np.testing.assert_allclose(ours / ours[0], theirs / theirs[0], rtol=1e-5)
    assert set(written["source"]) <= {9, 30}


def test_bad_input_is_named(lab):
    model = lab("llama")
    with pytest.raises(PlanError, match="draws=0"):
        composition(model, draws=0)
    with pytest.raises(PlanError, match="kind='X'"):
        composition(model, draws=1).strongest("X")
    with pytest.raises(HeadError, match="L0H1 does not come after L1H0"):
        virtual_ov(model, "L1H0", "L0H1")
    with pytest.raises(HeadError, match="names 6 heads"):
        virtual_qk(model, "1.*", k_from="L0H0")
    with pytest.raises(PlanError, match="kind='W'"):
        channel(model, "L0H0", "L1H0", "W")
    with pytest.raises(PlanError, match="sources"):
        top_token_pairs(model, virtual_ov(model, "L0H0", "L1H0"), sources=torch.tensor([10**6]))
    with pytest.raises(UnsupportedError, match="two stacks"):
        composition(lab("bart"))
    with pytest.raises(UnsupportedError):
        composition(lab("deepseek_v3"))


@pytest.mark.slow
def test_composition_of_the_real_model_feeds_its_induction_head():
    """L18H6 is the strongest induction head of SmolLM2-135M by prefix matching; nothing here looks at attention."""
    from real_model import smollm2

    found = composition(smollm2(), draws=50)
    best = found.strongest("K", 5)
    assert "L18H6" in set(best["late"])
    assert (best["q_value"] < 1e-6).all()
    assert found.strongest("Q", 1)["score"][0] > 2 * found.baseline
