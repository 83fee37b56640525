"""The running state of a query row, and what is done with it at the end: merge splits, add the sink, write.

A state is what the attention loop knows of a row after some of its keys (:mod:`headlab.kernels.fused.forward` has the
formulas): a reference score m in log2 units and sums of p = exp2(s − m). Two states over different keys combine exactly
as two tiles do, both rescaled to the larger reference; so a split of the keys is merged by the arithmetic of the loop.
Equal scores go to the lower key, whatever the order.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Keys of entries of the top-k that are still empty: distinct, and higher than those of real keys.
EMPTY = tl.constexpr(1 << 30)


@triton.jit
def fresh(ROWS: tl.constexpr, P: tl.constexpr):
    """The state of rows that have seen nothing. What P does not ask for is a constant, which the compiler drops."""
    # Triton 3.6 wants shapes made of named constants.
    Z: tl.constexpr = P.z_sums
    KEPT: tl.constexpr = P.kept
    X: tl.constexpr = P.x_sums
    zero = tl.zeros([ROWS], tl.float32)
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS, Z], tl.float32)
    top = tl.full([ROWS, KEPT], float("-inf"), tl.float32)
    top_key = tl.zeros([ROWS, KEPT], tl.int32) + EMPTY + tl.arange(0, KEPT)[None, :]
    x = tl.zeros([ROWS, X], tl.float32)
    key = tl.zeros([ROWS], tl.int32)
    return lowest, zero, z, zero, zero, zero, lowest, key, top, top_key, x


@triton.jit
def rescaled(state, reference, P: tl.constexpr):
    """The same state relative to a reference at least as large."""
    m, total, z, spread, distance, local, best, key, top, top_key, x = state
    base = tl.where(reference == float("-inf"), 0.0, reference)
    a = tl.exp2(m - base)
    if P.entropy >= 0:
        spread = a * (spread + total * tl.where(m == float("-inf"), 0.0, m - base))
    total = total * a
    if P.distance >= 0:
        distance = distance * a
    if P.local >= 0:
        local = local * a
    if P.features > 0:
        x = x * a[:, None]
    if P.z:
        z = z * a[:, None]
    return reference, total, z, spread, distance, local, best, key, top, top_key, x


@triton.jit
def inserted(top, top_key, s, columns, P: tl.constexpr, ORDERED: tl.constexpr):
    """The best of the entries kept and of candidates s [row, candidate], whose keys are ``columns``.

    Each round takes every row's best candidate in place of its worst entry, until no row gains. With ORDERED all
    candidates lie after the entries kept, so one that equals the worst entry never replaces it.
    """
    worst = tl.min(top, 1)
    s_best = tl.max(s, 1)
    open_rows = _may_gain(s_best, worst, ORDERED)
    if open_rows > 0:  # a loop that only runs inside a branch leaves the loop around it pipelined
        rounds = 0
        while (open_rows > 0) & (rounds < P.kept):
            key = tl.min(tl.where(s == s_best[:, None], columns, 2147483647), 1)
            # Of equally bad entries the one with the highest key goes.
            last = tl.max(tl.where(top == worst[:, None], top_key, -1), 1)
            gains = s_best > worst
            if not ORDERED:
                gains = gains | ((s_best == worst) & (s_best > float("-inf")) & (key < last))
            replaced = gains[:, None] & (top_key == last[:, None])
            top = tl.where(replaced, s_best[:, None], top)
            top_key = tl.where(replaced, key[:, None], top_key)
            s = tl.where(columns == key[:, None], float("-inf"), s)
            worst = tl.min(top, 1)
            s_best = tl.max(s, 1)
            open_rows = _may_gain(s_best, worst, ORDERED)
            rounds += 1
    return top, top_key


@triton.jit
def _may_gain(s_best, worst, ORDERED: tl.constexpr):
    gains = s_best > worst
    if not ORDERED:
        gains = gains | ((s_best == worst) & (s_best > float("-inf")))
    return tl.max(gains.to(tl.int32), 0)


@triton.jit
def combined(state, other, P: tl.constexpr):
    """The state over the keys of both."""
    reference = tl.maximum(state[0], other[0])
    m, total, z, spread, distance, local, best, key, top, top_key, x = rescaled(state, reference, P)
    _, total_, z_, spread_, distance_, local_, best_, key_, top_, top_key_, x_ = rescaled(
        other, reference, P
    )
    better = (best_ > best) | ((best_ == best) & (key_ < key))
    if P.argmax:
        key = tl.where(better, key_, key)
    if P.k > 0:
        top, top_key = inserted(top, top_key, top_, top_key_, P, False)
    return (
        m, total + total_, z + z_, spread + spread_, distance + distance_, local + local_,
        tl.maximum(best, best_), key, top, top_key, x + x_,
    )  # fmt: skip


@triton.jit
def write_state(
    state, row, valid, rows_at, key_at, top_at, top_key_at, x_at, z_at, n_rows, P: tl.constexpr
):  # fmt: skip
    """Store the states of rows as they are; ``row`` counts (split, sequence, head, query), of ``n_rows``."""
    m, total, z, spread, distance, local, best, key, top, top_key, x = state
    tl.store(rows_at + row, m, mask=valid)
    tl.store(rows_at + n_rows + row, total, mask=valid)
    if P.entropy >= 0:
        tl.store(rows_at + 2 * n_rows + row, spread, mask=valid)
    if P.distance >= 0:
        tl.store(rows_at + 3 * n_rows + row, distance, mask=valid)
    if P.local >= 0:
        tl.store(rows_at + 4 * n_rows + row, local, mask=valid)
    if P.argmax or P.maximum >= 0:
        tl.store(rows_at + 5 * n_rows + row, best, mask=valid)
    if P.argmax:
        tl.store(key_at + row, key, mask=valid)
    if P.k > 0:
        entries = row[:, None] * P.kept + tl.arange(0, P.kept)[None, :]
        tl.store(top_at + entries, top, mask=valid[:, None])
        tl.store(top_key_at + entries, top_key, mask=valid[:, None])
    if P.features > 0:
        entries = row[:, None] * P.features + tl.arange(0, P.features)[None, :]
        tl.store(x_at + entries, x, mask=valid[:, None])
    if P.z:
        entries = row[:, None] * P.bdv + tl.arange(0, P.bdv)[None, :]
        tl.store(z_at + entries, z, mask=valid[:, None])


@triton.jit
def read_state(
    row, valid, rows_at, key_at, top_at, top_key_at, x_at, z_at, n_rows,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The states that :func:`write_state` stored."""
    m, total, z, spread, distance, local, best, key, top, top_key, x = fresh(ROWS, P)
    m = tl.load(rows_at + row, mask=valid, other=float("-inf"))
    total = tl.load(rows_at + n_rows + row, mask=valid, other=0.0)
    if P.entropy >= 0:
        spread = tl.load(rows_at + 2 * n_rows + row, mask=valid, other=0.0)
    if P.distance >= 0:
        distance = tl.load(rows_at + 3 * n_rows + row, mask=valid, other=0.0)
    if P.local >= 0:
        local = tl.load(rows_at + 4 * n_rows + row, mask=valid, other=0.0)
    if P.argmax or P.maximum >= 0:
        best = tl.load(rows_at + 5 * n_rows + row, mask=valid, other=float("-inf"))
    if P.argmax:
        key = tl.load(key_at + row, mask=valid, other=0)
    if P.k > 0:
        entries = row[:, None] * P.kept + tl.arange(0, P.kept)[None, :]
        top = tl.load(top_at + entries, mask=valid[:, None], other=float("-inf"))
        top_key = tl.load(top_key_at + entries, mask=valid[:, None], other=0)
    if P.features > 0:
        entries = row[:, None] * P.features + tl.arange(0, P.features)[None, :]
        x = tl.load(x_at + entries, mask=valid[:, None], other=0.0)
    if P.z:
        entries = row[:, None] * P.bdv + tl.arange(0, P.bdv)[None, :]
        z = tl.load(z_at + entries, mask=valid[:, None], other=0.0)
    return m, total, z, spread, distance, local, best, key, top, top_key, x


