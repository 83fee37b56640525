"""Importance of heads as the expected sensitivity of a loss to a gate on each (Michel et al. 2019).

With a gate ξ_h = 1 on head h, z_h → ξ_h·z_h, the importance is I_h = E |∂L / ∂ξ_h| (equation 3); the gradient is
⟨z_h, ∂L / ∂z_h⟩. The question is over what the absolute value is taken:

* ``"token"``: at every position apart, I_h = Σ over prompts and positions |⟨z, ∂L / ∂z⟩| ÷ tokens. This is what the
  authors' code does;
* ``"example"``: of the sum over a prompt's positions, ÷ prompts: the gradient of one gate per prompt, as equation 3
  reads;
* ``"batch"``: of the sum over all prompts and positions, ÷ tokens. This is ``run_bertology`` of Hugging Face, which
  takes the gradient of a batch's summed loss: contributions of opposite sign cancel, and the ranking is another.

The paper divides by the L2 norm of a layer's importances, following Molchanov et al. (2017): ``normalise="layer"``.
The authors' BERT code divides the last layer by examples, all others by tokens; after the norm that changes nothing,
and without it layers would not compare, so it is left out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headlab.causal.attribution import gradients
from headlab.causal.attribution.gradients import record, wide
from headlab.causal.metrics import Metric, as_metric, loss
from headlab.errors import PlanError, UnsupportedError
from headlab.prompts import lengths_of

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model
    from headlab.prompts import Prompt

Reduction: TypeAlias = Literal["token", "example", "batch"]
_REDUCTIONS = ("token", "example", "batch")


@gradients.enabled()
def head_importance(
    model: Model,
    prompts: Prompt,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    reduction: Reduction = "token",
    normalise: Literal["layer"] | None = "layer",
    tokens_at_once: int = gradients.TOKENS_AT_ONCE,
    tell: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Importance of every head.

    Args:
        model: The model; any that is not an encoder-decoder.
        prompts: What the expectation is taken over.
        metric: L; the mean next-token loss of each prompt by default. Its sign does not matter.
        reduction: Over what absolute values are taken, and by what their sum is divided; see the module.
        normalise: ``"layer"`` divides by the L2 norm over each layer's heads, as the paper does before it compares
            layers; None leaves the unit, that of the metric per token or prompt.
        tokens_at_once: Tokens run at once with gradients. No reduction depends on it.
        tell: Called with progress.

    Returns:
        One row per head: layer, head, importance, and rank (0: the least important, the first to prune).

    Raises:
        PlanError: The metric has no gradient or is not finite, or an option does not exist.
        UnsupportedError: The model is an encoder-decoder, or has no language-model head.
    """
    import pandas as pd

    if reduction not in _REDUCTIONS:
        raise PlanError(f"reduction={reduction!r} must be 'token', 'example' or 'batch'")
    if normalise not in ("layer", None):
        raise PlanError(f"normalise={normalise!r} must be 'layer' or None")
    if any(layer.stack == "cross" for layer in model.spec.layers):
        raise UnsupportedError(
            f"{model.name} ({model.spec.family}) is an encoder-decoder model; importance takes prompts of one stack"
        )
    ids = model.tokens(prompts)
    bound = as_metric(loss() if metric is None else metric).bind(model, ids)
    bound = gradients.differentiable(bound)
    if bound.needs_reference:
        raise PlanError(
            f"metric {bound.name} compares with the clean run, which is the run itself here, so its gradient is 0; "
            "use loss, log_probability or logit_difference"
        )
    spec = model.spec
    totals = [np.zeros(layer.n_heads) for layer in spec.layers]
    for rows in gradients.chunks(len(ids), ids.shape[1], tokens_at_once):
        tell(f"importance: prompt {int(rows[0]) + 1} of {len(ids)}")
        some = gradients.chosen(ids, rows)
        run = record(model, some, ["z"], bound.needs, grad=True)
        values = run.metric(bound, rows)
        slopes = run.slopes(values.sum())["z"]
        real = (some >= 0)[:, :, None]
        for layer, slope in slopes.items():
            z = run.values["z"][layer].detach()
            products = (wide(z) * wide(slope)).sum(-1).cpu().double()  # [prompt, position, head]
            gates = torch.where(real.cpu(), products, 0.0)
            if reduction == "token":
                gates = gates.abs()
            by_prompt = gates.sum(1)
            if reduction == "example":
                by_prompt = by_prompt.abs()
            totals[layer] += by_prompt.sum(0).numpy()
    count = len(ids) if reduction == "example" else int(lengths_of(ids).sum())
    found = [np.abs(total) / count for total in totals]
    if normalise == "layer":
        found = [layer / (np.linalg.norm(layer) + np.finfo(float).tiny) for layer in found]
    frame = pd.DataFrame(
        [
            {"layer": layer, "head": head, "importance": float(value)}
            for layer, row in enumerate(found)
            for head, value in enumerate(row)
        ]
    )
    frame["rank"] = frame["importance"].rank(method="first").astype(int) - 1
    return frame
