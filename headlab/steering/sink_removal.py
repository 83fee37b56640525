"""Sink removal and redistribution: take weight off keys that draw attention without being read, such as the first.

The weights of the sink keys are multiplied by p, and what that frees goes

* ``to="row"``: to the whole row, by renormalising it. This is adding ln p to the sinks' scores, so it is a bias: the
  fast path;
* ``to="others"``: to the row's other keys in proportion to their weights, so that a sink keeps p times what it had. The
  factor differs from row to row, so that this is an edit of the pattern, row by row in blocks;
* ``to=[spans]``: likewise, to marked keys alone.

The last is what VAR does with image tokens (Kang et al. 2025, whose code was read: p = 0.6, freed weight to the image
tokens that are no sinks). VAR's own choice of sinks, by massive activations, and of heads, query by query, is not part
of it. Rows in which the receiving keys have no weight stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from headlab.arguments import is_finite, whole_number
from headlab.attention import Edit, HeadsLike, Where, apply
from headlab.attention.edits import as_positions
from headlab.errors import PlanError
from headlab.steering.base import Method
from headlab.steering.marks import Marks, SpansLike, read_spans
from headlab.steering.rewriting import move
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True)
class SinkRemoval(Method):
    """Multiply the weights of sink keys by p and give away what that frees.

    Attributes:
        heads: The heads to steer.
        p: Factor, from 0 to 1 (above 0 with ``to="row"``); 1 changes nothing.
        sinks: How many tokens at the beginning are sinks, or their positions, counted from 0.
        to: Who gets what is freed: ``"row"``, ``"others"``, or marked spans; a sink among them gets nothing.

    Raises:
        PlanError: A field is of another form.
        PromptError: When the model is run: a span is not in the prompt.
    """

    heads: HeadsLike = "*.*"
    p: float = 0.6
    sinks: int | tuple[int, ...] = 1
    to: Literal["row", "others"] | SpansLike = "row"

    name: ClassVar[str] = "sink_removal"
    strength_field: ClassVar[str] = "p"
    strengths: ClassVar[tuple[float, ...]] = (0.6, 0.3, 0.1)

    def __post_init__(self) -> None:
        if not is_finite(self.p) or not 0 <= self.p <= 1:
            raise PlanError(f"p={shown(self.p)} must be a number from 0 to 1")
        if self.to == "row" and self.p == 0:
            raise PlanError("p=0 would leave the first row nothing to renormalise; use to='others'")
        if isinstance(self.to, str) and self.to not in ("row", "others"):
            raise PlanError(f"to={shown(self.to)} must be 'row', 'others' or a list of spans")
        if not isinstance(self.to, str):
            read_spans(self.to)
        self._positions()

    def edits(self, model: Model) -> Sequence[Edit]:
        """One bias, or one edit of the pattern."""
        positions = torch.tensor(self._positions())
        if self.to == "row":
            penalty = math.log(self.p)

            def weigh(bias: Tensor, where: Where) -> Tensor:
                return bias + penalty * _at(where, positions).to(bias)

            return (apply(self.heads, weigh, "bias"),)
        marks = None if isinstance(self.to, str) else Marks(model, self.to)

        def give(pattern: Tensor, where: Where) -> Tensor:
            sinks = _at(where, positions)
            target = ~sinks
            if marks is not None:
                target = target & marks.keys(where)[:, None, None].to(target.device)
            return move(pattern, sinks, target, self.p)

        return (apply(self.heads, give, "pattern"),)

    def marking(self, spans: SpansLike) -> Self:
        """The same, giving to other spans; where it gives to no marked text, the same."""
        return self if isinstance(self.to, str) else self._with(to=spans)

    def _positions(self) -> tuple[int, ...]:
        if isinstance(self.sinks, tuple | list):
            found = as_positions(self.sinks) or ()
            if not found or min(found) < 0:
                raise PlanError(f"sinks={shown(self.sinks)} must be positions of at least 0")
            return found
        return tuple(range(whole_number(self.sinks, "sinks", least=1)))


def _at(where: Where, positions: Tensor) -> Tensor:
    """Which keys stand at these positions, [batch, 1, 1, key]."""
    assert where.keys is not None
    return torch.isin(where.keys, positions.to(where.keys.device))[:, None, None]
