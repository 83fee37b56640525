"""Ablations: taking away what heads contribute, in the ways the literature does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headlab.attention.edits import (
    ROW_SITES,
    Edit,
    Operation,
    Site,
    Where,
    as_positions,
    same_rows,
    values_of,
)
from headlab.attention.heads import Head, HeadsLike
from headlab.attention.trace import Trace
from headlab.errors import PlanError, PromptError

if TYPE_CHECKING:
    from headlab.model import Model

Kind: TypeAlias = Literal["zero", "mean", "resample", "first"]
KINDS = ("zero", "mean", "resample", "first")


def ablate(
    heads: HeadsLike,
    kind: Kind = "zero",
    *,
    site: Site = "z",
    reference: Any = None,
    by_position: bool = False,
    positions: Sequence[int] | None = None,
    seed: int = 0,
) -> Edit:
    """Take what heads contribute away.

    Args:
        heads: The heads to ablate.
        kind: At vector sites, ``"zero"`` sets values to 0; ``"mean"`` to the head's mean over the positions of
            the reference prompts; ``"resample"`` to the head's values at positions of the reference drawn at
            random, the same draw for every head and layer. At pattern and scores, ``"zero"`` sets every visible
            entry to 0 (a zero pattern makes z zero; zero scores make attention uniform), ``"mean"`` spreads
            attention evenly over the visible keys, and ``"first"`` puts all of it on the first visible key, the
            sink; ``"resample"``, at pattern, takes the rows of the reference, which must have as many tokens as the
            prompt.
        site: Where to ablate.
        reference: For ``"mean"`` and ``"resample"``: prompts, or a trace of them that kept the site's tensor.
        by_position: Whether ``"mean"`` is taken over the reference prompts at each position by itself, which asks
            for references as long as the prompt and built alike (the same template, for IOI).
        positions: Positions to ablate, negative ones from each prompt's end; all by default.
        seed: Seed of the draw.

    Raises:
        PlanError: There is no such ablation at the site, or its reference is missing.
    """
    if kind not in KINDS:
        raise PlanError(f"there is no ablation {kind!r}; there are {', '.join(KINDS)}")
    if site == "bias":
        raise PlanError(
            "nothing is computed at bias, so there is nothing to ablate; use site='scores'"
        )
    if kind == "first" and site not in ROW_SITES:
        raise PlanError(f"ablation 'first' is one of attention: use site='pattern', not {site!r}")
    needs = kind == "resample" or (kind == "mean" and site not in ROW_SITES)
    if needs and reference is None:
        raise PlanError(f"ablation {kind!r} at {site} needs reference= prompts to take values from")
    if by_position and (kind != "mean" or site in ROW_SITES):
        raise PlanError("by_position= is for the mean of vectors, such as z")

    def prepare(model: Model, bound: tuple[Head, ...]) -> Operation:
        if site in ROW_SITES:
            return _row_ablation(kind, site, reference, model, bound)
        if kind == "zero":
            return lambda x, where: torch.zeros_like(x)
        if by_position:
            return _position_means(model, bound, site, reference)
        pool = _pool(model, bound, site, reference)
        if kind == "mean":
            means = {layer: values.mean(0) for layer, values in pool.items()}
            return lambda x, where: means[where.layer].to(x).expand_as(x)
        return _resampler(pool, seed)

    # What is visible shows in scores only: a hidden key's entry of a pattern is 0, and so may be a visible one's.
    acts_at: Site = "scores" if site == "pattern" and kind in ("mean", "first") else site
    return Edit(heads, acts_at, prepare, as_positions(positions))


def _reference_trace(model: Model, heads: tuple[Head, ...], site: Site, reference: Any) -> Trace:
    from headlab.attention import keep

    if isinstance(reference, Trace):
        return reference
    return model.trace(reference, keep=[keep.tensors(site, heads=heads)], logits="none")


def _position_means(model: Model, heads: tuple[Head, ...], site: Site, reference: Any) -> Operation:
    values = values_of(_reference_trace(model, heads, site, reference), site, heads)
    means = {layer: value.nanmean(0) for layer, value in values.items()}  # NaN: beyond a prompt

    def operation(x: Tensor, where: Where) -> Tensor:
        mean = means[where.layer].to(x)
        last = int(where.positions.max())
        if last >= len(mean):
            raise PromptError(
                f"the reference has means for {len(mean)} positions, the ablated run goes up to {last + 1}; give "
                "references as long as the prompts"
            )
        return mean[where.positions.clamp(min=0)]

    return operation


def _pool(model: Model, heads: tuple[Head, ...], site: Site, reference: Any) -> dict[int, Tensor]:
    """Values of the heads at every position of the reference, [position, head, width] per layer."""
    values = values_of(_reference_trace(model, heads, site, reference), site, heads)
    # NaN: positions that a shorter prompt does not have.
    return {layer: value[~value.flatten(2).isnan().any(-1)] for layer, value in values.items()}


def _resampler(pool: dict[int, Tensor], seed: int) -> Operation:
    size = len(next(iter(pool.values())))

    def operation(x: Tensor, where: Where) -> Tensor:
        # One draw per (prompt, position), the same in every layer and in every step of a generation: a
        # numpy generator's stream has the same beginning whatever its length.
        last = int(where.positions.max()) + 1
        prompts = x.shape[0] if where.n_prompts is None else where.n_prompts
        drawn = np.random.default_rng(seed).integers(size, size=(max(last, 1), prompts))
        index = where.rows_of(torch.as_tensor(drawn, device=x.device).T)
        chosen = index.gather(1, where.positions.clamp(min=0))
        return pool[where.layer].to(x)[chosen]

    return operation


def _row_ablation(
    kind: str, site: str, reference: Any, model: Model, heads: tuple[Head, ...]
) -> Operation:
    if kind == "resample":
        if site == "scores":
            raise PlanError("scores are not kept by a trace; resample at pattern instead")
        values = values_of(_reference_trace(model, heads, "pattern", reference), "pattern", heads)

        def resample(x: Tensor, where: Where) -> Tensor:
            value = where.rows_of(values[where.layer]).to(x)
            if value.shape[0] not in (1, x.shape[0]):
                raise PromptError(
                    f"the reference has {value.shape[0]} prompts, the ablated run {x.shape[0]}; "
                    "give one, or one per prompt"
                )
            return same_rows(value, x, where)

        return resample
    if kind == "zero" and site == "pattern":
        return lambda x, where: torch.zeros_like(x)
    if kind == "first":
        return lambda x, where: x.masked_fill((x > -torch.inf).cumsum(-1) != 1, -torch.inf)
    return lambda x, where: x.masked_fill(x > -torch.inf, 0.0)  # equal scores: uniform attention
