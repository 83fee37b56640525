"""Pruning curves: how long a metric holds while heads are taken out, least important first (Michel et al. 2019).

Heads leave in the order of scores given once (gradient importance, Shapley values, an ablation's effects, chance), or
greedily: after every removal, the head whose loss now harms least goes next, which costs a run per head left and step.
Michel et al. prune in steps of 10 % of the heads and report how many BERT and WMT models lose without much harm
(40 % and 20 %, by secondary notes on the paper). A head without which its layer is empty can be kept, as they do for
comparison; the residual stream passes an empty layer, so nothing breaks either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from headlab.arguments import finite_number, seed_number, whole_number
from headlab.attention import Head, HeadsLike, parse_heads
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.given_scores import scores_of_heads
from headlab.causal.effects import Effects
from headlab.causal.removal import Removal
from headlab.causal.sweep import Sweep
from headlab.errors import PlanError
from headlab.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal.metrics import Metric
    from headlab.model import Model
    from headlab.prompts import Prompt


@dataclass(frozen=True)
class PruningCurve:
    """A metric while heads go.

    Attributes:
        frame: One row per step: ``removed`` (heads), ``share`` of all heads removed, ``metric`` (mean), ``ci_low`` and
            ``ci_high`` (95 % bootstrap over prompts; NaN for a single prompt), ``retained`` (metric over that of the
            whole model, of means), ``heads`` (those this step took out).
        order: Heads in the order they went.
        values: The metric, [step, prompt].
        about: How the curve was made.
    """

    frame: pd.DataFrame
    order: tuple[Head, ...]
    values: Float[np.ndarray, "step prompt"] = field(repr=False)
    about: dict[str, Any]

    def __repr__(self) -> str:
        about = ", ".join(f"{key} {value}" for key, value in self.about.items())
        steps = self.frame.iloc[sorted({0, len(self.frame) // 2, len(self.frame) - 1})]
        metric = ", ".join(
            f"{row.metric:.4g} with {row.removed} ({row.share:.0%}) out"
            for row in steps.itertuples()
        )
        first = ", ".join(map(str, self.order[:8])) + (", …" if len(self.order) > 8 else "")
        return (
            f"PruningCurve of {len(self.order)} heads in {len(self.frame)} steps ({about})\n"
            f"  metric: {metric}\n  first to go: {first or 'none'}"
        )


def pruning_curve(
    model: Model,
    prompts: Prompt,
    metric: Metric | Callable[..., Any],
    scores: Mapping[Any, float] | Effects | Literal["random"],
    *,
    step: float = 0.1,
    keep_one: bool = False,
    kind: Literal["zero", "mean"] = "zero",
    reference: Any = None,
    out: str | Path | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> PruningCurve:
    """Take heads out in the order of scores, lowest first.

    Args:
        model: The model.
        prompts: The prompts.
        metric: What to measure.
        scores: Importance of each head, by any name of it; heads without a score stay. Or the effects of ablating or
            patching heads, by which what raises the metric is important; or ``"random"``.
        step: Share of the heads that go at each step: 0.05 or 0.1.
        keep_one: Whether every layer keeps its most important head.
        kind: What takes a head out: ``"zero"`` or ``"mean"`` z.
        reference: Prompts for the mean.
        out: Folder for finished parts, so that a killed run resumes.
        seed: Seed of the random order and of the bootstrap.
        tell: Told how far it is.

    Raises:
        HeadError: A head does not exist.
        PlanError: A score is no finite number, a step is out of range, or the metric does not fit.
    """
    seed_number(seed)
    if not 0 < finite_number(step, "step") <= 1:
        raise PlanError(f"step={step!r} must be a share of the heads above 0 and at most 1")
    order = _order(model, scores, seed)
    leaving = _sparing(model, order) if keep_one else order
    n_heads = sum(layer.n_heads for layer in model.spec.layers)
    gone = _counts(len(leaving), n_heads, step)
    removal = Removal(model, kind, reference=reference)
    sweep = Sweep(model, prompts, metric, out=out, about=removal.about, tell=tell)
    variants = [removal.edits(leaving[:n]) for n in gone]
    # A part is stored under the heads that are out, not under their number: another order shares the folder.
    labels = [" ".join(map(str, sorted(leaving[:n]))) or "none" for n in gone]
    values = sweep.run(variants, labels)
    about = {
        "order": "random" if isinstance(scores, str) else "scores",
        "keep_one": keep_one,
        "kind": kind,
        "step": step,
        "seed": seed,
    }
    return _curve(leaving, gone, values, n_heads, about, seed)


def greedy_pruning(
    model: Model,
    prompts: Prompt,
    metric: Metric | Callable[..., Any],
    *,
    heads: HeadsLike = "*.*",
    n_remove: int | None = None,
    at_once: int = 1,
    keep_one: bool = False,
    kind: Literal["zero", "mean"] = "zero",
    reference: Any = None,
    out: str | Path | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> PruningCurve:
    """Take out the head whose loss harms the metric least, score the others anew, and so on.

    Args:
        model: The model.
        prompts: The prompts.
        metric: What to measure; a lower loss or divergence counts as less harm.
        heads: Heads that may go.
        n_remove: How many are to go; by default all that may.
        at_once: Heads that go between two scorings: more is faster and less greedy.
        keep_one: Whether every layer keeps a head.
        kind: What takes a head out: ``"zero"`` or ``"mean"`` z.
        reference: Prompts for the mean.
        out: Folder for finished parts, so that a killed run resumes.
        seed: Seed of the bootstrap.
        tell: Told how far it is.

    Raises:
        HeadError: A head does not exist.
        PlanError: A number is out of range, or the metric does not fit.
    """
    seed_number(seed)
    left = list(parse_heads(heads, model.spec))
    wanted = len(left) if n_remove is None else whole_number(n_remove, "n_remove", 1)
    at_once = whole_number(at_once, "at_once", 1)
    if wanted > len(left):
        raise PlanError(f"n_remove={wanted} is more than the {len(left)} heads that may go")
    removal = Removal(model, kind, reference=reference)
    sweep = Sweep(model, prompts, metric, out=out, about=removal.about)
    sign = 1 if sweep.metric.higher_is_better else -1
    order: list[Head] = []
    gone, values = [0], [sweep.clean]
    while left and len(order) < wanted:
        candidates = [head for head in left if not (keep_one and _last_of(model, head, order))]
        if not candidates:
            break
        sets = [[*order, head] for head in candidates]
        labels = [" ".join(map(str, sorted(out_))) for out_ in sets]
        found = sweep.run([removal.edits(out_) for out_ in sets], labels)
        best = np.argsort(-sign * found.mean(1), kind="stable")
        n = min(at_once, wanted - len(order))
        before = len(order)
        for at in best:
            if len(order) - before < n and not (
                keep_one and _last_of(model, candidates[at], order)
            ):
                order.append(candidates[at])
        left = [head for head in left if head not in order]
        if len(order) - before == 1:
            values.append(found[best[0]])
        else:
            values.append(sweep.run([removal.edits(order)], [" ".join(map(str, sorted(order)))])[0])
        gone.append(len(order))
        tell(f"{len(order)} of {wanted} heads gone: {', '.join(map(str, order[before:]))}")
    n_heads = sum(layer.n_heads for layer in model.spec.layers)
    about = {
        "order": "greedy",
        "keep_one": keep_one,
        "at_once": at_once,
        "kind": kind,
        "seed": seed,
    }
    return _curve(tuple(order), gone, np.stack(values), n_heads, about, seed)


def _order(
    model: Model, scores: Mapping[Any, float] | Effects | Literal["random"], seed: int
) -> tuple[Head, ...]:
    if isinstance(scores, Effects):
        scores = Circuit.of_heads(model, scores).scores
    if isinstance(scores, str):
        if scores != "random":
            raise PlanError(f"scores={scores!r} must be 'random' or a score for each head")
        every = parse_heads("*.*", model.spec)
        return tuple(every[at] for at in np.random.default_rng(seed).permutation(len(every)))
    named = {
        head: score
        for name, score in scores_of_heads(model, scores).items()
        for head in parse_heads(name, model.spec)
    }
    if not named:
        raise PlanError("scores= is empty; give a score for each head that may go")
    return tuple(sorted(named, key=lambda head: (named[head], head)))


def _sparing(model: Model, order: Sequence[Head]) -> tuple[Head, ...]:
    """The order without the head of each layer that would be the last to go, where all its heads would."""
    last = {head.layer: head for head in order}
    counts = {layer: sum(head.layer == layer for head in order) for layer in last}
    return tuple(
        head
        for head in order
        if head != last[head.layer] or counts[head.layer] < model.spec.layers[head.layer].n_heads
    )


def _last_of(model: Model, head: Head, gone: Sequence[Head]) -> bool:
    """Whether a head is the only one its layer has left."""
    out = sum(other.layer == head.layer for other in gone)
    return out == model.spec.layers[head.layer].n_heads - 1


def _counts(n_leaving: int, n_heads: int, step: float) -> list[int]:
    """Heads gone at each step: none first, then ever more by a share of all heads, all that may go last."""
    steps = range(int(np.ceil(1 / step - 1e-9)) + 1)
    counts = [min(n_leaving, round(at * step * n_heads)) for at in steps]
    return sorted({*counts, n_leaving})


def _curve(
    order: tuple[Head, ...],
    gone: Sequence[int],
    values: np.ndarray,
    n_heads: int,
    about: dict[str, Any],
    seed: int,
) -> PruningCurve:
    import pandas as pd

    low = high = np.full(len(values), np.nan)
    if values.shape[1] > 1:
        low, high = bootstrap_interval(values.T, seed)
    means = values.mean(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        retained = means / means[0]
    took = [order[a:b] for a, b in zip([0, *gone], gone, strict=False)]
    frame = pd.DataFrame(
        {
            "removed": list(gone),
            "share": np.array(gone) / n_heads,
            "metric": means,
            "ci_low": low,
            "ci_high": high,
            "retained": retained,
            "heads": [" ".join(map(str, heads)) for heads in took],
        }
    )
    return PruningCurve(frame, order, values, about)


__all__ = ["PruningCurve", "greedy_pruning", "pruning_curve"]
