"""Contextual heads (Zhu et al. 2025): attention of answers to the relevant document.

The authors released rankings of all heads of three models, made on prompts of 20 passages from Natural Questions
and answers of up to 100 tokens; the first 20 heads of each, which they use, stand below. Our prompts are others and
shorter, so the lists should overlap much, not wholly. The paper's figures of mass could not be read, so ours stand
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from common import Figure, is_model, main

import headlab as hl
from headlab.roles.base import Arrays
from headlab.roles.contextual import N_DOCUMENTS, Contextual

TOP = 20
#: The first 20 of ``relevant_heads.json`` as released (billzyx/focus_direction), (layer, head).
RELEASED = {
    "meta-llama/Llama-3.2-3B-Instruct": "13.23 12.1 15.18 15.22 14.2 13.9 15.19 8.8 13.16 16.15 "
    "12.3 12.16 12.2 21.20 14.21 14.22 13.22 12.6 10.4 18.19",
    "mistralai/Ministral-8B-Instruct-2410": "17.28 16.30 18.13 18.15 17.9 16.16 14.20 18.9 16.4 12.8 "
    "16.31 12.10 18.11 31.30 19.25 12.25 12.17 18.10 10.8 15.4",
    "Qwen/Qwen2.5-7B-Instruct": "19.15 19.22 22.7 21.5 19.17 19.20 16.20 22.1 21.25 16.0 "
    "22.3 14.0 16.7 16.1 22.27 23.11 22.24 17.18 22.25 16.14",
}


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Rank heads by mass on the gold document, and compare with the released rankings."""
    kept: dict[str, Arrays] = {}

    def remember(key: str, compute: Callable[[], Arrays]) -> Arrays:
        if key not in kept:
            kept[key] = compute()
        return kept[key]

    def scored(role: Contextual) -> hl.Scores:
        return hl.score(model, roles=[role], seed=seed, n_prompts=n_prompts, remember=remember)

    scores = scored(Contextual())
    frame = scores.frame
    if frame["score"].isna().all():
        return [Figure("contextual heads", None, note=str(frame["note"].iloc[0]))]
    top = frame.nlargest(TOP, "score")
    ranked = [f"{layer}.{head}" for layer, head in zip(top["layer"], top["head"], strict=True)]
    figures = [
        Figure(
            f"of the {TOP} heads with most mass, those among the paper's {TOP}",
            float(len(set(ranked) & set(heads.split()))) if is_model(model, name) else None,
            float(TOP),
            name,
            is_model(model, name),
            f"theirs begin {', '.join(heads.split()[:5])}",
        )
        for name, heads in RELEASED.items()
    ]
    answered = str(frame["note"].mode().iloc[0])
    figures += [
        Figure(f"heads with most mass, of {TOP}", ", ".join(ranked[:5]), note=answered),
        Figure(f"mass on the gold document, {TOP} heads", top["score"].mean()),
        Figure(f"mass on an irrelevant document, {TOP} heads", top["null_mean"].mean()),
        Figure("mass on the gold document, all heads", frame["score"].mean()),
        Figure("mass on an irrelevant document, all heads", frame["null_mean"].mean()),
    ]
    figures += by_detail(scores, top)
    claimed = scores.claimed("contextual")
    control = scored(Contextual(scrambled=True)).claimed("contextual")
    figures += [
        Figure("heads claimed", float(len(claimed)), note=", ".join(claimed)),
        Figure("heads claimed when the gold label is scrambled", float(len(control))),
    ]
    return figures


def by_detail(scores: hl.Scores, top: pd.DataFrame) -> Sequence[Figure]:
    """Further masses of the top heads, and what the gold document's place does to theirs."""
    details = scores.details.merge(top[["layer", "head"]], on=["layer", "head"])
    means = details.groupby("detail")["value"].mean()
    figures = [
        Figure(f"{name.replace('_', ' ')}, {TOP} heads", means[name])
        for name in ("irrelevant_mass", "gold_share", "answer_mass", "sink_mass")
        if name in means
    ]
    places = details[details["detail"] == "mass_by_place"].groupby("at")["value"].mean()
    figures += [
        Figure(f"mass on the gold document in place {int(at) + 1} of {N_DOCUMENTS}", value)
        for at, value in places.items()
    ]
    return figures


if __name__ == "__main__":
    main(run, __doc__)
