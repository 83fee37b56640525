"""Launching the forward kernel: what it is compiled for, where its results go, and whether keys are split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from headlab.kernels.fused.call import Call, padded, strides
from headlab.kernels.fused.configs import Program, Tiles, splits_for, tiles_for, with_mask
from headlab.kernels.fused.forward import forward_kernel
from headlab.kernels.fused.merge import merge_kernel
from headlab.kernels.fused.second import described
from headlab.kernels.inputs import Request

#: Statistics of one number a row, by the name of their slot in a :class:`Program`.
_SLOTS = {
    "lse": "lse",
    "entropy": "entropy",
    "max": "maximum",
    "local_mass": "local",
    "mean_distance": "distance",
}

#: Columns of features per launch: their sums live in registers.
MAX_FEATURES = 64

#: (query, head) pairs up to which the heads of a group share a tile.
MAX_PACKED = 64

#: Rows of z and statistics that one program of the merge writes.
_MERGED_ROWS = 4


def launch(call: Call, names: set[str], request: Request, z: Tensor | None) -> dict[str, Tensor]:
    """Run the forward kernel for the heads of a call.

    Args:
        call: The call.
        names: Statistics of the first pass to compute.
        request: Their parameters.
        z: Where to write z of these heads, [batch, head of the model, query, d_value], or None.

    Returns:
        The statistics by name, [batch, head of the call, query, ...].
    """
    if "feature" not in names:
        return _launch(call, names, request, None, z)
    assert request.features is not None
    blocks = _blocks(request.features)
    result = _launch(call, names, request, blocks[0].x, z)
    parts = [blocks[0].sums(result["feature"])]
    for block in blocks[1:]:
        got = _launch(call, {"feature"}, request, block.x, None)
        parts.append(block.sums(got["feature"]))
    result["feature"] = torch.cat(parts, -1)
    return result


def _launch(
    call: Call, names: set[str], request: Request, features: Tensor | None, z: Tensor | None
) -> dict[str, Tensor]:
    """One launch, and the merge where keys are split."""
    batch, n_chosen, n_queries = call.batch, call.heads.shape[0], call.n_rows
    topk = bool(names & {"topk", "topk_index"})
    slots = [name for name in _SLOTS if name in names and not (topk and name == "max")]
    program, tiles = _program(call, names, request, features, z, slots)
    device = call.q.device
    shape = (batch, n_chosen, n_queries)
    out = _Out(
        rows=torch.empty(max(1, len(slots)), *shape, device=device, dtype=torch.float32),
        key=torch.empty(shape if program.argmax else 1, device=device, dtype=torch.int32),
        top=torch.empty((*shape, request.k) if topk else 1, device=device, dtype=torch.float32),
        top_key=torch.empty((*shape, request.k) if topk else 1, device=device, dtype=torch.int32),
        x=torch.empty(
            (*shape, program.features) if features is not None else 1,
            device=device,
            dtype=torch.float32,
        ),
    )
    if 0 not in shape:
        _run(call, program, tiles, request, features, z, out)
    result = {name: out.rows[at] for at, name in enumerate(slots)}
    if program.argmax:
        result["argmax"] = out.key.long()
    if topk:
        derived = {
            "topk": out.top,
            "topk_index": out.top_key.long(),
            "max": out.top[..., 0],
            "argmax": out.top_key[..., 0].long(),
        }
        result |= {name: value for name, value in derived.items() if name in names}
    if features is not None:
        result["feature"] = out.x
    return result


@dataclass(frozen=True)
class _Out:
    """Results of a launch, or with splits their partial states."""

    rows: Tensor
    key: Tensor
    top: Tensor
    top_key: Tensor
    x: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return (self.rows, self.key, self.top, self.top_key, self.x)


def _program(
    call: Call,
    names: set[str],
    request: Request,
    features: Tensor | None,
    z: Tensor | None,
    slots: list[str],
) -> tuple[Program, Tiles]:
    topk = bool(names & {"topk", "topk_index"})
    kind = "features" if features is not None else "rows"
    if topk:
        kind = "topk" if request.k <= 16 else "deep"
    if not names - {"lse"}:
        kind = "plain"
    widest = max(padded(call.width), padded(call.value_width))
    tiles = tiles_for(call.q.device, kind, widest, call.q.dtype)
    if call.mask is not None or call.bias is not None:
        tiles = with_mask(tiles, widest)
    few = call.n_rows * call.group <= MAX_PACKED
    pack = call.group if call.every and few else 1
    rows = call.n_rows * pack
    if rows < tiles.bm:
        bm = padded(rows)
        tiles = replace(tiles, bm=bm, warps=min(tiles.warps, 4 if bm <= 64 else 8))
    programs = triton.cdiv(rows, tiles.bm) * (call.heads.shape[0] // pack) * call.batch
    flags = call.flags
    program = Program(
        bm=tiles.bm,
        bn=tiles.bn,
        d=call.width,
        bd=padded(call.width),
        dv=call.value_width,
        bdv=padded(call.value_width),
        z=z is not None,
        **{_SLOTS[name]: at for at, name in enumerate(slots)},
        argmax="argmax" in names and not topk,
        k=request.k if topk else 0,
        features=0 if features is None else features.shape[-1],
        raw=call.softcap == 0 and call.bias is None and call.scale > 0,
        two_sided=not call.inputs.causal,
        pack=pack,
        splits=splits_for(call.q.device, programs, call.n_keys, tiles.bn),
        tma=all(described(x, tiles.bn) is not None for x in (call.k, call.v)),
        softcap=flags["SOFTCAP"],
        mask=flags["MASK"],
        bias=flags["BIAS"],
        sinks=call.inputs.sinks is not None,
        upcast=flags["UPCAST"],
        interpret=flags["INTERPRET"],
        precision=flags["PRECISION"],
    )
    return program, tiles


def _run(
    call: Call,
    program: Program,
    tiles: Tiles,
    request: Request,
    features: Tensor | None,
    z: Tensor | None,
    out: _Out,
) -> None:
    batch, n_chosen, n_queries = call.batch, call.heads.shape[0], call.n_rows
    n_rows = batch * n_chosen * n_queries
    into, z_into = out, out.rows if z is None else z
    z_strides = (0, 0, 0) if z is None else strides(z)
    if program.splits > 1:
        device, count = call.q.device, program.splits * n_rows
        into = _Out(
            rows=torch.empty(6 * count, device=device, dtype=torch.float32),
            key=torch.empty(count if program.argmax else 1, device=device, dtype=torch.int32),
            top=torch.empty(
                count * program.kept if program.k else 1, device=device, dtype=torch.float32
            ),
            top_key=torch.empty(
                count * program.kept if program.k else 1, device=device, dtype=torch.int32
            ),
            x=torch.empty(max(1, count * program.features), device=device, dtype=torch.float32),
        )
        z_into = torch.empty(
            count * program.bdv if program.z else 1, device=device, dtype=torch.float32
        )
    k: Any = call.k
    v: Any = call.v
    if program.tma:
        k, v = described(k, program.bn), described(v, program.bn)
    x = call.q if features is None else features
    sinks = call.q if call.inputs.sinks is None else call.inputs.sinks
    low, high, low_batch, mask, *mask_and_bias = call.visible()
    mask_strides, (bias, *bias_strides) = mask_and_bias[:3], mask_and_bias[3:]
    grid = (
        triton.cdiv(n_queries * program.pack, program.bm),
        n_chosen // program.pack,
        batch * program.splits,
    )
    forward_kernel[grid](
        call.q, k, v, x, low, high, mask, bias, call.heads, sinks,
        z_into, *into.arguments(),
        *strides(call.q), *strides(call.k), *strides(call.v),
        x.stride(0) if x.shape[0] > 1 else 0, low_batch, *mask_strides, *bias_strides, *z_strides,
        n_queries, call.n_keys, n_chosen, call.group, call.inputs.diagonal, request.local_window,
        call.scale, call.softcap,
        P=program, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if program.splits > 1:
        merge_kernel[(triton.cdiv(n_rows, _MERGED_ROWS),)](
            *into.arguments(), z_into,
            out.rows if z is None else z, *z_strides, *out.arguments(),
            call.heads, sinks, call.scale, n_queries, n_chosen, n_rows, program.splits,
            ROWS=_MERGED_ROWS, P=program, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """Some columns of features as the kernel takes them.

    Attributes:
        x: float16, padded; where that is not exact, the columns scaled to 1 and then what they lack, in units of 2⁻¹¹.
        width: Columns of features.
        scale: What the columns were divided by, or None where x is exact.
    """

    x: Tensor
    width: int
    scale: Tensor | None

    def sums(self, got: Tensor) -> Tensor:
        """Expectations of the features, from those of the columns of x."""
        first = got[..., : self.width]
        if self.scale is None:
            return first
        return (first + got[..., self.width : 2 * self.width] * 2.0**-11) * self.scale


#: Features as the kernel takes them: the layers of a model share one tensor.
_BLOCKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _blocks(features: Tensor) -> list[_Block]:
    """Features in blocks of columns: as float16 where that loses nothing, as for all that are 0 or 1, else as two."""
    known = _BLOCKS.get(features)
    if known is None or known[0] != features._version:
        exact = bool((features.to(torch.float16) == features).all())
        split = _exact if exact else _halved
        parts = features.split(MAX_FEATURES if exact else MAX_FEATURES // 2, -1)
        known = _BLOCKS[features] = (features._version, [split(part) for part in parts])
    blocks: list[_Block] = known[1]
    return blocks


def _exact(x: Tensor) -> _Block:
    return _Block(_columns(x.to(torch.float16)), x.shape[-1], None)


def _halved(x: Tensor) -> _Block:
    x = x.float()
    scale = x.abs().amax((0, 1)).clamp(min=torch.finfo(torch.float32).tiny)
    upper = (x / scale).to(torch.float16)
    lower = ((x / scale - upper.float()) * 2.0**11).to(torch.float16)
    return _Block(_columns(torch.cat([upper, lower], -1)), x.shape[-1], scale)


def _columns(x: Tensor) -> Tensor:
    """The same with columns of 0 up to a power of two."""
    return torch.nn.functional.pad(x, (0, padded(x.shape[-1]) - x.shape[-1])).contiguous()
