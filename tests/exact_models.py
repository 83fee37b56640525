"""Tiny models that compute in float64 throughout, and linear ones, so that identities hold to the last digits."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import build
from torch import Tensor, nn


class _Norm(nn.Module):
    """RMSNorm in the type of its input; Hugging Face's own computes in float32 whatever comes."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.weight = own.weight
        self.epsilon = own.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.epsilon).rsqrt()


def exact(family: str, **changes: Any) -> Any:
    """A tiny model in float64."""
    module = build(family, **changes).double()
    _replaced(module, lambda part: _Norm(part) if type(part).__name__ == "LlamaRMSNorm" else None)
    return module


def linear_after_attention(family: str, **changes: Any) -> Any:
    """A llama-like model of float64 whose norms do nothing and whose MLPs are 0: given its patterns, it is linear."""
    module = build(family, **changes).double()
    _replaced(module, lambda part: nn.Identity() if "RMSNorm" in type(part).__name__ else None)
    with torch.no_grad():
        for layer in module.model.layers:
            for name, parameter in layer.mlp.named_parameters():
                if "down" in name:
                    parameter.zero_()
    return module


def _replaced(module: nn.Module, change: Any) -> None:
    for name, part in list(module.named_modules()):
        new = change(part)
        if new is not None:
            above, _, last = name.rpartition(".")
            setattr(module.get_submodule(above), last, new)


def token_pairs(
    n: int, length: int, seed: int = 0, changed: tuple[int, ...] = (4,)
) -> tuple[Tensor, Tensor]:
    """Random prompts [n, length], and the same with some tokens changed."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(4, 97, (n, length), generator=generator)
    corrupted = clean.clone()
    for at in changed:
        corrupted[:, at] = (clean[:, at] - 4 + 17) % 93 + 4
    return clean, corrupted
