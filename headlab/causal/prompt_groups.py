"""Prompts sorted into groups of one length: they need no padding, and so no masks of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from headlab.prompts import lengths_of


@dataclass(frozen=True)
class Group:
    """Some pairs of one length.

    Attributes:
        rows: Which of the prompts, [prompt].
        clean: Their token ids, [prompt, position].
        corrupted: Those of their partners.
        start: First position at which any pair differs; the last one where none does. Before it, a clean and a
            corrupted run of a causal model are the same.
    """

    rows: Int[Tensor, " prompt"]
    clean: Int[Tensor, "prompt position"]
    corrupted: Int[Tensor, "prompt position"]
    start: int

    @property
    def tokens(self) -> int:
        """Tokens from ``start`` on, of all prompts."""
        return len(self.rows) * (self.clean.shape[1] - self.start)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows.tolist())


def groups(clean: Tensor, corrupted: Tensor, tokens_at_once: int) -> list[Group]:
    """Pairs by length, no group with more tokens than this unless one pair has.

    Args:
        clean: Token ids, [prompt, position], −1 beyond a prompt's end.
        corrupted: Those of the partners, of the same lengths.
        tokens_at_once: Tokens of a group at most.
    """
    found = []
    for rows in by_length(clean, tokens_at_once):
        length = int((clean[rows[0]] >= 0).sum())
        at = rows.to(clean.device)
        ours, theirs = clean[at, :length], corrupted[at, :length]
        differs = (ours != theirs).any(0).nonzero()[:, 0]
        start = int(differs[0]) if len(differs) else length - 1
        found.append(Group(rows, ours, theirs, start))
    return found


def by_length(
    ids: Int[Tensor, "prompt position"], tokens_at_once: int
) -> Iterator[Int[Tensor, " prompt"]]:
    """Which prompts run together: of one length, and no more tokens than this unless one prompt has them."""
    lengths = lengths_of(ids)
    for length in sorted(set(lengths.tolist())):
        members = (lengths == length).nonzero()[:, 0].cpu()
        yield from members.split(max(1, tokens_at_once // length))
