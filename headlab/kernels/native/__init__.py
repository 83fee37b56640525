"""The engine for the CPU, in C++: every statistic in one pass over blocks of query rows, O(n) memory.

Scores, sums and statistics are float32; inputs of 16 bits are converted first. ``attention.cpp`` says how it works,
and is compiled on first use (:mod:`~headlab.kernels.native.build`). It runs on as many threads as torch, and its
results do not depend on how many those are.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from headlab.errors import UnsupportedError
from headlab.kernels.dense import attend_rows
from headlab.kernels.gradients import needs_gradients
from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request
from headlab.kernels.native.build import library, unavailable
from headlab.kernels.native.call import SERVED, Call, Struct

_INDEX = ("argmax", "topk_index")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(inputs: AttentionInputs, request: Request) -> str | None:
    """What of a call is beyond this engine, or None when nothing is. The first call may compile: some seconds.

    Args:
        inputs: The attention call.
        request: What to compute.
    """
    if inputs.q.device.type != "cpu":
        return f"inputs on {inputs.q.device.type}"
    for x in (inputs.q, inputs.k, inputs.v):
        if x.dtype not in _DTYPES:
            return f"{str(x.dtype).removeprefix('torch.')} inputs"
    if request.edit_scores is not None or request.edit_pattern is not None:
        return "edits of scores or of the pattern"
    if misfit := _misfit(inputs, request):
        return misfit
    if unknown := set(request.statistics) - SERVED:
        return f"it does not compute {', '.join(sorted(unknown))}"
    return unavailable()


def _misfit(inputs: AttentionInputs, request: Request) -> str | None:
    """Shapes that would have C++ read what is not there."""
    (batch, heads, queries, width), keys = inputs.q.shape, inputs.n_keys
    kv = inputs.k.shape[1]
    if inputs.k.shape != (batch, kv, keys, width) or inputs.v.shape[:3] != (batch, kv, keys):
        return "q, k and v whose shapes do not fit each other"
    if not kv or heads % kv:
        return f"{heads} query heads on {kv} key/value heads"
    if any(not 0 <= head < heads for head in request.heads or ()):
        return f"heads {request.heads} of {heads}"
    for x in (inputs.mask, inputs.position_bias):
        if x is not None and x.shape[2:] != (queries, keys):
            return f"a mask or bias of shape {list(x.shape)}"
    if request.block < 1 or request.k < 1:
        return "a block or k below 1"
    return None


def attend(inputs: AttentionInputs, request: Request) -> AttentionResult:
    """Compute what was requested. Nothing is recorded for gradients: :mod:`headlab.kernels.choice` adds them.

    Args:
        inputs: The attention call.
        request: What to return.

    Raises:
        UnsupportedError: The call is beyond this engine; :func:`why_not` says why.
        MemoryError: There is not enough memory for a block of rows.
    """
    if reason := why_not(inputs, request):
        raise UnsupportedError(f"the C++ engine cannot serve this attention call: {reason}")
    if needs_gradients(inputs, request):
        raise UnsupportedError(
            "the C++ engine records nothing for gradients; call headlab.kernels.attend, which adds them"
        )
    with torch.no_grad():
        result = AttentionResult()
        if request.rows is not None:
            result.rows = attend_rows(inputs, request, request.rows).pattern
        if request.z or request.statistics:
            _run(inputs, request, result)
    return result


def _run(inputs: AttentionInputs, request: Request, result: AttentionResult) -> None:
    batch, n_heads, n_queries, _ = inputs.q.shape
    asked = range(n_heads) if request.heads is None else request.heads
    counted = sorted(set(asked)) if request.statistics else []
    run = list(range(n_heads)) if request.z else counted
    slots = [counted.index(head) if head in counted else -1 for head in run]
    call = Call(inputs, request, run, slots)
    z = None
    if request.z:
        # Heads of a position lie side by side, as W_O wants them.
        z = _buffer(torch.empty, (batch, n_queries, n_heads, inputs.v.shape[3]))
        call.point("z", z)
    statistics = {
        name: _empty(name, inputs, request, (batch, len(counted))) for name in request.statistics
    }
    for name, value in statistics.items():
        call.point(name, value)
    rows = batch * len(run) * n_queries
    if rows and _function()(ctypes.byref(call.struct)):
        raise MemoryError("not enough memory for a block of attention rows; use fewer threads")
    if z is not None:
        result.z = z.transpose(1, 2).to(inputs.q.dtype)
    order = [counted.index(head) for head in asked] if counted else []
    if order != list(range(len(counted))):
        statistics = {name: value[:, order] for name, value in statistics.items()}
    result.statistics = statistics


def _empty(name: str, inputs: AttentionInputs, request: Request, heads: tuple[int, int]) -> Tensor:
    if name == "received":
        return _buffer(torch.zeros, (*heads, inputs.n_keys))
    if name == "block_map":
        squares = (-(-n // request.block) for n in (inputs.n_queries, inputs.n_keys))
        return _buffer(torch.zeros, (*heads, *squares))
    last: tuple[int, ...] = ()
    if name in ("topk", "topk_index"):
        last = (request.k,)
    elif name == "lag_mass":
        last = (len(request.lag_edges) - 1,)
    elif name == "feature":
        assert request.features is not None
        last = (request.features.shape[2],)
    elif name == "segment_z":
        assert request.segments is not None
        last = (request.segments.shape[2], inputs.v.shape[3])
    dtype = torch.long if name in _INDEX else torch.float32
    return _buffer(torch.empty, (*heads, inputs.n_queries, *last), dtype)


def _buffer(make: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for C++ to write to, whatever type and device are torch's defaults."""
    made: Tensor = make(shape, dtype=dtype, device="cpu")
    return made


def _function() -> Any:
    compiled = library()
    compiled.headlab_call_size.restype = ctypes.c_int64
    assert compiled.headlab_call_size() == ctypes.sizeof(Struct), "call.py and call.h differ"
    return compiled.headlab_attend
