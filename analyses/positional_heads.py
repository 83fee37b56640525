"""Positional heads and RoPE dimensions (Hong et al. 2024, On the token distance modeling ability of ...).

The paper reports that heads which put their score into the higher, slowly turning RoPE dimensions carry long-range
interaction, and that ablating the top tenth of its positional heads hurts. Only its abstract could be checked: its
metric is unknown, so the figures here are headlab's own and stand beside claims, not numbers.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from common import Figure, main
from scipy.stats import spearmanr

import headlab as hl
from headlab.attention import Head, matched_sets
from headlab.roles.base import Behaviour, Probing
from headlab.roles.confirmation import GENERAL
from headlab.roles.positional import Positional
from headlab.roles.prose_behaviours import FAR_CONTEXT, WORD_ORDER

PAPER = "length-extrapolated models (abstract)"
DRAWS = 8
TOP = 0.1


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    scores = hl.score(model, [Positional(), "long_range"], seed=seed, n_prompts=n_prompts)
    frame = scores.frame.pivot(index=["layer", "head"], columns="role", values="score")
    effect = scores.frame.pivot(index=["layer", "head"], columns="role", values="effect")
    frame["beyond even"] = effect["positional"]  # the score alone is high where attention is even
    claimed = len(scores.claimed("positional"))
    figures = [
        Figure(
            "heads claimed as positional, share", claimed / len(frame), note="headlab's definition"
        )
    ]
    details = scores.details.query("role == 'positional'")
    pairs = details[details["detail"] == "rope_contribution"]
    if pairs.empty:
        return [
            *figures,
            Figure("RoPE pairs", None, note="the model has no RoPE that could be read"),
        ]
    slow = pairs[pairs["at"] >= (pairs["at"].max() + 1) / 2]
    frame["slow"] = slow.groupby(["layer", "head"])["value"].sum()
    alone = details[details["detail"] == "rope_long_range"].set_index(["layer", "head"])["value"]
    frame["rope_long_range"] = alone
    figures.append(
        Figure(
            "Spearman over heads: share of score variance in the slower half of RoPE pairs × attention ≥ 128 back",
            _rank(frame["slow"], frame["long_range"]),
            "positive",
            PAPER,
            note="the paper: extrapolation goes with allocation to high dimensions",
        )
    )
    figures.append(
        Figure(
            "mean over heads of Spearman(pair, |contribution| at ≥ 128 tokens)",
            float(frame["rope_long_range"].mean()),
            "positive",
            PAPER,
            note="headlab's approximation of the paper's metric",
        )
    )
    probing = Probing(model, seed=seed, n_prompts=n_prompts)
    for name, label, behaviours in (
        ("rope_long_range", "RoPE long-range", (GENERAL, FAR_CONTEXT)),
        ("beyond even", "positional score less its null", (GENERAL, WORD_ORDER)),
    ):
        for behaviour in behaviours:
            figures.append(_ablated(probing, frame[name], label, behaviour))
    return figures


def _ablated(probing: Probing, ranked: pd.Series, label: str, behaviour: Behaviour) -> Figure:
    """The change of a behaviour when the top tenth of heads is ablated, beside random sets of the same layers."""
    count = max(1, round(TOP * len(ranked)))
    order = ranked.dropna().sort_values(ascending=False).index[:count]
    heads = tuple(sorted(Head(int(layer), int(head)) for layer, head in order))
    controls, _ = matched_sets(probing.model.spec, heads, DRAWS, probing.seed)
    before = behaviour.measure(probing)
    role = Positional()
    changes = []
    for chosen in (heads, *controls):
        with probing.model.edit(role.ablation(chosen)):
            changes.append(float((behaviour.measure(probing) - before).mean()))
    note = ""
    if controls:
        random = np.array(changes[1:])
        note = f"{len(random)} random sets: mean {random.mean():.3f}, lowest {random.min():.3f}"
    return Figure(
        f"change of {behaviour.name}, top {TOP:.0%} heads by {label} ablated",
        changes[0],
        "larger fall than random heads",
        PAPER,
        note=note,
    )


def _rank(a: pd.Series, b: pd.Series) -> float | None:
    both = pd.concat([a, b], axis=1).dropna()
    return float(spearmanr(both.iloc[:, 0], both.iloc[:, 1]).statistic) if len(both) > 2 else None


if __name__ == "__main__":
    main(run, __doc__)
