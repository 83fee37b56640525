"""Every role whose mechanism can be built is claimed for the heads built for it, and for no others."""

from __future__ import annotations

from functools import cache

import pytest

import headlab as hl
from headlab import planted

#: An induction head copies, so it is a retrieval and an episodic head too; a previous-token head is positional and
#: local.
ATTENTION = {
    "L0H1": "positional",
    "L0H2": "sink",
    "L1H0": "previous_token",
    "L1H3": "duplicate_token",
    "L2H1": "induction",
}
ATTENTION_TRUTH = {
    "previous_token": {"L1H0"},
    "duplicate_token": {"L1H3"},
    "induction": {"L2H1"},
    "natural_induction": {"L2H1"},
    "copying": {"L2H1"},
    "retrieval": {"L2H1"},
    "episodic": {"L2H1"},
    "sink": {"L0H2"},
    "positional": {"L0H1", "L1H0"},
    "local": {"L0H1", "L1H0"},
    "fuzzy_induction": set(),
    "delimiter": set(),
}
MEANING = {
    "L0H1": "positional",
    "L0H2": "sink",
    "L1H0": "previous_token",
    "L1H3": "contextual",
    "L2H1": "retrieval",
    "L2H3": "temporal",
}
MEANING_TRUTH = {
    "retrieval": {"L2H1"},
    "contextual": {"L1H3"},
    "temporal": {"L2H3"},
    "positional": {"L0H1", "L1H0"},
    "previous_token": {"L1H0"},
    "sink": {"L0H2"},
    "induction": set(),
    "natural_induction": set(),
    "duplicate_token": set(),
}
OWN_WORDS = ("retrieval", "contextual", "temporal")
FAMILIES = [("llama", None), ("llama", 2), ("gpt2", None)]


@cache
def made(family: str, n_kv_heads: int | None, meaning: bool) -> planted.Planted:
    return planted.model(
        family,
        MEANING if meaning else ATTENTION,
        distractors=6,
        n_kv_heads=n_kv_heads,
        max_context=160,
    )


def claims(model: planted.Planted, roles: list[str], n: int = 16) -> dict[str, set[str]]:
    data = {role: model.records(role, n) for role in roles if role in OWN_WORDS}
    opened = hl.load(model.module, tokenizer=model.tokenizer)
    scores = hl.score(opened, roles, data=data, n_prompts=n)
    return {role: set(scores.claimed(role)) for role in roles}


@pytest.mark.parametrize(("family", "n_kv_heads"), FAMILIES)
@pytest.mark.parametrize("meaning", [False, True], ids=["attention", "meaning"])
def test_exactly_the_heads_built_for_a_role_are_claimed_for_it(family, n_kv_heads, meaning):
    truth = MEANING_TRUTH if meaning else ATTENTION_TRUTH
    assert claims(made(family, n_kv_heads, meaning), list(truth)) == truth


@pytest.mark.parametrize(
    ("role", "head", "part"),
    [
        ("retrieval", "L2H1", "qk"),
        ("retrieval", "L2H1", "ov"),
        ("retrieval", "L1H0", "qk"),  # nothing left to read from
        ("contextual", "L1H3", "qk"),
        ("temporal", "L2H3", "qk"),
        ("temporal", "L2H3", "ov"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_scrambled_head_of_meaning_is_not_claimed(family, role, head, part):
    broken = planted.scramble(made(family, None, True), head, part)
    assert role not in {broken.truth.get(at) for at in broken.truth}
    assert claims(broken, [role]) == {role: set()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_scrambled_head_of_attention_is_not_claimed(family):
    broken = planted.scramble(made(family, None, False), "L0H1", "qk")
    assert claims(broken, ["positional"]) == {"positional": {"L1H0"}}
    broken = planted.scramble(made(family, None, False), "L2H1", "qk")
    roles = ["episodic", "natural_induction", "induction"]
    assert claims(broken, roles) == {role: set() for role in roles}


def test_where_a_contextual_head_writes_does_not_matter_to_where_it_looks():
    moved = planted.scramble(made("llama", None, True), "L1H3", "ov")
    assert claims(moved, ["contextual"]) == {"contextual": {"L1H3"}}
