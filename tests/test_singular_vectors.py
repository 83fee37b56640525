"""Singular directions reproduce the dense decomposition; tokens along them are the dense projection's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import headlab as hl
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.singular_vectors import singular_vectors
from headlab.parameters.vocabulary import top_tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("circuit", ["OV", "QK"])
def test_values_and_vectors_are_those_of_the_dense_matrix(lab, family, circuit):
    model = lab(family)
    made = circuits(model, dtype=torch.float64)
    found = singular_vectors(made, "0.*, L1H1", circuit, n=3, k=3, draws=5, distance=2)
    assert len(found.heads) == model.spec.n_heads + 1
    for row, head in enumerate(found.heads):
        matrix = made.ov(head.layer) if circuit == "OV" else made.qk(head.layer, 2)
        dense = (matrix.left @ matrix.right)[head.head]
        values = torch.linalg.svdvals(dense)[: matrix.rank]
        np.testing.assert_allclose(found.values[row], values, atol=1e-9)
        for left, right, value in zip(found.left[row], found.right[row], values, strict=False):
            torch.testing.assert_close(left @ dense, value * right)
            torch.testing.assert_close(dense @ right, value * left)
    square = found.values**2
    shares = square / square.sum(1, keepdims=True)
    first = found.frame[(found.frame["direction"] == 0)].drop_duplicates(["layer", "head"])
    np.testing.assert_allclose(first["share"], shares[:, 0])
    np.testing.assert_allclose(found.effective_rank, 1 / (shares**2).sum(1))


@pytest.mark.parametrize("chunk", [1, 10_000])
def test_tokens_are_the_largest_and_smallest_of_the_dense_projection(lab, monkeypatch, chunk):
    monkeypatch.setattr("headlab.parameters.vocabulary._BUDGET", chunk)
    model = lab("gpt2")
    w = torch.randn(7, model.spec.d_model, generator=torch.Generator().manual_seed(0)).double()
    norm = model.module.transformer.ln_f.weight.detach().double()
    W_U, W_E = (x.detach().double() for x in (model.weights.W_U, model.weights.W_E))
    folded = (w - w.mean(1, keepdim=True)) * norm @ W_U
    for wanted, space, fold in ((folded, "unembedding", True), (w @ W_U, "unembedding", False),
                                (w @ W_E.T, "embedding", True)):  # fmt: skip
        for least in (False, True):
            ids, values = top_tokens(model, w, 6, space, fold_norm=fold, least=least)
            exact = wanted.topk(6, largest=not least)
            assert torch.equal(ids, exact.indices)
            torch.testing.assert_close(values, exact.values, rtol=1e-4, atol=1e-5)


def test_logits_of_a_written_direction_are_those_of_the_models_own_end(lab):
    """gemma2 has a gain of 1 + weight, cohere2 a logit scale; adding w to a stream adds its values to the logits."""
    for family in ("gemma2", "cohere2", "llama"):
        model = lab(family)
        x, w = torch.randn(
            2, model.spec.d_model, generator=torch.Generator().manual_seed(1)
        ).double()
        ids, values = top_tokens(model, w[None], model.weights.W_U.shape[1])
        norm = model.weights.final_norm

        def end(stream, norm=norm, model=model):
            return (
                norm(stream.float()).double()
                @ model.weights.W_U.double()
                * model.weights.logit_scale
            )

        step = (end(x + 1e-3 * w) - end(x - 1e-3 * w))[ids[0]].detach()
        # The scale moves as well, which adds a multiple of x's own logits.
        design = torch.stack([values[0], end(x)[ids[0]].detach()], 1)
        fit = torch.linalg.lstsq(design, step[:, None])
        assert float((design @ fit.solution - step[:, None]).norm() / step.norm()) < 5e-3
        assert float(fit.solution[0]) > 0


def test_signs_put_the_farthest_value_of_the_second_side_on_top(lab):
    model = lab("llama")
    made = circuits(model, dtype=torch.float64)
    found = singular_vectors(made, "L1H0", n=6, k=3, draws=2)
    values = (
        found.right[0]
        @ (model.weights.final_norm.weight[:, None] * model.weights.W_U).detach().double()
    )
    values = values - values.mean(1, keepdim=True)
    assert (values.max(1).values >= -values.min(1).values - 1e-9).all()
    writes = found.frame[found.frame["side"] == "writes"]
    for row, best in zip(writes.itertuples(), values.argsort(1, descending=True), strict=True):
        assert row.top_ids == best[:3].tolist()
        assert row.bottom_ids == best.flip(0)[:3].tolist()


def test_coherence_is_the_mean_pairwise_cosine_and_p_counts_random_directions(lab):
    model = lab("gpt2")
    found = singular_vectors(model, "L0H1", "QK", n=2, k=4, draws=40, seed=3)
    table = model.weights.W_E.detach().double()
    centred = table - table.mean(0)
    unit = centred / centred.norm(dim=1, keepdim=True)

    def coherence(ids):
        cosines = unit[ids] @ unit[ids].T
        return float(cosines[np.triu_indices(4, 1)].mean())

    for row in found.frame.itertuples():
        assert row.coherence == pytest.approx(coherence(row.top_ids), abs=1e-5)
    drawn = torch.randn(40, model.spec.d_model, generator=torch.Generator().manual_seed(3)).double()
    null = np.array([coherence(ids) for ids in (drawn @ table.T).topk(4).indices])
    for row in found.frame.itertuples():
        assert row.null_mean == pytest.approx(null.mean(), abs=1e-5)
        assert row.p_value == pytest.approx((1 + (null >= row.coherence - 1e-7).sum()) / 41)


def test_a_direction_of_alike_tokens_is_coherent_and_random_weights_are_not(lab):
    heads = {"L0H0": "sink"}
    module = hl.planted.model("llama", heads, distractors=0).module
    W_E, W_U = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    with torch.no_grad():
        meaning = torch.randn(W_U.shape[1], generator=torch.Generator().manual_seed(0))
        W_U[20:30] += W_U.norm(dim=1).mean() * meaning / meaning.norm()
        o = module.model.layers[1].self_attn.o_proj.weight
        o[:, : module.config.head_dim] = 0
        o[:, 0] = meaning / module.model.norm.weight
    assert W_E is not W_U
    model = hl.load(module)
    found = singular_vectors(model, "1.*", n=1, k=8, draws=500)
    writes = found.frame[found.frame["side"] == "writes"].set_index("head")
    assert set(writes.loc[0, "top_ids"]) <= set(range(20, 30))
    assert writes.loc[0, "q_value"] < 0.05
    assert (writes.drop(0)["q_value"] > 0.05).all()
    assert (singular_vectors(lab("llama"), draws=300).frame["q_value"] > 0.05).all()


def test_bad_input_is_named(lab):
    model = lab("llama")
    with pytest.raises(PlanError, match="circuit='KQ'"):
        singular_vectors(model, circuit="KQ")
    with pytest.raises(PlanError, match="n=0"):
        singular_vectors(model, n=0)
    with pytest.raises(HeadError):
        singular_vectors(model, "L9H0")
    with pytest.raises(PlanError, match="k=1000"):
        top_tokens(model, torch.ones(1, 36), 1000)
    with pytest.raises(PlanError, match="36"):
        top_tokens(model, torch.ones(1, 35))
    with pytest.raises(PlanError, match="NaN"):
        top_tokens(model, torch.full((1, 36), torch.nan))
    with pytest.raises(PlanError, match="space"):
        top_tokens(model, torch.ones(1, 36), space="logits")
    with pytest.raises(UnsupportedError):
        singular_vectors(lab("deepseek_v3"))
