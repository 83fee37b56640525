"""When a mean is known well enough to stop sampling it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headlab.arguments import finite_number
from headlab.errors import PlanError


@dataclass(frozen=True)
class Bernstein:
    """Stops sampling a player once its value is certainly not below a threshold (or certainly below it).

    With n samples of standard deviation s and range R, the mean is within s·√(2 ln(3/δ)/n) + 3R·ln(3/δ)/n of the value
    with probability 1 − δ (empirical Bernstein; Audibert et al. 2009). The t-th look spends δ/(t(t+1)), so that the
    bound holds at all looks together.

    Attributes:
        above: The threshold; Held & Yang take −0.01 of accuracy.
        delta: Probability that a player's bound ever fails.
        span: Largest possible less smallest possible marginal: 2 for a metric in [0, 1].
        as_published: The bound of Held & Yang's code: s·√(2 ln(3/δ))/n + 3R·ln(3/δ)/n, δ unspent, lower side only.
            Too narrow; for comparison with their figures (δ = 0.1, R = 1).
    """

    above: float = -0.01
    delta: float = 0.1
    span: float = 2.0
    as_published: bool = False

    def __post_init__(self) -> None:
        for name in ("above", "delta", "span"):
            finite_number(getattr(self, name), name)
        if not 0 < self.delta < 1 or not self.span > 0:
            raise PlanError(
                f"delta={self.delta!r} must lie between 0 and 1 and span={self.span!r} above 0"
            )

    def width(self, deviation: np.ndarray, n: np.ndarray, look: int) -> np.ndarray:
        """Half the width of the interval around the mean of ``n`` samples at the ``look``-th look, from 1."""
        spent = self.delta if self.as_published else self.delta / (look * (look + 1))
        log = np.log(3 / spent)
        root = n if self.as_published else np.sqrt(n)
        return deviation * np.sqrt(2 * log) / root + 3 * self.span * log / n

    def done(self, mean: np.ndarray, deviation: np.ndarray, n: np.ndarray, look: int) -> np.ndarray:
        """Which players need no more samples, [player]; never with fewer than two."""
        with np.errstate(invalid="ignore", divide="ignore"):
            width = self.width(deviation, n, look)
            certain = mean - width > self.above
            if not self.as_published:
                certain |= mean + width < self.above
        return certain & (n >= 2)
