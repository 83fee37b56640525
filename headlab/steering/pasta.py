"""PASTA (Zhang et al. 2023): emphasise marked text by weighing down everything else in chosen heads.

Of the keys of a prompt that lie outside the marked ones G, every score gets log α, so that after the softmax their
weights are multiplied by α and the row renormalised (read in the authors' code, QingruZhang/PASTA: ``exclude``, α =
0.01; the paper's text was not). Generated keys keep their weight, as there. Where several spans are marked, G is
their union; the authors' code penalises each span once for every other one, which is not what the paper says.

The bias is the same for every query, so it is one at the site ``bias``: the fast path, for prompt and generation alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from jaxtyping import Bool
from torch import Tensor

from headlab.arguments import is_finite
from headlab.attention import Edit, HeadsLike, Where, apply
from headlab.errors import PlanError
from headlab.steering.base import Method
from headlab.steering.marks import Marks, SpansLike, read_spans
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True)
class Pasta(Method):
    """Emphasise marked spans of the prompt.

    Attributes:
        spans: What to emphasise: text, or positions (start, stop); or a list of them for each prompt of a batch.
        heads: The heads to steer; the paper takes some, chosen by :func:`profile`.
        alpha: What weights outside the spans are multiplied by, above 0; 1 changes nothing, below 1 emphasises. The
            paper's 0.01 is for a few profiled heads: on every head of a small model it garbles the text, and 0.1 to 0.5
            do better.

    Raises:
        PlanError: Spans or alpha are of another form.
        PromptError: When the model is run: a span is not in the prompt.
    """

    spans: SpansLike
    heads: HeadsLike = "*.*"
    alpha: float = 0.01

    name: ClassVar[str] = "pasta"
    strength_field: ClassVar[str] = "alpha"
    strengths: ClassVar[tuple[float, ...]] = (0.5, 0.1, 0.01)

    def __post_init__(self) -> None:
        read_spans(self.spans)
        if not is_finite(self.alpha) or self.alpha <= 0:
            raise PlanError(f"alpha={shown(self.alpha)} must be a number above 0")

    def edits(self, model: Model) -> Sequence[Edit]:
        """One bias on the scores of the chosen heads."""
        marks, penalty = Marks(model, self.spans), math.log(self.alpha)
        last: tuple[Tensor | None, Tensor | None, Tensor] | None = None

        def weigh(bias: Tensor, where: Where) -> Tensor:
            nonlocal last
            # The layers of a pass share one tensor of keys.
            if last is None or last[0] is not where.keys or last[1] is not where.prompt:
                last = (where.keys, where.prompt, penalty * _outside(marks, where).to(bias))
            return bias + last[2].to(bias)[:, None, None, :]

        return (apply(self.heads, weigh, "bias"),)

    def marking(self, spans: SpansLike) -> Self:
        """The same for other spans."""
        return self._with(spans=spans)


def _outside(marks: Marks, where: Where) -> Bool[Tensor, "batch key"]:
    """Which keys are of the prompt, and not marked."""
    marked = marks.keys(where)
    assert where.keys is not None
    assert where.lengths is not None
    lengths = where.lengths.to(where.keys.device)[:, None]
    return (where.keys >= 0) & (where.keys < lengths) & ~marked
