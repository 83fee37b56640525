"""Temporal value edits (Park et al. 2025): write what a head carries of one prompt into its values on another.

To the value of chosen heads at the last token of a marked phrase (the time, in the paper) is added c times the head's
mean value over all tokens of a source prompt, such as one with the same year and another subject. Read in the authors'
code (dmis-lab/TemporalHead), which edits values before attention, with c of 1, 3 and 6, and counts a success where the
first token changes and the source's object appears among 50 greedy tokens.

Values belong to key/value heads. An edit here is of query heads, so the others of a group keep their values;
``whole_group=True`` edits all query heads of the groups, as the authors' code does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import Edit, Head, HeadsLike, Where, apply, keep, parse_heads
from headlab.errors import PlanError
from headlab.prompts import Prompt
from headlab.steering.head_vectors import random_like
from headlab.steering.learned import Learned, head_names, shape_of
from headlab.steering.marks import Marks, SpansLike, read_spans

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True, eq=False)
class ValueEdit(Learned):
    """Values of a source prompt added at the last token of marked spans.

    Attributes:
        values: Mean value over the source's tokens, in the order of ``heads``, [head, d_value]; with a source for each
            prompt that will be run, [prompt, head, d_value].
        spans: The phrases at whose last tokens they are added.
        factor: c.
    """

    values: Float[Tensor, "*prompt head d_value"]
    spans: SpansLike
    factor: float = 1.0

    name: ClassVar[str] = "value_edit"
    sizes: ClassVar[dict[str, tuple[str, ...]]] = {"values": ("heads", "d_value")}
    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (1.0, 3.0, 6.0)

    def __post_init__(self) -> None:
        read_spans(self.spans)
        if not bool(torch.isfinite(self.values).all()):
            raise PlanError("the values to be added hold NaN or infinity")

    @classmethod
    def fit(
        cls,
        model: Model,
        source: Prompt,
        heads: HeadsLike,
        spans: SpansLike,
        *,
        whole_group: bool = False,
        factor: float = 1.0,
    ) -> Self:
        """Take the heads' mean values over a source prompt.

        Args:
            model: The model.
            source: One prompt, or one for each prompt that will be run.
            heads: The heads.
            spans: Phrases of the prompts to be steered.
            whole_group: Whether to edit every query head that shares a value head with one of these.
            factor: Strength.

        Raises:
            HeadError: A head does not exist.
            PlanError: The heads' values differ in width.
        """
        chosen = parse_heads(heads, model.spec)
        if whole_group:
            chosen = tuple(
                dict.fromkeys(
                    Head(layer, first + at)
                    for layer, head in chosen
                    for group in [_group(model, layer)]
                    for first in [head // group * group]
                    for at in range(group)
                )
            )
        if len({model.spec.layers[head.layer].d_value for head in chosen}) > 1:
            raise PlanError("the heads' values differ in width; take heads of one width")
        layers = sorted({head.layer for head in chosen})
        means = []
        with model.plain():
            for row in model.tokens(source):
                kept = keep.tensors("v", layers=layers)
                trace = model.trace(row[row >= 0], keep=[kept], logits="none")
                own = [trace.of_head("v", head)[0].double().mean(0) for head in chosen]
                means.append(torch.stack(own).float().cpu())
        values = means[0] if len(means) == 1 else torch.stack(means)
        return cls(head_names(chosen), shape_of(model), values, spans, factor)

    def edits(self, model: Model) -> Sequence[Edit]:
        """One addition to the values."""
        heads = self.check_model(model)
        row_of = {head: at for at, head in enumerate(heads)}
        marks = Marks(model, self.spans, last_only=True)

        def push(v: Tensor, where: Where) -> Tensor:
            chosen = [row_of[Head(where.layer, head)] for head in where.heads]
            at = marks.positions(where)[:, :, None, None]
            added = self.values if self.values.dim() == 2 else self._of_prompts(where)
            return torch.where(at, v + (self.factor * added[..., chosen, :]).to(v), v)

        return (apply(heads, push, "v"),)

    def _of_prompts(self, where: Where) -> Float[Tensor, "batch 1 head d_value"]:
        n = where.n_prompts if where.prompts is not None else len(where.positions)
        if n != len(self.values):
            raise PlanError(
                f"value_edit has {len(self.values)} sources, but {n} prompts are run; give one source, or one for each"
            )
        return where.rows_of(self.values)[:, None]

    def marking(self, spans: SpansLike) -> Self:
        """The same at other phrases."""
        return self._with(spans=spans)

    def randomised(self, seed: int) -> Self:
        """Random directions, each of its head's norm."""
        return self._with(values=random_like(self.values, seed))


def _group(model: Model, layer: int) -> int:
    return model.spec.layers[layer].n_heads // model.spec.layers[layer].n_kv_heads
