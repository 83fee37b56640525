"""The residual stream: what is kept of it adds up, in every family, and edits of it act."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ENCODER_DECODER, FAMILIES, MASKED, VOCAB_SIZE, build

import headlab as hl
from headlab.errors import HeadError, UnsupportedError

STREAM = ("resid_pre", "attn_out", "mlp_out", "resid_post")
OTHERS = MASKED + ENCODER_DECODER
DECODERS = tuple(family for family in FAMILIES if family not in OTHERS)


def prompts(seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", DECODERS)
def test_a_block_adds_what_attention_and_mlp_give(family: str):
    model = hl.load(build(family))
    trace = model.trace(prompts(), keep=hl.keep.tensors(*STREAM))
    parts = sum(trace.tensor(name) for name in STREAM[:3])
    torch.testing.assert_close(parts, trace.tensor("resid_post"), rtol=1e-5, atol=1e-5)
    assert trace.tensor("resid_pre").shape == (2, model.spec.n_layers, 9, model.spec.d_model)
    after, before = trace.tensor("resid_post"), trace.tensor("resid_pre")
    assert torch.equal(after[:, :-1], before[:, 1:])


@pytest.mark.parametrize("family", DECODERS)
def test_without_attention_and_mlp_the_stream_stays_as_it_was(family: str):
    model = hl.load(build(family))
    nothing = [hl.ablate("*.*", site="attn_out"), hl.ablate("*.*", site="mlp_out")]
    with model.edit(*nothing):
        trace = model.trace(prompts(), keep=hl.keep.tensors("resid_pre", "resid_post"))
    assert torch.equal(trace.tensor("resid_post", 1), trace.tensor("resid_pre", 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_the_stream_at_a_layer_gives_the_other_run(family: str):
    model = hl.load(build(family))
    if any(layer.stack == "cross" for layer in model.spec.layers):
        pytest.skip("what the decoder gets of the encoder passes beside its stream")
    one, other = prompts(0), prompts(1)
    source = model.trace(other, keep=hl.keep.tensors("resid_pre"))
    with model.edit(hl.patch("1.*", site="resid_pre", source=source)):
        found = model.logits(one)
    torch.testing.assert_close(found, model.logits(other), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, model.logits(one), atol=1e-3)


def test_positions_count_from_each_prompts_end_and_in_generation():
    model = hl.load(build("llama"))
    ids = prompts()
    with model.edit(hl.ablate("0.*", site="mlp_out", positions=[-1])):
        trace = model.trace(
            [ids[0].tolist(), ids[1, :5].tolist()], keep=hl.keep.tensors("mlp_out", layers=[0])
        )
        new = model.generate(ids[:, :5], 3, keep=hl.keep.tensors("mlp_out", layers=[0]))
    out = trace.tensor("mlp_out", 0)
    zero = (out == 0).all(-1)
    assert zero[0].tolist() == [False] * 8 + [True]
    assert zero[1, :5].tolist() == [False] * 4 + [True]
    assert new.trace is not None
    assert (new.trace.tensor("mlp_out", 0) == 0).all(-1)[0].tolist() == [False] * 4 + [
        True,
        False,
        False,
    ]


def test_a_head_alone_has_no_stream():
    model = hl.load(build("llama"))
    with (
        pytest.raises(HeadError, match=r"mlp_out belongs to a layer.*'1\.\*'"),
        model.edit(hl.ablate("L1H0", site="mlp_out")),
    ):
        pass
    with pytest.raises(HeadError, match="resid_pre belongs to a layer"):
        model.trace(prompts(), keep=hl.keep.tensors("resid_pre", heads="L1H0"))


@pytest.mark.parametrize("family", OTHERS)
def test_where_attention_is_not_simply_added_one_is_told(family: str):
    model = hl.load(build(family))
    with pytest.raises(UnsupportedError, match=r"there is no attn_out in .*decoder-only"):
        model.trace(prompts(), keep=hl.keep.tensors("attn_out"))


def test_gradients_reach_what_is_kept():
    model = hl.load(build("gpt2").double())  # llama's norms compute in float32 whatever comes
    kept = model.trace(prompts(), keep=hl.keep.tensors("q", "k", "v", "z", *STREAM), grad=True)
    assert kept.logits is not None
    metric = kept.logits[:, -1, 5].sum()
    for name in ("q", "k", "v", "z", "resid_pre", "attn_out", "mlp_out"):
        gradient = torch.autograd.grad(metric, kept._tensors[name][0], retain_graph=True)[0]
        step = 1e-6 * torch.randn(
            gradient.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        with model.edit(hl.add("0.*", step, site=name)):
            after = model.logits(prompts())[:, -1, 5].sum()
        assert float(after - metric.detach()) == pytest.approx(
            float((gradient * step).sum()), rel=1e-4
        ), name
