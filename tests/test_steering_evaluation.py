"""Evaluation of steering: numbers by hand, controls that are what they say, and what cannot be evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from scipy.stats import false_discovery_control

import headlab as hl
from headlab.attention import Edit, parse_heads
from headlab.errors import OutputError, PlanError, PromptError
from headlab.steering import Behaviour, Case, Method, evaluate, holds
from headlab.steering.results import COLUMNS
from headlab.tasks import prose, prose_windows

Lab = Callable[..., Any]
CASES = tuple(Case((5, 6, 7 + at), spans=((0, 2),)) for at in range(6))


@dataclass(frozen=True)
class Push(Method):
    """Adds a direction to z."""

    heads: Any = "1.0"
    factor: float = 1.0
    sign: float = 1.0
    spans: Any = ((0, 1),)

    strength_field: ClassVar[str] = "factor"
    strengths: ClassVar[tuple[float, ...]] = (0.5, 2.0)

    def edits(self, model: hl.Model) -> Sequence[Edit]:
        LOG.append((self, [str(head) for head in parse_heads(self.heads, model.spec)]))
        return (hl.add(self.heads, self.factor * self.sign, "z"),)

    def marking(self, spans: Any) -> Self:
        return self._with(spans=spans)

    def randomised(self, seed: int) -> Self:
        return self._with(sign=float(np.random.default_rng(seed).choice([-1.0, 1.0])))


LOG: list[tuple[Push, list[str]]] = []


def last_logit(model: hl.Model, cases: Sequence[Case]) -> np.ndarray:
    ids = torch.tensor([case.prompt for case in cases])
    return model.logits(ids)[:, -1, 9].double().numpy()


def behaviour(cases: tuple[Case, ...] = CASES, measure: Any = last_logit) -> Behaviour:
    return Behaviour("logit", "logit of token 9", cases, measure, batch=4)


@pytest.fixture
def found(lab: Lab) -> hl.steering.Evaluation:
    LOG.clear()
    return evaluate(lab("llama"), Push(), behaviour(), n_controls=3, n_texts=3, seed=4)


def test_the_table_holds_what_was_measured(lab: Lab, found: hl.steering.Evaluation) -> None:
    model, frame = lab("llama"), found.frame
    assert list(frame.columns) == list(COLUMNS)
    kinds = ["method", "random_direction", "random_heads"]
    assert list(frame["kind"]) == ["unsteered", *kinds, *kinds]
    ids = torch.tensor([case.prompt for case in CASES])
    plain = model.logits(ids)[:, -1, 9].double().numpy()
    np.testing.assert_allclose(found.values[0], plain, atol=1e-6)
    for strength in (0.5, 2.0):
        with model.edit(hl.add("1.0", strength, "z")):
            steered = model.logits(ids)[:, -1, 9].double().numpy()
        row = found.row("method", strength)
        assert row["value"] == pytest.approx(steered.mean(), abs=1e-6)
        assert row["effect"] == pytest.approx((steered - plain).mean(), abs=1e-6)
        assert row["n"] == len(CASES)
        assert row["effect_low"] <= row["effect"] <= row["effect_high"]
        others = np.mean(
            [found.row(kind, strength)["effect"] for kind in ("random_heads", "random_direction")]
        )
        assert row["excess"] == pytest.approx(row["effect"] - others, abs=1e-9)
    assert math.isnan(found.row("unsteered")["effect"])
    assert math.isnan(found.row("random_heads", 2.0)["excess"])


def test_p_values_flip_every_sign_and_are_corrected_over_the_table(
    found: hl.steering.Evaluation,
) -> None:
    effects = found.values - found.values[0]
    signs = 1 - 2 * (np.arange(64)[:, None] >> np.arange(6) & 1)
    expected = []
    for row in effects[1:]:
        sums = signs @ row
        one = (sums >= row.sum() - 1e-9).mean()
        other = (sums <= row.sum() + 1e-9).mean()
        expected.append(min(1, 2 * min(one, other)))
    np.testing.assert_allclose(found.frame["p_value"][1:], expected, atol=1e-9)
    np.testing.assert_allclose(
        found.frame["q_value"][1:], false_discovery_control(expected), atol=1e-9
    )


def test_controls_are_as_many_other_heads_and_the_same_norms(
    lab: Lab, found: hl.steering.Evaluation
) -> None:
    heads = {name for method, names in LOG for name in names}
    drawn = heads - {"L1H0"}
    assert drawn
    assert all(name.startswith("L1") for name in drawn)
    assert {abs(method.sign) for method, _ in LOG} == {1.0}
    assert -1.0 in {method.sign for method, _ in LOG}
    ids = torch.tensor([case.prompt for case in CASES])
    model = lab("llama")
    effects = []
    for draw in range(3):
        with model.edit(*Push().at(2.0).randomised(4 + draw).edits(model)):
            effects.append(model.logits(ids)[:, -1, 9].double().numpy())
    row = found.row("random_direction", 2.0)
    assert row["value"] == pytest.approx(np.mean(effects), abs=1e-6)


def test_the_side_effect_is_the_loss_on_plain_text(lab: Lab, found: hl.steering.Evaluation) -> None:
    model = lab("llama")
    n = model.spec.max_context
    texts = prose_windows(model.tokenizer, prose(), 3, n, 4, model.bos)
    with model.edit(hl.add("1.0", 2.0, "z")):
        logits = model.logits(texts)
    expected = [
        torch.nn.functional.cross_entropy(row[n // 2 - 1 : -1], ids[n // 2 :]).item()
        for row, ids in zip(logits, texts, strict=True)
    ]
    at = list(zip(found.frame["kind"], found.frame["strength"], strict=True)).index(("method", 2.0))
    np.testing.assert_allclose(found.losses[at], expected, atol=1e-5)
    row = found.row("method", 2.0)
    assert row["loss"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert row["loss_change"] == pytest.approx(row["loss"] - found.row("unsteered")["loss"])


def test_the_second_half_of_a_text_counts_as_generated(lab: Lab) -> None:
    model = lab("llama")
    width = model.spec.layers[0].d_value
    shape = (2, model.spec.n_heads, model.spec.d_head, model.spec.d_model)
    loss = {}
    for rows in ("prompt_end", "from_end", "all"):
        vectors = hl.steering.HeadVectors("L1H0", shape, torch.ones(1, width), rows=rows)  # type: ignore[arg-type]
        found = evaluate(model, vectors, behaviour(), strengths=[2.0], n_texts=2, n_controls=0)
        loss[rows] = found.row("method", 2.0)["loss_change"]
    # In the last layer, what comes before the last token of the first half changes none of the losses that count.
    assert loss["from_end"] == pytest.approx(loss["all"], abs=1e-6)
    assert abs(loss["prompt_end"]) > 1e-5
    assert abs(loss["from_end"] - loss["prompt_end"]) > 1e-4


def test_marked_spans_are_those_of_the_cases_and_of_the_texts(
    lab: Lab, found: hl.steering.Evaluation
) -> None:
    spans = [method.spans for method, _ in LOG]
    n = lab("llama").spec.max_context
    assert [[(0, 2)]] * 4 in spans
    assert [[(0, 2)]] * 2 in spans  # six cases, four at a time
    assert [[(n // 4, n // 2)]] * 3 in spans


def test_the_same_seed_gives_the_same_table_and_another_does_not(
    lab: Lab, found: hl.steering.Evaluation
) -> None:
    again = evaluate(lab("llama"), Push(), behaviour(), n_controls=3, n_texts=3, seed=4)
    assert again.frame.equals(found.frame)
    other = evaluate(lab("llama"), Push(), behaviour(), n_controls=3, n_texts=3, seed=5)
    assert not other.frame.equals(found.frame)


def test_a_round_trip_through_json(found: hl.steering.Evaluation, tmp_path: Path) -> None:
    again = hl.steering.Evaluation.load(found.save(tmp_path / "found.json"))
    for name in COLUMNS:
        assert list(again.frame[name].fillna("–")) == list(found.frame[name].fillna("–")), name
    np.testing.assert_array_equal(again.values, found.values)
    assert again.about == found.about
    for content in ("", "{}", '{"format": "other"}', "[" * 100000):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(OutputError, match="bad"):
            hl.steering.Evaluation.load(tmp_path / "bad.json")


def test_a_method_on_every_head_has_no_random_heads(lab: Lab) -> None:
    found = evaluate(lab("llama"), Push(heads="*.*"), behaviour(), strengths=[1.0], n_texts=2)
    assert "random_heads" not in set(found.frame["kind"])
    assert "every head" in found.about["note"]
    without = evaluate(lab("llama"), Push(), behaviour(), strengths=[1.0], n_texts=2, n_controls=0)
    assert list(without.frame["kind"]) == ["unsteered", "method"]
    assert without.best["strength"] == 1.0


def test_what_cannot_be_evaluated(lab: Lab) -> None:
    model = lab("llama")
    with pytest.raises(PlanError, match="too few cases"):
        evaluate(model, Push(), behaviour(CASES[:1]))
    with pytest.raises(PlanError, match="shape"):
        evaluate(model, Push(), behaviour(measure=lambda model, cases: np.zeros(3)))
    with pytest.raises(PlanError, match="strengths"):
        evaluate(model, Push(), behaviour(), strengths=[float("inf")])
    pasta = hl.steering.Pasta(spans=["a"], heads="0.0")
    beyond = behaviour(tuple(Case((5, 6, 7), spans=((2, 9),)) for _ in range(2)))
    with pytest.raises(PromptError, match="not in the prompt"):
        evaluate(model, pasta, beyond)
    with pytest.raises(PlanError, match="0 rows"):
        evaluate(model, Push(), behaviour(), n_texts=2, strengths=[1.0]).row("method", 3.0)


# -- measures ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_held_as_words_of_its_own() -> None:
    assert holds("It was in Paris.", " Paris")
    assert holds("PARIS", "Paris")
    assert not holds("Parisian", "Paris")
    assert not holds("comparison", "Paris")
    assert holds("costs (3.5) coins", "(3.5)")


def test_answer_log_probability_is_that_of_every_token(lab: Lab) -> None:
    model = lab("llama")
    words = model.tokenizer.convert_ids_to_tokens(list(range(10, 20)))
    cases = [
        Case(tuple(range(5, 9)), f"{words[0]} {words[3]}"),
        Case((5, 6), words[4]),
    ]
    got = hl.steering.answer_log_probability()(model, cases)
    for case, value in zip(cases, got, strict=True):
        answer = model.tokenizer(case.answer, add_special_tokens=False)["input_ids"]
        prompt = list(case.prompt)
        total = 0.0
        for token in answer:  # one token after the other
            logits = model.logits(prompt)[0, -1].double()
            total += float(logits[token] - logits.exp().sum().log())
            prompt.append(token)
        assert value == pytest.approx(total / len(answer), abs=1e-5)


def test_first_token_difference_is_that_of_two_logits(lab: Lab) -> None:
    model = lab("llama")
    words = model.tokenizer.convert_ids_to_tokens(list(range(10, 20)))
    cases = [Case((5, 6, 7), words[0], words[1]), Case((8, 9), words[2], words[5])]
    got = hl.steering.first_token_difference()(model, cases)
    for case, value, right, wrong in zip(cases, got, (10, 12), (11, 15), strict=True):
        logits = model.logits(list(case.prompt))[0, -1]
        assert value == pytest.approx(float(logits[right] - logits[wrong]), abs=1e-5)
    with pytest.raises(PlanError, match="same token"):
        hl.steering.first_token_difference()(model, [Case((5, 6), words[0], words[0])])
    with pytest.raises(PlanError, match="needs a foil"):
        hl.steering.first_token_difference()(model, [Case((5, 6), words[0])])
    with pytest.raises(PlanError, match="no answer"):
        hl.steering.answer_log_probability()(model, [Case((5, 6))])


def test_says_answer_reads_the_greedy_continuation(lab: Lab) -> None:
    model = lab("llama")
    prompts = [(5, 6, 7), (8, 9)]
    texts = [model.generate(list(prompt), max_new_tokens=4).texts[0] for prompt in prompts]
    said = texts[0].split()[0]
    cases = [Case(prompts[0], said), Case(prompts[1], "nothing like it")]
    assert hl.steering.says_answer(4)(model, cases).tolist() == [1.0, 0.0]
