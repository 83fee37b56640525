"""PASTA against reweighted patterns in float64, on planted heads, and the profiling of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from exact_pair import pair, singles
from real_model import planted_model
from test_capture import ids_of, ragged
from test_generate import padded
from torch import Tensor

import headlab as hl
from headlab.errors import HeadError, PlanError, PromptError
from headlab.steering import Case, Pasta, first_token_difference, profile, shared_heads
from headlab.steering.behaviours.marked_context import marked_context

Lab = Callable[..., Any]
FAMILIES = ["llama", "gpt2"]  # grouped key/value heads, and one for each
HEADS = "0.1, 1.0, 1.2"
HEADS_OF = {0: (1,), 1: (0, 2)}
ALPHA = 0.03


def reweighted(marked: set[int], alpha: float = ALPHA) -> Callable[[int], dict[str, Any]]:
    """Weights of unmarked keys of a prompt of ``start`` tokens times alpha, and each row made to sum to 1 again."""

    def rewrites(start: int) -> dict[str, Any]:
        def pattern(p: Tensor, layer: int) -> Tensor:
            p = p.clone()
            factor = torch.tensor(
                [alpha if key < start and key not in marked else 1.0 for key in range(p.shape[-1])],
                dtype=p.dtype,
            )
            for head in HEADS_OF[layer]:
                weighed = p[:, head] * factor
                p[:, head] = weighed / weighed.sum(-1, keepdim=True)
            return p

        return {"pattern": pattern}

    return rewrites


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_reweighted_patterns(family: str) -> None:
    both, ids = pair(family), ragged((11, 6, 8))
    spans = [[(2, 5)], [(0, 1), (-2, 6)], [(3, 4)]]
    marked = [{2, 3, 4}, {0, 4, 5}, {3}]
    plain = both.model.logits(ids)
    with hl.steer(both.model, Pasta(spans, HEADS, ALPHA)):
        steered = both.model.logits(ids)
    for row, tokens in enumerate(singles(ids)):
        n = len(tokens)
        expected = both.logits(tokens, **reweighted(marked[row])(n))
        torch.testing.assert_close(steered[row, :n], expected, atol=1e-10, rtol=0)
        assert float((expected - plain[row, :n]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_single_passes_token_for_token(family: str) -> None:
    both, ids = pair(family), ragged((11, 6, 8), seed=3)
    rows = [both.greedy(tokens, 7, reweighted({1, 2, 3})) for tokens in singles(ids)]
    with hl.steer(both.model, Pasta([(1, 4)], HEADS, ALPHA)):
        new = both.model.generate(ids, max_new_tokens=7, eos_token_id=None).ids
    assert new.tolist() == padded(rows, 7)
    assert (
        new.tolist() != both.model.generate(ids, max_new_tokens=7, eos_token_id=None).ids.tolist()
    )


def test_overlapping_spans_are_one_and_methods_compose() -> None:
    both, ids = pair("llama"), ids_of(batch=1)
    expected = both.logits(ids[0], **reweighted({1, 2, 3, 4})(len(ids[0])))
    with hl.steer(both.model, Pasta([(1, 4), (2, 5)], HEADS, ALPHA)):
        torch.testing.assert_close(both.model.logits(ids)[0], expected, atol=1e-10, rtol=0)
    halves = Pasta([(1, 5)], HEADS, ALPHA**0.5)
    with hl.steer(both.model, halves, halves):
        torch.testing.assert_close(both.model.logits(ids)[0], expected, atol=1e-10, rtol=0)


def test_alpha_of_one_changes_nothing_and_nothing_is_left_after_the_block() -> None:
    model, ids = pair("llama").model, ids_of()
    before = model.logits(ids)
    with hl.steer(model, Pasta([(1, 4)], HEADS, 1.0)):
        torch.testing.assert_close(model.logits(ids), before, atol=1e-12, rtol=0)
    with pytest.raises(PromptError), hl.steer(model, Pasta([(1, 99)], HEADS)):
        model.logits(ids)
    assert torch.equal(model.logits(ids), before)


# -- planted heads -----------------------------------------------------------------------------------------------------

TEXT = "door king red lamp paper king blue lamp bread stone king"
OTHERS = "door king {} lamp paper king {} lamp bread stone king"


def next_word(model: hl.Model, text: str) -> str:
    return model.text(model.logits(text)[0, -1].argmax()[None])


@pytest.mark.parametrize(("span", "word"), [("king red", "red"), ("king blue", "blue")])
def test_a_planted_copy_head_gives_the_marked_continuation(span: str, word: str) -> None:
    model = planted_model()
    with hl.steer(model, Pasta([span], "L2H1")):
        assert next_word(model, TEXT) == word
        assert model.generate(TEXT, max_new_tokens=1).texts[0].strip() == word
        assert model.generate([TEXT, f"wolf {TEXT}"], max_new_tokens=1).ids.unique().numel() == 1


def planted_cases() -> hl.steering.Behaviour:
    words = ["red", "blue", "green", "black", "white", "yellow"]
    cases = []
    for at, (one, two) in enumerate(zip(words, words[1:] + words[:1], strict=True)):
        text = OTHERS.format(one, two)
        answer, foil = (one, two) if at % 2 else (two, one)
        cases.append(Case(text, f" {answer}", f" {foil}", (f"king {answer}",)))
    return hl.steering.Behaviour("copies", "nats", tuple(cases), first_token_difference())


def test_profiling_finds_the_planted_copy_head() -> None:
    model, behaviour = planted_model(), planted_cases()
    told: list[str] = []
    found = profile(model, Pasta(["x"]), behaviour, heads="2.*, 3.*", tell=told.append)
    assert [str(head) for head in found.top(1)] == ["L2H1"]
    assert len(told) == len(found.frame) == 2 * model.spec.n_heads
    row = found.frame[(found.frame["layer"] == 2) & (found.frame["head"] == 1)].iloc[0]
    by_hand = []
    for case in behaviour.cases:
        right, wrong = (model.tokens(x)[0, -1] for x in (case.answer, case.foil))
        plain = model.logits(case.prompt)[0, -1]
        with hl.steer(model, Pasta(list(case.spans), "2.1")):
            steered = model.logits(case.prompt)[0, -1]
        by_hand.append(float((steered - plain)[right] - (steered - plain)[wrong]))
    at = found.frame.index.get_loc(row.name)
    np.testing.assert_allclose(found.effects[at], by_hand, atol=1e-4)
    assert row["effect"] == pytest.approx(np.mean(by_hand), abs=1e-4)
    assert row["low"] <= row["effect"] <= row["high"]
    assert row["p_value"] == pytest.approx(
        2 / 2**6
    )  # all six cases rise: only two flips are as large
    assert row["q_value"] >= row["p_value"]
    rest = found.frame.drop(row.name)
    assert float(rest["effect"].abs().max()) < 0.2 * row["effect"]
    assert "L2H1" not in repr(found)
    assert "copies" in repr(found)


def test_the_multi_task_set_is_what_the_best_of_every_task_share() -> None:
    model, behaviour = planted_model(), planted_cases()
    one = profile(model, Pasta(["x"]), behaviour, heads="2.*")
    turned = replace(one, frame=one.frame.assign(effect=-one.frame["effect"]))
    best, worst = one.top(3), turned.top(3)
    assert shared_heads([one, one], 3) == tuple(sorted(best))
    assert shared_heads([one, turned], len(one.frame)) == tuple(sorted(one.top(len(one.frame))))
    assert not set(best[:1]) & set(worst[:1])
    with pytest.raises(PlanError, match="no head is among the best 1"):
        shared_heads([one, turned], 1)
    with pytest.raises(PlanError, match="only"):
        one.top(99)
    with pytest.raises(PlanError, match="no profiles"):
        shared_heads([], 3)


def test_marked_context_is_balanced_and_every_case_can_be_marked(lab: Lab) -> None:
    behaviour = marked_context(36, seed=1)
    assert len({case.prompt for case in behaviour.cases}) == 36
    first = [
        case.prompt.index(case.spans[0]) < case.prompt.index(f"{case.foil}.")
        for case in behaviour.cases
    ]
    assert sum(first) == 18
    for case in behaviour.cases:
        assert case.prompt.count(case.spans[0]) == 1
        assert case.prompt.count(case.answer) == case.prompt.count(case.foil) == 1
    assert marked_context(36, seed=2).cases != behaviour.cases
    with pytest.raises(PlanError, match="there are 36"):
        marked_context(37)
    with pytest.raises(PlanError, match="one of"):
        marked_context(measure="loudness")  # type: ignore[arg-type]


# -- what cannot be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), True, "a"])
def test_an_alpha_that_is_none_is_refused(alpha: Any) -> None:
    with pytest.raises(PlanError, match="alpha"):
        Pasta(["a"], alpha=alpha)


def test_bad_heads_spans_and_cases_are_refused(lab: Lab) -> None:
    model = lab("llama")
    with pytest.raises(HeadError, match="L2H0"), hl.steer(model, Pasta(["w5"], "2.0")):
        pass
    with (
        pytest.raises(PromptError, match="'w7' is not in the prompt"),
        hl.steer(model, Pasta(["w7"])),
    ):
        model.generate("w5 w6", max_new_tokens=2)
    case = Case("w5 w6", spans=("w5",))
    few = hl.steering.Behaviour("few", "", (case,), lambda model, cases: np.zeros(len(cases)))
    with pytest.raises(PlanError, match="2 or more"):
        profile(model, Pasta(["w5"]), few)
    with pytest.raises(HeadError, match="L9H0"):
        profile(model, Pasta(["w5"]), replace(few, cases=(case, case)), heads="9.0")
