"""The tokens a head raises and lowers most, exactly, without a row of the vocabulary left in memory.

What a head writes for a source is a row over the whole vocabulary, z · (W_O · W_U). Only its ends are wanted. Columns
are cut into blocks; a row's k largest values lie in the k blocks with the largest maxima, since every value elsewhere
is at most the least of these k. So one pass over the row takes maxima and minima, and sorting sees a few hundred
values instead of all. Ties are settled as a stable descending sort does: the lower token id first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Direction = Literal["promotes", "suppresses"]
DIRECTIONS: tuple[Direction, ...] = ("promotes", "suppresses")

#: Columns of a block: few enough that sorting the chosen ones is cheap, enough that sorting the maxima is.
_BLOCK = 64
#: Bytes of a chunk of rows, and of the matrices of a few heads: what stays in a processor's cache or does no harm.
_ROW_BYTES, _MATRIX_BYTES = 64 << 20, 192 << 20


def row_ends(
    z: Float[Tensor, "row d_value"],
    to_vocabulary: Float[Tensor, "d_value n_vocab"],
    k: int,
    directions: tuple[Direction, ...] = DIRECTIONS,
) -> dict[Direction, Int[Tensor, "row k"]]:
    """Token ids of each row's k largest entries of ``z @ to_vocabulary``, and of its k smallest.

    Equal to the first k of a stable descending ``argsort`` of the row, or of its negative.

    Args:
        z: What the head's values are, one row per source.
        to_vocabulary: W_O · W_U of the head.
        k: How many; at most n_vocab.
        directions: ``"promotes"`` for the largest, ``"suppresses"`` for the smallest.
    """
    n, n_vocab = len(z), to_vocabulary.shape[1]
    found = {each: torch.empty(n, k, dtype=torch.long, device=z.device) for each in directions}
    step = max(1, _ROW_BYTES // (n_vocab * z.element_size()))
    room = torch.empty(min(step, n), n_vocab, dtype=z.dtype, device=z.device)
    for start in range(0, n, step):
        part = z[start : start + step]
        scores = torch.mm(part, to_vocabulary, out=room[: len(part)])
        for each in directions:
            found[each][start : start + step] = largest(scores, k, 1 if each == "promotes" else -1)
    return found


def largest(
    scores: Float[Tensor, "row n_vocab"], k: int, sign: Literal[1, -1] = 1
) -> Int[Tensor, "row k"]:
    """The first k columns of each row in a stable descending sort of ``sign * scores``."""
    n_vocab = scores.shape[1]
    k = min(k, n_vocab)
    n_blocks = n_vocab // _BLOCK
    if k == n_vocab or n_blocks <= 2 * k:
        order = torch.argsort(sign * scores, dim=1, descending=True, stable=True)
        return order[:, :k]
    # Block j holds columns j, j + n_blocks, …: maxima over a strided axis are the fast ones.
    whole = n_blocks * _BLOCK
    blocks = scores[:, :whole].unflatten(1, (_BLOCK, n_blocks))
    best = blocks.amax(1) if sign == 1 else -blocks.amin(1)
    chosen = best.topk(k + 1, 1).indices[:, None]  # one more shows whether there is a tie
    values = blocks.gather(2, chosen.expand(-1, _BLOCK, -1)).flatten(1)
    columns = (torch.arange(_BLOCK, device=scores.device)[:, None] * n_blocks + chosen).flatten(1)
    rest = torch.arange(whole, n_vocab, device=scores.device).expand(len(scores), -1)
    values, columns = torch.cat([values, scores[:, whole:]], 1), torch.cat([columns, rest], 1)
    kept = (sign * values).topk(k + 1, 1)
    found = columns.gather(1, kept.indices[:, :k])
    tied = (kept.values[:, k - 1] == kept.values[:, k]).nonzero()[:, 0]
    if len(tied):
        found[tied] = _lowest_of_ties(sign * scores[tied], kept.values[tied, k - 1], k)
    found = found.sort(1).values
    values = sign * scores.gather(1, found)
    order = values.sort(dim=1, descending=True, stable=True).indices
    return found.gather(1, order)


def _lowest_of_ties(
    scores: Float[Tensor, "row n_vocab"], least: Float[Tensor, " row"], k: int
) -> Int[Tensor, "row k"]:
    """The k largest columns where several equal the least that counts: of these, the lowest."""
    above, equal = scores > least[:, None], scores == least[:, None]
    room = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= room))).nonzero()[:, 1].view(-1, k)


def matrices_to_vocabulary(
    W_O: Float[Tensor, "head d_value d_model"],
    W_U: Float[Tensor, "d_model n_vocab"],
    like: Tensor,
) -> Iterator[Float[Tensor, "d_value n_vocab"]]:
    """W_O · W_U of one head after the other; a few heads at once, so that memory is bounded.

    Args:
        W_O: Output matrices of some heads.
        W_U: The unembedding.
        like: A tensor of the type, and on the device, they are wanted in.
    """
    n_heads, d_value, d_model = W_O.shape
    n_vocab = W_U.shape[1]
    size = like.element_size()
    at_once = max(1, _MATRIX_BYTES // (d_value * n_vocab * size))
    columns = max(1, _MATRIX_BYTES // (d_model * size))
    for start in range(0, n_heads, at_once):
        some = W_O[start : start + at_once].to(like)
        flat = some.flatten(0, 1)
        if W_U.dtype == like.dtype and W_U.device == like.device:
            product = flat @ W_U
        else:  # a converted copy of the whole vocabulary could be larger than all else
            product = torch.empty(len(flat), n_vocab, dtype=like.dtype, device=like.device)
            for at in range(0, n_vocab, columns):
                product[:, at : at + columns] = flat @ W_U[:, at : at + columns].to(like)
        yield from product.unflatten(0, some.shape[:2])


__all__ = ["DIRECTIONS", "Direction", "largest", "matrices_to_vocabulary", "row_ends"]
