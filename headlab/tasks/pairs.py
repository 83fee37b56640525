"""Pairs of a clean and a corrupted prompt with the tokens to compare: what causal experiments run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headlab.errors import PromptError
from headlab.tasks.ioi import ioi_prompts
from headlab.tasks.records import RecordError, RecordsLike, read_records

#: One record of the user's own pairs.
PAIR_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A clean and a corrupted prompt",
    "description": "Two prompts of as many tokens, and the tokens whose logits tell them apart at the last position.",
    "type": "object",
    "properties": {
        "clean": {
            "description": "The prompt that shows the behaviour.",
            "type": "string",
            "minLength": 1,
        },
        "corrupted": {
            "description": "The same with what matters changed; as many tokens. Needed for patching and circuits.",
            "type": "string",
            "minLength": 1,
        },
        "answer": {
            "description": "What comes next in the clean prompt, exactly one token: mind its leading space.",
            "type": "string",
            "minLength": 1,
        },
        "foil": {
            "description": "What to compare the answer with, exactly one token.",
            "type": "string",
            "minLength": 1,
        },
    },
    "required": ["clean", "answer"],
    "additionalProperties": False,
    "examples": [
        {
            "clean": "The Eiffel Tower stands in the city of",
            "corrupted": "The Brandenburg Gate stands in the city of",
            "answer": " Paris",
            "foil": " Berlin",
        }
    ],
}


@dataclass(frozen=True)
class PromptPairs:
    """Prompts, their corruptions, and the tokens to compare.

    Attributes:
        clean: Token ids of each clean prompt.
        corrupted: Token ids of each corrupted prompt; empty where there are none.
        answers: Tokens of each prompt that should come next.
        foils: Tokens of each to compare with; empty where there are none.
    """

    clean: tuple[tuple[int, ...], ...]
    corrupted: tuple[tuple[int, ...], ...]
    answers: tuple[int | str, ...]
    foils: tuple[int | str, ...]

    def __len__(self) -> int:
        return len(self.clean)


def ioi_pairs(tokenizer: Any, n_prompts: int, seed: int, bos: int | None = None) -> PromptPairs:
    """Indirect object identification with its ABC corruption, of one length as far as the draw gives enough.

    Args:
        tokenizer: As for :func:`~headlab.tasks.ioi_prompts`.
        n_prompts: How many pairs.
        seed: Seed of names, places and objects.
        bos: Beginning-of-sequence token to put first, or None.

    Raises:
        PromptError: There is no such tokenizer.
    """
    drawn = ioi_prompts(tokenizer, 4 * n_prompts, seed, bos)
    lengths = [len(prompt.ids) for prompt in drawn]
    common = sorted(set(lengths), key=lambda length: (-lengths.count(length), length))
    # The commonest length first; more of them where one does not give enough.
    chosen = [prompt for length in common for prompt in drawn if len(prompt.ids) == length]
    some = chosen[:n_prompts]
    return PromptPairs(
        tuple(prompt.ids for prompt in some),
        tuple(prompt.corrupted for prompt in some),
        tuple(prompt.io for prompt in some),
        tuple(prompt.subject for prompt in some),
    )


def given_pairs(
    tokenizer: Any, source: RecordsLike, bos: int | None = None, *, corrupted: bool = True
) -> PromptPairs:
    """Pairs of the user's own, by :data:`PAIR_SCHEMA`.

    Args:
        tokenizer: Of the model.
        source: A JSON Lines file, or records.
        bos: Beginning-of-sequence token to put first, or None.
        corrupted: Whether every record must have a corrupted prompt.

    Raises:
        RecordError: A record does not fit.
        PromptError: There is no tokenizer.
    """
    if tokenizer is None:
        raise PromptError("pairs of text need a model with a tokenizer")
    records = read_records(source, PAIR_SCHEMA, "pairs")
    for field, why in (("corrupted", "a corrupted prompt"), ("foil", "a foil")):
        have = [field in record for record in records]
        if any(have) != all(have) or (field == "corrupted" and corrupted and not all(have)):
            raise RecordError(
                f"record {have.index(False)} has no {field!r}: give every record {why}"
            )
    return PromptPairs(
        _encoded(tokenizer, [record["clean"] for record in records], bos),
        _encoded(tokenizer, [r["corrupted"] for r in records if "corrupted" in r], bos),
        tuple(record["answer"] for record in records),
        tuple(record["foil"] for record in records if "foil" in record),
    )


def _encoded(tokenizer: Any, texts: Sequence[str], bos: int | None) -> tuple[tuple[int, ...], ...]:
    begin = () if bos is None else (bos,)
    return tuple(
        (*begin, *tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
    )
