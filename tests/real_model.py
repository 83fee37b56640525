"""Models that several test files share, made at most once per session: the real one and a planted one."""

from __future__ import annotations

from functools import cache
from typing import Any

import headlab as hl
from headlab import planted
from headlab.models import open_model

PLANTED_HEADS = {
    "L0H2": "sink",
    "L1H0": "previous_token",
    "L1H3": "duplicate_token",
    "L2H1": "induction",
}


@cache
def smollm2() -> hl.Model:
    """SmolLM2-135M-Instruct in float32 on the CPU."""
    return hl.load("smollm2-135m", device="cpu", dtype="float32")


@cache
def eager_smollm2() -> Any:
    """The same weights in a module that headlab never runs, under Hugging Face's eager attention."""
    module = open_model("smollm2-135m", device="cpu", dtype="float32").module
    module.set_attn_implementation("eager")
    return module


@cache
def planted_llama() -> planted.Planted:
    """A planted model with one head of each role; nobody may change it."""
    return planted.model("llama", PLANTED_HEADS, distractors=6, max_context=160)


@cache
def planted_model() -> hl.Model:
    """The same, opened."""
    made = planted_llama()
    return hl.load(made.module, tokenizer=made.tokenizer)
