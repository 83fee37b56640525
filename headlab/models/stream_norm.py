"""A norm with its scale held where a run had it: an affine map, so that what enters it can be split into terms.

LayerNorm and every RMSNorm compute

    y = s · gain ∘ (x − c · mean(x)) + bias,    c = 1 for LayerNorm, 0 for RMSNorm,

where the scale s, one over the standard deviation or root mean square, depends on x. With s held, y is affine in x.
Gain, bias and c are read off by probing the module, so that Gemma's ``1 + weight`` needs no case of its own, and the
map is checked against the module at the x it was frozen at.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headlab.errors import UnsupportedError

#: The map must give the module's own output to this share of its length. Many modules compute in float32 inside.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class FrozenNorm:
    """The affine map ``x ↦ scale · gain ∘ (x − mean x) + bias``; without the mean where not ``centred``.

    Attributes:
        gain: Factor per dimension.
        bias: What is added, 0 for RMSNorm.
        centred: Whether the mean over dimensions is taken off first.
        scale: The held scale of each row.
    """

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    centred: bool
    scale: Float[Tensor, "*row 1"]

    def apply(self, x: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_model"]:
        """The map of the rows it was frozen at."""
        return self.linear(x) + self.bias

    def linear(self, x: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_model"]:
        """:meth:`apply` without the bias: linear in x, so parts of x may go through it one by one."""
        return self.scale * self.unscaled(x)

    def unscaled(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """:meth:`linear` of any rows, but for the factor :attr:`scale`."""
        return self.gain * self._centre(x)

    def pull(self, direction: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_model"]:
        """The direction whose product with x is ``linear(x) · direction``: the transpose of :meth:`linear`."""
        return self._centre(self.scale * self.gain * direction)

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


@torch.no_grad()
def frozen(
    norm: nn.Module | None, x: Float[Tensor, "*row d_model"], what: str = "the norm"
) -> FrozenNorm:
    """Freeze a norm at the rows of x, computing in the type of x.

    Args:
        norm: The norm; None for none, which gives the identity.
        x: What entered it.
        what: What to call it in an error.

    Raises:
        UnsupportedError: It is no LayerNorm and no RMSNorm.
    """
    if norm is None:
        return FrozenNorm(
            torch.ones_like(x[..., :1, :].flatten(0, -2)[0]),
            x.new_zeros(x.shape[-1]),
            False,
            torch.ones_like(x[..., :1]),
        )
    module = deepcopy(norm).to(x.dtype)
    zero = x.new_zeros(1, x.shape[-1])
    ones, probe = zero + 1, _balanced(x.shape[-1]).to(x)[None]
    bias = module(zero)
    gain = (module(probe) - bias) / probe  # up to a factor, which the scale takes up
    size = gain.norm()
    centred = bool((module(ones) - bias).norm() < 1e-3 * size) and bool(size > 0)
    unscaled = FrozenNorm(gain[0], bias[0], centred, torch.ones_like(x[..., :1]))
    out, raw = module(x) - bias, unscaled.linear(x)
    scale = (out * raw).sum(-1, keepdim=True) / (raw * raw).sum(-1, keepdim=True).clamp(min=1e-30)
    found = FrozenNorm(gain[0], bias[0], centred, scale)
    error = (found.linear(x) - out).norm(dim=-1)
    if not bool((error <= _TOLERANCE * out.norm(dim=-1).clamp(min=1e-30)).all()):
        raise UnsupportedError(
            f"{what}, a {type(norm).__name__}, is neither a LayerNorm nor an RMSNorm, so no scale of it can be "
            "held still and terms before it do not add up behind it"
        )
    return found


def _balanced(width: int) -> Float[Tensor, " width"]:
    """Numbers without a zero that sum to 0: a LayerNorm takes nothing off them."""
    row = torch.ones(width)
    row[1::2] = -1
    if width % 2:
        row[-1], row[-2], row[-3] = 1, -2, 1
    return row


__all__ = ["FrozenNorm", "frozen"]
