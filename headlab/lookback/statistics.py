"""How well scores tell two classes apart, with documents as the unit: AUROC, its interval and its null."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

_DRAWS = 1000


def ranks_of(scores: Float[np.ndarray, "span ..."]) -> Float[np.ndarray, "span ..."]:
    """Ranks from 1 within each column, ties sharing their mean."""
    from scipy.stats import rankdata

    ranked: np.ndarray = rankdata(scores, axis=0)
    return ranked


def auroc(
    scores: Float[np.ndarray, "span ..."], labels: Int[np.ndarray, " span"]
) -> Float[np.ndarray, "*column"]:
    """Area under the ROC curve of each column: the share of pairs of unlike labels whose order is right, ties half.

    NaN where one class is missing.
    """
    return auroc_of_ranks(ranks_of(scores), labels)


def auroc_of_ranks(
    ranks: Float[np.ndarray, "span ..."], labels: Int[np.ndarray, " span"]
) -> Float[np.ndarray, "*column"]:
    """:func:`auroc`, from :func:`ranks_of` scores (Mann and Whitney's U over its largest value)."""
    positive = int((labels == 1).sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return np.full(ranks.shape[1:], np.nan)
    above: np.ndarray = ranks[labels == 1].sum(0) - positive * (positive + 1) / 2
    return above / (positive * negative)


def auroc_interval(
    scores: Float[np.ndarray, "span ..."],
    labels: Int[np.ndarray, " span"],
    documents: Int[np.ndarray, " span"],
    seed: int,
    draws: int = _DRAWS,
) -> tuple[Float[np.ndarray, "*column"], Float[np.ndarray, "*column"]]:
    """Percentile bootstrap interval (95 %) of the AUROC, over documents; draws of one class are left out."""
    rng = np.random.default_rng(seed)
    numbers = np.unique(documents, return_inverse=True)[1]
    n = int(numbers.max()) + 1
    drawn = np.stack([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(draws)])
    weights = drawn[:, numbers].astype(np.float64)  # [draw, span]
    columns = scores.reshape(len(scores), -1)
    found = np.stack([_weighted(column, labels, weights) for column in columns.T], 1)
    found = found[~np.isnan(found).any(1)]
    if not len(found):
        nothing = np.full(scores.shape[1:], np.nan)
        return nothing, nothing
    low, high = np.percentile(found, [2.5, 97.5], axis=0)
    return low.reshape(scores.shape[1:]), high.reshape(scores.shape[1:])


def _weighted(
    scores: Float[np.ndarray, " span"],
    labels: Int[np.ndarray, " span"],
    weights: Float[np.ndarray, "draw span"],
) -> Float[np.ndarray, " draw"]:
    """AUROC where each span counts as often as its weight says."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=np.nan) != 0)  # runs of equal scores
    weights, positive = weights[:, order], labels[order] == 1
    above = np.add.reduceat(weights * positive, starts, axis=1)
    below = np.add.reduceat(weights * ~positive, starts, axis=1)
    right = (above * (below.cumsum(1) - below / 2)).sum(1)
    with np.errstate(invalid="ignore"):
        won: np.ndarray = right / (above.sum(1) * below.sum(1))
    return won


def shuffled_labels(
    labels: Int[np.ndarray, " span"], documents: Int[np.ndarray, " span"], draws: int, seed: int
) -> Iterator[Int[np.ndarray, " span"]]:
    """The same labels dealt out anew by document, several times.

    Documents' runs of labels are strung together in a random order, turned by a random number of places and cut where
    documents end, so that labels that came together mostly stay together, and there are as many of each as before.
    """
    rng = np.random.default_rng(seed)
    places = np.argsort(documents, kind="stable")
    members = np.split(places, np.flatnonzero(np.diff(documents[places])) + 1)
    for _ in range(draws):
        run = labels[np.concatenate([members[at] for at in rng.permutation(len(members))])]
        dealt = np.empty_like(labels)
        dealt[places] = np.roll(run, int(rng.integers(len(run))))
        yield dealt


def calibration_error(
    probability: Float[np.ndarray, " span"], labels: Int[np.ndarray, " span"], bins: int = 10
) -> float:
    """Expected calibration error: distance of mean probability and share of 1, over equally filled bins."""
    order = np.argsort(probability, kind="stable")
    error = 0.0
    for part in np.array_split(order, min(bins, len(order))):
        error += len(part) * abs(float(probability[part].mean() - labels[part].mean()))
    return error / len(order)
