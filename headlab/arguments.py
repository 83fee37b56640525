"""Checks of arguments that many procedures share; numpy's numbers are as good as Python's."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from headlab.errors import PlanError


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """A whole number; True and False are none.

    Raises:
        PlanError: It is not one, or too small.
    """
    if not is_integer(value) or value < least:
        raise PlanError(f"{name}={value!r:.60} must be a whole number of at least {least}")
    return int(value)


def finite_number(value: Any, name: str) -> float:
    """A finite number; True and False are none.

    Raises:
        PlanError: It is not one.
    """
    if not is_finite(value):
        raise PlanError(f"{name}={value!r:.60} must be a finite number")
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
    """A seed: a whole number of at least 0.

    Raises:
        PlanError: It is not one.
    """
    return whole_number(seed, "seed")
