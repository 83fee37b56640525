"""Taking massive values away: the disruption test of Jin et al. 2025 (see :mod:`.massive_values`).

In every head, the dimension of queries and keys with the largest M is set to its mean over the sequence, while the
prompt is read and not while tokens are generated; as a control, the dimension with the smallest M, or one drawn at
random. The paper reports that tasks which need the context collapse, and facts from the weights mostly survive.

Two things differ from the authors' code as shipped, where the switch is off: it puts the *maximum* over the sequence,
not the mean, in the place of massive dimensions, but the mean in that of the control, so the two differ in more than
which dimension is changed; here both are the mean, as the paper says. And it writes into the tensor the cache holds,
so that generated tokens read changed keys; here they read the model's own unless ``cached=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headlab.arguments import finite_number, seed_number, whole_number
from headlab.attention import Edit, HeadsLike, Where
from headlab.attention.edits import Operation
from headlab.errors import PlanError
from headlab.models import ModelSpec

Which: TypeAlias = Literal["largest", "smallest", "random"]
KINDS: tuple[Which, ...] = ("largest", "smallest", "random")


def disrupt(
    which: Which = "largest",
    *,
    sites: Sequence[Literal["q", "k"]] = ("q", "k"),
    count: int | Literal["massive"] = 1,
    factor: float = 5.0,
    heads: HeadsLike = "*.*",
    skip: int = 1,
    cached: bool = False,
    seed: int = 0,
) -> tuple[Edit, ...]:
    """Edits that set dimensions of q and k to their mean over the prompt, each head's own, anew for each prompt.

    They work under ``model.edit`` for traces and generation. M is taken of the very prompt that runs.

    ::

        with model.edit(*hl.parameters.disrupt("largest")):
            text = model.generate("The capital of France is", max_new_tokens=5)


    Args:
        which: The dimensions with the largest M, with the smallest, or any but those with the largest, drawn once for
            each layer and head (of keys, key/value head).
        sites: ``"q"``, ``"k"`` or both.
        count: How many dimensions of each head; ``"massive"``: as many as have M above ``factor`` times its mean, for
            the controls too, which may be none.
        factor: What ``count="massive"`` counts.
        heads: The heads; all by default.
        skip: Positions at the start that take no part: neither in M and the mean nor in what is changed.
        cached: Whether tokens generated later read the prompt's keys as changed. (A sliding window's cache, once it has
            dropped keys, has another mean.)
        seed: Seed of the random dimensions.

    Raises:
        PlanError: An argument does not fit; when run, that the module runs without headlab, so that a prompt's length
            is unknown.
    """
    if which not in KINDS:
        raise PlanError(f"which={which!r} must be one of {', '.join(KINDS)}")
    if isinstance(sites, str) or not sites or not set(sites) <= {"q", "k"}:
        raise PlanError(f"sites={sites!r} must be ('q',), ('k',) or both")
    number = None if count == "massive" else whole_number(count, "count", 1)
    factor, skip = finite_number(factor, "factor"), whole_number(skip, "skip")
    change = _Change(which, number, factor, skip, cached, seed_number(seed))
    return tuple(
        Edit(heads, site, lambda model, _, site=site: change.at(site, model.spec))  # type: ignore[misc]
        for site in sites
    )


@dataclass(frozen=True)
class _Change:
    which: Which
    count: int | None
    factor: float
    skip: int
    cached: bool
    seed: int

    def at(self, site: str, spec: ModelSpec) -> Operation:
        """The operation at one site."""

        def operation(x: Tensor, where: Where) -> Tensor:
            if where.lengths is None:
                raise PlanError(
                    "massive values are disrupted in the prompt only, so its length must be known: run the model "
                    "through headlab's trace, logits or generate"
                )
            lengths = where.lengths.to(x.device)[:, None]
            # Decoding steps have positions beyond the prompt in every row; padding on the right never has in all.
            if not self.cached and bool((where.positions.amax(1, keepdim=True) >= lengths).all()):
                return x
            inside = (where.positions >= self.skip) & (where.positions < lengths)
            if not bool(inside.any()):
                return x
            weight = inside[..., None, None].to(x)
            wide = x if x.dtype == torch.float64 else x.float()
            kept = wide.masked_fill(~inside[..., None, None], 0)
            mean = kept.sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
            chosen = self._dimensions(kept.square().sum(1).sqrt(), where, site, spec)
            return torch.where(chosen[:, None] & inside[..., None, None], mean.to(x), x)

        return operation

    def _dimensions(
        self, norms: Float[Tensor, "batch head d"], where: Where, site: str, spec: ModelSpec
    ) -> Bool[Tensor, "batch head d"]:
        """Which dimensions of each row's heads to change, by their M."""
        count = torch.full(norms.shape[:2], self.count or 0, device=norms.device)
        if self.count is None:
            count = (norms > self.factor * norms.mean(-1, keepdim=True)).sum(-1)
        order = norms.argsort(dim=-1, descending=self.which != "smallest", stable=True)
        rank = order.argsort(dim=-1)
        if self.which == "random":
            drawn = self._drawn(norms.shape[-1], where, site, spec).to(norms)
            # The largest come last, so that they are drawn only where there is nothing else.
            drawn = drawn[None] + 2.0 * (rank < count[..., None])
            rank = drawn.argsort(dim=-1).argsort(dim=-1)
        return rank < count[..., None]

    def _drawn(
        self, width: int, where: Where, site: str, spec: ModelSpec
    ) -> Float[Tensor, "head d"]:
        facts = spec.layers[where.layer]
        shared = facts.n_heads // facts.n_kv_heads if site == "k" else 1
        rows = [
            np.random.default_rng([self.seed, site == "k", where.layer, head // shared]).random(
                width
            )
            for head in where.heads
        ]
        return torch.from_numpy(np.stack(rows))


__all__ = ["KINDS", "Which", "disrupt"]
