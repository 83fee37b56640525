"""A model that reads its context, and answers that are read off the context or come from nowhere."""

from __future__ import annotations

from functools import cache

import numpy as np

from headlab import planted
from headlab.lookback import Example

_BOS, _FIRST, _VOCAB = 0, 6, 128  # special tokens and stops come first


@cache
def reads(family: str = "llama", n_heads: int = 4, seed: int = 0) -> planted.Planted:
    """A planted model whose head L2H1 looks back at what followed the last token earlier on."""
    heads = {"L1H0": "previous_token", "L2H1": "induction"}
    return planted.model(family, heads, n_heads=n_heads, distractors=3, seed=seed)


def answers(n: int, seed: int, context: int = 30, length: int = 14) -> list[Example]:
    """Every other answer copies on from the context; the rest are words that the context lacks.

    The prompts' last word stands in the context before what is copied, or, with the rest, nowhere.
    """
    rng = np.random.default_rng(seed)
    made = []
    for at in range(n):
        words = [int(i) for i in rng.permutation(np.arange(_FIRST, _VOCAB))]
        seen, new = words[:context], words[context : context + length]
        last, bad = words[-1], ((0, length),)
        if at % 2:
            start = int(rng.integers(1, context - length))
            new, last, bad = seen[start : start + length], seen[start - 1], ()
        made.append(Example((_BOS, *seen, last), tuple(new), bad, f"document {at}"))
    return made
