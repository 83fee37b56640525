"""The backward pass of the Triton engine, in the interpreter, against torch's gradients of a dense float64 formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from oracle import assert_close
from test_fused_second import calls, packed, padded
from test_kernels import CALLS, ask, blind, coin, draw, normal
from torch import Tensor

from headlab.kernels import AttentionInputs, Request, attend, gradients

pytest.importorskip("triton")
from headlab.kernels.fused import engine
from headlab.kernels.fused.backward import FeatureGradient, backward
from headlab.kernels.fused.call import prepared
from headlab.kernels.fused.derivative import backward_of

#: Calls that differ in what the backward pass has to do.
KINDS = (
    "grouped-causal",
    "multi-query-causal",
    "bidirectional",
    "one-token",
    "cross-more-keys",
    "cross-fewer-keys",
    "window-bidirectional-mask",
    "softcap",
    "large-sinks",
    "position-bias-batched",
    "blind-rows",
    "blind-rows-with-sinks",
    "all-blind",
    "left-padding",
    "right-padding",
    "wide-values",
    "narrow-values",
    "large-scores",
    "decode-several-window",
    "sliding-cache-mask",
    "everything",
)


def dense(
    inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pattern, z and lse by the plain formula; the lse of a row without keys or sink is a constant."""
    k, v = (x.repeat_interleave(inputs.group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * inputs.scaling
    if inputs.softcap is not None:
        s = torch.tanh(s / inputs.softcap) * inputs.softcap
    if inputs.position_bias is not None:
        s = s + inputs.position_bias.double()
    seen = torch.as_tensor(oracle.visible(inputs))
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    blind_rows = (s == -torch.inf).all(-1)
    lse = s.masked_fill(blind_rows[..., None], 0.0).logsumexp(-1)
    p = (s - lse[..., None]).exp()[..., : seen.shape[-1]].masked_fill(~seen, 0.0)
    return p, p @ v, lse.masked_fill(blind_rows, -torch.inf)


def leaves(inputs: AttentionInputs) -> dict[str, Tensor]:
    found = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks")}
    return {name: x.double().requires_grad_() for name, x in found.items() if x is not None}


def check(inputs: AttentionInputs, tolerance: float = 5e-6, features: Tensor | None = None) -> None:
    """Gradients of a random weighted sum of z, lse and expected features."""
    sources = leaves(inputs)
    p, z, lse = dense(inputs, sources["q"], sources["k"], sources["v"], sources.get("sinks"))
    dz = normal(*z.shape, seed=1).to(inputs.q.dtype)
    dlse = normal(*lse.shape, seed=2)
    loss = (z * dz).sum() + (lse * dlse).masked_fill(lse == -torch.inf, 0.0).sum()
    given_features = None
    if features is not None:
        expected = torch.einsum("bhqk,bkf->bhqf", p, features.double())
        upstream = normal(*expected.shape, seed=3)
        loss = loss + (expected * upstream).sum()
        given_features = FeatureGradient(features, expected.detach().float(), upstream)
    wanted = torch.autograd.grad(loss, list(sources.values()))
    call = prepared(inputs, None)
    z = z.detach().to(inputs.q.dtype)
    found = backward(call, z, lse.detach().float(), dz, dlse, given_features)
    assert (found[3] is None) == (inputs.sinks is None)
    for name, got, expected in zip(sources, found, wanted, strict=False):
        assert got is not None
        assert got.dtype == getattr(inputs, name).dtype
        size = max(1.0, float(expected.abs().max()))
        assert_close(got, expected, tolerance * size, what=name)


@pytest.mark.parametrize("call", KINDS)
def test_gradients_equal_those_of_the_plain_formula(call: str) -> None:
    check(CALLS[call]())


def test_gradients_of_expected_features_reach_queries_and_keys() -> None:
    for features in (normal(1, 13, 3), normal(2, 13, 20)):
        check(draw(causal=True, sinks=normal(6)), features=features)


def test_gradients_over_many_tiles() -> None:
    check(draw(2, 1, 69, batch=1, mask=packed(20, 1, 48)))
    check(draw(1, 1, 69, batch=2, mask=padded(40, 0)))
    check(draw(2, 1, 70, 81, batch=1, causal=True, window=40, query_start=11))


@settings(max_examples=5)
@given(calls())
def test_gradients_of_any_call_equal_those_of_the_plain_formula(inputs: AttentionInputs) -> None:
    check(inputs)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2**-9), (torch.bfloat16, 2**-6)])
