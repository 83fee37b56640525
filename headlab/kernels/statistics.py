"""What each statistic of a pattern row means: one plain formula each.

Every function takes :class:`Rows`, complete rows of scores and pattern, and is the definition that engines
are held to. A row that sees no key has log-sum-exp −inf, entropy 0, masses 0, argmax −1 and a mean distance
of NaN. A learned sink logit takes mass off the keys, so a row may sum to less than one; means over keys are
then taken over the mass that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.kernels.inputs import Request


@dataclass(frozen=True)
class Rows:
    """Complete attention rows.

    Attributes:
        scores: Scores before the softmax; −inf where a key is hidden.
        pattern: Scores after the softmax; 0 where a key is hidden.
        sinks: Sink logit per head, or None.
        v: Values of every key/value head.
        kv_of: The key/value head of each row head.
        lag: Query position minus key position.
        query_index: The query row of each row, counted in the attention call.
        request: Parameters of the statistics.
    """

    scores: Float[Tensor, "batch head row key"]
    pattern: Float[Tensor, "batch head row key"]
    sinks: Float[Tensor, " head"] | None
    v: Float[Tensor, "batch kv_head key d_value"]
    kv_of: tuple[int, ...]
    lag: Int[Tensor, "#batch row key"]
    query_index: Int[Tensor, "#batch row"]
    request: Request

    @property
    def values(self) -> Float[Tensor, "batch head key d_value"]:
        """Values of each row head: a copy, so only for what mixes values."""
        return self.v[:, list(self.kv_of)].to(self.pattern)

    def heads(self, chosen: tuple[int, ...]) -> Rows:
        """The same rows for some of these heads."""
        index = torch.tensor(chosen, device=self.pattern.device)
        return replace(
            self,
            scores=self.scores[:, index],
            pattern=self.pattern[:, index],
            sinks=None if self.sinks is None else self.sinks[index],
            kv_of=tuple(self.kv_of[head] for head in chosen),
        )


def lse(rows: Rows) -> Float[Tensor, "batch head row"]:
    """Log-sum-exp of the scores, the sink logit included."""
    total = torch.logsumexp(rows.scores, -1)
    if rows.sinks is None:
        return total
    return torch.logaddexp(total, rows.sinks[:, None].to(total))


def entropy(rows: Rows) -> Float[Tensor, "batch head row"]:
    """Shannon entropy over the keys, −Σ p ln p, in nats; 0·ln 0 = 0."""
    # A clamped logarithm gives 0·ln 0 = 0 in value and in gradient alike.
    smallest = torch.finfo(rows.pattern.dtype).tiny
    return -(rows.pattern * rows.pattern.clamp(min=smallest).log()).sum(-1)


def maximum(rows: Rows) -> Float[Tensor, "batch head row"]:
    """Largest weight of the row."""
    return rows.pattern.amax(-1)


def argmax(rows: Rows) -> Int[Tensor, "batch head row"]:
    """Key with the largest weight, the first of equals; −1 in a row that sees no key."""
    return torch.where(rows.pattern.amax(-1) > 0, rows.pattern.argmax(-1), -1)


def topk(rows: Rows) -> Float[Tensor, "batch head row k"]:
    """The k largest weights, falling; 0 beyond the keys a row sees."""
    return _topk(rows)[0]


def topk_index(rows: Rows) -> Int[Tensor, "batch head row k"]:
    """The keys of :func:`topk`; −1 beyond the keys a row sees."""
    weights, index = _topk(rows)
    return torch.where(weights > 0, index, -1)


def feature(rows: Rows) -> Float[Tensor, "batch head row feature"]:
    """Expectation of per-key features, Σ_k p_k x_k: masses of segments and of the first keys are cases of it."""
    assert rows.request.features is not None
    return torch.einsum("bhqk,bkf->bhqf", rows.pattern, _batched(rows, rows.request.features))


def local_mass(rows: Rows) -> Float[Tensor, "batch head row"]:
    """Mass on keys fewer than ``local_window`` tokens away, the query itself included."""
    near = rows.lag.abs() < rows.request.local_window
    return (rows.pattern * near[:, None]).sum(-1)


def lag_mass(rows: Rows) -> Float[Tensor, "batch head row bin"]:
    """Mass per lag bin; the lag is query position minus key position, so a causal head's lags are ≥ 0."""
    edges = rows.request.lag_edges
    bins = [
        (rows.pattern * ((rows.lag >= low) & (rows.lag < high))[:, None]).sum(-1)
        for low, high in pairwise(edges)
    ]
    return torch.stack(bins, -1)


