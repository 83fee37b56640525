"""Arguments of causal procedures: numpy's numbers work, nonsense is named, and gradients are there when needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import token_pairs
from tiny_models import build
from transformers import AutoModel

import headlab as hl
from headlab.arguments import finite_number, is_finite, seed_number, whole_number
from headlab.causal import metrics
from headlab.causal.attribution.atp import atp, atp_star
from headlab.causal.attribution.direct import direct_logit_attribution
from headlab.causal.attribution.eap import Edges, eap, eap_ig
from headlab.causal.attribution.eap_heads import eap_ig_heads
from headlab.causal.attribution.flow import information_flow
from headlab.causal.attribution.importance import head_importance
from headlab.causal.attribution.rollout import attention_flow, attention_rollout
from headlab.causal.attribution.sources import by_source
from headlab.causal.circuits.acdc import acdc
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.faithfulness import HeadRuns, faithfulness, faithfulness_curve
from headlab.causal.effects import Effects
from headlab.causal.head_sets.pruning import greedy_pruning, pruning_curve
from headlab.causal.head_sets.shapley import Bernstein, shapley_heads, shapley_values
from headlab.errors import PlanError, UnsupportedError

METRIC = metrics.logit_difference(5, 7)
CLEAN, CORRUPTED = token_pairs(2, 6)
PAIRED = [atp, atp_star, eap, eap_ig, eap_ig_heads]


def never(logits: Any, rows: Any) -> Any:
    raise AssertionError("the work began before the arguments were checked")


def test_numbers_by_hand():
    assert whole_number(np.int64(3), "n") == 3
    assert finite_number(np.float32(0.5), "x") == 0.5
    assert seed_number(np.uint8(0)) == 0
    assert is_finite(np.int64(2))
    assert not any(map(is_finite, [math.nan, math.inf, 10**400, True, "1", None, 1j, [1.0]]))
    for value in (
        True,
        np.True_,
        1.0,
        "1",
        None,
        np.array([1, 2]),
        torch.tensor(1),
        0,
        np.int64(-1),
    ):
        with pytest.raises(PlanError, match=r"n=.*must be a whole number of at least 1"):
            whole_number(value, "n", 1)
    for value in (True, math.nan, 10**400, "1", None):
        with pytest.raises(PlanError, match=r"x=.*must be a finite number"):
            finite_number(value, "x")


def scores(found: Any) -> np.ndarray:
    if isinstance(found, Effects):
        return found.values
    column = "score" if isinstance(found, Edges) else "importance"
    frame = found.frame if isinstance(found, Edges) else found
    return frame[column].to_numpy()


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", [*PAIRED, head_importance])
def test_gradients_are_taken_where_the_caller_has_turned_them_off(lab, method, off):
    model = lab("llama")
    pair = [CLEAN] if method is head_importance else [CLEAN, CORRUPTED]
    wanted = scores(method(model, *pair, METRIC))
    assert np.abs(wanted).max() > 0
    with off():
        found = scores(method(model, *pair, METRIC))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("method", [*PAIRED, head_importance])
def test_a_metric_that_detaches_is_refused(lab, method):
    pair = [CLEAN] if method is head_importance else [CLEAN, CORRUPTED]
    with pytest.raises(PlanError, match="the metric has no gradient"):
        method(lab("llama"), *pair, lambda logits, rows: logits[:, 5].detach())


@pytest.mark.parametrize("method", [*PAIRED, head_importance])
def test_prompts_may_but_models_may_not_be_made_in_inference_mode(lab, method):
    with torch.inference_mode():
        lost = hl.load(build("llama"))
        pair = [CLEAN.clone()] if method is head_importance else [CLEAN.clone(), CORRUPTED.clone()]
    assert pair[0].is_inference()
    assert np.isfinite(scores(method(lab("llama"), *pair, METRIC))).all()
    with pytest.raises(PlanError, match="loaded under torch"):
        method(lost, *pair, METRIC)


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """The layers of a language model without its head."""
    folder = tmp_path_factory.mktemp("headless")
    build("llama").save_pretrained(folder)
    return hl.load(AutoModel.from_pretrained(folder).eval())


@pytest.mark.parametrize("method", [*PAIRED, head_importance])
def test_models_without_a_language_model_head_are_refused(headless, method):
    pair = [CLEAN] if method is head_importance else [CLEAN, CORRUPTED]
    with pytest.raises(UnsupportedError, match="has no language-model head"):
        method(headless, *pair, lambda logits, rows: logits[:, 5])


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None, True])
def test_seeds_are_checked_before_the_work(lab, seed):
    model = lab("llama")
    runs = HeadRuns(model, CLEAN, CORRUPTED, METRIC)
    circuit = Circuit.of_heads(model, {"*.*": 1.0})
    for call in (
        lambda: atp(model, CLEAN, CORRUPTED, never, seed=seed),
        lambda: atp_star(model, CLEAN, CORRUPTED, never, seed=seed),
        lambda: eap_ig_heads(model, CLEAN, CORRUPTED, never, seed=seed),
        lambda: shapley_heads(model, CLEAN, never, seed=seed),
        lambda: shapley_values(never, ("a", "b"), seed=seed),
        lambda: pruning_curve(model, CLEAN, never, "random", seed=seed),
        lambda: greedy_pruning(model, CLEAN, never, seed=seed),
        lambda: faithfulness(runs, circuit, seed=seed),
        lambda: faithfulness_curve(runs, circuit, seed=seed),
    ):
        with pytest.raises(PlanError, match=r"seed=.*must be a whole number of at least 0"):
            call()


def test_numbers_of_numpy_work(lab):
    model = lab("llama")
    edges = eap_ig(model, CLEAN, CORRUPTED, METRIC, steps=np.int64(3))
    np.testing.assert_array_equal(
        scores(edges), scores(eap_ig(model, CLEAN, CORRUPTED, METRIC, steps=3))
    )
    assert len(edges.top(np.int64(3))) == 3
    last = direct_logit_attribution(model, CLEAN, 5, position=np.int64(-1))
    np.testing.assert_array_equal(last.total, direct_logit_attribution(model, CLEAN, 5).total)
    each = direct_logit_attribution(model, CLEAN, 5, position=np.array([-1, -1]))
    np.testing.assert_array_equal(last.values, each.values)
    huge = acdc(lab("gpt2"), CLEAN, CORRUPTED, np.float32(1e6))
    assert len(huge) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: eap(m, CLEAN, CORRUPTED, METRIC).top(True), "n=True must be"),
        (lambda m: eap_ig(m, CLEAN, CORRUPTED, METRIC, steps=True), "steps=True must be"),
        (lambda m: atp(m, CLEAN, CORRUPTED, METRIC, tokens_at_once=0), "tokens_at_once=0 must be"),
        (lambda m: acdc(m, CLEAN, CORRUPTED, math.nan), "tau=nan must be"),
        (lambda m: acdc(m, CLEAN, CORRUPTED, -1), "tau=-1 must be"),
        (lambda m: direct_logit_attribution(m, CLEAN, 5, position=None), "position=None must be"),
        (lambda m: direct_logit_attribution(m, CLEAN, 5, position=1.5), "position=1.5 must be"),
        (lambda m: direct_logit_attribution(m, CLEAN, 5).top("3"), "n='3' must be"),
        (lambda m: attention_rollout(m, CLEAN[:1], residual_share=None), "residual_share=None"),
        (lambda m: attention_flow(m, CLEAN[:1], residual_share="x"), "residual_share='x'"),
        (lambda m: attention_flow(m, CLEAN[:1], layers=["a"]), "layers names 'a', which is no"),
        (lambda m: attention_flow(m, CLEAN[:1], layers=5), "layers=5 must be a list"),
        (lambda m: attention_flow(m, CLEAN[:1], queries=[1.5]), "queries names 1.5, which is no"),
        (lambda m: information_flow(m, CLEAN[:1], tau=None), "tau=None must be"),
        (lambda m: information_flow(m, CLEAN[:1]).routes(1.5), "position=1.5 must be"),
        (lambda m: information_flow(m, CLEAN[:1]).routes(threshold="x"), "threshold='x' must be"),
        (lambda m: pruning_curve(m, CLEAN, METRIC, None), "scores=None must give"),
        (lambda m: pruning_curve(m, CLEAN, METRIC, []), r"scores=\[\] must give"),
        (lambda m: pruning_curve(m, CLEAN, METRIC, 5), "scores=5 must give"),
        (lambda m: pruning_curve(m, CLEAN, METRIC, np.ones((2, 3))), "scores=array"),
        (lambda m: pruning_curve(m, CLEAN, METRIC, {"0.1": None}), "score of head L0H1 is None"),
        (lambda m: pruning_curve(m, CLEAN, never, "random", step="x"), "step='x' must be"),
        (lambda m: shapley_heads(m, CLEAN, never, truncation="x"), "truncation='x' must be"),
        (lambda m: shapley_heads(m, CLEAN, never, stop=5), "stop=5 must be a stopping rule"),
        (
            lambda m: shapley_heads(m, CLEAN, never, groups={"a": "0.0"}, heads="0.1"),
            "leave heads= out",
        ),
        (lambda m: Bernstein(above="x"), "above='x' must be"),
        (lambda m: Bernstein(span=math.nan), "span=nan must be"),
        (lambda m: by_source(m, CLEAN, 5, spans=5), "spans=5 must name"),
        (lambda m: by_source(m, CLEAN, 5, spans={"a": 5}), r"span 'a' must be \(start, stop\)"),
        (lambda m: by_source(m, CLEAN, 5, spans={"a": "ab"}), "span 'a' must be"),
        (lambda m: by_source(m, CLEAN, 5, spans={"a": (0, 7)}), r"is \[0, 7\), but sources are"),
        (lambda m: by_source(m, CLEAN, 5, spans={3: (0, 1)}), "cannot be named 3"),
    ],
)  # fmt: skip
def test_nonsense_is_named(lab, call, message):
    with pytest.raises(PlanError, match=message):
        call(lab("llama"))


@pytest.mark.parametrize("label", ["layer", "head", "value", "other"])
def test_spans_may_not_take_the_place_of_other_columns(lab, label):
    with pytest.raises(PlanError, match=f"cannot be named '{label}'"):
        by_source(lab("llama"), CLEAN, 5, spans={label: (0, 2)})
