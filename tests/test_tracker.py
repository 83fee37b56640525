"""Attention Tracker: focus on the instruction, heads that lose it under attack, and what is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_model import smollm2
from test_capture import Lab
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import OutputError, PlanError, PromptError
from headlab.planted.meanings import TOPICS
from headlab.steering import Detection, InjectionDetector, important_heads, instruction_prompt
from headlab.steering.behaviours.injections import (
    TEST_WORDINGS,
    InjectionTexts,
    injections,
    resisting,
)
from headlab.steering.tracker import focus

PLANTED = "L1H2"


@cache
def contextual() -> hl.Model:
    """A head that attends to words of the query's topic."""
    made = planted.model("llama", {PLANTED: "contextual"}, n_layers=2, n_heads=8, max_context=128)
    return hl.load(made.module, tokenizer=made.tokenizer)


WATER, METALS = TOPICS["water"], TOPICS["metals"]
INSTRUCTION = f"{WATER[0]} and {WATER[1]}"


def texts(seed: int, n: int = 8) -> InjectionTexts:
    """Data about metals: where it ends in water, the planted head looks at the instruction, else at the data."""
    rng = np.random.default_rng(seed)
    words = ["garden", "was", "small", "but", "young", "tower", "stood", "by", "a", "road", "snow"]
    benign, attacked = [], []
    for _ in range(n):
        body = [
            *rng.permutation(words)[:6],
            *rng.permutation(METALS)[:3],
            *rng.permutation(words)[:3],
        ]
        benign.append(" ".join([*body, WATER[2]]))
        attacked.append(" ".join([*body, METALS[int(rng.integers(4))]]))
    return InjectionTexts(tuple(benign), tuple(attacked), tuple(range(n)))


def test_focus_is_the_instructions_part_of_what_both_get(lab: Lab) -> None:
    model = lab("llama")
    prompts = [
        instruction_prompt(model, "w5 w6", "w7 w8 w9 w10 w11"),
        instruction_prompt(model, "w5 w6 w12", "w7"),
    ]
    assert [prompt.instruction for prompt in prompts] == [(0, 2), (0, 3)]
    assert [prompt.data for prompt in prompts] == [(3, 8), (4, 5)]  # "Data:" is not part of it

    def written(pattern: Tensor, where: Any) -> Tensor:
        """I = 0.3, D = 0.1 in both prompts; the rest on the word between."""
        new = torch.zeros_like(pattern)
        for row, prompt in enumerate(prompts):
            for (start, stop), mass in ((prompt.instruction, 0.3), (prompt.data, 0.1)):
                new[row, :, :, start:stop] = mass / (stop - start)
            new[row, :, :, prompt.instruction[1]] = 0.6
        return new

    with model.edit(hl.apply("0.1, 1.2", written, "pattern")):
        found = focus(model, prompts)
    assert found[:, [0, 1], [1, 2]] == pytest.approx(0.75)
    assert np.abs(found[:, 0, 0] - 0.75).max() > 1e-3
    with model.edit(hl.scale("0.1", "pattern", by=0.0)):
        assert focus(model, prompts)[:, 0, 1].tolist() == [0.5, 0.5]


def test_focus_equals_pattern_sums_and_batches_change_nothing(lab: Lab) -> None:
    model = lab("gpt2")
    prompts = [
        instruction_prompt(model, " ".join(f"w{5 + at}" for at in range(n)), "w9 w30 w31")
        for n in (2, 5, 3, 4, 2, 6, 7, 2, 3, 4)
    ]
    found = focus(model, prompts)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.ids])
        last = model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")[0, :, :, -1]
        one, two = (last[..., a:b].sum(-1) for a, b in (prompt.instruction, prompt.data))
        assert found[row] == pytest.approx((one / (one + two)).numpy(), abs=1e-5)


def test_heads_are_those_whose_gap_outdoes_the_spread() -> None:
    rng = np.random.default_rng(0)
    benign, attacked = rng.normal(0.8, 0.05, (30, 2, 3)), rng.normal(0.8, 0.05, (30, 2, 3))
    attacked[:, 1, 2] -= 0.3
    benign[:, 0, 1] -= 0.6  # the wrong way round
    for n in (0.5, 2.0, 4.0):
        expected = [
            (layer, head)
            for layer in range(2)
            for head in range(3)
            if np.mean(benign[:, layer, head]) - np.mean(attacked[:, layer, head])
            > n * (np.std(benign[:, layer, head]) + np.std(attacked[:, layer, head]))
        ]
        assert [tuple(head) for head in important_heads(benign, attacked, n)] == expected
    assert [tuple(head) for head in important_heads(benign, attacked, 2.0)] == [(1, 2)]


