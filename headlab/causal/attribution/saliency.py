"""Attention times its gradient: which heads carry something from a segment of the prompt, to first order.

With A the pattern of a head, q a query and S a segment of keys,

    I(head, S) = Σ_q Σ_{k∈S} A[q, k] · ∂metric / ∂A[q, k],

the slope of the metric in a gate on exactly those weights. Removing them, without giving their mass to other keys,
changes the metric by −I to first order, and that is what :func:`attention_saliency` reports, as ablations do. Wang et
al. 2023 (*Label words are anchors*, equation 1) sum |Σ_heads A ⊙ ∂L/∂A| over such spans; here heads stay apart, and the
sign is kept.

Neither A nor its gradient is ever held: ∂metric/∂A[q, k] = ⟨∂metric/∂z[q], v[k]⟩, so a second pass that is given the
gradient of z sums the products within the attention loop, in O(n) memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention import keep
from headlab.attention.keep import Queries, SpanLike
from headlab.causal.attribution import gradients
from headlab.causal.attribution.gradients import record
from headlab.causal.effects import Effects, effects_of
from headlab.causal.metrics import Metric, as_metric
from headlab.errors import PlanError, UnsupportedError
from headlab.prompts import lengths_of

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt


@gradients.enabled()
def attention_saliency(
    model: Model,
    prompts: Prompt,
    metric: Metric | Callable[[Tensor, Tensor], Tensor],
    segments: Mapping[str, SpanLike],
    *,
    queries: Queries = None,
    seed: int = 0,
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Effects]:
    """What removing each head's attention to each segment would do to a metric, to first order.

    Prompts run whole, with gradients: memory is that of the model's activations, not of patterns.

    Args:
        model: The model; any that is not an encoder-decoder.
        prompts: Prompts.
        metric: What is attributed.
        segments: Named spans of keys: ``{"subject": (3, 5)}``, or one span per prompt.
        queries: Only attention from these positions, such as ``[-1]``; from all by default.
        seed: Seed of the intervals.
        tokens_at_once: Tokens of several prompts run at once with gradients; one prompt at least.
        tell: Called with progress.

    Returns:
        Effects by segment, one row per head: ``effect`` is −I(head, segment), in units of the metric, averaged over
        prompts, negative where the metric would fall; ``value`` is the metric so estimated. p-values are corrected
        over the heads of a segment.

    Raises:
        PlanError: A segment, a position or the metric is not valid.
        UnsupportedError: The model is an encoder-decoder, or has no language-model head.
    """
    seed_number(seed)
    if any(layer.stack == "cross" for layer in model.spec.layers):
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) is an encoder-decoder model; saliency takes prompts of one stack"
        )
    ids = model.tokens(prompts)
    bound = gradients.differentiable(as_metric(metric).bind(model, ids))
    if bound.needs_reference:
        raise PlanError(
            f"metric {bound.name} compares with the clean run, which is the run itself here, so its gradient is 0; "
            "use loss, log_probability or logit_difference"
        )
    _check_segments(segments, lengths_of(ids))
    baseline: list[np.ndarray] = []
    found: dict[str, dict[int, list[Tensor]]] = {name: {} for name in segments}
    for rows in gradients.chunks(len(ids), ids.shape[1], tokens_at_once):
        tell(f"saliency: prompt {int(rows[0]) + 1} of {len(ids)}")
        some = gradients.chosen(ids, rows)
        run = record(model, some, ["z"], bound.needs, grad=True)
        values = run.metric(bound, rows)
        slopes = run.slopes(values.sum())["z"]
        baseline.append(values.detach().cpu().double().numpy())
        plan = keep.statistics(
            "segment_mass",
            segments={name: _of_rows(span, rows, len(ids)) for name, span in segments.items()},
            queries=_of_rows(queries, rows, len(ids)),
            z_gradient=slopes,
        )
        with torch.no_grad():
            trace = model.trace(some, keep=[plan], logits="none")
        for layer in slopes:
            mass = trace.statistic("segment_mass", layer=layer).cpu().double().nan_to_num()
            for at, name in enumerate(segments):  # [prompt, head, query, segment]
                found[name].setdefault(layer, []).append(mass[..., at].sum(2))
    before = np.concatenate(baseline)
    about = {"did": "attention × gradient", "metric": bound.name, "model": model.name, "seed": seed}
    made = {}
    for name, layers in found.items():
        keys: list[dict[str, Any]] = []
        brought: list[np.ndarray] = []
        for layer, parts in layers.items():
            for head, value in enumerate(torch.cat(parts).T.numpy()):
                keys.append({"layer": layer, "head": head, "site": "pattern"})
                brought.append(value)
        told = about | {"segment": name}
        made[name] = effects_of(keys, before - np.stack(brought), before, before, None, told, seed)
    return made


def _check_segments(segments: Mapping[str, SpanLike], lengths: Tensor) -> None:
    """Refuse spans that reach beyond a prompt's end, where there is no attention to attribute."""
    for name, span in segments.items():
        if isinstance(span, Tensor):
            continue  # a mask over positions
        stops = np.asarray(span)[..., 1]
        if stops.ndim and len(stops) != len(lengths):
            raise PlanError(
                f"segment {name!r} has {len(stops)} spans; give one, or one for each of {len(lengths)} prompts"
            )
        stops = np.broadcast_to(stops, (len(lengths),))
        beyond = np.flatnonzero(stops > lengths.cpu().numpy())
        if len(beyond):
            at = int(beyond[0])
            raise PlanError(
                f"segment {name!r} ends at {int(stops[at])}, but prompt {at} has {int(lengths[at])} tokens"
            )


def _of_rows(given: Any, rows: Tensor, n_prompts: int) -> Any:
    """What was given of some of the prompts, where it was given per prompt."""
    if given is None or isinstance(given, str):
        return given
    nested = given.dim() == 2 if isinstance(given, Tensor) else np.ndim(given) == 2
    if not nested:
        return given
    if len(given) != n_prompts:
        raise PlanError(
            f"spans and queries given per prompt must be {n_prompts}, one for each, not {len(given)}"
        )
    return given[rows] if isinstance(given, Tensor) else [given[int(row)] for row in rows]
