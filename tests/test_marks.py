"""Marked text is found in the tokens that hold it, wherever and however often it stands, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_capture import ragged
from tiny_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import headlab as hl
from headlab.errors import PlanError, PromptError
from headlab.steering import Marks, find_spans
from headlab.steering.marks import read_spans

Lab = Callable[..., Any]
MERGES = [
    ("P", "a"),
    ("Pa", "r"),
    ("Par", "i"),
    ("Pari", "s"),
    ("Ġ", "Paris"),
    ("x", "y"),
    ("ð", "Ł"),
]


@cache
def by_bytes() -> hl.Model:
    """A model whose tokens are single bytes, and a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", *alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False
    )
    return hl.load(build("llama", vocab_size=len(tokens)), tokenizer=fast)


def ids_of_text(text: str, split: bool = False) -> list[int]:
    """Token ids; of single bytes alone, as the tokenizer would never have it, where ``split``."""
    tokenizer = by_bytes().tokenizer
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if split:
        pieces = "".join(tokenizer.convert_ids_to_tokens(ids))
        ids = tokenizer.convert_tokens_to_ids(list(pieces))
    return ids


def holding(ids: list[int], text: str, span: str) -> set[int]:
    """Places of tokens with a byte of the span in any of its occurrences: every letter of a token is a byte."""
    tokens = by_bytes().tokenizer.convert_ids_to_tokens(ids)
    found: set[int] = set()
    for at in range(len(text)):
        if text.startswith(span, at):
            low = len(text[:at].encode())
            blank = len(span) - len(span.lstrip())
            first, last = low + blank, low + len(span.rstrip().encode())
            start, touched = 0, []
            for place, token in enumerate(tokens):
                if start < last and start + len(token) > first:
                    touched.append(place)
                start += len(token)
            found |= set(range(touched[0], touched[-1] + 1))
    return found


def places(spans: Sequence[tuple[int, int]]) -> set[int]:
    return {place for start, stop in spans for place in range(start, stop)}


PIECES = st.lists(
    st.sampled_from(["Paris", " Paris", " ", "xy", "x", "🙂", "é", "漢字", "P"]),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60)
@given(pieces=PIECES, data=st.data(), split=st.booleans())
def test_spans_are_the_tokens_that_hold_their_bytes(
    pieces: list[str], data: Any, split: bool
) -> None:
    text = "".join(pieces)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start + 1, len(text)))
    span = text[start:stop]
    if not span.strip():
        return
    ids = ids_of_text(text, split)
    assert places(find_spans(by_bytes(), ids, [span])) == holding(ids, text, span)


@pytest.mark.parametrize(
    ("text", "span", "expected"),
    [
        ("Paris xyz", "Paris", {0}),  # at the start: a token without a space
        ("x Paris, Paris", "Paris", {1, 3}),  # every time, space and all
        ("x Paris", "aris", {1}),  # a token that reaches beyond is marked whole
        ("yxyxy", "yxy", {0, 1, 2}),  # twice, with a letter in common
        ("a🙂b", "🙂", {1, 2, 3}),  # a character of three tokens
        ("aéb", "b", {3}),
        ("x Parisxy", " Paris", {1}),
    ],
)
def test_examples(text: str, span: str, expected: set[int]) -> None:
    assert places(find_spans(by_bytes(), ids_of_text(text), [span])) == expected


def test_special_tokens_of_a_prompt_count_as_places() -> None:
    model = by_bytes()
    assert find_spans(model, [0, *ids_of_text("x Paris")], ["Paris", (-1, 3)]) == [(2, 3), (2, 3)]


