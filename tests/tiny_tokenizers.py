"""Tiny subword tokenizers of the two common makes, over a handful of words."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level() -> Any:
    """Tokens carry their space, as GPT-2's do: " king", " queen", " man", " wo", " car", "pet", and single letters."""
    made = Tokenizer(_merging("\u0120", ("king", "queen", "man", "wo", "car"), ("pet",)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def with_dummy_prefix() -> Any:
    """A space is put in front of every text, as by Llama 2's: "▁king", "▁queen", "▁man", and single letters."""
    made = Tokenizer(_merging("\u2581", ("king", "queen", "man"), ()))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Metaspace("\u2581", prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=made)


def _merging(space: str, words: tuple[str, ...], parts: tuple[str, ...]) -> models.BPE:
    """A model that joins letters from the left into words behind a space, and into parts of words."""
    held = [space, *string.ascii_lowercase]
    merges = []
    for word in (*(space + word for word in words), *parts):
        for at in range(1, len(word)):
            left, right = word[:at], word[at]
            if left + right not in held:
                held.append(left + right)
                merges.append((left, right))
    return models.BPE({token: at for at, token in enumerate(held)}, merges)
