"""Circuits read off the weights, against real forward passes of every family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from tiny_models import CONFIGS, ENCODER_DECODER, MASKED, build
from torch import Tensor

import headlab as hl
from headlab.errors import HeadError, PlanError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.embeddings import embed

DECODERS = [name for name in CONFIGS if name not in (*MASKED, *ENCODER_DECODER)]
READABLE = [name for name in DECODERS if name != "deepseek_v3"]
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "llama4_text")
POST_NORM = ("gemma2", "gemma3_text", "olmo2", "glm4")
LENGTH = 9


def lab(family: str) -> hl.Model:
    return hl.load(build(family))


def ids(n: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(4, 97, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def traced(model: Any, *names: Any) -> Any:
    return model.trace(ids(), keep=hl.keep.tensors(*names), logits="none")


def with_one(u: Tensor) -> Tensor:
    return torch.cat([u, torch.ones_like(u[..., :1])], -1)


@pytest.mark.parametrize("family", READABLE)
def test_augmented_qk_gives_the_scores_of_a_forward_pass(family: str) -> None:
    model = lab(family)
    found = circuits(model, dtype=torch.float64)
    trace = traced(model, "q", "k", "resid_pre")
    for layer, facts in enumerate(model.spec.layers):
        q, k = (trace.tensor(name, layer)[0].double() for name in "qk")
        k = k.repeat_interleave(facts.n_heads // facts.n_kv_heads, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k)
        u = with_one(found.reads(layer, trace.tensor("resid_pre", layer)[0].double()))
        ours = torch.zeros_like(scores)
        for i in range(LENGTH):
            for j in range(i + 1):
                omega = found.augmented_qk(layer, i - j)
                ours[:, i, j] = ((u[i] @ omega.left) * (omega.right @ u[j])).sum(-1)
        if found.qk_normed(layer) or family == "llama4_text":
            # A positive factor per token and head is left out on either side: divide both by it.
            ours = ours / sizes(found, layer, u, "left") / sizes(found, layer, u, "right").mT
            scores = scores / q.norm(dim=-1).T[:, :, None] / k.norm(dim=-1).T[:, None]
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        assert_close(ours[:, seen], scores[:, seen])
        assert scores.std() > 0.01


@pytest.mark.parametrize("family", READABLE)
def test_queries_and_keys_have_the_sizes_the_seam_sees(family: str) -> None:
    model = lab(family)
    found = circuits(model, dtype=torch.float64)
    trace = traced(model, "q", "k", "resid_pre")
    for layer, facts in enumerate(model.spec.layers):
        q, k = (trace.tensor(name, layer)[0].double() for name in "qk")
        k = k.repeat_interleave(facts.n_heads // facts.n_kv_heads, 1)
        ours_q, ours_k = found.queries_and_keys(layer, trace.tensor("resid_pre", layer)[0].double())
        for i, j in ((2, 1), (2, 2), (2, 0)):  # Llama 4's temperature sets in at position 3
            ours = (found.turned(layer, ours_q[i], i - j) * ours_k[j]).sum(-1)
            assert_close(ours, (q[i] * k[j]).sum(-1))


def sizes(found: Any, layer: int, u: Tensor, side: str) -> Tensor:
    omega = found.augmented_qk(layer, 0)
    matrix = omega.left if side == "left" else omega.right.mT
    return (u @ matrix).norm(dim=-1)[..., None]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < 2e-5, error


@pytest.mark.parametrize("family", READABLE)
def test_ov_gives_what_heads_add_to_the_stream(family: str) -> None:
    model = lab(family)
    found = circuits(model, dtype=torch.float64)
    trace = traced(model, "pattern", "attn_out", "resid_pre")
    for layer in range(model.spec.n_layers):
        u = found.reads(layer, trace.tensor("resid_pre", layer)[0].double())
        pattern = trace.tensor("pattern", layer)[0].double()
        moved = torch.einsum("hij,hjd->hid", pattern, u @ found.ov(layer))
        # A row sums to less than 1 where a sink takes part of it.
        added = (moved + pattern.sum(-1)[..., None] * found.ov_bias(layer)[:, None]).sum(0)
        seen = trace.tensor("attn_out", layer)[0].double()
        if (bias := model.weights.b_O(layer)) is not None:
            assert family not in POST_NORM
            seen = seen - bias.double() * model.blocks.residual_multiplier
        if family in POST_NORM:
            added, seen = (
                added / added.norm(dim=-1, keepdim=True),
                seen / seen.norm(dim=-1, keepdim=True),
            )
        assert_close(added, seen)


def test_float64_identity_of_scores_and_results() -> None:
    """To the last digits where every part computes in float64; rotation is computed in float32 by all families."""
    for family, tolerance in (("gpt2", 1e-12), ("opt", 1e-12), ("llama", 1e-6)):
        model = hl.load(exact(family))
        found = circuits(model, dtype=torch.float64)
        trace = traced(model, "q", "k", "pattern", "attn_out", "resid_pre")
        u = with_one(found.reads(1, trace.tensor("resid_pre", 1)[0]))
        q, k = trace.tensor("q", 1)[0], trace.tensor("k", 1)[0]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        for i, j in ((0, 0), (5, 3), (8, 0)):
            ours = u[i] @ found.augmented_qk(1, i - j).dense() @ u[j]
            torch.testing.assert_close(ours, (q[i] * k[j]).sum(-1), rtol=tolerance, atol=tolerance)


def test_qk_without_biases_is_the_corner_of_the_augmented() -> None:
    found = circuits(lab("gpt2"))
    torch.testing.assert_close(found.qk(1).dense(), found.augmented_qk(1).dense()[:, :-1, :-1])


def test_unfolded_matrices_are_the_bare_weights() -> None:
    model = lab("qwen3")
    found = circuits(model, fold=False)
    weights = model.weights
    group = 6 // 2
    for head in range(6):
        dense = weights.W_V(1)[head // group] @ weights.W_O(1)[head]
        torch.testing.assert_close(found.ov(1)[head].dense(), dense)
        dense = weights.W_Q(1)[head] @ weights.W_K(1)[head // group].T
        torch.testing.assert_close(found.qk(1, 0)[head].dense(), dense)
    assert not found.ov_bias(1).any()


def test_mean_over_distances_is_the_mean_of_the_matrices() -> None:
    found = circuits(lab("llama"), dtype=torch.float64)
    each = torch.stack([found.qk(0, distance).dense() for distance in range(4)]).mean(0)
    torch.testing.assert_close(found.qk(0, range(4)).dense(), each)
    every = torch.stack([found.qk(0, distance).dense() for distance in range(128)]).mean(0)
    torch.testing.assert_close(found.qk(0, "mean").dense(), every)


def test_mean_distance_ends_at_the_window() -> None:
    found = circuits(lab("mistral"), dtype=torch.float64)  # a window of 5
    torch.testing.assert_close(found.qk(0, "mean").dense(), found.qk(0, range(5)).dense())


def test_yarn_lengthens_rotated_queries_and_keys() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = hl.load(build("llama", rope_parameters=rope))
    found = circuits(model, dtype=torch.float64)
    trace = traced(model, "q", "k", "resid_pre")
    u = with_one(found.reads(0, trace.tensor("resid_pre", 0)[0].double()))
    q, k = trace.tensor("q", 0)[0, 7].double(), trace.tensor("k", 0)[0, 2].double()
    theirs = (q * k.repeat_interleave(3, 0)).sum(-1)
    assert_close(u[7] @ found.augmented_qk(0, 5).dense() @ u[2], theirs)


def test_rotating_layers_ask_for_a_distance_and_others_do_not() -> None:
    found = circuits(lab("llama"))
    with pytest.raises(PlanError, match="no meaning without a distance"):
        found.qk(0)
    mixed = circuits(lab("smollm3"))  # its second layer does not rotate
    assert [mixed.rotates(layer) for layer in (0, 1)] == [False, True] or [
        mixed.rotates(layer) for layer in (0, 1)
    ] == [True, False]
    still = 0 if not mixed.rotates(0) else 1
    mixed.qk(still)


def test_a_causal_layer_has_no_keys_behind_the_query_and_layers_go_by_number() -> None:
    found = circuits(lab("llama"))
    with pytest.raises(PlanError, match="key behind the query"):
        found.qk(0, -1)
    with pytest.raises(HeadError, match="'L1H2' is no layer"):
        found.ov("L1H2")
    assert repr(found) == "Circuits of llama: 2 layers, 2 of them rotating, norms folded in"


@pytest.mark.parametrize("distance", ["near", [], 1.5, [[1]]])
def test_distances_that_mean_nothing_are_refused(distance: Any) -> None:
    with pytest.raises(PlanError, match="must be a number of tokens"):
        circuits(lab("llama")).qk(0, distance)


def test_latent_attention_says_why_it_has_no_matrices() -> None:
    found = circuits(lab("deepseek_v3"))
    for read in (lambda: found.qk(0, 0), lambda: found.ov(0)):
        with pytest.raises(UnsupportedError, match="multi-head latent attention"):
            read()


def test_queries_that_weights_do_not_explain_are_refused() -> None:
    module = build("llama")
    mixing = torch.linalg.qr(torch.randn(60, 60, generator=torch.Generator().manual_seed(0))).Q
    module.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda part, args, out: out @ mixing
    )
    found = circuits(hl.load(module))
    found.qk(0, 0)
    with pytest.raises(UnsupportedError, match="queries of layer 1 of llama are not what"):
        found.qk(1, 0)


def test_a_bias_in_the_norm_of_queries_is_refused() -> None:
    found = circuits(hl.load(build("phi", qk_layernorm=True)))
    with pytest.raises(UnsupportedError, match="adds a bias"):
        found.qk(0, 0)


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(HeadError, match="layer 7 does not exist"):
        circuits(lab("llama")).ov(7)


@pytest.mark.parametrize("family", MASKED)
def test_encoders_have_circuits(family: str) -> None:
    model = lab(family)
    found = circuits(model, dtype=torch.float64)
    hidden: list[Tensor] = []
    attention = model.weights.attention_modules[1]
    handle = attention.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    trace = traced(model, "q", "k")
    handle.remove()
    u = with_one(hidden[0][0].double())
    theirs = torch.einsum("ihd,jhd->hij", *(trace.tensor(name, 1)[0].double() for name in "qk"))
    assert_close(u @ found.augmented_qk(1).dense() @ u.T, theirs)


def test_cross_attention_has_no_one_matrix() -> None:
    model = lab("bart")
    found = circuits(model)
    cross = [layer.stack for layer in model.spec.layers].index("cross")
    with pytest.raises(UnsupportedError, match="from one stack to another"):
        found.qk(cross)


def test_weights_are_what_they_are_under_any_edit() -> None:
    model = lab("llama")
    plain = circuits(model)
    with model.edit(hl.scale("*.*", site="k", by=2.0), hl.scale("0.*", site="mlp_out", by=0.0)):
        edited = circuits(model)
        inside = embed(model, 1)
    for layer in range(2):
        torch.testing.assert_close(edited.qk(layer, 1).dense(), plain.qk(layer, 1).dense())
    torch.testing.assert_close(inside, embed(model, 1))


def test_pruned_heads_and_blank_embeddings_stop_nobody() -> None:
    module = build("llama")
    with torch.no_grad():
        module.model.layers[1].self_attn.q_proj.weight[:10] = 0
        module.get_input_embeddings().weight[97 // 2] = 0
    found = circuits(hl.load(module))
    assert not found.qk(1, 0)[0].dense().any()
    assert found.qk(1, 0)[1].dense().any()
    assert found.rotates(0)


def test_heads_wider_than_the_model() -> None:
    found = circuits(hl.load(build("llama", head_dim=64)), dtype=torch.float64)
    assert found.qk(0, 3).shape == (6, 36, 36)


def test_a_model_is_unchanged_after_its_circuits_are_read() -> None:
    module = build("gemma3_text")
    model = hl.load(module)
    before = model.logits(ids())
    circuits(model)
    assert torch.equal(model.logits(ids()), before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_shapes() -> None:
    found = circuits(lab("llama"))
    assert found.ov(0).shape == (6, 36, 36)
    assert found.ov(0).rank == 10
    assert found.augmented_qk(0, 0).shape == (6, 37, 37)
    assert np.isclose(found.scaling(0), 10**-0.5)
