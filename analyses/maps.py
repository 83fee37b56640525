"""Relations that heads implement, read from weights and checked on prompts: Elhelo and Geva 2025 (MAPS).

Per relation: the best head's φ and the heads claimed; the correlation of φ with the same rate on prompts, with
attention forced onto the source (without context) and as it is (with context); and the accuracy of the relation
without its heads. Word lists, templates and prompts are headlab's own, and every pair that the tokenizer has as
single tokens is a prompt, so --prompts changes nothing here. The paper reports no interval and claims by a threshold.
"""

from __future__ import annotations

from collections.abc import Callable

from common import Figure, is_model, main

import headlab as hl
from headlab.errors import PromptError
from headlab.parameters.maps_result import Maps
from headlab.parameters.on_prompts.causal_check import causal_check
from headlab.parameters.on_prompts.dynamic import dynamic_scores

GPT2_XL, PYTHIA, LLAMA = "gpt2-xl", "pythia-6.9b", "Llama-3.1-8B"
#: Correlation without and with context, and the largest φ.
PUBLISHED: dict[str, dict[str, tuple[float, float, float]]] = {
    GPT2_XL: {
        "country_capital": (0.98, 0.88, 0.98),
        "copying": (0.95, 0.65, 0.52),
        "name_copying": (0.97, 0.70, 0.92),
        "next_year": (0.94, 0.74, 0.95),
        "comparative": (0.95, 0.78, 0.88),
        "name_pronoun": (0.96, 0.68, 0.58),
        "homophone": (0.46, 0.38, 0.02),
    },
    PYTHIA: {"country_capital": (0.95, 0.91, 0.97), "name_copying": (0.94, 0.62, 0.96)},
    LLAMA: {
        "name_copying": (0.95, 0.95, 0.71),
        "first_letter": (0.90, 0.78, 0.89),
        "profession_workplace": (0.44, 0.45, 0.10),
    },
}
#: Accuracy as it is, without the relation's heads, without random ones; None where it is not known to us.
ABLATED: dict[str, dict[str, tuple[float, float, float | None]]] = {
    GPT2_XL: {"country_capital": (0.88, 0.00, 0.83)},
    PYTHIA: {"country_capital": (0.97, 0.00, 0.97), "first_letter": (1.00, 0.00, None)},
    LLAMA: {
        "comparative": (0.98, 0.91, None),
        "name_pronoun": (0.98, 0.98, None),
        "english_spanish": (0.94, 0.97, None),
    },
}
STRONGEST = 2  # relations that are checked by ablation
_NONE = (None, None, None)

Ablation = tuple[float | None, float | None, float | None]
Beside = Callable[..., Figure]


def run(model: hl.Model, seed: int, n_prompts: int) -> list[Figure]:
    """Measure one model."""
    paper = next((name for name in PUBLISHED if is_model(model, name)), GPT2_XL)
    same = is_model(model, paper)
    try:
        maps = hl.parameters.maps(model)
    except PromptError as error:
        return [Figure("φ of the best head", None, note=f"not measurable: {error}"[:300])]

    def beside(what: str, ours: float | None, published: float | None, note: str = "") -> Figure:
        given = published is not None
        return Figure(what, ours, published, paper if given else "", same and given, note)

    figures = []
    best = {name: float(maps.top(name, 1)["score"].iloc[0]) for name in maps.names}
    for name in maps.names:
        _, _, largest = PUBLISHED[paper].get(name, _NONE)
        claims = f"{len(maps.claimed(name))} promote, {len(maps.claimed(name, 'suppresses'))} suppress it"
        figures.append(beside(f"{name}: φ of the best head", best[name], largest, claims))
    figures += [
        Figure(f"{each.name}: φ of the best head", None, note=each.skipped) for each in maps.skipped
    ]
    compared = {name for table in PUBLISHED.values() for name in table}
    for name in (name for name in maps.names if name in compared):
        found = dynamic_scores(model, maps, name, seed=seed)
        published = PUBLISHED[paper].get(name, _NONE)
        for row, theirs in zip(found.correlations.itertuples(), published[:2], strict=True):
            ours = None if row.r != row.r else float(row.r)
            what = f"{name}: correlation of φ {row.context.replace('_', ' ')}"
            note = f"95 % [{row.ci_low:.2f}, {row.ci_high:.2f}], {row.pairs} pairs, {row.points} heads × templates"
            figures.append(beside(what, ours, theirs, note))
    asked = sorted(maps.names, key=lambda name: -len(maps.claimed(name)) * best[name])
    first = [name for name in ABLATED[paper] if name in maps.names and maps.claimed(name)]
    for name in dict.fromkeys([*first, *asked][:STRONGEST]):
        if best[name] > 0:
            figures += ablated(model, maps, name, seed, beside, ABLATED[paper].get(name, _NONE))
    return figures


def ablated(
    model: hl.Model, maps: Maps, name: str, seed: int, beside: Beside, published: Ablation
) -> list[Figure]:
    """Accuracy of a relation without its heads and without random ones."""
    check = causal_check(model, maps, name, seed=seed)
    as_it_is, without, random = published
    figures = [
        beside(f"{name}: accuracy", check.baseline[name], as_it_is, "five examples in front")
    ]
    others = ", ".join(other for other in check.baseline if other != name)
    for which, what, theirs in (
        ("top", "accuracy without its {m} heads", without),
        ("random", "accuracy without {m} random heads", random),
        ("control", f"accuracy of {others} without its {{m}} heads", None),
    ):
        if which in set(check.frame["set"]):
            last = check.accuracy(which).iloc[-1]
            what = what.format(m=int(last["m"]))
            figures.append(beside(f"{name}: {what}", float(last["accuracy"]), theirs))
    return figures


if __name__ == "__main__":
    main(run, __doc__)
