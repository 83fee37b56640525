"""The real default model, opened at most once per session, and a second copy that headlab never runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import headlab as hl
from headlab.models import open_model


@cache
def smollm2() -> hl.Model:
    """SmolLM2-135M-Instruct in float32 on the CPU."""
    return hl.load("smollm2-135m", device="cpu", dtype="float32")


@cache
def eager_smollm2() -> Any:
    """The same weights in a module of their own, under Hugging Face's eager attention."""
    module = open_model("smollm2-135m", device="cpu", dtype="float32").module
    module.set_attn_implementation("eager")
    return module