def test_the_planted_head_is_found_and_tells_unseen_texts_apart() -> None:
    model = contextual()
    detector = InjectionDetector.fit(model, texts(0), instruction=INSTRUCTION, n=2)
    assert detector.heads == PLANTED
    result = detector.evaluate(model, texts(1, 12), instruction=INSTRUCTION)
    assert isinstance(result, Detection)
    assert (result.auroc, result.low, result.high) == (1, 1, 1)
    assert (result.caught, result.false_alarms, result.p_value < 1e-3) == (1, 0, True)
    other = replace(detector, heads="L0H0, L0H3")  # random heads
    assert other.evaluate(model, texts(1, 12), instruction=INSTRUCTION).auroc < 0.9
    scores = detector.score(model, INSTRUCTION, list(texts(1, 12).attacked))
    assert detector.detect(model, INSTRUCTION, list(texts(1, 12).attacked)).all()
    assert detector.score(model, INSTRUCTION, texts(1, 12).attacked[3])[0] == pytest.approx(
        scores[3]
    )


def test_thresholds_by_name() -> None:
    model, given = contextual(), texts(0)
    fitted = {
        rule: InjectionDetector.fit(model, given, instruction=INSTRUCTION, n=1, rule=rule)
        for rule in ("half", "midpoint", "benign")
    }
    one = fitted["half"]
    good, bad = (one.score(model, INSTRUCTION, list(x)) for x in (given.benign, given.attacked))
    assert one.threshold == 0.5
    assert fitted["midpoint"].threshold == pytest.approx((good.mean() + bad.mean()) / 2)
    assert fitted["benign"].threshold == pytest.approx(good.mean() - 4 * good.std())


def test_a_detector_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    detector = InjectionDetector("L0H1, L1H2", (2, 6, 10, 36), 0.4, "midpoint", 2.0, "tiny")
    path = detector.save(tmp_path / "deep" / "detector.json")
    assert InjectionDetector.load(path) == detector
    good = json.loads(path.read_text())
    bad = {
        "text": "{",
        "list": "[1]",
        "format": json.dumps(good | {"format": "other"}),
        "fields": json.dumps(good | {"more": 1}),
        "shape": json.dumps(good | {"shape": [1]}),
        "threshold": json.dumps(good | {"threshold": "high"}),
    }
    for name, content in bad.items():
        (tmp_path / f"{name}.json").write_text(content)
        with pytest.raises(OutputError, match=name):
            InjectionDetector.load(tmp_path / f"{name}.json")
    with pytest.raises(OutputError, match="missing"):
        InjectionDetector.load(tmp_path / "missing.json")


def test_what_cannot_be_scored_is_refused(lab: Lab) -> None:
    model = lab("llama")
    detector = InjectionDetector("0.1", (2, 6, 99, 36))
    with pytest.raises(PlanError, match="another shape"):
        detector.score(model, "w5", "w6")
    with pytest.raises(PromptError, match="blank"):
        instruction_prompt(model, "w5", "  ")
    with pytest.raises(PromptError, match="fast tokenizer"):
        instruction_prompt(hl.load(model.module), "w5", "w6")
    with pytest.raises(PromptError, match="no prompts"):
        focus(model, [])
    same = InjectionTexts(("w5 w6", "w7 w8"), ("w5 w6", "w7 w8"))
    with pytest.raises(PlanError, match=r"no head of .* at n=5"):
        InjectionDetector.fit(model, same, instruction="w9")
    with pytest.raises(PlanError, match="rule="):
        InjectionDetector.fit(model, same, rule="best")  # type: ignore[arg-type]
    for wrong, said in (
        ((("a",), ("b", "c")), "benign="),
        ((("a", " "), ("b", "c")), "benign="),
        ((("a", "b"), ("b", "c"), (0, 2)), "bases="),
    ):
        with pytest.raises(PlanError, match=said):
            InjectionTexts(*wrong)


def test_texts_for_fitting_and_testing_share_no_sentence_and_no_wording() -> None:
    fit, test = injections("fit"), injections("test")
    assert len(fit.benign) == len(test.benign) == 30
    assert not set(fit.benign) & set(test.benign)
    assert not set(fit.wordings) & set(test.wordings)
    assert set(test.wordings) == set(TEST_WORDINGS)
    for part in (fit, test):
        for text, base in zip(part.attacked, part.bases, strict=True):
            assert text.startswith(part.benign[base] + " ")
    assert injections("test", seed=1).attacked != test.attacked
    with pytest.raises(PlanError, match="part="):
        injections("all")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="n_sentences="):
        injections("fit", 31)


@pytest.mark.slow
def test_spans_and_behaviour_in_a_chat_templates_prompt() -> None:
    model = smollm2()
    made = instruction_prompt(model, "Say xxxxxx", "The river froze.")
    for (start, stop), text in ((made.instruction, "Say xxxxxx"), (made.data, "The river froze.")):
        assert model.text(made.ids[start:stop]).strip() == text
    cases = resisting(model, 3).cases
    for case in cases:
        start, stop = case.spans[0]
        assert model.text(case.prompt[start:stop]) == f"Say {case.answer}."
        assert case.foil in model.text(case.prompt)
