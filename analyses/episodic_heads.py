"""Episodic heads: Ji-An et al. 2024, Linking in-context learning in transformers to human episodic memory.

Their ICL score is the loss at token 500 less that at token 50, over thousands of texts of C4. headlab's essays make
a few dozen windows, so each of the two is the mean over 21 tokens here, and single figures stay rough: compare the
conditions, which see the same text.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pandas as pd
import torch
from common import Figure, is_model, main

import headlab as hl
from headlab.attention import Edit, matched_sets
from headlab.roles.base import Probing
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.episodic import DISTANCE, STRICT, Episodic
from headlab.tasks import prose, prose_windows

#: The heads the authors ablate in GPT-2 small: its 14 of least distance, in no order.
ABLATED = "L0H1, L0H5, L0H10, L1H11, L3H0, L5H0, L5H1, L5H5, L5H8, L6H9, L6H10, L7H2, L8H3, L8H6"
NEAREST = "d 0.006, β_enc 0.60, β_rec 0.75, γ 0.30"
SHARE, DRAWS = 0.1, 3
LATE, EARLY, AROUND = 500, 50, 10
_BATCH = 4


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """The paper's figures beside ours."""
    same = is_model(model, "gpt2", "gpt2-small")
    gpt2 = {"published_for": "GPT-2 small", "comparable": same}
    scores = hl.score(model, roles=[Episodic()], seed=seed, n_prompts=n_prompts)
    numbers = scores.details.query("at.isna()").pivot(
        index=["layer", "head"], columns="detail", values="value"
    )
    numbers = numbers[numbers["cmr_distance"].notna()].sort_values("cmr_distance")
    lowest = numbers.head(max(1, int(SHARE * len(numbers))))
    heads = [hl.Head(*at) for at in lowest.index]
    shared = set(map(str, heads)) & set(ABLATED.split(", "))
    below = {level: float((numbers["cmr_distance"] < level).mean()) for level in (DISTANCE, STRICT)}
    return [
        Figure("heads with CMR distance < 0.5 (share)", below[DISTANCE], 0.472, **gpt2),
        Figure("heads with CMR distance < 0.1 (share)", below[STRICT], 0.306, **gpt2),
        Figure(
            "heads headlab claims (share)",
            len(scores.claimed("episodic")) / len(numbers),
            note="prompt by prompt, above the control, lag +1 above lag 0 and the far lags",
        ),
        Figure("tenth of heads of least distance", ", ".join(map(str, heads)), ABLATED, **gpt2),
        Figure("of these, among the authors'", len(shared) if same else None, 14, **gpt2),
        Figure(
            "of these, with lag +1 above lag 0 and the far lags (share)",
            float((lowest["forward_peak"] > 0).mean()),
            note="in GPT-2 small at least L3H0 and L0H1 look at the token itself",
        ),
        Figure(f"nearest curve of {heads[0]}, of least distance", _curve(lowest.iloc[0])),
        Figure(
            "nearest curve of L5H1", _curve(numbers.loc[(5, 1)]) if same else None, NEAREST, **gpt2
        ),
        *_icl(model, heads, seed, n_prompts, gpt2),
    ]


def _curve(row: pd.Series) -> str:
    return (
        f"d {row['cmr_distance']:.3f}, β_enc {row['beta_enc']:.2f}, β_rec {row['beta_rec']:.2f}, "
        f"γ {row['gamma']:.2f}"
    )


def _icl(model: hl.Model, heads: list[hl.Head], seed: int, n: int, gpt2: dict) -> list[Figure]:
    """ICL score intact, without V of the nearest heads, and without V of as many others."""
    limit = model.spec.max_context
    if model.tokenizer is None or (limit is not None and limit < LATE + AROUND + 2):
        return []
    probing = Probing(model, seed)
    ids = prose_windows(model.tokenizer, prose(), min(n, 50), LATE + AROUND + 2, seed, probing.bos)
    others, note = matched_sets(model.spec, tuple(heads), DRAWS, seed)
    figures = []
    for what, sets, published in (
        ("intact", [()], -0.323),
        ("V of the nearest heads set to 0", [heads], 1.004),
        (f"V of random heads of the same layers set to 0 ({len(others)} sets)", others, -0.168),
    ):
        found = [
            icl_score(model, ids, hl.ablate(list(chosen), site="v") if chosen else None)
            for chosen in sets
        ]
        mean = np.mean(found, 0)
        error = f"± {mean.std(ddof=1) / len(mean) ** 0.5:.2f} over {len(mean)} windows"
        text = "; ".join(part for part in (error, note if "random" in what else "") if part)
        figures.append(
            Figure(f"ICL score (nats), {what}", float(mean.mean()), published, **gpt2, note=text)
        )
    return figures


def icl_score(model: hl.Model, ids: torch.Tensor, edit: Edit | None) -> np.ndarray:
    """Loss around token 500 less loss around token 50, per window."""
    found = []
    with model.edit(edit) if edit else nullcontext():
        for start in range(0, len(ids), _BATCH):
            loss = -next_token_log_probability(model, ids[start : start + _BATCH])
            late, early = (loss[:, at - AROUND : at + AROUND + 1].mean(1) for at in (LATE, EARLY))
            found.append((late - early).double().numpy())
    return np.concatenate(found)


if __name__ == "__main__":
    main(run, __doc__)
