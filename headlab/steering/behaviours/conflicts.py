"""Answering by memory or by the text where the two disagree: what JuICE is to bring about.

Only facts that the model answers right without any text count, as in Longpre et al. 2021; of the others nobody knows
what its memory says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from headlab.errors import PlanError
from headlab.steering.evaluation import Behaviour, Case
from headlab.steering.measures import first_token_correct
from headlab.tasks import Conflict, conflicts

if TYPE_CHECKING:
    from headlab.model import Model


def known_conflicts(
    model: Model, n_cases: int = 24, seed: int = 0, n_tried: int = 160
) -> tuple[Conflict, ...]:
    """Facts that the model answers right by the first token when asked without any text.

    Raises:
        PlanError: It knows fewer than 2 of those tried.
    """
    tried = conflicts(n_tried, seed=seed, tokenizer=model.tokenizer)
    cases = [Case(item.prompts["clean"], item.known) for item in tried]
    right: list[bool] = []
    for start in range(0, len(cases), 16):
        right += list(first_token_correct()(model, cases[start : start + 16]) > 0)
        if sum(right) >= n_cases:
            break
    known = tuple(item for item, knows in zip(tried, right, strict=False) if knows)[:n_cases]
    if len(known) < 2:
        raise PlanError(
            f"{model.name} knows {len(known)} of {len(right)} facts, too few to contradict"
        )
    return known


def conflict(
    items: tuple[Conflict, ...],
    kind: Literal["substitution", "coherent", "support", "clean"] = "substitution",
    towards: Literal["memory", "context"] = "memory",
) -> Behaviour:
    """First-token accuracy of the known or of the replaced answer under a kind of prompt.

    Args:
        items: The facts.
        kind: What the text before the question says; see :mod:`headlab.tasks.conflicts`.
        towards: ``"memory"``: the known answer counts; ``"context"``: the one that the text gives.
    """
    cases = []
    for item in items:
        answers = (item.known, item.replaced)
        answer, foil = answers if towards == "memory" else answers[::-1]
        cases.append(Case(item.prompts[kind], answer, foil))
    about = f"accuracy of the answer by {towards}, under {kind}"
    return Behaviour(f"{kind}_{towards}", about, tuple(cases), first_token_correct(), batch=16)


def memorisation_ratio(known: np.ndarray, replaced: np.ndarray) -> float:
    """Share of answers by memory among those by memory or by the text (after Longpre et al. 2021; unverified)."""
    either = float(known.sum() + replaced.sum())
    return float(known.sum()) / either if either else float("nan")
