"""Facts that change with the time, asked under two times, and facts that do not, under two times as well.

A pair is two prompts that differ in the words of the time alone, with as many tokens, so that positions mean the
same in both: "In 1999, the president of the United States was" and the same in 2004. The right answer of a temporal
pair changes with the time; that of an invariant pair stays, and a foil stands in for the other answer. Answers are
told apart by their first tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, zip_longest
from typing import Any

import numpy as np

from headlab.errors import PromptError
from headlab.tasks.needles import token_span
from headlab.tasks.prose import data_folder
from headlab.tasks.records import RecordError

#: What stands for the time in a template.
SLOT = "{time}"
#: Most times that a group of pairs asks one question under.
TIMES = 6


@dataclass(frozen=True)
class TimePair:
    """One question under two times.

    Attributes:
        clean: Token ids of the prompt under the one time.
        corrupted: Token ids under the other.
        span: Positions [start, stop) of the time in the clean prompt.
        objects: First tokens of what is right under the clean time and of what is right under the corrupted one;
            of an invariant pair, of the answer and of the foil.
        template: The question, with ``{time}`` for the time.
        times: The two times, clean first.
        names: The two objects in words.
    """

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    span: tuple[int, int]
    objects: tuple[int, int]
    template: str
    times: tuple[str, str]
    names: tuple[str, str]

    @property
    def swapped(self) -> TimePair:
        """The same objects with the two times exchanged; the prompts must be of equal length."""
        return replace(
            self, clean=self.corrupted, corrupted=self.clean, times=(self.times[1], self.times[0])
        )


@dataclass(frozen=True)
class TemporalFact:
    """A question whose answer changes: its objects by time."""

    template: str
    objects: Mapping[str, str]


@dataclass(frozen=True)
class InvariantFact:
    """A question whose answer stays.

    Attributes:
        template: The question.
        answer: What is right at any time.
        foil: What never is.
        times: Times to ask under; None for any.
    """

    template: str
    answer: str
    foil: str
    times: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Facts:
    """Questions of both kinds, and events that name a year: "the year the Berlin Wall fell" by ``"1989"``."""

    temporal: tuple[TemporalFact, ...]
    invariant: tuple[InvariantFact, ...]
    events: Mapping[str, str]


@cache
def temporal_facts() -> Facts:
    """headlab's own facts, from ``data/temporal.json``."""
    stored = json.loads((data_folder() / "temporal.json").read_text("utf-8"))
    temporal = []
    for fact in stored["temporal"]:
        spans = fact["answers"]
        years = {str(year): name for name, a, b in spans for year in range(a, b + 1)}
        temporal.append(TemporalFact(fact["template"], years))
    invariant = tuple(InvariantFact(**fact) for fact in stored["invariant"])
    return Facts(tuple(temporal), invariant, stored["events"])


