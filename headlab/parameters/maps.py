"""MAPS (Elhelo and Geva 2025): which relations between tokens a head implements, from its weights alone.

A head that attends fully to a token writes what its matrices make of it; through the unembedding that is a row over the
vocabulary. For a relation R of pairs of single tokens, country → capital say,

    φ(h; R) = share of pairs (s, t) whose t is among the k largest entries of  Ẽ[s] · W_V · W_O · W_U,

and for suppression among the k smallest. Ẽ is the embedding in layer 0 and the first MLP's output above
(:mod:`headlab.parameters.embeddings`). Weights are the model's own: no norm folded in, nothing centred, no biases, no
final norm and none between attention and stream, which is what the authors' code does and what gives its top tokens.
k is 10, and 1 for relations with "copying" in their name; for Llama 3 it is 25 and 3 (:data:`CONVENTIONS`). Ties go
to the lower token id, as in a stable sort.

Beyond the paper: every score has an interval over pairs and is held against two nulls
(:mod:`headlab.parameters.relation_significance`), where the paper takes what exceeds a threshold. Rows of a padded
vocabulary that no token of the tokenizer has are left out of the competition for the first k places; the authors'
code lets them in.

Rows are computed for the sources of all relations at once, head by head, and only their ends are kept
(:mod:`headlab.parameters.row_ends`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headlab.attention import Head, HeadsLike, parse_heads
from headlab.errors import UnsupportedError
from headlab.parameters.embeddings import EmbeddingKind, doubt, embed, is_raw
from headlab.parameters.maps_document import MAPS_COLUMNS, MappedRelation, is_claimed
from headlab.parameters.maps_result import Maps
from headlab.parameters.relation_inputs import (
    MIN_PAIRS,
    RelationsLike,
    check_model,
    check_options,
    convention_of,
    named_relations,
    usable_relations,
    vocabulary_size,
)
from headlab.parameters.relation_significance import (
    NEIGHBOURS,
    LikeTokens,
    hits_of,
    poisson_binomial_tail,
    target_shares,
    wilson_interval,
)
from headlab.parameters.row_ends import DIRECTIONS, Direction, matrices_to_vocabulary, row_ends
from headlab.statistics import corrected
from headlab.tasks.relations import TokenPairs

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: What a score must be above chance to be claimed: of ten pairs, one more.
MIN_EFFECT = 0.1


@torch.no_grad()
def maps(
    model: Model,
    relations: RelationsLike = "all",
    *,
    heads: HeadsLike | None = None,
    k: int | None = None,
    convention: str = "auto",
    embedding: EmbeddingKind = "auto",
    suppression: bool = True,
    multi_token: Literal["skip", "ends"] = "skip",
    min_pairs: int = MIN_PAIRS,
    alpha: float = 0.05,
    min_effect: float = MIN_EFFECT,
    tell: Callable[[str], None] = lambda text: None,
) -> Maps:
    """Map heads to relations by their weights. Nothing is random, so there is no seed.

    Args:
        model: A decoder-only model with a tokenizer.
        relations: ``"all"`` shipped ones, names of them, also joined by commas, relations, the user's own as records or
            a path to these, or a list of such.
        heads: The heads to map, all by default; p-values are corrected over these.
        k: Tokens a target counts among, for every relation; by default a relation's own k, else the convention's.
        convention: A key of :data:`CONVENTIONS`, or ``"auto"`` for the one of the model's family.
        embedding: What stands for a source: ``"raw"``, rows of W_E; ``"mlp"``, the first MLP's output; ``"auto"``, the
            convention's, which for most is raw in layer 0 and the first MLP's output above.
        suppression: Whether to score the tokens lowered most too.
        multi_token: What becomes of words of several tokens: see :func:`headlab.tasks.token_pairs`.
        min_pairs: Relations with fewer pairs left are skipped.
        alpha: False-discovery rate, within relation and direction.
        min_effect: What a claimed score must be above chance.
        tell: Told how far it is.

    Raises:
        PromptError: There is no tokenizer, no such relation, or no relation has enough pairs.
        HeadError: A head does not exist.
        PlanError: An option is not valid, or edits are in force on the model.
        UnsupportedError: The model is no decoder, or no head's weights can be read.
    """
    min_pairs, alpha, min_effect, k = check_options(min_pairs, alpha, min_effect, k)
    check_model(model)
    held, chosen = convention_of(model.spec, convention)
    kind = chosen.embedding if embedding == "auto" else embedding
    is_raw(kind, 0)  # refuses other names
    wanted = parse_heads("*.*" if heads is None else heads, model.spec)
    n_vocab = vocabulary_size(model)
    used, mapped = usable_relations(
        model, named_relations(relations), chosen, k, multi_token, min_pairs, n_vocab
    )
    directions = DIRECTIONS if suppression else DIRECTIONS[:1]
    like = LikeTokens(model.tokenizer, n_vocab)
    counts = [_Counts(pairs, each.k, wanted, directions, n_vocab, like) for pairs, each in used]
    notes = _count(model, counts, wanted, kind, directions, n_vocab, tell)
    if len(notes) == len(wanted):
        raise UnsupportedError(next(iter(notes.values())))
    frame = _table(used, counts, wanted, notes, directions, alpha, min_effect)
    about = {
        "model": model.name,
        "family": model.spec.family,
        "fingerprint": model.fingerprint,
        "convention": held,
        "embedding": kind,
        "doubt": doubt(model, kind) if any(head.layer for head in wanted) else "",
        "directions": list(directions),
        "n_vocab": n_vocab,
        "padding_left_out": model.spec.n_vocab - n_vocab,
        "multi_token": multi_token,
        "min_pairs": min_pairs,
        "alpha": alpha,
        "min_effect": min_effect,
        "neighbours": 2 * NEIGHBOURS,
    }
    return Maps(frame, tuple(mapped), about)


# -- counting ----------------------------------------------------------------------------------------------------------


class _Counts:
    """Hits of one relation, and the chances of a hit under both nulls, for every head and direction."""

    def __init__(
        self,
        pairs: TokenPairs,
        k: int,
        heads: Sequence[Head],
        directions: Sequence[Direction],
        n_vocab: int,
        like: LikeTokens,
    ) -> None:
        self.sources, self.targets = pairs.sources.numpy(), pairs.targets.numpy()
        self.k = k
        self._shares, self._like = target_shares(self.targets, n_vocab), like
        shape = len(directions), len(heads), len(self.targets)
        self.hits = np.zeros(shape[:2], dtype=np.int64)
        self.shuffled = np.zeros(shape)
        self.matched = np.zeros(shape)

    def add(self, direction: int, head: int, top: Int[np.ndarray, "pair k"]) -> None:
        """Count what a head gives."""
        top = top[:, : self.k]
        self.hits[direction, head] = hits_of(top, self.targets).sum()
        self.shuffled[direction, head] = self._shares[top].sum(-1)
        self.matched[direction, head] = self._like.chances(top[None], self.targets)[0]


def _count(
    model: Model,
    counts: Sequence[_Counts],
    heads: Sequence[Head],
    kind: EmbeddingKind,
    directions: tuple[Direction, ...],
    n_vocab: int,
    tell: Callable[[str], None],
) -> dict[Head, str]:
    """Fill the counts; what is said of heads that cannot be read."""
    notes: dict[Head, str] = {}
    sources = np.unique(np.concatenate([each.sources for each in counts]))
    rows = [np.searchsorted(sources, each.sources) for each in counts]
    k = max(each.k for each in counts)
    stand_ins: dict[bool, Tensor] = {}
    for layer in sorted({head.layer for head in heads}):
        here = [head for head in heads if head.layer == layer]
        tell(f"maps: layer {layer}")
        try:
            raw = is_raw(kind, layer)
            if raw not in stand_ins:
                stand_ins[raw] = embed(model, layer, torch.from_numpy(sources), kind)
            _check_stand_ins(model, layer, sources, stand_ins[raw])
            z = values_of_tokens(model, layer, here, stand_ins[raw])
            W_O = model.weights.W_O(layer)[[head.head for head in here]]
        except UnsupportedError as error:
            notes |= dict.fromkeys(here, str(error))
            continue
        W_U = model.weights.W_U[:, :n_vocab]
        for each, own, matrix in zip(here, z, matrices_to_vocabulary(W_O, W_U, z), strict=True):
            if not bool(own.isfinite().all() and W_O[here.index(each)].isfinite().all()):
                notes[each] = "its weights hold NaN or infinity"
                continue
            top = row_ends(own, matrix, k, directions)
            for direction, name in enumerate(directions):
                found = top[name].cpu().numpy()
                for count, places in zip(counts, rows, strict=True):
                    count.add(direction, heads.index(each), found[places])
    return notes


def _check_stand_ins(
    model: Model, layer: int, tokens: Int[np.ndarray, " token"], x: Float[Tensor, "token d_model"]
) -> None:
    wrong = (~x.isfinite().all(1)).nonzero()[:, 0].tolist()
    if wrong:
        text = model.tokenizer.convert_ids_to_tokens(int(tokens[wrong[0]]))
        more = f" and for {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UnsupportedError(
            f"what stands for token {int(tokens[wrong[0]])} ({text!r:.40}){more} in layer {layer} of {model.name} "
            "holds NaN or infinity"
        )


def values_of_tokens(
    model: Model, layer: int, heads: Sequence[Head], x: Float[Tensor, "token d_model"]
) -> Float[Tensor, "head token d_value"]:
    """x · W_V of the key/value heads that heads of a layer use.

    Raises:
        UnsupportedError: W_V cannot be read.
    """
    facts = model.spec.layers[layer]
    W_V = model.weights.W_V(layer).to(x)
    group = facts.n_heads // facts.n_kv_heads
    wanted = [head.head // group for head in heads]
    used = sorted(set(wanted))
    z = x @ W_V[used]
    return z[[used.index(each) for each in wanted]]


# -- the table ---------------------------------------------------------------------------------------------------------


def _table(
    used: Sequence[tuple[TokenPairs, MappedRelation]],
    counts: Sequence[_Counts],
    heads: Sequence[Head],
    notes: dict[Head, str],
    directions: Sequence[Direction],
    alpha: float,
    min_effect: float,
) -> pd.DataFrame:
    import pandas as pd

    unread = np.array([head in notes for head in heads])
    parts = []
    for (_, relation), count in zip(used, counts, strict=True):
        for at, direction in enumerate(directions):
            hits, n = count.hits[at], relation.n
            nulls = count.shuffled[at], count.matched[at]
            p = np.maximum(*(_p_values(chances, hits) for chances in nulls))
            low, high = wilson_interval(hits, n)
            numbers = {
                "score": hits / n,
                "ci_low": low,
                "ci_high": high,
                "null_mean": np.maximum(*(chances.mean(1) for chances in nulls)),
                "p_value": p,
            }
            numbers = {name: np.where(unread, np.nan, values) for name, values in numbers.items()}
            effect = numbers["score"] - numbers["null_mean"]
            q = corrected(numbers["p_value"])
            part = {
                "relation": relation.name,
                "kind": relation.kind,
                "direction": direction,
                "layer": [head.layer for head in heads],
                "head": [head.head for head in heads],
                "n": n,
                "k": relation.k,
                "effect": effect,
                "q_value": q,
                "claimed": is_claimed(q, effect, alpha, min_effect),
                "note": [notes.get(head, "") for head in heads],
                **numbers,
            }
            parts.append(pd.DataFrame(part)[list(MAPS_COLUMNS)])
    return pd.concat(parts, ignore_index=True)


def _p_values(
    chances: Float[np.ndarray, "head pair"], hits: Int[np.ndarray, " head"]
) -> Float[np.ndarray, " head"]:
    """One-sided p-values of the hits; 1 where there is none."""
    p, some = np.ones(len(hits)), hits > 0
    possible = chances[some].any(0)  # coins that never show heads change nothing
    p[some] = poisson_binomial_tail(chances[some][:, possible], hits[some])
    return p


__all__ = ["MIN_EFFECT", "maps", "values_of_tokens"]
