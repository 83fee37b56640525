"""Activation patching of every head: what one run's value of it does in the other run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention import HeadsLike, keep, patch
from headlab.attention.edits import Site, as_positions
from headlab.attention.keep import STREAM
from headlab.attention.positions import resolve_positions
from headlab.causal.ablation import By, Tell, key_of, units_of
from headlab.causal.effects import Effects, effects_of
from headlab.causal.metrics import Metric, as_metric
from headlab.causal.prompt_pairs import Align, Pairs, pairs
from headlab.causal.sweep import Sweep
from headlab.errors import PlanError, PromptError
from headlab.prompts import Prompt, lengths_of

if TYPE_CHECKING:
    from headlab.model import Model

Direction: TypeAlias = Literal["denoising", "noising"]


def patch_each(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metric | Callable[[Tensor, Tensor], Tensor],
    *,
    site: Site = "z",
    heads: HeadsLike | None = None,
    by: By | None = None,
    positions: Sequence[int] | Literal["each"] | None = None,
    direction: Direction = "denoising",
    align: Align | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    tell: Tell = lambda text: None,
) -> Effects:
    """Patch heads one at a time from one run into another.

    Denoising puts the clean run's value into the corrupted run and asks whether it brings the behaviour back;
    noising puts the corrupted value into the clean run and asks whether it takes it away. Only positions from the
    first difference on are patched where every layer is causal: before it the two runs are the same.

    Args:
        model: The model.
        clean: Prompts that show the behaviour.
        corrupted: One corrupted prompt for each.
        metric: What to measure; tokens it asks for, also those of a loss, are the clean prompts' in both runs. KL
            divergence is taken from the clean run.
        site: ``q``, ``k``, ``v`` (after position encoding), ``z``, ``result``, ``pattern``, or one of the residual
            stream, such as ``resid_pre`` and ``mlp_out``, by layers.
        heads: The heads to patch; all by default.
        by: ``"head"``, ``"kv_group"`` or ``"layer"``; see :func:`~headlab.causal.ablate_each`.
        positions: Positions to patch together, negative ones from each prompt's end; ``"each"`` patches every
            position by itself, of prompts of one length; None patches all.
        direction: ``"denoising"`` or ``"noising"``.
        align: From which end positions count where prompts of a pair differ in length; see
            :func:`~headlab.causal.pairs`.
        seed: Seed of bootstrap and sign flips.
        out: Folder for finished parts, so that a killed sweep resumes.
        tell: Told how far it is.

    Returns:
        Effects against the run that is patched; ``normalised`` is 1 for the clean run and 0 for the corrupted one.

    Raises:
        HeadError: A head does not exist, or none is named.
        PlanError: The site cannot be patched, or the metric gives NaN.
        PromptError: Prompts cannot be used, or their lengths differ and ``align`` is not given.
    """
    if direction not in ("denoising", "noising"):
        raise PlanError(f"direction={direction!r} must be 'denoising' or 'noising'")
    if site == "scores":
        raise PlanError("scores are kept by no trace, so they cannot be patched; patch the pattern")
    seed = seed_number(seed)
    at = positions if isinstance(positions, str) else as_positions(positions)
    both = pairs(model, clean, corrupted, align)
    given = as_metric(metric)
    if given.needs == "all" and bool((lengths_of(both.clean) != lengths_of(both.corrupted)).any()):
        raise PlanError(
            f"metric {given.name} asks for every position, so the two prompts of a pair must be equally long for it; "
            "use a metric of the last position"
        )
    run = both.reversed if direction == "denoising" else both  # patched: .clean; source: .corrupted
    units = units_of(model.spec, heads, by, site)
    source = run.in_clean(model.trace(run.corrupted, keep=[keep.tensors(site)], logits="none"))
    places = _places(model, run, at)
    variants, names, keys = [], [], []
    for place, at in places.items():
        for name, unit in units.items():
            variants.append([patch(unit, site, source=source, positions=at)])
            names.append(name if place < 0 else f"{name}@{place}")
            keys.append({**key_of(name, unit, site), "position": place})
    about: dict[str, Any] = {
        "model": model.name,
        "by": by or ("layer" if site in STREAM else "head"),
        "site": site,
        "direction": direction,
        "positions": at if at is None or isinstance(at, str) else list(at),
        "align": align,
        "seed": seed,
    }
    stored = {**about, "source": run.corrupted.tolist()}
    del stored["seed"]  # it is the table's
    of_clean = Sweep(model, both.clean, given)
    patched = Sweep(
        model,
        run.clean,
        given,
        out=out,
        about=stored,
        measured_on=both.clean,
        against=of_clean,
        tell=tell,
    )
    at_clean = of_clean.clean
    at_corrupted = (
        patched.clean
        if direction == "denoising"
        else Sweep(model, both.corrupted, given, measured_on=both.clean, against=of_clean).clean
    )
    values = patched.run(variants, names)
    done = {"did": "patching", "metric": patched.metric.name, **about}
    return effects_of(keys, values, patched.clean, at_clean, at_corrupted, done, seed)


def _places(
    model: Model, run: Pairs, positions: tuple[int, ...] | str | None
) -> dict[int, tuple[int, ...] | None]:
    """Sets of positions to patch, by their name in the table: −1 for all at once."""
    width = run.clean.shape[1]
    causal = all(layer.causal for layer in model.spec.layers)
    first = run.first_difference if causal else 0
    lengths = lengths_of(run.clean)
    if positions == "each":
        if bool((lengths != lengths[0]).any()):
            raise PromptError(
                "positions='each' needs prompts of one length, since a position must be the same place in all of "
                f"them; these have {int(lengths.min())} to {int(lengths.max())} tokens, so patch those of one length "
                "at a time"
            )
        return {at: (at,) for at in range(first, width)}
    if isinstance(positions, str):
        raise PlanError(f"positions={positions!r} must be a list of numbers, 'each' or None")
    if positions is not None:
        resolve_positions(positions, lengths, "positions")
        return {-1: positions}
    return {-1: tuple(range(first, width)) if first else None}
