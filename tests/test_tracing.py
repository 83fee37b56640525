"""Scores split over singular directions and over earlier parts add up; planted circuits are traced and can be cut."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from exact_models import exact
from tiny_models import build

import headlab as hl
from headlab.attention import Head
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError
from headlab.parameters.circuits import circuits
from headlab.parameters.on_prompts.signals import edit_signal
from headlab.parameters.on_prompts.sparse_scores import PromptScores, sparse_set
from headlab.parameters.on_prompts.tracing import sparsity, trace_heads, upstream

FAMILIES = [
    "llama",
    "gpt2",
    "gpt_neox",
    "opt",
    "mistral",
    "granite",
    "gemma2",
    "gpt_oss",
    "glm4",
    "smollm3",
    "phi",
]
IDS = torch.randint(4, 97, (1, 9), generator=torch.Generator().manual_seed(0))


def module_of(family: str):
    # The experts of gpt_oss compute in float32 at most.
    return build(family) if family == "gpt_oss" else exact(family)


@cache
def scores(family: str) -> PromptScores:
    return PromptScores(circuits(hl.load(module_of(family)), dtype=torch.float64), IDS)


def eager_scores(family: str, layer: int) -> torch.Tensor:
    """q · k [head, query, key] by a forward pass headlab has no part in: queries and keys at transformers' own seam."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    seen = []

    def look(module, query, key, value, mask, scaling=None, **rest):
        seen.append((query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT)[0])
        kept = AttentionInterface()["sdpa"]
        rest = {name: rest[name] for name in rest if name not in ("s_aux", "softcap")}
        return kept(module, query, key, value, mask, scaling=scaling, **rest)

    AttentionInterface.register("headlab-test-look", look)
    AttentionMaskInterface.register("headlab-test-look", sdpa_mask)
    module = module_of(family)
    module.set_attn_implementation("headlab-test-look")
    with torch.no_grad():
        module(IDS, use_cache=False)
    return seen[layer]


