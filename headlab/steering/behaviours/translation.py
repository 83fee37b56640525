"""Translating short sentences: the whole of it, and its two halves each by itself.

Each is a log-probability, nats per token, or the difference of two, so that a model too small to translate well can
still be seen to move: ``"meaning"`` sets the translation against another sentence's in the same language,
``"language"`` against the same sentence's in another language.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float

from headlab.errors import PlanError
from headlab.steering.evaluation import Behaviour, Case, Measure
from headlab.steering.measures import answer_log_probability
from headlab.tasks import Translation

if TYPE_CHECKING:
    from headlab.model import Model

_ABOUT = {
    "whole": "log-probability of the translation, nats per token",
    "meaning": "log-probability less that of another sentence in the language, nats per token",
    "language": "log-probability less that of the sentence in another language, nats per token",
}


def translation(
    items: Sequence[Translation],
    what: Literal["whole", "meaning", "language"] = "whole",
    *,
    bare: bool = False,
) -> Behaviour:
    """How well sentences are translated.

    Args:
        items: Translations, from :func:`headlab.tasks.translations`.
        what: What counts.
        bare: Whether the model reads the sentence alone, without examples or the language's tag.

    Raises:
        PlanError: Something else is to count.
    """
    if what not in _ABOUT:
        raise PlanError(f"what={what!r:.40} must be one of {', '.join(_ABOUT)}")
    foils = {"whole": "", "meaning": "same_language", "language": "same_meaning"}
    cases = tuple(
        Case(
            item.bare if bare else item.prompt,
            _spelled(item.answer, bare),
            _spelled(getattr(item, foils[what], ""), bare),
        )
        for item in items
    )
    measure = answer_log_probability() if what == "whole" else _margin()
    return Behaviour(f"translation_{what}", _ABOUT[what], cases, measure)


def _spelled(answer: str, bare: bool) -> str:
    """Behind a line break an answer has no leading space."""
    return answer.strip() if bare else answer


def _margin() -> Measure:
    log_probability = answer_log_probability()

    def measure(model: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        foils = [Case(case.prompt, case.foil) for case in cases]
        return log_probability(model, cases) - log_probability(model, foils)

    return measure
