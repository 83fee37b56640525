"""Pruning curves against runs of the model with the same heads ablated one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import headlab as hl
from headlab.causal import metrics
from headlab.causal.head_sets.pruning import greedy_pruning, pruning_curve
from headlab.errors import HeadError, PlanError

PROMPTS = torch.randint(4, 97, (4, 6), generator=torch.Generator().manual_seed(0))
METRIC = metrics.logit_difference(20, 30)


def measured(model, gone) -> np.ndarray:
    with model.edit(*([hl.ablate(list(gone))] if gone else [])):
        logits = model.logits(PROMPTS)[:, -1]
    return (logits[:, 20] - logits[:, 30]).detach().numpy()


@pytest.fixture(scope="module")
def scores():
    drawn = np.random.default_rng(0).normal(size=12)
    return {f"L{at // 6}H{at % 6}": float(score) for at, score in enumerate(drawn)}


def test_heads_go_in_the_order_of_their_scores(lab, scores):
    model = lab("llama")
    curve = pruning_curve(model, PROMPTS, METRIC, scores, step=0.25)
    ranked = sorted(scores, key=scores.get)
    assert [str(head) for head in curve.order] == ranked
    assert curve.frame["removed"].tolist() == [0, 3, 6, 9, 12]
    assert curve.frame["share"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    for step, removed in enumerate(curve.frame["removed"]):
        hand = measured(model, ranked[:removed])
        assert curve.values[step] == pytest.approx(hand, abs=1e-4)
        assert curve.frame["metric"][step] == pytest.approx(hand.mean(), abs=1e-4)
        assert curve.frame["ci_low"][step] <= hand.mean() <= curve.frame["ci_high"][step]
    assert curve.frame["retained"][0] == 1
    assert curve.frame["heads"][1].split() == ranked[:3]
    assert curve.frame["heads"][0] == ""


def test_every_layer_can_keep_its_most_important_head(lab, scores):
    curve = pruning_curve(lab("llama"), PROMPTS, METRIC, scores, step=0.1, keep_one=True)
    ranked = sorted(scores, key=scores.get)
    spared = {[name for name in ranked if name.startswith(layer)][-1] for layer in ("L0", "L1")}
    assert {str(head) for head in curve.order} == set(scores) - spared
    assert curve.frame["removed"].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 10]


def test_heads_without_a_score_stay(lab):
    curve = pruning_curve(lab("llama"), PROMPTS, METRIC, {"0.*": 1.0, "1.2": 0.5}, step=0.5)
    assert [str(head) for head in curve.order][:2] == ["L1H2", "L0H0"]
    assert curve.frame["removed"].tolist() == [0, 6, 7]


def test_random_orders_depend_on_the_seed_alone(lab):
    model = lab("llama")
    a, b, c = (
        pruning_curve(model, PROMPTS, METRIC, "random", step=0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert a.order == b.order != c.order
    assert len(set(a.order)) == 12


@pytest.mark.parametrize("metric", ["logit difference", "loss"])
def test_greedy_takes_the_least_harmful_head_at_every_step(lab, metric):
    model = lab("gpt2")

    def value(gone) -> float:
        if metric == "logit difference":
            return float(measured(model, gone).mean())
        with model.edit(*([hl.ablate(list(gone))] if gone else [])):
            logits = model.logits(PROMPTS).log_softmax(-1)[:, :-1]
        return float(logits.gather(2, PROMPTS[:, 1:, None]).mean())  # minus the loss

    chosen = METRIC if metric == "logit difference" else metrics.loss()
    curve = greedy_pruning(model, PROMPTS, chosen)
    every = [hl.Head(layer, head) for layer, head in itertools.product(range(2), range(3))]
    order: list[hl.Head] = []
    while len(order) < 6:
        order.append(max((h for h in every if h not in order), key=lambda h: value([*order, h])))
    assert list(curve.order) == order
    assert curve.frame["removed"].tolist() == list(range(7))
    sign = 1 if metric == "logit difference" else -1
    assert curve.frame["metric"][4] == pytest.approx(sign * value(order[:4]), abs=1e-4)


def test_greedy_can_stop_early_take_several_and_spare_layers(lab):
    model = lab("gpt2")
    one = greedy_pruning(model, PROMPTS, METRIC, n_remove=3)
    pairs = greedy_pruning(model, PROMPTS, METRIC, n_remove=3, at_once=2)
    assert pairs.frame["removed"].tolist() == [0, 2, 3]
    assert pairs.order[0] == one.order[0]
    assert pairs.values[1] == pytest.approx(measured(model, pairs.order[:2]), abs=1e-4)
    spared = greedy_pruning(model, PROMPTS, METRIC, at_once=2, keep_one=True)
    assert sorted(head.layer for head in spared.order) == [0, 0, 1, 1]
    some = greedy_pruning(model, PROMPTS, METRIC, heads="1.*")
    assert sorted(some.order) == [(1, 0), (1, 1), (1, 2)]


def test_bad_input_is_named(lab):
    model = lab("gpt2")
    for scores, options, message in [
        ("best", {}, "'random' or a score for each head"),
        ({}, {}, "scores= is empty"),
        ({"0.0": math.nan}, {}, "score of head L0H0 is nan"),
        ({"0.0": 1.0, (0, 0): 2.0}, {}, "head L0H0 has two scores"),
        ({"0.0": 1.0}, {"step": 0}, "step=0 must be a share"),
        ({"0.0": 1.0}, {"kind": "mean"}, "needs reference="),
    ]:
        with pytest.raises(PlanError, match=message):
            pruning_curve(model, PROMPTS, METRIC, scores, **options)
    with pytest.raises(HeadError, match="L5H0 does not exist"):
        pruning_curve(model, PROMPTS, METRIC, {"5.0": 1.0})
    for options, message in [
        ({"n_remove": 7}, "more than the 6 heads"),
        ({"n_remove": 0}, "n_remove=0 must be"),
        ({"at_once": 1.5}, "at_once=1.5 must be"),
    ]:
        with pytest.raises(PlanError, match=message):
            greedy_pruning(model, PROMPTS, METRIC, **options)
