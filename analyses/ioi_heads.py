"""Previous, duplicate and induction heads of the IOI circuit: Wang et al. 2023, Interpretability in the wild.

The paper found its heads in GPT-2 small by path patching on IOI prompts; headlab claims them by attention on random
tokens and on text. The logit difference and how often the indirect object wins come from headlab's own prompts of
the same kind.
"""

from __future__ import annotations

from common import Figure, is_model, main

import headlab as hl
from headlab.roles import Probing
from headlab.roles.duplicate_token import logit_differences

GPT2 = "GPT-2 small"
HEADS = {
    "previous_token": ("L2H2", "L4H11"),
    "duplicate_token": ("L0H1", "L0H10", "L3H0"),
    "induction": ("L5H5", "L5H8", "L5H9", "L6H9"),
}
LOGIT_DIFFERENCE, IO_WINS = 3.56, 0.993


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    same = is_model(model, "gpt2", "openai-community/gpt2")
    scores = hl.score(model, list(HEADS), seed=seed, n_prompts=n_prompts)
    figures = []
    for role, published in HEADS.items():
        claimed = scores.claimed(role)
        shown = ", ".join(claimed[:8]) + (" …" if len(claimed) > 8 else "")
        figures.append(
            Figure(
                f"{role} heads",
                shown or "none",
                ", ".join(published),
                GPT2,
                same,
                "published: those that matter for IOI; ours: all that attend so",
            )
        )
        if same:
            found = len(set(published) & set(claimed))
            figures.append(
                Figure(f"published {role} heads claimed", found, len(published), GPT2, True)
            )
    differences = logit_differences(Probing(model, seed), max(n_prompts, 100))
    figures += [
        Figure(
            "IOI logit difference (nats)",
            float(differences.mean()),
            LOGIT_DIFFERENCE,
            GPT2,
            same,
            "headlab's templates and names",
        ),
        Figure(
            "prompts whose indirect object beats the subject",
            float((differences > 0).mean()),
            IO_WINS,
            GPT2,
            same,
        ),
    ]
    return figures


if __name__ == "__main__":
    main(run, __doc__)
