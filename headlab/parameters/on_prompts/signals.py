"""Cutting or doubling a signal between two heads (Franco & Crovella 2024).

The signal of an upstream head at one side of a firing is its result's part in the subspace that the selected terms read
there (:meth:`Terms.basis`). It is taken off, or added once more,

    "stream":  where attention writes to the stream, so that everything downstream sees it (the paper's A),
    "input":   in the input of the one downstream head alone, in its query at the destination or its key at the source
               (the paper's B, which edits q, k and v of that position),

and the downstream head's attention, and a metric of the logits if one is given, is read again; norms are computed
anew. The control, as in the paper, is as many of Ω's singular directions drawn at random, here of all of them, so that
some may be selected ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headlab.attention import Head, HeadsLike, add, keep, parse_heads, patch
from headlab.attention.edits import Edit
from headlab.errors import HeadError, PlanError
from headlab.parameters.on_prompts.sparse_scores import SIDES, Firing, PromptScores

#: A figure of the last position's logits, [n_vocab].
Metric = Callable[[Float[Tensor, " n_vocab"]], float]
How = Literal["stream", "input"]


@dataclass(frozen=True, eq=False, repr=False)
class SignalEffect:
    """What editing one signal does.

    Attributes:
        upstream: The head whose result is edited.
        firing: The downstream head, and where it attends.
        side: The side at which it is read.
        how: ``"stream"`` or ``"input"``.
        sign: −1 where the signal was taken off, 1 where it was added once more.
        n_directions: Dimensions of the subspace.
        attention: The downstream head's A[destination, source] with the edit; ``firing.attention`` without.
        controls: The same under random singular directions, [control].
        metric_before, metric, metric_controls: The metric likewise; NaN and empty without one.
        p_value: One-sided, of an attention as far down (up, for sign 1) as this under random directions.
    """

    upstream: Head
    firing: Firing
    side: str
    how: How
    sign: int
    n_directions: int
    attention: float
    controls: Float[np.ndarray, " control"]
    metric_before: float
    metric: float
    metric_controls: Float[np.ndarray, " control"]
    p_value: float

    @property
    def effect(self) -> float:
        """Change of attention beyond the mean change under random directions."""
        return self.attention - float(self.controls.mean())

    def __repr__(self) -> str:
        at = self.firing
        return (
            f"SignalEffect of {self.upstream} on {at.head} ({self.side}, {self.how}, {self.sign:+d}): "
            f"A[{at.destination}, {at.source}] {at.attention:.3f} → {self.attention:.3f}, "
            f"{self.controls.mean():.3f} under {len(self.controls)} random sets of "
            f"{self.n_directions} directions (p = {self.p_value:.2g})"
        )


@torch.no_grad()
def edit_signal(
    scores: PromptScores,
    firing: Firing,
    upstream: HeadsLike,
    side: str,
    *,
    how: How = "stream",
    sign: int = -1,
    threshold: float = 1.0,
    controls: int = 20,
    seed: int = 0,
    metric: Metric | None = None,
) -> SignalEffect:
    """Take a head's signal off, or add it once more, and look at the head that reads it.

    Args:
        scores: The prompt's run.
        firing: The downstream head, and where it attends.
        upstream: The head that writes; it must lie in an earlier layer.
        side: ``"destination"`` or ``"source"``.
        how: Where the edit acts; see the module.
        sign: −1 to take off, 1 to add.
        threshold: Of the selected terms.
        controls: Random sets of directions, at least 1.
        seed: Their seed.
        metric: A figure of the last position's logits.

    Raises:
        HeadError: *upstream* is not one head of an earlier layer.
        PlanError: An argument is out of range.
        UnsupportedError: Scores of this model are no sum over directions.
    """
    model = scores.model
    found = parse_heads(upstream, model.spec)
    if len(found) != 1 or found[0].layer >= firing.head.layer:
        raise HeadError(f"upstream={upstream!r} must be one head of a layer before {firing.head}")
    if side not in SIDES:
        raise PlanError(f"side={side!r} must be 'destination' or 'source'")
    if how not in ("stream", "input"):
        raise PlanError(f"how={how!r} must be 'stream' or 'input'")
    if sign not in (-1, 1):
        raise PlanError(f"sign={sign!r} must be -1 or 1")
    if isinstance(controls, bool) or not isinstance(controls, int) or controls < 1:
        raise PlanError(f"controls={controls!r} must be a whole number of at least 1")
    terms = scores.terms(firing)
    chosen = terms.selected(threshold)
    position = firing.destination if side == "destination" else firing.source
    result = scores.heads(found[0].layer, position)[0][found[0].head]
    rng = np.random.default_rng(seed)
    sets = [chosen]
    sets += [rng.choice(len(terms.terms), len(chosen), replace=False) for _ in range(controls)]
    read = []
    for each in sets:
        basis = terms.basis(each, side)
        delta = sign * basis @ (basis.T @ result)
        edit = _edit(scores, firing, found[0], side, how, position, delta)
        read.append(_read(scores, firing, edit, metric))
    before = _read(scores, firing, None, metric)[1] if metric is not None else float("nan")
    attention, metrics = (np.array(column) for column in zip(*read, strict=True))
    as_far = sign * attention[1:] >= sign * attention[0] - 1e-9
    return SignalEffect(
        found[0],
        firing,
        side,
        how,
        sign,
        len(chosen),
        float(attention[0]),
        attention[1:],
        before,
        float(metrics[0]),
        metrics[1:] if metric is not None else np.zeros(0),
        float((1 + as_far.sum()) / (1 + controls)),
    )


def _edit(
    scores: PromptScores,
    firing: Firing,
    upstream: Head,
    side: str,
    how: How,
    position: int,
    delta: Float[Tensor, " d_model"],
) -> Edit:
    """The edit that adds *delta* to the stream, or to what one head reads of it."""
    if how == "stream":
        return add(f"{upstream.layer}.*", delta, site="attn_out", positions=[position])
    head, site = firing.head, "q" if side == "destination" else "k"
    moved = add(f"{head.layer}.*", delta, site="resid_pre", positions=[position])
    with scores.model.edit(moved):
        plan = keep.tensors(site, heads=head)
        source = scores.model.trace(scores.ids, keep=plan, logits="none")
    return patch(head, site="q" if site == "q" else "k", source=source, positions=[position])


def _read(
    scores: PromptScores, firing: Firing, edit: Edit | None, metric: Metric | None
) -> tuple[float, float]:
    """The downstream head's attention, and the metric."""
    plan = keep.tensors("pattern", heads=firing.head, positions=[firing.destination])
    with scores.model.edit(*([] if edit is None else [edit])):
        trace = scores.model.trace(
            scores.ids, keep=plan, logits="none" if metric is None else "last"
        )
    attention = float(trace.of_head("pattern", firing.head)[0, 0, firing.source])
    if metric is None:
        return attention, float("nan")
    assert trace.logits is not None  # asked for
    return attention, float(metric(trace.logits[0, -1]))


__all__ = ["SignalEffect", "edit_signal"]
