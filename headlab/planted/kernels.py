"""Position kernels: attention scores that depend on the distance between query and key alone.

A rotary pair of frequency ω (Llama's RoPE, or a sine/cosine pair of GPT-2's position embedding)
lets a head give a key at distance δ the score ``a·cos(ωδ) + b·sin(ωδ)``. A sum of a few pairs can
single one distance out. Which amplitudes do that for every distance a context allows is a small
linear programme, solved here exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from headlab.errors import PlanError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Kernel:
    """Scores in nats by distance: ``score(δ) = Σ_i cos_i·cos(ω_i δ) + sin_i·sin(ω_i δ)``."""

    frequencies: Array
    cos: Array
    sin: Array

    def __call__(self, distance: Array) -> Array:
        """The score at each distance, in tokens."""
        return _features(self.frequencies, distance) @ np.concatenate([self.cos, self.sin])


def offset_kernel(frequencies: Array, n: int, offset: int = 1, leak: float = 0.02) -> Kernel:
    """The cheapest kernel under which one distance beats every other distance below ``n``.

    Scaled so that all others together hold at most ``leak`` times the weight of the token ``offset`` back.
    """
    features = _features(frequencies, np.arange(n))
    above = features[offset] - np.delete(features, offset, axis=0)
    size = features.shape[1]
    amplitudes = _solve(
        cost=np.ones(2 * size),
        at_most=np.hstack([-above, above]),
        limit=-np.ones(len(above)),
        what=f"distance {offset}",
        n=n,
    )
    weights = amplitudes[:size] - amplitudes[size:]
    weights = weights * _scale_for(above @ weights, leak)
    return Kernel(frequencies, *np.split(weights, 2))


def not_self_kernel(frequencies: Array, n: int, margin: float = 4.0) -> tuple[Kernel, float]:
    """A kernel that scores the query's own position ``margin`` nats below every earlier one.

    Also returned is its spread: how far the best distance may stand above the worst one other than
    0. That is what a content match has to overcome, so the spread is what the programme makes
    small.
    """
    features = _features(frequencies, np.arange(n))
    above = features[1:] - features[0]
    size = features.shape[1]
    column = np.ones((len(above), 1))
    amplitudes = _solve(
        # A little weight on the amplitudes keeps them from growing for a sliver of spread.
        cost=np.r_[np.full(2 * size, 0.05), 1.0],
        at_most=np.block([[-above, above, 0.0 * column], [above, -above, -column]]),
        limit=np.r_[-np.ones(len(above)), np.zeros(len(above))],
        what="duplicate_token",
        n=n,
    )
    weights = margin * (amplitudes[:size] - amplitudes[size : 2 * size])
    return Kernel(frequencies, *np.split(weights, 2)), margin * float(amplitudes[-1] - 1.0)


def _features(frequencies: Array, distance: NDArray[np.generic]) -> Array:
    angle = np.outer(np.asarray(distance, dtype=np.float64), frequencies)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def _solve(cost: Array, at_most: Array, limit: Array, what: str, n: int) -> Array:
    found = linprog(cost, A_ub=at_most, b_ub=limit, bounds=(0, None))
    if found.status != 0:
        raise PlanError(
            f"no position kernel for {what} tells {n} distances apart: use a smaller max_context"
        )
    return np.asarray(found.x)


def _scale_for(gaps: Array, leak: float) -> float:
    scale = 1.0
    while np.exp(-scale * gaps).sum() > leak:
        scale += 0.1
    return scale
