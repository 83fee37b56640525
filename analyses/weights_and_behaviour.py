"""Heads found by weights beside heads found by behaviour (Elhage et al. 2021; Olsson et al. 2022).

Elhage et al. find that induction heads have eigenvalues of W_OV that are positive (copying) and K-composition with a
previous-token head; Olsson et al. that heads which match prefixes also copy. For each of the three properties the
script gives the rank correlation between the score from the weights and that on prompts over all heads, and how often a
head claimed on prompts has more of it in its weights than one that is not.

    python analyses/weights_and_behaviour.py --model gpt2
"""

from __future__ import annotations

from collections.abc import Sequence

from common import Figure, main

import headlab as hl
from headlab.report import side_by_side


def run(model: hl.Model, seed: int, n_prompts: int) -> Sequence[Figure]:
    """Measure one model."""
    found = side_by_side(model, n_prompts=n_prompts, seed=seed)
    figures = []
    for row in found.agreement.to_dict("records"):
        interval = f"[{row['ci_low']:.2f}, {row['ci_high']:.2f}], p = {row['p_value']:.2g}, {row['n']} heads"
        figures.append(
            Figure(
                f"{row['role']}: rank correlation of weights and behaviour",
                row["spearman"],
                note=interval,
            )
        )
        figures.append(
            Figure(
                f"{row['role']}: claimed heads above others by weights (AUC)",
                row["auc"],
                note=f"{row['claimed']} claimed; most in the weights: {row['best']}",
            )
        )
    both = found.frame[found.frame["induction_claimed"]]
    figures.append(
        Figure(
            "induction heads whose W_OV copies (eigenvalue score > 0)",
            float((both["copying_weights"] > 0).mean()) if len(both) else None,
            published="nearly all",
            published_for="two-layer attention-only model",
            note=f"{len(both)} induction heads; the paper's Figure on eigenvalues, read off, unverified",
        )
    )
    return figures


if __name__ == "__main__":
    main(run, __doc__)
