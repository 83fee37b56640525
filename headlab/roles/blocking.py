"""Keys hidden from heads: the knock-out that takes a key away and leaves the head everything else it does.

A hidden key's score is set to −inf before the softmax, so the row's mass goes to the keys that are left, in
proportion. A row that would be left without any key keeps what it had.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headlab.attention.edits import Edit, Operation, Where
from headlab.attention.heads import Head, HeadsLike
from headlab.model import Model

#: ``hidden(query, key)`` says which keys to hide, from positions that broadcast to [batch, query, key].
Hidden = Callable[[Int[Tensor, "batch query 1"], Int[Tensor, "batch query key"]], Tensor]


def hide(heads: HeadsLike, hidden: Hidden) -> Edit:
    """Hide keys from heads by the positions of query and key.

    Positions are those of each sequence, so left padding and cached keys make no difference. A row's own token
    must be visible to it, which edits before this one must not change.

    Args:
        heads: The heads.
        hidden: Which keys to hide.
    """

    def prepare(model: Model, bound: tuple[Head, ...]) -> Operation:
        causal = tuple(layer.causal for layer in model.spec.layers)

        def operation(scores: Tensor, where: Where) -> Tensor:
            seen = scores > -torch.inf
            keys = _key_positions(seen, where.positions, causal[where.layer])
            gone = hidden(where.positions[:, :, None], keys)[:, None]
            left = (seen & ~gone).any(-1, keepdim=True)
            return scores.masked_fill(gone & left, -torch.inf)

        return operation

    return Edit(heads, "scores", prepare)


def block_first(heads: HeadsLike, n: int = 1) -> Edit:
    """Hide the first ``n`` tokens of every sequence from heads; rows that see nothing else keep them.

    The token after them then sees only itself in these heads, as a first token does, and may take their place: hidden
    from every head of a model, one first token merely makes way for the next.
    """
    return hide(heads, lambda query, key: key < n)


def _key_positions(
    seen: Bool[Tensor, "batch head query key"], positions: Int[Tensor, "batch query"], causal: bool
) -> Int[Tensor, "batch query key"]:
    """Position of every key column, row by row.

    The last key a causal row sees is its own token, which tells where the columns begin whatever padding or a
    cache has put before them. An encoder's columns begin with the sequence.
    """
    columns = torch.arange(seen.shape[-1], device=seen.device)
    if not causal:
        return columns.expand(*positions.shape, -1)
    last = torch.where(seen.any(1), columns, -1).amax(-1)
    return columns - (last - positions.to(last))[:, :, None]
