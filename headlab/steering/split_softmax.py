"""Split-softmax (Li et al. 2024): hold a model to its system prompt by raising the attention paid to it.

With π_q the attention that query q gives the marked keys (the system prompt), a row's weights become

    a · π^k / π inside,    a · (1 − π^k) / (1 − π) outside,    0 < k ≤ 1:

the marked keys get π^k in all and the row still sums to 1. k = 1 changes nothing; the smaller k, the stronger. Rows
with π = 0 (before the marked text) or π = 1 stay as they are.

The formula is from memory: neither the paper's text nor code that computes it was read (the released repository holds
plots alone); which heads and layers the authors steer was not either: here all, by default.

π differs from row to row, so that no bias can do it: it is an edit of the pattern, row by row in blocks. Beside a sink
logit, π is the share of what the row gives to keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

from headlab.arguments import is_finite
from headlab.attention import Edit, HeadsLike, Where, apply
from headlab.errors import PlanError
from headlab.steering.base import Method
from headlab.steering.marks import Marks, SpansLike, read_spans
from headlab.steering.rewriting import raise_share
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True)
class SplitSoftmax(Method):
    """Raise the share of attention that marked spans of the prompt get.

    Attributes:
        spans: The marked text, such as the system prompt: text, or positions (start, stop); or a list of them for each
            prompt of a batch.
        heads: The heads to steer.
        k: Exponent of the share, above 0 and at most 1; 1 changes nothing.

    Raises:
        PlanError: Spans or k are of another form.
        PromptError: When the model is run: a span is not in the prompt.
    """

    spans: SpansLike
    heads: HeadsLike = "*.*"
    k: float = 0.9

    name: ClassVar[str] = "split_softmax"
    strength_field: ClassVar[str] = "k"
    strengths: ClassVar[tuple[float, ...]] = (0.9, 0.7, 0.5)

    def __post_init__(self) -> None:
        read_spans(self.spans)
        if not is_finite(self.k) or not 0 < self.k <= 1:
            raise PlanError(f"k={shown(self.k)} must be a number above 0 and at most 1")

    def edits(self, model: Model) -> Sequence[Edit]:
        """One edit of the pattern of the chosen heads."""
        marks = Marks(model, self.spans)
        last: tuple[Tensor | None, Tensor | None, Tensor] | None = None

        def split(pattern: Tensor, where: Where) -> Tensor:
            nonlocal last
            # The layers of a pass share one tensor of keys.
            if last is None or last[0] is not where.keys or last[1] is not where.prompt:
                last = (where.keys, where.prompt, marks.keys(where)[:, None, None])
            return raise_share(pattern, last[2].to(pattern.device), self.k)

        return (apply(self.heads, split, "pattern"),)

    def marking(self, spans: SpansLike) -> Self:
        """The same for other spans."""
        return self._with(spans=spans)
