"""The engine for any device: exact attention over blocks of query rows that fit the cache.

A block holds complete rows, so one pass gives z, every row statistic, and the column statistics as well.
Keys and values of a group are never expanded: the query heads that share them are stacked into one product.
Scores are kept in float32 whatever the model's type. Nothing is written in place while gradients are recorded.

With e = exp(s − m), m the row's largest score and l = Σ e (sink included), the pattern is p = e / l and

    lse = m + ln l        max = max e / l        entropy = (ln l · Σ_k e − Σ_k e·(s − m)) / l
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headlab.kernels import one_query
from headlab.kernels.dense import attend_rows, row_statistics
from headlab.kernels.inputs import AttentionInputs, AttentionResult, Request
from headlab.kernels.statistics import COLUMN_STATISTICS

#: Bytes of scores a block may hold: few enough for the cache, enough for threads to be worth their start.
BLOCK_BYTES = 16 << 20

_HIDDEN = -1e30  # finite, so that 0 · hidden is 0 where −inf would give NaN
_RUN = 64
_NEARBY = 16


def attend(
    inputs: AttentionInputs, request: Request, block_bytes: int = BLOCK_BYTES
) -> AttentionResult:
    """Compute what was requested without ever holding a whole pattern.

    Args:
        inputs: The attention call.
        request: What to return.
        block_bytes: Bytes of scores per block; smaller blocks need less memory and lose speed.
    """
    result = AttentionResult()
    if request.rows is not None:
        result.rows = attend_rows(inputs, request, request.rows).pattern
    if not (request.z or request.statistics):
        return result
    n_heads = inputs.q.shape[1]
    counted = list(range(n_heads) if request.heads is None else request.heads)
    gathered = _Gathered()
    if request.edit_scores is not None or request.edit_pattern is not None:
        if one_query.serves(inputs, request):
            result.z = one_query.z(inputs, request).to(inputs.q.dtype)
            return result
        _edited(inputs, request, block_bytes, gathered)
    else:
        needed = list(range(n_heads)) if request.z else sorted(set(counted))
        for heads in _head_batches(inputs, needed, block_bytes):
            _run(inputs, request, heads, set(counted), block_bytes, gathered)
    if request.z:
        result.z = gathered.join("z", list(range(n_heads))).to(inputs.q.dtype)
    result.statistics = {name: gathered.join(name, counted) for name in request.statistics}
    return result


class _Gathered:
    """Parts of the result, per name and head, joined at the end."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], list[Tensor]] = {}
        self.columns: dict[tuple[str, int], Tensor] = {}

    def add(self, name: str, head: int, part: Tensor) -> None:
        """The next query rows (or, of ``block_map``, rows of squares) of one head."""
        self.rows.setdefault((name, head), []).append(part)

    def accumulate(self, name: str, head: int, part: Tensor, low: int, width: int) -> None:
        """Sum over queries into columns [low, low + part width) of ``width``."""
        if (name, head) not in self.columns:
            self.columns[name, head] = part.new_zeros(part.shape[0], width)
        grown = torch.nn.functional.pad(part, (low, width - low - part.shape[-1]))
        self.columns[name, head] = self.columns[name, head] + grown

    def join(self, name: str, heads: list[int]) -> Tensor:
        if (name, heads[0]) in self.columns:
            return torch.stack([self.columns[name, head] for head in heads], 1)
        return torch.stack([torch.cat(self.rows[name, head], 1) for head in heads], 1)


