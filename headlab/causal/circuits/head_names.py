"""A set of heads in whatever way it is given: names, pairs of numbers, a circuit, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headlab.attention import Head, parse_heads
from headlab.causal.circuits.circuit import Circuit
from headlab.errors import HeadError

if TYPE_CHECKING:
    from headlab.model import Model


def heads_of(what: Any, model: Model) -> tuple[Head, ...]:
    """The heads of a circuit, or those that names name, sorted; none where nothing is named.

    Raises:
        HeadError: A name cannot be read, or the model has no such head.
        PlanError: The circuit is of a model of another shape.
    """
    if isinstance(what, Circuit):
        what.check(model)
        return what.heads
    if not isinstance(what, Iterable):
        raise HeadError(f"{what!r:.60} is no set of heads; give names such as 'L0H1', or a Circuit")
    if not isinstance(what, str | tuple):
        what = list(what)
    return parse_heads(what, model.spec) if what or isinstance(what, str) else ()
