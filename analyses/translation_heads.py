"""Translation heads and language heads (Lasnier et al. 2026): whether what is said and in which tongue come apart.

About 1 % of the heads are chosen for each half of translating, by activation patching on half of headlab's sentences:
language heads where the prompt has another language's tag, translation heads where it has another sentence. On the
other half, three things the paper reports: what setting either set to zero does to either half of the task, in nats per
token, beside as many random heads of the same layers; and what steering by both sets' vectors adds to a bare sentence
without any instruction, beside random directions of the same norms and the prompt with examples. Only the paper's
abstract and README were read: what is computed is a proposal after them, and no figure of the paper is at hand but the
share of heads. Its models are larger, and its sentences those of FLORES-200.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from common import Figure, main

import headlab as hl
from headlab.attention import matched_sets
from headlab.attention.heads import Head
from headlab.errors import HeadlabError
from headlab.statistics import bootstrap_interval, sign_flip_p
from headlab.steering import subtask_effects, subtask_vectors, top_heads
from headlab.steering.behaviours.translation import translation
from headlab.steering.learned import head_names
from headlab.tasks import translations

PAPER = "Llama 2, Llama 3.2, Gemma 3, Qwen 3"
SUBTASKS = {"meaning": "translation heads", "language": "language heads"}
#: Share of heads in %, target language of the steering, strengths tried, draws of each control.
SHARE, LANGUAGE, STRENGTHS, DRAWS = 1.0, "French", (1.0, 2.0), 2


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Heads, ablations and steering."""
    try:
        items = translations(min(6, n_prompts), half="first", seed=seed)
        effects = {name: subtask_effects(model, items, name, seed=seed) for name in SUBTASKS}
    except HeadlabError as error:
        return [Figure("translation heads", None, note=f"not measurable: {error}")]
    total = len(effects["meaning"].frame)
    n = max(2, round(SHARE / 100 * total))
    heads = {name: top_heads([table], n) for name, table in effects.items()}
    figures = [Figure("heads of each set, % of all", 100 * n / total, SHARE, PAPER, note="about")]
    for name, table in effects.items():
        best = table.frame.loc[table.frame["effect"].idxmax()]
        note = (
            f"{head_names(heads[name])}; the best restores {best['effect']:.2g} nats per token, 95 % "
            f"{best['ci_low']:.2g}–{best['ci_high']:.2g}, q = {best['q_value']:.2g}, of a loss of "
            f"{np.mean(table.clean - table.baseline):.2g}; n = {len(items)}, "
            f"so that no p is below {2.0 ** (1 - len(items)):.2g}"
        )
        figures.append(Figure(f"{SUBTASKS[name]}: heads with q < 0.05", _claimed(table), note=note))
    both = set(heads["meaning"]) & set(heads["language"])
    figures.append(Figure("heads in both sets", float(len(both)), note=f"of {n}"))
    figures += _ablations(model, seed, n_prompts, heads)
    return figures + _steering(model, seed, n_prompts, heads)


def _claimed(table: hl.Effects) -> float:
    return float(((table.frame["q_value"] < 0.05) & (table.frame["effect"] > 0)).sum())


def _ablations(
    model: hl.Model, seed: int, n: int, heads: dict[str, tuple[Head, ...]]
) -> list[Figure]:
    asked = translations(n, half="second", seed=seed)
    figures = []
    for what in SUBTASKS:
        behaviour = translation(asked, what)
        plain = behaviour.values(model, None)
        note = _interval(plain, seed)
        figures.append(Figure(f"{what} kept apart, nats per token", float(plain.mean()), note=note))
        for name, chosen in heads.items():
            own = _without(model, chosen, behaviour) - plain
            sets, _ = matched_sets(model.spec, chosen, DRAWS, seed)
            random = [_without(model, drawn, behaviour) - plain for drawn in sets]
            control = np.mean(random, 0)
            note = (
                f"{_interval(own, seed)}; random heads {control.mean():.2g}, p of the difference "
                f"{_p(own - control, seed):.2g}"
            )
            told = f"{what} without the {SUBTASKS[name]}, change"
            figures.append(Figure(told, float(own.mean()), note=note))
    return figures


def _without(
    model: hl.Model, heads: Sequence[Head], behaviour: hl.steering.Behaviour
) -> np.ndarray:
    with model.edit(hl.ablate(list(heads))):
        return behaviour.values(model, None)


def _steering(
    model: hl.Model, seed: int, n: int, heads: dict[str, tuple[Head, ...]]
) -> list[Figure]:
    learned = translations(n, language=LANGUAGE, half="first", seed=seed)
    asked = translations(n, language=LANGUAGE, half="second", seed=seed)
    vectors = [subtask_vectors(model, learned, name, heads[name]) for name in SUBTASKS]
    figures = []
    for what in ("whole", "meaning", "language"):
        prompted = translation(asked, what).values(model, None)
        bare = translation(asked, what, bare=True)
        plain = bare.values(model, None)
        figures.append(
            Figure(
                f"into {LANGUAGE}, {what}: a bare sentence, nats per token",
                float(plain.mean()),
                note=f"{_interval(plain, seed)}; with examples {prompted.mean():.2g}",
            )
        )
        for strength in STRENGTHS:
            own = _steered(model, [one.at(strength) for one in vectors], bare) - plain
            turned = [
                _steered(model, [v.randomised(seed + draw).at(strength) for v in vectors], bare)
                for draw in range(DRAWS)
            ]
            control = np.mean(turned, 0) - plain
            note = (
                f"{_interval(own, seed)}; random directions {control.mean():.2g}, p of the difference "
                f"{_p(own - control, seed):.2g}"
            )
            told = f"into {LANGUAGE}, {what}: steered at strength {strength:g}, change"
            figures.append(Figure(told, float(own.mean()), note=note))
    return figures


def _steered(
    model: hl.Model, methods: Sequence[hl.steering.Method], behaviour: hl.steering.Behaviour
) -> np.ndarray:
    with hl.steer(model, *methods):
        return behaviour.values(model, None)


def _interval(values: np.ndarray, seed: int) -> str:
    low, high = bootstrap_interval(values[:, None], seed)
    return f"95 % {low[0]:.2g}–{high[0]:.2g}, n = {len(values)}"


def _p(values: np.ndarray, seed: int) -> float:
    """Two-sided, by sign flips; not corrected."""
    return min(1.0, 2 * min(float(sign_flip_p(x[:, None], seed)[0]) for x in (values, -values)))


if __name__ == "__main__":
    main(run, __doc__)
