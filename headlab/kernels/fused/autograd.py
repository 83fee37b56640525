"""The backward pass as autograd sees it: a differentiable function, and the derivative of an engine's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.errors import UnsupportedError
from headlab.kernels.fused import engine
from headlab.kernels.fused.backward import FeatureGradient, backward
from headlab.kernels.fused.call import prepared
from headlab.kernels.inputs import AttentionInputs, Request

_INPUTS = ("q", "k", "v", "sinks")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        z, lse = engine.forward(replace(inputs, q=q, k=k, v=v, sinks=sinks))
        ctx.inputs = replace(inputs, q=q.detach(), k=k.detach(), v=v.detach(), sinks=None)
        ctx.save_for_backward(q, k, v, sinks, z, lse)
        return z, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, z, lse = ctx.saved_tensors
        call = prepared(replace(ctx.inputs, q=q, k=k, v=v, sinks=sinks), None)
        return None, *backward(call, z, lse, dz, dlse)


def attention(
    inputs: AttentionInputs,
) -> tuple[Float[Tensor, "batch head query d_value"], Float[Tensor, "batch head query"]]:
    """z and log-sum-exp of a call, differentiable once, with respect to q, k, v and the sinks.

    Args:
        inputs: The attention call.

    Raises:
        UnsupportedError: A mask or bias requires a gradient.
    """
    for name in ("mask", "position_bias"):
        bias = getattr(inputs, name)
        if torch.is_grad_enabled() and bias is not None and bias.requires_grad:
            raise UnsupportedError(
                f"{name} requires a gradient, which is as large as the pattern and which the Triton kernels do not "
                "compute; detach it, or use another engine"
            )
    z, lse = _Attention.apply(inputs, inputs.q, inputs.k, inputs.v, inputs.sinks)
    return z, lse


def backward_of(
    inputs: AttentionInputs, request: Request, wanted: list[str], upstream: dict[str, Tensor]
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """The derivative of this engine's result, or None where the kernels have none for what is asked.

    Args:
        inputs: The attention call.
        request: What was asked of it.
        wanted: Names of the inputs to differentiate with respect to.
        upstream: Gradients of the loss with respect to outputs, by name.

    Returns:
        A function from the outputs known, by name, to the gradients by name. What it needs of ``z`` and ``lse`` (and of
        ``feature``) and does not find there, it computes again.
    """
    if set(wanted) - set(_INPUTS) or set(upstream) - {"z", "lse", "feature"}:
        return None

    def compute(known: dict[str, Tensor]) -> dict[str, Tensor]:
        spread = {name: _every_head(inputs, request, name, x) for name, x in upstream.items()}
        z, lse, expected = _forward(inputs, request, known, "feature" in upstream)
        features = None
        if expected is not None:
            assert request.features is not None
            features = FeatureGradient(request.features, expected, spread["feature"])
        dz = spread["z"] if "z" in spread else torch.zeros_like(z)
        found = backward(prepared(inputs, None), z, lse, dz, spread.get("lse"), features)
        return {
            name: x
            for name, x in zip(_INPUTS, found, strict=True)
            if name in wanted and x is not None
        }

    return compute


def _every_head(inputs: AttentionInputs, request: Request, name: str, x: Tensor) -> Tensor:
    """The gradient of an output of some heads as one of all heads."""
    if name == "z" or request.heads is None:
        return x
    every = x.new_zeros(x.shape[0], inputs.q.shape[1], *x.shape[2:])
    index = torch.tensor(request.heads, device=x.device)
    return every.index_add(1, index, x)  # a head may have been asked for twice


def _forward(
    inputs: AttentionInputs, request: Request, known: dict[str, Tensor], features: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """z, lse and, if asked, expected features of every head."""
    if features:
        again = replace(request, heads=None, z=True, statistics=("lse", "feature"), rows=None)
        result = engine.attend(inputs, again)
        assert result.z is not None
        return result.z, result.statistics["lse"], result.statistics["feature"]
    if {"z", "lse"} <= set(known) and request.heads is None:
        return known["z"], known["lse"], None
    z, lse = engine.forward(inputs)
    return z, lse, None
