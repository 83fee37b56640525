"""Exact gradients of every output of every engine, in O(n) memory.

Backward, blocks of query rows are computed once more by the blockwise engine under autograd, one after the other: no
row depends on another, and keys, values and column statistics sum over rows. So nothing of the pattern is kept from
the forward pass, and no engine needs a derivative of its own. One that has its own for z and the log-sum-exp, as the
fused kernels do, is asked when gradients reach nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headlab.kernels import blockwise
from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request

if TYPE_CHECKING:
    from headlab.kernels.choice import Engine

#: What an output can be differentiated with respect to.
_OF_INPUTS = ("q", "k", "v", "mask", "sinks", "position_bias")
#: Fields that have a query axis, and which axis it is.
_BY_QUERY = {"q": 2, "mask": 2, "position_bias": 2, "targets": 1, "counted": 1}
#: Outputs that are key positions.
_INDEX = frozenset({"argmax", "topk_index"})


def needs_gradients(inputs: AttentionInputs, request: Request) -> bool:
    """Whether autograd records this call and there is no edit, through which only it can differentiate."""
    if not torch.is_grad_enabled() or request.z_gradient is not None:
        return False
    if request.edit_scores is not None or request.edit_pattern is not None:
        return False
    return any(x.requires_grad for x in _differentiable(inputs, request).values())


def with_gradients(engine: Engine, inputs: AttentionInputs, request: Request) -> AttentionResult:
    """An engine's result with gradients.

    Args:
        engine: Computes the forward pass.
        inputs: The attention call.
        request: What to return; without edits.
    """
    result = AttentionResult()
    if request.rows is not None:  # a few complete rows: plain autograd
        result.rows = blockwise.attend(inputs, replace(request, z=False, statistics=())).rows
        request = replace(request, rows=None)
    names = (*(("z",) if request.z else ()), *request.statistics)
    if names:
        tensors = _differentiable(inputs, request)
        plan = _Plan(engine, inputs, request, names, tuple(tensors))
        outputs = dict(zip(names, _Recomputed.apply(plan, *tensors.values()), strict=True))
        result.z = outputs.pop("z", None)
        result.statistics = outputs
    return result


def _differentiable(inputs: AttentionInputs, request: Request) -> dict[str, Tensor]:
    found = {name: getattr(inputs, name) for name in _OF_INPUTS}
    found["features"] = request.features
    return {name: x for name, x in found.items() if x is not None and torch.is_floating_point(x)}


@dataclass(frozen=True)
class _Plan:
    engine: Engine
    inputs: AttentionInputs
    request: Request
    outputs: tuple[str, ...]
    tensors: tuple[str, ...]


def _detached(x: Any) -> Any:
    """An attention call or request whose tensors autograd does not follow."""
    tensors = {field.name: getattr(x, field.name) for field in fields(x)}
    return replace(x, **{n: t.detach() for n, t in tensors.items() if isinstance(t, Tensor)})


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        plan = replace(plan, inputs=_detached(plan.inputs), request=_detached(plan.request))
        request = plan.request
        if _derivative(plan.engine) is not None and request.z and "lse" not in plan.outputs:
            request = replace(request, statistics=(*request.statistics, "lse"))
        result = plan.engine(plan.inputs, request)
        values = dict(result.statistics)
        if result.z is not None:
            values["z"] = result.z
        outputs = tuple(values[name] for name in plan.outputs)
        ctx.mark_non_differentiable(*(values[name] for name in plan.outputs if name in _INDEX))
        ctx.set_materialize_grads(False)
        ctx.known = [name for name in ("z", "lse") if name in values]
        # Masks and indices are saved too, so that changing one in place is noticed.
        others = [
            x
            for part in (plan.inputs, plan.request)
            for field in fields(part)
            if isinstance(x := getattr(part, field.name), Tensor) and not x.is_floating_point()
        ]
        ctx.save_for_backward(*tensors, *(values[name] for name in ctx.known), *others)
        ctx.plan = plan
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        plan: _Plan = ctx.plan
        saved = ctx.saved_tensors  # raises where one was changed in place since
        upstream = {
            name: gradient
            for name, gradient in zip(plan.outputs, gradients, strict=True)
            if gradient is not None and name not in _INDEX
        }
        wanted = [name for at, name in enumerate(plan.tensors, start=1) if ctx.needs_input_grad[at]]
        if not upstream or not wanted:
            return (None, *(None for _ in plan.tensors))
        known = dict(zip(ctx.known, saved[len(plan.tensors) :], strict=False))
        asked = _derivative(plan.engine)
        own = None if asked is None else asked(plan.inputs, plan.request, wanted, upstream)
        with torch.autocast(plan.inputs.q.device.type, enabled=False):
            found = _by_blocks(plan, wanted, upstream) if own is None else own(known)
        return (None, *(found.get(name) for name in plan.tensors))


def _derivative(engine: Engine) -> Callable[..., Any] | None:
    """What an engine says of its own derivative: see :func:`headlab.kernels.fused.backward_of`."""
    found: Callable[..., Any] | None = getattr(import_module(engine.module), "backward_of", None)
    return found


def _by_blocks(plan: _Plan, wanted: list[str], upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    inputs, request = plan.inputs, plan.request
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    sources = {n: getattr(request if n == "features" else inputs, n) for n in wanted}
    totals = {name: x.new_zeros(x.shape, dtype=dtype) for name, x in sources.items()}
    size = _rows_per_block(inputs, request)
    for start in range(0, inputs.n_queries, size):
        rows = slice(start, min(start + size, inputs.n_queries))
        leaves = {}
        for name, x in sources.items():
            part = x[:, :, rows] if name in _BY_QUERY else x
            # A mask keeps its type, whose lowest value hides a key.
            part = part if name == "mask" else part.to(dtype)
            leaves[name] = part.detach().requires_grad_()
        with torch.enable_grad():
            part_inputs, part_request = _rows_of(inputs, request, rows, leaves, dtype)
            result = blockwise.attend(part_inputs, part_request)
            outputs, gradients = [], []
            for name, gradient in upstream.items():
                output = result.z if name == "z" else result.statistics[name]
                assert output is not None
                if output.requires_grad:
                    outputs.append(output)
                    gradients.append(_part(name, gradient, rows, request).to(output))
        if not outputs:  # nothing of it depends on what is wanted, as blind rows
            continue
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients, allow_unused=True)
        for name, part in zip(leaves, found, strict=True):
            if part is not None:
                total = totals[name][:, :, rows] if name in _BY_QUERY else totals[name]
                total += part
    return {name: total.to(sources[name].dtype) for name, total in totals.items()}


def _rows_per_block(inputs: AttentionInputs, request: Request) -> int:
    """Rows whose scores, with what autograd keeps of them, fit a few blocks of the blockwise engine."""
    row_bytes = 4 * inputs.q.shape[0] * inputs.q.shape[1] * inputs.n_keys
    size = max(1, 2 * blockwise.BLOCK_BYTES // row_bytes)
    if "block_map" in request.statistics:  # its squares must not straddle two blocks
        size = max(1, size // request.block) * request.block
    return size


def _rows_of(
    inputs: AttentionInputs,
    request: Request,
    rows: slice,
    leaves: dict[str, Tensor],
    dtype: torch.dtype,
) -> tuple[AttentionInputs, Request]:
    """The call and request of some query rows."""
    changed: dict[str, Any] = {"query_start": inputs.query_start + rows.start}
    for name in ("q", "mask", "position_bias"):
        x = getattr(inputs, name)
        if x is not None:
            changed[name] = x[:, :, rows]
    for name in ("q", "k", "v"):
        changed[name] = changed.get(name, getattr(inputs, name)).to(dtype)
    changed |= {name: x for name, x in leaves.items() if name != "features"}
    asked: dict[str, Any] = {}
    for name in ("targets", "counted"):
        x = getattr(request, name)
        if x is not None:
            asked[name] = x[:, rows]
    if "features" in leaves:
        asked["features"] = leaves["features"]
    return replace(inputs, **changed), replace(request, **asked)


def _part(name: str, gradient: Tensor, rows: slice, request: Request) -> Tensor:
    """The gradient that belongs to some query rows; that of a sum over rows belongs to each of them."""
    if name == "received":
        return gradient
    if name == "block_map":
        first = rows.start // request.block
        return gradient[:, :, first : -(-rows.stop // request.block)]
    return gradient[:, :, rows]