@triton.jit
def write_result(
    state, row, head, valid, scale, sinks, z_row, rows_at, key_at, top_at, top_key_at, x_at,
    n_rows, P: tl.constexpr,
):  # fmt: skip
    """Add the sink of each row's head, normalise, and store; ``z_row`` points at each row's z [row, 1]."""
    keys = state[1]
    if P.sinks:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        state = rescaled(state, tl.maximum(state[0], sink), P)
        keys = state[1]
    m, total, z, spread, distance, local, best, key, top, top_key, x = state
    base = tl.where(m == float("-inf"), 0.0, m)
    if P.sinks:
        total += tl.exp2(sink - base)
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    inverse = 1.0 / safe
    bits = tl.log2(safe)
    if P.lse >= 0:
        lse = tl.where(blind, float("-inf"), (base + bits) * 0.6931471805599453)
        tl.store(rows_at + P.lse * n_rows + row, lse, mask=valid)
    if P.entropy >= 0:
        entropy = (bits * keys - spread) * inverse * 0.6931471805599453
        tl.store(rows_at + P.entropy * n_rows + row, entropy, mask=valid)
    if P.argmax or P.maximum >= 0:
        largest = tl.exp2(shifted(best, scale, base, P)) * inverse
        if P.maximum >= 0:
            tl.store(rows_at + P.maximum * n_rows + row, largest, mask=valid)
        if P.argmax:
            tl.store(key_at + row, tl.where(largest > 0.0, key, -1), mask=valid)
    if P.distance >= 0:
        tl.store(rows_at + P.distance * n_rows + row, distance / keys, mask=valid)
    if P.local >= 0:
        tl.store(rows_at + P.local * n_rows + row, local * inverse, mask=valid)
    if P.k > 0:
        for rank in range(P.k):  # falling, the lowest key first among equals
            s_best = tl.max(top, 1)
            key = tl.min(tl.where(top == s_best[:, None], top_key, 2147483647), 1)
            weight = tl.exp2(shifted(s_best, scale, base, P)) * inverse
            tl.store(top_at + row * P.k + rank, weight, mask=valid)
            tl.store(top_key_at + row * P.k + rank, tl.where(weight > 0.0, key, -1), mask=valid)
            top = tl.where(top_key == key[:, None], float("-inf"), top)
    if P.features > 0:
        entries = row[:, None] * P.features + tl.arange(0, P.features)[None, :]
        tl.store(x_at + entries, x * inverse[:, None], mask=valid[:, None])
    if P.z:
        across = tl.arange(0, P.bdv)[None, :]
        z = (z * inverse[:, None]).to(z_row.dtype.element_ty)
        tl.store(z_row + across, z, mask=valid[:, None] & (across < P.dv))