class TimePrompts:
    """Makes pairs for one model.

    Args:
        tokenizer: Must give character offsets.
        bos: Beginning-of-sequence token to put in front, or None.
        limit: Longest prompt, in tokens, or None.

    Raises:
        PromptError: There is no tokenizer, or it gives no offsets.
    """

    def __init__(self, tokenizer: Any, bos: int | None, limit: int | None = None) -> None:
        if tokenizer is None or not tokenizer.is_fast:
            raise PromptError(
                "temporal facts need a tokenizer that gives character offsets (a fast tokenizer)"
            )
        self._tokenizer = tokenizer
        self._front = () if bos is None else (bos,)
        self._limit = limit
        # Each prompt stands in many pairs.
        self._made = cache(self._prompt)
        self._begun = cache(self.continuation)

    def pair(
        self, template: str, times: tuple[str, str], names: tuple[str, str], aligned: bool = True
    ) -> TimePair:
        """The question under two times.

        Args:
            template: It ends where the object would begin.
            times: Clean and corrupted.
            names: The two objects.
            aligned: Whether the prompts must be of as many tokens and differ in the time alone.

        Raises:
            PromptError: The pair cannot be used.
        """
        (clean, span), (corrupted, other) = (self._made(template, time) for time in times)
        if aligned and len(clean) != len(corrupted):
            raise PromptError(
                f"with {times[0]!r} the prompt has {len(clean)} tokens, with {times[1]!r} {len(corrupted)}: "
                "use times of as many tokens"
            )
        if clean[span[0] : span[1]] == corrupted[other[0] : other[1]]:
            raise PromptError(f"{times[0]!r} and {times[1]!r} are the same tokens")
        start, stop = span
        if aligned and (
            span != other or clean[:start] + clean[stop:] != corrupted[:start] + corrupted[stop:]
        ):
            raise PromptError(f"{times[0]!r} and {times[1]!r} change tokens beside the time")
        first, second = (self._begun(template, times[0], name)[0] for name in names)
        if first == second:
            raise PromptError(
                f"{names[0]!r} and {names[1]!r} begin with the same token, so logits cannot tell them apart"
            )
        return TimePair(clean, corrupted, span, (first, second), template, times, names)

    def _prompt(self, template: str, time: str) -> tuple[tuple[int, ...], tuple[int, int]]:
        if not time.strip():
            raise PromptError(f"the time {time!r} is blank")
        if template.count(SLOT) != 1:
            raise PromptError(f"the template {template!r} must hold {SLOT} exactly once")
        text = template.rstrip().replace(SLOT, time)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        at = template.index(SLOT)
        start, stop = token_span(encoded["offset_mapping"], at, at + len(time), text)
        ids = tuple(encoded["input_ids"])
        if self._unknown in ids:
            what = time if self._unknown in ids[start:stop] else text
            raise PromptError(f"the tokenizer does not know {what!r}")
        shift = len(self._front)
        if self._limit is not None and shift + len(ids) > self._limit:
            raise PromptError(
                f"the prompt has {shift + len(ids)} tokens, but the context holds {self._limit}"
            )
        return (*self._front, *ids), (start + shift, stop + shift)

    def continuation(self, template: str, time: str, name: str) -> tuple[int, ...]:
        """The tokens of an object behind the prompt.

        Raises:
            PromptError: It does not begin with a token of its own, or with one the tokenizer does not know.
        """
        if not name.strip():
            raise PromptError(f"the answer {name!r} is blank")
        text = template.rstrip().replace(SLOT, time)
        encode = self._tokenizer
        prompt = encode(text, add_special_tokens=False, verbose=False)["input_ids"]
        whole = encode(f"{text} {name}", add_special_tokens=False, verbose=False)["input_ids"]
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            raise PromptError(f"{name!r} does not begin with a token of its own behind {text!r}")
        if whole[len(prompt)] == self._unknown:
            raise PromptError(f"the tokenizer does not know {name!r}")
        return tuple(whole[len(prompt) :])

    @property
    def _unknown(self) -> int | None:
        token = self._tokenizer.unk_token_id
        return None if token is None else int(token)


def temporal_pairs(prompts: TimePrompts, facts: Facts, seed: int) -> Iterator[tuple[TimePair, ...]]:
    """Pairs of temporal facts, in groups of few prompts: pairs that cannot be used are left out.

    A group is a fact under up to :data:`TIMES` times, every two of them with different objects making one pair. Each
    fact gives a group, then each that has times left another, and so on; each object of a fact comes up once before
    any does again. Order, times and which of two is clean are drawn.
    """
    rng = np.random.default_rng(seed)
    order = [facts.temporal[at] for at in rng.permutation(len(facts.temporal))]
    for fact, times in _in_turn([(fact, _grouped(fact, rng)) for fact in order]):
        group = []
        for asked in _both_ways(list(combinations(times, 2)), rng):
            names = (fact.objects[asked[0]], fact.objects[asked[1]])
            if names[0] != names[1]:
                with suppress(PromptError):
                    group.append(prompts.pair(fact.template, asked, names))
        if group:
            yield tuple(group)


def invariant_pairs(
    prompts: TimePrompts, facts: Facts, times: Sequence[tuple[str, str]], seed: int
) -> Iterator[TimePair]:
    """Pairs of invariant facts, one of each fact and round again; pairs that cannot be used are left out.

    Args:
        prompts: Makes the pairs.
        facts: The facts.
        times: Clean and corrupted times for facts without times of their own, used in turn.
        seed: Seed of the order.
    """
    rng = np.random.default_rng(seed)
    order = [facts.invariant[at] for at in rng.permutation(len(facts.invariant))]
    queues: list[tuple[InvariantFact, list[tuple[str, str]]]] = []
    for at, fact in enumerate(order):
        if fact.times is None:
            queues.append((fact, [times[(at + turn) % len(times)] for turn in range(len(times))]))
        else:
            own = _both_ways(list(combinations(fact.times, 2)), rng)
            queues.append((fact, [own[place] for place in rng.permutation(len(own))]))
    for fact, asked in _in_turn(queues):
        with suppress(PromptError):
            yield prompts.pair(fact.template, asked, (fact.answer, fact.foil))


