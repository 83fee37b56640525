"""Probe data in a planted model's own words, for the roles that need words with a meaning.

The records fit the roles' schemas: ``hl.score(model, "temporal", data={"temporal": planted.records("temporal")})``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headlab.errors import PlanError
from headlab.planted.meanings import CUE, MARKED, OBJECT_OF, TOPICS, WORDS_OF
from headlab.planted.seeds import generator
from headlab.planted.words import SPECIAL, STOPS, vocabulary

_HAYSTACK, _DOCUMENT, _RESPONSE = 60, 12, 4


def records(role: str, size: int, n: int, seed: int) -> list[dict[str, Any]]:
    """Records for one role, in a vocabulary of ``size`` tokens.

    Raises:
        PlanError: The role takes no records of its own.
    """
    if role not in _MAKERS:
        raise PlanError(
            f"there are no records for {role!r}: there are for {', '.join(_MAKERS)}, and the other roles "
            "make do with headlab's own probes"
        )
    meant = {word for words in WORDS_OF.values() for word in words}
    plain = [word for word in vocabulary(size) if word not in {*SPECIAL, *STOPS, *meant}]
    rng = generator(seed, "records", role)
    return [record for at in range(n) for record in _MAKERS[role](at, plain, rng)]


def _retrieval(at: int, plain: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    answer = [str(word) for word in rng.choice(MARKED[1:], 3, replace=False)]
    filler = [str(word) for word in rng.choice(plain, _HAYSTACK)]
    depth = int(rng.integers(_HAYSTACK))
    words = [*filler[:depth], CUE, *answer, ".", *filler[depth:], CUE]
    return [{"prompt": " ".join(words), "answer": " ".join(answer)}]


def _temporal(at: int, plain: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    before, after = (" ".join(rng.choice(plain, 3)) for _ in range(2))
    template = f"{before} in the {{time}} {after} was"
    answer, foil = (str(word) for word in rng.choice(plain, 2, replace=False))
    times = [str(time) for time in rng.permutation(list(OBJECT_OF))]
    return [
        {"template": template, "answers": {time: OBJECT_OF[time] for time in times}},
        {"template": template, "times": times, "answer": answer, "foil": foil},
    ]


def _contextual(at: int, plain: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    topics = [TOPICS[name] for name in rng.permutation(list(TOPICS))]
    gold = at % len(topics)
    documents = []
    for topic in topics:
        half = _DOCUMENT // 2
        words = [*rng.permutation([*topic, *rng.choice(topic, half - len(topic))])]
        mixed = [
            str(word) for pair in zip(words, rng.choice(plain, half), strict=True) for word in pair
        ]
        documents.append(" ".join(mixed))
    response = rng.choice(topics[gold], _RESPONSE, replace=False)
    return [
        {
            "documents": documents,
            "gold": gold,
            "question": " ".join(rng.choice(plain, 3)),
            "answer": documents[gold].split()[0],
            "response": " ".join(response),
        }
    ]


_MAKERS: dict[str, Callable[[int, list[str], np.random.Generator], list[dict[str, Any]]]] = {
    "retrieval": _retrieval,
    "temporal": _temporal,
    "contextual": _contextual,
}
