"""One attention call as the C++ side reads it: call.h's struct, filled from tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headlab.kernels.inputs import AttentionInputs, Request
from headlab.kernels.visibility import visibility

#: Farther than any two tokens are apart, and no sum of a few of these is too large for C++.
_FAR = 1 << 40

_NUMBERS = "scaling softcap"
_STATISTICS = (
    "lse entropy max topk feature local_mass lag_mass mean_distance target_mass segment_z "
    "received block_map argmax topk_index"
)
_POINTERS = (
    "run slot q k v sinks z_gradient low high mask bias features segments targets counted edges "
    f"z {_STATISTICS}"
)
_ORDER = (
    "batch heads kv_heads queries keys width value_width threads diagonal n_run n_slots run slot scaling softcap "
    "q k v sinks z_gradient q_batch q_head q_row k_batch k_head k_row v_batch v_head v_row dz_batch dz_head dz_row "
    "low high mask bias interval_batch mask_batch mask_head mask_row bias_batch bias_head bias_row "
    "features segments targets counted edges n_features n_segments n_bins k_largest local_window block "
    "features_batch segments_batch targets_batch counted_batch "
    f"z {_STATISTICS}"
)
#: Statistics that attention.cpp computes.
SERVED = frozenset(_STATISTICS.split())
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_POINTERS.split(), ctypes.c_void_p),
    **dict.fromkeys(_NUMBERS.split(), ctypes.c_double),
}


class Struct(ctypes.Structure):
    """call.h's ``Call``."""

    _fields_ = [(name, _TYPES.get(name, ctypes.c_int64)) for name in _ORDER.split()]


class Call:
    """The struct, with the tensors it points into.

    Args:
        inputs: The attention call.
        request: What to compute.
        run: Query heads to run.
        slots: Where the statistics of each of these go; −1 for nowhere.
    """

    def __init__(
        self, inputs: AttentionInputs, request: Request, run: Sequence[int], slots: Sequence[int]
    ) -> None:
        self.struct = Struct()
        self._kept: list[Tensor] = []
        batch, n_heads, n_queries, width = inputs.q.shape
        self._set(
            batch=batch, heads=n_heads, kv_heads=inputs.k.shape[1], queries=n_queries, keys=inputs.n_keys,
            width=width, value_width=inputs.v.shape[3], threads=torch.get_num_threads(),
            diagonal=inputs.diagonal, scaling=inputs.scaling, softcap=inputs.softcap or 0.0,
            n_run=len(run), n_slots=sum(slot >= 0 for slot in slots),
        )  # fmt: skip
        self.point("run", torch.tensor(run, dtype=torch.long, device="cpu"))
        self.point("slot", torch.tensor(slots, dtype=torch.long, device="cpu"))
        for name in ("q", "k", "v"):
            self._strided(name, name, getattr(inputs, name))
        if request.z_gradient is not None:
            self._strided("z_gradient", "dz", request.z_gradient)
        if inputs.sinks is not None:
            self.point("sinks", inputs.sinks.float().contiguous())
        self._visibility(inputs)
        self._parameters(request, batch)

    def point(self, name: str, x: Tensor) -> None:
        """Set a pointer, and keep what it points to."""
        self._kept.append(x)
        setattr(self.struct, name, x.data_ptr())

    def _set(self, **numbers: float) -> None:
        for name, value in numbers.items():
            setattr(self.struct, name, value)

    def _strided(self, name: str, prefix: str, x: Tensor) -> None:
        """[batch, head, row, width]; only the last axis must be contiguous."""
        x = x.float()
        x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
        self.point(name, x)
        strides = dict(zip(("batch", "head", "row"), x.stride(), strict=False))
        self._set(**{f"{prefix}_{axis}": stride for axis, stride in strides.items()})

    def _visibility(self, inputs: AttentionInputs) -> None:
        seen = visibility(inputs)
        low, high = (x.to(torch.int32).contiguous() for x in (seen.low, seen.high))
        self.point("low", low)
        self.point("high", high)
        self._set(interval_batch=low.stride(0) if low.shape[0] > 1 else 0)
        shape = (*inputs.q.shape[:3], inputs.n_keys)
        if seen.mask is not None:
            self._expanded("mask", seen.mask, shape)
        if seen.bias is not None:
            self._expanded("bias", seen.bias.float(), shape)

    def _expanded(self, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
        x = x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()
        self._strided_as(name, x.expand(shape))

    def _strided_as(self, name: str, x: Tensor) -> None:
        self.point(name, x)
        batch, head, row, _ = x.stride()
        self._set(**{f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row})

    def _parameters(self, request: Request, batch: int) -> None:
        asked = set(request.statistics)
        self._set(
            k_largest=request.k, local_window=min(request.local_window, _FAR), block=min(request.block, _FAR),
            n_bins=max(len(request.lag_edges) - 1, 0),
        )  # fmt: skip
        if "lag_mass" in asked:
            edges = [min(max(edge, -_FAR), _FAR) for edge in request.lag_edges]
            self.point("edges", torch.tensor(edges, dtype=torch.long, device="cpu"))
        if "feature" in asked:
            assert request.features is not None
            self._set(n_features=request.features.shape[2])
            self._per_sequence("features", request.features.float().transpose(1, 2))
        if "segment_z" in asked:
            assert request.segments is not None
            self._set(n_segments=request.segments.shape[2])
            self._per_sequence("segments", request.segments.float().transpose(1, 2))
        if "target_mass" in asked:
            assert request.targets is not None
            self._per_sequence("targets", request.targets.long())
        if request.counted is not None:
            self._per_sequence("counted", request.counted)

    def _per_sequence(self, name: str, x: Tensor) -> None:
        x = x.contiguous()
        self.point(name, x)
        self._set(**{f"{name}_batch": x.stride(0) if x.shape[0] > 1 else 0})
