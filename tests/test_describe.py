"""Naming mappings: by rules, where the pattern is known and where there is none; and by a model of one's own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import byte_level, with_dummy_prefix

from headlab.errors import PlanError
from headlab.parameters.describe import UNCLEAR, Description, describe_mappings
from headlab.parameters.describe_by_model import describing_prompt, read_answer
from headlab.parameters.token_classes import class_shares, classes_of, token_texts
from headlab.planted.words import tokenizer as planted_tokenizer
from headlab.tasks import relations

WORDS = sorted({f" {word}" for each in relations() for pair in each.pairs for word in pair})
#: A vocabulary of words of every relation, in which no class is common.
SHARES = class_shares([*WORDS, *(f" x{at}y" for at in range(20_000))])


def words_of(name: str, n: int = 20) -> list[tuple[str, str]]:
    (relation,) = relations(name)
    return [(f" {source}", f" {target}") for source, target in relation.pairs[:n]]


def described(mappings: Sequence[tuple[str, Sequence[str]]]) -> Description:
    return describe_mappings(mappings, SHARES)


def among(target: str, at: int) -> list[str]:
    """A target among others that nothing ties to any source."""
    others = [f" zq{at}{each}" for each in "abcd"]
    return [*others[: at % 5], target, *others[at % 5 :]]


# -- patterns that are there ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "country_capital",
        "antonym",
        "past_tense",
        "english_french",
        "surname_first_name",
        "compound",
        "next_in_order",
        "element_symbol",
    ],
)
def test_relations_are_named(name: str):
    pairs = words_of(name)
    mappings = [(source, among(target, at)) for at, (source, target) in enumerate(pairs)]
    best = described(mappings).candidates[0]
    assert (best.name, best.sort, best.share, best.n) == (name, "mapping", 1.0, len(pairs))
    assert best.claimed
    assert described(mappings).pattern.split("; ")[0] == name
    reverse = [(target, among(source, at)) for at, (source, target) in enumerate(pairs)]
    assert described(reverse).pattern.split("; ")[0] == f"{name}, reversed"


STRINGS = {
    "copies the token": [(word, word) for word in WORDS[::300]],
    "the same word in other case or spacing": [
        (f" {w}", w.upper()) for w in ("dog", "lamp", "mirror", "stone", "door", "fox", "king")
    ],
    "next number": [(str(n), f" {n + 1}") for n in range(7, 40, 4)],
    "first letter": [(f" {w}", f" {w[0]}") for w in ("dog", "lamp", "mirror", "stone", "fox")],
    "last letter": [(f" {w}", w[-1]) for w in ("dog", "lamp", "mirrors", "stone", "fox")],
    "the word with an ending": [
        (f" {w}", f" {w}ness") for w in ("bald", "bland", "blunt", "crisp", "damp", "dim")
    ],
    "the word without its ending": [
        (f" {w}ness", w) for w in ("bald", "bland", "blunt", "crisp", "damp", "dim")
    ],
    "the same stem with another ending": [
        (f" {w}ism", f" {w}ist") for w in ("terror", "social", "natural", "journal", "optim")
    ],
    "the same first letter": [
        (" bald", " brick"),
        (" damp", " donut"),
        (" mist", " maple"),
        (" tulip", " torso"),
        (" rust", " ravine"),
        (" vine", " vault"),
        (" jest", " jury"),
    ],
}


@pytest.mark.parametrize("name", STRINGS)
def test_rules_on_letters_are_named(name: str):
    mappings = [(source, among(target, at)) for at, (source, target) in enumerate(STRINGS[name])]
    found = described(mappings)
    assert found.pattern.split("; ")[0] == name
    assert found.candidates[0].share == 1.0


def test_part_of_a_relation_is_named_with_its_share():
    right, rest = words_of("country_capital", 8), words_of("verb_noun", 22)
    mappings = [(source, [target]) for source, target in right]
    mappings += [(source, [f" zq{at}"]) for at, (source, _) in enumerate(rest)]
    found = described(mappings)
    best = next(each for each in found.candidates if each.name == "country_capital")
    assert (best.share, best.n) == (8 / 30, 30)
    assert found.pattern.startswith("country_capital")
    fewer = [*mappings[:5], *((source, [f" zp{at}"]) for at, (source, _) in enumerate(rest))]
    assert "country_capital" not in described(fewer).pattern  # 5 of 27 are too few


def test_classes_are_named_and_a_constant_output_is_no_mapping():
    names = [source for source, _ in words_of("name_pronoun", 20)]
    found = described([(name, [" zq1", " zq2"]) for name in names])
    assert found.pattern == "sources: first names"
    assert found.candidates[0].null == pytest.approx(SHARES["first names"])
    # Every source gives its target, but so does every other row: only the class of sources is left.
    europe = [pair for pair in words_of("country_continent") if pair[1] == " Europe"]
    found = described([(country, [" Europe"]) for country, _ in europe])
    assert "country_continent" not in found.pattern
    assert found.pattern.startswith("sources: countries")
    shown = next(each for each in found.candidates if each.name == "country_continent")
    assert (shown.share, shown.null, shown.claimed) == (1.0, 1.0, False)
    numbers = [(f" zq{at}", [f" {1900 + at}"]) for at in range(12)]
    assert described(numbers).pattern in ("targets: numbers", "targets: years")


def test_targets_are_held_against_what_any_direction_raises():
    mappings = [
        (f" zq{at}", [each]) for at, each in enumerate(["ation", "ing", "ment", "ous", "ly"])
    ]
    mappings += [(f" zp{at}", [f" zr{at}"]) for at in range(1)]
    assert described(mappings).pattern == "targets: parts inside words"
    chance = SHARES | {"parts inside words": 0.6}
    assert describe_mappings(mappings, SHARES, chance).pattern == UNCLEAR


def test_of_rules_that_hold_alike_the_narrow_one_is_named():
    copies = described([(word, [word]) for word in WORDS[::200]])
    assert copies.pattern.split("; ")[0] == "copies the token"
    plural = [pair for pair in words_of("plural", 90) if pair[1] == pair[0] + "s"][:12]
    assert described([(s, [t]) for s, t in plural]).pattern.startswith(
        ("plural", "the word with an ending")
    )


# -- and that are not ----------------------------------------------------------------------------


def test_mappings_at_random_are_unclear():
    """Sources of all relations with targets of all relations, drawn at random: at most one in twenty has a pattern."""
    rng = np.random.default_rng(0)
    sets = [rng.permutation(len(WORDS))[:180].reshape(30, 6) for _ in range(60)]
    shares = class_shares(WORDS)
    named = []
    for drawn in sets:
        mappings = [(WORDS[row[0]], [WORDS[at] for at in row[1:]]) for row in drawn]
        found = describe_mappings(mappings, shares)
        named += [found.pattern] if found.clear else []
    assert len(named) <= 3, named


def test_shuffled_targets_are_no_mapping():
    pairs = words_of("country_capital", 30)
    targets = [target for _, target in pairs]
    for shift in range(1, 30):
        turned = targets[shift:] + targets[:shift]
        found = described([(source, [t]) for (source, _), t in zip(pairs, turned, strict=True)])
        assert not any(each.claimed for each in found.candidates if each.sort == "mapping")


def test_few_mappings_are_unclear():
    pairs = words_of("country_capital", 4)
    found = described([(source, [target]) for source, target in pairs])
    assert (found.pattern, found.candidates, found.clear) == (UNCLEAR, (), False)
    assert described([]).pattern == UNCLEAR


def test_null_and_p_value_are_those_of_targets_drawn_at_random():
    pairs = words_of("country_capital", 5)
    targets = [pairs[0][1], pairs[1][1], " zq", pairs[1][1], pairs[0][1]]
    found = described([(source, [t]) for (source, _), t in zip(pairs, targets, strict=True)])
    shown = next(each for each in found.candidates if each.name == "country_capital")
    right = dict(pairs)
    draws = [
        sum(right[source] == t for (source, _), t in zip(pairs, drawn, strict=True))
        for drawn in itertools.product(targets, repeat=5)
    ]
    assert shown.share == 2 / 5
    assert shown.null == pytest.approx(np.mean(draws) / 5)
    assert shown.p_value == pytest.approx(np.mean(np.array(draws) >= 2))
    assert shown.q_value >= shown.p_value


def test_wrong_arguments_are_said():
    with pytest.raises(PlanError, match="alpha=1 must be"):
        describe_mappings([], SHARES, alpha=1)
    with pytest.raises(PlanError, match="mapping of ' a' has no target"):
        described([(" a", [])])


# -- classes of tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (" 42", "numbers"),
        ("1984", "years"),
        (" «", "punctuation"),
        ("\n\n", "blank space"),
        (" Q", "single letters"),
        (" Zebra", "capitalised words"),
        (" NASA", "words in capitals"),
        ("ation", "parts inside words"),
        ("getName", "code"),
        (" __init", "code"),
        ("café", "accented Latin letters"),
        (" мир", "letters of another script"),
        ("\ufffd", "broken characters"),
        (" Mary", "first names"),
        ("FRANCE", "countries"),
        (" Friday", "days and months"),
        (" quickly", "adverbs"),
        (" Feb", "days and months"),
    ],
)
def test_tokens_fall_in_classes(text: str, name: str):
    assert name in classes_of(text)
    assert classes_of(" zq") == frozenset()
    assert not {"numbers", "years"} & classes_of(" x1")


def test_shares_are_those_of_the_vocabulary():
    shares = class_shares([" 1", " 2", " Mary", " zq"])
    assert (shares["numbers"], shares["first names"], shares["years"]) == (0.5, 0.25, 0.0)


def test_texts_tell_where_words_begin():
    planted = planted_tokenizer(128, 32)
    ids = planted("king queen", add_special_tokens=False)["input_ids"]
    assert token_texts(planted, ids) == ["king", "queen"]
    assert token_texts(planted, [10**6]) == [""]
    for tokens in (byte_level(), with_dummy_prefix()):
        ids = tokens("king queens", add_special_tokens=False)["input_ids"]
        assert token_texts(tokens, ids)[-2:] == [" queen", "s"]


# -- a model of one's own ------------------------------------------------------------------------

GOOD = {"reasoning": "They are.", "sources": "countries", "pattern": "country to capital"}


def test_the_prompt_holds_the_mappings_and_what_to_answer():
    prompt = describing_prompt([(" France", [" Paris", ' "x"\n'])])
    assert '" France" -> " Paris", " \\"x\\"\\n"' in prompt.splitlines()
    assert "makes likely" in prompt
    assert "makes unlikely" in describing_prompt([(" a", [" b"])], suppressed=True)
    for field in ("reasoning", "sources", "pattern", "unclear"):
        assert field in prompt


def test_answers_are_read():
    found = read_answer(json.dumps(GOOD), "L0H0")
    assert found == Description("country to capital", (), "yours", "They are.", "countries")
    assert read_answer(f"```json\n{json.dumps(GOOD)}\n```\n", "L0H0") == found
    unclear = read_answer(json.dumps(GOOD | {"pattern": "Unclear."}), "L0H0")
    assert (unclear.pattern, unclear.clear) == (UNCLEAR, False)


@pytest.mark.parametrize(
    "answer",
    [
        "The pattern is capitals.",
        "[]",
        json.dumps({key: GOOD[key] for key in ("reasoning", "sources")}),
        json.dumps(GOOD | {"pattern": 3}),
        json.dumps(GOOD | {"pattern": " "}),
        None,
    ],
)
def test_other_answers_are_said_once(answer: Any):
    with pytest.raises(PlanError, match=r"describer.* for L0H0") as error:
        read_answer(answer, "L0H0")
    assert "\n" not in str(error.value)
