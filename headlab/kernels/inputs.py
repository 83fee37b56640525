"""What every attention engine takes and gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

from headlab.errors import PlanError

#: Rewrites scores or pattern of some query rows: ``edit(rows, query_index) -> rows``, with rows
#: [batch, head, query, key] over every key and every query head, and query_index [batch, query].
RowEdit: TypeAlias = Callable[[Tensor, Tensor], Tensor]

#: Statistics that are sums of weights, and keep their meaning when weights are multiplied by their gradients.
LINEAR = frozenset({"feature", "local_mass", "lag_mass", "target_mass", "received", "block_map"})


@dataclass(frozen=True)
class AttentionInputs:
    """One call of softmax attention, as it arrives at the seam.

    Query row i of sequence b stands at position ``query_start + i − left[b]`` of its sequence, key column j at
    ``key_start + j − left[b]``; ``left`` counts a sequence's left padding. A key is visible to a query when the
    mask allows it, and, where ``causal``, when it does not lie after the query, and, where there is a
    ``window``, when it lies fewer than that many tokens away.

    Attributes:
        q: Queries after position encoding.
        k: Keys; query head h uses key/value head ``h // (n_heads // n_kv_heads)``.
        v: Values; their width may differ from that of q and k.
        scaling: Factor on q·k.
        mask: Visible keys (bool), or a bias added to the scores (float), broadcast over batch and heads.
        causal: Whether keys after the query are hidden in addition to what the mask hides.
        window: Sliding window in tokens, the query's own position included.
        softcap: Soft cap c: scores become ``c·tanh(score/c)`` before any bias or mask.
        sinks: One logit per query head that takes part in the softmax and has no value (gpt-oss).
        position_bias: Bias added to the scores (T5).
        query_start: Position of the first query row before left padding is subtracted.
        key_start: Position of the first key column before left padding is subtracted.
        left: Left padding of each sequence, or None when there is none.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_value"]
    scaling: float
    mask: (
        Bool[Tensor, "#batch #head query key"] | Float[Tensor, "#batch #head query key"] | None
    ) = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " head"] | None = None
    position_bias: Float[Tensor, "#batch head query key"] | None = None
    query_start: int = 0
    key_start: int = 0
    left: Int[Tensor, " batch"] | None = None

    @property
    def n_queries(self) -> int:
        """Query rows."""
        return self.q.shape[2]

    @property
    def n_keys(self) -> int:
        """Key columns."""
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def diagonal(self) -> int:
        """Key column that stands at the position of query row 0."""
        return self.query_start - self.key_start


@dataclass(frozen=True)
class Request:
    """What to compute besides z, in rows and columns of one attention call.

    Attributes:
        heads: Query heads to compute statistics and rows for, or None for all.
        z: Whether to return z (of all query heads).
        statistics: Names from :data:`headlab.kernels.STATISTICS`.
        rows: Query rows whose pattern to return, per sequence.
        features: Per-key features whose expectation under each row ``feature`` returns.
        local_window: ``local_mass`` counts keys fewer than this many tokens away.
        lag_edges: ``lag_mass`` bins: bin i holds lags ``edges[i] <= query − key < edges[i+1]``.
        k: Entries of ``topk``.
        targets: Key column per query for ``target_mass``; −1 where there is none.
        counted: Queries that count for ``received`` and ``block_map``; None for all.
        block: Side of the squares of ``block_map``, in tokens.
        segments: Which keys belong to which segment, for ``segment_z``.
        edit_scores: Rewrites scores (hidden keys −inf) before the softmax.
        edit_pattern: Rewrites the pattern before it mixes the values.
        z_gradient: Gradient of a loss with respect to z. With it, every weight of ``rows`` and of the statistics is
            multiplied by its own gradient, p·(z_gradient·v) = p ∂loss/∂p; only :data:`LINEAR` statistics have one.

    Raises:
        PlanError: ``z_gradient`` is given with z or with statistics that are not sums of weights.
    """

    heads: tuple[int, ...] | None = None
    z: bool = True
    statistics: tuple[str, ...] = ()
    rows: Int[Tensor, "batch row"] | None = None
    features: Float[Tensor, "#batch key feature"] | None = None
    local_window: int = 16
    lag_edges: tuple[int, ...] = ()
    k: int = 8
    targets: Int[Tensor, "#batch query"] | None = None
    counted: Bool[Tensor, "#batch query"] | None = None
    block: int = 64
    segments: Bool[Tensor, "#batch key segment"] | None = None
    edit_scores: RowEdit | None = None
    edit_pattern: RowEdit | None = None
    z_gradient: Float[Tensor, "batch head query d_value"] | None = None

    def __post_init__(self) -> None:
        if self.z_gradient is not None and (self.z or set(self.statistics) - LINEAR):
            other = sorted(set(self.statistics) - LINEAR) or ["z"]
            raise PlanError(
                f"{', '.join(other)} cannot be weighted by gradients; {', '.join(sorted(LINEAR))} can"
            )


@dataclass
class AttentionResult:
    """What an engine returns.

    Attributes:
        z: Mixed values before W_O, or None when not asked for.
        rows: Pattern of the asked rows, [batch, head, row, key], or None.
        statistics: Each statistic by name, [batch, head, query, ...]; ``received`` is [batch, head, key] and
            ``block_map`` [batch, head, query_block, key_block].
    """

    z: Float[Tensor, "batch head query d_value"] | None = None
    rows: Float[Tensor, "batch head row key"] | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
