"""Documents in another order: by the attention they get, and into the places that get most."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headlab as hl
from headlab import planted
from headlab.errors import PlanError
from headlab.planted.meanings import TOPICS
from headlab.steering import (
    attention_sorted,
    attention_to_documents,
    place_preference,
    ranked_into_places,
    reorder,
    word_overlap,
)
from headlab.steering.behaviours.documents import documents, questions
from headlab.tasks import DocumentQuestion, document_prompt

PLANTED = "L1H2"


@cache
def contextual() -> hl.Model:
    """A head that attends to words of the query's topic."""
    made = planted.model("llama", {PLANTED: "contextual"}, n_layers=2, n_heads=8, max_context=512)
    return hl.load(made.module, tokenizer=made.tokenizer)


def question(gold: int, seed: int = 0) -> DocumentQuestion:
    """Four documents of a topic each; the question ends in a word of the gold one's."""
    rng = np.random.default_rng(seed)
    topics = [TOPICS[name] for name in rng.permutation(list(TOPICS))]
    texts = tuple(" ".join(["the", *rng.permutation(topic)[:3], "was", "old"]) for topic in topics)
    return DocumentQuestion(
        texts, gold, f"small and {topics[gold][0]}", "king", "{documents}\n{question}"
    )


def test_attention_to_documents_is_the_mean_over_tokens_of_the_last_row() -> None:
    model = contextual()
    asked = [question(0), DocumentQuestion(question(1).documents[:2], 1, "a tree", "king")]
    found = attention_to_documents(model, asked)
    some = attention_to_documents(model, asked, "L0H1, L1H2")
    for row, each in enumerate(asked):
        prompt = document_prompt(model.tokenizer, each)
        ids = torch.tensor([prompt.ids])
        last = model.trace(ids, keep=hl.keep.tensors("pattern")).tensor("pattern")[0, :, :, -1]
        for at, (start, stop) in enumerate(prompt.documents):
            assert found[row, at] == pytest.approx(float(last[..., start:stop].mean()), abs=1e-6)
            two = (last[0, 1, start:stop].mean() + last[1, 2, start:stop].mean()) / 2
            assert some[row, at] == pytest.approx(float(two), abs=1e-6)
    assert np.isnan(found[1, 2:]).all()


@pytest.mark.parametrize("repeats", [1, 3])
def test_sorting_by_a_planted_head_puts_the_gold_document_last(repeats: int) -> None:
    model = contextual()
    asked = [question(gold, seed) for seed, gold in enumerate((0, 1, 2, 3, 0))]
    done = attention_sorted(model, asked, repeats=repeats, heads=PLANTED)
    for before, after in zip(asked, done, strict=True):
        assert after.asked.gold == 3
        assert after.order[-1] == before.gold
        assert after.asked.documents == tuple(before.documents[number] for number in after.order)
        assert int(np.argmax(after.attention)) == before.gold
        assert after.prompt(model).gold == 3


def test_sorting_again_reads_attention_in_the_new_order() -> None:
    model, asked = contextual(), question(1, 4)
    once = attention_sorted(model, [asked])[0]
    twice = attention_sorted(model, [asked], repeats=2)[0]
    by_hand = attention_to_documents(model, [once.asked])[0]
    order = [once.order[place] for place in np.argsort(by_hand)]
    assert list(twice.order) == order
    assert twice.attention[once.order[2]] == pytest.approx(by_hand[2])


def test_preference_is_the_mean_over_shuffles_and_places_count_not_documents() -> None:
    model = contextual()
    asked = [question(0, seed) for seed in range(3)]
    found = place_preference(model, asked, shuffles=2, seed=5)
    rng = np.random.default_rng(5)
    orders = [rng.permutation(4) for _ in range(6)]
    rows = [
        attention_to_documents(model, [reorder(asked[at // 2], order.tolist()).asked])[0]
        for at, order in enumerate(orders)
    ]
    assert found == pytest.approx(np.mean(rows, 0), abs=1e-6)
    # The planted head asks for a document and not for a place: shuffled, no place stands out.
    by_head = place_preference(model, asked, shuffles=24, heads=PLANTED)
    by_document = attention_to_documents(model, asked, PLANTED).mean(0)
    assert float(by_head.max() / by_head.min()) < 4 < float(by_document.max() / by_document.min())


@settings(max_examples=20)
@given(seed=st.integers(0, 999), n=st.integers(2, 8))
def test_the_most_relevant_document_gets_the_most_preferred_place(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    asked = DocumentQuestion(tuple(f"text {at}" for at in range(n)), seed % n, "what", "a")
    relevance, preference = rng.permutation(n), rng.random(n)
    done = ranked_into_places(asked, relevance, preference)
    assert sorted(done.order) == list(range(n))
    places = np.argsort(-preference)
    assert [relevance[done.order[place]] for place in places] == list(range(n))[::-1]
    assert done.asked.documents[done.asked.gold] == asked.documents[asked.gold]


def test_word_overlap_weighs_rare_words() -> None:
    asked = DocumentQuestion(
        ("the mill grinds corn", "The mill at Arn", "the boat", "the mill"),
        1,
        "What of the mill at Arn?",
        "x",
    )
    rare, some, every = np.log(5 / 2), np.log(5 / 4), np.log(5 / 5)
    expected = [every + some, every + some + 2 * rare, every, every + some]
    assert word_overlap(asked) == pytest.approx(expected)


def test_gold_documents_stand_where_they_are_wanted() -> None:
    made = questions(6, 5, "middle", seed=1)
    every = questions(6, 5, "every", seed=1)
    for one, other in zip(made, every, strict=True):
        assert one.gold == 2
        assert sorted(one.documents) == sorted(other.documents)
        assert one.documents[2] == other.documents[other.gold]
    assert sorted({each.gold for each in every}) == [0, 1, 2, 3, 4]
    assert questions(2, 5, 4)[0].gold == 4
    model = contextual()
    case = documents(model, asked=[question(2), question(1)]).cases[0]
    shown = [model.text(case.prompt[start:stop]) for start, stop in case.spans]
    assert shown == list(question(2).documents)
    alone = documents(model, asked=[question(2), question(1)], marked="gold").cases[0]
    assert alone.spans == (case.spans[2],)
    values = documents(model, asked=[question(2)] * 2, measure="log_probability").values(
        model, None
    )
    assert values.shape == (2,)
    assert (values < 0).all()


def test_what_cannot_be_reordered_is_refused() -> None:
    asked = question(0)
    with pytest.raises(PlanError, match="order="):
        reorder(asked, [0, 0, 1, 2])
    with pytest.raises(PlanError, match="4 documents need"):
        ranked_into_places(asked, np.ones(3), np.ones(4))
    with pytest.raises(PlanError, match="no questions"):
        attention_sorted(contextual(), [])
    with pytest.raises(PlanError, match="repeats="):
        attention_sorted(contextual(), [asked], repeats=0)
    with pytest.raises(PlanError, match="equally many"):
        place_preference(contextual(), [asked, DocumentQuestion(("a", "b"), 0, "c", "d")])
    for wrong in ({"gold": 5, "n_documents": 5}, {"gold": "last"}):
        with pytest.raises(PlanError, match="gold="):
            questions(2, **wrong)
    with pytest.raises(PlanError, match="measure="):
        documents(contextual(), 2, measure="f1")  # type: ignore[arg-type]
