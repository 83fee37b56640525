"""From positions in a sequence, as plans name them, to the rows and columns of an attention call."""

from __future__ import annotations

import torch
from torch import Tensor

from headlab.attention.keep import SpanLike
from headlab.errors import PlanError


def resolve_positions(positions: object, lengths: Tensor, argument: str) -> Tensor:
    """Positions [batch, n] of each sequence; negative ones count from its end.

    Raises:
        PlanError: A position lies outside a sequence.
    """
    try:
        wanted = torch.as_tensor(positions, device=lengths.device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PlanError(f"{argument}={positions!r} must be positions, whole numbers") from error
    if wanted.is_floating_point() or wanted.dtype == torch.bool:
        raise PlanError(f"{argument}={positions!r} must be positions, whole numbers")
    wanted = wanted.long()
    if wanted.dim() == 1:
        wanted = wanted.expand(len(lengths), -1)
    if wanted.dim() != 2 or wanted.shape[0] != len(lengths):
        raise PlanError(
            f"{argument} must be a list of positions or [batch, n] for {len(lengths)} prompts, "
            f"not of shape {list(wanted.shape)}"
        )
    resolved = torch.where(wanted < 0, wanted + lengths[:, None], wanted)
    wrong = (resolved < 0) | (resolved >= lengths[:, None])
    if bool(wrong.any()):
        prompt, at = (int(i) for i in wrong.nonzero()[0])
        raise PlanError(
            f"{argument} names position {int(wanted[prompt, at])}, but prompt {prompt} has "
            f"{int(lengths[prompt])} tokens"
        )
    return resolved


def membership(name: str, span: SpanLike, positions: Tensor) -> Tensor:
    """Which keys, at these positions [batch, key], belong to a named span."""
    if isinstance(span, Tensor):
        member = span.to(positions.device, torch.bool)
        member = member if member.dim() == 2 else member.expand(positions.shape[0], -1)
        return (
            at_positions(member[..., None], positions, f"segment {name!r}", missing=0)[..., 0] > 0
        )
    try:
        spans = torch.as_tensor(span, device=positions.device)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PlanError(f"segment {name!r} must be a span (start, stop), not {span!r}") from error
    if spans.is_floating_point() or spans.dtype == torch.bool or bool((spans < 0).any()):
        raise PlanError(
            f"segment {name!r} must be a span of positions counted from the start, not {span!r}"
        )
    if spans.dim() == 1:
        spans = spans.expand(positions.shape[0], -1)
    if spans.shape != (positions.shape[0], 2) or bool((spans[:, 0] >= spans[:, 1]).any()):
        raise PlanError(
            f"segment {name!r} must be a span (start, stop) with start < stop, or one per prompt, not {span!r}"
        )
    return (positions >= spans[:, :1]) & (positions < spans[:, 1:])


def is_flat(x: Tensor | None) -> bool:
    """Whether a per-key feature has no feature axis of its own."""
    return x is not None and x.dim() == 1


def per_key(x: Tensor) -> Tensor:
    """[batch, key, feature] of [key], [key, feature] or [batch, key, feature]."""
    if x.dim() == 1:
        return x[None, :, None]
    if x.dim() == 2:
        return x[None]
    if x.dim() == 3:
        return x
    raise PlanError(f"x must be [key], [key, n] or [batch, key, n], not of shape {list(x.shape)}")


def at_positions(
    values: Tensor, positions: Tensor, what: str, missing: float | None = None
) -> Tensor:
    """Values [batch, position, n] at key positions [batch, key]; 0 in padding."""
    values = values.to(positions.device).expand(positions.shape[0], -1, -1)
    if missing is None and int(positions.max()) >= values.shape[1]:
        raise PlanError(
            f"{what} has {values.shape[1]} keys, but the sequence has {int(positions.max()) + 1}"
        )
    index = positions.clamp(0, values.shape[1] - 1)[..., None].expand(-1, -1, values.shape[2])
    known = (positions >= 0) & (positions < values.shape[1])
    return values.gather(1, index) * known[..., None]
