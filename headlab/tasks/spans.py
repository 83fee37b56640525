"""Pairs of spans in texts of the user's: where attention is to come from, and where it is to go.

Spans are character offsets, as an annotation tool gives them; they become token positions by the tokenizer's own
offsets, so a span that cuts a token in two is refused rather than rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headlab.errors import PromptError
from headlab.tasks.needles import token_span
from headlab.tasks.records import RecordError

_SPANS = {"anyOf": [{"$ref": "#/$defs/span"}, {"$ref": "#/$defs/spans"}]}

#: JSON Schema of one record.
SPAN_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Spans",
    "description": "A text in which rows of one span are to attend to another span; offsets count characters.",
    "type": "object",
    "additionalProperties": False,
    "required": ["text", "from", "to"],
    "properties": {
        "text": {
            "type": "string",
            "minLength": 1,
            "description": "The prompt, as the model is to read it.",
        },
        "from": {
            **_SPANS,
            "description": "Span, or spans, whose rows are read: [start, stop) in characters. Rows that do not see "
            "the whole of `to` are left out.",
        },
        "to": {**_SPANS, "description": "Span, or spans, that attention is to go to."},
        "name": {"type": "string", "description": "A name for the record, for messages."},
        "answer": {
            "type": "string",
            "minLength": 1,
            "description": "What should follow the text, its leading space included; its log-probability is what "
            "ablating the heads should spoil.",
        },
        "rows": {
            "enum": ["own", "predicting"],
            "description": "Whether a token of `from` stands for its own row (the default) or for the row before "
            "it, which predicts it.",
        },
    },
    "$defs": {
        "span": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "minItems": 2,
            "maxItems": 2,
        },
        "spans": {"type": "array", "items": {"$ref": "#/$defs/span"}, "minItems": 1},
    },
    "examples": [
        {"text": "Ada met Tom. Tom greeted Ada.", "from": [25, 28], "to": [0, 3]},
        {
            "text": "The password is heron. Question: what is the password? Answer:",
            "from": [56, 62],
            "to": [[16, 21]],
            "answer": " heron",
            "name": "password",
        },
    ],
}


@dataclass(frozen=True)
class SpanTrial:
    """One text with its spans, in tokens.

    Attributes:
        ids: Token ids of the text.
        rows: Query positions to read.
        keys: Positions of the span attention is to go to.
        others: Positions that chance is drawn from: tokens of the text that are not among ``keys`` nor the first.
        beside: Those of them within a span's own length of it, on either side.
        answered: Token ids of the text with its answer, and where the answer starts; None without an answer.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    others: tuple[int, ...]
    beside: tuple[int, ...]
    answered: tuple[tuple[int, ...], int] | None = None

    @property
    def digest(self) -> str:
        """Tells trials on the same text apart."""
        return hashlib.sha256(repr((self.rows, self.keys, self.others)).encode()).hexdigest()[:12]


def span_trials(
    tokenizer: Any,
    records: Sequence[Mapping[str, Any]],
    *,
    causal: bool = True,
    max_context: int | None = None,
) -> tuple[SpanTrial, ...]:
    """Trials of records that fit :data:`SPAN_SCHEMA`; all are checked before any is returned.

    Args:
        tokenizer: Must give character offsets. Texts are encoded as it encodes any text, special tokens included,
            unless the text begins with the beginning-of-sequence token itself.
        records: The records.
        causal: Whether a row sees only keys up to its own position.
        max_context: Tokens the model can read.

    Raises:
        PromptError: The tokenizer gives no offsets.
        RecordError: A span lies outside its text, is empty or covers no token, a token straddles a span's edge, the
            text is too long, no row sees the whole of ``to``, or nothing is left to compare it with.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise PromptError("spans need a tokenizer that gives character offsets (a fast tokenizer)")
    trials = []
    for number, record in enumerate(records):
        try:
            trials.append(_trial(tokenizer, record, causal, max_context))
        except PromptError as error:
            name = f" ({record['name']!r:.40})" if "name" in record else ""
            raise RecordError(f"record {number}{name}: {error}") from error
    return tuple(trials)


def _trial(
    tokenizer: Any, record: Mapping[str, Any], causal: bool, max_context: int | None
) -> SpanTrial:
    text = record["text"]
    encoded = encode(tokenizer, text)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    _check_length(ids, max_context, "text")
    sources = [position for span in _spans(record, "from", offsets) for position in range(*span)]
    targets = _spans(record, "to", offsets)
    keys = {position for span in targets for position in range(*span)}
    rows = sorted(set(sources))
    if record.get("rows") == "predicting":
        rows = [position - 1 for position in rows if position > 0]
    seeing = [row for row in rows if row >= max(keys) or not causal]
    if not seeing:
        raise PromptError(
            "no row of `from` sees the whole of `to`, since a row sees only what comes before it; "
            "choose a `from` that comes after `to`"
        )
    others = [
        at for at, (low, high) in enumerate(offsets) if high > low and at > 0 and at not in keys
    ]
    if sum(at <= max(seeing) or not causal for at in others) < len(keys):
        raise PromptError(
            f"`to` has {len(keys)} tokens, and its rows see fewer others to compare it with; "
            "choose a shorter `to` or a longer text"
        )
    near = {
        at
        for start, stop in targets
        for at in (*range(2 * start - stop, start), *range(stop, 2 * stop - start))
    }
    answered = None
    if "answer" in record:
        answered = _answered(tokenizer, text, record["answer"], max_context)
    beside = tuple(at for at in others if at in near)
    return SpanTrial(
        tuple(ids), tuple(seeing), tuple(sorted(keys)), tuple(others), beside, answered
    )


def _spans(
    record: Mapping[str, Any], field: str, offsets: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The spans of a field, in tokens."""
    text, given = record["text"], record[field]
    found = []
    for start, stop in given if isinstance(given[0], list | tuple) else [given]:
        if start >= stop:
            raise PromptError(f"`{field}` {[start, stop]} is empty; a span is [start, stop)")
        if stop > len(text):
            raise PromptError(
                f"`{field}` {[start, stop]} lies outside the text, which has {len(text)} characters"
            )
        try:
            found.append(token_span(offsets, start, stop, text))
        except PromptError as error:
            raise PromptError(f"{error} (`{field}` {[start, stop]})") from error
    return found


def _answered(
    tokenizer: Any, text: str, answer: str, max_context: int | None
) -> tuple[tuple[int, ...], int]:
    # The end of a text may carry special tokens, so text and answer are encoded as one.
    whole = encode(tokenizer, text + answer)
    _check_length(whole["input_ids"], max_context, "text with its answer")
    start, stop = token_span(
        whole["offset_mapping"], len(text), len(text) + len(answer), text + answer
    )
    return tuple(whole["input_ids"][:stop]), start


def _check_length(ids: Sequence[int], max_context: int | None, what: str) -> None:
    if max_context is not None and len(ids) > max_context:
        raise PromptError(
            f"its {what} has {len(ids)} tokens, but the model's context holds {max_context}"
        )


def encode(tokenizer: Any, text: str) -> Any:
    """Token ids and character offsets of a text, with the tokenizer's special tokens where the text has none."""
    first = tokenizer.bos_token or tokenizer.cls_token
    own = first is not None and text.startswith(first)
    return tokenizer(text, add_special_tokens=not own, return_offsets_mapping=True, verbose=False)
