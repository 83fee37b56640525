"""Exact gradients of z and of the log-sum-exp, from the inputs and the log-sum-exp alone: O(N) memory.

With scores s, p = exp(s − lse), lse = ln(Σ_k e^{s_k} + e^sink), z = Σ_k p_k v_k, and a loss whose gradients are
dz = ∂loss/∂z and dlse = ∂loss/∂lse. Since ∂lse/∂s_k = p_k, whatever else the sum holds,
∂p_j/∂s_k = p_j (1[j = k] − p_k) also with a sink, whose share is missing from Σ p. Hence

    dp_k = dz · v_k
    ds_k = Σ_j dp_j p_j (1[j = k] − p_k) + dlse p_k = p_k (dp_k − δ),      δ = Σ_j p_j dp_j − dlse = dz · z − dlse
    dv_k = Σ_q p dz                         dq = scaling Σ_k ds' k_k        dk_k = scaling Σ_q ds' q
    dsink = Σ_q −e^{sink − lse} δ           (p of the sink, whose value is 0: dp = 0)

where ds' = ds (1 − (c/cap)²) under a soft cap, c the capped score before bias and mask: d/dx cap tanh(x/cap). Expected
features f = Σ_k p_k x_k are values of further width: they add df · x_k to dp and df · f to δ.

Two kernels, after FlashAttention-2 (Dao 2023, algorithm 2) but without atomics: one owns a tile of keys, of one
key/value head, and walks over the queries of all heads that share it (dk and dv, on turned tiles S^T); the other owns a
tile of queries (dq). Each sums in float32, in the same order every run. p and ds are rounded to the inputs' type for
the products that sum them, as in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from headlab.kernels.fused.call import Call, padded, precision
from headlab.kernels.fused.schedule import schedule, seen, seen_by
from headlab.kernels.fused.second import cuts, dense_rows, described, program, sizes
from headlab.kernels.fused.tiles import block_of, capped, product, rows_of
from headlab.kernels.fused.weights import listed, normalisers, of_row, weights


@dataclass(frozen=True)
class FeatureGradient:
    """Expected features and the gradient of a loss with respect to them.

    Attributes:
        features: What each key holds.
        expected: Their expectation per row, the ``feature`` statistic.
        gradient: Gradient with respect to ``expected``.
    """

    features: Float[Tensor, "#batch key feature"]
    expected: Float[Tensor, "batch head query feature"]
    gradient: Float[Tensor, "batch head query feature"]


def backward(
    call: Call,
    z: Float[Tensor, "batch head query d_value"],
    lse: Float[Tensor, "batch head query"],
    z_gradient: Float[Tensor, "batch head query d_value"],
    lse_gradient: Float[Tensor, "batch head query"] | None = None,
    features: FeatureGradient | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients with respect to q, k, v and the sinks (None where there are none), each in its input's type.

    A bias, whose gradient is as large as the pattern, has none here.

    Args:
        call: The attention call, with every head.
        z: Its mixed values.
        lse: Natural log-sum-exp of its rows, sinks included.
        z_gradient: Gradient of the loss with respect to z.
        lse_gradient: Gradient with respect to lse.
        features: Gradient with respect to expected features.
    """
    norm = normalisers(call, lse)
    dz = dense_rows(z_gradient.to(call.v.dtype))
    delta = torch.linalg.vecdot(dz.float(), z.float())
    if lse_gradient is not None:
        delta = delta - lse_gradient
    if features is not None:
        delta = delta + torch.linalg.vecdot(features.gradient.float(), features.expected.float())
    contiguous = torch.contiguous_format
    dq, dk, dv = (torch.empty_like(x, memory_format=contiguous) for x in (call.q, call.k, call.v))
    shared = _Shared(
        dz,
        norm,
        delta.where(norm < torch.inf, 0.0).contiguous(),  # p = 0 there, and 0 · ∞ is not 0
        norm if features is None else features.features.float().contiguous(),
        norm if features is None else features.gradient.float().contiguous(),
        0 if features is None else features.features.shape[-1],
    )
    _run_keys(call, shared, dk, dv)
    _run_queries(call, shared, dq)
    sinks = call.inputs.sinks
    if sinks is None:
        return dq, dk, dv, None
    share = (sinks[:, None].float() - lse.float()).exp()
    dsinks = (-share * delta).where(lse > -torch.inf, 0.0).sum((0, 2))
    return dq, dk, dv, dsinks.to(sinks.dtype)


