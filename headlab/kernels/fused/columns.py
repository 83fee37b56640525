"""What keys receive: sums over queries, in a second pass that knows each row's log-sum-exp.

A program owns one tile of keys and walks over the tiles of queries that see it (see
:mod:`headlab.kernels.fused.schedule`). The tile is computed turned, S^T = K Q^T [key, query]: a sum over queries then
stays within a thread's registers, and nothing is added by two programs: the result is the same in every run.

    p[q, k] = exp2(s₂[q, k] − lse₂[q])                lse₂ = +∞ for queries that do not count
    received[k] = Σ_q p[q, k]
    block_map[i, j] = Σ_{q ∈ square i} Σ_{k ∈ square j} p[q, k]

With a gradient of z, p is replaced by p ∂loss/∂p = p · (dz[q] · v[k]), a second product dP^T = V dZ^T per tile.

Where ``block_map`` is asked for, no tile straddles two of its squares. A square wider than a tile is cut into equal
parts, whose sums are added afterwards. A tile of several squares tells them apart by two products with indicators,
A^T (p B) with A[key, square] and B[query, square], without loss of precision.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from headlab.kernels.fused.call import Call, precision
from headlab.kernels.fused.schedule import Cut, seen_by, squares
from headlab.kernels.fused.second import cuts, dense_rows, described, program, sizes
from headlab.kernels.fused.tiles import block_of, capped, product, rows_of
from headlab.kernels.fused.weights import ends, listed, normalisers, of_row, weights
from headlab.kernels.inputs import Request


def column_statistics(
    call: Call, lse: Float[Tensor, "batch head query"], request: Request
) -> dict[str, Tensor]:
    """``received`` and ``block_map``, as far as they are requested.

    Args:
        call: The attention call, with the heads to look at.
        lse: Natural log-sum-exp of their rows, sinks included; −inf in a row that sees no key.
        request: What to compute.
    """
    tiles = sizes("columns", call, request.z_gradient is not None)
    rows, columns = cuts(tiles, call)
    mapped = "block_map" in request.statistics
    if mapped:
        most = (
            min(tiles.bn, 64) if request.block < 64 else tiles.bn
        )  # room for telling squares apart
        rows, columns = squares(request.block, rows.size), squares(request.block, most)
    if not mapped and "received" not in request.statistics:
        return {}
    low, high = call.low, call.high
    if request.counted is not None:
        high = high.where(request.counted, 0)  # it sees nothing here
        low = low.expand_as(high)
    visits = seen_by(low, high, rows, columns, call.n_keys)
    norm = normalisers(call, lse, request.counted)
    batch, heads = norm.shape[:2]
    down, across = rows.count(call.n_rows), columns.count(call.n_keys)
    received = norm.new_empty(batch, heads, call.n_keys)
    sums = norm.new_zeros(
        (batch, heads, down * rows.squares, across * columns.squares) if mapped else 1
    )
    dz = call.q if request.z_gradient is None else dense_rows(request.z_gradient)
    q = described(call.q, rows.size) if request.z_gradient is None else None
    _columns[(across, heads, batch)](
        call.q if q is None else q, *call.q.stride()[:3],
        call.k, *call.k.stride()[:3], call.v, *call.v.stride()[:3], dz, *dz.stride()[:3], norm,
        *call.visible(), call.heads, *visits.arguments(), received, sums,
        heads, call.n_rows, call.n_keys, call.group, call.scale, call.softcap,
        P=program(
            call, rows, columns, q is not None, mapped=mapped,
            gradient=request.z_gradient is not None, gradient_precision=precision(dz.dtype),
        ),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    found = {"received": received}
    if mapped:
        found["block_map"] = _joined(sums, rows, columns, call, request.block)
    return {name: found[name] for name in request.statistics if name in found}


def _joined(sums: Tensor, rows: Cut, columns: Cut, call: Call, side: int) -> Tensor:
    """Sums of parts of squares as sums of squares."""
    sums = sums.unflatten(-1, (-1, columns.parts)).sum(-1)
    sums = sums.unflatten(-2, (-1, rows.parts)).sum(-2)
    return sums[..., : -(-call.n_rows // side), : -(-call.n_keys // side)].contiguous()


@triton.jit
def _tile(
    total, tile, k_tile, v_tile, columns, stop, key_tile, b, h,
    q, q_row, dz, dz_row, norm, low, high, mask, mask_row, bias, bias_row, sums, sums_row,
    n_rows, n_keys, scale, softcap, EDGE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Adds one tile of queries to ``total`` [key], and stores its squares."""
    ROWS: tl.constexpr = P.rows
    PRECISION: tl.constexpr = P.precision
    GRADIENT_PRECISION: tl.constexpr = P.gradient_precision
    start, end = ends(tile, n_rows, ROWS)
    rows = start + tl.arange(0, P.rows.size)
    q_tile = block_of(q, b, h, start, end, q_row, P.rows.size, P.d, P.bd, EDGE, P.tma)
    s = product(k_tile, tl.trans(q_tile), P.upcast, PRECISION)
    s = capped(s, scale, softcap, P.softcap, P.interpret)
    lse = of_row(norm, rows, end, float("inf"), EDGE)
    first = rows
    last = rows
    if EDGE:
        first = of_row(low, rows, end, 0, True)
        last = tl.minimum(of_row(high, rows, end, 0, True), stop)
    p = weights(
        s, rows[None, :], columns[:, None], first[None, :], last[None, :], lse[None, :], n_rows, n_keys,
        mask, mask_row, bias, bias_row, EDGE, P,
    )  # fmt: skip
    if P.gradient:
        dz_tile = block_of(dz, b, h, start, end, dz_row, P.rows.size, P.dv, P.bdv, EDGE, False)
        p *= product(v_tile.to(dz_tile.dtype), tl.trans(dz_tile), P.upcast, GRADIENT_PRECISION)
    per_key = tl.sum(p, 1)
    if P.mapped:
        if P.rows.squares == 1 and P.columns.squares == 1:
            tl.store(sums + tile * sums_row + key_tile, tl.sum(per_key, 0))
        else:
            _store_squares(p, sums, sums_row, tile, key_tile, P)
    return total + per_key