def told(model: hl.Model, ids: Any, spans: Any, new: int = 0) -> list[set[int]]:
    """Positions that are marked in each prompt, in one pass or over all steps of a generation."""
    marks, found = Marks(model, spans), [set() for _ in ids]  # type: ignore[var-annotated]

    def note(bias: Tensor, where: Any) -> Tensor:
        for row, (keys, marked) in enumerate(zip(where.keys, marks.keys(where), strict=True)):
            found[row] |= set(keys[marked].tolist())
        return bias

    with model.edit(hl.apply("0.*", note, "bias")):
        model.generate(ids, max_new_tokens=new) if new else model.logits(ids)
    return found


@pytest.mark.parametrize("new", [0, 4])
def test_marks_keep_their_positions_in_padded_batches(lab: Lab, new: int) -> None:
    model, ids = lab("llama"), ragged((9, 5, 7))
    assert told(model, ids, [(1, 3)], new) == [{1, 2}] * 3
    assert told(model, ids, [(-3, -1)], new) == [{6, 7}, {2, 3}, {4, 5}]
    assert told(model, ids, [[(0, 1)], [(-1, 5)], [(2, 4), (6, 7)]], new) == [{0}, {4}, {2, 3, 6}]
    shown = [model.text(row[row >= 0]).split() for row in ids]
    each = [[f"{words[2]} {words[3]}"] for words in shown]
    assert told(model, ids, each, new) == [{2, 3}] * 3


def test_generated_text_is_not_marked(lab: Lab) -> None:
    model, ids = lab("llama"), ragged((9,))
    new = model.generate(ids, max_new_tokens=6)
    again = model.text(new.ids[0]).split()[0]
    prompt = torch.cat([ids[0], new.ids[0, :1]])[None]  # the word stands in the prompt now
    longer = model.generate(prompt, max_new_tokens=6).ids[0].tolist()
    assert told(model, prompt, [again], 6) == [{9}]
    assert len(longer) == 6


def test_marks_are_of_the_prompt_that_is_run(lab: Lab) -> None:
    model = lab("llama")
    marks, found = Marks(model, ["w9"]), []

    def note(bias: Tensor, where: Any) -> Tensor:
        found.append(marks.keys(where)[0].nonzero().flatten().tolist())
        return bias

    with model.edit(hl.apply("0.*", note, "bias")):
        for prompt in ("w9 w5 w6", "w5 w9 w9", "w5 w6 w9"):
            model.logits(prompt)
    assert found == [[0], [1, 2], [2]]


def test_positions_that_were_kept_as_json_are_read() -> None:
    assert read_spans([[3, 5]]) == (False, [[(3, 5)]])
    assert read_spans(([[3, 5]], [[1, 2], "a"])) == (True, [[(3, 5)], [(1, 2), "a"]])
    assert read_spans([["a", "b"]]) == (True, [["a", "b"]])


@pytest.mark.parametrize(
    "spans",
    ["Paris", [], [[]], [["a"], []], [" "], [3], [(1, 2, 3)], [(1, 2.5)], None, [["a"], "b"]],
)
def test_what_is_no_span_is_refused(spans: Any) -> None:
    with pytest.raises(PlanError, match="span"):
        read_spans(spans)


@pytest.mark.parametrize("span", ["w99", "W5", (3, 3), (2, 9), (-9, 2), (2, 1)])
def test_a_span_that_is_not_in_the_prompt_is_refused(lab: Lab, span: Any) -> None:
    with pytest.raises(PromptError, match="not in the prompt"):
        told(lab("llama"), "w5 w6 w7 w8", [span])


def test_marks_that_cannot_be_placed_are_refused(lab: Lab) -> None:
    model = lab("llama")
    with pytest.raises(PlanError, match="marks 2 prompts, but 3 are run"):
        told(model, ragged((9, 5, 7)), [["w5"], ["w6"]])
    with pytest.raises(PromptError, match="came without a tokenizer"):
        told(hl.load(model.module), [[5, 6]], ["w5"])
    with (
        pytest.raises(PlanError, match="whole prompts"),
        hl.steer(model, hl.steering.Pasta([(0, 1)])),
    ):
        model.module(input_ids=torch.tensor([[5, 6]]))
