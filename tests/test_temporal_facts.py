"""The facts behind temporal heads: their pairs under two times, and the user's own."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any

import pytest
from real_model import smollm2

from headlab import planted
from headlab.roles.temporal import SCHEMA
from headlab.tasks.records import RecordError, read_records
from headlab.tasks.temporal import (
    TimePair,
    TimePrompts,
    event_pairs,
    facts_of_records,
    invariant_pairs,
    temporal_facts,
    temporal_pairs,
)


@cache
def planted_tokenizer() -> Any:
    return planted.model("llama", {}, max_context=32).tokenizer


# -- facts -------------------------------------------------------------------------------------------------------


def smol_prompts() -> TimePrompts:
    tokenizer = smollm2().tokenizer
    return TimePrompts(tokenizer, tokenizer.bos_token_id)


def test_every_fact_has_one_answer_a_year_and_several_in_all():
    facts = temporal_facts()
    assert len({fact.template for fact in facts.temporal}) == len(facts.temporal) > 70
    for fact in facts.temporal:
        assert fact.template.count("{time}") == 1
        assert len(set(fact.objects.values())) >= 2, fact.template
        assert all(1900 <= int(year) <= 2024 for year in fact.objects)
    for fact in facts.invariant:
        assert fact.template.count("{time}") == 1
        assert fact.answer != fact.foil


@pytest.mark.parametrize(
    ("question", "year", "answer"),
    [
        ("the president of the United States was", "1999", "Bill Clinton"),
        ("the prime minister of the United Kingdom was", "1985", "Margaret Thatcher"),
        ("the FIFA World Cup was won by", "1966", "England"),
        ("the Summer Olympics were held in", "1996", "Atlanta"),
        ("people in Germany paid with the", "1960", "mark"),
    ],
)
def test_well_known_facts_are_there(question: str, year: str, answer: str):
    (fact,) = [
        fact for fact in temporal_facts().temporal if fact.template == f"In {{time}}, {question}"
    ]
    assert fact.objects[year] == answer


def test_years_of_handover_have_no_answer():
    by_template = {fact.template: fact.objects for fact in temporal_facts().temporal}
    presidents = by_template["In {time}, the president of the United States was"]
    assert not {"1963", "1974", "1993", "2001", "2009", "2017", "2021"} & set(presidents)


def test_pairs_differ_in_the_year_alone_and_their_objects_begin_the_answers():
    tokenizer, facts = smollm2().tokenizer, temporal_facts()
    groups = list(islice(temporal_pairs(smol_prompts(), facts, 0), 120))
    pairs = [pair for group in groups for pair in group]
    assert len({(pair.clean, pair.corrupted) for pair in pairs}) > 500
    objects = {fact.template: fact.objects for fact in facts.temporal}
    for pair in pairs[::7]:
        assert pair.names == tuple(objects[pair.template][time] for time in pair.times)
        start, stop = pair.span
        for ids, time in zip((pair.clean, pair.corrupted), pair.times, strict=True):
            assert ids[0] == tokenizer.bos_token_id
            assert tokenizer.decode(ids[1:]) == pair.template.replace("{time}", time)
            assert tokenizer.decode(ids[start:stop]).strip() == time
        assert pair.clean[:start] == pair.corrupted[:start]
        assert pair.clean[stop:] == pair.corrupted[stop:]
        for token, name in zip(pair.objects, pair.names, strict=True):
            assert token == tokenizer(" " + name)["input_ids"][0]


def test_groups_are_drawn_by_seed_and_hold_few_prompts():
    def drawn(seed: int) -> list[tuple[TimePair, ...]]:
        return list(islice(temporal_pairs(smol_prompts(), temporal_facts(), seed), 20))

    assert drawn(3) == drawn(3) != drawn(4)
    for group in drawn(3):
        assert len({ids for pair in group for ids in (pair.clean, pair.corrupted)}) <= 6


def test_invariant_pairs_change_the_same_years_and_events_name_them():
    facts, prompts = temporal_facts(), smol_prompts()
    groups = temporal_pairs(prompts, facts, 0)
    pairs = [group[0] for group in islice(groups, 40)]
    steady = list(islice(invariant_pairs(prompts, facts, [pair.times for pair in pairs], 0), 40))
    assert len({pair.template for pair in steady}) == 40
    assert sorted(pair.times for pair in steady) == sorted(pair.times for pair in pairs)
    events = list(event_pairs(prompts, facts, pairs))
    assert len(events) >= 5
    years = {event: year for year, event in facts.events.items()}
    objects = {fact.template: fact.objects for fact in facts.temporal}
    for pair in events:
        for event, name in zip(pair.times, pair.names, strict=True):
            assert objects[pair.template][years[event]] == name
            assert name not in event


# -- records -----------------------------------------------------------------------------------------------------


def tiny_records(*given: dict[str, Any]) -> Any:
    prompts = TimePrompts(planted_tokenizer(), 0, 20)
    return facts_of_records(prompts, read_records(given, SCHEMA, "temporal"))


GOOD = {"template": "in the {time} it was", "answers": {"winter": "king", "summer": "queen"}}
STEADY = {
    "template": "the {time} was",
    "times": ["winter", "summer"],
    "answer": "red",
    "foil": "blue",
}


def test_records_of_both_kinds_are_read_and_blanks_of_a_dataset_left_out():
    filled = {**GOOD, "answers": {**GOOD["answers"], "evening": None}}
    facts = tiny_records(filled, STEADY)
    assert facts.temporal[0].objects == GOOD["answers"]
    assert facts.invariant[0].times == ("winter", "summer")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"template": "in the winter it was"}, "does not match"),
        ({"template": "{time} after {time} was"}, "record 1: .*exactly once"),
        ({"answers": {"winter": "king"}}, "does not have enough properties"),
        (
            {"answers": {"winter": "king", "summer": "king"}},
            "record 1: .*all its answers are the same",
        ),
        (
            {"answers": {"winter": "king of snow", "summer": "king of sun"}},
            "record 1: .*begin with the same token",
        ),
        (
            {"answers": {"winter": "king", "late summer": "queen"}},
            "record 1: .*as many tokens|does not",
        ),
        ({"answers": {"winter": "king", "summer": "zzz"}}, "record 1: .*does not know 'zzz'"),
        ({"answers": {"winter": "king", "2004": "queen"}}, "record 1: .*does not know '2004'"),
        ({"template": "in 1999 the {time} was"}, "record 1: .*does not know 'in 1999 the"),
        ({"template": "the " * 30 + "{time} was"}, "record 1: .*the context holds 20"),
        ({"foil": "red"}, "record 1 does not fit the schema"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(changes: dict[str, Any], said: str):
    with pytest.raises(RecordError, match=said):
        tiny_records(STEADY, {**GOOD, **changes})


def test_records_without_a_fact_of_one_kind():
    with pytest.raises(RecordError, match="no record has answers that change"):
        tiny_records(STEADY)
    with pytest.raises(RecordError, match="no record is invariant"):
        tiny_records(GOOD)  # headlab's own are not in the planted model's words
    tokenizer = smollm2().tokenizer
    own = {"template": "In {time}, it was", "answers": {"1999": "red", "2004": "blue"}}
    facts = facts_of_records(TimePrompts(tokenizer, None), [own])
    (pair, *_) = invariant_pairs(TimePrompts(tokenizer, None), facts, [("1999", "2004")], 0)
    assert pair.times == ("1999", "2004")
