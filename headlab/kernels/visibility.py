"""Which keys each query row sees, as one interval of key columns per row.

Causal attention, a sliding window on either side, padding on either side, packed documents, chunked attention and a
cache with room left are all intervals, so an engine that knows intervals needs to know none of these. They are
measured from the mask rather than looked up in a model's configuration: a mask of any other form stays a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from headlab.kernels.inputs import AttentionInputs

#: Elements of a mask that are looked at together.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Visibility:
    """Query row i sees the key columns j with ``low[i] <= j < high[i]``, less what ``mask`` and ``bias`` hide.

    Attributes:
        low: First visible column of each row; 0 in a row that sees nothing.
        high: Column after the last visible one; 0 in a row that sees nothing.
        mask: Which columns of the interval are visible, where that is not all of them.
        bias: Added to the scaled and soft-capped scores; −inf hides.
    """

    low: Int32[Tensor, "#batch query"]
    high: Int32[Tensor, "#batch query"]
    mask: Bool[Tensor, "#batch #head query key"] | None = None
    bias: Float[Tensor, "#batch #head query key"] | None = None


def visibility(inputs: AttentionInputs) -> Visibility:
    """Measure which keys the rows of an attention call see.

    Args:
        inputs: The call.
    """
    low, high = _by_position(inputs)
    mask, bias = inputs.mask, inputs.position_bias
    if mask is not None and mask.dtype != torch.bool:
        visible = mask > torch.finfo(mask.dtype).min / 2
        if bool((mask[visible] == 0).all()):
            mask = visible
        else:
            added = mask.masked_fill(~visible, -torch.inf)
            bias = added if bias is None else bias + added
            mask = visible if visible.shape[1] == 1 else None  # for tight intervals
            low, high, _ = _measured(inputs, mask, low, high)
            return Visibility(low, high, None, bias)
    low, high, exact = _measured(inputs, mask, low, high)
    return Visibility(low, high, None if exact else mask, bias)


def _by_position(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Intervals by causality and window alone, [1, query]."""
    rows = torch.arange(inputs.n_queries, device=inputs.q.device, dtype=torch.int32)
    position = rows[None] + inputs.diagonal
    low = torch.zeros_like(position)
    high = torch.full_like(position, inputs.n_keys)
    if inputs.causal:
        high = position + 1
    if inputs.window is not None:
        low = position - inputs.window + 1
        high = torch.minimum(high, position + inputs.window)
    return _clipped(low, high, inputs.n_keys)


def _clipped(low: Tensor, high: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    low, high = low.clamp(0, n_keys), high.clamp(0, n_keys)
    seen = low < high
    return low.where(seen, 0).contiguous(), high.where(seen, 0).contiguous()


#: Intervals by mask: the layers of a model share one, and reading it takes as long as it is large.
_MEASURED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _measured(
    inputs: AttentionInputs, mask: Tensor | None, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, bool]:
    """The intervals a mask leaves of these, and whether they say all that the mask does."""
    if mask is None:
        return low, high, True
    if mask.shape[1] > 1:
        return low, high, False
    if mask.is_inference():  # it has no version, by which a change would show
        return _read(mask[:, 0], low, high)
    state = (mask._version, inputs.causal, inputs.window, inputs.diagonal)
    known: tuple[object, tuple[Tensor, Tensor, bool]] | None = _MEASURED.get(mask)
    if known is None or known[0] != state:
        known = _MEASURED[mask] = (state, _read(mask[:, 0], low, high))
    return known[1]


def _read(mask: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, bool]:
    batch, n_queries, n_keys = mask.shape
    columns = torch.arange(n_keys, device=mask.device, dtype=torch.int32)
    step = max(1, _CHUNK // max(1, batch * n_keys))
    firsts, lasts, exact = [], [], True
    for start in range(0, n_queries, step):
        rows = slice(start, start + step)
        seen = mask[:, rows]
        if bool((high[:, rows] - low[:, rows] < n_keys).any()):
            inside = (columns >= low[:, rows, None]) & (columns < high[:, rows, None])
            seen = seen & inside
        count = seen.sum(-1, dtype=torch.int32)
        first = seen.to(torch.uint8).argmax(-1).int()
        last = (seen * (columns + 1)).amax(-1) if n_keys else count
        exact = exact and bool((last - first == count).where(count > 0, True).all())
        firsts.append(first.where(count > 0, 0))
        lasts.append(last.int())
    return torch.cat(firsts, 1).contiguous(), torch.cat(lasts, 1).contiguous(), exact
