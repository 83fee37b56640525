"""JuICE and JuNE (Li et al. 2025): answering by memory, or by the text, where the two disagree.

Accuracy of the first token of the known answer (memory) and of the replaced one (context), under a sentence that
contradicts (substitution) and under a coherent passage that does: unsteered, with heads scaled in one run (JuNE), and
with a first run's outputs added (JuICE), beside JuICE at random heads of the same layers. Only facts that the model
answers right without any text count. Heads to enhance and to suppress are found on four other facts, and the strength
(one for both lists) on the same four. The memorisation ratio is the share of answers by memory among those by either
(after Longpre et al. 2021; formula unverified). The paper's facts and passages are others, and its model larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from common import Figure, is_model, main

import headlab as hl
from headlab.attention import matched_sets
from headlab.attention.heads import Head
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval, sign_flip_p
from headlab.steering import JuICE, JuNE, Method
from headlab.steering.behaviours.conflicts import (
    N_FOUND,
    conflict,
    found_heads,
    known_conflicts,
    memorisation_ratio,
)
from headlab.steering.learned import head_names
from headlab.tasks import Conflict

KINDS, TOWARDS = ("substitution", "coherent"), ("memory", "context")
STRENGTHS, DRAWS = (1.0, 2.0, 3.0, 5.0), 3
GEMMA = "google/gemma-2b"
#: Average accuracy in % on the published facts: by memory under coherent conflicts, and by context.
PUBLISHED = {
    ("coherent", "memory"): {"unsteered": 0.2, "JuNE": 52.7, "JuICE": 73.4},
    ("coherent", "context"): {"unsteered": 45.0, "JuICE": 66.2},
}


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Both directions under both kinds of conflict."""
    try:
        items = known_conflicts(model, n_prompts, seed)
        learned_on = known_conflicts(model, N_FOUND, seed, skip=0)
    except HeadlabError as error:
        return [Figure("accuracy", None, note=f"not measurable: {error}")]
    figures = [Figure("facts known without any text", float(len(items)), note="and asked about")]
    for towards in TOWARDS:
        try:
            enhance, suppress = found_heads(model, towards, seed)
        except HeadlabError as error:
            figures.append(Figure(f"heads for {towards}", None, note=f"none: {error}"))
            continue
        up, down = head_names(enhance), head_names(suppress or ())
        figures.append(Figure(f"heads for {towards}", up, note=f"to suppress: {down or 'none'}"))
        lists = (enhance, suppress or ())
        for kind in KINDS:
            figures += _figures(model, seed, items, learned_on, kind, towards, lists)
    return figures


def _figures(
    model: hl.Model,
    seed: int,
    items: tuple[Conflict, ...],
    learned_on: tuple[Conflict, ...],
    kind: str,
    towards: str,
    lists: tuple[Sequence[Head], Sequence[Head]],
) -> list[Figure]:
    methods: dict[str, list[Method | None]] = {"unsteered": [None]}
    used = {}
    for name, make in (("JuNE", JuNE), ("JuICE", JuICE)):
        method, used[name] = _strongest(model, make, lists, learned_on, kind, towards)
        methods[name] = [method]
    both = [*lists[0], *lists[1]]
    sets, _ = matched_sets(model.spec, both, DRAWS, seed)
    n = len(lists[0])
    methods["JuICE at random heads"] = [
        JuICE(drawn[:n], drawn[n:] or None).at(used["JuICE"]) for drawn in sets
    ]
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, runs in methods.items():
        found[name] = {
            answer: np.mean([conflict(items, kind, answer).values(model, one) for one in runs], 0)
            for answer in TOWARDS
        }
    figures = []
    for name, values in found.items():
        low, high = bootstrap_interval(100 * values[towards][:, None], seed)
        ratio = memorisation_ratio(values["memory"], values["context"])
        other = next(answer for answer in TOWARDS if answer != towards)
        published = PUBLISHED.get((kind, towards), {}).get(name)
        strength = f"strength {used[name]:g}, " if name in used else ""
        figures.append(
            Figure(
                f"{kind}, by {towards}, {name}, % right",
                100 * float(values[towards].mean()),
                published,
                "Gemma" if published is not None else "",
                is_model(model, GEMMA) and published is not None,
                f"{strength}95 % {low[0]:.3g}–{high[0]:.3g}, n = {len(items)}; by {other} "
                f"{100 * values[other].mean():.3g}, memorisation ratio {ratio:.2f}",
            )
        )
    for one, against in (("JuICE", "JuNE"), ("JuICE", "JuICE at random heads")):
        gain = 100 * (found[one][towards] - found[against][towards])[:, None]
        low, high = bootstrap_interval(gain, seed)
        p = min(1.0, 2 * min(float(sign_flip_p(x, seed)[0]) for x in (gain, -gain)))
        note = f"95 % {low[0]:.3g}–{high[0]:.3g}, p = {p:.2g} by sign flips, not corrected"
        what = f"{kind}, by {towards}: {one} less {against}, points"
        figures.append(Figure(what, float(gain.mean()), note=note))
    return figures


def _strongest(
    model: hl.Model,
    make: type[JuNE],
    lists: tuple[Sequence[Head], Sequence[Head]],
    items: tuple[Conflict, ...],
    kind: str,
    towards: str,
) -> tuple[JuNE, float]:
    """The method at the strength of the most right answers on some facts; the weakest of several."""
    method = make(tuple(lists[0]) or None, tuple(lists[1]) or None)
    behaviour = conflict(items, kind, towards)
    right = [behaviour.values(model, method.at(strength)).mean() for strength in STRENGTHS]
    strength = STRENGTHS[int(np.argmax(right))]
    return method.at(strength), strength


if __name__ == "__main__":
    main(run, __doc__)