def event_pairs(
    prompts: TimePrompts, facts: Facts, pairs: Iterable[TimePair]
) -> Iterator[TimePair]:
    """The same questions and objects with years named by events ("the year the Berlin Wall fell").

    The years may be others of the same objects, and the prompts of unequal length. Pairs of objects without such
    years are left out, and so are events that name an object, which would give the answer away.
    """
    objects = {fact.template: fact.objects for fact in facts.temporal}
    for pair in pairs:
        named = [
            [
                event
                for year, event in facts.events.items()
                if objects[pair.template].get(year) == name
                and not any(other in event for other in pair.names)
            ]
            for name in pair.names
        ]
        if all(named):
            with suppress(PromptError):
                times = (named[0][0], named[1][0])
                yield prompts.pair(pair.template, times, pair.names, aligned=False)


def facts_of_records(prompts: TimePrompts, records: Iterable[Mapping[str, Any]]) -> Facts:
    """The user's facts, every pair of them checked.

    Without invariant facts among them, headlab's own are taken, under the times of the temporal ones.

    Raises:
        RecordError: A record cannot be used, none is temporal, or none is invariant and the tokenizer cannot put
            headlab's own into words.
    """
    temporal, invariant = [], []
    for at, record in enumerate(records):
        template = record["template"]
        try:
            if "answers" in record:
                objects = dict(record["answers"])
                _check_times(prompts, template, objects)
                temporal.append(TemporalFact(template, objects))
            else:
                times = tuple(dict.fromkeys(record["times"]))
                names = (record["answer"], record["foil"])
                for two in _two_each(times):
                    prompts.pair(template, two, names)
                invariant.append(InvariantFact(template, *names, times))
        except PromptError as error:
            raise RecordError(f"record {at}: {error}") from error
    if not temporal:
        raise RecordError(
            "no record has answers that change with the time: give at least one with 'answers'"
        )
    facts = Facts(tuple(temporal), tuple(invariant), {})
    if invariant:
        return facts
    facts = Facts(facts.temporal, temporal_facts().invariant, {})
    asked = [pair.times for group in temporal_pairs(prompts, facts, 0) for pair in group]
    if next(invariant_pairs(prompts, facts, asked[:1], 0), None) is None:
        raise RecordError(
            "no record is invariant, and the tokenizer does not know the words of headlab's own facts: give "
            "records with 'times', 'answer' and 'foil'"
        )
    return facts


def _check_times(prompts: TimePrompts, template: str, objects: Mapping[str, str]) -> None:
    pairs = [times for times in _two_each(tuple(objects)) if objects[times[0]] != objects[times[1]]]
    if not pairs:
        raise PromptError("all its answers are the same, so nothing changes with the time")
    for times in pairs:
        prompts.pair(template, times, (objects[times[0]], objects[times[1]]))


def _two_each(times: tuple[str, ...]) -> list[tuple[str, str]]:
    if len(times) < 2:
        raise PromptError("it has fewer than two times: give two or more")
    return list(combinations(times, 2))


def _grouped(fact: TemporalFact, rng: np.random.Generator) -> list[list[str]]:
    """Times of a fact in groups; those of objects that have come less often go first."""
    times = list(fact.objects)
    seen: Counter[str] = Counter()
    ranked = []
    for at in rng.permutation(len(times)):
        name = fact.objects[times[at]]
        ranked.append((seen[name], times[at]))
        seen[name] += 1
    ordered = [time for _, time in sorted(ranked, key=lambda entry: entry[0])]
    return [ordered[start : start + TIMES] for start in range(0, len(ordered), TIMES)]


def _both_ways(pairs: list[tuple[str, str]], rng: np.random.Generator) -> list[tuple[str, str]]:
    """The pairs, some of them turned round."""
    turned = rng.random(len(pairs)) < 0.5
    return [pair[::-1] if turn else pair for pair, turn in zip(pairs, turned, strict=True)]


def _in_turn(queues: Iterable[tuple[Any, list[Any]]]) -> Iterator[tuple[Any, Any]]:
    """The first of each queue, then the next of each, with the queue's label."""
    labelled = [[(label, item) for item in items] for label, items in queues]
    for turn in zip_longest(*labelled):
        yield from (entry for entry in turn if entry is not None)