@triton.jit
def _store_squares(p, sums, sums_row, row_tile, key_tile, P: tl.constexpr):
    """Sums of a tile [key, query] over each of its squares."""
    down = tl.arange(0, 16 if P.rows.squares <= 16 else P.rows.size)
    across = tl.arange(0, 16 if P.columns.squares <= 16 else P.columns.size)
    of_query = (tl.arange(0, P.rows.size) // P.rows.side)[:, None] == down[None, :]
    of_key = across[:, None] == (tl.arange(0, P.columns.size) // P.columns.side)[None, :]
    # Three bfloat16 hold the 24 bits of a float32; times 0 or 1 they are exact, and cheaper than float32 products.
    high = p.to(tl.bfloat16)
    rest = p - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    ones = of_query.to(tl.float32).to(tl.bfloat16)
    part = product(low, ones, P.interpret, "tf32")
    part += product(middle, ones, P.interpret, "tf32")
    part += product(high, ones, P.interpret, "tf32")
    part = tl.dot(of_key.to(tl.float32), part, input_precision=P.full_precision)
    row = (row_tile * P.rows.squares + down)[None, :]
    column = (key_tile * P.columns.squares + across)[:, None]
    inside = (down < P.rows.squares)[None, :] & (across < P.columns.squares)[:, None]
    tl.store(sums + row * sums_row + column, part, mask=inside)


@triton.jit
def _columns(
    q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
    dz, dz_batch, dz_head, dz_row, norm,
    low, high, low_batch, mask, mask_batch, mask_head, mask_row, bias, bias_batch, bias_head, bias_row, heads,
    tiles, counts, batched, n_programs, n_tiles, received, sums,
    n_heads, n_rows, n_keys, group, scale, softcap, P: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one head. Grid: (key tiles, chosen heads, sequences)."""
    key_tile = tl.program_id(0)
    slot = tl.program_id(1)
    sequence = tl.program_id(2)
    head = tl.load(heads + slot)
    b = sequence.to(tl.int64)
    h = head.to(tl.int64)
    kv = h // group
    COLUMNS: tl.constexpr = P.columns
    SIZE: tl.constexpr = P.columns.size
    column, stop = ends(key_tile, n_keys, COLUMNS)
    columns = column + tl.arange(0, SIZE)
    k_tile = rows_of(k + b * k_batch + kv * k_head, columns, k_row, stop, P.d, P.bd)
    v_tile = k_tile
    if P.gradient:
        v_tile = rows_of(v + b * v_batch + kv * v_head, columns, v_row, stop, P.dv, P.bdv)
    if not P.tma:
        q += b * q_batch + h * q_head
    dz += b * dz_batch + h * dz_head
    mask += b * mask_batch + h * mask_head
    bias += b * bias_batch + h * bias_head
    low += b * low_batch
    high += b * low_batch
    out = b * n_heads + slot
    norm += out * n_rows
    sums_row = tl.num_programs(0).to(tl.int64) * P.columns.squares
    sums += out * (n_tiles * P.rows.squares) * sums_row
    visits, edges, visited = listed(tiles, counts, batched, n_programs, n_tiles, b, key_tile)
    total = tl.zeros([SIZE], tl.float32)
    for at in range(0, edges):
        total = _tile(
            total, tl.load(visits + at).to(tl.int32), k_tile, v_tile, columns, stop, key_tile, sequence, head,
            q, q_row, dz, dz_row, norm, low, high, mask, mask_row, bias, bias_row, sums, sums_row,
            n_rows, n_keys, scale, softcap, True, P,
        )  # fmt: skip
    for at in range(edges, visited):
        total = _tile(
            total, tl.load(visits + at).to(tl.int32), k_tile, v_tile, columns, stop, key_tile, sequence, head,
            q, q_row, dz, dz_row, norm, low, high, mask, mask_row, bias, bias_row, sums, sums_row,
            n_rows, n_keys, scale, softcap, False, P,
        )  # fmt: skip
    tl.store(received + out * n_keys + columns, total, mask=columns < stop)
