"""The Lookback Lens (Chuang et al. 2024): a logistic regression on lookback ratios tells what the context bears out.

The classifier is scikit-learn's, with C = 1 and no scaling, as in the authors' code; ``scaling="standard"`` gives every
ratio the same spread before the penalty. Two ways to split: ``"grouped"``,
five folds in which all spans of a document stay together, and ``"paper"``, the authors' two random halves of spans,
in which windows of one response lie on both sides; figures are too high for that reason, and it is here to compare.
Every figure is of spans that the classifier was not fitted on; the lens that is kept is fitted on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from headlab.arguments import finite_number
from headlab.errors import PlanError
from headlab.lookback.spans import Spans
from headlab.lookback.statistics import (
    auroc,
    auroc_interval,
    calibration_error,
    held_out_auroc,
    shuffled_labels,
)
from headlab.text import shown

Split: TypeAlias = Literal["grouped", "paper"]
Calibration: TypeAlias = Literal["platt", "isotonic", "none"]
Scaling: TypeAlias = Literal["none", "standard"]
FOLDS, _HALVES = 5, 2


@dataclass(frozen=True)
class Linear:
    """A logistic regression.

    Attributes:
        weights: One per feature, [feature].
        intercept: Added to the sum.
    """

    weights: Float[np.ndarray, " feature"]
    intercept: float

    def logit(self, features: Float[np.ndarray, "span feature"]) -> Float[np.ndarray, " span"]:
        """Log-odds of label 1."""
        return features @ self.weights + self.intercept


@dataclass(frozen=True)
class Calibrator:
    """Turns log-odds into probabilities: a rising curve through points, or a logistic one.

    Attributes:
        kind: ``"platt"``, ``"isotonic"`` or ``"none"``.
        x: Slope and offset of ``"platt"``; log-odds of the points of ``"isotonic"``.
        y: Probabilities of the points of ``"isotonic"``.
    """

    kind: Calibration = "none"
    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def __call__(self, logit: Float[np.ndarray, " span"]) -> Float[np.ndarray, " span"]:
        """Probabilities of label 1."""
        if self.kind == "isotonic":
            return np.interp(logit, self.x, self.y)
        if self.kind == "platt":
            logit = self.x[0] * logit + self.x[1]
        return 1 / (1 + np.exp(-np.clip(logit, -500, 500)))

    @staticmethod
    def read(kind: Any, x: Any, y: Any) -> Calibrator:
        """A calibrator from parts that were kept somewhere.

        Raises:
            PlanError: They make none.
        """
        xs, ys = ([finite_number(value, "calibrator") for value in part] for part in (x, y))
        points = len(xs) == len(ys) > 0 and xs == sorted(xs) and ys == sorted(ys)
        fits = {
            "none": not xs and not ys,
            "platt": len(xs) == 2 and not ys,
            "isotonic": points and ys[0] >= 0 and ys[-1] <= 1,
        }
        if not isinstance(kind, str) or not fits.get(kind, False):
            raise PlanError(f"the calibrator {shown(kind)} has parts that make none")
        return Calibrator(kind, tuple(xs), tuple(ys))  # type: ignore[arg-type]  # one of fits

    @staticmethod
    def fit(
        kind: Calibration, logit: Float[np.ndarray, " span"], labels: Int[np.ndarray, " span"]
    ) -> Calibrator:
        """Learn it from log-odds of spans that were not fitted on."""
        if kind == "none":
            return Calibrator()
        if kind == "isotonic":
            from sklearn.isotonic import IsotonicRegression

            curve = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(logit, labels)
            return Calibrator(
                kind, tuple(map(float, curve.X_thresholds_)), tuple(map(float, curve.y_thresholds_))
            )
        line = _fitted(logit[:, None], labels, c=1e6)
        return Calibrator(kind, (float(line.weights[0]), line.intercept))


@dataclass(frozen=True)
class Validation:
    """What the detector does on spans it was not fitted on.

    Attributes:
        logit: Log-odds of every span when held out, [span].
        figures: ``auroc`` (of pairs within a fold) with ``auroc_low`` and ``auroc_high`` (95 %, bootstrap over
            documents), ``auroc_train`` (on the spans fitted on), ``p_value`` and ``null_mean`` and ``null_sd`` (labels
            dealt out anew by document, everything refitted), ``brier`` and ``calibration_error`` before and after
            calibration, counts.
    """

    logit: Float[np.ndarray, " span"]
    figures: dict[str, float]


def fit_linear(spans: Spans, scaling: Scaling = "none") -> Linear:
    """The regression on all spans."""
    return _fitted(spans.features, spans.labels, scaling)


def validate(
    spans: Spans,
    split: Split,
    calibration: Calibration,
    n_permutations: int,
    seed: int,
    scaling: Scaling,
    tell: Callable[[str], None],
) -> Validation:
    """Fit on some spans and judge on others.

    Raises:
        PlanError: One class has no spans, or too few documents have either.
    """
    held = _held_out(spans, spans.labels, split, seed, scaling)
    null = []
    shuffles = shuffled_labels(spans.labels, spans.documents, n_permutations, seed)
    for draw, dealt in enumerate(shuffles):
        tell(f"shuffling labels, {draw + 1} of {n_permutations}")
        try:
            null.append(_held_out(spans, dealt, split, seed, scaling).auroc(dealt))
        except PlanError:  # a draw may leave a fold with one class
            continue
    labels, score = spans.labels, held.auroc(spans.labels)
    low, high = auroc_interval(held.logit, labels, spans.documents, seed, folds=held.fold)
    raw, better = Calibrator()(held.logit), _calibrated(calibration, held, labels)
    figures = {
        "auroc": score,
        "auroc_low": float(low),
        "auroc_high": float(high),
        "auroc_train": held.train,
        "p_value": (1 + sum(x >= score for x in null)) / (1 + len(null)) if null else np.nan,
        "null_mean": float(np.mean(null)) if null else np.nan,
        "null_sd": float(np.std(null)) if null else np.nan,
        "brier": float(np.mean((raw - labels) ** 2)),
        "brier_calibrated": float(np.mean((better - labels) ** 2)),
        "calibration_error": calibration_error(raw, labels),
        "calibration_error_calibrated": calibration_error(better, labels),
        "spans": len(labels),
        "positive": int(labels.sum()),
        "documents": len(np.unique(spans.documents)),
    }
    return Validation(held.logit, figures)


@dataclass(frozen=True)
class _HeldOut:
    """Log-odds of each span, from the fold [span] in which it was held out; mean AUROC on spans fitted on."""

    logit: Float[np.ndarray, " span"]
    fold: Int[np.ndarray, " span"]
    train: float

    def auroc(self, labels: Int[np.ndarray, " span"]) -> float:
        return held_out_auroc(self.logit, labels, self.fold)


def _held_out(
    spans: Spans, labels: Int[np.ndarray, " span"], split: Split, seed: int, scaling: Scaling
) -> _HeldOut:
    logit, fold, train = np.empty(len(labels)), np.empty(len(labels), int), []
    for at, (inside, outside) in enumerate(_folds(labels, spans.documents, split, seed)):
        line = _fitted(spans.features[inside], labels[inside], scaling)
        train.append(float(auroc(line.logit(spans.features[inside]), labels[inside])))
        logit[outside], fold[outside] = line.logit(spans.features[outside]), at
    held = _HeldOut(logit, fold, float(np.mean(train)))
    if np.isnan(held.auroc(labels)):
        raise PlanError(
            "no fold holds spans of both labels, so that none can be told apart; give more documents"
        )
    return held


def _folds(
    labels: Int[np.ndarray, " span"],
    documents: Int[np.ndarray, " span"],
    split: Split,
    seed: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    counts, names = np.bincount(labels, minlength=2), ("not borne out", "borne out")
    if not counts.min():
        raise PlanError(
            f"every span is {names[counts.argmax()]}; a detector needs spans that are and spans that are not"
        )
    n = len(np.unique(documents))
    if split == "grouped" and n < FOLDS:
        raise PlanError(
            f"{n} documents are too few for {FOLDS} folds in which each stays together; give more documents"
        )
    folds = _HALVES if split == "paper" else FOLDS
    if counts.min() < folds:
        raise PlanError(
            f"{counts.min()} spans that are {names[counts.argmin()]} are too few for {folds} folds; give more of them"
        )
    grouped = split == "grouped"
    parts = (StratifiedGroupKFold if grouped else StratifiedKFold)(
        folds, shuffle=True, random_state=seed % 2**32
    )
    for inside, outside in parts.split(labels, labels, documents if grouped else None):
        if len(np.unique(labels[inside])) < 2:
            raise PlanError(
                "too few documents have spans of either label to hold some out; give more documents"
            )
        yield inside, outside


def _calibrated(
    kind: Calibration, held: _HeldOut, labels: Int[np.ndarray, " span"]
) -> Float[np.ndarray, " span"]:
    """Probabilities of spans, calibrated on other folds."""
    found = Calibrator()(held.logit)
    if kind == "none":
        return found
    for fold in np.unique(held.fold):
        out = held.fold == fold
        if len(np.unique(labels[~out])) == 2:
            found[out] = Calibrator.fit(kind, held.logit[~out], labels[~out])(held.logit[out])
    return found


def _fitted(
    features: Float[np.ndarray, "span feature"],
    labels: Int[np.ndarray, " span"],
    scaling: Scaling = "none",
    c: float = 1.0,
) -> Linear:
    """The regression on features as they are; scaling only decides how the penalty weighs them."""
    from sklearn.linear_model import LogisticRegression

    mean, spread = np.zeros(features.shape[1]), np.ones(features.shape[1])
    if scaling == "standard":
        mean, spread = features.mean(0), features.std(0)
        spread = np.where(spread > 0, spread, 1.0)  # what never varies is left alone
    line: Any = LogisticRegression(max_iter=1000, C=c).fit((features - mean) / spread, labels)
    weights = line.coef_[0].astype(np.float64) / spread
    return Linear(weights, float(line.intercept_[0] - weights @ mean))
