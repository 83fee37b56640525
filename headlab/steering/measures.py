"""Measures of behaviour that many evaluations share; each gives one number per case, higher for more of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from headlab.errors import PlanError
from headlab.prompts import aligned, lengths_of
from headlab.steering.evaluation import Case, Measure

if TYPE_CHECKING:
    from headlab.model import Model


def says_answer(max_new_tokens: int = 12) -> Measure:
    """1 where a greedy continuation holds the answer as words of its own (whatever the case of letters), else 0."""

    def measure(model: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        texts = model.generate(_prompts(model, cases), max_new_tokens=max_new_tokens).texts
        return np.array(
            [holds(text, case.answer) for text, case in zip(texts, cases, strict=True)], float
        )

    return measure


def first_token_difference() -> Measure:
    """Logit of the answer's first token less that of the foil's, at the prompt's last position."""

    def measure(model: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        if not all(case.foil for case in cases):
            raise PlanError("a logit difference needs a foil in every case")
        ids = _prompts(model, cases)
        last = model.trace(ids, logits="last").logits
        assert last is not None
        right = torch.tensor([_answer_ids(model, case.answer)[0] for case in cases])
        wrong = torch.tensor([_answer_ids(model, case.foil)[0] for case in cases])
        if bool((right == wrong).any()):
            case = cases[int((right == wrong).int().argmax())]
            raise PlanError(
                f"answer {case.answer!r:.40} and foil {case.foil!r:.40} begin with the same token, so they cannot be "
                "told apart; give it another foil"
            )
        logits = last[:, 0].double().cpu()
        rows = torch.arange(len(logits))
        return (logits[rows, right] - logits[rows, wrong]).numpy()

    return measure


def first_token_correct() -> Measure:
    """1 where the likeliest next token is the first of the answer, else 0."""

    def measure(model: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        last = model.trace(_prompts(model, cases), logits="last").logits
        assert last is not None
        right = torch.tensor([_answer_ids(model, case.answer)[0] for case in cases])
        return (last[:, 0].argmax(-1).cpu() == right).double().numpy()

    return measure


def answer_log_probability() -> Measure:
    """Log-probability of the whole answer after the prompt, in nats per token.

    The answer counts as generated, so that a method that steers from the prompt's end on acts on all of it.
    """

    def measure(model: Model, cases: Sequence[Case]) -> Float[np.ndarray, " case"]:
        prompts = [model.tokens(_prompt(case))[0].tolist() for case in cases]
        answers = [_answer_ids(model, case.answer) for case in cases]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        # What stands behind an answer changes nothing before it, so any token will do there.
        ids = torch.zeros((len(cases), width), dtype=torch.long)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        starts = [len(prompt) for prompt in prompts]
        logits = model.forward(ids.to(model.device), prompt=starts, use_cache=False).logits
        found = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            at = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            whole = logits[row, at].float().log_softmax(-1)
            right = torch.tensor(answer, device=whole.device)[:, None]
            found.append(float(whole.gather(1, right).mean()))
        return np.array(found)

    return measure


def holds(text: str, answer: str) -> bool:
    """Whether a text holds an answer as words of its own, whatever the case of letters."""
    return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, re.IGNORECASE) is not None


def _prompt(case: Case) -> str | list[int]:
    return case.prompt if isinstance(case.prompt, str) else list(case.prompt)


def _prompts(model: Model, cases: Sequence[Case]) -> torch.Tensor:
    rows = [model.tokens(_prompt(case))[0] for case in cases]
    ids = torch.full((len(rows), max(map(len, rows))), -1, device=model.device)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
    return aligned(ids, "right")[:, : int(lengths_of(ids).max())]


def _answer_ids(model: Model, answer: str) -> list[int]:
    if not answer.strip():
        raise PlanError("a case has no answer; give the continuation, with its leading space")
    return [int(i) for i in model.tokenizer(answer, add_special_tokens=False)["input_ids"]]
