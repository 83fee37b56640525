"""The detector: statistics by plain formulas, spans as the paper cuts them, planted truth found, chance left alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_lookback import answers, reads

import headlab as hl
from headlab import planted
from headlab.errors import PlanError
from headlab.lookback import Calibrator, Example, fit, ratios
from headlab.lookback.detector import validate
from headlab.lookback.examples import Tokens, all_tokenised
from headlab.lookback.ratios import ratios_of
from headlab.lookback.spans import Spans, spans_of
from headlab.lookback.statistics import (
    auroc,
    auroc_interval,
    calibration_error,
    held_out_auroc,
    shuffled_labels,
)


def by_pairs(scores: np.ndarray, labels: np.ndarray, folds: np.ndarray) -> float:
    """The share of pairs of unlike labels of one fold whose order is right, one pair at a time."""
    won = [
        (scores[i] > scores[j]) + (scores[i] == scores[j]) / 2
        for i, j in product(range(len(labels)), repeat=2)
        if labels[i] == 1 and labels[j] == 0 and folds[i] == folds[j]
    ]
    return float(np.mean(won)) if won else float("nan")


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 20), st.integers(1, 3))
def test_auroc_counts_pairs(seed: int, n: int, n_folds: int):
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 5, size=(n, 2)).astype(float), rng.integers(0, 2, size=n)
    folds = rng.integers(0, n_folds, size=n)
    whole = [by_pairs(scores[:, at], labels, np.zeros(n)) for at in range(2)]
    np.testing.assert_allclose(auroc(scores, labels), whole, atol=1e-12)
    within = by_pairs(scores[:, 0], labels, folds)
    np.testing.assert_allclose(held_out_auroc(scores[:, 0], labels, folds), within, atol=1e-12)


def test_the_interval_is_that_of_documents_drawn_anew():
    rng = np.random.default_rng(0)
    documents = np.repeat(np.arange(12), 3)
    labels = (documents % 2 == 0).astype(int)
    scores, folds = (labels + rng.normal(size=36))[:, None], documents % 3
    low, high = auroc_interval(scores, labels, documents, seed=4, draws=200, folds=folds)
    again, found = np.random.default_rng(4), []
    for _ in range(200):
        spans = np.concatenate(
            [np.flatnonzero(documents == at) for at in again.integers(12, size=12)]
        )
        found.append(by_pairs(scores[spans, 0], labels[spans], folds[spans]))
    expected = np.nanpercentile(found, [2.5, 97.5])
    np.testing.assert_allclose([low[0], high[0]], expected, atol=1e-12)


def test_shuffled_labels_go_from_document_to_document():
    documents = np.tile(np.arange(10), 4)  # spans of a document need not stand together
    labels = (documents % 2).astype(int)
    draws = list(shuffled_labels(labels, documents, 30, seed=1))
    assert len({tuple(dealt) for dealt in draws}) > 25
    for dealt in draws:
        assert dealt.sum() == labels.sum()
        assert all(len(set(dealt[documents == one])) == 1 for one in range(10))
    uneven, mixed = np.array([0, 0, 1, 1, 1, 1]), np.array([1, 0, 1, 1, 1, 0])
    turned = {tuple(x) for x in shuffled_labels(mixed, uneven, 60, 0)}
    # The second and fourth of the long one, or its third and first; each of the short one's twice, from either on.
    swapped = {(1, 0, 1, 1, 0, 0), (0, 1, 1, 1, 0, 0), (1, 1, 1, 1, 0, 0), (1, 0, 0, 0, 1, 1)}
    assert swapped & turned


def test_an_order_that_documents_share_does_not_survive():
    documents = np.repeat(np.arange(12), 8)
    labels = np.tile([1, 1, 1, 1, 0, 0, 0, 0], 12)  # the right answer first, then the wrong one
    draws = np.stack(list(shuffled_labels(labels, documents, 400, seed=0)))
    assert draws.mean(0) == pytest.approx(0.5, abs=0.1)
    null = [float(auroc(labels.astype(float), dealt)) for dealt in draws]
    assert np.mean(null) == pytest.approx(0.5, abs=0.05)


def test_heads_of_meaningless_labels_have_even_p_values():
    """Spans of a document are alike, so p-values that forgot documents would be small far too often."""
    from headlab.lookback.fitting import head_table

    rng, found = np.random.default_rng(0), []
    documents = np.repeat(np.arange(30), rng.integers(1, 9, size=30))
    for seed in range(12):
        features = rng.normal(size=(30, 20))[documents] + 0.3 * rng.normal(
            size=(len(documents), 20)
        )
        labels = rng.permutation(np.arange(30) % 2)[documents]
        spans = Spans(features, labels, documents, documents)
        table = head_table(spans, np.zeros(20), (4, 5), seed, draws=10, shuffles=199)
        found.extend(table["p_value"])
    assert np.mean(np.array(found) <= 0.05) < 0.09
    assert np.mean(found) == pytest.approx(0.5, abs=0.08)


def test_calibration_error_is_the_gap_within_bins():
    probability, labels = np.array([0.1, 0.3, 0.6, 0.8]), np.array([0, 1, 1, 1])
    assert calibration_error(probability, labels, bins=2) == pytest.approx((0.3 + 0.3) / 2)
    assert calibration_error(labels.astype(float), labels) == 0


def made(labels: list[int], document: str = "a") -> Tokens:
    return Tokens(torch.arange(len(labels) + 3), 3, 2, torch.tensor(labels), document)


def test_windows_are_bad_where_any_token_is():
    found = np.arange(5 * 2, dtype=float).reshape(5, 1, 2)
    spans = spans_of([found, found[:2]], [made([1, 1, 0, 1, 1]), made([1, 1], "b")], window=3)
    assert spans.labels.tolist() == [0, 0, 0, 1]
    assert spans.documents.tolist() == [0, 0, 0, 1]
    np.testing.assert_array_equal(spans.features[:3], [[2, 3], [4, 5], [6, 7]])
    np.testing.assert_array_equal(spans.features[3], [1, 2])  # a short response is one window


def test_given_spans_leave_out_what_lies_between_bad_ones():
    found = (np.arange(7, dtype=float) ** 2).reshape(7, 1, 1)
    spans = spans_of([found], [made([1, 1, 0, 1, 0, 1, 1])], kind="given")
    assert spans.labels.tolist() == [1, 0, 1]
    np.testing.assert_array_equal(spans.features[:, 0], [0.5, 10, 30.5])
    assert spans_of([found], [made([1] * 7)], kind="given").labels.tolist() == [1]


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_calibration_mends_log_odds_that_are_three_times_too_large(kind: Any):
    rng = np.random.default_rng(0)
    logit = rng.normal(size=4000) * 1.5
    labels = (rng.random(4000) < 1 / (1 + np.exp(-logit))).astype(int)
    held_in, held_out = slice(0, 2000), slice(2000, None)
    curve = Calibrator.fit(kind, 3 * logit[held_in], labels[held_in])
    mended = curve(3 * logit[held_out])
    raw = Calibrator()(3 * logit[held_out])
    truth = 1 / (1 + np.exp(-logit[held_out]))
    assert np.abs(mended - truth).mean() < 0.04 < np.abs(raw - truth).mean()
    assert (np.diff(curve(np.linspace(-9, 9, 50))) >= 0).all()
    if kind == "platt":
        assert curve.x == pytest.approx((1 / 3, 0), abs=0.06)


@pytest.fixture(scope="module")
def model() -> hl.Model:
    return hl.load(reads())


@pytest.fixture(scope="module")
def spans(model: hl.Model) -> Spans:
    tokens = all_tokenised(model, answers(60, seed=0))
    return spans_of(ratios_of(model, tokens), tokens)


def test_answers_read_off_the_context_are_told_from_others(model: hl.Model):
    lens = fit(model, answers(60, seed=0), n_permutations=19)
    assert lens.figures["auroc"] == 1.0
    assert lens.figures["p_value"] == 1 / 20
    assert (lens.figures["responses"], lens.figures["responses_positive"]) == (60, 30)
    best = lens.heads.sort_values("auroc").iloc[-1]
    assert (best["layer"], best["head"], best["auroc"]) == (2, 1, 1.0)
    assert best["q_value"] < 0.01
    assert lens.heads["weight"].abs().idxmax() == best.name
    # Held-out in the plain sense too: other words, never seen while fitting.
    new = answers(20, seed=99)
    found = [lens.score(model, one).probability for one in new]
    assert min(found[1::2]) > 0.9 > 0.1 > max(found[::2])


def test_without_the_copying_head_the_answers_look_alike():
    blind = hl.load(planted.scramble(reads(), "L2H1", "qk"))
    lens = fit(blind, answers(60, seed=0), n_permutations=0)
    assert lens.figures["auroc"] < 0.75


@pytest.mark.parametrize("split", ["grouped", "paper"])
def test_scrambled_labels_give_chance_only_where_documents_are_held_out(spans: Spans, split: Any):
    documents, found = np.unique(spans.documents), []
    for seed in range(40):
        dealt = np.random.default_rng(seed).permutation(np.arange(len(documents)) % 2)
        mixed = Spans(spans.features, dealt[spans.documents], spans.documents, spans.examples)
        checked = validate(mixed, split, "none", 0, seed, "none", lambda text: None)
        found.append(checked.figures["auroc"])
    if split == "grouped":
        assert np.mean(found) == pytest.approx(0.5, abs=0.05)
    else:  # windows of one response lie on both sides, which alone is worth something
        assert np.mean(found) > 0.55


def test_scaling_changes_the_penalty_and_nothing_else(spans: Spans):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    from headlab.lookback.detector import fit_linear

    features, labels = spans.features.astype(float), spans.labels
    scaler = StandardScaler().fit(features)
    own = LogisticRegression(max_iter=1000).fit(scaler.transform(features), labels)
    found = fit_linear(Spans(features, labels, spans.documents, spans.examples), "standard")
    expected = own.decision_function(scaler.transform(features))
    np.testing.assert_allclose(found.logit(features), expected, atol=1e-8)
    plain = LogisticRegression(max_iter=1000).fit(features, labels).decision_function(features)
    assert np.abs(plain - expected).max() > 0.1


def test_ratios_at_hand_are_not_read_again(model: hl.Model, monkeypatch: pytest.MonkeyPatch):
    examples = answers(10, seed=0)
    expected = fit(model, examples, n_permutations=0).to_json()
    read = ratios(model, examples)
    with monkeypatch.context() as patch:
        patch.setattr(model, "trace", None)
        assert fit(model, examples, ratios=read, n_permutations=0).to_json() == expected
        for wrong in (read[:9], [one[:3] for one in read], [*read[:9], read[9][:, :2]]):
            with pytest.raises(PlanError, match="ratios= are not those of the 10 examples"):
                fit(model, examples, ratios=wrong)
        with pytest.raises(PlanError, match="some ratios are no numbers"):
            fit(model, examples, ratios=[one * np.nan for one in read])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spans": "words"}, "spans='words' must be one of window, given"),
        ({"split": "random"}, "split='random' must be one of grouped, paper"),
        ({"calibration": "beta"}, "calibration='beta' must be one of platt, isotonic, none"),
        ({"scaling": True}, "scaling=True must be one of none, standard"),
        ({"window": 0}, "window=0"),
        ({"n_permutations": -1}, "n_permutations=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(
    model: hl.Model, change: dict[str, Any], said: str
):
    with pytest.raises(PlanError, match=said):
        fit(model, answers(10, seed=0), **change)


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (answers(10, seed=0)[::2], "every span is not borne out"),
        (answers(10, seed=0)[1::2], "every span is borne out"),
        (answers(4, seed=0), "4 documents are too few for 5 folds"),
        ([*answers(9, seed=0), Example((5, 6), (7, 8))], "example 9 has no labels"),
    ],
)
def test_labels_that_teach_nothing_are_refused(model: hl.Model, examples: list[Example], said: str):
    with pytest.raises(PlanError, match=said):
        fit(model, examples)


@pytest.mark.filterwarnings("error")
def test_too_few_spans_or_documents_of_a_label_are_refused(model: hl.Model):
    good = answers(20, seed=0)[1::2]
    with pytest.raises(PlanError, match="1 spans that are not borne out are too few for 2 folds"):
        fit(model, [*good, answers(1, seed=0)[0]], spans="given", split="paper", n_permutations=0)
    with pytest.raises(PlanError, match="no fold holds spans of both labels"):
        fit(model, answers(5, seed=0), n_permutations=0)


def test_one_document_with_all_bad_answers_is_refused(model: hl.Model):
    bad = [
        Example(one.prompt, one.response, one.bad, "same" if one.bad else one.document)
        for one in answers(12, seed=0)
    ]
    with pytest.raises(PlanError, match="too few documents have spans of either label"):
        fit(model, bad)
