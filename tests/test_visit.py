"""Projections of heads to the vocabulary, against the module's own parts and dense sums."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import exact
from tiny_models import build, tiny_tokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import headlab as hl
from headlab.errors import HeadError, PlanError, PromptError, UnsupportedError
from headlab.parameters.on_prompts.visit import read_out, visit

#: Mixtures of experts, and norms in float32, do not run in float64 throughout.
FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gemma3_text",
    "qwen3",
    "olmo2",
    "granite",
    "cohere2",
    "phi",
    "gpt_oss",
)


def ids(n: int = 12) -> torch.Tensor:
    return torch.randint(4, 97, (1, n), generator=torch.Generator().manual_seed(3))


def opened(family: str, **changes: Any) -> hl.Model:
    module = build(family) if family == "gpt_oss" else exact(family, **changes)
    return hl.load(module, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_out_the_final_stream_gives_the_models_logits(family: str):
    model = opened(family)
    last = model.spec.n_layers - 1
    trace = model.trace(ids(), keep=hl.keep.tensors("resid_post", layers=[last]))
    stream, logits = trace.tensor("resid_post", last)[0, -1], trace.logits[0, -1]
    assert torch.allclose(read_out(model, stream[None])[0], logits.to(stream), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_additive_logits_are_those_of_direct_logit_attribution(family: str):
    model = opened(family)
    found = visit(model, ids(), n_heads=100, k=4, sources=0)
    assert len(found.heads) == model.spec.n_layers * model.spec.n_heads
    for head in found.heads[:5]:
        rows = found.of(*head)
        for token, logit in zip(rows["token"], rows["logit"], strict=True):
            direct = hl.causal.direct_logit_attribution(model, ids(), [token])
            assert logit == pytest.approx(
                direct.heads[0, head.layer, head.head], rel=1e-4, abs=1e-6
            )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_a_heads_logits_are_the_sum_over_its_sources(family: str):
    model = opened(family)
    n = model.spec.n_vocab
    found = visit(model, ids(), n_heads=100, k=n, sources=12, keys=False)
    for head in found.heads:
        tops = found.tokens[(found.tokens["side"] == "top") & (found.tokens["layer"] == head.layer)
                            & (found.tokens["head"] == head.head)]  # fmt: skip
        whole = tops[tops["what"] == "head"].set_index("token")["logit"]
        values = tops[tops["what"] == "value"].groupby("token")["logit"].sum()
        assert values.loc[whole.index].to_numpy() == pytest.approx(whole.to_numpy(), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_tokens_and_probabilities_are_the_modules_own_of_the_heads_vector(family: str):
    model = opened(family)
    found = visit(model, ids(), n_heads=3, k=5)
    norm, unembed = model.weights.final_norm, model.module.get_output_embeddings()
    trace = model.trace(ids(), keep=hl.keep.tensors("z", "result"))
    for head, row in zip(found.heads, found.vectors.itertuples(), strict=False):
        r = trace.tensor("result", head.layer)[0, -1, head.head]
        chance = unembed(norm(r[None]))[0].softmax(-1)
        rows = found.of(*head)
        top, bottom = (rows[rows["side"] == side] for side in ("top", "bottom"))
        order = chance.argsort(descending=True)
        assert top["token"].tolist() == order[:5].tolist()
        assert bottom["token"].tolist() == order.flip(0)[:5].tolist()
        assert top["probability"].tolist() == pytest.approx(chance[order[:5]].tolist(), rel=1e-5)
        assert row.norm == pytest.approx(float(r.norm()), rel=1e-5)
    sizes = torch.stack([trace.tensor("z", layer)[0, -1].norm(dim=-1) for layer in range(2)])
    best = sizes.flatten().argsort(descending=True)[:3]
    assert [head.layer * model.spec.n_heads + head.head for head in found.heads] == best.tolist()


def test_heads_can_be_ranked_by_what_enters_the_stream():
    model = opened("llama")
    trace = model.trace(ids(), keep=hl.keep.tensors("result"))
    sizes = trace.tensor("result", 1)[0, -1].norm(dim=-1)
    found = visit(model, ids(), heads="1.*", by="result", n_heads=6, sources=0)
    assert [head.head for head in found.heads] == sizes.argsort(descending=True).tolist()


def test_sources_are_the_keys_attended_to_most():
    model = opened("gemma2")  # a window of 5 tokens in layer 0
    found = visit(model, ids(), n_heads=100, sources=8, keys=False)
    rows = model.trace(ids(), keep=hl.keep.rows(queries=[-1])).rows[0, :, :, 0]
    for head in found.heads:
        mine = found.vectors.query(
            "what == 'value' and layer == @head.layer and head == @head.head"
        )
        row = rows[head.layer, head.head]
        seen = min(8, int((row > 0).sum()))
        assert mine["source"].tolist() == row.argsort(descending=True)[:seen].tolist()
        assert mine["weight"].tolist() == pytest.approx(row[mine["source"].tolist()].tolist())
        assert seen == (5 if head.layer == 0 else 8)


def held(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """An RMSNorm whose scale autograd takes for a constant."""
    return x * norm.weight * (norm(x) / (x * norm.weight)).detach()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keys_and_queries_are_gradients_of_the_score(family: str):
    """d = ∂(q·k)/∂u_i and e = ∂(q·k)/∂u_j, with autograd through transformers' own projections and rotation."""
    model = opened(family)
    found = visit(model, ids(), heads="0.*", n_heads=2, sources=3, k=6)
    block = model.module.model.layers[0]
    attention, width = block.self_attn, model.spec.d_head
    stream = model.module.model.embed_tokens(ids())
    gain = block.input_layernorm.weight
    scale = (block.input_layernorm(stream) / (stream * gain)).detach()
    u = (stream * scale).detach().requires_grad_()
    q = attention.q_proj(u * gain).view(1, 12, -1, width)
    k = attention.k_proj(u * gain).view(1, 12, -1, width)
    if family == "qwen3":
        q, k = held(attention.q_norm, q), held(attention.k_norm, k)
    cos, sin = model.module.model.rotary_emb(stream, torch.arange(12)[None])
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    checked = 0
    for row in found.vectors[found.vectors["what"] == "key"].itertuples():
        if row.source == 11:  # both ends of the score lie at one position
            continue
        group = row.head // (q.shape[1] // k.shape[1])
        score = q[0, row.head, -1] @ k[0, group, row.source]
        (slope,) = torch.autograd.grad(score, u, retain_graph=True)
        for what, at in (("key", 11), ("query", row.source)):
            vector = slope[0, at]
            shown = found.of(row.layer, row.head, what)
            shown = shown[(shown["source"] == row.source) & (shown["side"] == "top")]
            logits = model.module.lm_head(model.module.model.norm(vector[None]))[0]
            assert shown["token"].tolist() == logits.argsort(descending=True)[:6].tolist()
            assert shown["logit"].isna().all()
            if family == "llama":  # without a norm of q and k, the size is right too
                same = found.vectors.query(
                    "what == @what and source == @row.source and head == @row.head"
                )
                assert same["norm"].item() == pytest.approx(float(vector.norm()), rel=1e-4)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("family", ["olmo2", "gemma3_text", "gpt_neox", "gpt_oss", "smollm3"])
