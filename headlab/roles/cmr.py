"""Context maintenance and retrieval: the model of human free recall, and how near a profile over lags lies to it.

CMR (Polyn et al. 2009) as Ji-An et al. (NeurIPS 2024) compare it with attention heads. A list of N = 100 items is
studied in order; T, with T[i, i+1] = 1, leads from each to the next and the last to an absorbing state. Studying
gives the associations M = (I − (1 − β_enc) T)⁻¹ T. Recall starts in the context t of one of the first 20 items. It
draws an item with probability ∝ Mᵀ t, then moves the context to that item's:

    t ← norm((1 − β_rec) t + β_rec · norm((1 − γ) f + γ M f)),    f one-hot,

for up to 100 items or until the absorbing state is drawn. The conditional response probability (CRP) is how recalls
spread over lags, the place of an item less the place of the one before it (at first: of the start). It is not
corrected for opportunity.

The context takes too many values for a closed form, so recall is simulated. But where the authors count the lags of
1000 runs and average each run's shares, each step here adds the probabilities from which its item is drawn, pooled
over runs: the expectation of the count, at a small part of its noise. The two agree where runs are long; where β_enc
is small and β_rec large, runs end after a few items, and the authors' curves weigh the shorter ones more. With
β_rec = 0 the context never moves, so γ has no effect: all such curves are the same, and a fit gives γ as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from headlab.tasks import data_folder

#: Largest lag of a stored curve, and of those a profile is compared at.
MAX_LAG, FIT_LAG = 8, 5
LAGS = np.arange(-MAX_LAG, MAX_LAG + 1)
FIT_LAGS = np.arange(-FIT_LAG, FIT_LAG + 1)
#: The authors' grid.
BETA_ENC = np.arange(1, 21) / 20
BETA_REC = np.arange(21) / 20
GAMMA = np.arange(11) / 10
_ITEMS, _STARTS, _RECALLS, _RUNS = 100, 20, 100, 10
_FILE = "cmr_crp.npz"
_CHUNK = 512


def associations(beta_enc: float) -> Float[np.ndarray, "item item"]:
    """M = (I − (1 − β_enc) T)⁻¹ T: item j follows item i with (1 − β_enc)^(j − i − 1); the last item is absorbing."""
    place = np.arange(_ITEMS + 1)
    ahead = place - place[:, None]
    return np.where(ahead > 0, (1 - beta_enc) ** np.maximum(ahead - 1, 0), 0.0)


def crp(
    beta_enc: float, beta_rec: float, gamma: float, runs: int = _RUNS, seed: int = 0
) -> Float[np.ndarray, " lag"]:
    """Conditional response probability at lags −8 … 8, summing to 1: the mean over starts.

    Args:
        beta_enc: Drift of the context while studying, above 0 and up to 1.
        beta_rec: Drift of the context at recall, 0 to 1.
        gamma: Share of an item's studied context, against the item itself, in what its recall brings back.
        runs: Runs per start.
        seed: Seed of the draws, which are the same for all parameters, so that neighbouring curves differ smoothly.
    """
    study = associations(beta_enc)
    incoming = (1 - gamma) * np.eye(_ITEMS + 1) + gamma * study  # column f: what recall of f brings
    size = np.linalg.norm(incoming, axis=0)
    size[size == 0] = 1  # the first item follows nothing: it is never recalled
    contexts = (incoming / size).T.astype(np.float32)
    strengths = contexts @ study.astype(np.float32)  # Mᵀ t of each of them

    at = np.repeat(np.arange(_STARTS), runs)
    rng, zero = np.random.default_rng(seed), np.float32(0)
    t = np.eye(_ITEMS + 1, dtype=np.float32)[at]
    strength = t @ study.astype(np.float32)
    expected, going = np.zeros((len(at), len(LAGS))), np.arange(len(at))
    for _ in range(_RECALLS):
        below = np.cumsum(strength, 1)
        total = below[:, -1:]
        near = np.pad(strength[:, :_ITEMS], ((0, 0), (MAX_LAG, MAX_LAG)))
        expected[going] += np.take_along_axis(near, at[:, None] + np.arange(len(LAGS)), 1) / total
        draws = rng.random((len(expected), 1), np.float32)[going] * total
        item = (below > np.minimum(draws, np.nextafter(total, zero))).argmax(1)
        on = item < _ITEMS
        if not on.any():
            break
        going, at, t, strength = going[on], item[on], t[on], strength[on]
        # |t| = |what comes in| = 1, so their product alone gives the norm of the sum.
        row = np.arange(len(at))
        product = ((1 - gamma) * t[row, at] + gamma * strength[row, at]) / size[at]
        norm = np.sqrt((1 - beta_rec) ** 2 + beta_rec**2 + 2 * beta_rec * (1 - beta_rec) * product)
        keep = ((1 - beta_rec) / norm).astype(np.float32)[:, None]
        take = (beta_rec / norm).astype(np.float32)[:, None]
        t = keep * t + take * contexts[at]
        strength = keep * strength + take * strengths[at]
    by_start = expected.reshape(_STARTS, runs, -1).sum(1)
    return (by_start / by_start.sum(1, keepdims=True)).mean(0)


def write_grid(path: str | Path, tell: Callable[[str], None] = lambda text: None) -> None:
    """Simulate the whole grid, a few minutes on one core, and store it as ``data/cmr_crp.npz`` holds it."""
    curves = np.zeros((len(BETA_ENC), len(BETA_REC), len(GAMMA), len(LAGS)), np.float32)
    for i, beta_enc in enumerate(BETA_ENC):
        tell(f"β_enc = {beta_enc:.2f}")
        for j, beta_rec in enumerate(BETA_REC):
            for k, gamma in enumerate(GAMMA):
                curves[i, j, k] = crp(beta_enc, beta_rec, gamma)
    np.savez_compressed(path, crp=curves)


@cache
def grid() -> Float[np.ndarray, "beta_enc beta_rec gamma lag"]:
    """The stored curves, at lags −8 … 8."""
    with np.load(data_folder() / _FILE, allow_pickle=False) as file:
        return np.asarray(file["crp"], np.float64)


@dataclass(frozen=True)
class Fit:
    """The nearest CMR curve of each of some profiles.

    Attributes:
        distance: CMR distance; 0 is a perfect fit, 1 about what a flat line scores, infinite for a constant profile.
        beta_enc: Its drift while studying.
        beta_rec: Its drift at recall.
        gamma: Its share of studied context; NaN where β_rec = 0, which leaves it without effect.
        inverse_temperature: Units of the profile per unit of probability (the authors' 1/τ).
        curve: Number of the curve in the flattened grid.
    """

    distance: Float[np.ndarray, " profile"]
    beta_enc: Float[np.ndarray, " profile"]
    beta_rec: Float[np.ndarray, " profile"]
    gamma: Float[np.ndarray, " profile"]
    inverse_temperature: Float[np.ndarray, " profile"]
    curve: Int[np.ndarray, " profile"]


def fit(profiles: Float[np.ndarray, "*profile lag"]) -> Fit:
    """CMR distance (Ji-An et al. 2024): d = min over the grid of mean over lags of (ĉ − ã)² / Var(ã).

    ã = a − min a is the profile and ĉ the curve, renormalised over the window, less its least value and scaled to
    ã's greatest. So neither the offset nor the (positive) scale of a profile matters.

    Args:
        profiles: Any quantity at lags −5 … 5; a profile with NaN or infinity gets NaN throughout.
    """
    shape, flat = profiles.shape[:-1], profiles.reshape(-1, len(FIT_LAGS)).astype(np.float64)
    curves, heights = _scaled_curves()
    flat = np.where(np.isfinite(flat).all(1, keepdims=True), flat, np.nan)
    raised = flat - flat.min(1, keepdims=True)
    top = raised.max(1)
    shares = np.divide(raised, top[:, None], out=np.zeros_like(raised), where=top[:, None] > 0)
    squares = (curves**2).mean(1)
    best, least = np.zeros(len(flat), np.int64), np.full(len(flat), np.nan)
    for begin in range(0, len(flat), _CHUNK):
        some = shares[begin : begin + _CHUNK]
        error = squares - 2 * some @ curves.T / len(FIT_LAGS)
        best[begin : begin + _CHUNK] = error.argmin(1)
    least = ((curves[best] - shares) ** 2).mean(1)
    distance = np.divide(least, shares.var(1), out=np.full_like(least, np.inf), where=top > 0)
    unknown = np.isnan(top)
    i, j, k = np.unravel_index(best, grid().shape[:-1])
    numbers = {
        "distance": distance,
        "beta_enc": BETA_ENC[i],
        "beta_rec": BETA_REC[j],
        "gamma": np.where(BETA_REC[j] > 0, GAMMA[k], np.nan),
        "inverse_temperature": top / heights[best],
    }
    found = {
        name: np.where(unknown, np.nan, values).reshape(shape) for name, values in numbers.items()
    }
    return Fit(**found, curve=best.reshape(shape))


@cache
def _scaled_curves() -> tuple[Float[np.ndarray, "curve lag"], Float[np.ndarray, " curve"]]:
    """Curves over the window scaled to 0 … 1, and by how much."""
    window = grid()[..., MAX_LAG - FIT_LAG : MAX_LAG + FIT_LAG + 1].reshape(-1, len(FIT_LAGS))
    window = window / window.sum(1, keepdims=True)
    raised = window - window.min(1, keepdims=True)
    heights = raised.max(1)
    return raised / heights[:, None], heights
