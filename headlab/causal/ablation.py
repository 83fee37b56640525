"""Ablating every head, one at a time: what the metric loses without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention import Head, HeadsLike, Trace, ablate, keep, parse_heads
from headlab.attention.ablations import Kind
from headlab.attention.edits import ROW_SITES, Site, as_positions
from headlab.attention.keep import STREAM
from headlab.attention.positions import resolve_positions
from headlab.causal.effects import Effects, effects_of
from headlab.causal.metrics import Metric
from headlab.causal.sweep import Sweep
from headlab.errors import HeadError, PlanError
from headlab.models.spec import ModelSpec
from headlab.prompts import Prompt

if TYPE_CHECKING:
    from headlab.model import Model

By: TypeAlias = Literal["head", "kv_group", "layer"]
Tell: TypeAlias = Callable[[str], None]


def ablate_each(
    model: Model,
    prompts: Prompt,
    metric: Metric | Callable[[Tensor, Tensor], Tensor],
    *,
    heads: HeadsLike | None = None,
    by: By | None = None,
    kind: Kind = "zero",
    site: Site = "z",
    reference: Any = None,
    by_position: bool = False,
    positions: Sequence[int] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    tell: Tell = lambda text: None,
) -> Effects:
    """Ablate heads one at a time.

    Effects are the metric without the head less the metric with it: a head that helps has a negative effect on a
    logit difference. Backup heads take over once a head is gone (Wang et al. 2022), so effects of single heads can
    understate what they do.

    Args:
        model: The model.
        prompts: The prompts.
        metric: What to measure, such as ``hl.metrics.logit_difference(answers, foils)``.
        heads: The heads to ablate; all by default.
        by: ``"head"``; ``"kv_group"``, the query heads of one key/value head together (in the table the group goes by
            its first head); or ``"layer"``, whole layers. By default heads, and layers at sites of the stream.
        kind: How; see :func:`headlab.ablate`.
        site: Where: ``z``, ``pattern``, ``v``, ``mlp_out`` and so on.
        reference: Prompts for ``"mean"`` and ``"resample"``; run once.
        by_position: Whether means are taken per position.
        positions: Positions to ablate at, negative ones from each prompt's end; all by default.
        seed: Seed of resampling, bootstrap and sign flips.
        out: Folder for finished parts, so that a killed sweep resumes.
        tell: Told how far it is.

    Raises:
        HeadError: A head does not exist, or none is named.
        PlanError: The ablation cannot be carried out, or the metric gives NaN.
        PromptError: A prompt cannot be used.
    """
    seed = seed_number(seed)
    at = as_positions(positions)
    units = units_of(model.spec, heads, by, site)
    if isinstance(reference, Trace) and out is not None:
        raise PlanError(
            "a trace as reference= cannot be told from another of the same prompts, so out= needs reference prompts"
        )
    trace = None
    if reference is not None:
        trace = reference_trace(model, reference, site)
    edits = [
        ablate(
            unit,
            kind,
            site=site,
            reference=trace,
            by_position=by_position,
            positions=at,
            seed=seed,
        )
        for unit in units.values()
    ]
    about = {
        "model": model.name,
        "by": by or "head",
        "kind": kind,
        "site": site,
        "by_position": by_position,
        "positions": None if at is None else list(at),
        "seed": seed,
    }
    stored = {**about, "reference": None if trace is None else trace.ids.tolist()}
    if kind != "resample":
        del stored["seed"]  # nothing is drawn
    sweep = Sweep(model, prompts, metric, out=out, about=stored, tell=tell)
    if at is not None:
        resolve_positions(at, sweep.lengths, "positions")
    values = sweep.run([[edit] for edit in edits], list(units))
    keys = [key_of(name, unit, site) for name, unit in units.items()]
    done = {"did": "ablation", "metric": sweep.metric.name, **about}
    return effects_of(keys, values, sweep.clean, sweep.clean, None, done, seed)


def units_of(
    spec: ModelSpec, heads: HeadsLike | None, by: By | None, site: Site
) -> dict[str, tuple[Head, ...]]:
    """What is intervened in together, by name: heads, key/value groups (``L3G1``) or layers (``L3``).

    Raises:
        HeadError: No head is named, one does not exist, or a group or layer is named in part.
        PlanError: There is no such unit, or the site belongs to layers.
    """
    by = by or ("layer" if site in STREAM else "head")
    if by not in ("head", "kv_group", "layer"):
        raise PlanError(f"by={by!r} must be 'head', 'kv_group' or 'layer'")
    if site in STREAM and by != "layer":
        raise PlanError(f"{site} belongs to a layer, so use by='layer', not by={by!r}")
    chosen = parse_heads("*.*" if heads is None else heads, spec)
    units: dict[str, list[Head]] = {}
    for head in chosen:
        facts = spec.layers[head.layer]
        group = head.head // (facts.n_heads // facts.n_kv_heads)
        names = {"head": str(head), "kv_group": f"L{head.layer}G{group}", "layer": f"L{head.layer}"}
        units.setdefault(names[by], []).append(head)
    for name, members in units.items():
        facts = spec.layers[members[0].layer]
        size = {"head": 1, "kv_group": facts.n_heads // facts.n_kv_heads, "layer": facts.n_heads}[
            by
        ]
        if len(members) < size:
            raise HeadError(
                f"by={by!r} takes whole ones, but of the {size} heads of {name} only "
                f"{', '.join(map(str, members))} {'is' if len(members) == 1 else 'are'} named; name them all, as in "
                f"'{members[0].layer}.*', or use by='head'"
            )
    return {name: tuple(members) for name, members in units.items()}


def key_of(name: str, unit: tuple[Head, ...], site: Site) -> dict[str, Any]:
    """Where a unit stands in the table."""
    whole = "H" not in name and "G" not in name
    return {"layer": unit[0].layer, "head": -1 if whole else unit[0].head, "site": site}


def reference_trace(model: Model, reference: Any, site: Site) -> Trace:
    """What reference prompts give at a site, run once for all heads."""
    if isinstance(reference, Trace):
        return reference
    name = "pattern" if site in ROW_SITES else site
    with torch.no_grad():
        return model.trace(reference, keep=[keep.tensors(name)], logits="none")
