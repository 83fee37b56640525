"""Attention sorting (Peysakhovich and Lerer 2023) and AttnRank (2508.05128): documents put where the model looks.

Published: sorting as a baseline in the paper of found in the middle, averages over places of the right document with 20
documents of NaturalQuestions (from notes on it). Ours: ten short documents of made-up things, the right one in the
middle. AttnRank's preference for places is read on other questions; its retriever here counts shared words, and nearly
always puts the right document first, so that the figure is of the places. The control orders documents at random.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.steering import (
    attention_sorted,
    place_preference,
    ranked_into_places,
    reorder,
    word_overlap,
)
from headlab.steering.behaviours.documents import documents, questions

N_DOCUMENTS = 10


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Answer questions with their documents in several orders."""
    n = max(3, n_prompts)
    try:
        asked = questions(n, N_DOCUMENTS, "middle", seed)
        rng = np.random.default_rng(seed)
        calibration = questions(max(3, n // 4), N_DOCUMENTS, "every", seed + 1)
        preference = place_preference(model, calibration, seed=seed)
        overlap = [word_overlap(each) for each in asked]
        orders = {
            "as they are": [reorder(each, range(N_DOCUMENTS)) for each in asked],
            "at random (control)": [
                reorder(each, rng.permutation(N_DOCUMENTS).tolist()) for each in asked
            ],
            "sorted by attention once": attention_sorted(model, asked),
            "sorted by attention twice": attention_sorted(model, asked, repeats=2),
            "AttnRank, word overlap": [
                ranked_into_places(each, relevance, preference)
                for each, relevance in zip(asked, overlap, strict=True)
            ],
            "most relevant last, word overlap": [
                ranked_into_places(each, relevance, np.arange(N_DOCUMENTS))
                for each, relevance in zip(asked, overlap, strict=True)
            ],
        }
        values = {
            name: documents(model, asked=[each.asked for each in given]).values(model, None)
            for name, given in orders.items()
        }
    except HeadlabError as error:
        return [Figure("accuracy", None, note=f"not measurable: {error}")]
    names = list(orders)
    gains = np.stack([values[name] - values[names[0]] for name in names[1:]])
    q = corrected(
        np.minimum(1, 2 * np.minimum(sign_flip_p(gains.T, seed), sign_flip_p(-gains.T, seed)))
    )
    places = ", ".join(f"{x:.2g}" for x in 1000 * preference)
    right = np.mean(
        [int(np.argmax(x)) == each.gold for x, each in zip(overlap, asked, strict=True)]
    )
    figures = [
        Figure("place of highest attention, of 10 (from 1)", float(preference.argmax() + 1),
               note=f"mean attention per token by place, in thousandths: {places}"),
        Figure("right document first by word overlap (%)", 100 * float(right)),
    ]  # fmt: skip
    published = {
        "as they are": (56.6, "Vicuna-7B, NQ, 20 documents"),
        "sorted by attention once": ("62.9", "Vicuna-7B, NQ, 20 documents; repeats unknown"),
    }
    for at, name in enumerate(names):
        gold = np.array([each.asked.gold for each in orders[name]])
        note = f"{n} questions; right document at place {1 + gold.mean():.3g} on average"
        if at:
            gain = _text(100 * gains[at - 1], seed)
            note += f"; gain {gain} points, q = {q[at - 1]:.2g}"
        figures.append(
            Figure(f"accuracy, documents {name} (%)", _text(100 * values[name], seed),
                   *published.get(name, (None, "")), note=note)
        )  # fmt: skip
    return figures


def _text(values: np.ndarray, seed: int) -> str:
    low, high = bootstrap_interval(values[:, None], seed)
    return f"{values.mean():.3g} [{low[0]:.3g}, {high[0]:.3g}]"


if __name__ == "__main__":
    main(run, __doc__)
