"""Naming heads: every way of writing them, sets, and what is said when they do not exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headlab as hl
from headlab.attention import Head, parse_heads
from headlab.errors import HeadError, HeadlabError
from headlab.models import LayerSpec, ModelSpec


def layer(at: int, n_heads: int) -> LayerSpec:
    return LayerSpec(f"layers.{at}", "decoder", n_heads, n_heads, 64, 64, None, None, False, 0.125)


def spec(layers: int = 30, heads: int = 9, name: str = "smollm2-135m") -> ModelSpec:
    measured = tuple(layer(at, heads) for at in range(layers))
    return ModelSpec(name, "llama", measured, 576, 49152, 8192, "rope")


SMOL = spec()


@pytest.mark.parametrize(
    "written",
    [
        "L18H6", "l18h6", "18.6", " 18.6 ", "L18H6,", (18, 6), Head(18, 6), [(18, 6)], ["18.6"],
        {(18, 6)}, (Head(18, 6),), (np.int64(18), np.int64(6)),
        (torch.tensor(18), torch.tensor(6)), {"L18H6": None}.keys(), "L18H6, 18.6",
        ["18.6", (18, 6), Head(18, 6)], ("18.6",), [["18.6"], [(18, 6)]],
    ],
    ids=repr,
)  # fmt: skip
def test_every_way_of_writing_one_head_means_it(written: Any) -> None:
    heads = parse_heads(written, SMOL)
    assert heads == (Head(18, 6),)
    assert isinstance(heads[0], Head)
    assert str(heads[0]) == "L18H6"
    assert all(type(part) is int for part in heads[0])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1.1, 0.*", [(0, 0), (0, 1), (0, 2), (1, 1)]),
        ("*.0", [(0, 0), (1, 0)]),
        ("L*H2", [(0, 2), (1, 2)]),
        ("L1H*", [(1, 0), (1, 1), (1, 2)]),
        ("*.*", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ("1.2,0.1,1.2", [(0, 1), (1, 2)]),
        (["1.*", (0, 0)], [(0, 0), (1, 0), (1, 1), (1, 2)]),
        ("0.1,,1.1,", [(0, 1), (1, 1)]),
    ],
)
def test_sets_come_sorted_and_each_head_once(written: Any, expected: list[Any]) -> None:
    assert parse_heads(written, spec(2, 3)) == tuple(Head(*pair) for pair in expected)


def test_stars_follow_the_heads_each_layer_has() -> None:
    mixed = replace(SMOL, layers=(layer(0, 2), layer(1, 4)))
    assert parse_heads("*.*", mixed) == tuple(
        Head(at, head) for at, n in ((0, 2), (1, 4)) for head in range(n)
    )
    assert parse_heads("1.3", mixed) == (Head(1, 3),)
    with pytest.raises(HeadError, match="L0H3"):
        parse_heads("0.3", mixed)


@pytest.mark.parametrize("written", ["L31H2", "31.2", (31, 2)])
def test_a_head_that_does_not_exist_is_named_with_those_that_do(written: Any) -> None:
    with pytest.raises(HeadError) as caught:
        parse_heads(written, SMOL)
    expected = "head L31H2 does not exist: smollm2-135m has layers 0–29 and heads 0–8"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "written",
    [
        "18.9", "30.0", "30.*", "*.9", (0, 9), (-1, 0), (0, -1), "-1.0", "", " , ", [], (), "18",
        "L18", "H6", "18.6.2", "L18.6", "18:6", "a.b", "18. 6", "L18H6 17.3", None, 18, 18.6,
        [18, 6], (1, 2, 3), [None], "18.6; 17.3", "**", ".6", "18.", {"layer": 18},
    ],
    ids=repr,
)  # fmt: skip
def test_what_names_no_head_is_refused_in_one_sentence(written: Any) -> None:
    with pytest.raises(HeadError) as caught:
        parse_heads(written, SMOL)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 200
    assert isinstance(caught.value, HeadlabError)


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 8)), min_size=1), st.data())
def test_heads_survive_being_written_and_read(pairs: list[tuple[int, int]], data: Any) -> None:
    forms = [
        str(Head(*pair)) if data.draw(st.booleans()) else "{}.{}".format(*pair) for pair in pairs
    ]
    expected = tuple(sorted({Head(*pair) for pair in pairs}))
    assert parse_heads(", ".join(forms), SMOL) == expected
    assert parse_heads(forms, SMOL) == expected
    assert parse_heads(pairs, SMOL) == expected
    assert parse_heads(expected, SMOL) == expected


@given(st.integers(-5, 60), st.integers(-5, 60))
def test_exactly_the_heads_of_the_model_exist(at: int, head: int) -> None:
    if 0 <= at < 30 and 0 <= head < 9:
        assert parse_heads((at, head), SMOL) == (Head(at, head),)
    else:
        with pytest.raises(HeadError, match="does not exist"):
            parse_heads((at, head), SMOL)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        heads = parse_heads(text, SMOL)
    except HeadError:
        return
    assert heads
    assert all(0 <= at < 30 and 0 <= head < 9 for at, head in heads)


def test_heads_are_public() -> None:
    assert hl.Head is Head
    assert hl.parse_heads is parse_heads
    assert Head(18, 6) == (18, 6)
