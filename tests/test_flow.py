"""Information flow routes: importances by the plain formula, and the graph they make."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import build, tiny_tokenizer

import headlab as hl
from headlab import planted
from headlab.causal.attribution import flow as flow_module
from headlab.causal.attribution.flow import (
    FLOOR,
    InformationFlow,
    Node,
    information_flow,
    proximity,
)
from headlab.errors import PlanError, PromptError, UnsupportedError

SINGLE = ("gpt_oss", "deepseek_v3")  # their experts take no float64


def made(family: str) -> hl.Model:
    module = build(family)
    return hl.load(module if family in SINGLE else module.double(), tokenizer=tiny_tokenizer())


def drawn(n: int) -> list[list[int]]:
    return torch.randint(4, 97, (1, n), generator=torch.Generator().manual_seed(1)).tolist()


def importances(parts: list[torch.Tensor], whole: torch.Tensor) -> np.ndarray:
    raw = [
        max(float(whole.abs().sum()) - float((whole - part).abs().sum()), 1e-5) for part in parts
    ]
    return np.array(raw) / sum(raw)


def test_importances_of_the_papers_example():
    """y = [2, 0], parts 1, 3 and −2 along the first axis: raw importances 1, 1 and the floor."""
    parts = torch.tensor([[1.0, 0.0], [3.0, 0.0], [-2.0, 0.0]])
    found = proximity(parts, torch.tensor([2.0, 0.0]))
    wanted = np.array([1, 1, FLOOR])
    np.testing.assert_allclose(found.numpy(), wanted / wanted.sum(), rtol=1e-5)
    assert FLOOR == 1e-5


def test_a_block_of_llama_by_the_formula():
    """Every part one by one, from plain transformers' tensors alone."""
    ids, n = drawn(6), 6
    module = build("llama").double()
    module.set_attn_implementation("eager")
    block, kept = module.model.layers[1], {}
    block.self_attn.v_proj.register_forward_hook(lambda _, args, out: kept.update(v=out[0]))
    block.self_attn.o_proj.register_forward_hook(lambda _, args, out: kept.update(attn=out[0]))
    block.mlp.register_forward_hook(lambda _, args, out: kept.update(mlp=out[0]))
    block.register_forward_hook(lambda _, args, out: kept.update(pre=args[0][0], post=out[0]))
    with torch.no_grad():
        pattern = module(torch.tensor(ids), output_attentions=True).attentions[1][0]
    found = information_flow(made("llama"), ids)
    assert not found.parallel
    w_o = block.self_attn.o_proj.weight.detach()
    for q in range(n):
        mid = kept["pre"][q] + kept["attn"][q]
        parts = [
            pattern[h, q, k]
            * (w_o[:, 10 * h : 10 * h + 10] @ kept["v"][k, 10 * (h // 3) : 10 * (h // 3) + 10])
            for h in range(6)
            for k in range(q + 1)
        ]
        wanted = importances([*parts, kept["pre"][q]], mid)
        np.testing.assert_allclose(
            found.attention[1, :, q, : q + 1].ravel(), wanted[:-1], atol=1e-6
        )
        assert found.residual[1, q] == pytest.approx(wanted[-1], abs=1e-6)
        mlp = importances([kept["mlp"][q], mid], kept["post"][q])
        assert found.mlp[1, q] == pytest.approx(mlp[0], abs=1e-6)


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_neox", "gemma2", "gemma3_text", "olmo2", "granite", "gpt_oss"]
)
def test_every_family_by_the_formula(family: str):
    """Parts made with the norm behind attention as the module computes it, at the scale the whole has."""
    model, ids, n = made(family), drawn(7), 7
    found = information_flow(model, ids)
    names = ("pattern", "v", "resid_pre", "attn_out", "mlp_out", "resid_post")
    trace = model.trace(ids, keep=hl.keep.tensors(*names))
    for layer in range(2):
        pattern, v, pre, attn, mlp, post = (trace.tensor(name, layer)[0].double() for name in names)
        heads = len(pattern)
        values = v.repeat_interleave(heads // v.shape[1], 1)
        w_o, b_o = model.weights.W_O(layer).double(), model.weights.b_O(layer)
        q = n - 1
        parts = torch.einsum("hk,khd,hdm->hkm", pattern[:, q], values, w_o)
        if (norm := model.blocks.attention_norm(layer)) is not None:
            sum_ = parts.sum((0, 1)) + (0 if b_o is None else b_o)
            at = sum_.abs().argmax()
            gain = norm.weight.detach().double() + ("gemma" in family)
            scale = attn[q, at] / (gain[at] * sum_[at])  # RMSNorm: one number for all dimensions
            parts = parts * gain * scale
        elif family == "granite":
            parts = parts * 0.6
        whole = post[q] if family == "gpt_neox" else pre[q] + attn[q]
        others = [pre[q], mlp[q]] if family == "gpt_neox" else [pre[q]]
        seen = [(h, k) for h in range(heads) for k in range(n) if pattern[h, q, k] > 0]
        wanted = importances([*(parts[place] for place in seen), *others], whole)
        got = [found.attention[layer, h, q, k] for h, k in seen]
        np.testing.assert_allclose(got, wanted[: len(seen)], atol=1e-5)
        assert found.residual[layer, q] == pytest.approx(wanted[len(seen)], abs=1e-5)
        if family == "gpt_neox":
            assert found.mlp[layer, q] == pytest.approx(wanted[-1], abs=1e-5)
        else:
            two = importances([mlp[q], whole], post[q])
            assert found.mlp[layer, q] == pytest.approx(two[0], abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gptj", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("tau", [0.0, 0.02])
def test_parts_of_each_token_sum_to_one_and_the_future_has_none(family: str, tau: float):
    found = information_flow(made(family), drawn(8), tau=tau)
    assert found.parallel == (family in ("gpt_neox", "gptj"))
    total = found.edges.sum(-1) + (found.mlp if found.parallel else 0)
    np.testing.assert_allclose(total, 1, atol=1e-5)
    assert not np.triu(found.attention, 1).any()
    if tau:
        kept = found.attention[found.attention > 0]
        assert kept.min() > tau  # what is left only grew


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_half_precision_gives_nearly_the_same(family: str):
    exact = information_flow(made(family), drawn(8))
    half = hl.load(build(family).bfloat16(), tokenizer=tiny_tokenizer())
    found = information_flow(half, drawn(8))
    np.testing.assert_allclose(found.edges, exact.edges, atol=0.06)
    np.testing.assert_allclose(found.mlp, exact.mlp, atol=0.06)


def test_small_importances_leave_their_share_to_the_others():
    model, ids = made("llama"), drawn(8)
    every, some = information_flow(model, ids), information_flow(model, ids, tau=0.03)
    rows, rest = every.attention[1, :, 7], every.residual[1, 7]
    left = np.where(rows > 0.03, rows, 0)
    rest = rest if rest > 0.03 else 0.0
    np.testing.assert_allclose(some.attention[1, :, 7], left / (left.sum() + rest), atol=1e-6)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch):
    model, ids = made("gpt2"), drawn(9)
    whole = information_flow(model, ids)
    monkeypatch.setattr(flow_module, "_BLOCK", 2 * 9 * 36)
    monkeypatch.setattr(flow_module, "_BUDGET", 1)
    parts = information_flow(model, ids)
    np.testing.assert_array_equal(whole.attention, parts.attention)
    np.testing.assert_array_equal(whole.mlp, parts.mlp)


def by_hand(parallel: bool) -> InformationFlow:
    """Two layers, one head, three tokens."""
    attention = np.zeros((2, 1, 3, 3), np.float32)
    attention[1, 0, 2] = [0.05, 0.6, 0.1]
    attention[0, 0, 1, 0] = 0.3
    residual = np.array([[0.9, 0.7, 0.8], [0.9, 0.9, 0.25]], np.float32)
    mlp = np.array([[0.0, 0.4, 0.0], [0.0, 0.0, 0.02]], np.float32)
    return InformationFlow(("a", "b", "c"), attention, residual, mlp, parallel)


def test_routes_follow_edges_above_the_threshold():
    found = by_hand(False).routes(threshold=0.1)
    links = {(source, target): (kind, value) for source, target, kind, value in found.links}
    top, mid = Node("stream", 1, 2), Node("mid", 1, 2)
    below = {at: (Node("stream", 0, at), Node("mid", 0, at)) for at in (1, 2)}
    assert links[mid, top] == ("residual", pytest.approx(0.98))
    assert links[below[2][0], mid] == ("attention", pytest.approx(0.35))  # head and stream before
    assert links[below[1][0], mid] == ("attention", pytest.approx(0.6))
    assert (Node("stream", 0, 0), mid) not in links
    assert (Node("mlp", 1, 2), top) not in links
    assert links[Node("mlp", 0, 1), below[1][0]] == ("mlp", pytest.approx(0.4))
    assert links[below[1][1], Node("mlp", 0, 1)] == ("mlp", pytest.approx(0.4))
    assert links[Node("stream", -1, 0), below[1][1]] == ("attention", pytest.approx(0.3))
    assert len(links) == 10
    assert set(found.nodes) == {node for edge in links for node in edge}
    frame = found.frame.set_index(["layer", "kind", "source_position"])
    assert frame.loc[(1, "attention", 1), "head_importance"].item() == pytest.approx(0.6)
    assert len(found.heads) == 2


def test_routes_of_parallel_blocks_lead_the_mlp_from_the_stream_before():
    found = by_hand(True).routes(threshold=0.1)
    links = {(source, target) for source, target, *_ in found.links}
    assert (Node("stream", 0, 1), Node("stream", 1, 2)) in links
    assert (Node("mlp", 0, 1), Node("stream", 0, 1)) in links
    assert (Node("stream", -1, 1), Node("mlp", 0, 1)) in links
    assert not any(node.kind == "mid" for node in found.nodes)


def test_routes_show_the_planted_circuit():
    """The induction head brings the copied token, whose own stream the previous-token head wrote to."""
    model = hl.load(planted.model("llama", {"L1H0": "previous_token", "L2H1": "induction"}))
    words = [10, 20, 30, 40, 50, 60]
    found = information_flow(model, [[1, *words, *words[:3]]])
    for layer, head, q, k in ((2, 1, 9, 4), (1, 0, 4, 3), (1, 0, 9, 8)):
        of_query = found.attention[layer, :, q]
        assert np.unravel_index(of_query.argmax(), of_query.shape) == (head, k)
    least = 0.9 * float(min(found.attention[2, 1, 9, 4], found.attention[1, 0, 4, 3]))
    heads = found.routes(threshold=least).heads
    shown = set(heads[["layer", "head", "query", "key"]].itertuples(index=False, name=None))
    assert {(2, 1, 9, 4), (1, 0, 4, 3)} <= shown


def test_bad_input_is_named(monkeypatch: pytest.MonkeyPatch):
    model = made("gpt2")
    with pytest.raises(PromptError, match="one prompt, not 2"):
        information_flow(model, [[5, 6], [7, 8]])
    with pytest.raises(PlanError, match="tau=1"):
        information_flow(model, drawn(4), tau=1)
    with pytest.raises(PlanError, match="position 4"):
        information_flow(model, drawn(4)).routes(4)
    monkeypatch.setattr(flow_module, "_LIMIT", 4 * 2 * 3 * 16)
    with pytest.raises(PlanError, match="shorten the prompt to 4"):
        information_flow(model, drawn(6))


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_streams_that_are_no_sums_are_refused(family: str):
    with pytest.raises(UnsupportedError):
        information_flow(hl.load(build(family)), drawn(4))


def test_a_stream_changed_on_its_way_is_refused():
    model = made("gpt2")
    model.module.transformer.h[0].register_forward_hook(lambda _, args, out: 1.5 * out)
    with pytest.raises(UnsupportedError, match="layer 0 is not the sum"):
        information_flow(model, drawn(6))
