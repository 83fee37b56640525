"""One attention call made ready for the kernels: layouts, strides, intervals, and the flags they are compiled for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Int32
from torch import Tensor

from headlab.kernels.inputs import AttentionInputs
from headlab.kernels.visibility import visibility

LOG2E = math.log2(math.e)
LN2 = math.log(2)

#: Whether kernels run in Triton's interpreter, on CPU tensors. Triton itself decides this when it is imported.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

#: Largest head size, of keys and of values.
MAX_WIDTH = 256


@dataclass(frozen=True)
class Call:
    """What every kernel of a call takes.

    Attributes:
        inputs: The attention call.
        q, k, v: With unit stride along the width.
        heads: Query heads to run, int32 on the device.
        low, high: Interval of visible key columns of each row, int32 [1 or batch, query].
        mask: Visible columns as bytes, [#batch, #head, query, key], or None.
        bias: Added to the scores, −inf where hidden, or None.
        scale: Factor on q·k that gives scores in log2 units.
        softcap: Soft cap in log2 units; 0 for none.
        every: Whether ``heads`` are all of the model, in order.
    """

    inputs: AttentionInputs
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    low: Tensor
    high: Tensor
    mask: Tensor | None
    bias: Tensor | None
    scale: float
    softcap: float
    every: bool

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0]

    @property
    def n_rows(self) -> int:
        """Query rows."""
        return self.q.shape[2]

    @property
    def n_keys(self) -> int:
        """Key columns."""
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.inputs.group

    @property
    def width(self) -> int:
        """Head size of queries and keys."""
        return self.q.shape[3]

    @property
    def value_width(self) -> int:
        """Head size of values."""
        return self.v.shape[3]

    @property
    def flags(self) -> dict[str, Any]:
        """Compile-time flags of the score tile; see :mod:`headlab.kernels.fused.tiles`."""
        return {
            "D": self.width,
            "BD": padded(self.width),
            "SOFTCAP": self.softcap > 0,
            "MASK": self.mask is not None,
            "BIAS": self.bias is not None,
            "UPCAST": INTERPRET and self.q.dtype == torch.bfloat16,
            "PRECISION": precision(self.q.dtype),
            "INTERPRET": INTERPRET,
        }

    def visible(self) -> tuple[Any, ...]:
        """Arguments that say what rows see: intervals, mask and bias with their strides."""
        mask = self.low if self.mask is None else self.mask
        bias = self.low if self.bias is None else self.bias
        return (
            self.low,
            self.high,
            self.low.stride(0) if self.low.shape[0] > 1 else 0,
            mask,
            *(strides(mask) if self.mask is not None else (0, 0, 0)),
            bias,
            *(strides(bias) if self.bias is not None else (0, 0, 0)),
        )


def prepared(inputs: AttentionInputs, heads: tuple[int, ...] | None) -> Call:
    """Make a call ready.

    Args:
        inputs: The call.
        heads: Query heads to run; all by default.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs.q, inputs.k, inputs.v))
    chosen = tuple(range(q.shape[1])) if heads is None else heads
    seen = visibility(inputs)
    # The last axis of mask and bias is read with unit stride; the others may be broadcast.
    mask = None if seen.mask is None else dense_columns(seen.mask).view(torch.uint8)
    bias = None if seen.bias is None else dense_columns(seen.bias)
    return Call(
        inputs,
        q,
        k,
        v,
        head_index(chosen, q.device),
        seen.low,
        seen.high,
        mask,
        bias,
        inputs.scaling * LOG2E,
        0.0 if inputs.softcap is None else inputs.softcap * LOG2E,
        heads is None,
    )


@cache
def head_index(heads: tuple[int, ...], device: torch.device) -> Int32[Tensor, " head"]:
    """Heads on the device; copied there once, since a copy waits."""
    return torch.tensor(heads, dtype=torch.int32, device=device)


def dense_columns(x: Tensor) -> Tensor:
    """The tensor with unit stride along its last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of the first three axes; 0 along those that are broadcast."""
    first, second, third = (
        0 if size == 1 else step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)
    )
    return first, second, third


def padded(width: int) -> int:
    """The power of two that holds a width; tensor cores want at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How products of tiles of this type are computed: float32 to float32's own accuracy."""
    return "ieee" if INTERPRET or dtype != torch.float32 else "tf32x3"
