"""Prompts for in-context learning, and conflicts between memory and text: what is in them, and what must not be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headlab.errors import HeadlabError, PlanError, PromptError
from headlab.tasks import ICLPrompt, conflicts, icl_prompts, relations, split_pairs
from headlab.tasks.conflicts import KINDS

PAIRS = [("hot", "cold"), ("cold", "hot"), ("big", "small"), ("up", "down"), ("in", "out"), ("on", "off")]  # fmt: skip
ANTONYMS = relations("antonym")[0]


def shots_of(prompt: ICLPrompt) -> list[tuple[str, str]]:
    """The examples, read back from the text."""
    *blocks, question = prompt.text.split("\n\n")
    assert question == f"Q: {prompt.source}\nA:"
    found = []
    for block in blocks:
        match = re.fullmatch(r"Q: (.+)\nA: (.+)", block)
        assert match is not None
        found.append((match[1], match[2]))
    return found


# -- in-context learning ---------------------------------------------------------------------------


def test_a_prompt_has_its_examples_and_a_question() -> None:
    (prompt,) = icl_prompts(PAIRS[2:4], PAIRS[:1], n_prompts=1, n_shots=2, seed=3)
    expected = {f"Q: {a}\nA: {b}\n\nQ: {c}\nA: {d}\n\nQ: hot\nA:" for (a, b), (c, d) in
                ((PAIRS[2], PAIRS[3]), (PAIRS[3], PAIRS[2]))}  # fmt: skip
    assert prompt.text in expected
    assert (prompt.source, prompt.answer, prompt.n_shots) == ("hot", " cold", 2)
    (bare,) = icl_prompts(PAIRS, PAIRS[:1], n_prompts=1, n_shots=0)
    assert bare.text == "Q: hot\nA:"


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_word_asked_about_is_not_among_the_examples(shuffled: bool) -> None:
    for prompt in icl_prompts(PAIRS, PAIRS, n_prompts=30, n_shots=4, shuffled=shuffled):
        shots = shots_of(prompt)
        assert len(shots) == 4
        assert prompt.source not in {word for pair in shots for word in pair}
        assert dict(PAIRS)[prompt.source] == prompt.answer.strip()


def test_each_pair_is_asked_about_once_before_any_is_asked_again() -> None:
    prompts = icl_prompts(PAIRS, PAIRS, n_prompts=16, n_shots=1)
    sources = [prompt.source for prompt in prompts]
    for start in (0, 6):
        assert sorted(sources[start : start + 6]) == sorted(source for source, _ in PAIRS)
    assert len(set(sources[12:])) == 4


def test_examples_are_right_unless_shuffled() -> None:
    right = dict(ANTONYMS.pairs)
    for shuffled in (False, True):
        prompts = icl_prompts(ANTONYMS.pairs, ANTONYMS.pairs, n_prompts=20, shuffled=shuffled)
        same = [target == right[source] for p in prompts for source, target in shots_of(p)]
        assert len(same) == 200
        assert all(same) if not shuffled else not any(same)
        assert all(prompt.shuffled == shuffled for prompt in prompts)


@given(answers=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_shuffled_answers_stay_where_they_were_as_rarely_as_can_be(
    answers: Sequence[str], seed: int
) -> None:
    pairs = [(str(at), answer) for at, answer in enumerate(answers)]
    (prompt,) = icl_prompts(
        pairs, [("x", "y")], n_prompts=1, n_shots=len(pairs), shuffled=True, seed=seed
    )
    shots = shots_of(prompt)
    assert Counter(target for _, target in shots) == Counter(answers)
    same = sum(target == dict(pairs)[source] for source, target in shots)
    # m equal words find n − m places of other words; the rest must stand where one of them stood.
    most = max(Counter(answers).values())
    assert same == max(0, 2 * most - len(answers))


def test_orders_of_shuffled_answers_vary() -> None:
    prompts = icl_prompts(PAIRS[2:], [("x", "y")], n_prompts=40, n_shots=4, shuffled=True)
    orders = {tuple(sorted(shots_of(prompt))) for prompt in prompts}
    assert len(orders) == 6  # the rings of four words


def test_seeds_decide_everything() -> None:
    def texts(seed: int) -> list[str]:
        made = icl_prompts(PAIRS, PAIRS, n_prompts=6, n_shots=3, shuffled=True, seed=seed)
        return [prompt.text for prompt in made]

    assert texts(1) == texts(1) != texts(2)
    assert split_pairs(ANTONYMS, 1) == split_pairs(ANTONYMS, 1) != split_pairs(ANTONYMS, 2)


def test_halves_share_no_pair_and_leave_none_out() -> None:
    one, other = split_pairs(ANTONYMS, 0)
    assert not set(one) & set(other)
    assert sorted(one + other) == sorted(ANTONYMS.pairs)
    assert abs(len(one) - len(other)) <= 1
    assert one + other != list(ANTONYMS.pairs)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(PromptError, match="no pair to ask about"):
        icl_prompts(PAIRS, [], n_prompts=1, n_shots=1)
    with pytest.raises(PromptError, match=r"5 examples .* 6 pairs, of which 4 are without 'hot'"):
        icl_prompts(PAIRS, PAIRS[:1], n_prompts=1, n_shots=5)
    for bad in ({"n_prompts": 0}, {"n_shots": -1}, {"n_shots": 1.0}, {"seed": -1}):
        with pytest.raises(PlanError, match=next(iter(bad))) as caught:
            icl_prompts(PAIRS, PAIRS, **{"n_prompts": 1, "n_shots": 1} | bad)
        assert "\n" not in str(caught.value)


# -- conflicts -------------------------------------------------------------------------------------


def test_every_kind_says_what_it_should() -> None:
    for item in conflicts(40, seed=1):
        question, known, replaced = item.prompts["clean"], item.known.strip(), item.replaced.strip()
        assert tuple(item.prompts) == KINDS
        assert item.source in question
        assert all(text.endswith(question) for text in item.prompts.values())
        before = {kind: text.removesuffix(question) for kind, text in item.prompts.items()}
        assert before["clean"] == ""
        assert before["support"] == f"{question} {known}. "
        assert before["substitution"] == f"{question} {replaced}. "
        assert before["coherent"].count(replaced) >= 3
        assert before["coherent"].endswith(f"{question} {replaced}. ")
        assert "{" not in before["coherent"]
        assert not re.search(
            rf"\b{re.escape(known)}\b", before["coherent"].replace(item.source, "")
        )


def test_answers_are_right_and_their_stand_ins_are_of_the_same_kind() -> None:
    for item in conflicts(60):
        pairs = relations(item.relation)[0].pairs
        assert (item.source, item.known.strip()) in pairs
        assert item.replaced.strip() in {target for _, target in pairs}
        assert item.replaced != item.known
        assert item.known[0] == item.replaced[0] == " "


def test_relations_come_in_turn_and_no_fact_twice() -> None:
    items = conflicts(41, names=("country_capital", "product_company"))
    assert Counter(item.relation for item in items) == {
        "country_capital": 21,
        "product_company": 20,
    }
    assert len({(item.relation, item.source) for item in items}) == 41
    assert conflicts(9, seed=4) == conflicts(9, seed=4) != conflicts(9, seed=5)


def test_the_two_answers_begin_with_different_tokens() -> None:
    items = conflicts(60, names=("country_language",), tokenizer=_Letters())
    assert all(item.known[1] != item.replaced[1] for item in items)
    # Without a tokenizer some do begin alike, so the above is not by chance.
    items = conflicts(60, names=("country_language",))
    assert any(item.known[1] == item.replaced[1] for item in items)


class _Letters:
    """One token a letter; spaces are none."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text.replace(" ", "")]}


def test_facts_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(PromptError, match=r"no wording for 'antonym'.*country_capital"):
        conflicts(2, names=("antonym",))
    with pytest.raises(PromptError, match="not 9999"):
        conflicts(9999)
    with pytest.raises(PlanError, match="n=0"):
        conflicts(0)
    with pytest.raises(HeadlabError, match="begins with the token") as caught:
        conflicts(2, tokenizer=_Same())
    assert "\n" not in str(caught.value)


class _Same:
    """Every word begins alike."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [7, len(text)]}
