"""Turning prompts into token ids: text, ids or batches of either; −1 marks what lies beyond a prompt's end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from headlab.errors import PromptError
from headlab.models import ModelSpec
from headlab.text import is_text, shown

#: Text, token ids, or a batch of either; a LongTensor [batch, position] holds −1 beyond a prompt's end.
Prompt: TypeAlias = "str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor"

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Prompts:
    """Encodes and decodes for one model.

    Args:
        tokenizer: The model's tokenizer, or None.
        spec: The model.
    """

    def __init__(self, tokenizer: Any, spec: ModelSpec) -> None:
        self._tokenizer = tokenizer
        self._spec = spec

    @property
    def tokenizer(self) -> Any:
        """The tokenizer.

        Raises:
            PromptError: There is none.
        """
        if self._tokenizer is None:
            raise PromptError(
                f"{self._spec.name} came without a tokenizer; pass token ids, or load it with tokenizer="
            )
        return self._tokenizer

    def encode(self, prompt: Prompt, limit: int | None = None) -> Int[Tensor, "batch position"]:
        """Token ids, padded with −1 on the right.

        Args:
            prompt: The prompts.
            limit: Keep only this many tokens of each.

        Raises:
            PromptError: A prompt is empty, is longer than the model's context, or holds ids that do not exist.
        """
        if isinstance(prompt, Tensor):
            if prompt.dtype not in _INTEGERS:
                raise PromptError(f"token ids are whole numbers, not {prompt.dtype}")
            ids = prompt.long()
            ids = ids[None] if ids.dim() == 1 else ids
        else:
            ids = _padded(self._id_lists(prompt))
        if ids.dim() != 2 or ids.numel() == 0 or not bool((ids >= 0).any(1).all()):
            raise PromptError("a prompt is empty; give at least one token")
        if int(ids.max()) >= self._spec.n_vocab or int(ids.min()) < -1:
            raise PromptError(
                f"token ids must lie in 0–{self._spec.n_vocab - 1}, or be −1 beyond a prompt's end"
            )
        ids = aligned(ids, "right")[:, : int(lengths_of(ids).max())][:, :limit]
        context = self._spec.max_context
        if context is not None and ids.shape[1] > context:
            raise PromptError(
                f"the prompt has {ids.shape[1]} tokens, but {self._spec.name} has a context of {context}; "
                "shorten it"
            )
        return ids

    def _id_lists(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._text_ids(prompt)]
        if not isinstance(prompt, Sequence) or len(prompt) == 0:
            raise PromptError(
                f"a prompt is text, token ids or a list of either, not {prompt!r:.60}"
            )
        if all(isinstance(part, str) for part in prompt):
            return [self._text_ids(text) for text in prompt]
        if not any(isinstance(part, Sequence) for part in prompt):
            return [_whole_numbers(prompt)]
        if all(isinstance(part, Sequence) and not isinstance(part, str) for part in prompt):
            return [_whole_numbers(part) for part in prompt]
        raise PromptError("a batch of prompts must be all text or all token ids")

    def _text_ids(self, text: str) -> list[int]:
        if not text.strip():
            raise PromptError("the text is empty; give at least one word")
        if not is_text(text):
            raise PromptError(f"the text {shown(text)} holds half a character (a lone surrogate)")
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def decode(self, ids: Tensor | Sequence[int], *, special: bool = True) -> str:
        """Text of token ids, with or without special tokens; −1 is left out."""
        kept = [int(i) for i in torch.as_tensor(ids).flatten() if int(i) >= 0]
        return str(self.tokenizer.decode(kept, skip_special_tokens=not special))

    def token_texts(self, ids: Tensor) -> tuple[tuple[str, ...], ...]:
        """Each token as text, per prompt; the ids themselves where there is no tokenizer."""
        rows = [[int(i) for i in row if int(i) >= 0] for row in ids]
        if self._tokenizer is None:
            return tuple(tuple(str(i) for i in row) for row in rows)
        return tuple(tuple(self._tokenizer.decode([i]) for i in row) for row in rows)


def lengths_of(ids: Int[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
    """Tokens of each prompt."""
    return (ids >= 0).sum(1)


def aligned(
    ids: Int[Tensor, "batch position"], padding: Literal["left", "right"]
) -> Int[Tensor, "batch position"]:
    """The same prompts with all their padding (−1) on one side."""
    real = ids >= 0
    if bool(real.all()):
        return ids
    order = torch.argsort(real.long(), dim=1, descending=padding == "right", stable=True)
    return ids.gather(1, order)


def _padded(lists: list[list[int]]) -> Tensor:
    ids = torch.full((len(lists), max(len(part) for part in lists)), -1)
    for row, part in enumerate(lists):
        ids[row, : len(part)] = torch.tensor(part, dtype=torch.long)
    return ids


def _whole_numbers(ids: Sequence[Any]) -> list[int]:
    if any(isinstance(i, bool) or not hasattr(i, "__index__") for i in ids):
        raise PromptError(f"token ids are whole numbers, not {ids!r:.60}")
    return [index(i) for i in ids]
