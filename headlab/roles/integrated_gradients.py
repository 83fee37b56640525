"""How much of a change of output each head carries: integrated gradients at z, from a corrupted to a clean prompt.

The node form of edge attribution patching with integrated gradients (EAP-IG; Hanna et al. 2024, as used by Park et
al. 2025): the input embeddings move from the corrupted prompt's to the clean prompt's in m steps,

    e_s = e_corrupted + (s / m) (e_clean − e_corrupted),  s = 1 … m,

and a head's attribution is its change of z times the mean gradient of the metric at z along the way,

    a(head) = (1 / m) Σ_s ⟨z(clean) − z(corrupted), ∂metric / ∂z at e_s⟩,  over positions and dimensions.

Where the metric is linear in z this is what patching z of the head from the corrupted run into the clean run takes
off the metric. Attributions of heads need not sum to the whole change: one that feeds another carries the same
change again, and MLPs carry their own.

Beside it stands what the head would carry if it looked everywhere: the same with z of both ends mixed by even
attention, the weight of each row spread over the keys it can see; only what rests on the first token stays there. A
head that carries as much without choosing owes nothing to where it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import keep
from headlab.causal.attribution.gradients import mean_slopes, shares

if TYPE_CHECKING:
    from headlab.model import Model

#: Gives one number per row from the logits of the last position, [row, vocab].
Metric = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Attributions:
    """Attribution of every head, in units of the metric, split by the position of z; NaN where no such head is.

    Attributes:
        own: With the head's own attention.
        even: With even attention.
    """

    own: Float[np.ndarray, "layer head position"]
    even: Float[np.ndarray, "layer head position"]


def head_attributions(
    model: Model, clean: Sequence[int], corrupted: Sequence[int], metric: Metric, steps: int
) -> Attributions:
    """Attribute a metric to heads.

    Args:
        model: The model, a decoder.
        clean: Token ids.
        corrupted: As many token ids.
        metric: What is attributed.
        steps: Interpolation steps m; they run as one batch.
    """
    spec = model.spec
    ends = torch.tensor([list(clean), list(corrupted)], device=model.device)
    two = model.trace(ends, keep=keep.tensors("z", "v", "pattern"), logits="none")
    slopes = mean_slopes(
        model,
        ends[:1],
        ends[1:],
        lambda logits, rows: metric(logits[:, -1].float()),
        ["z"],
        shares(steps, "right"),
    )["z"]
    blank = np.full((spec.n_layers, spec.n_heads, len(clean)), np.nan)
    own, even = blank, blank.copy()
    for layer, (slope,) in slopes.items():
        mixed = _even(two.tensor("pattern", layer), two.tensor("v", layer))
        for found, z in ((own, two.tensor("z", layer)), (even, mixed)):
            change = z[0].float() - z[1].float()
            part = torch.einsum("phd,phd->hp", change, slope.float()).cpu().numpy()
            found[layer, : len(part)] = part
    return Attributions(own, even)


def _even(
    pattern: Float[Tensor, "batch head query key"], v: Float[Tensor, "batch key kv_head d"]
) -> Float[Tensor, "batch query head d"]:
    """z under attention spread evenly over the keys that a layer shows to each row, the first one's weight kept."""
    seen = (pattern > 0).any(1, keepdim=True).float()
    seen[..., 0] = 0
    rows = (
        seen
        / seen.sum(-1, keepdim=True).clamp(min=1)
        * pattern[..., 1:].float().sum(-1, keepdim=True)
    )
    rows[..., 0] = pattern[..., 0].float()
    values = v.float().repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", rows, values)
