"""KV budgets against dense masked patterns in float64, their bytes by hand, and a planted retrieval head."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from exact_pair import pair, singles
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capture import ids_of, ragged
from test_generate import padded
from torch import Tensor

import headlab as hl
from headlab import planted
from headlab.errors import HeadError, PlanError, PromptError
from headlab.steering import KVBudget
from headlab.steering.behaviours.needles import needles

Lab = Callable[..., Any]
FAMILIES = ["llama", "gpt2"]  # groups of three query heads, and heads with caches of their own
HEADS = "0.1, 1.2"
#: Query heads whose caches are whole: all that share one with a named head.
WHOLE = {"llama": {0: (0, 1, 2), 1: (0, 1, 2)}, "gpt2": {0: (1,), 1: (2,)}}
SINK, RECENT = 2, 3


def masked(family: str, prefill: bool = True) -> Callable[[int], dict[str, Any]]:
    """Weights of dropped keys set to 0, and each row made to sum to 1 again."""

    def rewrites(start: int) -> dict[str, Any]:
        def pattern(p: Tensor, layer: int) -> Tensor:
            p = p.clone()
            for head in range(p.shape[1]):
                if head in WHOLE[family][layer]:
                    continue
                for query in range(0 if prefill else start, p.shape[2]):
                    p[:, head, query, SINK : max(SINK, query - RECENT + 1)] = 0
                p[:, head] /= p[:, head].sum(-1, keepdim=True)
            return p

        return {"pattern": pattern}

    return rewrites


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_masked_patterns(family: str) -> None:
    both, ids = pair(family), ragged((12, 7, 9))
    plain = both.model.logits(ids)
    with hl.steer(both.model, KVBudget(HEADS, SINK, RECENT)):
        limited = both.model.logits(ids)
    for row, tokens in enumerate(singles(ids)):
        n = len(tokens)
        expected = both.logits(tokens, **masked(family)(n))
        torch.testing.assert_close(limited[row, :n], expected, atol=1e-10, rtol=0)
        assert float((expected - plain[row, :n]).abs().max()) > 1e-3
    assert torch.equal(both.model.logits(ids)[ids >= 0], plain[ids >= 0])


@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_single_passes_token_for_token(family: str, prefill: bool) -> None:
    both, ids = pair(family), ragged((12, 7, 9), seed=2)
    rows = [both.greedy(tokens, 8, masked(family, prefill)) for tokens in singles(ids)]
    with hl.steer(both.model, KVBudget(HEADS, SINK, RECENT, prefill)):
        new = both.model.generate(ids, max_new_tokens=8, eos_token_id=None).ids
    assert new.tolist() == padded(rows, 8)
    assert (
        new.tolist() != both.model.generate(ids, max_new_tokens=8, eos_token_id=None).ids.tolist()
    )


def test_a_budget_for_generated_tokens_leaves_the_prompt_alone() -> None:
    model, ids = pair("llama").model, ids_of()
    plain = model.logits(ids)
    with hl.steer(model, KVBudget(None, SINK, RECENT, prefill=False)):
        torch.testing.assert_close(model.logits(ids), plain, atol=1e-12, rtol=0)


def test_a_budget_of_everything_changes_nothing() -> None:
    model, ids = pair("llama").model, ids_of()
    plain = model.logits(ids)
    for budget in (KVBudget("*.*", 0, 1), KVBudget(None, 0, 99), KVBudget(None, 99, 1)):
        with hl.steer(model, budget):
            torch.testing.assert_close(model.logits(ids), plain, atol=1e-12, rtol=0)


def test_a_streamed_prompt_sees_the_same_keys(lab: Lab, tmp_path: Any) -> None:
    model, ids = lab("llama"), ids_of(batch=1)
    keep = hl.keep.statistics("entropy")
    with hl.steer(model, KVBudget("0.1", SINK, RECENT)):
        whole = model.trace(ids, keep=keep)
        chunks = model.stream(ids, keep, tmp_path, chunk=4)
    expected = whole.statistic("entropy")
    torch.testing.assert_close(chunks.statistic("entropy"), expected, atol=1e-5, rtol=0)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_by_hand(lab: Lab) -> None:
    model = lab("llama")  # 2 layers, 2 key/value heads of width 10, float32
    per_token = (10 + 10) * 4
    assert KVBudget("*.*").cache_bytes(model, 100) == 4 * 100 * per_token
    assert KVBudget(None, 4, 16).cache_bytes(model, 100) == 4 * 20 * per_token
    assert KVBudget("0.1, 0.2", 4, 16).cache_bytes(model, 100) == (100 + 3 * 20) * per_token
    assert KVBudget("0.1, 0.3", 4, 16).cache_bytes(model, 100) == (200 + 2 * 20) * per_token
    assert KVBudget(None, 4, 16).cache_bytes(model, 18) == 4 * 18 * per_token
    assert KVBudget(None, 4, 16).cache_bytes(model, 0) == 0
    sliding = lab("mistral")  # a window of 5 in both layers: sinks soon fall out of it
    assert KVBudget("*.*").cache_bytes(sliding, 100) == 4 * 5 * per_token
    assert KVBudget(None, 4, 3).cache_bytes(sliding, 100) == 4 * 3 * per_token
    assert KVBudget(None, 4, 3).cache_bytes(sliding, 6) == 4 * 5 * per_token  # 1, 2, 3; 3, 4, 5
    half = hl.load(model.module, dtype="float32", tokenizer=model.tokenizer)
    assert half.dtype.itemsize == 4


@settings(max_examples=12)
@given(
    n=st.integers(1, 14),
    sink=st.integers(0, 6),
    recent=st.integers(1, 8),
    family=st.sampled_from(["llama", "mistral"]),
)
def test_bytes_are_those_of_the_keys_that_the_last_row_sees(
    lab: Lab, n: int, sink: int, recent: int, family: str
) -> None:
    model, budget = lab(family), KVBudget("1.0", sink, recent)
    with hl.steer(model, budget):
        trace = model.trace(ids_of(n, batch=1), keep=hl.keep.rows(queries=[-1]), logits="none")
    seen = (trace.rows[0, :, ::3, 0] > 0).sum()  # the first query head of each group
    assert budget.cache_bytes(model, n) == int(seen) * 20 * 4


def test_a_redrawn_budget_is_as_large_and_elsewhere(lab: Lab) -> None:
    for family in ("llama", "gpt2"):
        model = lab(family)
        budget = KVBudget("1.2", 2, 5)
        drawn = [budget.redrawn(model, seed) for seed in range(12)]
        assert len({other.whole_groups(model) for other in drawn}) > 1
        for other in drawn:
            assert other.cache_bytes(model, 50) == budget.cache_bytes(model, 50)
            assert not other.whole_groups(model) & budget.whole_groups(model)
            assert (other.sink, other.recent) == (2, 5)
    with pytest.raises(PlanError, match="no other budget"):
        KVBudget("*.*").redrawn(lab("llama"), 0)
    with pytest.raises(PlanError, match="no other budget"):
        KVBudget(None).redrawn(lab("llama"), 0)


# -- a planted retrieval head ------------------------------------------------------------------------------------------


@cache
def retriever() -> tuple[hl.Model, list[dict[str, Any]]]:
    heads = {"L0H2": "sink", "L1H0": "previous_token", "L2H1": "retrieval"}
    made = planted.model("llama", heads, distractors=6, max_context=160)
    records = [
        record
        for record in made.records("retrieval", 16)
        # Far enough from the end that recent keys do not hold the answer.
        if len(record["prompt"].split()) - record["prompt"].split().index("letter") > 20
    ]
    return hl.load(made.module, tokenizer=made.tokenizer), records


def recall(budget: KVBudget | None) -> float:
    model, records = retriever()
    prompts, answers = [each["prompt"] for each in records], [each["answer"] for each in records]
    if budget is None:
        texts = model.generate(prompts, max_new_tokens=3).texts
    else:
        with hl.steer(model, budget):
            texts = model.generate(prompts, max_new_tokens=3).texts
    return sum(text.strip() == answer for text, answer in zip(texts, answers, strict=True)) / len(
        answers
    )


def test_needles_are_recalled_where_the_retrieval_head_keeps_its_cache() -> None:
    model, records = retriever()
    assert len(records) >= 6
    assert recall(None) == 1.0
    kept = KVBudget("L2H1", sink=4, recent=8)
    assert recall(kept) == 1.0
    assert recall(kept.on(None)) == 0.0  # type: ignore[arg-type]
    for seed in range(2):
        assert recall(kept.redrawn(model, seed)) == 0.0


# -- the needles behaviour, and what cannot be done --------------------------------------------------------------------


def test_the_needles_behaviour_marks_the_answer_and_measures_recall() -> None:
    heads = {"L1H0": "previous_token", "L2H1": "induction"}
    made = planted.model("llama", heads, distractors=2, max_context=192)
    model = hl.load(made.module, tokenizer=made.tokenizer)
    behaviour = needles(model, 3, length=130, seed=3, batch=2)
    for case in behaviour.cases:
        ((start, stop),) = case.spans
        words = model.text(list(case.prompt[start:stop])).split()
        assert len(words) >= len(case.answer.split()) > 0
        assert len(case.prompt) <= 130
    values = behaviour.values(model, KVBudget("1.0", 4, 16))
    assert values.shape == (3,)
    assert set(values.tolist()) <= {100 * k / n for n in range(1, 9) for k in range(n + 1)}
    other = hl.steering.Case((1, 2, 3), " x")
    with pytest.raises(PromptError, match="its own cases"):
        behaviour.measure(model, [other])


@pytest.mark.parametrize(
    "settings", [{"sink": -1}, {"sink": 1.5}, {"recent": 0}, {"recent": True}, {"recent": "a"}]
)
def test_numbers_that_are_no_budget_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(settings))):
        KVBudget("*.*", **settings)


def test_what_no_budget_fits_is_refused(lab: Lab) -> None:
    assert KVBudget("0.1").at(64.0) == KVBudget("0.1", recent=64)
    for strength in (0.5, float("nan")):
        with pytest.raises(PlanError, match="recent"):
            KVBudget("0.1").at(strength)
    with pytest.raises(HeadError, match="L0H9"), hl.steer(lab("llama"), KVBudget("0.9")):
        pass
    with (
        pytest.raises(PlanError, match="no decoder-only model"),
        hl.steer(lab("t5"), KVBudget(None)),
    ):
        pass
    with pytest.raises(PlanError, match="n_tokens"):
        KVBudget(None).cache_bytes(lab("llama"), -1)
    with (
        pytest.raises(PlanError, match="needs the prompt's length"),
        hl.steer(lab("llama"), KVBudget(None, prefill=False)),
    ):
        lab("llama").module(input_ids=torch.tensor([[5, 6]]))
