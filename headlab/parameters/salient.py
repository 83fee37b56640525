"""Salient operations of a head: the tokens it turns most, what it turns them into, and what these have in common.

Elhelo & Geva 2025 (MAPS): a source token s is salient for a head by how much the head keeps of it,

    gain(s) = ‖Ẽ[s] · W_V · W_O‖ / ‖Ẽ[s]‖,

over the whole vocabulary. The most salient sources (30 in the paper, from memory; 15 in its notebook) are shown with
the five tokens that their rows Ẽ[s] · W_V · W_O · W_U raise most, and the five lowered most. Ẽ and the bare weights are
as in MAPS (:mod:`headlab.parameters.embeddings`): no norm folded in, no biases, no final norm.

Beyond the paper: sources are clustered by the direction of what the head writes for them, and the mappings of the
head and of each cluster are named by rules (:mod:`headlab.parameters.describe`) or by a language model of the user's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.arguments import is_integer, seed_number
from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import PlanError
from headlab.parameters.describe import Description, Mapped, class_shares, describe_mappings
from headlab.parameters.describe_by_model import Describer, describing_prompt, read_answer
from headlab.parameters.embeddings import EmbeddingKind, embed, is_raw
from headlab.parameters.maps import values_of_tokens
from headlab.parameters.relation_inputs import check_model, vocabulary_size
from headlab.parameters.row_ends import largest
from headlab.parameters.salience import random_sources, salient_sources
from headlab.parameters.token_classes import token_texts
from headlab.text import shown

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Outputs of one cluster agree in direction: the mean cosine between clusters that are joined is at least this.
SIMILAR = 0.4
#: Random directions that tell what targets are like by chance, and how many at a time.
_DIRECTIONS, _AT_ONCE = 512, 64
#: Numbers of W_U that are converted at a time.
_COLUMNS = 1 << 24


@dataclass(frozen=True)
class SalientMapping:
    """One source token and what the head makes of it.

    Attributes:
        token: Id of the source.
        source: Its text; a space at the beginning marks the start of a word.
        gain: Norm of what the head writes for it over the norm of what stands for it.
        targets: Texts of the tokens raised most, best first.
        suppressed: Texts of the tokens lowered most, the lowest first.
        target_ids: Ids of the targets.
        suppressed_ids: Ids of the suppressed.
        cluster: Number of its cluster; 0 is the largest.
    """

    token: int
    source: str
    gain: float
    targets: tuple[str, ...]
    suppressed: tuple[str, ...]
    target_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    cluster: int


@dataclass(frozen=True)
class SalientOperations:
    """The salient mappings of a head and their names.

    Attributes:
        head: The head.
        rows: Mappings, the most salient first.
        promotes: What sources and the tokens raised have in common.
        suppresses: The same for the tokens lowered.
        clusters: What each cluster's sources and raised tokens have in common, by number of cluster.
        embedding: What stood for sources.
    """

    head: Head
    rows: tuple[SalientMapping, ...]
    promotes: Description
    suppresses: Description
    clusters: tuple[Description, ...]
    embedding: EmbeddingKind

    def __repr__(self) -> str:
        return (
            f"SalientOperations({self.head}: {self.promotes.pattern!r}, {len(self.rows)} sources in "
            f"{len(self.clusters)} clusters)"
        )

    def frame(self) -> pd.DataFrame:
        """One row per source: source, token, gain, targets, suppressed (texts, lists), cluster."""
        import pandas as pd

        columns = ["source", "token", "gain", "targets", "suppressed", "cluster"]
        return pd.DataFrame([asdict(row) for row in self.rows])[columns]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "head": str(self.head),
            "embedding": self.embedding,
            "promotes": self.promotes.to_dict(),
            "suppresses": self.suppresses.to_dict(),
            "clusters": [each.to_dict() for each in self.clusters],
            "rows": [asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """As a JSON document."""
        return json.dumps(self.to_dict(), ensure_ascii=False)


@torch.no_grad()
def salient_operations(
    model: Model,
    heads: HeadsLike = "*.*",
    *,
    n: int = 30,
    n_targets: int = 5,
    sources: Literal["salient", "random"] = "salient",
    embedding: EmbeddingKind = "auto",
    describe: Describer | None = None,
    alpha: float = 0.05,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[SalientOperations, ...]:
    """The most salient mappings of heads, clustered and named.

    Args:
        model: A decoder-only model with a tokenizer.
        heads: Which heads.
        n: Sources of each.
        n_targets: Targets of each source, and suppressed tokens.
        sources: ``"random"`` takes random tokens in place of the salient ones: patterns there are what any token gives.
        embedding: What stands for a source: see :data:`~headlab.parameters.embeddings.EmbeddingKind`.
        describe: A language model of the user's, from prompt to answer, that names the head's mappings (raised, then
            lowered) in place of rules; clusters are named by rules, and the rules' candidates are kept.
        alpha: False-discovery rate over the rules tried on one set of mappings.
        seed: Seed of the directions that tell what targets are like by chance, and of random sources.
        tell: Told how far it is.

    Returns:
        One result per head, in order of heads.

    Raises:
        PromptError: There is no tokenizer.
        HeadError: A head does not exist.
        PlanError: An option is not valid, edits are in force on the model, or the user's describer does not answer as
            asked.
        UnsupportedError: The model is no decoder, or the weights of a head cannot be read or hold NaN.
    """
    check_model(model)
    wanted = parse_heads(heads, model.spec)
    n_vocab = vocabulary_size(model)
    for name, value, most in (("n", n, n_vocab), ("n_targets", n_targets, n_vocab)):
        if not is_integer(value) or not 1 <= value <= most:
            raise PlanError(f"{name}={shown(value)} must be a whole number from 1 to {most}")
    n, n_targets, seed = int(n), int(n_targets), seed_number(seed)
    if describe is not None and not callable(describe):
        raise PlanError(f"describe={shown(describe)} must be a function from a prompt to an answer")
    is_raw(embedding, 0)  # refuses other names
    if sources not in ("salient", "random"):
        raise PlanError(f"sources={sources!r:.60} must be 'salient' or 'random'")
    if sources == "random":
        gains, tokens = random_sources(model, wanted, n, n_vocab, embedding, seed)
    else:
        gains, tokens = salient_sources(model, wanted, n, n_vocab, embedding, tell)
    texts = token_texts(model.tokenizer, range(n_vocab))
    shares = class_shares(texts)
    chance = _chance_of_targets(model, texts, shares, seed)
    found = []
    for layer in sorted({head.layer for head in wanted}):
        here = [at for at, head in enumerate(wanted) if head.layer == layer]
        stand_ins = embed(model, layer, tokens[here].flatten(), embedding).unflatten(0, (-1, n))
        for at, x in zip(here, stand_ins, strict=True):
            tell(f"salient operations: {wanted[at]}")
            written = _written(model, wanted[at], x)
            scores = _logits(model, written, n_vocab)
            rows = _rows(
                texts,
                tokens[at].tolist(),
                gains[at].tolist(),
                largest(scores, n_targets).tolist(),
                largest(scores, n_targets, -1).tolist(),
                clusters_of(written.double().cpu().numpy()).tolist(),
            )
            found.append(_described(wanted[at], rows, (shares, chance), embedding, describe, alpha))
    return tuple(found)


def clusters_of(
    written: Float[np.ndarray, "row d_model"], similar: float = SIMILAR
) -> Int[np.ndarray, " row"]:
    """Clusters of directions: average linkage by cosine, joined down to a mean cosine of ``similar``.

    Returns:
        Number of each row's cluster, the largest being 0; equal ones in order of their first rows.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(written) < 2:
        return np.zeros(len(written), dtype=np.int64)
    size = np.linalg.norm(written, axis=1, keepdims=True)
    unit = written / np.where(size > 0, size, 1)
    upper = np.triu_indices(len(unit), 1)
    apart = np.clip(1 - (unit @ unit.T)[upper], 0, 2)
    flat = fcluster(linkage(apart, "average"), 1 - similar, "distance")
    _, first, counts = np.unique(flat, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    numbers: np.ndarray = rank[flat - 1]
    return numbers


def _written(model: Model, head: Head, x: Float[Tensor, "n d_model"]) -> Float[Tensor, "n d_model"]:
    """What a head writes for tokens: Ẽ · W_V · W_O."""
    z = values_of_tokens(model, head.layer, [head], x)[0]
    written: Tensor = z @ model.weights.W_O(head.layer)[head.head].to(z)
    return written


def _rows(
    texts: Sequence[str],
    sources: Sequence[int],
    gains: Sequence[float],
    raised: Sequence[Sequence[int]],
    lowered: Sequence[Sequence[int]],
    clusters: Sequence[int],
) -> tuple[SalientMapping, ...]:
    def names(ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(texts[token] for token in ids)

    return tuple(
        SalientMapping(
            source, texts[source], gain, names(up), names(down), tuple(up), tuple(down), cluster
        )
        for source, gain, up, down, cluster in zip(
            sources, gains, raised, lowered, clusters, strict=True
        )
    )


def _logits(
    model: Model, written: Float[Tensor, "n d_model"], n_vocab: int
) -> Float[Tensor, "n n_vocab"]:
    W_U = model.weights.W_U[:, :n_vocab]
    step = max(
        1, _COLUMNS // len(W_U)
    )  # a converted copy of all of it could be larger than all else
    return torch.cat([written @ part.to(written) for part in W_U.split(step, 1)], 1)


def _chance_of_targets(
    model: Model, texts: Sequence[str], shares: dict[str, float], seed: int
) -> dict[str, float]:
    """Each class's share of the tokens that random directions of the stream raise most, or of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    W_U = model.weights.W_U
    kind = torch.promote_types(W_U.dtype, torch.float32)
    drawn = torch.randn(_DIRECTIONS, len(W_U), generator=generator).to(W_U.device, kind)
    first = [
        token
        for some in drawn.split(_AT_ONCE)
        for token in _logits(model, some, len(texts)).argmax(1).tolist()
    ]
    raised = class_shares([texts[token] for token in first])
    return {name: max(share, raised[name]) for name, share in shares.items()}


def _described(
    head: Head,
    rows: tuple[SalientMapping, ...],
    shares: tuple[dict[str, float], dict[str, float]],
    kind: EmbeddingKind,
    describe: Describer | None,
    alpha: float,
) -> SalientOperations:
    raised = [(row.source, row.targets) for row in rows]
    lowered = [(row.source, row.suppressed) for row in rows]
    whole = [
        _description(mappings, shares, describe, alpha, head, suppressed)
        for mappings, suppressed in ((raised, False), (lowered, True))
    ]
    clusters = tuple(
        describe_mappings(_of_cluster(rows, number), *shares, alpha=alpha)
        for number in range(1 + max(row.cluster for row in rows))
    )
    return SalientOperations(head, rows, whole[0], whole[1], clusters, kind)


def _of_cluster(rows: Iterable[SalientMapping], number: int) -> list[Mapped]:
    return [(row.source, row.targets) for row in rows if row.cluster == number]


def _description(
    mappings: Sequence[Mapped],
    shares: tuple[dict[str, float], dict[str, float]],
    describe: Describer | None,
    alpha: float,
    head: Head,
    suppressed: bool,
) -> Description:
    ruled = describe_mappings(mappings, *shares, alpha=alpha)
    if describe is None:
        return ruled
    answer = describe(describing_prompt(mappings, suppressed=suppressed))
    said = read_answer(answer, f"what {head} {'suppresses' if suppressed else 'promotes'}")
    return Description(said.pattern, ruled.candidates, "yours", said.reasoning, said.sources)


__all__ = [
    "SIMILAR",
    "SalientMapping",
    "SalientOperations",
    "clusters_of",
    "salient_operations",
]