@dataclass(frozen=True)
class _Shared:
    """What both kernels take besides the call."""

    dz: Tensor
    norm: Tensor
    delta: Tensor
    x: Tensor
    dx: Tensor
    width: int

    def arguments(self, call: Call) -> tuple[Any, ...]:
        """Those after q, k, v and dz."""
        batched = self.width and self.x.shape[0] > 1
        return (
            self.x, self.x.stride(0) if batched else 0, self.dx, self.norm, self.delta,
            *call.visible(),
        )  # fmt: skip

    @property
    def compiled(self) -> dict[str, Any]:
        """What kernels are compiled for."""
        return {
            "x": self.width,
            "bx": padded(max(1, self.width)),
            "x_precision": precision(self.dx.dtype),
        }


def _run_keys(call: Call, shared: _Shared, dk: Tensor, dv: Tensor) -> None:
    tiles = sizes("backward_keys", call, features=shared.width > 0)
    rows, columns = cuts(tiles, call)
    visits = seen_by(call.low, call.high, rows, columns, call.n_keys)
    q, dz = described(call.q, rows.size), described(shared.dz, rows.size)
    tma = q is not None and dz is not None
    _keys[(columns.count(call.n_keys), dk.shape[1], call.batch)](
        q if tma else call.q, *call.q.stride()[:3],
        call.k, *call.k.stride()[:3], call.v, *call.v.stride()[:3],
        dz if tma else shared.dz, *shared.dz.stride()[:3], *shared.arguments(call),
        *visits.arguments(), dk, dv, dk.shape[1], call.n_rows, call.n_keys, call.group,
        call.scale, call.softcap, call.inputs.scaling,
        P=program(call, rows, columns, tma, **shared.compiled),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _run_queries(call: Call, shared: _Shared, dq: Tensor) -> None:
    tiles = sizes("backward_queries", call, features=shared.width > 0)
    rows, columns = cuts(tiles, call)
    visits = schedule(*seen(call.low, call.high, rows, columns, call.n_keys))
    k, v = described(call.k, columns.size), described(call.v, columns.size)
    tma = k is not None and v is not None
    _queries[(rows.count(call.n_rows), dq.shape[1], call.batch)](
        call.q, *call.q.stride()[:3],
        k if tma else call.k, *call.k.stride()[:3], v if tma else call.v, *call.v.stride()[:3],
        shared.dz, *shared.dz.stride()[:3], *shared.arguments(call),
        *visits.arguments(), dq, dq.shape[1], call.n_rows, call.n_keys, call.group,
        call.scale, call.softcap, call.inputs.scaling,
        P=program(call, rows, columns, tma, **shared.compiled),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _score_gradient(p, dp, delta, s, softcap, P: tl.constexpr):
    """∂loss/∂(scaling q·k) from the capped score s."""
    ds = p * (dp - delta)
    if P.softcap:
        share = s / softcap
        ds *= 1.0 - share * share
    return ds


@triton.jit
def _store(pointer, rows, tile, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    across = tl.arange(0, PADDED)
    at = pointer + rows[:, None] * WIDTH + across[None, :]
    tl.store(
        at, tile.to(pointer.dtype.element_ty), mask=inside[:, None] & (across < WIDTH)[None, :]
    )


@triton.jit
def _keys_tile(
    dk_tile, dv_tile, tile, k_tile, v_tile, x_tile, columns, b, h, q, q_row, dz, dz_row, dx, norm, delta,
    low, high, mask, mask_row, bias, bias_row, n_rows, n_keys, scale, softcap,
    EDGE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Adds one tile of queries of one head to the gradients of a tile of keys and values."""
    PRECISION: tl.constexpr = P.precision
    X_PRECISION: tl.constexpr = P.x_precision
    start = tile * P.rows.size
    rows = start + tl.arange(0, P.rows.size)
    q_tile = block_of(q, b, h, start, n_rows, q_row, P.rows.size, P.d, P.bd, EDGE, P.tma)
    s = product(k_tile, tl.trans(q_tile), P.upcast, PRECISION)
    s = capped(s, scale, softcap, P.softcap, P.interpret)
    lse = of_row(norm, rows, n_rows, float("inf"), EDGE)
    first = rows
    last = rows
    if EDGE:
        first = of_row(low, rows, n_rows, 0, True)
        last = of_row(high, rows, n_rows, 0, True)
    p = weights(
        s, rows[None, :], columns[:, None], first[None, :], last[None, :], lse[None, :], n_rows, n_keys,
        mask, mask_row, bias, bias_row, EDGE, P,
    )  # fmt: skip
    dz_tile = block_of(dz, b, h, start, n_rows, dz_row, P.rows.size, P.dv, P.bdv, EDGE, P.tma)
    dv_tile += product(p.to(dz_tile.dtype), dz_tile, P.upcast, PRECISION)
    dp = product(v_tile, tl.trans(dz_tile), P.upcast, PRECISION)
    if P.x > 0:
        dx_tile = block_of(dx, b, h, start, n_rows, P.x, P.rows.size, P.x, P.bx, EDGE, False)
        dp += product(x_tile, tl.trans(dx_tile), False, X_PRECISION)
    ds = _score_gradient(p, dp, of_row(delta, rows, n_rows, 0.0, EDGE)[None, :], s, softcap, P)
    dk_tile += product(ds.to(q_tile.dtype), q_tile, P.upcast, PRECISION)
    return dk_tile, dv_tile


@triton.jit
def _keys(
    q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row, dz, dz_batch, dz_head, dz_row,
    x, x_batch, dx, norm, delta,
    low, high, low_batch, mask, mask_batch, mask_head, mask_row, bias, bias_batch, bias_head, bias_row,
    tiles, counts, batched, n_programs, n_tiles, dk, dv, n_kv_heads, n_rows, n_keys, group, scale, softcap, scaling,
    P: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, over the heads that share it. Grid: (key tiles, key/value heads, sequences)."""
    key_tile = tl.program_id(0)
    sequence = tl.program_id(2)
    kv = tl.program_id(1).to(tl.int64)
    b = sequence.to(tl.int64)
    columns = key_tile * P.columns.size + tl.arange(0, P.columns.size)
    k_tile = rows_of(k + b * k_batch + kv * k_head, columns, k_row, n_keys, P.d, P.bd)
    v_tile = rows_of(v + b * v_batch + kv * v_head, columns, v_row, n_keys, P.dv, P.bdv)
    x_tile = v_tile
    if P.x > 0:
        x_tile = rows_of(x + b * x_batch, columns, P.x, n_keys, P.x, P.bx)
    low += b * low_batch
    high += b * low_batch
    visits, edges, visited = listed(tiles, counts, batched, n_programs, n_tiles, b, key_tile)
    SIZE: tl.constexpr = P.columns.size
    BD: tl.constexpr = P.bd
    BDV: tl.constexpr = P.bdv
    dk_tile = tl.zeros([SIZE, BD], tl.float32)
    dv_tile = tl.zeros([SIZE, BDV], tl.float32)
    for member in range(0, group):
        head = tl.program_id(1) * group + member
        h = kv * group + member
        row = (b * n_kv_heads * group + h) * n_rows
        q_head_ = q
        dz_head_ = dz
        if not P.tma:
            q_head_ = q + b * q_batch + h * q_head
            dz_head_ = dz + b * dz_batch + h * dz_head
        mask_head_ = mask + b * mask_batch + h * mask_head
        bias_head_ = bias + b * bias_batch + h * bias_head
        for at in range(0, edges):
            dk_tile, dv_tile = _keys_tile(
                dk_tile, dv_tile, tl.load(visits + at).to(tl.int32), k_tile, v_tile, x_tile, columns, sequence, head,
                q_head_, q_row, dz_head_, dz_row, dx + row * P.x, norm + row, delta + row, low, high,
                mask_head_, mask_row, bias_head_, bias_row, n_rows, n_keys, scale, softcap, True, P,
            )  # fmt: skip
        for at in range(edges, visited):
            dk_tile, dv_tile = _keys_tile(
                dk_tile, dv_tile, tl.load(visits + at).to(tl.int32), k_tile, v_tile, x_tile, columns, sequence, head,
                q_head_, q_row, dz_head_, dz_row, dx + row * P.x, norm + row, delta + row, low, high,
                mask_head_, mask_row, bias_head_, bias_row, n_rows, n_keys, scale, softcap, False, P,
            )  # fmt: skip
    out = (b * n_kv_heads + kv) * n_keys + columns
    _store(dk, out, dk_tile * scaling, columns < n_keys, P.d, P.bd)
    _store(dv, out, dv_tile, columns < n_keys, P.dv, P.bdv)


@triton.jit
def _queries_tile(
    dq_tile, tile, q_tile, dz_tile, dx_tile, rows, lse, delta, first, last, b, kv, k, k_row, v, v_row, x,
    mask, mask_row, bias, bias_row, n_rows, n_keys, scale, softcap, EDGE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to the gradient of a tile of queries."""
    PRECISION: tl.constexpr = P.precision
    X_PRECISION: tl.constexpr = P.x_precision
    start = tile * P.columns.size
    columns = start + tl.arange(0, P.columns.size)
    k_tile = block_of(k, b, kv, start, n_keys, k_row, P.columns.size, P.d, P.bd, EDGE, P.tma)
    s = product(q_tile, tl.trans(k_tile), P.upcast, PRECISION)
    s = capped(s, scale, softcap, P.softcap, P.interpret)
    p = weights(
        s, rows[:, None], columns[None, :], first[:, None], last[:, None], lse[:, None], n_rows, n_keys,
        mask, mask_row, bias, bias_row, EDGE, P,
    )  # fmt: skip
    v_tile = block_of(v, b, kv, start, n_keys, v_row, P.columns.size, P.dv, P.bdv, EDGE, P.tma)
    dp = product(dz_tile, tl.trans(v_tile), P.upcast, PRECISION)
    if P.x > 0:
        x_tile = block_of(x, b, kv, start, n_keys, P.x, P.columns.size, P.x, P.bx, EDGE, False)
        dp += product(dx_tile, tl.trans(x_tile), False, X_PRECISION)
    ds = _score_gradient(p, dp, delta[:, None], s, softcap, P)
    return dq_tile + product(ds.to(k_tile.dtype), k_tile, P.upcast, PRECISION)


@triton.jit
def _queries(
    q, q_batch, q_head, q_row, k, k_batch, k_head, k_row, v, v_batch, v_head, v_row, dz, dz_batch, dz_head, dz_row,
    x, x_batch, dx, norm, delta,
    low, high, low_batch, mask, mask_batch, mask_head, mask_row, bias, bias_batch, bias_head, bias_row,
    tiles, counts, batched, n_programs, n_tiles, dq, n_heads, n_rows, n_keys, group, scale, softcap, scaling,
    P: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries. Grid: (row tiles, heads, sequences)."""
    row_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal call's longest rows first
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    h = head.to(tl.int64)
    b = sequence.to(tl.int64)
    kv = h // group
    rows = row_tile * P.rows.size + tl.arange(0, P.rows.size)
    row = (b * n_heads + h) * n_rows
    q_tile = rows_of(q + b * q_batch + h * q_head, rows, q_row, n_rows, P.d, P.bd)
    dz_tile = rows_of(dz + b * dz_batch + h * dz_head, rows, dz_row, n_rows, P.dv, P.bdv)
    dx_tile = dz_tile
    if P.x > 0:
        dx_tile = rows_of(dx + row * P.x, rows, P.x, n_rows, P.x, P.bx)
    if not P.tma:
        k += b * k_batch + kv * k_head
        v += b * v_batch + kv * v_head
    x += b * x_batch
    mask += b * mask_batch + h * mask_head
    bias += b * bias_batch + h * bias_head
    lse = of_row(norm + row, rows, n_rows, float("inf"), True)
    of_rows = of_row(delta + row, rows, n_rows, 0.0, True)
    first = of_row(low + b * low_batch, rows, n_rows, 0, True)
    last = of_row(high + b * low_batch, rows, n_rows, 0, True)
    visits, edges, visited = listed(tiles, counts, batched, n_programs, n_tiles, b, row_tile)
    SIZE: tl.constexpr = P.rows.size
    BD: tl.constexpr = P.bd
    dq_tile = tl.zeros([SIZE, BD], tl.float32)
    for at in range(0, edges):
        dq_tile = _queries_tile(
            dq_tile, tl.load(visits + at).to(tl.int32), q_tile, dz_tile, dx_tile, rows, lse, of_rows, first, last,
            sequence, head // group, k, k_row, v, v_row, x, mask, mask_row, bias, bias_row,
            n_rows, n_keys, scale, softcap, True, P,
        )  # fmt: skip
    for at in range(edges, visited):
        dq_tile = _queries_tile(
            dq_tile, tl.load(visits + at).to(tl.int32), q_tile, dz_tile, dx_tile, rows, lse, of_rows, first, last,
            sequence, head // group, k, k_row, v, v_row, x, mask, mask_row, bias, bias_row,
            n_rows, n_keys, scale, softcap, False, P,
        )  # fmt: skip
    _store(dq, row + rows, dq_tile * scaling, rows < n_rows, P.d, P.bd)
