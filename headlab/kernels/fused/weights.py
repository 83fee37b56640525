"""The weights of a tile when the log-sum-exp of its rows is known: p = exp2(s₂ − lse₂), with no maximum to keep.

Rows that contribute nothing have lse₂ = +∞ here, so that their weights are exactly 0 without a test: rows that see no
key, rows beyond the last, queries that are not counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.kernels.fused.call import LOG2E, Call
from headlab.kernels.fused.tiles import hidden


@triton.jit
def weights(
    s, rows, columns, low, high, lse, n_rows, n_keys, mask, mask_row, bias, bias_row,
    EDGE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """p from soft-capped scores s in log2 units; arguments as those of :func:`~headlab.kernels.fused.tiles.hidden`."""
    MASK: tl.constexpr = P.mask
    BIAS: tl.constexpr = P.bias
    s = hidden(
        s, rows, columns, low, high, n_rows, n_keys, mask, mask_row, bias, bias_row,
        EDGE, MASK, BIAS,
    )  # fmt: skip
    return tl.exp2(s - lse)


@triton.jit
def ends(tile, n, CUT: tl.constexpr):
    """First entry of a tile and the one after its last; see :class:`headlab.kernels.fused.schedule.Cut`."""
    if CUT.parts == 1:
        start = tile * CUT.span
        stop = tl.minimum(start + CUT.width, n)
    else:
        span = tile // CUT.parts
        start = span * CUT.span + (tile % CUT.parts) * CUT.width
        stop = tl.minimum(tl.minimum(start + CUT.width, (span + 1) * CUT.span), n)
    return start, stop


@triton.jit
def listed(tiles, counts, batched, n_programs, n_tiles, sequence, program):
    """Where the list of a program begins, how many of its tiles are tested, and how many there are."""
    at = sequence * batched * n_programs + program
    edges = tl.load(counts + 2 * at)
    return tiles + at * n_tiles, edges, edges + tl.load(counts + 2 * at + 1)


@triton.jit
def of_row(pointer, rows, n, other, EDGE: tl.constexpr):
    """One number per row; ``other`` beyond the last."""
    if EDGE:
        return tl.load(pointer + rows, mask=rows < n, other=other)
    else:
        return tl.load(pointer + rows)


def normalisers(
    call: Call,
    lse: Float[Tensor, "batch head query"],
    counted: Bool[Tensor, "#batch query"] | None = None,
) -> Float[Tensor, "batch head query"]:
    """lse₂ of each row, +∞ where the row contributes nothing.

    Args:
        call: The attention call.
        lse: Natural log-sum-exp of the rows.
        counted: Rows that contribute; None for all.
    """
    used = call.low < call.high  # with a sink, a blind row's lse is finite
    if counted is not None:
        used = used & counted
    used = used[:, None] & (lse > -torch.inf)
    return (lse.float() * LOG2E).where(used, torch.inf).contiguous()
