"""Checks of arguments that many procedures share; numpy's numbers are as good as Python's."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from headlab.errors import PlanError
from headlab.text import shown


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """A whole number; True and False are none.

    Raises:
        PlanError: It is not one, or too small.
    """
    if not is_integer(value) or value < least:
        raise PlanError(f"{name}={shown(value)} must be a whole number of at least {least}")
    return int(value)


def finite_number(value: Any, name: str) -> float:
    """A finite number; True and False are none.

    Raises:
        PlanError: It is not one.
    """
    if not is_finite(value):
        raise PlanError(f"{name}={shown(value)} must be a finite number")
    return float(value)


def is_integer(value: Any) -> bool:
    """Whether something is a whole number; True, False and arrays are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether something is a finite number that a float can hold; True and False are not."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def seed_number(seed: Any) -> int:
    """A seed: a whole number from 0 to 2⁶³ − 1, which numpy and torch both take.

    Raises:
        PlanError: It is not one.
    """
    if whole_number(seed, "seed") >= 1 << 63:
        raise PlanError(f"seed={shown(seed)} must be below 2⁶³")
    return int(seed)


def count(value: Any, name: str, least: int = 1, most: int = 1_000_000) -> int:
    """How many of something to draw or to take: a whole number that can be worked through.

    Raises:
        PlanError: It is not one, too small or too large.
    """
    if whole_number(value, name, least) > most:
        raise PlanError(f"{name}={shown(value)} must be at most {most:,}")
    return int(value)


def rate(value: Any, name: str = "alpha") -> float:
    """A false-discovery rate: above 0 and below 1.

    Raises:
        PlanError: It is not one.
    """
    if not is_finite(value) or not 0 < value < 1:
        raise PlanError(f"{name}={shown(value)} must be a number above 0 and below 1")
    return float(value)
