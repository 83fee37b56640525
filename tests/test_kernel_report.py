"""The fused kernels behind the seam, in Triton's interpreter: the report they give is the dense engine's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from real_model import smollm2

import headlab as hl

#: Numbers that must agree; p-values and intervals follow from them, prompt by prompt.
NUMBERS = ["score", "null_mean", "effect", "ci_low", "ci_high", "half_1", "half_2"]


def same_report(
    model: Any, roles: list[str], monkeypatch: pytest.MonkeyPatch, n_prompts: int
) -> None:
    """Score by either engine, and compare every number of the table."""
    pytest.importorskip("triton")
    frames = []
    for engine in ("dense", "triton"):
        monkeypatch.setenv("HEADLAB_KERNEL", engine)
        frames.append(hl.score(model, roles=roles, seed=0, n_prompts=n_prompts).frame)
    dense, fused = frames
    for column in ("role", "layer", "head", "n", "claimed", "note"):
        assert dense[column].equals(fused[column]), column
    for column in NUMBERS:
        np.testing.assert_allclose(
            fused[column].to_numpy(float), dense[column].to_numpy(float), atol=2e-5, err_msg=column
        )
    assert dense["score"].abs().max() > 0.1


def shortened(model: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with probes of at most so many tokens: the interpreter takes a second for a few dozen."""
    monkeypatch.setattr(model, "spec", replace(model.spec, max_context=tokens))
    return model


def test_a_planted_model_has_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = hl.planted.model(heads={"L0H0": "previous_token"}, distractors=2)
    model = shortened(hl.load(planted), 24, monkeypatch)
    same_report(model, ["previous_token", "local"], monkeypatch, n_prompts=2)


@pytest.mark.long
def test_smollm2_has_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shortened(smollm2(), 24, monkeypatch)
    roles = ["previous_token", "local", "delimiter", "copying"]
    same_report(model, roles, monkeypatch, n_prompts=2)
