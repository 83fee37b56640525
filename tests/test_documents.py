"""Multi-document prompts: spans, balance, one answer each, and refusals."""

from __future__ import annotations

import copy
import json
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from real_model import smollm2
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headlab.errors import PromptError
from headlab.tasks.documents import (
    TEMPLATE,
    DocumentQuestion,
    document_prompt,
    document_questions,
)
from headlab.tasks.prose import data_folder

MANY = document_questions(300, 7, 0)


@cache
def tokenizer(make: str) -> Any:
    """SmolLM2's with or without its chat template, and one that joins a full stop and line breaks, as Llama 3's."""
    if make == "chat":
        return smollm2().tokenizer
    if make == "plain":
        plain = copy.deepcopy(smollm2().tokenizer)
        plain.chat_template = None
        return plain
    backend = Tokenizer(models.BPE())
    pattern = Regex(r" ?\w+| ?[^\s\w]+[\r\n]*|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["\n".join((*q.documents, q.question)) for q in MANY], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# -- the data ------------------------------------------------------------------------------------


def test_no_value_holds_another_of_its_kind_or_stands_in_its_wording():
    data = json.loads((data_folder() / "documents.json").read_text("utf-8"))
    lists = data["lists"]
    assert all(len(words) == len(set(words)) == 20 for words in lists.values())
    for kind in data["kinds"]:
        values = [value for source in kind["slots"].values() for value in lists[source]]
        wording = " ".join([*kind["documents"], *kind["questions"].values()]).lower()
        for value in values:
            assert sum(value in other for other in values) == 1, value
            assert value.lower() not in wording, value
        assert set(kind["questions"]) == set(kind["slots"])


def test_hundreds_of_prompts_all_different_and_the_same_again():
    assert len(set(MANY)) == 300
    assert document_questions(300, 7, 0) == MANY
    assert not set(MANY) & set(document_questions(300, 7, 1))


@pytest.mark.parametrize("n", [2, 7, 20])
def test_places_are_even_and_each_answer_stands_once(n: int):
    asked = document_questions(41, n, 3)
    places = Counter(one.gold for one in asked)
    assert set(places) == set(range(n))
    assert max(places.values()) - min(places.values()) <= 1
    for one in asked:
        assert len(set(one.documents)) == n
        whole = one.template + one.question + "\n".join(one.documents)
        assert whole.lower().count(one.answer.lower()) == 1
        assert one.answer in one.documents[one.gold]


def test_only_the_gold_document_holds_the_name_that_the_question_asks_about():
    for asked in MANY:
        name = [word for word in asked.question.rstrip("?").split()[1:] if word[0].isupper()]
        assert name, asked.question
        holding = [all(word in text for word in name) for text in asked.documents]
        assert holding.index(True) == asked.gold
        assert sum(holding) == 1


def test_documents_of_a_prompt_are_of_one_length():
    """In SmolLM2's tokens: 30 to 50 each, and the gold one no longer or shorter than others on average."""
    lengths, gold = [], []
    for asked in MANY:
        spans = document_prompt(tokenizer("chat"), asked).documents
        sizes = np.array([stop - start for start, stop in spans])
        assert sizes.max() - sizes.min() <= 15
        lengths.append(sizes.mean())
        gold.append(sizes[asked.gold])
        assert ((sizes >= 28) & (sizes <= 52)).all()
    assert abs(np.mean(gold) - np.mean(lengths)) < 0.5


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["chat", "plain", "joining"])
@pytest.mark.parametrize("response", ["", "a red herring"])
def test_spans_cover_the_texts_and_no_more(make: str, response: str):
    read = tokenizer(make)
    for asked in MANY[:40]:
        prompt = document_prompt(read, asked, response)
        for text, (start, stop) in zip(asked.documents, prompt.documents, strict=True):
            assert read.decode(prompt.ids[start:stop]).strip() == text
        start, stop = prompt.answer_span or (0, 0)
        assert read.decode(prompt.ids[start:stop]).strip() == asked.answer
        low, high = prompt.documents[asked.gold]
        assert low <= start < stop <= high
        assert read.decode(prompt.response).strip() == response
        assert document_prompt(read, asked).ids == prompt.ids[: prompt.start]


