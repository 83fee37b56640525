"""Head steering vectors: to what chosen heads compute, add the mean difference between two sets of prompts.

For a head h, v_h = mean z_h over the positive prompts less the mean over the negative ones, taken at each prompt's last
token or over all tokens; steering adds α v_h to z_h. It is the shape of inference-time intervention (Li et al. 2023),
restricted to heads, and of the steering step proposed for translation heads (Lasnier et al. 2026, arXiv 2602.04613;
formula unverified, see :mod:`headlab.steering.translation`). The edit is one of z: the fast path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import Edit, Head, HeadsLike, Where, apply, keep, parse_heads
from headlab.errors import PlanError
from headlab.prompts import Prompt
from headlab.steering.learned import Learned, head_names, shape_of
from headlab.steering.rows import Rows, acts, checked_rows

if TYPE_CHECKING:
    from headlab.model import Model


@dataclass(frozen=True, eq=False)
class HeadVectors(Learned):
    """A vector added to z of each chosen head.

    Attributes:
        vectors: One row per head, in the order of ``heads``, [head, d_value].
        factor: What they are multiplied by; below 0 steers the other way.
        rows: Where they are added: ``"from_end"``, ``"prompt_end"`` or ``"all"``.
    """

    vectors: Float[Tensor, "head d_value"]
    factor: float = 1.0
    rows: Rows = "from_end"

    name: ClassVar[str] = "head_vectors"
    sizes: ClassVar[dict[str, tuple[str, ...]]] = {"vectors": ("heads", "d_value")}
    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (1.0, 2.0, 4.0)

    def __post_init__(self) -> None:
        checked_rows(self.rows)
        if not bool(torch.isfinite(self.vectors).all()):
            raise PlanError("the head vectors hold NaN or infinity")

    @classmethod
    def fit(
        cls,
        model: Model,
        positive: Prompt,
        negative: Prompt,
        heads: HeadsLike = "*.*",
        *,
        over: Literal["last", "all"] = "last",
        rows: Rows = "from_end",
        factor: float = 1.0,
    ) -> Self:
        """Learn the vectors from prompts with and without what is wanted.

        Args:
            model: The model.
            positive: Prompts with it.
            negative: Prompts without it.
            heads: The heads.
            over: Mean over each prompt's last token, or over all tokens of all prompts.
            rows: Where steering adds the vectors.
            factor: Strength.

        Raises:
            HeadError: A head does not exist.
            PlanError: ``over`` or ``rows`` is something else.
        """
        chosen = parse_heads(heads, model.spec)
        difference = mean_z(model, positive, chosen, over) - mean_z(model, negative, chosen, over)
        return cls(head_names(chosen), shape_of(model), difference, factor, rows)

    def edits(self, model: Model) -> Sequence[Edit]:
        """One addition to z."""
        heads = self.check_model(model)
        row_of = {head: at for at, head in enumerate(heads)}

        def push(z: Tensor, where: Where) -> Tensor:
            chosen = [row_of[Head(where.layer, head)] for head in where.heads]
            moved = z + (self.factor * self.vectors[chosen]).to(z)
            at = acts(self.rows, where)
            return moved if at is None else torch.where(at[:, :, None, None], moved, z)

        return (apply(heads, push, "z"),)

    def randomised(self, seed: int) -> Self:
        """Random directions, each of its head's norm."""
        return self._with(vectors=random_like(self.vectors, seed))


def mean_z(
    model: Model, prompts: Prompt, heads: Sequence[Head], over: Literal["last", "all"] = "last"
) -> Float[Tensor, "head d_value"]:
    """Mean z of heads over prompts, at each prompt's last token or over all tokens, run without edits.

    Raises:
        PlanError: ``over`` is something else, or the heads' values differ in width.
    """
    if over not in ("last", "all"):
        raise PlanError(f"over={over!r} must be 'last' or 'all'")
    widths = {model.spec.layers[head.layer].d_value for head in heads}
    if len(widths) > 1:
        raise PlanError(
            f"the heads' values differ in width: {sorted(widths)}; take heads of one width"
        )
    ids = model.tokens(prompts)
    layers = sorted({head.layer for head in heads})
    sums = {layer: torch.zeros(()) for layer in layers}
    n = 0
    positions = [-1] if over == "last" else None
    with model.plain():
        for row in ids:  # one at a time: z of all layers is kept
            kept = keep.tensors("z", layers=layers, positions=positions)
            trace = model.trace(row[row >= 0], keep=[kept], logits="none")
            for layer in layers:
                z = trace.tensor("z", layer)[0].double()
                sums[layer] = sums[layer].to(z) + z.sum(0)
            n += 1 if over == "last" else int((row >= 0).sum())
    return torch.stack([sums[head.layer][head.head] / n for head in heads]).float().cpu()


def random_like(vectors: Float[Tensor, "*row width"], seed: int) -> Float[Tensor, "*row width"]:
    """Vectors in random directions, each row of the same norm as in ``vectors``."""
    drawn = torch.randn(
        vectors.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    norms = vectors.double().norm(dim=-1, keepdim=True)
    return (drawn / drawn.norm(dim=-1, keepdim=True) * norms).to(vectors)
