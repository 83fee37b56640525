"""What a relation's score would be by chance: two nulls, both in closed form, so that p-values have no floor.

A score counts pairs (s, t) whose target is among the k tokens a head raises most for s. Both nulls leave the head and
the sources as they are and put other targets in place, each drawn by itself; so the number of hits is a sum of
independent coins with different chances p_i, a Poisson-binomial variable, and its upper tail is computed exactly.

* **Shuffled targets**: t_i is drawn from the relation's own targets, as listed, with repeats; p_i is the share of them
  among the k tokens of row i. It asks whether the head knows which target goes with which source: a head that raises
  every capital for every country is no better than its null. Drawing one by one instead of permuting leaves the mean
  as it is, and the variance is at least (n − 1)/n of that of a permutation, whose targets cannot run out: in general
  larger, which makes p-values err on the careful side.
* **Frequency-matched tokens**: t_i is drawn from the 200 tokens around it in the order of ids that are of its kind
  (word start or not, letters or not), itself among them. Ids of byte-pair vocabularies are in the order of merging,
  so that neighbours are about as frequent; that is an approximation, and a rough one for other vocabularies. It asks
  whether the head raises these targets more than any such token.

A draw may give the target itself in both, as a permutation test counts the observed order among the possible ones, so
no p-value is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

#: Tokens on either side of a target that may stand in for it.
NEIGHBOURS = 100
#: Marks of a word's beginning, in byte-pair and in SentencePiece vocabularies.
_STARTS = ("Ġ", "▁", " ")
_SMALLEST = float(np.finfo(np.float64).tiny)


def poisson_binomial_tail(
    chances: Float[np.ndarray, "row trial"], hits: Int[np.ndarray, " row"]
) -> Float[np.ndarray, " row"]:
    """P(S ≥ hits) of a sum S of independent coins with the chances of each row.

    The distribution is built coin by coin. Every term is a product of chances and is added, never subtracted, so that a
    tail of 1e-200 is as precise as one of 0.1; what would be smaller than the smallest float is given as that.
    """
    chances = np.clip(np.asarray(chances, np.float64), 0.0, 1.0)
    rows, trials = chances.shape
    below = np.zeros((rows, trials + 1))
    below[:, 0] = 1.0
    for trial in range(trials):
        p = chances[:, trial, None]
        upper = below[:, : trial + 1] * p
        below[:, : trial + 1] *= 1.0 - p
        below[:, 1 : trial + 2] += upper
    # From the smallest terms up: the far end of the tail first.
    tails = np.cumsum(below[:, ::-1], 1)[:, ::-1]
    found = np.take_along_axis(tails, np.asarray(hits)[:, None], 1)[:, 0]
    return np.clip(np.where(np.asarray(hits) == 0, 1.0, found), _SMALLEST, 1.0)


def wilson_interval(
    hits: Int[np.ndarray, " row"], n: int, z: float = 1.959963984540054
) -> tuple[Float[np.ndarray, " row"], Float[np.ndarray, " row"]]:
    """Wilson's (1927) 95 % interval of a share over n pairs."""
    share = np.asarray(hits, np.float64) / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)
    # At the ends the formula gives the end itself; rounding must not put the score outside.
    return np.minimum(low, share), np.maximum(high, share)


def target_shares(targets: Int[np.ndarray, " pair"], n_vocab: int) -> Float[np.ndarray, " token"]:
    """Each token's share of a relation's targets, over the vocabulary."""
    return np.bincount(targets, minlength=n_vocab) / len(targets)


class LikeTokens:
    """The tokens that may stand in for a target: its neighbours by id among tokens of its kind.

    Args:
        tokenizer: The model's.
        n_vocab: Tokens there are.
    """

    def __init__(self, tokenizer: Any, n_vocab: int) -> None:
        kinds = _kinds(tokenizer, n_vocab)
        # Tokens of one kind stand together, by id; special ones stand nowhere.
        order = np.lexsort((np.arange(n_vocab), kinds))
        order = order[kinds[order] >= 0]
        self._place = np.full(n_vocab, -1)
        self._place[order] = np.arange(len(order))
        ends = np.searchsorted(kinds[order], np.arange(max(int(kinds.max()), 0) + 2))
        self._first = np.where(kinds >= 0, ends[kinds.clip(0)], -1)
        self._stop = np.where(kinds >= 0, ends[kinds.clip(0) + 1], -1)

    def window(self, targets: Int[np.ndarray, " pair"]) -> Int[np.ndarray, "pair 2"]:
        """First and last place, exclusive, of each target's stand-ins; empty for special tokens, which have none."""
        place = self._place[targets]
        low = np.maximum(place - NEIGHBOURS, self._first[targets])
        high = np.minimum(place + NEIGHBOURS + 1, self._stop[targets])
        return np.stack([np.where(place < 0, 0, low), np.where(place < 0, 0, high)], 1)

    def chances(
        self, top: Int[np.ndarray, "head pair k"], targets: Int[np.ndarray, " pair"]
    ) -> Float[np.ndarray, "head pair"]:
        """Share of each target's stand-ins among the k tokens of its row."""
        low, high = self.window(targets).T
        place = self._place[top]
        inside = (place >= low[:, None]) & (place < high[:, None])
        chances = inside.sum(-1) / np.maximum(high - low, 1)
        return np.where(high > low, chances, hits_of(top, targets))

    def tokens(self, target: int) -> Int[np.ndarray, " token"]:
        """The stand-ins of one target, by id."""
        low, high = self.window(np.array([target]))[0]
        return np.flatnonzero((self._place >= low) & (self._place < high))


def hits_of(
    top: Int[np.ndarray, "head pair k"], targets: Int[np.ndarray, " pair"]
) -> Bool[np.ndarray, "head pair"]:
    """Whether a pair's target is among the k tokens of its row."""
    found: np.ndarray = (top == targets[:, None]).any(-1)
    return found


def _kinds(tokenizer: Any, n_vocab: int) -> Int[np.ndarray, " token"]:
    """0 to 3 by word start and letters; −1 for special and added tokens, and for ids without a token."""
    tokens: Sequence[str | None] = tokenizer.convert_ids_to_tokens(list(range(n_vocab)))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    kinds = np.full(n_vocab, -1)
    for token, text in enumerate(tokens):
        if text is None or token in special:
            continue
        start = text.startswith(_STARTS)
        # Byte-pair tokens spell letters beyond ASCII in several signs, some of them no letters.
        letters = tokenizer.convert_tokens_to_string([text]).strip().isalpha()
        kinds[token] = 2 * start + letters
    return kinds


__all__ = [
    "NEIGHBOURS",
    "LikeTokens",
    "hits_of",
    "poisson_binomial_tail",
    "target_shares",
    "wilson_interval",
]
