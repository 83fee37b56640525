"""Keys hidden from heads: the knock-out that takes a key away and leaves the head everything else it does.

A hidden key's score is set to −inf before the softmax, so the row's mass goes to the keys that are left, in
proportion. A row that would be left without any key keeps what it had.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.attention import Edit, HeadsLike, Where, apply

#: ``hidden(query, key)`` says which keys to hide, from positions that broadcast to [batch, query, key].
Hidden = Callable[[Int[Tensor, "batch query 1"], Int[Tensor, "batch 1 key"]], Tensor]


def hide(heads: HeadsLike, hidden: Hidden) -> Edit:
    """Hide keys from heads by the positions of query and key.

    Positions are those of each sequence, so left padding and cached keys make no difference.

    Args:
        heads: The heads.
        hidden: Which keys to hide.
    """

    def operation(scores: Tensor, where: Where) -> Tensor:
        assert where.keys is not None
        gone = hidden(where.positions[:, :, None], where.keys[:, None])[:, None]
        left = ((scores > -torch.inf) & ~gone).any(-1, keepdim=True)
        return scores.masked_fill(gone & left, -torch.inf)

    return apply(heads, operation, "scores")


def block_first(heads: HeadsLike, n: int = 1) -> Edit:
    """Hide the first ``n`` tokens of every sequence from heads; rows that see nothing else keep them.

    The token after them then sees only itself in these heads, as a first token does, and may take their place: hidden
    from every head of a model, one first token merely makes way for the next.
    """
    return hide(heads, lambda query, key: key < n)
