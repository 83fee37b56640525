"""Retrieval heads (Wu et al. 2024): how few they are, which fire always, and what masking them does to recall.

Published: shares of heads, activation frequencies and top heads recomputed from the per-head scores the authors
released; the fall of recall at 50 masked heads from the paper's text. Their probe has about 600 trials of 1,000 to
50,000 tokens and three needles; ours is shorter and has many needles. The authors' scores count a token again each
time it is copied (``convention="code"``), which lifts few heads.
"""

from __future__ import annotations

import numpy as np
from common import Figure, is_model, main

import headlab as hl
from headlab.attention.heads import Head
from headlab.roles import Probing
from headlab.roles.retrieval import MIN_SCORE, Retrieval
from headlab.roles.retrieval_trials import needle_recall

#: Share of heads above 0.1 (%), by hub name.
ABOVE = {
    "yaofu/llama-2-7b-80k": 3.2,
    "yaofu/llama-2-13b-64k": 2.1,
    "mistralai/Mistral-7B-Instruct-v0.2": 4.2,
    "mistralai/Mixtral-8x7B-v0.1": 6.2,
    "01-ai/Yi-6B-200K": 5.2,
    "Qwen/Qwen1.5-14B": 3.8,
    "Qwen/Qwen1.5-14B-Chat": 4.3,
}
#: Highest scores, by hub name.
TOP = {
    "yaofu/llama-2-7b-80k": {
        (16, 19): 0.94, (11, 15): 0.92, (8, 26): 0.80, (6, 9): 0.62, (7, 12): 0.61, (17, 22): 0.56,
    },
    "mistralai/Mistral-7B-Instruct-v0.2": {
        (18, 0): 0.94, (12, 7): 0.93, (12, 6): 0.77, (18, 2): 0.74,
    },
}  # fmt: skip
#: Heads that copied in every trial.
ALWAYS = {"yaofu/llama-2-7b-80k": 12}
MASKED = (2, 5, 10, 20, 50)
DRAWS = 3


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Score the heads, then mask the best of them and as many random ones."""
    scores = hl.score(model, "retrieval", seed=seed, n_prompts=n_prompts)
    frame = scores.frame.dropna(subset=["score"])
    if frame.empty:
        return [Figure("retrieval scores", None, note=scores.frame["note"].iloc[0])]
    details = scores.details
    always = int((details.query("detail == 'activation_frequency'")["value"] == 1).sum())
    figures = [
        Figure("heads claimed", float(len(scores.claimed("retrieval"))), note=frame["note"].iloc[0]),
        _beside("heads scoring above 0.1 (%)", 100 * float((frame["score"] > MIN_SCORE).mean()),
                model, ABOVE, "2.1–6.2", "seven released models; the abstract says fewer than 5"),
        Figure("heads scoring 0 (%)", 100 * float((frame["score"] == 0).mean()), "49–73",
               "seven released models", note="falls as trials are added"),
        _beside("heads that copied in every trial", float(always), model, ALWAYS, 12.0,
                "Llama-2-7B-80K, of 1,024 heads"),
    ]  # fmt: skip
    ranked = frame.sort_values(["score", "layer", "head"], ascending=[False, True, True])
    top = [Head(int(row.layer), int(row.head)) for row in ranked.itertuples()]
    measured = frame.set_index(["layer", "head"])["score"]
    for name, published in TOP.items():
        if is_model(model, name):
            for head, value in published.items():
                ours = float(measured.get(head, np.nan))
                figures.append(Figure(f"score of {Head(*head)}", ours, value, name, True))
    return figures + _masking(model, seed, n_prompts, top)


def _beside(
    what: str,
    ours: float,
    model: hl.Model,
    published: dict[str, float],
    otherwise: float | str,
    whose: str,
) -> Figure:
    for name, value in published.items():
        if is_model(model, name):
            return Figure(what, ours, value, name, True)
    return Figure(what, ours, otherwise, whose)


def _masking(model: hl.Model, seed: int, n_prompts: int, top: list[Head]) -> list[Figure]:
    """Recall with the K best heads masked, and with K random others, as the paper masks and with z at zero."""
    probing = Probing(model, seed=seed, n_prompts=n_prompts)
    rng = np.random.default_rng(seed)
    figures = [Figure("needle recall, intact (ROUGE-1, %)", float(needle_recall(probing).mean()))]
    for k in (k for k in MASKED if 3 * k <= len(top)):
        others = [
            [top[at] for at in k + rng.choice(len(top) - k, k, replace=False)] for _ in range(DRAWS)
        ]
        for kind, said in (("uniform_decode", "as the paper masks"), ("zero", "z zero")):
            role = Retrieval(ablation=kind)
            best, *random = (_recall(probing, role, heads) for heads in [top[:k], *others])
            figures.append(
                Figure(
                    f"needle recall, {k} best heads masked, {said} (%)",
                    best,
                    "below 50" if k == 50 and kind == "uniform_decode" else None,
                    "every model of the paper" if k == 50 and kind == "uniform_decode" else "",
                    note=f"{k} random others, mean of {DRAWS} draws: {np.mean(random):.3g}",
                )
            )
    return figures


def _recall(probing: Probing, role: Retrieval, heads: list[Head]) -> float:
    with probing.model.edit(role.ablation(heads)):
        return float(needle_recall(probing).mean())


if __name__ == "__main__":
    main(run, __doc__)
