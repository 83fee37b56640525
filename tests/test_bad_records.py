"""Records of the user's that are wrong in unlikely ways: one sentence, no traceback, no score."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_tokenizer

from headlab.errors import PromptError
from headlab.roles.base import ROLES, Probing
from headlab.roles.fuzzy_induction import FuzzyInduction
from headlab.tasks import (
    DocumentQuestion,
    RecordError,
    facts_of_records,
    ordered_tokens,
    read_records,
)
from headlab.tasks.dependencies import parsed_sentences
from headlab.tasks.spans import span_trials
from headlab.tasks.temporal import TimePrompts

WORDS = "w5 w9 w12 w7 w20 w31"
SPAN = {"text": WORDS, "from": [14, 17], "to": [3, 5]}


def read(role: str, *records: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    schema = ROLES[role].schema
    assert schema is not None
    return read_records(records, schema, role)


# -- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "record"),
    [
        ("spans", SPAN | {"from": [14.0, 17.0], "to": [[3.0, 5.0]]}),
        ("syntactic", {"words": ["w5", "w6"], "heads": [1.0, -1.0], "relations": ["a", "b"]}),
        ("retrieval", {"prompt": "w5 w6", "answer": "w5", "answer_start": 0.0}),
    ],
)
def test_whole_numbers_written_as_floats_become_integers(role: str, record: dict[str, Any]):
    def numbers(value: Any) -> list[Any]:
        if isinstance(value, dict | list):
            parts = value.values() if isinstance(value, dict) else value
            return [number for part in parts for number in numbers(part)]
        return [] if isinstance(value, str) else [value]

    (got,) = read(role, record)
    assert got == record
    assert numbers(got)
    assert {type(number) for number in numbers(got)} == {int}


def test_half_a_character_in_a_key_is_no_text():
    with pytest.raises(RecordError, match="record 0 for temporal holds half a character"):
        read("temporal", {"template": "In {time}", "answers": {"\ud800": "w5", "w6": "w7"}})


def test_a_path_with_a_nul_cannot_be_read():
    with pytest.raises(RecordError, match=r"'a\\x00b' cannot be read"):
        read_records("a\0b", {}, "spans")


# -- what tokens make of them --------------------------------------------------------------------


def test_a_span_that_cuts_a_token_is_named():
    with pytest.raises(RecordError, match=r"record 0: a token straddles .* \(`from` \[15, 17\]\)"):
        span_trials(tiny_tokenizer(), [SPAN | {"from": [15, 17]}])


def test_blank_words_items_times_and_answers_are_named():
    tokenizer = tiny_tokenizer()
    record = {"words": ["w5", " ", "w7"], "heads": [-1, 0, 0], "relations": ["x"] * 3}
    with pytest.raises(RecordError, match="record 0: no token covers ' ', word 1"):
        parsed_sentences(tokenizer, [record])
    prompts = TimePrompts(tokenizer, None)
    for answers, what in (({"": "w5", "w8": "w6"}, "time ''"), ({"w7": " ", "w8": "w6"}, "' '")):
        fact = {"template": "w9 {time} w10", "answers": answers}
        with pytest.raises(RecordError, match=f"record 0: the .*{what} is blank"):
            facts_of_records(prompts, [fact])


class _Bpe:
    """A tokenizer for which two spaces are one token, as for many that work on bytes."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [sum(map(ord, text))]}

    def decode(self, ids: list[int]) -> str:
        return {64: "  "}.get(ids[0], chr(max(ids[0] - 32, 0)))


def test_a_blank_item_is_no_item():
    record = {"name": "letters", "items": [" ", "a", "b", "c", "d"]}
    with pytest.raises(RecordError, match="record 0: ' ' is not a single token"):
        ordered_tokens(_Bpe(), [record])
    assert ordered_tokens(_Bpe(), [record | {"items": list("abcde")}])


def test_many_times_take_no_time_squared():
    """Every pair is checked, but each prompt is tokenised once."""

    class Counting:
        is_fast, unk_token_id, calls = True, None, 0

        def __call__(self, text: str, **options: Any) -> Any:
            self.calls += 1
            return tiny_tokenizer_once(text, **options)

    tiny_tokenizer_once = tiny_tokenizer()
    counting = Counting()
    times = [f"w{at}" for at in range(20, 90)]
    answers = {time: f"w{5 + at % 2}" for at, time in enumerate(times)}
    steady = {"template": "w9 {time}", "times": times[:2], "answer": "w5", "foil": "w6"}
    began = time.perf_counter()
    fact = {"template": "w9 {time} w10", "answers": answers}
    facts_of_records(TimePrompts(counting, None), [fact, steady])
    assert counting.calls < 10 * len(times)
    assert time.perf_counter() - began < 30


def test_the_gold_document_must_be_one_of_a_kind():
    with pytest.raises(PromptError, match="documents 0 and 2 are the same"):
        DocumentQuestion(("a b.", "c d.", " a b."), 2, "q?", "b")
    DocumentQuestion(("a b.", "c d.", "c d."), 0, "q?", "b")


def test_a_gold_index_that_the_answer_contradicts_is_seen():
    texts = ("The mill grinds barley.", "The mill grinds mustard.")
    assert DocumentQuestion(texts, 1, "q?", "barley").contradicted
    assert not DocumentQuestion(texts, 0, "q?", "barley").contradicted
    assert not DocumentQuestion(texts, 0, "q?", "The mill").contradicted
    assert not DocumentQuestion(texts, 0, "q?", "wheat").contradicted
    assert not DocumentQuestion(texts, 0, "q?", "must").contradicted  # part of a word


def test_a_text_of_one_word_has_no_control(lab: Any):
    model = lab("llama")
    for text in ("w5 " * 40, "w5 w5 w5 w6 " * 8):
        with pytest.raises(RecordError, match="record 0: so few of its tokens differ"):
            FuzzyInduction().measure(Probing(model, records=({"text": text},)))
    plain = " ".join(f"w{at}" for at in range(10, 40))
    got = FuzzyInduction().measure(Probing(model, records=({"text": plain},)))
    assert not np.isnan(got.values).any()
