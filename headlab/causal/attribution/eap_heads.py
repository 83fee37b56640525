"""The node form of EAP-IG: scores of heads at z, for any architecture (Hanna et al. 2024).

    score(head) = mean over prompts Σ over positions ⟨z(corrupted) − z(clean), mean gradient at z along a path⟩,

an estimate of what putting the head's corrupted z into the clean run does to the metric. The paths are those of
:func:`~headlab.causal.eap_ig`. The official code takes gradients of MLPs at their input and of heads at their output;
here are heads only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headlab.arguments import seed_number
from headlab.attention import edits as editing
from headlab.causal.attribution import gradients
from headlab.causal.attribution.eap import Kind, Paths, paths_of
from headlab.causal.attribution.gradients import Points, between, mean_slopes, record, wide
from headlab.causal.effects import Effects, effects_of
from headlab.causal.metrics import BoundMetric, Metric, as_metric
from headlab.causal.prompt_pairs import pairs
from headlab.errors import UnsupportedError

if TYPE_CHECKING:
    from headlab.model import Model
    from headlab.prompts import Prompt


@gradients.enabled()
def eap_ig_heads(
    model: Model,
    clean: Prompt,
    corrupted: Prompt,
    metric: Metric | Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int = 5,
    kind: Kind = "inputs",
    points: Points = "midpoint",
    seed: int = 0,
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> Effects:
    """Score every head at z by integrated gradients.

    Args:
        model: The model; any that is not an encoder-decoder.
        clean: Prompts on which the metric is to be explained.
        corrupted: As many prompts, token by token as long as the clean ones.
        metric: What is attributed.
        steps: Points of a path, m.
        kind: What moves along the path; with ``"activations"``, z of all heads of the layer.
        points: Where the m points lie; official code has ``"right"``.
        seed: Seed of the intervals.
        tokens_at_once: Tokens run at once with gradients.
        tell: Called with progress.

    Returns:
        Effects on the clean run: ``effect`` is the score, negative where corruption lowers the metric.

    Raises:
        PromptError: Clean and corrupted prompts do not match.
        PlanError: The metric has no gradient or is not finite, or there is no such kind of path.
        UnsupportedError: The model is an encoder-decoder, or has no language-model head.
    """
    seed_number(seed)
    paths = paths_of(kind, steps, points)
    if any(layer.stack == "cross" for layer in model.spec.layers):
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) is an encoder-decoder model; scores of heads take prompts of one stack"
        )
    both = pairs(model, clean, corrupted)
    bound = gradients.differentiable(as_metric(metric).bind(model, both.clean))
    bound, ends = gradients.referred(model, bound, both.clean, both.corrupted, tokens_at_once)
    scores: list[list[np.ndarray]] = [[] for _ in model.spec.layers]
    width = both.clean.shape[1] * len(paths.at)
    for rows in gradients.chunks(len(both), width, tokens_at_once):
        tell(f"{paths.name}: prompt {int(rows[0]) + 1} of {len(both)}")
        two = [gradients.chosen(ids, rows) for ids in (both.corrupted, both.clean)]
        with torch.no_grad():
            first, last = (record(model, ids, ["z"]).values["z"] for ids in two)
        if kind == "activations":
            slopes = _moving_z(model, two[1], bound, rows, paths, first, last)
        else:
            slopes = mean_slopes(
                model, two[1], two[0], bound.checked, ["z"], paths.at, bound.needs, rows
            )["z"]
        real = (two[1] >= 0)[:, :, None]
        for layer, slope in slopes.items():
            terms = ((wide(first[layer]) - wide(last[layer])) * slope).sum(-1)
            found = torch.where(real.to(terms.device), terms, 0.0).sum(1)
            scores[layer].append(found.cpu().double().numpy())
    keys: list[dict[str, Any]] = []
    values = []
    for layer, parts in enumerate(scores):
        of_layer = np.concatenate(parts)
        keys += [{"layer": layer, "head": head} for head in range(of_layer.shape[1])]
        values += list(of_layer.T)
    before, after = (value.numpy() for value in ends)
    about = {
        "did": f"{paths.name}, heads",
        "metric": bound.name,
        "model": model.name,
        "direction": "noising",
        "seed": seed,
    }
    return effects_of(keys, before + np.stack(values), before, before, after, about, seed)


def _moving_z(
    model: Model,
    ids: Tensor,
    metric: BoundMetric,
    rows: Tensor,
    paths: Paths,
    first: dict[int, Tensor],
    last: dict[int, Tensor],
) -> dict[int, Tensor]:
    """Mean gradient at z of each layer while z of that layer moves, in a run that is clean otherwise."""
    found = {}
    n = len(paths.at)
    for layer in range(model.spec.n_layers):
        value = between(first[layer], last[layer], paths.at)
        edit = editing.apply(f"{layer}.*", lambda x, where, value=value: value, "z")  # type: ignore[misc]
        many = ids.repeat(n, 1)
        run = record(model, many, {"z": [layer]}, metric.needs, edits=[edit], grad=True)
        total = run.metric(metric, rows.repeat(n)).sum()
        slope = run.slopes(total)["z"][layer]
        found[layer] = wide(slope).unflatten(0, (n, -1)).mean(0)
    return found