def test_other_families_show_keys_and_queries_too(family: str):
    found = visit(opened(family), ids(), n_heads=12, sources=2)
    kinds = found.vectors["what"].value_counts()
    assert kinds["key"] == kinds["query"] == kinds["value"] > 0
    norms = found.vectors["norm"]
    assert np.isfinite(norms).all()
    assert (norms > 0).all()


def test_an_earlier_position_is_that_of_the_prompt_cut_there():
    model = opened("gpt2")
    early, cut = visit(model, ids(), 6), visit(model, ids()[:, :7])
    assert early.tokens.equals(cut.tokens)
    assert early.position == 6
    assert visit(model, ids(), -6).tokens.equals(cut.tokens)


def test_latent_attention_shows_values_but_not_keys():
    model = hl.load(build("deepseek_v3"))
    found = visit(model, ids(), n_heads=2, keys=False)
    assert set(found.vectors["what"]) == {"head", "value"}
    with pytest.raises(UnsupportedError):
        visit(model, ids(), n_heads=2)


def test_hostile_tokens_are_escaped():
    tokenizer = tiny_tokenizer()
    model = hl.load(build("llama"), tokenizer=tokenizer)
    found = visit(model, ids(), n_heads=2)
    found.tokens.loc[found.tokens["rank"] == 0, "text"] = "<script>\u202e"
    page = found._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "\u202e" not in page + repr(found)
    assert json.loads(found.to_json())["position"] == 11


def test_bad_input_is_refused():
    model = opened("llama")
    with pytest.raises(PromptError, match="one prompt, not 2"):
        visit(model, ids().repeat(2, 1))
    with pytest.raises(PlanError, match="position 12"):
        visit(model, ids(), 12)
    with pytest.raises(PlanError, match="by="):
        visit(model, ids(), by="norm")  # type: ignore[arg-type]
    with pytest.raises(HeadError):
        visit(model, ids(), heads="7.0")
    with pytest.raises(PlanError, match="heads shown"):
        visit(model, ids(), heads="0.*", n_heads=1).of(1, 0)
    with pytest.raises(UnsupportedError, match="decoder-only"):
        visit(hl.load(build("bert")), ids())
