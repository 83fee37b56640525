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


def held_out_auroc(
    scores: Float[np.ndarray, " span"],
    labels: Int[np.ndarray, " span"],
    folds: Int[np.ndarray, " span"],
) -> float:
    """AUROC over the pairs of spans of one fold, all folds taken together.

    Spans of two folds were scored by two regressions. Their intercepts lean against what was held out, so that pairs
    across folds would put the AUROC of labels that mean nothing below 1/2.
    """
    return float(_weighted(scores, labels, np.ones((1, len(labels))), folds)[0])


def auroc_interval(
    scores: Float[np.ndarray, "span ..."],
    labels: Int[np.ndarray, " span"],
    documents: Int[np.ndarray, " span"],
    seed: int,
    draws: int = _DRAWS,
    folds: Int[np.ndarray, " span"] | None = None,
) -> tuple[Float[np.ndarray, "*column"], Float[np.ndarray, "*column"]]:
    """Percentile bootstrap interval (95 %) of the AUROC, over documents; draws of one class are left out.

    Args:
        scores: Scores; each column has an interval.
        labels: 1 or 0.
        documents: Document of each span.
        seed: Seed of the draws.
        draws: How many.
        folds: Fold of each span, for :func:`held_out_auroc`; None counts pairs of all spans.
    """
    rng = np.random.default_rng(seed)
    numbers = np.unique(documents, return_inverse=True)[1]
    n = int(numbers.max()) + 1
    drawn = np.stack([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(draws)])
    weights = drawn[:, numbers].astype(np.float64)  # [draw, span]
    columns = scores.reshape(len(scores), -1)
    folds = np.zeros_like(labels) if folds is None else folds
    found = np.stack([_weighted(column, labels, weights, folds) for column in columns.T], 1)
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
    folds: Int[np.ndarray, " span"],
) -> Float[np.ndarray, " draw"]:
    """AUROC within folds where each span counts as often as its weight says."""
    right, pairs = np.zeros(len(weights)), np.zeros(len(weights))
    for fold in np.unique(folds):
        members = np.flatnonzero(folds == fold)
        order = members[np.argsort(scores[members], kind="stable")]
        # Runs of equal scores are taken together: half of their pairs are right.
        starts = np.flatnonzero(np.diff(scores[order], prepend=np.nan) != 0)
        own, positive = weights[:, order], labels[order] == 1
        above = np.add.reduceat(own * positive, starts, axis=1)
        below = np.add.reduceat(own * ~positive, starts, axis=1)
        right += (above * (below.cumsum(1) - below / 2)).sum(1)
        pairs += above.sum(1) * below.sum(1)
    return np.divide(right, pairs, out=np.full(len(weights), np.nan), where=pairs > 0)


def shuffled_labels(
    labels: Int[np.ndarray, " span"], documents: Int[np.ndarray, " span"], draws: int, seed: int
) -> Iterator[Int[np.ndarray, " span"]]:
    """Labels dealt out anew by document, several times.

    Each document takes the labels of another one, stretched or shortened to its own number of spans and begun at a
    random place, round their end: labels that came together stay together, since breaking them up would make the null
    too narrow, and an order that all documents share, such as the right answer first, does not survive.
    """
    rng = np.random.default_rng(seed)
    places = np.argsort(documents, kind="stable")
    numbers = np.unique(documents[places], return_inverse=True)[1]
    sizes = np.bincount(numbers)
    starts = sizes.cumsum() - sizes
    within = 2 * (np.arange(len(labels)) - starts[numbers]) + 1
    for _ in range(draws):
        others = rng.permutation(len(sizes))
        other, begun = others[numbers], rng.integers(sizes[others])[numbers]
        # The middle of each span falls on one of the other document's.
        at = within * sizes[other] // (2 * sizes[numbers])
        theirs = starts[other] + (at + begun) % sizes[other]
        dealt = np.empty_like(labels)
        dealt[places] = labels[places[theirs]]
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
