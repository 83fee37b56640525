"""The forward kernel: flash attention that also carries statistics of the pattern, each only if it is asked for.

A row meets its keys a tile at a time, and keeps a reference m (log2 units) and sums of p = exp2(s − m) over the keys so
far. When m grows to m′, everything is rescaled by a = exp2(m − m′). At the end l′ is l plus the sink's p.

| statistic     | kept               | per tile                      | when m → m′            | at the end             |
|---------------|--------------------|-------------------------------|------------------------|------------------------|
| z             | o = Σ p v          | o += p V                      | o ← a o                | o / l′                 |
| lse           | l = Σ p            | l += Σ p                      | l ← a l                | ln2 (m + log2 l′)      |
| entropy       | t = Σ p (s − m)    | t += Σ p (s − m)              | t ← a (t + l (m − m′)) | ln2 (l log2 l′ − t)/l′ |
| max, argmax   | best s, its key    | larger, or equal, before      |                        | exp2(s − m) / l′       |
| topk          | the k best s, keys | better ones replace the worst |                        | exp2(s − m) / l′       |
| feature       | f = Σ p x          | f += p X, p as two halves     | f ← a f                | f / l′                 |
| local_mass    | c = Σ_near p       | c += Σ_near p, in tiles near  | c ← a c                | c / l′                 |
| mean_distance | g = Σ p ǀi − jǀ    | g += (i−j₀) Σ p − Σ p (j−j₀)  | g ← a g                | g / l                  |

Rescaling is lazy: m moves only when a score of some row is more than 15 above it, and then to 7 below the row's largest
score, so that p stays under 2¹⁵ and small weights stay within the range of half precision. That is exact, not an
approximation: m is any reference, never assumed to be the maximum. The sums are linear in p, and the common factor
cancels in every quotient; t is Σ p (s − m) for whatever m, and the chain rule moves it to another; max and top-k keep
scores, which do not depend on m at all. Distances count from the row's own position, so that near keys are
told apart as well at column 10⁵ as at column 0.

What the rows of a tile see are intervals of key columns. Their tiles are walked twice: FULL, those inside the interval
of every row (and away from the diagonal, if local mass is asked), test nothing; EDGE, those on either side, do. Rows
are (query, head of a group) pairs where few queries would leave a tile empty. Keys may be split over programs, which
then store their states for :mod:`headlab.kernels.fused.merge`. Scores may be as large as 10⁸: beyond, a float32 no
longer tells one power of two of p from the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headlab.kernels.fused.merge import (
    fresh,
    inserted,
    rescaled,
    shifted,
    write_result,
    write_state,
)
from headlab.kernels.fused.tiles import block_of, capped, hidden, product


@triton.jit
def _tile(
    state, q, j0, k_at, v_at, x_at, mask_at, bias_at, sequence, kv, rows, position, low, high,
    n_queries, n_keys, k_row, v_row, mask_row, bias_row, scale, softcap, window,
    EDGE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The state after one more tile of keys, [j0, j0 + P.bn)."""
    # Triton 3.6 wants what is passed on to be named constants.
    BN: tl.constexpr = P.bn
    D: tl.constexpr = P.d
    BD: tl.constexpr = P.bd
    DV: tl.constexpr = P.dv
    BDV: tl.constexpr = P.bdv
    X: tl.constexpr = P.x_sums
    TMA: tl.constexpr = P.tma
    SOFTCAP: tl.constexpr = P.softcap
    MASK: tl.constexpr = P.mask
    BIAS: tl.constexpr = P.bias
    UPCAST: tl.constexpr = P.upcast
    PRECISION: tl.constexpr = P.precision
    INTERPRET: tl.constexpr = P.interpret
    c = tl.arange(0, BN)
    columns = j0 + c
    k = block_of(k_at, sequence, kv, j0, n_keys, k_row, BN, D, BD, EDGE, TMA)
    s = product(q, tl.trans(k), UPCAST, PRECISION)
    if not P.raw:
        s = capped(s, scale, softcap, SOFTCAP, INTERPRET)
    s = hidden(
        s, rows[:, None], columns[None, :], low[:, None], high[:, None], n_queries, n_keys,
        mask_at, mask_row, bias_at, bias_row, EDGE, MASK, BIAS,
    )  # fmt: skip
    s_best = tl.max(s, 1)
    top_score = s_best
    if P.raw:
        top_score = s_best * scale
    if tl.max((top_score - state[0] > 15.0).to(tl.int32), 0) > 0:
        state = rescaled(state, tl.maximum(state[0], top_score - 7.0), P)
    m, total, z, spread, distance, local, best, key, top, top_key, x = state

    t = shifted(s, scale, tl.where(m == float("-inf"), 0.0, m)[:, None], P)
    p = tl.exp2(t)
    here = tl.sum(p, 1)
    total += here
    if P.entropy >= 0:
        if EDGE or MASK or BIAS:
            t = tl.where(p > 0.0, t, 0.0)
        spread += tl.sum(p * t, 1)
    if P.distance >= 0:
        offset = (position - j0).to(tl.float32)
        if P.two_sided:
            distance += tl.sum(p * tl.abs(offset[:, None] - c.to(tl.float32)[None, :]), 1)
        else:
            distance += offset * here - tl.sum(p * c.to(tl.float32)[None, :], 1)
    if P.local >= 0 and (EDGE or P.two_sided):
        near = tl.abs(position[:, None] - columns[None, :]) < window
        local += tl.sum(tl.where(near, p, 0.0), 1)
    if P.argmax:
        better = s_best > best
        if EDGE:  # tiles left of the FULL ones come after them
            better = better | ((s_best == best) & (j0 < key))
        if tl.max(better.to(tl.int32), 0) > 0:
            first = tl.min(tl.where(s == s_best[:, None], columns[None, :], 2147483647), 1)
            key = tl.where(better, first, key)
    if P.argmax or P.maximum >= 0:
        best = tl.maximum(best, s_best)
    if P.k > 0:
        top, top_key = inserted(top, top_key, s, columns[None, :], P, not EDGE)
    if P.features > 0:
        features = block_of(x_at, 0, 0, j0, n_keys, X, BN, X, X, EDGE, False)
        upper = p.to(tl.float16)
        lower = (p - upper.to(tl.float32)).to(tl.float16)
        x = tl.dot(upper, features, x)
        x = tl.dot(lower, features, x)
    if P.z:
        v = block_of(v_at, sequence, kv, j0, n_keys, v_row, BN, DV, BDV, EDGE, TMA)
        if UPCAST:
            z += product(p.to(v.dtype), v, True, PRECISION)
        else:
            z = tl.dot(p.to(v.dtype), v, z, input_precision=PRECISION)
    return m, total, z, spread, distance, local, best, key, top, top_key, x


