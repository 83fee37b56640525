"""Sequences of random tokens: they need no corpus and hold no structure but what the probe puts in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headlab.errors import PromptError
from headlab.tasks.records import RecordError

#: One record of tokens of the user's, in place of random ones.
TOKENS_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Tokens to probe with",
    "description": "A passage or a list of words, in place of random tokens; one of the two.",
    "type": "object",
    "properties": {
        "text": {
            "type": "string",
            "minLength": 1,
            "description": "A passage of at least 8 tokens.",
        },
        "words": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "description": "Words, of at least 8 tokens in all, joined by spaces.",
        },
    },
    "required": [],
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
    "examples": [
        {"text": "The ferryman of Perrow sold nine brass lanterns to a travelling choir."},
        {"words": ["plum", "anchor", "violin", "marble", "lantern", "heron", "copper", "ladder"]},
    ],
}


@dataclass(frozen=True)
class RepeatedTokens:
    """Pairs of sequences that differ only in whether what follows the first x repeats it.

    Attributes:
        repeated: [BOS, x, x] per prompt, or with more copies of x.
        control: [BOS, x, y] with y drawn apart from x: same lengths and positions, nothing repeats.
        n: Tokens of x.
        start: Position of x's first token: 1 after a BOS token, else 0.
        copies: How often x stands there.
    """

    repeated: Int[Tensor, "prompt position"]
    control: Int[Tensor, "prompt position"]
    n: int
    start: int
    copies: int = 2

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
    plain: np.ndarray, n_prompts: int, n: int, seed: int, bos: int | None, copies: int = 2
) -> RepeatedTokens:
    """Repeated sequences and their controls.

    Args:
        plain: Tokens to draw from; ``copies`` · n distinct ones are needed.
        n_prompts: Pairs.
        n: Tokens of x.
        seed: Seed of the draw.
        bos: Beginning-of-sequence token, or None for a model that has none.
        copies: How often x stands in a sequence.
    """
    drawn = random_tokens(plain, n_prompts, copies * n, seed)
    x, y = drawn[:, :n], drawn[:, n:]
    first = [] if bos is None else [np.full((n_prompts, 1), bos)]

    def rows(*parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([*first, *parts], 1))

    return RepeatedTokens(rows(*[x] * copies), rows(x, y), n, len(first), copies)


@dataclass(frozen=True)
class FuzzyTokens:
    """Sequences whose second half repeats the first but for every k-th token, and their controls.

    Attributes:
        repeated: [BOS, x, x′], where x′ is x with every k-th token replaced by one that stands nowhere else.
        control: [BOS, x, y′] with y apart from x, and the same tokens replaced by the same fresh ones.
        n: Tokens of x.
        start: Position of x's first token.
        replaced: Positions of the replaced tokens, the last token of x′ left out, which has no follower.
    """

    repeated: Int[Tensor, "prompt position"]
    control: Int[Tensor, "prompt position"]
    n: int
    start: int
    replaced: Int[Tensor, " query"]


def fuzzy_tokens(
    x: Int[np.ndarray, "prompt token"],
    y: Int[np.ndarray, "prompt token"],
    fresh: Int[np.ndarray, "prompt token"],
    every: int,
    bos: int | None,
) -> FuzzyTokens:
    """Make them of given tokens.

    Args:
        x: The tokens to repeat.
        y: What follows x in the control.
        fresh: As many tokens that stand neither in x nor in y.
        every: k: tokens k − 1, 2k − 1, … of the second copy are replaced.
        bos: Beginning-of-sequence token, or None.
    """
    n_prompts, n = x.shape
    at = np.arange(every - 1, n, every)
    fuzzy, other = x.copy(), y.copy()
    fuzzy[:, at] = other[:, at] = fresh[:, at]
    first = [] if bos is None else [np.full((n_prompts, 1), bos)]

    def rows(*parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([*first, *parts], 1))

    replaced = torch.from_numpy(len(first) + n + at[at < n - 1])
    return FuzzyTokens(rows(x, fuzzy), rows(x, other), n, len(first), replaced)


def shuffled_apart(x: Int[np.ndarray, " token"], seed: int) -> Int[np.ndarray, " token"]:
    """The same tokens in another order, as few as possible of them where they were.

    The control of a repeated text: token statistics stay, the order that makes it a repeat goes. A token that fills
    half of the text or more cannot leave all of its places.
    """
    rng = np.random.default_rng(seed)
    best, left = x, len(x) + 1
    for _ in range(100):
        order = rng.permutation(len(x))
        same = int((x[order] == x).sum())
        if same < left:
            best, left = x[order], same
        if not left:
            break
    return best


def given_tokens(
    tokenizer: Any, records: Sequence[Mapping[str, Any]], least: int, most: int | None
) -> list[Int[np.ndarray, " token"]]:
    """Tokens of records that fit :data:`TOKENS_SCHEMA`, without special ones.

    Args:
        tokenizer: The model's.
        records: The records.
        least: Tokens a record must have.
        most: Tokens the model's context can hold of one, or None.

    Raises:
        RecordError: There is no tokenizer, or a record is too short or too long.
    """
    if tokenizer is None:
        raise RecordError("the model came without a tokenizer, so it cannot read text or words")
    found = []
    for number, record in enumerate(records):
        text = record["text"] if "text" in record else " ".join(record["words"])
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < least:
            raise RecordError(
                f"record {number}: it has {len(ids)} tokens, but at least {least} are needed"
            )
        if most is not None and len(ids) > most:
            raise RecordError(
                f"record {number}: it has {len(ids)} tokens, but the context has room for {most}; shorten it"
            )
        found.append(np.array(ids, dtype=np.int64))
    return found
