"""Marked text: which keys of whatever prompt is being run belong to the spans that a user named.

Spans are found in the prompt's own tokens by character offsets, never by encoding them anew: a word has other tokens
at the beginning of a text than within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from headlab.attention import Where
from headlab.attention.keep import is_whole
from headlab.errors import PlanError, PromptError
from headlab.text import shown

if TYPE_CHECKING:
    from headlab.model import Model

#: Text that stands in the prompt, every time it does (within words too), or positions [start, stop).
Span: TypeAlias = "str | tuple[int, int]"
#: Spans of every prompt, or a list of them for each prompt of a batch.
SpansLike: TypeAlias = "Sequence[Span] | Sequence[Sequence[Span]]"


class Marks:
    """Finds marked spans in the prompts that are run.

    Args:
        model: The model; text needs its tokenizer.
        spans: Text, every time it occurs, or positions; negative positions count from the prompt's end. A token that
            reaches beyond a span is marked whole.
        last_only: Whether to mark the last token of each span alone.

    Raises:
        PlanError: Spans are neither.
    """

    def __init__(self, model: Model, spans: SpansLike, last_only: bool = False) -> None:
        self._model, self._last_only = model, last_only
        self._per_prompt, self._spans = read_spans(spans)
        self._known: tuple[Tensor, Tensor | None, Tensor] | None = None

    def keys(self, where: Where) -> Bool[Tensor, "batch key"]:
        """Which keys are marked; at the sites bias, scores and pattern."""
        if where.keys is None:
            raise PlanError("keys can be marked at the sites bias, scores and pattern only")
        return self._at(where, where.keys)

    def positions(self, where: Where) -> Bool[Tensor, "batch position"]:
        """Which of the positions being run are marked, such as those of k and v."""
        return self._at(where, where.positions)

    def _at(self, where: Where, positions: Tensor) -> Tensor:
        marked = self._marked(where)
        n = marked.shape[1]
        inside = (positions >= 0) & (positions < n)
        return marked.to(positions.device).gather(1, positions.clamp(0, n - 1)) & inside

    def _marked(self, where: Where) -> Tensor:
        """Marked positions of the prompts being run, [batch, position]."""
        if where.prompt is None:
            raise PlanError(
                "marked text can be found only where whole prompts are run: use the model's trace, logits, generate or "
                "stream"
            )
        known = self._known
        if known is not None and known[0].shape == where.prompt.shape:
            same = known[0] is where.prompt or torch.equal(known[0], where.prompt)
            if same and known[1] is where.prompts:
                return known[2]
        if self._per_prompt:
            n = where.n_prompts if where.prompts is not None else len(where.prompt)
            if len(self._spans) != n:
                raise PlanError(
                    f"spans= marks {len(self._spans)} prompts, but {n} are run; give one list of spans for each"
                )
        marked = torch.zeros(where.prompt.shape, dtype=torch.bool)
        prompts = None if where.prompts is None else where.prompts.tolist()
        for row, ids in enumerate(where.prompt.cpu()):
            which = row if prompts is None else prompts[row]
            spans = self._spans[which if self._per_prompt else 0]
            for start, stop in find_spans(self._model, ids[ids >= 0].tolist(), spans):
                marked[row, stop - 1 if self._last_only else start : stop] = True
        marked = marked.to(where.prompt.device)
        self._known = (where.prompt, where.prompts, marked)
        return marked


def read_spans(spans: Any) -> tuple[bool, list[list[Span]]]:
    """Whether spans are given per prompt, and each prompt's.

    Raises:
        PlanError: They are neither text nor positions, or there are none.
    """
    if isinstance(spans, str) or not isinstance(spans, Sequence) or not spans:
        raise PlanError(
            f"spans={shown(spans)} must be a list of text or of positions, as ['Paris'] or [(3, 5)]"
        )
    per_prompt = all(isinstance(part, list) and not _is_pair(part) for part in spans)
    given = list(spans) if per_prompt else [list(spans)]
    if not all(given):
        raise PlanError("a prompt has an empty list of spans; mark at least one")
    return per_prompt, [[_read(span) for span in part] for part in given]


def _read(span: Any) -> Span:
    if isinstance(span, str) and span.strip():
        return span
    if _is_pair(span):
        return (int(span[0]), int(span[1]))
    raise PlanError(f"span {shown(span)} must be text, or positions (start, stop)")


def _is_pair(span: Any) -> bool:
    """Positions; a pair that was kept as JSON comes back as a list."""
    return (
        isinstance(span, tuple | list) and len(span) == 2 and all(is_whole(place) for place in span)
    )


def find_spans(model: Model, ids: Sequence[int], spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Positions [start, stop) of spans in a prompt; a text has one entry for each time it occurs.

    Raises:
        PromptError: A span is not in the prompt.
    """
    found: list[tuple[int, int]] = []
    offsets: list[tuple[int, int]] = []
    text = ""
    for span in spans:
        if isinstance(span, tuple):
            found.append(_checked(span, len(ids)))
            continue
        if not offsets:
            text, offsets = character_offsets(model, ids)
        at = text.find(span)
        if at < 0:
            raise PromptError(f"the span {shown(span)} is not in the prompt {shown(text)}")
        while at >= 0:
            stop = at + len(span)
            inside = [
                place
                for place, (low, high) in enumerate(offsets)
                if low < stop and high > at and text[max(low, at) : min(high, stop)].strip()
            ]
            found.append((inside[0], inside[-1] + 1))
            at = text.find(span, at + 1)
    return found


def character_offsets(model: Model, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a prompt, and the characters [start, stop) of each of its tokens.

    Raises:
        PromptError: The model has no tokenizer.
    """
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} came without a tokenizer, so spans must be positions (start, stop)"
        )
    text = model.text(ids)
    if getattr(model.tokenizer, "is_fast", False):
        again = model.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        if list(again["input_ids"]) == list(ids):
            return text, [(int(low), int(high)) for low, high in again["offset_mapping"]]
    # A text may have been split otherwise than its tokenizer would: then each beginning is decoded. Where one ends
    # within a character, what it decodes to parts from the text there, and its last token is of that character.
    whole, reached = [0], [0]
    for place in range(1, len(ids) + 1):
        begun = model.text(ids[:place])
        same = _agreeing(begun, text, whole[-1])
        whole.append(max(whole[-1], same))
        reached.append(max(whole[-1], min(len(text), same + (len(begun) > same))))
    return text, list(zip(whole[:-1], reached[1:], strict=True))


def _agreeing(begun: str, text: str, known: int) -> int:
    """How many characters of a beginning are the text's; it is known of the first few."""
    if text.startswith(begun):
        return len(begun)
    pairs = zip(begun[known:], text[known:], strict=False)
    differing = (at for at, (ours, its) in enumerate(pairs) if ours != its)
    return known + next(differing, min(len(begun), len(text)) - known)


def _checked(span: tuple[int, int], n: int) -> tuple[int, int]:
    start, stop = (int(at) + n if at < 0 else int(at) for at in span)
    if not 0 <= start < stop <= n:
        raise PromptError(f"the span {span} is not in the prompt, which has {n} tokens")
    return start, stop
