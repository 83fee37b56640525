"""How many heads can go: Michel et al. 2019, Are Sixteen Heads Really Better than One?

Heads are scored by the expected gradient of a gate, and taken out (z = 0) lowest first in steps of 5 % of all heads,
scores made once on other text. The paper counts what its task's accuracy or BLEU bears; here it is the next-token loss
of prose, which reacts to everything, so shares are given for three bounds. Beside the paper's importance (absolute
values per position) stand that of Hugging Face's run_bertology, where gradients of a batch cancel first, and chance.
"""

from __future__ import annotations

import numpy as np
from common import Figure, main
from scipy.stats import spearmanr

import headlab as hl
from headlab.causal.attribution.importance import head_importance
from headlab.causal.head_sets.pruning import pruning_curve
from headlab.causal.metrics import loss
from headlab.tasks.prose import prose, prose_windows

LENGTH, STEP = 64, 0.05
BOUNDS = (0.01, 0.05, 0.2)
PUBLISHED = {0.05: (0.4, "BERT-base on MNLI; the WMT Transformer: 0.2")}
#: Correlation of importance between MNLI matched and mismatched, by secondary notes on the paper.
ACROSS = 0.68


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    length = min(LENGTH, (model.spec.max_context or LENGTH) // 2)
    windows = prose_windows(model.tokenizer, prose(), 3 * n_prompts, length, seed, model.bos)
    first, second, held_out = windows.split(n_prompts)
    by_token = head_importance(model, first)
    by_batch = head_importance(model, first, reduction="batch")
    orders: dict[str, dict[tuple[int, int], float] | str] = {
        "importance": scores(by_token),
        "importance of run_bertology": scores(by_batch),
    }
    curves = {
        name: pruning_curve(model, held_out, loss(), order, step=STEP, seed=seed).frame  # type: ignore[arg-type]
        for name, order in orders.items()
    }
    chance = [
        pruning_curve(model, held_out, loss(), "random", step=STEP, seed=seed + at).frame
        for at in range(3)
    ]
    figures = []
    for bound in BOUNDS:
        published, whose = PUBLISHED.get(bound, (None, ""))
        for name, frame in curves.items():
            what = f"share of heads out before loss rises by {bound:.0%}, by {name}"
            note = f"loss {frame['metric'].iloc[0]:.3g} nats"
            given = (published, whose) if name == "importance" else (None, "")
            figures.append(Figure(what, prunable(frame, bound), *given, note=note))
        shares = [prunable(frame, bound) for frame in chance]
        what = f"share of heads out before loss rises by {bound:.0%}, at random"
        figures.append(Figure(what, float(np.mean(shares)), note="mean of 3 orders"))
    other = head_importance(model, second)
    for what, frame, published in (
        ("importance on other text", other, ACROSS),
        ("importance of run_bertology", by_batch, None),
    ):
        rho = float(np.corrcoef(by_token["importance"], frame["importance"])[0, 1])
        ranks = float(spearmanr(by_token["importance"], frame["importance"])[0])
        whose = "BERT-base, MNLI matched and mismatched" if published else ""
        what = f"importance and {what}: Pearson's r"
        figures.append(Figure(what, rho, published, whose, note=f"Spearman's ρ {ranks:.2f}"))
    return figures


def scores(frame: object) -> dict[tuple[int, int], float]:
    """Importance by head."""
    return {(row.layer, row.head): row.importance for row in frame.itertuples()}  # type: ignore[attr-defined]


def prunable(frame: object, bound: float) -> float:
    """The largest share of heads up to which the loss stays within a bound of the whole model's."""
    metric, share = (frame[name].to_numpy() for name in ("metric", "share"))  # type: ignore[index]
    over = metric > metric[0] * (1 + bound)
    return float(share[: over.argmax()].max()) if over.any() else float(share[-1])


if __name__ == "__main__":
    main(run, __doc__)
