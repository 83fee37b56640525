"""The oracle: attention with its whole pattern in memory, in any dtype, float64 included.

Every other engine is tested against this one, and this one against Hugging Face's eager attention and
hand-computed cases. It also serves the engines that need a few complete rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request
from headlab.kernels.statistics import COLUMN_STATISTICS, STATISTICS, Rows


def attend(
    inputs: AttentionInputs, request: Request, dtype: torch.dtype | None = None
) -> AttentionResult:
    """Compute attention by the plain formula.

    Args:
        inputs: The attention call.
        request: What to return.
        dtype: Type to compute in; by default float32, or float64 when the inputs are.
    """
    every = torch.arange(inputs.n_queries, device=inputs.q.device)[None]
    rows = _rows(inputs, request, every, None, dtype)
    result = AttentionResult()
    if request.z:
        result.z = (rows.pattern @ rows.values).to(inputs.q.dtype)
    if request.heads is not None:
        rows = rows.heads(request.heads)
    if request.rows is not None:
        index = request.rows[:, None, :, None].expand(-1, rows.pattern.shape[1], -1, inputs.n_keys)
        result.rows = rows.pattern.gather(2, index)
    result.statistics = {name: STATISTICS[name](rows) for name in request.statistics}
    return result


def attend_rows(
    inputs: AttentionInputs, request: Request, query_index: Int[Tensor, "batch row"]
) -> Rows:
    """Complete rows of the requested heads for chosen queries only: O(rows · keys) memory."""
    if request.edit_scores is None and request.edit_pattern is None:
        return _rows(inputs, request, query_index, request.heads)
    rows = _rows(inputs, request, query_index, None)  # edits see every head
    return rows if request.heads is None else rows.heads(request.heads)


def row_statistics(rows: Rows) -> dict[str, Tensor]:
    """The requested statistics that a row has by itself."""
    names = [name for name in rows.request.statistics if name not in COLUMN_STATISTICS]
    return {name: STATISTICS[name](rows) for name in names}


def _rows(
    inputs: AttentionInputs,
    request: Request,
    query_index: Int[Tensor, "#batch row"],
    heads: tuple[int, ...] | None,
    dtype: torch.dtype | None = None,
) -> Rows:
    dtype = dtype or torch.promote_types(inputs.q.dtype, torch.float32)
    batch, n_heads = inputs.q.shape[:2]
    query_index = query_index.expand(batch, -1)
    chosen = list(range(n_heads) if heads is None else heads)

    def picked(x: Tensor) -> Tensor:  # [batch|1, head|1, query, n] -> [batch, chosen|1, row, n]
        x = x[:, chosen] if x.shape[1] == n_heads and heads is not None else x
        x = x.expand(batch, *x.shape[1:])
        return x.gather(2, query_index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    q, k = picked(inputs.q).to(dtype), inputs.k.to(dtype)
    if heads is None:  # query heads of a group share one product with their keys
        grouped = q.unflatten(1, (-1, inputs.group)).flatten(2, 3)
        scores = (grouped @ k.transpose(-1, -2)).unflatten(2, (inputs.group, -1)).flatten(1, 2)
    else:
        scores = q @ k[:, [head // inputs.group for head in heads]].transpose(-1, -2)
    scores = scores * inputs.scaling
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.position_bias is not None:
        scores = scores + picked(inputs.position_bias).to(dtype)

    keys = torch.arange(inputs.n_keys, device=q.device)
    lag = query_index[:, :, None] + inputs.diagonal - keys
    hidden = torch.zeros_like(lag, dtype=torch.bool)
    if inputs.causal:
        hidden |= lag < 0
    if inputs.window is not None:
        hidden |= lag.abs() >= inputs.window
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if inputs.mask is not None:
        mask = picked(inputs.mask)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            # Additive masks hide a key with the type's lowest finite value: read it as hidden.
            lowest = torch.finfo(mask.dtype).min / 2
            scores = (scores + mask.to(dtype)).masked_fill(mask <= lowest, -torch.inf)

    sinks = None if inputs.sinks is None else inputs.sinks[chosen]
    if request.edit_scores is not None:
        scores = request.edit_scores(scores, query_index)
    pattern = softmax(scores, sinks)
    if request.edit_pattern is not None:
        pattern = request.edit_pattern(pattern, query_index)
    kv_of = tuple(head // inputs.group for head in chosen)
    if request.z_gradient is not None:  # ∂loss/∂p[q, k] = ∂loss/∂z[q] · v[k]
        values = inputs.v[:, list(kv_of)].to(dtype)
        pattern = pattern * (picked(request.z_gradient).to(dtype) @ values.transpose(-1, -2))
    return Rows(scores, pattern, sinks, inputs.v, kv_of, lag, query_index, request)


def softmax(
    scores: Float[Tensor, "batch head row key"], sinks: Float[Tensor, " head"] | None = None
) -> Float[Tensor, "batch head row key"]:
    """Softmax over keys, with an optional sink logit per head; a row that sees no key is 0, not NaN."""
    top = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks[:, None, None].to(scores)
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = (scores - top).exp()
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    return weight / total.masked_fill(total == 0, 1.0)
