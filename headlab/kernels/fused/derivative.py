"""The derivative of what the engine returns, as :mod:`headlab.kernels.gradients` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headlab.kernels.fused import engine
from headlab.kernels.fused.call import prepared
from headlab.kernels.inputs import AttentionInputs, Request

_INPUTS = ("q", "k", "v", "sinks")


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

    from headlab.kernels.fused.backward import FeatureGradient, backward  # late: it needs triton

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
