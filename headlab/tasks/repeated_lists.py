"""Lists shown twice: [BOS, x, x] with x random tokens or a list of the user's, and controls [BOS, x, y].

y is as many other tokens; for a list of the user's, whose tokens are not random, it is x in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from headlab.tasks.random_tokens import given_tokens, random_tokens, shuffled_apart

#: Fewest tokens of a list.
MIN_LIST = 16

#: JSON Schema of a list of the user's.
LIST_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A list to show twice",
    "description": f"Words or a text of at least {MIN_LIST} tokens; the model reads it twice in a row.",
    "type": "object",
    "properties": {
        "words": {
            "title": "Words",
            "description": "The items in order; they are joined by spaces.",
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 2,
        },
        "text": {
            "title": "Text",
            "description": "A text whose tokens are the items.",
            "type": "string",
            "minLength": 1,
        },
    },
    "oneOf": [{"required": ["words"]}, {"required": ["text"]}],
    "additionalProperties": False,
    "examples": [
        {
            "words": [
                *("river", "candle", "anchor", "garden", "pencil", "marble", "window", "copper"),
                *("basket", "thunder", "violin", "harbor", "pepper", "lantern", "saddle", "meadow"),
            ]
        },
        {
            "text": "The ferry leaves at noon, calls at two small islands, waits an hour for the mail and "
            "comes back before dark."
        },
    ],
}


@dataclass(frozen=True)
class RepeatedList:
    """A list twice, and its control.

    Attributes:
        repeated: [BOS, x, x].
        control: [BOS, x, y]: the same positions, and y does not repeat x.
        n: Tokens of x.
        start: Position of x's first token: 1 after a BOS token, else 0.
        once: Which tokens of x occur in it once, so that their earlier place is no question.
    """

    repeated: Int[np.ndarray, " position"]
    control: Int[np.ndarray, " position"]
    n: int
    start: int
    once: Bool[np.ndarray, " token"]


def random_lists(
    plain: Int[np.ndarray, " token"], n_lists: int, n: int, seed: int, bos: int | None
) -> tuple[RepeatedList, ...]:
    """Lists of n distinct random tokens.

    Args:
        plain: Tokens to draw from; 2n distinct ones are needed.
        n_lists: Lists.
        n: Tokens of a list.
        seed: Seed of the draw.
        bos: Beginning-of-sequence token, or None for a model that has none.

    Raises:
        PromptError: There are fewer plain tokens than 2n.
    """
    drawn = random_tokens(plain, n_lists, 2 * n, seed)
    return tuple(_made(row[:n], row[n:], bos) for row in drawn)


def given_lists(
    tokenizer: Any,
    records: Sequence[Mapping[str, Any]],
    seed: int,
    bos: int | None,
    limit: int | None,
) -> tuple[RepeatedList, ...]:
    """Lists of the user's, as :data:`LIST_SCHEMA` describes them; controls continue with x in another order.

    Args:
        tokenizer: Turns a list into tokens.
        records: The lists.
        seed: Seed of the order.
        bos: Beginning-of-sequence token, or None.
        limit: Longest prompt in tokens, or None.

    Raises:
        RecordError: There is no tokenizer, or a list is too short or too long.
    """
    most = None if limit is None else (limit - (bos is not None)) // 2
    found = given_tokens(tokenizer, records, MIN_LIST, most)
    return tuple(_made(x, shuffled_apart(x, seed + at), bos) for at, x in enumerate(found))


def _made(x: np.ndarray, y: np.ndarray, bos: int | None) -> RepeatedList:
    first = np.array([] if bos is None else [bos], np.int64)
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    repeated, control = (np.concatenate([first, x, half]).astype(np.int64) for half in (x, y))
    return RepeatedList(repeated, control, len(x), len(first), count[place] == 1)
