"""How numbers become colours, axes and text on the page; ``assets/base.js`` has the same rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from headlab.roles.scores import RoleInfo

STEPS = 9
"""Colour classes on either side of zero."""


@dataclass(frozen=True)
class Scale:
    """Axis and colour range of one role.

    Attributes:
        low: Left end of the score axis.
        high: Right end of the score axis, never below the role's ``min_score``.
        effect: Effect that gets the strongest colour. Never below what a clear claim would show
            (twice ``min_effect``, and ``min_score``), so that noise stays pale.
        decimals: Digits after the point that suit the role's numbers.
    """

    low: float
    high: float
    effect: float
    decimals: int

    @classmethod
    def of(cls, rows: pd.DataFrame, info: RoleInfo) -> Scale:
        """Scale of a role from its rows; missing and infinite numbers do not count."""
        values = _finite(rows[["score", "ci_low", "ci_high", "null_mean"]])
        low = min(0.0, float(values.min())) if values.size else 0.0
        high = max(0.0, float(values.max())) if values.size else 1.0
        high = max(high, info.min_score) if math.isfinite(info.min_score) else high
        if high <= low:
            high = low + 1.0
        effects = np.abs(_finite(rows[["effect"]]))
        wanted = [2 * abs(info.min_effect), abs(info.min_score)]
        least = max((value for value in wanted if math.isfinite(value)), default=0.0)
        effect = max(float(effects.max()) if effects.size else 0.0, least) or 1.0
        magnitude = math.floor(math.log10(max(high, -low)))
        return cls(low, high, effect, min(max(2 - magnitude, 0), 8) if magnitude else 3)

    def step(self, effect: float) -> int:
        """Colour class of an effect: 0 around zero, up to ±``STEPS``."""
        return max(-STEPS, min(STEPS, round(STEPS * effect / self.effect)))

    def place(self, value: float, width: float) -> float:
        """Where a value lies on an axis of a width, kept within it."""
        share = (value - self.low) / (self.high - self.low)
        return round(width * min(max(share, 0.0), 1.0), 2)

    def text(self, value: float) -> str:
        """A score, null or effect as text."""
        if not math.isfinite(value):
            return "–"
        return f"{value:.{self.decimals}f}".replace("-", "\N{MINUS SIGN}")


def small(value: float) -> str:
    """A probability as text: three decimals, or a power of ten where they would show nothing."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or value >= 0.001:
        return f"{value:.3f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e\N{MINUS SIGN}{abs(int(exponent))}"


def duration(seconds: float) -> str:
    """Seconds as people say them: ``"8.2 s"``, ``"3 min 12 s"``, ``"2 h 5 min"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def count(number: int) -> str:
    """Parameters as people say them: ``"134.5 M"``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _finite(frame: pd.DataFrame) -> np.ndarray:
    values = frame.to_numpy(dtype="float64").ravel()
    return values[np.isfinite(values)]
