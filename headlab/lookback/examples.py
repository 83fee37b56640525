"""Responses to prompts, with labels that say which of their tokens the prompt's context bears out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.attention.keep import is_whole
from headlab.errors import PlanError, PromptError
from headlab.tasks import RecordError, RecordsLike, read_records
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: One example of the user's.
LOOKBACK_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Lookback: a prompt, a response and what of it is not borne out by the prompt",
    "type": "object",
    "properties": {
        "prompt": {
            "type": "string",
            "pattern": r"\S",
            "description": "What the model read: context, question and cue.",
        },
        "response": {"type": "string", "pattern": r"\S", "description": "What it answered."},
        "label": {
            "enum": [0, 1],
            "description": "Of the whole response: 1 if the context bears it out, 0 if not.",
        },
        "bad": {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "minItems": 2,
                "maxItems": 2,
            },
            "description": "Characters [start, stop) of the response that it does not bear out; in place of label.",
        },
        "document": {
            "type": "string",
            "description": "What the prompt is about; examples of one document stay in one fold.",
        },
        "cue": {
            "type": "string",
            "description": "The prompt's end, such as '\\nAnswer:', which counts as new text, not as context.",
        },
    },
    "required": ["prompt", "response"],
    "additionalProperties": False,
    "examples": [
        {
            "prompt": "The ferry sails at nine.\nQuestion: When does the ferry sail?\nAnswer:",
            "response": " At nine.",
            "label": 1,
            "document": "ferry",
            "cue": "\nAnswer:",
        }
    ],
}


@dataclass(frozen=True)
class Example:
    """A prompt and a response to it.

    Attributes:
        prompt: What the model read, as text or token ids.
        response: What it answered, as text that follows the prompt directly, or token ids.
        bad: Characters [start, stop) of the response that the context does not bear out; None where nobody has said.
            With a response given as ids, places among its tokens.
        document: What the prompt is about: examples of one document are never on both sides of a split.
        cue: The prompt's end that counts as new text (the authors take "\\n#Answer#:"); where it is empty, the prompt's
            last token does, since there must be something new for the first token to be compared with.
    """

    prompt: str | tuple[int, ...]
    response: str | tuple[int, ...]
    bad: tuple[tuple[int, int], ...] | None = None
    document: str = ""
    cue: str = ""

    @staticmethod
    def labelled(
        prompt: str, response: str, label: int, *, document: str = "", cue: str = ""
    ) -> Example:
        """An example whose whole response has one label: 1 if the context bears it out, 0 if not."""
        if label not in (0, 1):
            raise PlanError(f"label={shown(label)} must be 0 or 1")
        bad = () if label else ((0, len(response)),)
        return Example(prompt, response, bad, document or prompt, cue)


@dataclass(frozen=True)
class Tokens:
    """An example as tokens.

    Attributes:
        ids: Prompt and response, [position].
        start: Position of the response's first token.
        context: Tokens of the context: keys before this position are context, later ones new.
        labels: 1 for a token that is borne out, 0 for one that is not, [response token]; None without labels.
        document: What the prompt is about.
    """

    ids: Int[Tensor, " position"]
    start: int
    context: int
    labels: Int[Tensor, " token"] | None
    document: str


def read_examples(source: RecordsLike) -> tuple[Example, ...]:
    """Examples from JSON Lines, a dataset or records; see :data:`LOOKBACK_SCHEMA`.

    Raises:
        RecordError: A record does not fit.
    """
    made = []
    for at, record in enumerate(read_records(source, LOOKBACK_SCHEMA, "lookback")):
        if "label" in record and "bad" in record:
            raise RecordError(f"record {at}: give either label or bad, not both")
        bad = record.get("bad")
        if "label" in record:
            bad = [] if record["label"] else [[0, len(record["response"])]]
        for start, stop in bad or ():
            if not start < stop <= len(record["response"]):
                raise RecordError(
                    f"record {at}: bad [{start}, {stop}] does not lie in the response of "
                    f"{len(record['response'])} characters"
                )
        made.append(
            Example(
                record["prompt"],
                record["response"],
                None if bad is None else tuple((int(a), int(b)) for a, b in bad),
                record.get("document", record["prompt"]),
                record.get("cue", ""),
            )
        )
    return tuple(made)


def tokenised(model: Model, example: Example) -> Tokens:
    """Prompt and response as the model reads them; the response's tokens are found by character offsets.

    Raises:
        PromptError: The response is empty, the cue is not the prompt's end, or there is no context before it.
    """
    if not isinstance(example, Example):
        raise PlanError(
            f"an example is hl.lookback.Example(prompt, response, …), not {shown(example)}"
        )
    if isinstance(example.prompt, str) or isinstance(example.response, str):
        check_tokenizer(model)
    prompt = _real(model, example.prompt)
    response, offsets = _response(model, example.response)
    labels = None
    if example.bad is not None:
        _check_spans(example.bad, example.response)
        labels = torch.tensor(
            [
                int(not any(low < stop and high > start for start, stop in example.bad))
                for low, high in offsets
            ]
        )
    ids = torch.tensor(prompt + response)
    if model.spec.max_context is not None and len(ids) > model.spec.max_context:
        raise PromptError(
            f"prompt and response have {len(ids)} tokens, and {model.name} a context of {model.spec.max_context}"
        )
    context = len(prompt) - _cue_tokens(model, example)
    if context < 1:
        raise PromptError(
            "the prompt is a single token or all cue, so there is no context to look back on"
        )
    about = example.prompt if isinstance(example.prompt, str) else str(prompt)
    return Tokens(ids, len(prompt), context, labels, example.document or about)


def all_tokenised(model: Model, examples: Iterable[Example]) -> list[Tokens]:
    """Several examples as tokens.

    Raises:
        PromptError: One cannot be used, or there are none.
    """
    found = [tokenised(model, example) for example in examples]
    if not found:
        raise PromptError("there are no examples")
    return found


def check_examples(model: Model, examples: Iterable[Example]) -> None:
    """Refuse examples that the model cannot read, without running it.

    Raises:
        PromptError: One cannot be used, or there are none.
    """
    all_tokenised(model, examples)


def check_tokenizer(model: Model) -> None:
    """Refuse a model that gives no character offsets.

    Raises:
        PromptError: It has no tokenizer, or a slow one.
    """
    if model.tokenizer is None or not model.tokenizer.is_fast:
        raise PromptError(
            f"{model.name} has no tokenizer that gives character offsets (a fast one); give token ids"
        )


def _real(model: Model, prompt: Any) -> list[int]:
    """Token ids of one prompt.

    Raises:
        PromptError: It cannot be used, or is more than one.
    """
    given = list(prompt) if isinstance(prompt, tuple) else prompt
    rows = model.tokens(given)
    if len(rows) > 1:
        raise PromptError(f"an example has one prompt and one response, not {len(rows)}")
    return [int(token) for token in rows[0] if token >= 0]


def _response(
    model: Model, response: str | tuple[int, ...]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and where each begins and ends among characters, or among the ids that were given."""
    if isinstance(response, str) and response.strip():
        # By itself, so that it begins with a token of its own; a prompt's end may not join it.
        encoded = model.tokenizer(
            response, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        if not encoded["input_ids"]:
            raise PromptError(f"the response {shown(response)} has no tokens")
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])
    if not isinstance(response, str | Sequence | Tensor):
        raise PromptError(f"a response is text or token ids, not {shown(response)}")
    if isinstance(response, str) or len(response) == 0:
        raise PromptError("the response is empty, so there is nothing to score")
    ids = _real(model, response)
    return ids, [(at, at + 1) for at in range(len(ids))]


def _check_spans(bad: Sequence[tuple[int, int]], response: str | tuple[int, ...]) -> None:
    for span in bad:
        fine = len(span) == 2 and all(is_whole(at) for at in span)
        if not fine or not 0 <= span[0] < span[1] <= len(response):
            raise PlanError(
                f"bad={shown(span)} does not lie in the response, which has a length of {len(response)}"
            )


def _cue_tokens(model: Model, example: Example) -> int:
    """Tokens of the prompt that count as new; one at least."""
    if not example.cue:
        return 1
    if not isinstance(example.prompt, str):
        raise PromptError(f"the cue {shown(example.cue)} is text: give the prompt as text, too")
    if not example.prompt.endswith(example.cue):
        raise PromptError(f"the cue {shown(example.cue)} is not the end of the prompt")
    begins = len(example.prompt) - len(example.cue)
    encoded = model.tokenizer(example.prompt, return_offsets_mapping=True, verbose=False)
    inside = sum(1 for low, high in encoded["offset_mapping"] if high > begins and high > low)
    return max(1, inside)
