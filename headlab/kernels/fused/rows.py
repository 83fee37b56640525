"""What rows give: sums over intervals of lags, over segments and at named keys, and sums weighted by gradients.

A program owns one tile of query rows and one part of the result, and walks over the tiles of keys of both (see
:mod:`headlab.kernels.fused.schedule`). With the final log-sum-exp known there is no maximum to keep and nothing to
rescale:

    p[q, k]             = exp2(s₂[q, k] − lse₂[q])
    lag_mass[q, bin]    = Σ_k p[q, k] over k with edges[bin] ≤ q + diagonal − k < edges[bin + 1]
    local_mass[q]       = Σ_k p[q, k] over k with |q + diagonal − k| < local_window
    segment_z[q, s]     = Σ_{k ∈ segment s} p[q, k] v[k]
    feature[q]          = Σ_k p[q, k] x[k]
    target_mass[q]      = p[q, target[q]]

A bin of lags is an interval of columns, [q + diagonal − edges[bin+1] + 1, q + diagonal − edges[bin] + 1), cut with the
one the row sees; so is the local window. Only tiles that overlap it are visited: all bins together cost about one score
product per visible tile, and one or two more per bin. Likewise only tiles with members of a segment are visited, so
contiguous segments together cost one forward pass, and only tiles where a feature is not 0. ``segment_z`` rounds p to
the type of the values, as z does; features are multiplied in full float32 precision. ``target_mass`` gathers one key
per row, O(N d).

With a gradient of z, p is replaced by p ∂loss/∂p = p · (dz[q] · v[k]), a second product dP = dZ V^T per tile.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.kernels.fused.call import Call, padded, precision
from headlab.kernels.fused.schedule import schedule, seen
from headlab.kernels.fused.second import cuts, dense_rows, described, program, sizes
from headlab.kernels.fused.tiles import block_of, capped, product, rows_of
from headlab.kernels.fused.weights import listed, normalisers, weights
from headlab.kernels.inputs import Request

#: Features summed together.
_FEATURES = 64

#: Rows whose targets a program looks up.
_TARGETS = 16


def row_statistics(
    call: Call, lse: Float[Tensor, "batch head query"], request: Request
) -> dict[str, Tensor]:
    """The row statistics of the second pass, as far as they are requested.

    These are ``lag_mass``, ``target_mass``, ``segment_z`` and ``feature``; weighted by gradients also ``local_mass``.

    Args:
        call: The attention call, with the heads to look at.
        lse: Natural log-sum-exp of their rows, sinks included; −inf in a row that sees no key.
        request: What to compute.
    """
    norm = normalisers(call, lse)
    found: dict[str, Tensor] = {}
    for name in request.statistics:
        if name == "lag_mass":
            found[name] = _lag_mass(call, norm, request, request.lag_edges)
        elif name == "target_mass":
            found[name] = _target_mass(call, norm, request)
        elif name == "segment_z":
            found[name] = _segment_z(call, norm, request)
        elif name == "feature":
            found[name] = _feature(call, norm, request)
        elif name == "local_mass" and request.z_gradient is not None:
            near = (1 - request.local_window, request.local_window)
            found[name] = _lag_mass(call, norm, request, near)[..., 0]
    return found


def _lag_mass(call: Call, norm: Tensor, request: Request, edges: tuple[int, ...]) -> Tensor:
    """Mass per bin of lags, [batch, head, query, bin]."""
    position = torch.arange(call.n_rows, dtype=torch.int32, device=norm.device)
    position = position + call.inputs.diagonal
    bins = list(pairwise(edges))
    low = torch.stack([torch.maximum(call.low, position - end + 1) for _, end in bins], 1)
    high = torch.stack([torch.minimum(call.high, position - start + 1) for start, _ in bins], 1)
    out = norm.new_empty(*norm.shape, len(bins))
    _sum("masses", call, norm, request, low, high, None, None, out[..., None])
    return out


def _segment_z(call: Call, norm: Tensor, request: Request) -> Tensor:
    assert request.segments is not None
    members = request.segments.transpose(1, 2).contiguous()
    out = norm.new_empty(*norm.shape, members.shape[1], call.value_width)
    low, high = call.low[:, None], call.high[:, None]
    _sum("values", call, norm, request, low, high, call.v, members, out, members)
    return out


def _feature(call: Call, norm: Tensor, request: Request) -> Tensor:
    assert request.features is not None
    features = request.features.float().contiguous()[:, None]  # for every key/value head
    out = norm.new_empty(*norm.shape, 1, features.shape[-1])
    low, high = call.low[:, None], call.high[:, None]
    for start in range(0, features.shape[-1], _FEATURES):
        some = slice(start, start + _FEATURES)
        part, into = features[..., some], out[..., some]
        _sum("values", call, norm, request, low, high, part, None, into, (part != 0).any(-1))
    return out[..., 0, :]


def _sum(
    kernel: str,
    call: Call,
    norm: Float[Tensor, "batch head query"],
    request: Request,
    low: Int[Tensor, "#batch #part query"],
    high: Int[Tensor, "#batch #part query"],
    values: Float[Tensor, "#batch #kv_head key width"] | None,
    members: Bool[Tensor, "#batch part key"] | None,
    out: Float[Tensor, "batch head query part width"],
    used: Bool[Tensor, "#batch part key"] | None = None,
) -> None:
    """Sum weights, or values by weights, over the columns [low, high) of each part that are its members.

    Tiles without a column that is ``used`` are passed over.
    """
    tiles = sizes(kernel, call, request.z_gradient is not None)
    rows, columns = cuts(tiles, call)
    overlap, whole = seen(low, high, rows, columns, call.n_keys)
    if used is not None:
        start, stop = columns.ends(call.n_keys, used.device)
        padding = columns.count(call.n_keys) * columns.size - call.n_keys
        per_tile = torch.nn.functional.pad(used, (0, padding)).unflatten(-1, (-1, columns.size))
        overlap = overlap & per_tile.any(-1)[:, :, None]
        if members is not None:
            whole = whole & (per_tile.sum(-1) == stop - start)[:, :, None]
    visits = schedule(overlap.flatten(1, 2), whole.flatten(1, 2))
    weighted = request.z_gradient is not None
    dz = call.q if request.z_gradient is None else dense_rows(request.z_gradient)
    x = call.v if values is None else values
    k = None if weighted else described(call.k, columns.size)
    x_described = None if values is None else described(x, columns.size)
    tma = k is not None and (values is None or x_described is not None)
    row_tiles = rows.count(call.n_rows)
    member = call.low if members is None else members.view(torch.uint8)
    _rows[(row_tiles * out.shape[3], norm.shape[1], norm.shape[0])](
        call.q, *call.q.stride()[:3], k if tma else call.k, *call.k.stride()[:3],
        call.v, *call.v.stride()[:3], dz, *dz.stride()[:3],
        x_described if tma and values is not None else x, *_strides(x), x.stride(2), norm,
        low, high, *_strides(low), *call.visible()[3:],
        member, member.stride(0) if member.shape[0] > 1 else 0, call.heads, *visits.arguments(),
        out, out.stride(2), out.stride(3), row_tiles,
        norm.shape[1], call.n_rows, call.n_keys, call.group, call.scale, call.softcap,
        P=program(
            call, rows, columns, tma, gradient=weighted, gradient_precision=precision(dz.dtype),
            x=0 if values is None else x.shape[3], bx=padded(x.shape[3]),
            x_precision=precision(x.dtype), members=members is not None,
        ),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int]:
    """Strides of the first two axes; 0 along those that are broadcast."""
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


@triton.jit
def _tile(
    total, tile, q_tile, dz_tile, rows, lse, first, last, b, kv, k, k_row, v, v_row, x, x_row,
    mask, mask_row, bias, bias_row, member, n_rows, n_keys, scale, softcap,
    EDGE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to ``total``: [row], or [row, width] of values."""
    PRECISION: tl.constexpr = P.precision
    GRADIENT_PRECISION: tl.constexpr = P.gradient_precision
    X_PRECISION: tl.constexpr = P.x_precision
    start = tile * P.columns.size
    columns = start + tl.arange(0, P.columns.size)
    k_tile = block_of(k, b, kv, start, n_keys, k_row, P.columns.size, P.d, P.bd, EDGE, P.tma)
    s = product(q_tile, tl.trans(k_tile), P.upcast, PRECISION)
    s = capped(s, scale, softcap, P.softcap, P.interpret)
    if P.members and EDGE:
        belongs = tl.load(member + columns, mask=columns < n_keys, other=0)
        s = tl.where(belongs[None, :] != 0, s, float("-inf"))
    p = weights(
        s, rows[:, None], columns[None, :], first[:, None], last[:, None], lse[:, None], n_rows, n_keys,
        mask, mask_row, bias, bias_row, EDGE, P,
    )  # fmt: skip
    if P.gradient:
        v_tile = block_of(v, b, kv, start, n_keys, v_row, P.columns.size, P.dv, P.bdv, EDGE, False)
        p *= product(dz_tile, tl.trans(v_tile.to(dz_tile.dtype)), P.upcast, GRADIENT_PRECISION)
    if P.x == 0:
        total += tl.sum(p, 1)
    else:
        x_tile = block_of(x, b, kv, start, n_keys, x_row, P.columns.size, P.x, P.bx, EDGE, P.tma)
        total += product(p.to(x_tile.dtype), x_tile, P.upcast, X_PRECISION)
    return total


