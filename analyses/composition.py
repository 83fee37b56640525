"""Composition of heads from their weights: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits.

Q-, K- and V-composition of all pairs of heads against random rotations, the pairs that stand out, and induction by
K-composition beside induction by attention. The paper reads, off a two-layer attention-only model, that K-composition
of a previous-token head with induction heads is all that stands out (from memory, unverified).
"""

from __future__ import annotations

import numpy as np
from common import Figure, main
from scipy.stats import spearmanr

import headlab as hl
from headlab.errors import HeadlabError
from headlab.parameters.circuits import circuits
from headlab.parameters.composition import KINDS, composition
from headlab.parameters.virtual_weights import channel

PAPER = "a two-layer attention-only model"


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    try:
        made = circuits(model)
        found = composition(made, seed=seed)
    except HeadlabError as error:
        return [Figure("composition scores", None, note=f"not measurable: {error}")]
    figures = []
    for kind in KINDS:
        frame = found.frame[found.frame["kind"] == kind]
        best = found.strongest(kind, 5).to_dict("records")
        shown = ", ".join(f"{row['early']}→{row['late']} {row['score']:.3f}" for row in best)
        note = (
            f"{(frame['q_value'] < 0.05).mean():.0%} of {len(frame)} pairs above random rotations at q < 0.05; mean "
            f"score {frame['score'].mean():.4f}, random {found.baseline:.4f}; z of the first {best[0]['z']:.0f}"
        )
        figures.append(Figure(f"strongest {kind}-composition", shown, note=note))
    top = found.strongest(None, 1).iloc[0]
    figures.append(
        Figure(
            "kind of the strongest pair of all", str(top["kind"]), "K", PAPER,
            note=f"{top['early']} → {top['late']}, score less null {top['effect']:.3f}",
        )
    )  # fmt: skip
    first = found.strongest("K", 1).iloc[0]
    through = channel(made, str(first["early"]), str(first["late"]), "K")
    figures.append(
        Figure(
            f"{through.early} → {through.late} (K): effective directions", through.effective,
            note=f"overlap of subspaces {through.overlap:.2f}, chance {through.chance:.2f}",
        )
    )  # fmt: skip
    return figures + by_behaviour(model, found.scores[1], seed, n_prompts)


def by_behaviour(model: hl.Model, k: np.ndarray, seed: int, n_prompts: int) -> list[Figure]:
    """K-composition beside prefix matching and attention to the previous token."""
    frame = hl.score(model, ["previous_token", "induction"], seed=seed, n_prompts=n_prompts).frame
    table = frame.pivot(index=["layer", "head"], columns="role", values="score")
    shape = k.shape[:2]
    scores = {
        role: np.array(
            [table[role].get((layer, head), np.nan) for layer, head in np.ndindex(shape)]
        )
        for role in ("previous_token", "induction")
    }
    flat = k.reshape(len(scores["induction"]), -1)
    previous = int(np.nanargmax(np.where(np.isnan(flat).all(1), np.nan, scores["previous_token"])))
    known = ~np.isnan(flat[previous]) & ~np.isnan(scores["induction"])
    late = flat[:, np.nanargmax(np.where(np.isnan(flat).all(0), np.nan, scores["induction"]))]
    both = ~np.isnan(late) & ~np.isnan(scores["previous_token"])
    names = [f"L{layer}H{head}" for layer, head in np.ndindex(shape)]
    best = names[int(np.nanargmax(late))]
    return [
        Figure(
            f"K-composition with {names[previous]}, the strongest previous-token head: ρ with prefix matching",
            float(spearmanr(flat[previous][known], scores["induction"][known])[0]),
            note=f"Spearman, over {known.sum()} later heads",
        ),
        Figure(
            "K-composition into the strongest induction head: ρ with attention to the previous token",
            float(spearmanr(late[both], scores["previous_token"][both])[0]),
            note=f"Spearman, over {both.sum()} earlier heads; the strongest of them is {best}",
        ),
    ]


if __name__ == "__main__":
    main(run, __doc__)
