"""What steering and lookback refuse, each in one sentence, and what they used to get silently wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from steering_methods import HEADS, MADE, noise
from test_capture import ids_of

import headlab as hl
from headlab.errors import HeadlabError, OutputError, PlanError, PromptError, UnsupportedError
from headlab.lookback import Calibrator, Example, Lens, Linear
from headlab.steering import ACT, Behaviour, Case, HeadVectors, JuICE, Learned, Pasta
from headlab.steering.learned import shape_of
from headlab.steering.rewriting import move, raise_share

Lab = Callable[..., Any]
LEARNED = sorted(name for name in MADE if issubclass(hl.steering.Method.all[name], Learned))


@pytest.mark.parametrize("name", LEARNED)
def test_learned_numbers_must_be_finite_and_of_their_own_sizes(lab: Lab, name: str) -> None:
    model, ids = lab("llama"), ids_of(9)
    method = MADE[name](model)
    assert isinstance(method, Learned)
    field = next(iter(method.sizes))
    tensor = getattr(method, field)
    for wrong in (tensor[..., :1], tensor * torch.nan, tensor.long(), tensor[..., :-1]):
        with (
            pytest.raises(PlanError, match=r"shape|infinity"),
            hl.steer(model, method._with(**{field: wrong})),
        ):
            model.logits(ids)
    factor = {method.strength_field: float("nan")}
    with pytest.raises(PlanError, match="finite"), hl.steer(model, method._with(**factor)):
        model.logits(ids)


def test_rows_that_would_go_to_other_heads_are_refused(lab: Lab) -> None:
    model = lab("llama")
    width = model.spec.layers[0].d_value
    swapped = HeadVectors("1.0, 0.1", shape_of(model), noise(2, width))
    with pytest.raises(PlanError, match="out of order"), hl.steer(model, swapped):
        pass


@pytest.mark.parametrize(
    "settings", [[1], {"heads": "0.1", "shape": "abc"}, {"heads": 3, "shape": [2, 6, 10, 36]}]
)
def test_files_that_were_tampered_with_are_refused(tmp_path: Path, settings: Any) -> None:
    about = {
        "format": "headlab-steering-1",
        "method": "function_vector",
        "settings": json.dumps(settings),
    }
    path = tmp_path / "tampered.safetensors"
    save_file({"vector": torch.ones(36)}, path, about)
    with pytest.raises(OutputError, match="tampered"):
        hl.steering.load(path)


def test_a_second_juice_is_refused(lab: Lab) -> None:
    model = lab("llama")
    with (
        hl.steer(model, JuICE("0.1")),
        pytest.raises(PlanError, match="in force already"),
        hl.steer(model, JuICE("1.0")),
    ):
        pass
    with hl.steer(model, JuICE("1.0")):
        pass


def test_copies_of_a_prompt_are_prompts_of_their_own(lab: Lab) -> None:
    model, ids = lab("llama"), ids_of(9)
    spans = [[(1, 3)], [(2, 5)]]
    with hl.steer(model, Pasta([spans[0], spans[0], spans[1], spans[1]], HEADS)):
        new = model.generate(
            ids,
            max_new_tokens=4,
            num_return_sequences=2,
            do_sample=True,
            seed=1,
            keep=hl.keep.rows([-1]),
        )
    assert new.ids.shape[0] == 4
    assert new.trace is not None
    assert new.trace.ids[:, :9].tolist() == ids.repeat_interleave(2, 0).tolist()
    with pytest.raises(PlanError, match="num_return_sequences"):
        model.generate(ids, max_new_tokens=2, num_return_sequences=0)


def measure(model: hl.Model, cases: Any) -> np.ndarray:
    return np.array([np.nan if case.answer == "nan" else 1.0 for case in cases])


def test_cases_are_all_marked_or_none_and_every_number_is_one(lab: Lab) -> None:
    model = lab("llama")
    marked, plain = Case((5, 6, 7, 8), spans=((1, 2),)), Case((9, 10, 11, 12))
    mixed = Behaviour("mixed", "", (marked, plain), measure)
    with pytest.raises(PlanError, match="some cases mark text"):
        mixed.values(model, Pasta([(0, 1)]))
    missing = Behaviour("missing", "", (plain, Case((5, 6), "nan")), measure)
    with pytest.raises(PlanError, match="NaN for case 1"):
        missing.values(model, None)
    for method, behaviour in ((None, mixed), (Pasta, mixed), (Pasta([(0, 1)]), [mixed])):
        with pytest.raises(PlanError, match="a method and a behaviour"):
            hl.steering.evaluate(model, method, behaviour)  # type: ignore[arg-type]
    for strengths in ([], 0.5):
        with pytest.raises(PlanError, match="strengths"):
            hl.steering.evaluate(model, Pasta([(0, 1)]), mixed, strengths=strengths)  # type: ignore[arg-type]


def test_weights_too_small_to_divide_by_stay(lab: Lab) -> None:
    row = torch.tensor([[[[1.0, 1e-42, 0.0]]]])
    first = torch.tensor([True, False, False])[None, None, None]
    assert torch.equal(move(row, first, ~first, 0.4), row)
    assert bool(raise_share(row, first, 0.01).isfinite().all())
    assert bool(raise_share(row, ~first, 0.01).isfinite().all())


def test_encoders_are_refused_where_rows_must_be_causal(lab: Lab) -> None:
    model = lab("bert")
    with pytest.raises(UnsupportedError, match="no decoder"):
        hl.lookback.ratios(model, Example((5, 6, 7), (8, 9)))
    with pytest.raises(HeadlabError), hl.steer(model, ACT("0.1")):
        model.trace(ids_of(9))


def lens_of(model: hl.Model) -> Lens:
    import pandas as pd

    shape = (model.spec.n_layers, model.spec.layers[0].n_heads)
    linear = Linear(np.linspace(-1, 1, shape[0] * shape[1]), 0.0)
    return Lens(linear, Calibrator(), shape, 4, pd.DataFrame(), {}, {})


def test_guided_decoding_is_refused_under_steering(lab: Lab) -> None:
    model = lab("llama")
    prompt: Any = tuple(ids_of(9, batch=1)[0].tolist())
    guided = hl.lookback.generate(model, lens_of(model), prompt, 6, chunk=3, n_candidates=2)
    assert 1 <= len(guided.ids) <= 6
    with (
        hl.steer(model, Pasta([(1, 3)])),
        pytest.raises(PlanError, match="end their block first"),
    ):
        hl.lookback.generate(model, lens_of(model), prompt, 6)
    assert "nan spans" in repr(lens_of(model))


def test_half_a_character_is_refused(lab: Lab) -> None:
    with pytest.raises(PromptError, match="half a character"):
        lab("llama").logits("w5 \ud800")
