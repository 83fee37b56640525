"""Circuits of 200 edges for greater-than: Hanna et al. 2024, Have Faith in Faithfulness.

"The war lasted from the year 1732 to the year 17": the metric is the probability of the years that come after 32, less
that of the others; corrupted prompts start from 1701. Edges are scored as official code does, EAP-IG with 5 steps from
the left end; the 200 of the largest absolute score, without dead ends, are run exactly, all others corrupted. Needs a
tokenizer in which two-digit years are one token, as GPT-2's; prompts are headlab's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import Figure, is_model, main
from torch import Tensor

import headlab as hl
from headlab.causal.attribution.eap import eap, eap_ig
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.paths.edges import EdgeRuns
from headlab.errors import UnsupportedError

GPT2 = "GPT-2 small"
#: The metric of the whole model and of circuits, by the paper's repository.
PUBLISHED = {"whole model": 0.814, "EAP-IG (5)": 0.745, "EAP": 0.656, "clean and corrupted": 0.686}
EVENTS = ["war", "siege", "strike", "voyage", "drought", "reign", "feud", "embargo", "campaign"]
EDGES = 200


def greater_than(model: hl.Model, n: int, seed: int) -> tuple[Any, ...] | None:
    """Prompts "… lasted from the year 1732 to the year 17", the same from 1701, and the lead of later years."""
    if model.tokenizer is None:
        return None
    encode = lambda text: model.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    years = [encode(f"{year:02d}") for year in range(100)]
    if any(len(year) != 1 for year in years):
        return None
    last = torch.tensor([year[0] for year in years])
    whole = [
        (at, year)
        for at in range(11, 18)
        for year in range(2, 99)
        if all(encode(f" {at}{yy:02d}") == encode(f" {at}") + years[yy] for yy in (year, 1))
    ]
    if not whole:
        return None
    rng = np.random.default_rng(seed)
    drawn = [whole[at] for at in rng.choice(len(whole), n)]
    sides: list[list[list[int]]] = [[], []]
    for century, year in drawn:
        event = rng.choice(EVENTS)
        for side, yy in zip(sides, (year, 1), strict=True):
            text = f"The {event} lasted from the year {century}{yy:02d} to the year {century}"
            side.append(([] if model.bos is None else [model.bos]) + encode(text))
    after = torch.arange(100)[None] > torch.tensor([year for _, year in drawn])[:, None]

    def lead(logits: Tensor, rows: Tensor) -> Tensor:
        share = logits.softmax(-1)[:, last.to(logits.device)]
        return (torch.where(after.to(logits.device)[rows], 1.0, -1.0) * share).sum(-1)

    return sides[0], sides[1], lead


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    years = greater_than(model, n_prompts, seed)
    measured: dict[str, float] = {}
    note = "" if years else "not measurable: two-digit years are no single tokens of this model"
    try:
        if years is not None:
            runs = EdgeRuns(model, *years)
            measured["whole model"] = float(runs.clean.mean())
            scored = {
                "EAP-IG (5)": eap_ig(model, *years, steps=5, points="left"),
                "EAP": eap(model, *years),
                "clean and corrupted": eap_ig(model, *years, kind="clean_corrupted"),
            }
            for name, edges in scored.items():
                best = Circuit.of_edges(model, edges).top(EDGES, "absolute").without_dead_ends()
                measured[name] = float(runs.run([best.edges]).mean())
    except UnsupportedError as error:
        note = f"not measurable: {error}"
    same = is_model(model, "gpt2", "openai-community/gpt2")
    return [
        Figure(
            f"lead of later years, {name if 'whole' in name else f'{EDGES} edges by {name}'}",
            measured.get(name),
            published,
            GPT2,
            same,
            note,
        )
        for name, published in PUBLISHED.items()
    ]


if __name__ == "__main__":
    main(run, __doc__)
