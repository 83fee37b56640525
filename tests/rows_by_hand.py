"""Methods that rewrite pattern rows, against the same rows rewritten one by one in the plain attention of oracle.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from exact_pair import Pair, pair, singles
from test_capture import ragged
from test_generate import padded
from torch import Tensor

import headlab as hl

#: What becomes of the visible part of one row: (weights [key], layer, head, query) -> weights.
Change = Callable[[Tensor, int, int, int], Tensor]
LENGTHS = (11, 7, 9)
NEW = 5
FAMILIES = ("llama", "gpt2")  # grouped heads, and not


def rows(change: Change) -> Callable[[Tensor, int], Tensor]:
    """Rewrites the pattern of one unpadded prompt."""

    def apply(x: Tensor, layer: int) -> Tensor:
        x = x.clone()
        for head in range(x.shape[1]):
            for query in range(x.shape[2]):
                x[0, head, query, : query + 1] = change(
                    x[0, head, query, : query + 1].clone(), layer, head, query
                )
        return x

    return apply


def holds_everywhere(
    family: str, method: Any, changes: Callable[[Pair, Tensor, int], Change], atol: float = 1e-6
) -> None:
    """One pass, a batch of prompts of different lengths, and generation with a cache from left-padded prompts.

    ``changes(pair, prompt, row)`` is what is done by hand to the rows of prompt number ``row``. The float32 of an
    engine's rows bounds how close logits come; tokens must be the same.
    """
    both, ids = pair(family), ragged(LENGTHS)
    plain = both.model.logits(ids)
    written = []
    with hl.steer(both.model, method):
        batch = both.model.logits(ids)
        new = both.model.generate(ids, max_new_tokens=NEW, eos_token_id=None).ids
    for row, prompt in enumerate(singles(ids)):
        rewrite = rows(changes(both, prompt, row))
        expected = both.logits(prompt, pattern=rewrite)
        torch.testing.assert_close(batch[row, : len(prompt)], expected, atol=atol, rtol=0)
        assert float((expected - plain[row, : len(prompt)]).abs().max()) > 1e-3
        written.append(both.greedy(prompt, NEW, lambda n, rewrite=rewrite: {"pattern": rewrite}))
    assert new.tolist() == padded(written, NEW)
    again = both.model.logits(ids)
    assert torch.equal(again[ids >= 0], plain[ids >= 0])


def pattern_under(model: hl.Model, method: Any, ids: Tensor) -> Tensor:
    """The whole pattern while a method is in force, [batch, layer, head, query, key]."""
    with hl.steer(model, method):
        return model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")
