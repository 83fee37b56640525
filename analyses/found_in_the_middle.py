"""Found in the middle (Hsieh et al. 2024): documents found, and questions answered, by attention without its place.

Published figures are of Vicuna-7B on NaturalQuestions with 10 or 20 documents, from notes on the paper. Ours are six
short documents of made-up things with the right one in the middle: recall at 1 of 6 stands in for recall at 3 of 10 or
20. The control of each temperature is the same method with the relevances' documents, hence its weights, given to
others: what of its effect is due to *which* document is raised.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from common import Figure, main

import headlab as hl
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.steering import FoundInTheMiddle
from headlab.steering.behaviours.documents import documents, questions
from headlab.steering.document_attention import document_attention, relevance
from headlab.tasks import document_prompt

N_DOCUMENTS = 6
TEMPERATURES = (5e-3, 5e-4, 5e-5)


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Rank documents by attention and by calibrated attention; answer with and without the calibration."""
    try:
        asked = questions(max(3, n_prompts), N_DOCUMENTS, "middle", seed)
        behaviour = documents(model, asked=asked)
        found, raw = _relevances(model, asked)
    except HeadlabError as error:
        return [Figure("accuracy", None, note=f"not measurable: {error}")]
    gold = asked[0].gold
    recall = [(scores.argmax(1) == gold).astype(float) for scores in (raw, found)]
    base = behaviour.values(model, None)
    n = len(asked)
    rows = []
    shifted = np.roll(found, 1, axis=1)
    for t in TEMPERATURES:
        steered = _accuracy(model, behaviour, found, t)
        control = _accuracy(model, behaviour, shifted, t)
        rows += [
            (t, "", steered - base, steered),
            (t, " over shifted relevances", steered - control, None),
        ]
    table = np.stack([recall[1] - recall[0], *(row[2] for row in rows)])
    p = np.minimum(1, 2 * np.minimum(sign_flip_p(table.T, seed), sign_flip_p(-table.T, seed)))
    q = corrected(p)
    figures = [
        Figure("recall at 1 by attention (%)", _text(100 * recall[0], seed), "36.4 / 20.5 (at 3)",
               "Vicuna-7B, NQ, 10 / 20 documents", note=f"{n} questions, chance {100 / N_DOCUMENTS:.3g}"),
        Figure("recall at 1 by calibrated attention (%)", _text(100 * recall[1], seed),
               "74.3 / 68.3 (at 3)", "Vicuna-7B, NQ, 10 / 20 documents"),
        Figure("recall gained by calibration (points)", _text(100 * table[0], seed), "37.9 / 47.8 (at 3)",
               "Vicuna-7B, NQ, 10 / 20 documents", note=f"q = {q[0]:.2g}"),
        Figure("accuracy, gold in the middle (%)", _text(100 * base, seed), 47.3,
               "Vicuna-7B, NQ, 20 documents"),
    ]  # fmt: skip
    for at, (t, control, change, steered) in enumerate(rows):
        paper = t == 5e-5
        if steered is not None:
            figures.append(
                Figure(f"accuracy, t = {t:g} (%)", _text(100 * steered, seed), 56.2 if paper else None,
                       "Vicuna-7B, NQ, 20 documents" if paper else "")
            )  # fmt: skip
        figures.append(
            Figure(f"gain, t = {t:g}{control} (points)", _text(100 * change, seed),
                   8.9 if paper and not control else None,
                   "Vicuna-7B, NQ, 20 documents" if paper and not control else "",
                   note=f"q = {q[1 + at]:.2g}")
        )  # fmt: skip
    return figures


def _relevances(model: hl.Model, asked: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated and plain attention to each document of each question."""
    found, raw = [], []
    for each in asked:
        prompt = document_prompt(model.tokenizer, each)
        ids, places = torch.tensor([prompt.ids], device=model.device), [list(prompt.documents)]
        found.append(relevance(model, ids, places)[0])
        raw.append(document_attention(model, ids, places)[0])
    return np.stack(found), np.stack(raw)


def _accuracy(model: hl.Model, behaviour: object, scores: np.ndarray, t: float) -> np.ndarray:
    values = []
    for start in range(0, len(behaviour.cases), behaviour.batch):
        rows = slice(start, start + behaviour.batch)
        part = replace(behaviour, cases=behaviour.cases[rows])
        known = tuple(tuple(map(float, row)) for row in scores[rows])
        method = FoundInTheMiddle([(0, 1)], temperature=t, relevances=known)
        values.append(part.values(model, method))
    return np.concatenate(values)


def _text(values: np.ndarray, seed: int) -> str:
    low, high = bootstrap_interval(values[:, None], seed)
    return f"{values.mean():.3g} [{low[0]:.3g}, {high[0]:.3g}]"


if __name__ == "__main__":
    main(run, __doc__)
