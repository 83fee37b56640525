"""Which heads need the long context, told from local keys alone (QAdA; Donhauser et al. 2025).

The paper: some heads attend locally whatever the query, others swing between local and long context with it, and a
second-moment estimate of the far keys tells which is which. Only its abstract could be checked, so its claims stand
here in words; threshold and formulas are as headlab reads them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from common import Figure, main

import headlab as hl
from headlab.roles.long_context import LENGTH, TAU, LongContext, correlation

PAPER = "the paper's models (abstract)"
#: A head is local, or never is, when at least this share of its rows says so.
STEADY = 0.95


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    role = LongContext()
    scores = hl.score(model, [role], seed=seed, n_prompts=n_prompts)
    frame = scores.frame.set_index(["layer", "head"])
    details = scores.details.pivot_table(index=["layer", "head"], columns="detail", values="value")
    if details.empty:
        return [Figure("local heads", None, note=str(frame["note"].iloc[0]))]
    rows, agreement = details["local_rows"], details["agreement"]
    text = f"texts of {LENGTH} tokens, τ = {TAU} (ours)"
    right = float(((rows > 0.5) == (1 - details["predicted_share"] > TAU)).mean())
    return [
        Figure(
            f"heads local on at least {STEADY:.0%} of rows, share (oracle)",
            float((rows >= STEADY).mean()),
            "certain heads consistently attend locally",
            PAPER,
            note=text,
        ),
        Figure(
            "heads that swing between local and long context, share (oracle)",
            float(((rows > 1 - STEADY) & (rows < STEADY)).mean()),
            "others swing, depending on the query",
            PAPER,
            note=text,
        ),
        Figure(
            "rows classed alike by prediction and oracle, mean over heads",
            float(agreement.mean()),
            "can be predicted from local keys",
            PAPER,
            note=_spread("lowest tenth of heads", agreement),
        ),
        Figure("heads whose class prediction and oracle share", right),
        Figure(
            "correlation over heads of predicted and measured bulk share",
            _correlated(details["predicted_share"], frame["score"]),
        ),
        Figure(
            "mean error of the predicted bulk share",
            float(details["prediction_error"].mean()),
            note=_spread("worst tenth of heads", -details["prediction_error"]),
        ),
        Figure(
            "heads that need their own far context (claimed), share",
            len(scores.claimed("long_context")) / len(frame),
            note="against another text's bulk; headlab's own null, not in the paper",
        ),
    ]


def _correlated(predicted: pd.Series, measured: pd.Series) -> float:
    both = pd.concat([predicted, measured], axis=1).to_numpy()
    return correlation(both[None, :, 0], both[None, :, 1])


def _spread(what: str, values: pd.Series) -> str:
    return f"{what}: {abs(float(np.quantile(values.dropna(), 0.1))):.2f}"


if __name__ == "__main__":
    main(run, __doc__)
