"""Temporal heads (Park et al. 2025): what ablating them does to facts that change with the year, and to others.

The paper's table: the probability of the right object among candidates, log-probabilities of whole objects put
through a softmax, times 100, with heads intact and with z of some set to zero. Facts, candidates and prompt are
headlab's (plain text, no chat template; objects of the same question, or answer and foil), so drops compare and
levels do not. Ablations of as many random heads from the same layers stand beside; the paper has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from common import Figure, is_model, main

import headlab as hl
from headlab.attention import matched_sets
from headlab.attention.heads import Head, parse_heads
from headlab.roles.base import Probing
from headlab.roles.temporal import Temporal
from headlab.tasks import TimePair, TimePrompts, invariant_pairs, temporal_facts, temporal_pairs

#: A prompt, and the tokens of its candidates, the right one first.
Question = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
#: Published by model: heads, and the score on temporal and invariant facts without and with their ablation.
PUBLISHED = {
    "meta-llama/Llama-2-7b-chat-hf": [
        ("L18H3", (34.53, 33.05), (59.64, 59.62)),
        ("L15H0", (34.53, 31.05), (59.64, 59.44)),
        ("L15H0, L18H3", (34.53, 26.29), (59.64, 59.29)),
    ],
    "Qwen/Qwen1.5-7B-Chat": [("L17H15", (26.53, 19.13), (63.67, 63.70))],
    "microsoft/Phi-3-mini-4k-instruct": [("L10H13", (26.16, 25.97), (59.80, 59.80))],
}
CANDIDATES, CONTROLS, BATCH = 4, 3, 16


def questions(model: hl.Model, seed: int, n: int) -> dict[str, list[Question]]:
    """Questions by kind: temporal ones, each of another fact where there are so many, and invariant ones."""
    prompts = TimePrompts(model.tokenizer, Probing(model).bos, model.spec.max_context)
    facts = temporal_facts()
    objects = {fact.template: fact.objects.values() for fact in facts.temporal}
    pairs = [group[0] for group in islice(temporal_pairs(prompts, facts, seed + 2), n)]
    steady = invariant_pairs(prompts, facts, [pair.times for pair in pairs], seed + 2)

    def question(pair: TimePair, others: Iterable[str]) -> Question:
        names = list(dict.fromkeys([*pair.names, *others]))[:CANDIDATES]
        ends = [prompts.continuation(pair.template, pair.times[0], name) for name in names]
        return pair.clean, tuple(ends)

    return {
        "temporal": [question(pair, objects[pair.template]) for pair in pairs],
        "invariant": [question(pair, ()) for pair in islice(steady, n)],
    }


def accuracy(model: hl.Model, asked: Sequence[Question]) -> float:
    """Mean probability of the right candidate among all of a question, times 100."""
    rows = [(prompt, name) for prompt, names in asked for name in names]
    logs: list[float] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        logits = model.logits([[*prompt, *name] for prompt, name in batch]).float()
        for (prompt, name), row in zip(batch, logits.log_softmax(-1).cpu(), strict=True):
            at = torch.arange(len(name)) + len(prompt) - 1
            logs.append(float(row[at, torch.tensor(name)].sum()))
    found = []
    for _, names in asked:
        own, logs = np.array(logs[: len(names)]), logs[len(names) :]
        found.append(np.exp(own[0] - np.logaddexp.reduce(own)))
    return 100 * float(np.mean(found))


def ablated(model: hl.Model, heads: Sequence[Head], asked: Sequence[Question]) -> float:
    """:func:`accuracy` with z of heads set to zero."""
    with model.edit(hl.ablate(list(heads))):
        return accuracy(model, asked)


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """The table of ablations."""
    scores = hl.score(model, roles=[Temporal()], seed=seed, n_prompts=n_prompts)
    ranked = scores.frame.sort_values("score", ascending=False)
    claimed = ", ".join(scores.claimed("temporal"))
    figures = [Figure("claimed heads", claimed or "none", note=str(ranked["note"].iloc[0]))]
    sets = {"the claimed heads": claimed} if claimed else {}
    if ranked["score"].notna().any():
        top = [str(Head(row.layer, row.head)) for row in ranked.head(2).itertuples()]
        sets["the two of highest score"] = ", ".join(top)
    same = {name for name in PUBLISHED if is_model(model, name)}
    sets |= {heads: heads for name in same for heads, *_ in PUBLISHED[name]}
    for at, (kind, asked) in enumerate(questions(model, seed, n_prompts).items()):
        intact = accuracy(model, asked)
        figures.append(Figure(f"{kind} facts, % on the right object", intact))
        published = {
            heads: (round(two[at][1] - two[at][0], 2), name)
            for name, rows in PUBLISHED.items()
            for heads, *two in rows
        }
        for name, heads in sets.items():
            chosen = parse_heads(heads, model.spec)
            change = ablated(model, chosen, asked) - intact
            draws, _ = matched_sets(model.spec, chosen, CONTROLS, seed)
            control = np.mean([ablated(model, drawn, asked) for drawn in draws]) - intact
            note = f"{heads}; as many random heads of the same layers: {control:.2g}"
            what = f"{kind} facts without {name}, change in points"
            figures.append(Figure(what, change, *published.get(heads, (None, "")), note=note))
        for heads, (change, name) in published.items():
            if name not in same:
                what = f"{kind} facts without {heads}, change in points"
                figures.append(Figure(what, None, change, name, note="of another model"))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
