"""What launches of the second pass and of the backward pass are compiled for, and the arguments they share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headlab.kernels.fused.call import Call, padded, precision
from headlab.kernels.fused.configs import Tiles, has_tma, second_tiles_for
from headlab.kernels.fused.schedule import Cut, plain


@dataclass(frozen=True)
class Program:
    """Everything a kernel is compiled for; one constexpr argument of it.

    Triton 3.6 lets a kernel hand on its numbers as they are; texts, cuts and shapes only as named constants.

    Attributes:
        rows, columns: Tiles of queries and of keys.
        d, dv: Head size of keys and values; ``bd`` and ``bdv`` are the powers of two that hold them.
        tma: Whether the tiles that a program walks over are loaded by tensor descriptors.
        softcap, mask, bias: What the call has.
        gradient: Whether weights are multiplied by their gradients.
        mapped: Whether squares of ``block_map`` are stored.
        x: Width of further values, or of those summed; 0 for none. ``bx`` is the power of two that holds it.
        members: Whether only some keys belong to the sum.
        upcast, interpret: Whether bfloat16 has to be converted, and approximations avoided, for the interpreter.
        precision, gradient_precision, x_precision, full_precision: How products are computed.
    """

    rows: Cut
    columns: Cut
    d: int
    bd: int
    dv: int
    bdv: int
    tma: bool
    softcap: bool
    mask: bool
    bias: bool
    upcast: bool
    interpret: bool
    precision: str
    full_precision: str
    gradient: bool = False
    gradient_precision: str = "tf32"
    mapped: bool = False
    x: int = 0
    bx: int = 16
    x_precision: str = "tf32"
    members: bool = False


def program(call: Call, rows: Cut, columns: Cut, tma: bool = False, **features: Any) -> Program:
    """What a kernel for this call is compiled for.

    Args:
        call: The attention call.
        rows: Tiles of queries.
        columns: Tiles of keys.
        tma: Whether tensor descriptors are to be used.
        features: Further attributes.
    """
    flags = call.flags
    return Program(
        rows=rows,
        columns=columns,
        d=call.width,
        bd=padded(call.width),
        dv=call.value_width,
        bdv=padded(call.value_width),
        tma=tma,
        softcap=flags["SOFTCAP"],
        mask=flags["MASK"],
        bias=flags["BIAS"],
        upcast=flags["UPCAST"],
        interpret=flags["INTERPRET"],
        precision=flags["PRECISION"],
        full_precision=precision(torch.float32),
        **features,
    )


def sizes(kernel: str, call: Call, weighted: bool = False, features: bool = False) -> Tiles:
    """Largest tiles of a kernel, and how it is compiled.

    Args:
        kernel: Its name in the table.
        call: The attention call.
        weighted: Whether weights are multiplied by their gradients.
        features: Whether the backward pass has features besides the values.
    """
    widest = max(padded(call.width), padded(call.value_width))
    tiles = second_tiles_for(call.q.device, kernel, widest, call.q.dtype)
    crowded = features and (call.bias is not None or call.mask is not None)
    if call.bias is None and not weighted and not crowded:
        return tiles
    # The table leaves no shared memory for tiles of a bias, or of a second operand, and none for two stages of both.
    most = 64 if widest <= 128 else 32
    stages = min(tiles.stages, 1 if crowded else 2)
    return replace(tiles, bm=min(tiles.bm, 64), bn=min(tiles.bn, most), stages=stages)


def cuts(tiles: Tiles, call: Call) -> tuple[Cut, Cut]:
    """Tiles of rows, no larger than the few rows of a call need, and of columns."""
    return plain(min(tiles.bm, padded(call.n_rows))), plain(tiles.bn)


def described(x: Tensor, rows: int) -> TensorDescriptor | None:
    """A descriptor that loads so many rows of one sequence and head; None where the device or the layout has none."""
    steps = [step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    aligned = all(step > 0 and step * x.element_size() % 16 == 0 for step in steps)
    if not (has_tma(x.device) and aligned and x.data_ptr() % 16 == 0 and x.numel()):
        return None
    wide = (
        -(-x.shape[3] // 16) * 16
    )  # a stride along an axis of one is never used, but must be aligned
    strides = [
        wide if size == 1 else step for size, step in zip(x.shape[:3], x.stride(), strict=False)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, padded(x.shape[3])])


def dense_rows(x: Tensor) -> Tensor:
    """The tensor with unit stride along its width."""
    return x if x.stride(-1) == 1 else x.contiguous()
