"""Answering by memory or by the text where the two disagree: what JuICE is to bring about.

Only facts that the model answers right without any text count, as in Longpre et al. 2021; of the others nobody knows
what its memory says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from headlab.attention import Head
from headlab.errors import PlanError
from headlab.steering.evaluation import Behaviour, Case
from headlab.steering.function_vectors import first_token
from headlab.steering.juice import N_HEADS, best_heads, conflict_heads
from headlab.steering.measures import first_token_correct
from headlab.tasks import Conflict, conflicts

if TYPE_CHECKING:
    from headlab.model import Model

#: Known facts that heads are found on (the paper's number).
N_FOUND = 4


def known_conflicts(
    model: Model, n_cases: int = 24, seed: int = 0, n_tried: int = 160, skip: int = N_FOUND
) -> tuple[Conflict, ...]:
    """Facts that the model answers right by the first token when asked without any text.

    Args:
        model: The model.
        n_cases: How many.
        seed: Seed of the order in which facts are tried.
        n_tried: Facts to try at most.
        skip: Known facts to leave out, from the first on: heads are found on those.

    Raises:
        PlanError: It knows fewer than 2 of those tried.
    """
    tried = conflicts(n_tried, seed=seed, tokenizer=model.tokenizer)
    cases = [Case(item.prompts["clean"], item.known) for item in tried]
    right: list[bool] = []
    for start in range(0, len(cases), 16):
        right += list(first_token_correct()(model, cases[start : start + 16]) > 0)
        if sum(right) >= n_cases + skip:
            break
    known = [item for item, knows in zip(tried, right, strict=False) if knows]
    if len(known) < 2 + skip:
        raise PlanError(
            f"{model.name} knows {len(known)} of {len(right)} facts, too few to contradict"
        )
    return tuple(known[skip : skip + n_cases])


def found_heads(
    model: Model,
    towards: Literal["memory", "context"] = "memory",
    seed: int = 0,
    n_heads: int = N_HEADS,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[tuple[Head, ...], tuple[Head, ...] | None]:
    """Heads to enhance and to suppress, found on the first few known facts; None where none is to be suppressed.

    With one coefficient of each sign, where the paper averages over five and three.

    Raises:
        PlanError: The model knows too few facts.
        HeadError: No head raises the target under every kind of prompt.
    """
    items = known_conflicts(model, N_FOUND, seed, skip=0)
    kinds = (
        ("clean", "substitution", "coherent")
        if towards == "memory"
        else ("substitution", "coherent")
    )
    prompts = {kind: [item.prompts[kind] for item in items] for kind in kinds}
    targets = [
        first_token(model, item.known if towards == "memory" else item.replaced) for item in items
    ]
    up = conflict_heads(model, prompts, targets, coefficients=[3.0], tell=tell)
    down = conflict_heads(model, prompts, targets, coefficients=[-1.0], tell=tell)
    enhance = best_heads(up, n_heads)
    down = down[~down.set_index(["layer", "head"]).index.isin(enhance)]
    return enhance, best_heads(down, n_heads) if down["kept"].any() else None


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