@triton.jit
def _cleared(state, sees, P: tl.constexpr):
    """Rows that see nothing, whatever they met in FULL tiles, are as fresh."""
    m, total, z, spread, distance, local, best, key, top, top_key, x = state
    if P.z:
        z = tl.where(sees[:, None], z, 0.0)
    if P.features > 0:
        x = tl.where(sees[:, None], x, 0.0)
    if P.k > 0:
        top = tl.where(sees[:, None], top, float("-inf"))
    return (
        tl.where(sees, m, float("-inf")), tl.where(sees, total, 0.0), z, tl.where(sees, spread, 0.0),
        tl.where(sees, distance, 0.0), tl.where(sees, local, 0.0),
        tl.where(sees, best, float("-inf")), key, top, top_key, x,
    )  # fmt: skip


@triton.jit
def forward_kernel(
    q_at, k_at, v_at, x_at, low_at, high_at, mask_at, bias_at, heads, sinks,
    z_at, rows_at, key_at, top_at, top_key_at, x_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    x_batch, low_batch, mask_batch, mask_head, mask_row, bias_batch, bias_head, bias_row,
    z_batch, z_head, z_row,
    n_queries, n_keys, n_heads, group, diagonal, window, scale, softcap,
    P: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head (or of the P.pack heads that share keys), over its share of the keys.

    Grid: (row tiles, chosen heads / P.pack, sequences · P.splits). P is a
    :class:`~headlab.kernels.fused.configs.Program`.
    """
    # The last rows of a causal pattern are the longest: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(2) // P.splits
    split = tl.program_id(2) % P.splits
    packed = tile * P.bm + tl.arange(0, P.bm)
    rows = packed // P.pack
    slot = tl.program_id(1) * P.pack + packed % P.pack
    kv = tl.load(heads + tl.program_id(1) * P.pack) // group
    valid = rows < n_queries
    head = tl.load(heads + slot)
    b = sequence.to(tl.int64)

    last_row = tl.minimum(rows, n_queries - 1)
    low = tl.load(low_at + b * low_batch + last_row)
    high = tl.load(high_at + b * low_batch + last_row)
    sees = low < high
    position = rows + diagonal
    # Columns that some row sees, [start, stop), and that every row with any sees, [full_start, full_stop).
    start = tl.min(tl.where(sees, low, n_keys), 0) // P.bn * P.bn
    stop = start + tl.cdiv(tl.maximum(tl.max(high, 0) - start, 0), P.bn) * P.bn
    full_start = tl.cdiv(tl.max(low, 0), P.bn) * P.bn
    full_stop = tl.min(tl.where(sees, high, n_keys), 0)
    if P.local >= 0 and not P.two_sided:
        full_stop = tl.minimum(full_stop, tl.maximum(tl.min(position, 0) - window + 1, 0))
    full_stop = full_stop // P.bn * P.bn
    if P.splits > 1:
        share = tl.cdiv((stop - start) // P.bn, P.splits) * P.bn
        start = tl.minimum(start + split * share, stop)
        stop = tl.minimum(start + share, stop)
    full_start = tl.minimum(tl.maximum(full_start, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)

    if not P.tma:
        k_at += b * k_batch + kv.to(tl.int64) * k_head
        v_at += b * v_batch + kv.to(tl.int64) * v_head
    head_ = head.to(tl.int64)[:, None]
    across = tl.arange(0, P.bd)[None, :]
    q_rows = q_at + b * q_batch + head_ * q_head + rows.to(tl.int64)[:, None] * q_row
    q = tl.load(q_rows + across, mask=valid[:, None] & (across < P.d), other=0.0)
    x_at += b * x_batch
    mask_rows, bias_rows = mask_at, bias_at
    if P.mask:
        mask_rows = mask_at + b * mask_batch + head_ * mask_head
    if P.bias:
        bias_rows = bias_at + b * bias_batch + head_ * bias_head

    BM: tl.constexpr = P.bm
    state = fresh(BM, P)
    for j0 in range(full_start, full_stop, P.bn):
        state = _tile(
            state, q, j0, k_at, v_at, x_at, mask_rows, bias_rows, sequence, kv, rows, position,
            low, high, n_queries, n_keys, k_row, v_row, mask_row, bias_row, scale, softcap, window,
            False, P,
        )  # fmt: skip
    n_left = (full_start - start) // P.bn
    n_edge = n_left + (stop - full_stop) // P.bn
    for edge in range(0, n_edge):
        j0 = tl.where(edge < n_left, start + edge * P.bn, full_stop + (edge - n_left) * P.bn)
        state = _tile(
            state, q, j0, k_at, v_at, x_at, mask_rows, bias_rows, sequence, kv, rows, position,
            low, high, n_queries, n_keys, k_row, v_row, mask_row, bias_row, scale, softcap, window,
            True, P,
        )  # fmt: skip
    state = _cleared(state, sees, P)

    row = (b * n_heads + slot) * n_queries + rows
    n_rows = (tl.num_programs(2) // P.splits).to(tl.int64) * n_heads * n_queries
    if P.splits > 1:
        write_state(
            state, split * n_rows + row, valid, rows_at, key_at, top_at, top_key_at, x_out, z_at,
            n_rows * P.splits, P,
        )  # fmt: skip
    else:
        z_rows = z_at + b * z_batch + head_ * z_head + rows.to(tl.int64)[:, None] * z_row
        write_result(
            state, row, head, valid, scale, sinks, z_rows, rows_at, key_at, top_at, top_key_at,
            x_out, n_rows, P,
        )  # fmt: skip
