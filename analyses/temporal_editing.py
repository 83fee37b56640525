"""Temporal value edits (Park et al. 2025): writing another question's answer into the values at the time's last token.

Every group of query heads that shares a value head is tried at factor 3: the rise, over questions, of the source's
object over the question's own (logits of first tokens). The best group is then put to the paper's test on other
questions, at its three factors: the first token changes and the greedy continuation holds the source's object. As many
random heads and random directions of the same norms stand beside; the paper has neither, and tries every head on its
15 settings, so that its best counts are of the same questions that they were chosen on. Sources differ in the subject,
as in the paper, or in the time. Continuations are shorter than the paper's 50 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from common import Figure, is_model, main

import headlab as hl
from headlab.attention.heads import Head
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.steering import ValueEdit
from headlab.steering.behaviours.temporal import Other, Transfer, transfers, written
from headlab.steering.learned import head_names

LLAMA = "meta-llama/Llama-2-7b-chat-hf"
#: Successes of 15 of the paper's best heads; all 1024 were tried.
PUBLISHED = {"L18H3": 8, "L1H8": 4}
FACTOR, FACTORS, DRAWS, TOKENS = 3.0, (1.0, 3.0, 6.0), 2, 16


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Both kinds of source."""
    figures: list[Figure] = []
    try:
        for other in ("subject", "time"):
            figures += _figures(model, seed, n_prompts, other)
    except HeadlabError as error:
        return [Figure("successes", None, note=f"not measurable: {error}")]
    same = is_model(model, LLAMA)
    figures += [
        Figure(f"successes of {head}, %", None, 100 * n / 15, "Llama-2-7B-chat", same, f"{n} of 15")
        for head, n in PUBLISHED.items()
    ]
    return figures


def groups(model: hl.Model) -> list[tuple[Head, ...]]:
    """Query heads by the value head they share."""
    found = []
    for at, layer in enumerate(model.spec.layers):
        size = layer.n_heads // layer.n_kv_heads
        found += [
            tuple(Head(at, start + head) for head in range(size))
            for start in range(0, layer.n_heads, size)
        ]
    return found


def edit(model: hl.Model, cases: Sequence[Transfer], heads: Sequence[Head]) -> ValueEdit:
    """The edit of some heads, with each question's own source."""
    sources, spans = [list(one.source) for one in cases], [[one.span] for one in cases]
    return ValueEdit.fit(model, sources, list(heads), spans, factor=FACTOR)


def differences(model: hl.Model, cases: Sequence[Transfer]) -> np.ndarray:
    """Logit of the source's object less that of the question's own, by first tokens."""
    logits = model.trace([list(one.prompt) for one in cases], logits="last").logits
    rows = torch.arange(len(cases))
    wanted, own = (
        torch.tensor([model.tokenizer(name, add_special_tokens=False)["input_ids"][0] for name in names])
        for names in zip(*((one.answer, one.own) for one in cases), strict=True)
    )  # fmt: skip
    last = logits[:, 0].double().cpu()
    return (last[rows, wanted] - last[rows, own]).numpy()


def _figures(model: hl.Model, seed: int, n: int, other: Other) -> list[Figure]:
    cases = transfers(model, 2 * n, other=other, seed=seed)
    tried, asked = cases[:n], cases[n:]
    every = groups(model)
    whole = edit(model, tried, [head for group in every for head in group])
    plain, rises, at = differences(model, tried), [], 0
    for group in every:
        own = ValueEdit(
            head_names(group), whole.shape, whole.values[:, at : at + len(group)], whole.spans, FACTOR
        )  # fmt: skip
        at += len(group)
        with hl.steer(model, own):
            rises.append(differences(model, tried) - plain)
    table = np.stack(rises, 1)
    means = table.mean(0)
    order = np.argsort(-means, kind="stable")
    best = every[order[0]]
    p = corrected(np.minimum(1, 2 * np.minimum(*(sign_flip_p(x, seed) for x in (table, -table)))))
    low, high = bootstrap_interval(table, seed)
    where = f"another {other}"
    note = (
        f"{head_names(best)}, 95 % {low[order[0]]:.2g}–{high[order[0]]:.2g}, n = {n}, q = {p[order[0]]:.2g} over "
        f"{len(every)} groups; median group {np.median(means):.2g}; {int((p < 0.05).sum())} groups with q < 0.05"
    )
    what = f"{where}: rise of the source's object at the best group, nats"
    figures = [Figure(what, float(means.max()), note=note)]
    return figures + _successes(model, seed, asked, best, every, where)


def _successes(
    model: hl.Model,
    seed: int,
    asked: Sequence[Transfer],
    best: tuple[Head, ...],
    every: Sequence[tuple[Head, ...]],
    where: str,
) -> list[Figure]:
    behaviour = written(asked, TOKENS)
    own = edit(model, asked, best)
    rng = np.random.default_rng(seed)
    drawn = [every[at] for at in rng.permutation(len(every)) if every[at] != best][:DRAWS]
    random = [edit(model, asked, group) for group in drawn]
    turned = [own.randomised(seed + draw) for draw in range(DRAWS)]
    figures = []
    for factor in FACTORS:
        values = 100 * behaviour.values(model, own.at(factor))
        low, high = bootstrap_interval(values[:, None], seed)
        others, directions = (
            100 * float(np.mean([behaviour.values(model, one.at(factor)) for one in runs]))
            for runs in (random, turned)
        )
        note = (
            f"95 % {low[0]:.2g}–{high[0]:.2g}, n = {len(values)}; random groups {others:.2g}, random directions "
            f"{directions:.2g}"
        )
        what = f"{where}: successes of {head_names(best)} at factor {factor:g}, %"
        figures.append(Figure(what, float(values.mean()), note=note))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
