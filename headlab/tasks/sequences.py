"""Ordered lists of words, such as days and numerals, as single tokens of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from headlab.tasks.prose import data_folder
from headlab.tasks.records import RecordError

#: Least members of a list as single tokens.
LEAST = 5

#: One list of the user's.
SEQUENCE_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "An ordered list",
    "description": "Words in their order, each a single token of the model.",
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": LEAST,
            "uniqueItems": True,
            "description": "The words, in order.",
        },
        "name": {"type": "string", "minLength": 1, "description": "What the list is called."},
        "cyclic": {
            "type": "boolean",
            "description": "Whether the first word follows the last; false by default.",
        },
    },
    "required": ["items", "name"],
    "additionalProperties": False,
    "examples": [
        {
            "name": "days",
            "items": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
            "cyclic": True,
        }
    ],
}


@dataclass(frozen=True)
class OrderedTokens:
    """An ordered list as tokens.

    Attributes:
        name: What it is called.
        members: Tokens of the items that are a single token, in order.
        pairs: Indices into ``members`` of items that follow each other in the list: item and successor.
    """

    name: str
    members: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    def runs(self, length: int) -> list[tuple[int, ...]]:
        """Tokens of every stretch of this many items that follow each other."""
        follower = dict(self.pairs)
        found = []
        for start in follower:
            run = [start]
            while len(run) < length and run[-1] in follower:
                run.append(follower[run[-1]])
            if len(set(run)) == length:
                found.append(tuple(self.members[at] for at in run))
        return found


def ordered_tokens(
    tokenizer: Any, records: Sequence[Mapping[str, Any]] | None = None
) -> tuple[OrderedTokens, ...]:
    """The lists of which the tokenizer has enough items as single tokens.

    Args:
        tokenizer: The model's.
        records: Lists of the user's, of which every item must be one token; headlab's own by default.

    Raises:
        RecordError: An item of the user's is not a single token, or two are the same token.
    """
    given = _own() if records is None else records
    found = []
    for number, record in enumerate(given):
        tokens = [single_token(tokenizer, item) for item in record["items"]]
        if records is not None:
            _check(number, record, tokens)
        known = [at for at, token in enumerate(tokens) if token is not None]
        index = {at: place for place, at in enumerate(known)}
        after = [(at, at + 1) for at in range(len(tokens) - 1)]
        if record.get("cyclic", False):
            after.append((len(tokens) - 1, 0))
        members = tuple(token for token in tokens if token is not None)
        pairs = tuple((index[a], index[b]) for a, b in after if a in index and b in index)
        if len(set(members)) == len(members) >= LEAST and len(pairs) >= LEAST - 1:
            found.append(OrderedTokens(str(record["name"]), members, pairs))
    return tuple(found)


def single_token(tokenizer: Any, item: str) -> int | None:
    """The token of a word in the middle of a sentence, or by itself where it is one only there; else None."""
    if not item.strip():
        return None
    for text in (f" {item}", item):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and tokenizer.decode(ids).strip().lower() == item.strip().lower():
            return int(ids[0])
    return None


def _check(number: int, record: Mapping[str, Any], tokens: list[int | None]) -> None:
    seen: dict[int, str] = {}
    for item, token in zip(record["items"], tokens, strict=True):
        if token is None:
            raise RecordError(
                f"record {number}: {item!r} is not a single token of this model; leave it out"
            )
        if token in seen:
            raise RecordError(
                f"record {number}: {seen[token]!r} and {item!r} are the same token; keep one"
            )
        seen[token] = item


def dealt(lists: Sequence[OrderedTokens], n_groups: int, seed: int) -> list[list[tuple[int, int]]]:
    """Items dealt to groups, at most one of each list to a group: (list, pair) each; empty groups are left out.

    Large lists give as many items as there are groups, so that none outweighs the others.
    """
    rng = np.random.default_rng(seed)
    groups: list[list[tuple[int, int]]] = [[] for _ in range(n_groups)]
    for which, found in enumerate(lists):
        taken = min(n_groups, len(found.pairs))
        pairs = rng.choice(len(found.pairs), taken, replace=False)
        places = rng.choice(n_groups, taken, replace=False)
        for place, pair in zip(places, pairs, strict=True):
            groups[place].append((which, int(pair)))
    return [group for group in groups if group]


@cache
def _own() -> tuple[dict[str, Any], ...]:
    loaded = json.loads((data_folder() / "sequences.json").read_text("utf-8"))
    return tuple(loaded["sequences"])
