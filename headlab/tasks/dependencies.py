"""Sentences of the user's with their dependency trees, word by word, and the tokens of each word.

Words are joined by single spaces and tokenised as one text; offsets say which tokens make up a word. A treebank in
CoNLL-U becomes records by taking FORM, HEAD − 1 and DEPREL of every line with a whole number for ID.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headlab.errors import PromptError
from headlab.tasks.needles import token_span
from headlab.tasks.records import RecordError
from headlab.tasks.spans import encode

#: JSON Schema of one record.
DEPENDENCY_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Dependency tree",
    "description": "A sentence whose every word names the word that governs it.",
    "type": "object",
    "additionalProperties": False,
    "required": ["words", "heads", "relations"],
    "properties": {
        "words": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 2,
            "description": "The sentence's words and punctuation marks; single spaces are put between them.",
        },
        "heads": {
            "type": "array",
            "items": {"type": "integer", "minimum": -1},
            "description": "The governor of each word, counting words from 0; -1 for the root.",
        },
        "relations": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "description": "The relation of each word to its governor, such as det or nsubj; punct is left out of "
            "the score over all relations.",
        },
    },
    "examples": [
        {
            "words": ["The", "dog", "found", "a", "bone", "."],
            "heads": [1, 2, -1, 4, 2, 2],
            "relations": ["det", "nsubj", "root", "det", "dobj", "punct"],
        }
    ],
}


@dataclass(frozen=True)
class ParsedSentence:
    """A sentence in tokens.

    Attributes:
        ids: Token ids, special tokens included.
        words: Positions [start, stop) of the tokens of each word.
        heads: The governor of each word, or −1.
        relations: The relation of each word to its governor.
    """

    ids: tuple[int, ...]
    words: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Tells sentences of the same tokens apart."""
        return hashlib.sha256(repr((self.words, self.heads)).encode()).hexdigest()[:12]


def parsed_sentences(
    tokenizer: Any,
    records: Sequence[Mapping[str, Any]],
    *,
    bos: int | None = None,
    max_context: int | None = None,
) -> tuple[ParsedSentence, ...]:
    """Sentences of records that fit :data:`DEPENDENCY_SCHEMA`; all are checked before any is returned.

    Args:
        tokenizer: Must give character offsets.
        records: The records.
        bos: Token to put in front where the tokenizer puts none, so that no word has to serve as a sink.
        max_context: Tokens the model can read.

    Raises:
        PromptError: The tokenizer gives no offsets.
        RecordError: The lists differ in length, a governor does not exist, a token belongs to two words or a word
            has none, or the sentence is too long.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError("words need a tokenizer that gives character offsets (a fast tokenizer)")
    sentences = []
    for number, record in enumerate(records):
        try:
            sentences.append(_sentence(tokenizer, record, bos, max_context))
        except PromptError as error:
            raise RecordError(f"record {number}: {error}") from error
    return tuple(sentences)


def _sentence(
    tokenizer: Any, record: Mapping[str, Any], bos: int | None, max_context: int | None
) -> ParsedSentence:
    words, heads, relations = record["words"], record["heads"], record["relations"]
    if not len(words) == len(heads) == len(relations):
        raise PromptError(
            f"it has {len(words)} words, {len(heads)} heads and {len(relations)} relations; give one per word"
        )
    for at, head in enumerate(heads):
        if head >= len(words) or head == at:
            raise PromptError(
                f"the head of word {at}, {words[at]!r:.40}, is {head}; it must be another word, counted from 0, "
                "or -1 for the root"
            )
    if blank := [at for at, word in enumerate(words) if not word.strip()]:
        raise PromptError(f"no token covers {words[blank[0]]!r}, word {blank[0]}; leave it out")
    text = " ".join(words)
    encoded = encode(tokenizer, text)
    ids, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    if bos is not None and ids[:1] != [bos]:
        ids, offsets = [bos, *ids], [(0, 0), *offsets]
    if max_context is not None and len(ids) > max_context:
        raise PromptError(
            f"its sentence has {len(ids)} tokens, but the model's context holds {max_context}"
        )
    spans, start = [], 0
    for word in words:
        spans.append(token_span(offsets, start, start + len(word), text))
        start += len(word) + 1
    return ParsedSentence(tuple(ids), tuple(spans), tuple(heads), tuple(relations))