def mean_distance(rows: Rows) -> Float[Tensor, "batch head row"]:
    """Mean distance in tokens between query and key, Σ p |q − k| / Σ p."""
    distance = (rows.pattern * rows.lag.abs()[:, None]).sum(-1)
    return distance / rows.pattern.sum(-1)


def target_mass(rows: Rows) -> Float[Tensor, "batch head row"]:
    """Weight on one named key per query; 0 where the query has no target (−1)."""
    assert rows.request.targets is not None
    targets = rows.request.targets.expand(rows.pattern.shape[0], -1)
    index = targets.gather(1, rows.query_index.expand(rows.pattern.shape[0], -1))
    picked = rows.pattern.gather(
        -1, index.clamp(min=0)[:, None, :, None].expand(-1, rows.pattern.shape[1], -1, 1)
    )
    return picked[..., 0] * (index >= 0)[:, None]


def segment_z(rows: Rows) -> Float[Tensor, "batch head row segment d_value"]:
    """z mixed from the keys of one segment only, Σ_{k∈segment} p_k v_k."""
    assert rows.request.segments is not None
    member = _batched(rows, rows.request.segments).to(rows.pattern)
    return torch.einsum("bhqk,bks,bhkd->bhqsd", rows.pattern, member, rows.values)


def received(rows: Rows) -> Float[Tensor, "batch head key"]:
    """Attention each key receives, Σ_q p[q, k] over the chosen queries."""
    return torch.einsum("bhqk,bq->bhk", rows.pattern, _counted(rows))


def block_map(rows: Rows) -> Float[Tensor, "batch head query_block key_block"]:
    """Attention of the chosen queries summed over squares of ``block`` tokens, from the first row and key."""
    block = rows.request.block
    padded = torch.nn.functional.pad(
        rows.pattern * _counted(rows)[:, None, :, None],
        (0, -rows.pattern.shape[-1] % block, 0, -rows.pattern.shape[-2] % block),
    )
    return padded.unflatten(-1, (-1, block)).sum(-1).unflatten(-2, (-1, block)).sum(-2)


STATISTICS: dict[str, Callable[[Rows], Tensor]] = {
    "lse": lse,
    "entropy": entropy,
    "max": maximum,
    "argmax": argmax,
    "topk": topk,
    "topk_index": topk_index,
    "feature": feature,
    "local_mass": local_mass,
    "lag_mass": lag_mass,
    "mean_distance": mean_distance,
    "target_mass": target_mass,
    "segment_z": segment_z,
    "received": received,
    "block_map": block_map,
}

#: Statistics that need every row before they are known, so they have no query axis.
COLUMN_STATISTICS = frozenset({"received", "block_map"})


def _topk(rows: Rows) -> tuple[Tensor, Tensor]:
    k = rows.request.k
    # A stable sort puts the lowest key first among equals.
    weights, index = rows.pattern.sort(dim=-1, descending=True, stable=True)
    short = max(0, k - weights.shape[-1])
    return (
        torch.nn.functional.pad(weights[..., :k], (0, short)),
        torch.nn.functional.pad(index[..., :k], (0, short)),
    )


def _batched(rows: Rows, per_key: Tensor) -> Tensor:
    wanted = rows.pattern.dtype if per_key.is_floating_point() else per_key.dtype
    return per_key.expand(rows.pattern.shape[0], -1, -1).to(wanted)


def _counted(rows: Rows) -> Float[Tensor, "batch row"]:
    counted = rows.request.counted
    batch = rows.pattern.shape[0]
    if counted is None:
        return rows.pattern.new_ones(batch, rows.pattern.shape[2])
    return counted.expand(batch, -1).gather(1, rows.query_index.expand(batch, -1)).to(rows.pattern)
