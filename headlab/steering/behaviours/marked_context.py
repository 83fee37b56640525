"""Marked context: two statements in the prompt contradict each other, one is marked, and the model has to choose.

The statement that a case marks comes first in every other case, so that a model that merely prefers the earlier or the
later one gains nothing on average. Statements and values are headlab's own; the values are common words.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from headlab.arguments import count, seed_number
from headlab.errors import PlanError
from headlab.steering.evaluation import Behaviour, Case
from headlab.steering.measures import first_token_difference, says_answer

#: Statement up to its value, what it is about, and the values.
_RELATIONS = (
    (
        "The gate of {} is painted",
        ("the old mill", "the town hall", "the rectory", "the boat yard", "the north farm", "the school"),
        ("red", "green", "blue", "black", "white", "yellow"),
    ),
    (
        "The statue in {} is made of",
        ("Marlow Square", "Hester Park", "the west arcade", "Quill Street", "the guild hall", "Tarn Court"),
        ("stone", "silver", "copper", "iron", "paper", "salt"),
    ),
    (
        "Before she retired, {} worked as a",
        ("Ada Finch", "Mrs Lorne", "Clara Voss", "Miss Penhale", "Ruth Amery", "Edith Crane"),
        ("doctor", "teacher", "farmer", "sailor", "soldier", "judge"),
    ),
    (
        "The animal on the coat of arms of {} is a",
        ("Varnholm", "the Duke of Esk", "Little Oake", "the Harrow guild", "Port Selwyn", "Castle Dunn"),
        ("horse", "wolf", "bear", "fox", "fish", "bird"),
    ),
    (
        "The present that {} sent to the king was a",
        ("Lord Brandt", "the miners", "the Queen of Ister", "Captain Reeve", "the weavers", "Doctor Hale"),
        ("clock", "lamp", "mirror", "book", "sword", "crown"),
    ),
    (
        "The cargo of the ship called {} was",
        ("Grey Heron", "Patience", "Morning Star", "Lucky Anne", "Saint Olaf", "Swallow"),
        ("honey", "sugar", "coffee", "bread", "water", "apples"),
    ),
)  # fmt: skip
_MEASURES = {
    "logit_difference": (
        "logit of the marked statement's value less that of the other's",
        first_token_difference,
    ),
    "says": ("share of greedy continuations that give the marked statement's value", says_answer),
}
_MOST = sum(len(about) for _, about, _ in _RELATIONS)


def marked_context(
    n: int = _MOST,
    *,
    seed: int = 0,
    measure: Literal["logit_difference", "says"] = "logit_difference",
) -> Behaviour:
    """How much more the model follows the marked of two contradictory statements.

    Args:
        n: Cases, each about another thing; the relations are taken in turn.
        seed: Seed of values and order.
        measure: ``"logit_difference"``, in nats, of the values' first tokens; ``"says"``, 1 where the greedy
            continuation holds the marked value.

    Raises:
        PlanError: There are not so many cases, or no such measure.
    """
    if measure not in _MEASURES:
        raise PlanError(f"measure={measure!r:.40} must be one of {', '.join(_MEASURES)}")
    if count(n, "n") > _MOST:
        raise PlanError(f"n={n}, but there are {_MOST} things to be said two things of")
    rng = np.random.default_rng(seed_number(seed))
    queues = [rng.permutation(about).tolist() for _, about, _ in _RELATIONS]
    cases = []
    for number in range(n):
        which = number % len(_RELATIONS)
        statement, _, values = _RELATIONS[which]
        said = statement.format(queues[which].pop())
        marked, other = (str(value) for value in rng.choice(values, 2, replace=False))
        # Within a relation, the marked statement comes first and second in turn.
        first = (number // len(_RELATIONS) + which) % 2 == 0
        cases.append(_case(said, marked, other, first))
    about, made = _MEASURES[measure]
    return Behaviour("marked_context", about, tuple(cases), made(), batch=16)


def _case(said: str, marked: str, other: str, first: bool) -> Case:
    one, two = (marked, other) if first else (other, marked)
    prompt = f"One letter says: {said} {one}. Another letter says: {said} {two}. In short: {said}"
    return Case(prompt, f" {marked}", f" {other}", (f"{said} {marked}.",))