@triton.jit
def shifted(s, scale, base, P: tl.constexpr):
    """s − m in log2 units; one rounding, the same wherever it is computed, so that the largest weight is exact."""
    if P.raw:
        return tl.fma(s, scale, -base)
    else:
        return s - base


@triton.jit
def merge_kernel(
    parts_rows, parts_key, parts_top, parts_top_key, parts_x, parts_z,
    z_at, z_batch, z_head, z_row, rows_at, key_at, top_at, top_key_at, x_at,
    heads, sinks, scale, n_queries, n_heads, n_rows, n_splits,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Combine the splits of each row in turn and write the row; ``n_rows`` counts (sequence, head, query)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < n_rows
    n_all = n_rows.to(tl.int64)
    state = fresh(ROWS, P)
    for split in range(0, n_splits):
        other = read_state(
            split * n_all + row, valid, parts_rows, parts_key, parts_top, parts_top_key, parts_x,
            parts_z, n_all * n_splits, ROWS, P,
        )  # fmt: skip
        state = combined(state, other, P)
    query = row % n_queries
    head = tl.load(heads + (row // n_queries) % n_heads, mask=valid, other=0)
    sequence = row // n_queries // n_heads
    z_of = z_at + sequence * z_batch + head.to(tl.int64) * z_head + query * z_row
    write_result(
        state, row, head, valid, scale, sinks, z_of[:, None], rows_at, key_at, top_at, top_key_at,
        x_at, n_all, P,
    )  # fmt: skip
