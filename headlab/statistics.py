"""Intervals and p-values over prompts: bootstrap, sign flips, and correction for how many were tried.

The prompt is the unit: tokens of one prompt are not independent.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

RESAMPLES = 2000
_EXACT = 17
_CHUNK = 1 << 14


def bootstrap_interval(
    values: Float[np.ndarray, "prompt head"], seed: int, level: float = 0.95
) -> tuple[Float[np.ndarray, " head"], Float[np.ndarray, " head"]]:
    """Percentile bootstrap interval of each column's mean, over prompts; NaN entries are left out."""
    rng = np.random.default_rng(seed)
    prompts = len(values)
    draws = rng.integers(prompts, size=(RESAMPLES, prompts))
    weights = np.zeros((RESAMPLES, prompts))
    np.add.at(weights, (np.arange(RESAMPLES)[:, None], draws), 1)
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = weights @ np.where(known, values, 0) / (weights @ known)
    tail = (1 - level) / 2 * 100
    low, high = np.nanpercentile(means, [tail, 100 - tail], axis=0)
    return low, high


def sign_flip_p(
    difference: Float[np.ndarray, "prompt head"], seed: int
) -> Float[np.ndarray, " head"]:
    """One-sided p-value that the mean difference is positive by chance, flipping each prompt's sign.

    NaN entries are left out; a column without entries has p-value NaN.
    """
    prompts, heads = difference.shape
    known = ~np.isnan(difference)
    filled = np.where(known, difference, 0.0)
    observed = filled.sum(0)
    exact = prompts <= _EXACT
    flips = 2**prompts if exact else 2**_EXACT - 1
    rng = np.random.default_rng(seed)
    at_least = np.zeros(heads)
    tolerance = 1e-12 * np.abs(filled).sum(0)
    for start in range(0, flips, _CHUNK):
        count = min(_CHUNK, flips - start)
        if exact:
            bits = np.arange(start, start + count)[:, None] >> np.arange(prompts) & 1
        else:
            bits = rng.integers(2, size=(count, prompts))
        at_least += ((1.0 - 2.0 * bits) @ filled >= observed - tolerance).sum(0)
    # The unflipped signs are among the exact flips; drawn ones leave them out, so they are added.
    p = at_least / flips if exact else (at_least + 1) / (flips + 1)
    return np.where(known.any(0), p, np.nan)


def corrected(p: Float[np.ndarray, "*any"]) -> Float[np.ndarray, "*any"]:
    """p-values corrected by Benjamini and Hochberg; NaN stays NaN and does not count."""
    from scipy.stats import false_discovery_control

    q = np.full(p.shape, np.nan)
    known = ~np.isnan(p)
    if known.any():
        q[known] = false_discovery_control(p[known])
    return q


def p_among(
    values: Float[np.ndarray, "*any"], null: Float[np.ndarray, " draw"]
) -> Float[np.ndarray, "*any"]:
    """One-sided p-value of each value against draws of its null, ``(1 + #{draw ≥ value}) / (1 + draws)``; NaN stays."""
    at_least = len(null) - np.searchsorted(np.sort(null), values, side="left")
    return np.where(np.isnan(values), np.nan, (1 + at_least) / (1 + len(null)))


def random_rotations(
    n: int, width: int, rng: np.random.Generator
) -> Float[np.ndarray, "n width width"]:
    """Orthogonal matrices, uniform over all (Haar): QR of Gaussian ones, with the signs of R's diagonal taken out
    (Mezzadri 2007); without that, their traces lean to one side.
    """
    q, r = np.linalg.qr(rng.standard_normal((n, width, width)))
    turned: np.ndarray = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None]
    return turned
