"""Device functions that every kernel shares: loading tiles, and the scores of one tile of queries by keys.

Scores are in log2 units, s₂ = s·log₂e, so that every exponential is the hardware's exp2. What a row sees is its
interval of key columns (see :mod:`headlab.kernels.visibility`); a tile that lies in every row's interval needs no test.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b in float32. The interpreter multiplies bit patterns of bfloat16, so there it is converted first."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def rows_of(pointer, rows, stride, n, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows [row, PADDED] of a matrix with unit stride along its width; 0 beyond its ends."""
    across = tl.arange(0, PADDED)
    inside = (rows < n)[:, None]
    if WIDTH < PADDED:
        inside = inside & (across < WIDTH)[None, :]
    return tl.load(
        pointer + rows.to(tl.int64)[:, None] * stride + across[None, :], mask=inside, other=0.0
    )


@triton.jit
def block_of(
    source, sequence, head, start, n, stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS, PADDED] of a matrix from row ``start``; with CHECK, 0 beyond its last.

    ``source`` points at the matrix of the (sequence, head), or with TMA describes [sequence, head, row, width].
    """
    if TMA:
        return source.load([sequence, head, start, 0]).reshape(ROWS, PADDED)
    else:
        down, across = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
        at = source + tl.cast(start, tl.int64) * stride + down * stride + across
        if CHECK and WIDTH < PADDED:
            return tl.load(at, mask=(start + down < n) & (across < WIDTH), other=0.0)
        elif CHECK:
            return tl.load(at, mask=start + down < n, other=0.0)
        elif WIDTH < PADDED:
            return tl.load(at, mask=across < WIDTH, other=0.0)
        else:
            return tl.load(at)


@triton.jit
def capped(s, scale, softcap, SOFTCAP: tl.constexpr, INTERPRET: tl.constexpr):
    """q·k as scores in log2 units: scaled, and with a soft cap c·tanh(s / c), tanh x = 1 − 2 / (1 + e^{2x})."""
    s = s * scale
    if SOFTCAP:
        grown = (
            tl.exp2(s * (2.8853900817779268 / softcap)) + 1.0
        )  # +inf for large scores: the cap itself
        if INTERPRET:
            inverse = 1.0 / grown
        else:
            inverse = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;",
                "=f,f",
                [grown],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        s = softcap - 2.0 * softcap * inverse
    return s


@triton.jit
def hidden(
    s, rows, columns, low, high, n_rows, n_keys, mask, mask_row, bias, bias_row,
    EDGE: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores with the bias added and −inf at what the rows do not see, in either orientation of the tile.

    ``rows``, ``low`` and ``high`` are [row, 1] and ``columns`` [1, column], or the other way round. ``mask`` and
    ``bias`` point at the (sequence, head) in question. Only with EDGE are intervals tested, so a tile without it must
    lie in all of them.
    """
    if MASK or BIAS:
        at_rows = rows.to(tl.int64)
        inside = (rows < n_rows) & (columns < n_keys)
    if BIAS:
        added = tl.load(bias + at_rows * bias_row + columns, mask=inside, other=0.0)
        s += added.to(tl.float32) * 1.4426950408889634
    if MASK:
        allowed = tl.load(mask + at_rows * mask_row + columns, mask=inside, other=0)
        s = tl.where(allowed != 0, s, float("-inf"))
    if EDGE:
        s = tl.where((columns >= low) & (columns < high), s, float("-inf"))
    return s
