"""Words with a meaning of their own, for the roles that need one: times, topics, marked words.

A detector is a vector that reads 1 from the codes of its words and as little as can be, up or down, from every
other word's: a small linear programme over the codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from headlab.errors import PlanError
from headlab.planted.words import vocabulary

Array = NDArray[np.float64]

#: A temporal head turns each time into the object of that time.
OBJECT_OF = {"winter": "king", "summer": "queen", "morning": "doctor", "evening": "teacher"}
#: A contextual head attends to words of the query's own topic.
TOPICS = {
    "water": ("river", "rain", "fish", "ship"),
    "home": ("house", "window", "door", "table"),
    "animals": ("horse", "wolf", "bear", "fox"),
    "metals": ("silver", "copper", "iron", "coin"),
}
#: A retrieval head copies on from a marked word, and from no other: the cue and what follows it.
CUE = "letter"
MARKED = (CUE, "red", "green", "blue", "black", "white", "yellow")

#: Scores beyond this, in nats, say that no gain will do.
_MOST = 60.0

WORDS_OF = {
    "temporal": (*OBJECT_OF, *OBJECT_OF.values()),
    "contextual": tuple(word for words in TOPICS.values() for word in words),
    "retrieval": MARKED,
}


def check_words(role: str, size: int) -> None:
    """Refuse a vocabulary that lacks a role's words.

    Raises:
        PlanError: A word is missing.
    """
    known = set(vocabulary(size))
    missing = [word for word in WORDS_OF.get(role, ()) if word not in known]
    if missing:
        raise PlanError(
            f"role {role!r} needs the word {missing[0]!r}, which a vocabulary of {size} does not have: use the "
            "default of 128"
        )


class Meanings:
    """The matrices of the meaningful roles, over token codes.

    Args:
        codes: Unit vectors, one per token, [vocab, code].
        n_keys: Most keys a row can see.
    """

    def __init__(self, codes: Array, n_keys: int):
        self._codes, self._n_keys = codes, n_keys
        self._index = {word: at for at, word in enumerate(vocabulary(len(codes)))}

    def time_query(self) -> Array:
        """What weighs a key's code so that times win, [code]."""
        vector = self._detector(list(OBJECT_OF))
        read = self._codes @ vector
        return self._gain(read[None], self._is_word(OBJECT_OF)[None]) * vector

    def object_of_time(self) -> Array:
        """Maps the code of a time to the code of its object, [code, code]."""
        pairs = [
            np.outer(self._code(thing), self._detector([time])) for time, thing in OBJECT_OF.items()
        ]
        return np.sum(pairs, axis=0)

    def same_topic(self) -> Array:
        """Scores a query's code against a key's: high where both words are of one topic, [code, code]."""
        vectors = [
            # Blind to the words of other topics, so that these add nothing to a match or a miss.
            self._detector(
                words, [word for other in TOPICS.values() if other != words for word in other]
            )
            for words in TOPICS.values()
        ]
        matrix = np.sum([np.outer(vector, vector) for vector in vectors], axis=0)
        members = np.stack([self._is_word(words) for words in TOPICS.values()])
        topical = np.any(members, axis=0)
        same = np.any(members[:, :, None] & members[:, None, :], axis=0)
        scores = self._codes @ matrix @ self._codes.T
        return self._gain(scores[topical], same[topical]) * matrix

    def marked_match(self) -> Array:
        """Scores a query's code against the code before a key: high where both are one marked word, [code, code]."""
        pairs = [np.outer(self._code(word), self._detector([word])) for word in MARKED]
        matrix = np.sum(pairs, axis=0)
        marked = self._is_word(MARKED)
        scores = (self._codes @ matrix @ self._codes.T).T  # [query, key]
        return self._gain(scores[marked], np.eye(len(self._codes), dtype=bool)[marked]) * matrix

    def _code(self, word: str) -> Array:
        return self._codes[self._index[word]]

    def _is_word(self, words: Iterable[str]) -> NDArray[np.bool_]:
        chosen = np.zeros(len(self._codes), bool)
        chosen[[self._index[word] for word in words]] = True
        return chosen

    def _detector(self, words: Sequence[str], never: Sequence[str] = ()) -> Array:
        """The vector that tells some words from all others, [code]; it reads exactly 0 from those in ``never``."""
        chosen, zero = self._is_word(words), self._is_word(never)
        fixed, outside = self._codes[chosen | zero], self._codes[~chosen & ~zero]
        column = np.ones((len(outside), 1))
        found = linprog(
            np.r_[np.zeros(self._codes.shape[1]), 1.0],
            A_ub=np.block([[outside, -column], [-outside, -column]]),
            b_ub=np.zeros(2 * len(outside)),
            A_eq=np.c_[fixed, np.zeros(len(fixed))],
            b_eq=chosen[chosen | zero].astype(np.float64),
            bounds=[(None, None)] * self._codes.shape[1] + [(0, None)],
        )
        if found.status != 0:
            raise PlanError(f"the words {', '.join(words)} cannot be told apart from the others")
        return np.asarray(found.x[:-1])

    def _gain(self, scores: Array, match: NDArray[np.bool_], leak: float = 0.05) -> float:
        """The factor at which one match outweighs all other keys of a row, [query, vocab], whatever they are."""
        least = np.where(match, scores, np.inf).min(1)

        def enough(gain: float) -> bool:
            others = np.where(match, 0.0, np.exp(gain * (scores - least[:, None])))
            weight = self._n_keys * others.sum(1) / (~match).sum(1)
            return bool(np.all(weight <= leak))

        gain = 1.0
        while not enough(gain):
            gain += 0.25
            if gain > _MOST:
                raise PlanError("the vocabulary's codes are too much alike to tell meanings apart")
        return gain