@pytest.mark.parametrize("family", FAMILIES)
def test_terms_sum_to_the_score_of_a_forward_pass(family):
    split = scores(family)
    spec = split.model.spec
    # Softcap and sinks change later layers of the bare run, so those are looked at in layer 0.
    layer = 0 if spec.layers[0].softcap or spec.layers[0].sinks else 1
    wanted = eager_scores(family, layer)
    for head, i, j in ((0, 8, 3), (spec.n_heads - 1, 6, 6), (1, 5, 4)):
        found = split.terms(split.firing(Head(layer, head), i, j))
        assert len(found.terms) == spec.layers[layer].d_head
        assert float(found.terms.sum()) == pytest.approx(
            float(wanted[head, i, j]), rel=1e-5, abs=1e-6
        )
        assert found.firing.score == pytest.approx(float(wanted[head, i, j]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_earlier_parts_add_sums_to_the_selected_terms(family):
    split = scores(family)
    layer = split.model.spec.n_layers - 1
    tried = 0
    for head in range(split.model.spec.n_heads):
        seen = [split.firing(Head(layer, head), i, j) for i in (7, 8) for j in (2, 4, 6)]
        firing = max(seen, key=lambda one: one.score)
        if firing.score <= 0:
            continue
        terms = split.terms(firing)
        chosen = terms.terms[terms.selected().copy()]
        for side in ("destination", "source"):
            parts = upstream(split, terms, side)
            near = 1e-5 * parts["contribution"].abs().sum() if family == "gpt_oss" else 1e-6
            assert parts["contribution"].sum() == pytest.approx(float(chosen.sum()), abs=near)
            assert parts["share"].sum() == pytest.approx(1, abs=near)
            assert len(parts) == 2 + layer * (split.model.spec.n_heads + 2)
            tried += 1
    assert tried


def test_a_contribution_is_the_change_of_the_terms_when_the_part_is_taken_off():
    """By hand for GPT-2: the stream less one head's result, through ln_1 with its scale held, c_attn and q · k."""
    split = scores("gpt2")
    block, d = split.model.module.transformer.h[1], 36
    x = split.trace.tensor("resid_pre", 1)[0]
    z = split.trace.tensor("z", 0)[0]
    o = split.model.module.transformer.h[0].attn.c_proj.weight.detach().view(3, 12, d)

    def score(stream_i, stream_j):
        made = []
        for at, stream, part in ((7, stream_i, 0), (4, stream_j, 1)):
            scale = (x[at].var(unbiased=False) + block.ln_1.eps).rsqrt()
            y = (stream - stream.mean()) * scale * block.ln_1.weight + block.ln_1.bias
            qkv = y @ block.attn.c_attn.weight + block.attn.c_attn.bias
            made.append(qkv.view(3, 3, 12)[part, 2])
        return float((made[0] @ made[1]).detach())

    firing = split.firing(Head(1, 2), 7, 4)
    assert firing.score == pytest.approx(score(x[7], x[4]))
    terms = split.terms(firing)
    every = np.arange(12)
    for side, at in (("destination", 7), ("source", 4)):
        towards = split.scale(1, at) * terms.weights(side)[:, every].sum(1)[:-1]
        for head in range(3):
            result = z[at, head] @ o[head]
            less = [x[7], x[4]]
            less[side == "source"] = x[at] - result
            assert float(split.heads(0, at)[0][head] @ towards) == pytest.approx(
                firing.score - score(*less), abs=1e-9
            )
            others = [p for p in range(1, 9) if p != at]
            elsewhere = np.mean([float(z[p, head] @ o[head] @ towards) for p in others])
            assert float(split.elsewhere(0, towards, at)[head]) == pytest.approx(elsewhere)


def test_the_papers_projection_is_its_formula():
    split = scores("gpt2")
    head = next(h for h in range(3) if split.firing(Head(1, h), 7, 4).score > 0)
    terms = split.terms(split.firing(Head(1, head), 7, 4))
    dense = split.made.augmented_qk(1, 0)[head].dense()
    u, s, _ = torch.linalg.svd(dense)
    stream = split.stream(1, 7)
    chosen = terms.selected()
    x = split.trace.tensor("resid_pre", 1)[0, 7]
    scale = 1 / (x.var(unbiased=False) + split.model.module.transformer.h[1].ln_1.eps).sqrt()
    result = split.heads(0, 7)[0][1]
    wanted = sum(
        torch.sign(stream @ u[:, k]) * s[k].sqrt() * (u[:-1, k] @ result) * scale for k in chosen
    )
    row = upstream(split, terms, "destination").query("site == 'head' and head == 1").iloc[0]
    assert row.projection == pytest.approx(float(wanted), rel=1e-4)


def test_selected_terms_are_the_shortest_prefix_that_exceeds_its_share():
    terms = np.array([1.0, 5.0, -2.0, 3.0, -1.0])  # sums to 6
    assert sparse_set(terms, 1.0).tolist() == [1, 3]
    assert sparse_set(terms, 0.5).tolist() == [1]
    assert sparse_set(terms, 1.4).tolist() == [1, 3, 0]
    assert sparse_set(np.array([0.1, 0.2, 0.3]), 1.0).tolist() == [2, 1, 0]
    assert sparse_set(np.array([3.0, 1.0, 1e-9, -1e-9, 2.0]), 1.0).tolist() == [0, 4, 1]
    with pytest.raises(PlanError, match="negative"):
        sparse_set(-terms)
    with pytest.raises(PlanError, match="threshold=0"):
        sparse_set(terms, 0)


def test_heads_fire_where_attention_and_score_say(lab):
    model = lab("gpt2")
    split = PromptScores(circuits(model), IDS)
    heads = [Head(1, head) for head in range(3)]
    found = {(f.head.head, f.destination, f.source) for f in split.firings(heads, None, 0.2)}
    trace = model.trace(IDS, keep=hl.keep.tensors("pattern", "q", "k"))
    wanted = set()
    for head in range(3):
        pattern = trace.tensor("pattern", 1)[0, head]
        product = trace.tensor("q", 1)[0, :, head] @ trace.tensor("k", 1)[0, :, head].T
        wanted |= {
            (head, i, j) for i in range(9) for j in range(1, i + 1)
            if pattern[i, j] >= 0.2 and product[i, j] >= 0
        }  # fmt: skip
    assert found == wanted
    assert wanted


@cache
def planted_scores(family: str):
    heads = {"L0H2": "sink", "L1H0": "previous_token", "L2H1": "induction"}
    planted = hl.planted.model(family, heads)
    model = hl.load(planted)
    generator = torch.Generator().manual_seed(1)
    words = torch.stack([torch.randperm(100, generator=generator)[:12] + 10 for _ in range(12)])
    bos = torch.full((12, 1), model.bos)
    return model, torch.cat([bos, words, words], 1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_induction_head_is_traced_to_the_previous_token_head(family):
    model, ids = planted_scores(family)
    graph = trace_heads(model, ids, "L2H1", destination=-1)
    first = graph.frame.query("head == 'L2H1' and side == 'source'").iloc[0]
    assert first.upstream == "L1H0"
    assert first.n_edges == first.n == 12
    assert first.ci_low > 0.5
    assert first.p_value < 0.001
    assert first.q_value < 0.05
    edges = graph.edges.query("head == 'L2H1' and upstream == 'L1H0' and side == 'source'")
    assert (edges["source"] == edges["destination"] - 11).all()
    assert (edges["fires"] == edges["source"] - 1).all()
    # The previous-token head was followed from there.
    followed = graph.edges.query("head == 'L1H0' and depth == 1")
    assert set(followed["prompt"]) == set(range(12))
    assert "an edge on 12 of the 12 prompt(s) where L2H1 was traced" in repr(graph)
    assert (graph.starts["firings"] == 1).all()
    assert "not fire" not in repr(graph)


def test_heads_that_do_not_fire_say_how_much_they_attended():
    model = hl.load(exact("llama"))
    pattern = model.trace(IDS, keep=hl.keep.tensors("pattern")).tensor("pattern", 1)[0, 3]
    for destination in (None, -2):
        graph = trace_heads(model, IDS, "L1H3", destination=destination, least_attention=0.9)
        seen = pattern.clone()
        seen[:, 0] = 0
        if destination is not None:
            seen[[row for row in range(9) if row != 7]] = 0
        i, j = divmod(int(seen.argmax()), 9)
        (start,) = graph.starts.to_dict("records")
        assert (start["destination"], start["source"], start["firings"]) == (i, j, 0)
        assert start["attention"] == pytest.approx(float(pattern[i, j]))
        assert not len(graph.edges)
        assert (
            f"L1H3 does not fire: its attention to any token but the first is at most {pattern[i, j]:.2f} "
            f"(prompt 0, {i} to {j}), below least_attention=0.9"
        ) in repr(graph)
    low = trace_heads(model, IDS, "1.*", least_attention=1e-6)
    for row in low.starts.to_dict("records"):
        head = Head(1, int(row["head"][3:]))
        found = scores("llama").firing(head, row["destination"], row["source"])
        assert (row["attention"], row["score"]) == pytest.approx((found.attention, found.score))
    # Position 1 sees one token beside the first: itself.
    below = next(h for h in range(6) if scores("llama").firing(Head(1, h), 1, 1).score < 0)
    graph = trace_heads(model, IDS, f"1.{below}", destination=1, least_attention=1e-6)
    assert "(prompt 0, 1 to 1), but the score is -" in repr(graph)
    high = trace_heads(model, IDS, "L1H3", least_attention=0.01, min_share=1e6)
    assert "fires, but no part has a share of 1e+06" in repr(high)
    only = trace_heads(model, IDS[:, :1], "L1H3")
    assert "no source but the first token" in repr(only)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["stream", "input"])
def test_cutting_the_signal_stops_induction_and_random_directions_do_not(family, how):
    model, ids = planted_scores(family)
    split = PromptScores(circuits(model), ids[0])
    firing = split.firings([Head(2, 1)], 24)[0]
    cut = edit_signal(
        split, firing, "L1H0", "source", how=how, metric=lambda logits: float(logits[ids[0, 13]])
    )
    assert firing.attention > 0.8
    assert cut.attention < 0.05
    assert cut.effect < -0.2
    assert cut.p_value == pytest.approx(1 / 21)
    assert cut.metric < cut.metric_before
    assert not model.edited
    if how == "input":
        other = model.trace(ids[0], keep=hl.keep.tensors("z"))
        assert torch.equal(other.tensor("z", 2), split.trace.tensor("z", 2))


def test_an_edit_of_the_input_changes_one_head_at_one_position_only(lab):
    model = lab("gpt2")
    split = PromptScores(circuits(model), IDS)
    firing = next(f for f in (split.firing(Head(1, h), 7, 4) for h in range(3)) if f.score > 0)
    cut = edit_signal(split, firing, "L0H1", "destination", how="input", controls=3)
    terms = split.terms(firing)
    basis = terms.basis(terms.selected(), "destination")
    delta = basis @ (basis.T @ split.heads(0, 7)[0][1])
    block = model.module.transformer.h[1]
    x = split.trace.tensor("resid_pre", 1)[0, 7] - delta
    q = (block.ln_1(x) @ block.attn.c_attn.weight + block.attn.c_attn.bias)[:36].view(3, 12)
    k = split.trace.tensor("k", 1)[0, :8, firing.head.head]
    row = (k @ q[firing.head.head] / 12**0.5).softmax(0)
    assert cut.attention == pytest.approx(float(row[4].detach()), abs=1e-5)
    with model.edit(hl.add("0.*", -delta, site="attn_out", positions=[7])):
        wanted = model.trace(IDS, keep=hl.keep.tensors("pattern")).of_head("pattern", firing.head)
    stream = edit_signal(split, firing, "L0H1", "destination", controls=1)
    assert stream.attention == pytest.approx(float(wanted[0, 7, 4]), abs=1e-6)
    twice = edit_signal(split, firing, "L0H1", "destination", sign=1, controls=1)
    assert twice.attention != pytest.approx(stream.attention, abs=1e-6)


def test_a_score_made_of_few_directions_is_sparser_in_them_than_in_random_ones():
    model, ids = planted_scores("gpt2")
    found = sparsity(model, ids[:2], "L1H0, L2H1")
    assert set(zip(found["layer"], found["head"], strict=True)) == {(1, 0), (2, 1)}
    assert (found["n_terms"] <= found["rank"]).all()
    previous = found[found["layer"] == 1]
    assert (previous["source"] == previous["destination"] - 1).all()
    # Position pairs make its score; the induction head matches codes on 40 equal singular values by construction.
    assert (previous["n_terms"] < previous["null_terms"]).all()
    again = sparsity(model, ids[:2], "L1H0, L2H1")
    assert found.equals(again)
    row = found.iloc[0]
    split = PromptScores(circuits(model), ids[int(row.prompt)])
    terms = split.terms(
        split.firing(Head(int(row.layer), int(row["head"])), int(row.destination), int(row.source))
    )
    assert row.n_terms == len(terms.selected())
    size = terms.terms.abs()
    assert row.effective == pytest.approx(float(size.sum() ** 2 / size.square().sum()), rel=1e-4)


def test_what_cannot_be_split_is_refused(lab):
    def split(family, ids=IDS):
        return PromptScores(circuits(lab(family)), ids)

    for family in ("qwen3", "gemma3_text", "olmo2"):
        found = split(family)
        with pytest.raises(UnsupportedError, match="norms q and k"):
            found.terms(found.firing(Head(1, 0), 5, 2))
    with pytest.raises(UnsupportedError, match="decoder-only"):
        PromptScores(circuits(lab("bert")), IDS)
    with pytest.raises(UnsupportedError):
        trace_heads(lab("deepseek_v3"), IDS, "1.*", least_attention=0.1)
    with pytest.raises(PromptError, match="2 prompts"):
        split("gpt2", IDS.repeat(2, 1))
    with pytest.raises(PlanError, match="fold"):
        PromptScores(circuits(lab("gpt2"), fold=False), IDS)
    found = split("gpt2")
    with pytest.raises(PlanError, match="no query at 3"):
        found.firing(Head(1, 0), 3, 5)
    firing = next(f for f in (found.firing(Head(1, h), 7, 4) for h in range(3)) if f.score > 0)
    with pytest.raises(HeadError, match="before"):
        edit_signal(found, firing, "L1H0", "source")
    with pytest.raises(PlanError, match="side='key'"):
        edit_signal(found, firing, "L0H0", "key")
    with pytest.raises(PlanError, match="depth=0"):
        trace_heads(lab("gpt2"), IDS, "1.*", depth=0)
    with pytest.raises(PlanError, match="2 positions for 1 prompts"):
        trace_heads(lab("gpt2"), IDS, "1.*", destination=[1, 2])
    with pytest.raises(PlanError, match="destination=30"):
        trace_heads(lab("gpt2"), IDS, "1.*", destination=30)
    with lab("gpt2").edit(hl.scale("0.0", by=0.5)), pytest.raises(PlanError, match="in force"):
        split("gpt2")
    nothing = trace_heads(hl.load(build("gpt2")), IDS, "1.*", least_attention=1.1)
    assert not len(nothing.frame)
