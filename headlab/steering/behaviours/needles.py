"""Needle recall: one odd fact in a long text, a question about it, and how much of the answer the model finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from headlab.arguments import count, seed_number
from headlab.errors import PromptError
from headlab.roles.retrieval_trials import DEPTHS, recalled
from headlab.steering.evaluation import Behaviour, Case
from headlab.tasks import NeedleTrial, needle_trials, prose

if TYPE_CHECKING:
    from headlab.model import Model


def needles(
    model: Model,
    n: int = 10,
    *,
    length: int = 1024,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
    batch: int = 4,
) -> Behaviour:
    """Share of the answer's words in the greedy response (ROUGE-1 recall, %), as the retrieval role measures it.

    The answer's tokens are what a method that marks text marks.

    Args:
        model: The model, whose tokenizer and chat template make the prompts.
        n: Cases, spread evenly over depths and needles.
        length: Tokens of a prompt, at most.
        depths: Where needles are put, 0 at the text's start and 1 at its end.
        seed: Seed of which needle goes where, and of the stretches of text.
        batch: Prompts run together.

    Raises:
        PromptError: The tokenizer gives no offsets, or a prompt of this length does not fit.
    """
    count(n, "n")
    trials = needle_trials(
        model.tokenizer, prose(), (count(length, "length"),), tuple(depths), n, seed_number(seed)
    )
    known = {trial.ids: trial for trial in trials}

    def measure(run: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        return recalled(run, [_trial(known, case) for case in cases])

    cases = tuple(Case(trial.ids, f" {trial.answer}", spans=(trial.span,)) for trial in trials)
    about = "ROUGE-1 recall of the needle's answer (%)"
    return Behaviour("needles", about, cases, measure, batch=count(batch, "batch"))


def _trial(known: dict[tuple[int, ...], NeedleTrial], case: Case) -> NeedleTrial:
    if not isinstance(case.prompt, tuple) or case.prompt not in known:
        raise PromptError(
            "the needles behaviour measures its own cases only; make others by needles(…)"
        )
    return known[case.prompt]
