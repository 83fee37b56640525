"""Sequences of random tokens: they need no corpus and hold no structure but what the probe puts in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headlab.errors import PromptError


@dataclass(frozen=True)
class RepeatedTokens:
    """Pairs of sequences that differ only in whether the second half repeats the first.

    Attributes:
        repeated: [BOS, x, x] per prompt.
        control: [BOS, x, y] with y drawn apart from x: same lengths and positions, nothing repeats.
        n: Tokens of x.
        start: Position of x's first token: 1 after a BOS token, else 0.
    """

    repeated: Int[Tensor, "prompt position"]
    control: Int[Tensor, "prompt position"]
    n: int
    start: int

    @property
    def second_copy(self) -> Int[Tensor, " query"]:
        """Positions of the second half, its first token left out: nothing before it shows that x repeats."""
        return torch.arange(self.start + self.n + 1, self.start + 2 * self.n)


def plain_tokens(tokenizer: Any, n_vocab: int) -> Int[np.ndarray, " token"]:
    """Ids that are ordinary text: special and added tokens left out, and so are ids without a token."""
    if tokenizer is None:
        return np.arange(n_vocab)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    known = min(len(tokenizer), n_vocab)
    return np.array([token for token in range(known) if token not in special])


def random_tokens(
    plain: np.ndarray, n_prompts: int, length: int, seed: int
) -> Int[np.ndarray, "prompt token"]:
    """Rows of distinct random tokens: a token drawn twice would be a target the probe does not know of.

    Raises:
        PromptError: There are fewer tokens than a row needs.
    """
    if len(plain) < length:
        raise PromptError(
            f"the vocabulary has {len(plain)} plain tokens, but a probe of {length} distinct ones is needed"
        )
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(plain, length, replace=False) for _ in range(n_prompts)])


def repeated_tokens(
    plain: np.ndarray, n_prompts: int, n: int, seed: int, bos: int | None
) -> RepeatedTokens:
    """Repeated sequences and their controls.

    Args:
        plain: Tokens to draw from; 2n distinct ones are needed.
        n_prompts: Pairs.
        n: Tokens of x.
        seed: Seed of the draw.
        bos: Beginning-of-sequence token, or None for a model that has none.
    """
    drawn = random_tokens(plain, n_prompts, 2 * n, seed)
    x, y = drawn[:, :n], drawn[:, n:]
    first = [] if bos is None else [np.full((n_prompts, 1), bos)]

    def rows(*parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([*first, *parts], 1))

    return RepeatedTokens(rows(x, x), rows(x, y), n, len(first))
