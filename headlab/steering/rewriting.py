"""Moving attention between keys of a row: what split-softmax, ACT and the rest have in common.

All take pattern rows [batch, head, query, key] and masks of keys that broadcast to them, and leave each row's sum as it
was (1, or less beside a sink logit).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def raise_share(
    pattern: Float[Tensor, "batch head query key"],
    inside: Bool[Tensor, "#batch #head #query key"],
    k: float,
) -> Float[Tensor, "batch head query key"]:
    """The share π of the keys inside becomes π^k, in proportion within and without; rows of π = 0 or 1 stay."""
    total = pattern.sum(-1, keepdim=True).clamp(min=torch.finfo(pattern.dtype).tiny)
    mass = (pattern * inside).sum(-1, keepdim=True)
    # A mass too small to divide by counts as none.
    least = torch.finfo(pattern.dtype).eps ** 2
    mixed = (mass > least) & (total - mass > least)
    share = torch.where(mixed, mass / total, 0.5)
    grown = share**k
    factor = torch.where(inside, grown / share, (1 - grown) / (1 - share))
    return torch.where(mixed, pattern * factor, pattern)


def move(
    pattern: Float[Tensor, "batch head query key"],
    source: Bool[Tensor, "#batch #head #query key"],
    target: Bool[Tensor, "#batch #head #query key"],
    kept: float,
) -> Float[Tensor, "batch head query key"]:
    """Weights of the source keys times ``kept``; what that frees goes to the target keys, in proportion to theirs.

    Rows that give the target nothing stay as they are. No key may be source and target at once.
    """
    freed = (1 - kept) * (pattern * source).sum(-1, keepdim=True)
    own = (pattern * target).sum(-1, keepdim=True)
    able = own > torch.finfo(pattern.dtype).eps ** 2  # less is too small to divide by
    factor = torch.where(source, kept, 1.0).to(pattern) + target * (freed / own.where(able, 1))
    return torch.where(able, pattern * factor, pattern)


def set_shares(
    pattern: Float[Tensor, "batch head query key"],
    groups: Bool[Tensor, "batch group key"],
    weights: Float[Tensor, "batch group"],
) -> Float[Tensor, "batch head query key"]:
    """The mean weight of a group's keys becomes proportional to ``weights``, in proportion within the group.

    a' = a · w_g / mean_g · C, with C such that all groups together keep their mass. Groups do not overlap; a group
    without keys does not count; rows that give any other group nothing stay as they are.
    """
    size = groups.sum(-1)  # [batch, group]
    member = groups.to(pattern)
    mass = torch.einsum("bhqk,bgk->bhqg", pattern, member)
    real = (size > 0)[:, None, None]
    able = ((mass > torch.finfo(pattern.dtype).eps ** 2) | ~real).all(-1, keepdim=True)
    wanted = (weights.to(pattern) * size)[
        :, None, None
    ]  # w_g · n_g, the mass that the mean asks for
    shared = mass.sum(-1, keepdim=True) / wanted.sum(-1, keepdim=True)
    factor = wanted * shared / mass.where(mass > 0, 1)
    spread = torch.einsum("bhqg,bgk->bhqk", factor, member)
    inside = groups.any(1)[:, None, None]
    return torch.where(able & inside, pattern * spread, pattern)
