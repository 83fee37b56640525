"""Singular vectors of OV and QK as tokens: Millidge & Black 2022, The SVDs of transformer weight matrices are
highly interpretable.

Leading directions of every head, with how coherent their top tokens are beside those of random directions. The paper
judges GPT-2 medium's directions by eye (from memory, unverified); ours is a count at a false-discovery rate.
"""

from __future__ import annotations

from common import Figure, main

import headlab as hl
from headlab.errors import HeadlabError
from headlab.parameters.circuits import circuits
from headlab.parameters.singular_vectors import singular_vectors

PAPER, BY_EYE = "GPT-2 medium", "most directions, by eye"
DIRECTIONS = 5


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model; prompts are not needed."""
    figures = []
    for circuit in ("OV", "QK"):
        try:
            found = singular_vectors(circuits(model), circuit=circuit, n=DIRECTIONS, seed=seed)  # type: ignore[arg-type]
        except HeadlabError as error:
            return [Figure(f"singular vectors of {circuit}", None, note=f"not measurable: {error}")]
        rank = found.effective_rank
        figures.append(
            Figure(
                f"{circuit}: effective rank, mean over heads",
                float(rank.mean()),
                note=f"of {found.values.shape[1]}; {rank.min():.1f} … {rank.max():.1f}; (Σ s²)² / Σ s⁴",
            )
        )
        for side, rows in found.frame.groupby("side", sort=False):
            note = (
                f"{len(rows)} directions, coherence {rows['coherence'].mean():.3f}, random "
                f"{rows['null_mean'].mean():.3f}; {(rows['p_value'] < 0.05).mean():.0%} at p < 0.05"
            )
            share = float((rows["q_value"] < 0.05).mean())
            what = f"{circuit}, {side}: share more coherent than random"
            figures.append(Figure(what, share, BY_EYE, PAPER, False, note))
            # Rare tokens lie close together in every model: sizes of directions tell the telling ones apart.
            best = rows.sort_values(["p_value", "share"], ascending=[True, False]).head(3)
            for row in best.to_dict("records"):
                what = (
                    f"{circuit}, {side}: L{row['layer']}H{row['head']} direction {row['direction']}"
                )
                tokens = ", ".join(repr(token) for token in row["top"][:8])
                note = f"coherence {row['coherence']:.2f}, q {row['q_value']:.2g}, share of Σ s² {row['share']:.2f}"
                figures.append(Figure(what, tokens, note=note))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