def _head_batches(
    inputs: AttentionInputs, heads: list[int], block_bytes: int
) -> Iterator[list[int]]:
    """Heads to run together: groups with equally many members, few enough for 64 rows to fill a block."""
    rows_bytes = min(inputs.n_queries, 64) * inputs.q.shape[0] * inputs.n_keys * 4
    batch: list[int] = []
    size = 0
    for kv in sorted({head // inputs.group for head in heads}):
        members = [head for head in heads if head // inputs.group == kv]
        full = (len(batch) + len(members)) * rows_bytes > block_bytes
        if batch and (len(members) != size or full):
            yield batch
            batch = []
        size = len(members)
        batch += members
    yield batch


def _block_rows(inputs: AttentionInputs, request: Request, heads: int, block_bytes: int) -> int:
    rows = max(1, block_bytes // (4 * inputs.q.shape[0] * heads * inputs.n_keys))
    if rows < inputs.n_queries and "block_map" in request.statistics:
        # The squares of block_map must not straddle two blocks.
        rows = max(1, rows // request.block) * request.block
    return min(rows, inputs.n_queries)


def _edited(
    inputs: AttentionInputs, request: Request, block_bytes: int, gathered: _Gathered
) -> None:
    """Edits see and return complete rows over every key and head, so each block follows the definitions."""
    n_heads = inputs.q.shape[1]
    chosen = list(range(n_heads)) if request.heads is None else list(request.heads)
    size = _block_rows(inputs, request, n_heads, block_bytes)
    unselected = replace(request, heads=None)
    for start in range(0, inputs.n_queries, size):
        index = torch.arange(start, min(start + size, inputs.n_queries), device=inputs.q.device)
        every = attend_rows(inputs, unselected, index.expand(inputs.q.shape[0], -1))
        if request.z:
            z = every.pattern @ every.values
            for head in range(n_heads):
                gathered.add("z", head, z[:, head])
        rows = every.heads(tuple(chosen))
        for name, value in row_statistics(rows).items():
            for at, head in enumerate(chosen):
                gathered.add(name, head, value[:, at])
        if COLUMN_STATISTICS & set(request.statistics):
            unit = torch.ones_like(rows.pattern[..., :1])
            _columns(inputs, request, rows.pattern, unit, start, 0, chosen, gathered)


@dataclass
class _Block:
    """Query rows [start, stop) of some heads against key columns [low, high)."""

    start: int
    stop: int
    low: int
    high: int
    top: Tensor  # m, [batch, head, row, 1]
    shifted: Tensor  # s − m, [batch, head, row, column]
    weight: Tensor  # e, [batch, head, row, column]
    own: Tensor  # Σ_k e, [batch, head, row, 1]
    total: Tensor  # l; 1 in a row that sees no key
    blind: Tensor  # rows that see no key, [batch, head, row, 1]


def _run(
    inputs: AttentionInputs,
    request: Request,
    heads: list[int],
    counted: set[int],
    block_bytes: int,
    gathered: _Gathered,
) -> None:
    """All blocks of some heads, whose groups have equally many members."""
    kv = sorted({head // inputs.group for head in heads})
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    in_place = not (
        torch.is_grad_enabled() and any(x.requires_grad for x in (inputs.q, inputs.k, inputs.v))
    )
    q, k, v = inputs.q, inputs.k, inputs.v
    if len(heads) < q.shape[1]:
        q, k, v = q[:, heads], k[:, kv], v[:, kv]
    keys, v = k.to(dtype).transpose(-1, -2), v.to(dtype)
    d_value, featured = v.shape[-1], request.z and "feature" in request.statistics
    if featured:  # features ride along as further value columns: one product for both
        assert request.features is not None
        x = request.features.to(v)[:, None].expand(v.shape[0], v.shape[1], -1, -1)
        v = torch.cat([v, x], -1)
    chosen = [at for at, head in enumerate(heads) if head in counted]
    size = _block_rows(inputs, request, len(heads), block_bytes)
    for start in range(0, inputs.n_queries, size):
        stop = min(start + size, inputs.n_queries)
        low, high = _visible(inputs, start, stop)
        rows = (q[:, :, start:stop].to(dtype) * inputs.scaling).unflatten(1, (len(kv), -1))
        grouped = rows.flatten(2, 3) @ keys[..., low:high]  # [batch, kv, member · row, column]
        scores = grouped.unflatten(2, (-1, stop - start)).flatten(1, 2)
        block = _softmax(inputs, scores, heads, start, stop, low, high, in_place)
        if request.z:
            stacked = block.weight.unflatten(1, (len(kv), -1)).flatten(2, 3)
            mixed = (stacked @ v[:, :, low:high]).unflatten(2, (-1, stop - start)).flatten(1, 2)
            mixed = mixed / block.total
            for at, head in enumerate(heads):
                gathered.add("z", head, mixed[:, at, :, :d_value])
                if featured and head in counted:
                    gathered.add("feature", head, mixed[:, at, :, d_value:])
        if chosen and request.statistics:
            if request.z_gradient is not None:
                block = _times_gradient(inputs, request.z_gradient, block, heads)
            if len(chosen) < len(heads):
                block = _of_heads(block, chosen)
            _statistics(inputs, request, block, [heads[at] for at in chosen], in_place, gathered)


def _visible(inputs: AttentionInputs, start: int, stop: int) -> tuple[int, int]:
    """Key columns outside which no row of the block sees anything; never empty."""
    low, high = 0, inputs.n_keys
    if inputs.causal:
        high = min(high, stop + inputs.diagonal)
    if inputs.window is not None:
        low = max(low, start + inputs.diagonal - inputs.window + 1)
        high = min(high, stop - 1 + inputs.diagonal + inputs.window)
    if inputs.mask is not None:
        rows = inputs.mask[..., start:stop, :]
        seen = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
        columns = seen.flatten(0, 2).any(0).nonzero()
        if len(columns):
            low, high = max(low, int(columns[0])), min(high, int(columns[-1]) + 1)
    low = min(max(low, 0), inputs.n_keys - 1)
    return low, max(high, low + 1)


def _softmax(
    inputs: AttentionInputs,
    scores: Tensor,
    heads: list[int],
    start: int,
    stop: int,
    low: int,
    high: int,
    in_place: bool,
) -> _Block:
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.position_bias is not None:
        scores = scores + inputs.position_bias[:, heads, start:stop, low:high].to(scores)
    scores = _hide(inputs, scores, heads, start, stop, low, high)
    top = scores.detach().amax(-1, keepdim=True)
    blind = top <= _HIDDEN / 2
    sinks = None
    if inputs.sinks is not None:
        sinks = inputs.sinks[heads].to(scores)[:, None, None]
        top = torch.maximum(top, sinks.detach())
    shifted = scores.sub_(top) if in_place else scores - top
    weight = shifted.exp()
    if bool(blind.any()):
        weight = weight.masked_fill(blind, 0.0)
    own = weight.sum(-1, keepdim=True)
    total = own if sinks is None else own + (sinks - top).exp()
    total = total.masked_fill(total == 0, 1.0)
    return _Block(start, stop, low, high, top, shifted, weight, own, total, blind)


def _hide(
    inputs: AttentionInputs,
    scores: Tensor,
    heads: list[int],
    start: int,
    stop: int,
    low: int,
    high: int,
) -> Tensor:
    """Scores with every hidden key at :data:`_HIDDEN`. ``scores`` is ours, and masking in place is differentiable."""
    if inputs.mask is not None:
        mask = inputs.mask[..., start:stop, low:high]
        if mask.shape[1] > 1:
            mask = mask[:, heads]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill_(~mask, _HIDDEN)
        else:
            # Additive masks hide a key with the type's lowest finite value: read it as hidden.
            lowest = torch.finfo(mask.dtype).min / 2
            scores = (scores + mask.to(scores)).masked_fill_(mask <= lowest, _HIDDEN)
    if not inputs.causal and inputs.window is None:
        return scores
    device = scores.device
    first = low
    if inputs.causal and inputs.window is None:
        # Only columns from the first row's own position on can lie after a query of this block.
        first = min(max(low, start + inputs.diagonal), high)
    keys = torch.arange(first, high, device=device)
    lag = torch.arange(start, stop, device=device)[:, None] + inputs.diagonal - keys
    hidden = torch.zeros_like(lag, dtype=torch.bool)
    if inputs.causal:
        hidden |= lag < 0
    if inputs.window is not None:
        hidden |= lag.abs() >= inputs.window
    scores[..., first - low :].masked_fill_(hidden, _HIDDEN)
    return scores


def _times_gradient(
    inputs: AttentionInputs, z_gradient: Tensor, block: _Block, heads: list[int]
) -> _Block:
    """The block with every weight times its gradient; what is no sum of weights loses its meaning."""
    upstream = z_gradient[:, heads, block.start : block.stop].to(block.weight)
    v = inputs.v[:, [head // inputs.group for head in heads], block.low : block.high]
    return replace(block, weight=block.weight * (upstream @ v.to(upstream).transpose(-1, -2)))


def _of_heads(block: _Block, chosen: list[int]) -> _Block:
    parts = (block.top, block.shifted, block.weight, block.own, block.total, block.blind)
    picked = (part[:, chosen] for part in parts)
    return _Block(block.start, block.stop, block.low, block.high, *picked)


def _statistics(
    inputs: AttentionInputs,
    request: Request,
    block: _Block,
    heads: list[int],
    in_place: bool,
    gathered: _Gathered,
) -> None:
    asked = set(request.statistics)
    values: dict[str, Tensor] = {}
    weight, total = block.weight, block.total
    batch = weight.shape[0]
    low, high = block.low, block.high
    log_total = total.log()
    if "lse" in asked:
        lse = block.top + log_total
        if inputs.sinks is None:
            lse = lse.masked_fill(block.blind, -torch.inf)
        values["lse"] = lse[..., 0]
    if "max" in asked:
        values["max"] = weight.amax(-1) / total[..., 0]
    if "argmax" in asked:
        best = _first_argmax(block.shifted) + low
        values["argmax"] = best.masked_fill(block.blind[..., 0], -1)
    if asked & {"topk", "topk_index"}:
        largest, index = _topk(weight, request.k)
        values["topk"] = largest / total
        values["topk_index"] = (index + low).masked_fill(largest <= 0, -1)
    if "feature" in asked and not request.z:
        assert request.features is not None
        x = request.features[:, low:high].to(weight)[:, None]
        values["feature"] = weight @ x / total
    if "target_mass" in asked:
        assert request.targets is not None
        target = request.targets.expand(batch, -1)[:, block.start : block.stop]
        inside = (target >= low) & (target < high)
        column = (target - low).clamp(0, high - low - 1)[:, None, :, None]
        picked = weight.gather(-1, column.expand(-1, len(heads), -1, 1)) / total
        values["target_mass"] = picked[..., 0] * inside[:, None]
    if "mean_distance" in asked:
        values["mean_distance"] = (_distance(inputs, block) / block.own)[..., 0]
    if asked & {"local_mass", "lag_mass"}:
        values |= _lag_masses(inputs, request, block)
    if "segment_z" in asked:
        values["segment_z"] = _segment_z(inputs, request, block, heads)
    if asked & COLUMN_STATISTICS:
        _columns(inputs, request, weight, total, block.start, low, heads, gathered)
    if "entropy" in asked:  # last: it uses up the shifted scores
        product = block.shifted.mul_(weight) if in_place else block.shifted * weight
        spread = product.sum(-1, keepdim=True)
        values["entropy"] = ((log_total * block.own - spread) / total)[..., 0]
    for name, value in values.items():
        if name in asked:
            for at, head in enumerate(heads):
                gathered.add(name, head, value[:, at])


def _distance(inputs: AttentionInputs, block: _Block) -> Tensor:
    """Σ_k e |q − k|, [batch, head, row, 1]."""
    weight, device = block.weight, block.weight.device
    keys = torch.arange(block.low, block.high, device=device)
    rows = torch.arange(block.start, block.stop, device=device) + inputs.diagonal
    if inputs.mask is not None or not inputs.causal:
        return (weight * (rows[:, None] - keys).abs()).sum(-1, keepdim=True)
    parts = []
    # Counted from a row nearby: far from its origin, r·Σe − Σe·k would lose a local head's few tokens.
    for start in range(0, len(rows), _NEARBY):
        near = slice(start, start + _NEARBY)
        offset = (rows[near] - rows[start]).to(weight)[:, None]
        away = (keys - rows[start]).to(weight)[:, None]
        parts.append(offset * block.own[..., near, :] - weight[..., near, :] @ away)
    return torch.cat(parts, -2)


def _lag_masses(inputs: AttentionInputs, request: Request, block: _Block) -> dict[str, Tensor]:
    """Masses of lag ranges, as differences of the row's running sum at the ranges' ends."""
    running = block.weight.cumsum(-1)
    rows = torch.arange(block.start, block.stop, device=running.device) + inputs.diagonal

    def up_to(lag: int) -> Tensor:  # mass on keys at this lag or a larger one, [batch, head, row]
        column = rows - lag - block.low
        index = column.clamp(0, running.shape[-1] - 1)[:, None].expand(*running.shape[:2], -1, 1)
        return running.gather(-1, index)[..., 0] * (column >= 0)

    total, values = block.total[..., 0], {}
    if "local_mass" in request.statistics:
        values["local_mass"] = (
            up_to(1 - request.local_window) - up_to(request.local_window)
        ) / total
    if "lag_mass" in request.statistics:
        ends = torch.stack([up_to(edge) for edge in request.lag_edges], -1)
        values["lag_mass"] = (ends[..., :-1] - ends[..., 1:]) / total[..., None]
    return values


def _segment_z(
    inputs: AttentionInputs, request: Request, block: _Block, heads: list[int]
) -> Tensor:
    assert request.segments is not None
    pattern = block.weight / block.total
    v = inputs.v[:, [head // inputs.group for head in heads], block.low : block.high].to(pattern)
    parts = []
    for segment in request.segments.unbind(-1):
        member = segment.expand(pattern.shape[0], -1)[:, block.low : block.high]
        columns = member.any(0).nonzero()[:, 0]  # mix only the keys that belong to the segment
        inside = member[:, None, None, columns].to(pattern)
        parts.append(pattern[..., columns] * inside @ v[:, :, columns])
    return torch.stack(parts, -2)


def _columns(
    inputs: AttentionInputs,
    request: Request,
    weight: Tensor,
    total: Tensor,
    start: int,
    low: int,
    heads: list[int],
    gathered: _Gathered,
) -> None:
    """Sums over the query rows of a block: one product whose left side picks rows and divides by l."""
    batch, _, rows, columns = weight.shape
    share = 1 / total[..., 0]
    if request.counted is not None:
        counted = request.counted.expand(batch, -1)[:, start : start + rows]
        share = share * counted[:, None].to(share)
    side = request.block if "block_map" in request.statistics else rows
    first = torch.arange(0, rows, side, device=weight.device)[:, None]
    row = torch.arange(rows, device=weight.device)
    picks = ((row >= first) & (row < first + side)).to(share)  # [square, row]
    summed = (picks * share[..., None, :]) @ weight  # [batch, head, square, column]
    if "received" in request.statistics:
        for at, head in enumerate(heads):
            gathered.accumulate("received", head, summed[:, at].sum(1), low, inputs.n_keys)
    if "block_map" in request.statistics:
        right = inputs.n_keys - low - columns
        wide = torch.nn.functional.pad(summed, (low, right + -inputs.n_keys % side))
        squares = wide.unflatten(-1, (-1, side)).sum(-1)
        for at, head in enumerate(heads):
            gathered.add("block_map", head, squares[:, at])


def _first_argmax(x: Tensor) -> Tensor:
    """First column of the largest value. Maxima of runs narrow it down: argmax itself is not vectorised."""
    n = x.shape[-1]
    if n < 4 * _RUN:
        return x.argmax(-1)
    width = n // _RUN * _RUN
    best = x[..., :width].unflatten(-1, (-1, _RUN)).amax(-1)
    if width < n:
        best = torch.cat([best, x[..., width:].amax(-1, keepdim=True)], -1)
    columns = best.argmax(-1, keepdim=True) * _RUN + torch.arange(_RUN, device=x.device)
    candidates = x.gather(-1, columns.clamp(max=n - 1))  # a clamped tail repeats its last column
    return columns[..., 0] + candidates.argmax(-1)


def _topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis with their columns, exactly.

    Columns are dealt into classes; the k largest lie in the k classes with the largest maxima, so only the
    members of those are ranked.
    """
    n = x.shape[-1]
    members = 16
    classes = n // members
    if classes <= 2 * k:
        values, index = x.topk(min(k, n), -1)
        short = max(0, k - n)
        pad = torch.nn.functional.pad
        return pad(values, (0, short)), pad(index, (0, short), value=-1)
    width = classes * members
    best = x.detach()[..., :width].unflatten(-1, (members, classes)).amax(-2)
    chosen = best.topk(k, -1).indices
    columns = (chosen[..., None] + classes * torch.arange(members, device=x.device)).flatten(-2)
    rest = torch.arange(width, n, device=x.device).expand(*x.shape[:-1], -1)
    columns = torch.cat([columns, rest], -1)
    values, place = x.gather(-1, columns).topk(k, -1)
    return values, columns.gather(-1, place)
