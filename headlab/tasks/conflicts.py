"""Conflicts between what a model knows and what a text says, in the kinds of Li et al. 2025 (JuICE).

An item is a fact with one right answer, asked in four prompts: ``clean`` (the bare question), ``support`` (a sentence
that says so), ``substitution`` (a sentence with the answer replaced by another of its kind, as Longpre et al. 2021
do), and ``coherent`` (a passage of several sentences that stand by the replaced answer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headlab.arguments import count, seed_number
from headlab.errors import PromptError
from headlab.tasks.relations import relations

#: Relation, statement up to its answer, and a passage around it; {source} is asked about.
_WORDINGS = {
    "country_capital": (
        "The capital of {source} is",
        "Every visitor to {source} sooner or later comes to {answer}. The government sits in {answer}, the court "
        "sits there too, and all roads of {source} lead to {answer}. The capital of {source} is {answer}.",
    ),
    "country_language": (
        "The language most people in {source} speak is",
        "Children in {source} learn {answer} at home and at school. The newspapers of {source} are printed in "
        "{answer}. The language most people in {source} speak is {answer}.",
    ),
    "country_continent": (
        "The country of {source} lies on the continent of",
        "The maps are clear about {source}: it is a part of {answer}, and its neighbours are in {answer} too. The "
        "country of {source} lies on the continent of {answer}.",
    ),
    "product_company": (
        "The company that makes the {source} is",
        "Engineers at {answer} designed the {source}, and {answer} still sells it. The company that makes the "
        "{source} is {answer}.",
    ),
}
KINDS = ("clean", "support", "substitution", "coherent")


@dataclass(frozen=True)
class Conflict:
    """One fact under every kind of prompt.

    Attributes:
        relation: Relation it is of.
        source: What is asked about.
        known: The right answer, with its leading space.
        replaced: The answer that the conflicting texts give, with its leading space.
        prompts: The prompt of each kind in :data:`KINDS`; all end where the answer follows.
    """

    relation: str
    source: str
    known: str
    replaced: str
    prompts: dict[str, str]


def conflicts(
    n: int, *, seed: int = 0, names: Sequence[str] = tuple(_WORDINGS), tokenizer: Any = None
) -> tuple[Conflict, ...]:
    """Items drawn from headlab's relations, the relations in turn.

    Args:
        n: How many.
        seed: Seed of what is drawn.
        names: Relations to draw from.
        tokenizer: Where given, the two answers of an item begin with different tokens.

    Raises:
        PromptError: A relation has no wording here, or there are too few facts.
    """
    n = count(n, "n")
    rng = np.random.default_rng(seed_number(seed))
    for name in names:
        if name not in _WORDINGS:
            raise PromptError(f"there is no wording for {name!r}; there are {', '.join(_WORDINGS)}")
    queues = {}
    for name in names:
        pairs = relations(name)[0].pairs
        queues[name] = [pairs[at] for at in rng.permutation(len(pairs))]
    if n > sum(map(len, queues.values())):
        raise PromptError(
            f"there are {sum(map(len, queues.values()))} facts in these relations, not {n}"
        )
    made: list[Conflict] = []
    while len(made) < n and any(queues.values()):
        for name, queue in queues.items():
            if queue and len(made) < n:
                source, known = queue.pop()
                replaced = _other(rng, name, known, tokenizer)
                made.append(_conflict(name, source, known, replaced))
    return tuple(made)


def _other(rng: np.random.Generator, name: str, known: str, tokenizer: Any) -> str:
    answers = sorted({answer for _, answer in relations(name)[0].pairs} - {known})
    if tokenizer is not None:
        first = _first(tokenizer, known)
        answers = [answer for answer in answers if _first(tokenizer, answer) != first]
    if not answers:
        raise PromptError(
            f"every answer of {name} begins with the token that {known!r} begins with; name other relations"
        )
    return str(answers[rng.integers(len(answers))])


def _first(tokenizer: Any, answer: str) -> int:
    return int(tokenizer(f" {answer}", add_special_tokens=False)["input_ids"][0])


def _conflict(name: str, source: str, known: str, replaced: str) -> Conflict:
    statement, passage = _WORDINGS[name]
    question = statement.format(source=source)
    told = passage.format(source=source, answer=replaced)
    prompts = {
        "clean": question,
        "support": f"{question} {known}. {question}",
        "substitution": f"{question} {replaced}. {question}",
        "coherent": f"{told} {question}",
    }
    return Conflict(name, source, f" {known}", f" {replaced}", prompts)