def test_a_joined_line_break_belongs_to_the_document_it_ends():
    """Otherwise this tokenizer, and with it Llama 3's, would be refused."""
    read = tokenizer("joining")
    prompt = document_prompt(read, MANY[0])
    ends = [read.decode([prompt.ids[stop - 1]]) for _, stop in prompt.documents]
    assert any(end == ".\n" for end in ends)


def test_a_chat_template_makes_a_users_turn():
    read = tokenizer("chat")
    text = read.decode(document_prompt(read, MANY[0], "yes").ids)
    assert text.count("<|im_start|>user\nAnswer the question") == 1
    assert text.endswith("Answer:<|im_end|>\n<|im_start|>assistant\nyes")


def test_a_template_of_ones_own_with_the_question_first():
    asked = DocumentQuestion(("one {x}.", "two."), 1, "Which?", "two", "{question} {documents} So:")
    read = tokenizer("plain")
    prompt = document_prompt(read, asked, "two")
    assert read.decode(prompt.ids) == "Which? Document [1] one {x}.\nDocument [2] two. So: two"
    assert [read.decode(prompt.ids[a:b]).strip() for a, b in prompt.documents] == [
        "one {x}.",
        "two.",
    ]


def test_the_answers_span_is_its_first_mention_as_a_whole_word():
    read = tokenizer("plain")
    asked = DocumentQuestion(("The theme of the hen. The", "Nothing."), 0, "What?", "the")
    prompt = document_prompt(read, asked)
    start, stop = prompt.answer_span or (0, 0)
    assert (read.decode(prompt.ids[start - 1 : start]), stop - start) == (" of", 1)
    unsaid = DocumentQuestion(("The hen.", "A duck."), 0, "What?", "cat")
    assert document_prompt(read, unsaid).answer_span is None
    joined = DocumentQuestion(("The hen ...", "A duck."), 0, "What?", "..")
    assert document_prompt(read, joined).answer_span is None  # "..." is one token


def test_fewer_documents_keep_the_gold_one():
    for asked in MANY[:14]:
        few = asked.fewer(3)
        assert len(few.documents) == 3
        assert few.documents[few.gold] == asked.documents[asked.gold]
        first = asked.documents.index(few.documents[0])
        assert asked.documents[first : first + 3] == few.documents
    assert MANY[0].fewer(9) == MANY[0]


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gold": 2}, "gold is 2, but there are 2 documents, numbered from 0 to 1"),
        ({"gold": -1}, "gold is -1"),
        ({"documents": ("one",)}, "at least 2 documents"),
        ({"documents": ("one", "  \n")}, "document 1 is empty"),
        ({"question": " "}, "question or its answer is empty"),
        ({"answer": ""}, "question or its answer is empty"),
        ({"template": "{documents}"}, "once each"),
        ({"template": TEMPLATE + " {question}"}, "once each"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(change: dict[str, Any], why: str):
    fields = {"documents": ("one", "two"), "gold": 1, "question": "q?", "answer": "two"}
    with pytest.raises(PromptError, match=why):
        DocumentQuestion(**{**fields, **change})


@pytest.mark.parametrize("n", [1, 21])
def test_too_few_or_many_documents_are_refused(n: int):
    with pytest.raises(PromptError, match="from 2 to 20"):
        document_questions(3, n, 0)


def test_a_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    for read in (None, Slow()):
        with pytest.raises(PromptError, match="character offsets"):
            document_prompt(read, MANY[0])


def test_a_token_that_reaches_beyond_a_document_is_refused():
    """The document's full stop and the template's next to it make one token."""
    asked = DocumentQuestion(("two", "one."), 1, "q?", "one", "{documents}.. {question}")
    assert len(tokenizer("plain")("...")["input_ids"]) == 1
    with pytest.raises(PromptError, match=r"straddles the edge of 'one\.'"):
        document_prompt(tokenizer("plain"), asked)
