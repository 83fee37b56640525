"""The QK fix of AtP* for single keys: what patching one key does to a row of attention, exactly (Kramár et al. 2024).

Patching key t changes column t of the scores only. With weight a = A[p, t] before and a' after, all else in row p
keeps its proportions, so the row moves the metric by

    (a' − a)·(g[p, t] − m),    g = ∂metric / ∂A = ⟨∂metric / ∂z, v⟩,

where m is the mean of g over the rest of the row, weighed by A; a sink has g = 0. All keys come from one run in which
every key is patched, since a column of its scores does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

#: e to this is still a float64.
_LARGE = 700.0


def key_terms(
    ours: Float[Tensor, "prompt head query key"],
    theirs: Float[Tensor, "prompt head query key"],
    v: Float[Tensor, "prompt key head d_value"],
    real: Bool[Tensor, "prompt query 1"],
    sinks: Float[Tensor, "prompt head query key"] | None = None,
) -> Callable[[Float[Tensor, "prompt query head d_value"]], Float[Tensor, "prompt key head"]]:
    """What each key, patched by itself, moves, given the gradient at z.

    Args:
        ours: Scores before the softmax, −inf where a key is hidden.
        theirs: Scores with every key patched.
        v: Values, one per query head.
        real: Which queries are no padding.
        sinks: The pattern, where a sink takes part of every row.
    """
    ours = exactly(ours)
    hidden = ours == -torch.inf
    log_sum = ours.logsumexp(-1, keepdim=True)
    sink = torch.full_like(log_sum[:1, :, :1], -torch.inf)
    if sinks is not None:
        sink = _sink(exactly(sinks), log_sum)
        log_sum = torch.logaddexp(log_sum, sink)
    a = torch.where(hidden, 0.0, (ours - log_sum).exp())
    after = (exactly(theirs) - log_sum).clamp(max=_LARGE).exp()
    # 1 − a says nothing where a key has all but everything; that can only be the best one.
    is_best = torch.zeros_like(hidden).scatter(-1, ours.argmax(-1, keepdim=True), True)
    others = torch.where(is_best, 0.0, a)
    left_over = others.sum(-1, keepdim=True) + (sink - log_sum).exp()
    rest = torch.where(is_best, left_over, 1 - a)
    moved = after / (rest + after) - a
    counts = ~hidden & (rest > 0) & real.to(a.device)[:, None]

    def terms(slope: Tensor) -> Tensor:
        g = torch.einsum("bphd,bthd->bhpt", exactly(slope), exactly(v))
        weighed = a * g
        left = weighed.sum(-1, keepdim=True) - weighed
        left = torch.where(is_best, (others * g).sum(-1, keepdim=True), left)
        found = torch.where(counts, moved * (g - left / rest), 0.0)
        return found.sum(2).transpose(1, 2)

    return terms


def _sink(
    pattern: Float[Tensor, "prompt head query key"], log_sum: Float[Tensor, "prompt head query 1"]
) -> Float[Tensor, "1 head 1 1"]:
    """The sink's score of each head, from the row where it takes most and keys still get something."""
    kept = pattern.sum(-1, keepdim=True)
    taken = (1 - kept).clamp(min=0.0)
    found = (taken.log() - kept.log() + log_sum).transpose(0, 1).flatten(1)
    best = torch.where(kept > 0, taken, -1.0).transpose(0, 1).flatten(1).argmax(1, keepdim=True)
    return found.gather(1, best)[None, :, :, None]


def exactly(x: Tensor) -> Tensor:
    """In float64, where there is one."""
    return (x.cpu() if x.device.type == "mps" else x).double()
