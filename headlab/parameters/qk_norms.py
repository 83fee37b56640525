"""Norms of q and k between projection and seam, with their scale left out: a gain per dimension, and for LayerNorm a
centring, per head.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headlab.errors import UnsupportedError


@dataclass(frozen=True)
class HeadNorm:
    """``q ↦ gain ∘ (q − c·mean(q))``: a norm of heads but for a positive factor per token, or per token and head.

    Attributes:
        gain: [head, d_head].
        centred: Whether each head's mean is taken off (c = 1).
    """

    gain: Float[Tensor, "head d_head"]
    centred: bool

    def fold(self, matrix: Float[Tensor, "head d_in d_head"]) -> Float[Tensor, "head d_in d_head"]:
        """A projection with the norm behind it."""
        if self.centred:
            matrix = matrix - matrix.mean(-1, keepdim=True)
        return matrix * self.gain[:, None]


@torch.no_grad()
def head_norm(norm: nn.Module, n: int, width: int, dtype: torch.dtype, where: str) -> HeadNorm:
    """Read a norm off by probing it, so that ``1 + weight``, one norm for all heads and one per head need no case each.

    Args:
        norm: The module.
        n: Heads it gets.
        width: Dimensions of each.
        dtype: Type to compute in.
        where: Where it stands, for errors.

    Raises:
        UnsupportedError: It is no norm of this form: it adds a bias, or mixes heads.
    """
    module = deepcopy(norm).to(dtype)
    like = next(iter(module.parameters()), torch.zeros(()))

    def one(heads: Tensor) -> Tensor:
        return _applied(module, heads[None])[0]

    zero = torch.zeros(n, width, dtype=dtype, device=like.device)
    probe = torch.ones_like(zero)
    probe[:, 1::2] = -1
    if width % 2:  # so that each head sums to 0
        probe[:, -1], probe[:, -2], probe[:, -3] = 1, -2, 1
    if bool(one(zero).abs().max() > 0):
        raise UnsupportedError(
            f"the norm of q and k of {where} adds a bias, which no matrix holds once its scale is left out"
        )
    gain = one(probe) / probe
    out = one(torch.ones_like(zero))
    centred = bool(out.norm() < 1e-3 * gain.norm())
    found = HeadNorm(gain, centred)
    trial = (
        torch.linspace(-1, 2, n * width, dtype=dtype, device=like.device).sin().reshape(n, width)
    )
    ours, theirs = found.fold(trial[:, None])[:, 0], one(trial)
    if bool((torch.cosine_similarity(ours, theirs, dim=-1) < 1 - 1e-4).any()):
        raise UnsupportedError(
            f"the norm of q and k of {where}, a {type(norm).__name__}, is no LayerNorm or RMSNorm of heads"
        )
    return found


def normed_heads(
    norm: nn.Module, heads: Float[Tensor, "*token head d_head"]
) -> Float[Tensor, "*token head d_head"]:
    """The norm itself, scale included, of tokens' heads in the shape the family's attention hands them to it."""
    module = deepcopy(norm).to(heads.dtype)
    return _applied(module, heads.reshape(-1, *heads.shape[-2:])).reshape(heads.shape)


def _applied(
    norm: nn.Module, heads: Float[Tensor, "token head d_head"]
) -> Float[Tensor, "token head d_head"]:
    weight = getattr(norm, "weight", None)
    if hasattr(norm, "norms"):  # StableLM: one norm per head, heads before positions
        out: Tensor = norm(heads.transpose(0, 1)[None])[0].transpose(0, 1)
    elif isinstance(weight, Tensor) and weight.dim() == 1 and weight.numel() > heads.shape[-1]:
        out = norm(heads.flatten(1)[None]).reshape(heads.shape)  # OLMo 2: all heads at once
    else:
        out = norm(heads[None])[0]
    return out


__all__ = ["HeadNorm", "head_norm", "normed_heads"]