def test_half_precision_loses_a_few_roundings(dtype: torch.dtype, rounding: float) -> None:
    inputs = draw(2, 1, 37, batch=1, causal=True, d=8, softcap=3.0, sinks=normal(2))
    fields = {name: getattr(inputs, name).to(dtype) for name in ("q", "k", "v", "sinks")}
    check(replace(inputs, **fields), tolerance=rounding)


def test_a_gradient_of_lse_that_is_not_finite_in_a_blind_row_spoils_nothing() -> None:
    inputs = draw(2, 1, 5, batch=1, mask=blind(coin(1, 1, 5, 5), 2))
    _, z, lse = (x.detach() for x in dense(inputs, *leaves(inputs).values(), None))
    dlse = torch.zeros(1, 2, 5)
    dlse[..., 2] = torch.inf
    found = backward(prepared(inputs, None), z.float(), lse.float(), normal(1, 2, 5, 4), dlse)
    assert all(bool(x.isfinite().all()) for x in found[:3])


# -- autograd --------------------------------------------------------------------------------------


def test_autograd_has_the_gradients_of_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADLAB_KERNEL", "triton")
    monkeypatch.setattr(gradients, "_by_blocks", None)  # the kernels' own derivative, or nothing
    inputs = draw(2, 1, 6, batch=1, d=3, causal=True, softcap=1.5, sinks=normal(2))
    sources = {name: x.detach() for name, x in leaves(inputs).items()}
    weights = normal(1, 2, 6, 4, seed=1), normal(1, 2, 6, seed=2)

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        _, z, lse = dense(inputs, *tensors.values())
        return (z * weights[0]).sum() + (lse * weights[1]).sum()

    mine = {name: getattr(inputs, name).clone().requires_grad_() for name in sources}
    result = attend(replace(inputs, **mine), Request(statistics=("lse",)))
    assert result.z is not None
    total = (result.z * weights[0]).sum() + (result.statistics["lse"] * weights[1]).sum()
    found = torch.autograd.grad(total, list(mine.values()))
    for (name, x), gradient in zip(sources.items(), found, strict=True):
        for at in range(0, x.numel(), 3):
            step = torch.zeros_like(x)
            step.view(-1)[at] = 1e-4
            up, down = (loss({**sources, name: x + sign * step}) for sign in (1, -1))
            assert_close(gradient.flatten()[at], (up - down) / 2e-4, 1e-5, what=f"{name}[{at}]")


def test_autograd_keeps_lse_for_a_call_that_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADLAB_KERNEL", "triton")
    inputs = draw(2, 1, 6, batch=1, causal=True)
    q = inputs.q.clone().requires_grad_()
    result = attend(replace(inputs, q=q), Request())
    assert result.statistics == {}
    monkeypatch.setattr(engine, "forward", None)  # nothing is computed again
    assert result.z is not None
    (dq,) = torch.autograd.grad(result.z.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("heads", [None, (3, 1)])
def test_backward_of_serves_what_it_says(heads: tuple[int, ...] | None) -> None:
    inputs = draw(4, 2, 7, batch=1, causal=True, sinks=normal(4))
    request = ask(inputs, ("lse", "feature"), heads=heads)
    chosen = list(range(4)) if heads is None else list(heads)
    sources = leaves(inputs)
    p, z, lse = dense(inputs, *sources.values())
    assert request.features is not None
    values: dict[str, Any] = {
        "z": z,
        "lse": lse[:, chosen],
        "feature": torch.einsum("bhqk,bkf->bhqf", p, request.features.double())[:, chosen],
    }
    known = {"z": z.detach().float(), "lse": values["lse"].detach().float()}
    for names in (("z", "lse"), ("feature",), ("lse",)):
        upstream = {name: normal(*values[name].shape) for name in names}
        derivative = backward_of(inputs, request, ["q", "k", "sinks"], upstream)
        assert derivative is not None
        found = derivative(known)
        loss = sum((values[name] * upstream[name]).sum() for name in names)
        wanted = [sources[name] for name in ("q", "k", "sinks")]
        expected = torch.autograd.grad(loss, wanted, retain_graph=True)
        assert set(found) == {"q", "k", "sinks"}
        for name, gradient in zip(found, expected, strict=True):
            assert_close(found[name], gradient, 1e-5, what=name)


def test_backward_of_leaves_the_rest_to_others() -> None:
    inputs, request = draw(2, 1, 4, batch=1), Request(statistics=("entropy",))
    upstream = {"entropy": normal(1, 2, 4)}
    assert backward_of(inputs, request, ["q"], upstream) is None
    assert backward_of(inputs, request, ["position_bias"], {"z": normal(1, 2, 4, 4)}) is None