@triton.jit
def _rows(
    q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
    dz, dz_batch, dz_head, dz_row, x, x_batch, x_head, x_row, norm,
    low, high, low_batch, low_part, mask, mask_batch, mask_head, mask_row, bias, bias_batch, bias_head, bias_row,
    member, member_batch, heads, tiles, counts, batched, n_programs, n_tiles,
    out, out_row, out_part, row_tiles, n_heads, n_rows, n_keys, group, scale, softcap, P: tl.constexpr,
):  # fmt: skip
    """One part of one tile of rows of one head. Grid: (parts · row tiles, chosen heads, sequences)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal call's longest rows first
    slot = tl.program_id(1)
    sequence = tl.program_id(2)
    part = (program // row_tiles).to(tl.int64)
    head = tl.load(heads + slot)
    b = sequence.to(tl.int64)
    h = head.to(tl.int64)
    kv = h // group
    rows = (program % row_tiles) * P.rows.size + tl.arange(0, P.rows.size)
    inside = rows < n_rows
    q_tile = rows_of(q + b * q_batch + h * q_head, rows, q_row, n_rows, P.d, P.bd)
    dz_tile = q_tile
    if P.gradient:
        dz_tile = rows_of(dz + b * dz_batch + h * dz_head, rows, dz_row, n_rows, P.dv, P.bdv)
    if not P.tma:
        k += b * k_batch + kv * k_head
        x += b * x_batch + kv * x_head
    v += b * v_batch + kv * v_head
    mask += b * mask_batch + h * mask_head
    bias += b * bias_batch + h * bias_head
    member += b * member_batch
    if P.members:
        member += part * n_keys
    row = (b * n_heads + slot) * n_rows + rows
    lse = tl.load(norm + row, mask=inside, other=float("inf"))
    interval = b * low_batch + part * low_part + rows
    first = tl.load(low + interval, mask=inside, other=0)
    last = tl.load(high + interval, mask=inside, other=0)
    visits, edges, visited = listed(tiles, counts, batched, n_programs, n_tiles, b, program)
    SIZE: tl.constexpr = P.rows.size
    WIDTH: tl.constexpr = P.bx
    total = tl.zeros([SIZE] if P.x == 0 else [SIZE, WIDTH], tl.float32)
    for at in range(0, edges):
        total = _tile(
            total, tl.load(visits + at).to(tl.int32), q_tile, dz_tile, rows, lse, first, last,
            sequence, head // group, k, k_row, v, v_row, x, x_row, mask, mask_row, bias, bias_row, member,
            n_rows, n_keys, scale, softcap, True, P,
        )  # fmt: skip
    for at in range(edges, visited):
        total = _tile(
            total, tl.load(visits + at).to(tl.int32), q_tile, dz_tile, rows, lse, first, last,
            sequence, head // group, k, k_row, v, v_row, x, x_row, mask, mask_row, bias, bias_row, member,
            n_rows, n_keys, scale, softcap, False, P,
        )  # fmt: skip
    out += row * out_row + part * out_part
    if P.x == 0:
        tl.store(out, total, mask=inside)
    else:
        across = tl.arange(0, P.bx)
        tl.store(
            out[:, None] + across[None, :], total, mask=inside[:, None] & (across < P.x)[None, :]
        )


def _target_mass(call: Call, norm: Tensor, request: Request) -> Tensor:
    """Weight on one named key per query, [batch, head, query]."""
    assert request.targets is not None
    targets = request.targets.int().contiguous()
    dz = call.q if request.z_gradient is None else dense_rows(request.z_gradient)
    out = torch.empty_like(norm)
    rows, columns = cuts(sizes("masses", call), call)
    _targets[(triton.cdiv(call.n_rows, _TARGETS), norm.shape[1], norm.shape[0])](
        call.q, *call.q.stride()[:3], call.k, *call.k.stride()[:3], call.v, *call.v.stride()[:3],
        dz, *dz.stride()[:3], norm, *call.visible(), call.heads,
        targets, targets.stride(0) if targets.shape[0] > 1 else 0, out,
        norm.shape[1], call.n_rows, call.n_keys, call.group, call.scale, call.softcap,
        ROWS=_TARGETS, P=program(call, rows, columns, gradient=request.z_gradient is not None),
    )  # fmt: skip
    return out


@triton.jit
def _targets(
    q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row,
    dz, dz_batch, dz_head, dz_row, norm,
    low, high, low_batch, mask, mask_batch, mask_head, mask_row, bias, bias_batch, bias_head, bias_row,
    heads, targets, targets_batch, out, n_heads, n_rows, n_keys, group, scale, softcap,
    ROWS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The weights of some rows of one head on their targets. Grid: (ROWS rows, chosen heads, sequences)."""
    slot = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    h = tl.load(heads + slot).to(tl.int64)
    kv = h // group
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    row = (b * n_heads + slot) * n_rows + rows
    lse = tl.load(norm + row, mask=inside, other=float("inf"))
    first = tl.load(low + b * low_batch + rows, mask=inside, other=0)
    last = tl.load(high + b * low_batch + rows, mask=inside, other=0)
    target = tl.load(targets + b * targets_batch + rows, mask=inside, other=-1)
    named = (target >= first) & (target < last)
    target = tl.where(named, target, n_keys)  # nothing is loaded from there
    q_tile = rows_of(q + b * q_batch + h * q_head, rows, q_row, n_rows, P.d, P.bd).to(tl.float32)
    k_tile = rows_of(k + b * k_batch + kv * k_head, target, k_row, n_keys, P.d, P.bd).to(tl.float32)
    s = capped(tl.sum(q_tile * k_tile, 1), scale, softcap, P.softcap, P.interpret)
    p = weights(
        s, rows, target, first, last, lse, n_rows, n_keys,
        mask + b * mask_batch + h * mask_head, mask_row, bias + b * bias_batch + h * bias_head, bias_row, True, P,
    )  # fmt: skip
    if P.gradient:
        dz_tile = rows_of(dz + b * dz_batch + h * dz_head, rows, dz_row, n_rows, P.dv, P.bdv).to(
            tl.float32
        )
        v_tile = rows_of(v + b * v_batch + kv * v_head, target, v_row, n_keys, P.dv, P.bdv).to(
            tl.float32
        )
        p *= tl.sum(dz_tile * v_tile, 1)
    tl.store(out + row, p, mask=inside)
