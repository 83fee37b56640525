"""Tasks without examples and conflicts: what is asked, of whom it is known, and that nothing is learned from it."""

from __future__ import annotations

import numpy as np
import pytest
from real_model import smollm2

from headlab.errors import PlanError, PromptError
from headlab.steering.behaviours import icl
from headlab.steering.behaviours.conflicts import conflict, known_conflicts, memorisation_ratio
from headlab.tasks import conflicts, relations


@pytest.mark.parametrize("task", icl.TASKS)
def test_what_is_asked_is_not_learned_from(task: str) -> None:
    right = dict(relations(task)[0].pairs)
    cases = icl.zero_shot(task, 24, seed=1).cases
    asked = {case.prompt.removeprefix("Q: ").removesuffix("\nA:") for case in cases}  # type: ignore[union-attr]
    assert len(cases) == len(asked) == 24
    assert [case.answer for case in cases] == [
        f" {right[case.prompt.removeprefix('Q: ').removesuffix(chr(10) + 'A:')]}"  # type: ignore[union-attr]
        for case in cases
    ]
    given, shuffled = icl.training_prompts(task, n_prompts=20, n_shuffled=9, seed=1)
    assert (len(given), len(shuffled)) == (20, 9)
    learned = {
        line.removeprefix("Q: ")
        for prompt in (*given, *shuffled)
        for line in prompt.text.split("\n")
        if line.startswith("Q: ")
    }
    assert not asked & learned
    assert all(one.shuffled for one in shuffled)
    assert not any(one.shuffled for one in given)
    assert not {one.text for one in given} & {one.text for one in shuffled}


def test_a_ceiling_has_examples() -> None:
    (case, *_) = icl.zero_shot("plural", 3, n_shots=5).cases
    assert isinstance(case.prompt, str)
    assert case.prompt.count("Q: ") == 6
    with pytest.raises(PromptError, match="no relation"):
        icl.zero_shot("cooking")


@pytest.mark.slow
def test_known_facts_are_those_answered_right_without_text() -> None:
    model = smollm2()
    tried = conflicts(16, seed=2, tokenizer=model.tokenizer)
    right = []
    for item in tried:
        logits = model.logits(item.prompts["clean"])[0, -1]
        first = model.tokenizer(item.known, add_special_tokens=False)["input_ids"][0]
        if int(logits.argmax()) == first:
            right.append(item)
    assert 4 <= len(right) < 16
    known = known_conflicts(model, 99, seed=2, n_tried=16, skip=2)
    assert known == tuple(right[2:])
    assert known_conflicts(model, 3, seed=2, n_tried=16, skip=0) == tuple(right[:3])


@pytest.mark.slow
def test_a_model_that_knows_too_little_is_refused() -> None:
    with pytest.raises(PlanError, match="of 3 facts, too few to contradict"):
        known_conflicts(smollm2(), 4, n_tried=3)


@pytest.mark.parametrize("kind", ["clean", "substitution", "coherent", "support"])
def test_either_answer_can_be_the_one_that_counts(kind: str) -> None:
    items = conflicts(5)
    memory, context = (conflict(items, kind, towards) for towards in ("memory", "context"))  # type: ignore[arg-type]
    for item, one, other in zip(items, memory.cases, context.cases, strict=True):
        assert one.prompt == other.prompt == item.prompts[kind]
        assert (one.answer, one.foil) == (item.known, item.replaced)
        assert (other.answer, other.foil) == (item.replaced, item.known)
    assert memory.name != context.name


def test_the_memorisation_ratio_leaves_out_answers_of_neither() -> None:
    known, replaced = np.array([1.0, 1, 1, 0, 0, 0]), np.array([0.0, 0, 0, 1, 0, 0])
    assert memorisation_ratio(known, replaced) == 0.75
    assert np.isnan(memorisation_ratio(0 * known, 0 * replaced))
