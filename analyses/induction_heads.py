"""Induction heads: Olsson et al. 2022, In-context learning and induction heads.

Prefix matching under the paper's convention (25 random tokens four times), copying, and the in-context learning score
loss(500th token) − loss(50th). The published per-head values are GPT-2 small's as released with the icl-cmr study;
the loss figure comes from there too (C4 texts, n = 5000), ours from headlab's essays.
"""

from __future__ import annotations

import numpy as np
from common import Figure, is_model, main

import headlab as hl
from headlab.roles import Probing
from headlab.roles.confirmation import next_token_log_probability
from headlab.roles.induction import Induction
from headlab.tasks import prose, prose_windows

GPT2 = "GPT-2 small"
MATCHING = {
    (5, 1): 0.963, (6, 9): 0.785, (7, 2): 0.766, (5, 5): 0.599, (7, 10): 0.533, (5, 0): 0.347,
    (8, 1): 0.284,
}  # fmt: skip
COPYING = {(5, 1): 0.532, (6, 9): 0.816, (7, 2): 0.515, (5, 5): 0.816, (7, 10): 0.674}
TOP = {(5, 1), (5, 5), (6, 9), (7, 2), (7, 10)}
#: Windows whose losses are averaged, and tokens of each.
WINDOWS, LENGTH = 20, 512


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    same = is_model(model, "gpt2", "openai-community/gpt2")
    olsson = Induction("olsson")
    matching = _table(hl.score(model, [olsson], seed=seed, n_prompts=n_prompts), "induction")
    scores = hl.score(model, "copying", seed=seed, n_prompts=n_prompts)
    copying = _table(scores, "copying")
    figures = [
        Figure(
            "heads with the highest prefix matching",
            ", ".join(_names(matching, 5)),
            ", ".join(sorted(f"L{layer}H{head}" for layer, head in TOP)),
            GPT2,
            same,
            "the paper's five, in no order",
        )
    ]
    for head, published in MATCHING.items():
        figures.append(_of_head("prefix matching", matching, head, published, same, ""))
    for head, published in COPYING.items():
        note = "published on −1 … 1, ours a plain share with chance 0.04: compare the order"
        figures.append(_of_head("copying", copying, head, published, same, note))
    details = scores.details.query("detail == 'ov_eigenvalue_copying'")["value"]
    figures += [
        Figure(
            "share of heads that copy more than chance",
            float((_table(scores, "copying", "effect") > 0).mean()),
            0.70,
            GPT2,
            same,
            "published: share with copying above 0",
        ),
        Figure(
            "share of heads with positive OV eigenvalue copying",
            float((details > 0).mean()) if len(details) else None,
        ),
        *_in_context_learning(model, seed),
    ]
    return figures


def _table(scores: hl.Scores, role: str, column: str = "score") -> np.ndarray:
    frame = scores.frame[scores.frame["role"] == role]
    table: np.ndarray = frame.pivot(index="layer", columns="head", values=column).to_numpy()
    return table


def _names(table: np.ndarray, n: int) -> list[str]:
    order = np.argsort(-np.nan_to_num(table, nan=-np.inf), axis=None)[:n]
    return [f"L{at // table.shape[1]}H{at % table.shape[1]}" for at in order]


def _of_head(
    what: str, table: np.ndarray, head: tuple[int, int], published: float, same: bool, note: str
) -> Figure:
    layer, which = head
    ours = float(table[layer, which]) if same else None
    return Figure(f"{what} of L{layer}H{which}", ours, published, GPT2, same, note)


def _in_context_learning(model: hl.Model, seed: int) -> list[Figure]:
    limit = model.spec.max_context
    if model.tokenizer is None or (limit is not None and limit < LENGTH):
        return []
    text = prose_windows(model.tokenizer, prose(), WINDOWS, LENGTH, seed, Probing(model).bos)
    losses = np.concatenate(
        [-next_token_log_probability(model, text[at : at + 1]).numpy() for at in range(WINDOWS)]
    )
    # Entry i is the loss of the token that follows i + 1 others.
    exact = losses[:, 499] - losses[:, 49]
    around = losses[:, 475:].mean(1) - losses[:, 25:75].mean(1)
    return [
        Figure(
            f"in-context learning: loss of {what}, nats",
            float(each.mean()),
            published,
            GPT2,
            False,
            f"± {each.std(ddof=1) / WINDOWS**0.5:.2g} over {WINDOWS} of headlab's texts; published on C4",
        )
        for what, each, published in (
            ("token 500 less that of token 50", exact, -0.323),
            ("tokens 476–511 less that of tokens 26–75", around, None),
        )
    ]


if __name__ == "__main__":
    main(run, __doc__)
