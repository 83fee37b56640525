"""Whether a model needs the heads that promote a relation's target (Elhelo and Geva 2025, the causal check of MAPS).

It is of **promoting** heads: accuracy falls without them. Without a suppressing head the target should become likelier,
which accuracy hardly shows; for those use :func:`headlab.causal.ablate_each` with ``hl.metrics.log_probability`` of the
target, or ``hl.metrics.logit_difference`` between the target and another answer: the effect should be above 0.

Prompts ask for the relation: "The capital of Spain is". Heads with φ > 0, best first, lose their z at the last
position, cumulatively, and the accuracy is the share of prompts whose likeliest next token is the target's. Beside it
stand

* **random heads**: as many, drawn in each layer among the heads that are not ablated, so that the sets match in
  depth; where a layer has too few of them the rest comes from the other layers. Several draws;
* **control relations**: the same heads ablated on prompts of relations that other heads implement: their own best
  heads share less than 15 % with these, and their accuracy is within 0.2 of this one's (the authors' rule).

Where the unedited model hardly ever answers right there is nothing to lose, and the check says nothing.

Intervals are bootstraps over prompts; p-values flip the signs of prompts' differences, one-sided: that the top heads
take more than the mean of the random sets does (q over sizes, Benjamini and Hochberg 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from headlab.attention import Head, ablate
from headlab.causal import Sweep, metrics
from headlab.errors import PlanError, PromptError
from headlab.models.spec import ModelSpec
from headlab.parameters.maps_result import Maps
from headlab.parameters.on_prompts.dynamic import mapped_pairs
from headlab.parameters.on_prompts.relation_prompts import Tell, filled
from headlab.statistics import bootstrap_interval, corrected, sign_flip_p
from headlab.tasks.relations import Relation
from headlab.tasks.relations import relations as shipped_relations

if TYPE_CHECKING:
    import pandas as pd

    from headlab.model import Model

#: Most heads that are ablated, by the number of heads of the model: the authors' steps, their limits ours.
_AT_MOST = ((150, 30), (400, 50), (800, 100), (1200, 150))
_ABOVE = 250
#: A control shares fewer of its heads, and differs less in accuracy.
_OVERLAP, _GAP = 0.15, 0.2
_EXAMPLES = 5

PromptKind = Literal["examples", "template"]


@dataclass(frozen=True, repr=False)
class CausalCheck:
    """Accuracy of a relation without its heads; made by :func:`causal_check`.

    Attributes:
        frame: One row per set of heads: ``relation`` (the control's where it is one), ``set`` (``"top"``, ``"random"``,
            ``"control"``), ``draw`` (of random sets, else −1), ``m`` heads, ``accuracy``, its 95 % bootstrap interval
            ``ci_low`` to ``ci_high``, ``effect`` (accuracy less that of the unedited model), ``n`` prompts, and for the
            top heads ``p_value`` and ``q_value`` against the mean of the random sets of that size (NaN elsewhere).
        heads: The heads with φ > 0, best first.
        baseline: Accuracy of the unedited model, by relation.
        about: Model, relation, kind of prompts, seed, ``controls`` (names), ``note`` (why there is none; else empty).
    """

    frame: pd.DataFrame
    heads: tuple[Head, ...]
    baseline: dict[str, float]
    about: dict[str, Any]

    def accuracy(self, which: str = "top") -> pd.DataFrame:
        """Accuracy by size, mean over draws or controls: columns ``m``, ``accuracy``.

        Raises:
            PlanError: There is no such set.
        """
        rows = self.frame[self.frame["set"] == which]
        if rows.empty:
            raise PlanError(
                f"there is no set {which!r:.60}; there are {', '.join(self.frame['set'].unique())}"
            )
        return rows.groupby("m")["accuracy"].mean().reset_index()

    def __repr__(self) -> str:
        name = self.about["relation"]
        lines = [
            f"CausalCheck of {name} in {self.about['model']}: accuracy {self.baseline[name]:.2f}, "
            f"{len(self.heads)} heads with φ > 0"
        ]
        for which in self.frame["set"].unique():
            last = self.accuracy(which).iloc[-1]
            lines.append(f"  without {int(last['m'])} {which}: {last['accuracy']:.2f}")
        lines += [f"  {self.about['note']}"] if self.about["note"] else []
        return "\n".join(lines)


def causal_check(
    model: Model,
    maps: Maps,
    relation: str | Relation,
    *,
    controls: Sequence[str | Relation] | None = None,
    n_controls: int = 2,
    sizes: Sequence[int] | None = None,
    n_random: int = 5,
    prompts: PromptKind = "examples",
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> CausalCheck:
    """Ablate the heads that promote a relation and see whether its accuracy goes, and whether that of others stays.

    For heads that suppress, φ of direction ``"suppresses"``, use :func:`headlab.causal.ablate_each` with
    ``hl.metrics.log_probability(targets)`` or a logit difference: without such a head it should rise.

    Args:
        model: The model the maps are of.
        maps: Its maps.
        relation: The relation: one of headlab's by name, or the relation itself.
        controls: Relations to hold beside it. By default up to ``n_controls`` of headlab's among those mapped, least
            overlap first, that keep the rule: of their own best heads, as many as this relation has with φ > 0, fewer
            than 15 % are among these, and the unedited model's accuracy on them is within 0.2 of that on this one.
            There may be none, which ``about["note"]`` says. Relations that are named need not keep the rule.
        n_controls: How many to look for.
        sizes: How many heads to ablate; by default four steps up to all with φ > 0, at most 30 to 250 by model size.
        n_random: Draws of random sets for every size.
        prompts: ``"examples"`` puts five other pairs of the relation in front, drawn anew for each prompt;
            ``"template"`` uses the relation's own sentence alone, which smaller models often continue with something
            else.
        seed: Seed of examples, draws, bootstrap and sign flips.
        tell: Told how far it is.

    Raises:
        PlanError: The relation was not mapped, no head has φ > 0, or an option is not valid.
        PromptError: There are too few pairs for examples.
    """

    if prompts not in ("examples", "template"):
        raise PlanError(f"prompts={prompts!r:.60} must be 'examples' or 'template'")
    given, _ = mapped_pairs(model, maps, relation)
    top = heads_of(maps, given.name)
    if not top:
        raise PlanError(f"no head has φ > 0 for {given.name!r}, so there is none to ablate")
    steps = _sizes(sizes, len(top), sum(layer.n_heads for layer in model.spec.layers))
    tell(f"causal check of {given.name}")
    sweep = _sweep(model, maps, given, prompts, seed, tell)
    random = {m: random_sets(model.spec, top[:m], n_random, seed + m) for m in steps}
    sets = [("top", -1, m, top[:m]) for m in steps]
    sets += [("random", draw, m, drawn) for m in steps for draw, drawn in enumerate(random[m])]
    values = sweep.run([ablate(heads, positions=[-1]) for *_, heads in sets])
    rows = _rows(given.name, sets, values, sweep.clean, seed)
    taken = np.array([values[at] for at, (kind, *_) in enumerate(sets) if kind == "top"])
    spared = np.array(
        [
            np.mean(
                [
                    values[at]
                    for at, (kind, _, size, _) in enumerate(sets)
                    if (kind, size) == ("random", m)
                ],
                0,
            )
            for m in steps
        ]
    )
    p = sign_flip_p((spared - taken).T, seed)
    for row, p_value, q_value in zip(rows, p, corrected(p), strict=False):
        row |= {"p_value": p_value, "q_value": q_value}
    baseline = {given.name: float(sweep.clean.mean())}
    for name, other in _controls(
        model, maps, given, controls, n_controls, baseline, prompts, seed, tell
    ):
        held = [("control", -1, m, top[:m]) for m in steps]
        found = other.run([ablate(heads, positions=[-1]) for *_, heads in held])
        rows += _rows(name, held, found, other.clean, seed)
        baseline[name] = float(other.clean.mean())
    held_beside = [name for name in baseline if name != given.name]
    note = ""
    if not held_beside:
        note = "no control relation: none was asked for"
        if controls is None and n_controls:
            note = (
                f"no control relation: of those mapped none has heads that overlap by less than {_OVERLAP:.0%} and an "
                f"accuracy within {_GAP} of {baseline[given.name]:.2f}; map more relations or name controls="
            )
    about = {
        "model": model.name,
        "relation": given.name,
        "prompts": prompts,
        "seed": seed,
        "controls": held_beside,
        "note": note,
    }
    return CausalCheck(_frame(rows), top, baseline, about)


def heads_of(maps: Maps, relation: str) -> tuple[Head, ...]:
    """Heads with φ > 0, best first.

    Raises:
        PlanError: The relation was not mapped.
    """
    rows = maps.ranked(relation)
    rows = rows[rows["score"] > 0]
    return tuple(
        Head(int(at), int(head)) for at, head in zip(rows["layer"], rows["head"], strict=True)
    )


def random_sets(
    spec: ModelSpec, heads: Sequence[Head], n: int, seed: int
) -> list[tuple[Head, ...]]:
    """Sets of as many other heads, matched to ``heads`` layer by layer as far as there are others.

    Raises:
        PlanError: The model has too few other heads.
    """
    taken = set(heads)
    others = {
        layer: [
            Head(layer, head) for head in range(facts.n_heads) if Head(layer, head) not in taken
        ]
        for layer, facts in enumerate(spec.layers)
    }
    if sum(map(len, others.values())) < len(taken):
        raise PlanError(
            f"{spec.name} has too few heads beside {len(taken)} to draw as many at random; use smaller sizes="
        )
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        drawn: list[Head] = []
        for layer, here in others.items():
            wanted = min(sum(head.layer == layer for head in taken), len(here))
            drawn += [here[at] for at in rng.choice(len(here), wanted, replace=False)]
        rest = [head for here in others.values() for head in here if head not in drawn]
        short = len(taken) - len(drawn)
        if short:
            drawn += [rest[at] for at in rng.choice(len(rest), short, replace=False)]
        found.append(tuple(sorted(drawn)))
    return found


# -- prompts -----------------------------------------------------------------------------------------------------------


def relation_prompts(
    relation: Relation, words: Sequence[tuple[str, str]], kind: PromptKind, seed: int
) -> list[str]:
    """One prompt per pair that asks for its target.

    Raises:
        PromptError: There are too few pairs for examples.
    """
    sentence = relation.templates[-1]
    if kind == "template":
        return [filled(sentence, source) for source, _ in words]
    if len(words) <= _EXAMPLES:
        raise PromptError(
            f"relation {relation.name!r} has {len(words)} pairs, but {_EXAMPLES} examples and one to ask for are needed"
        )
    rng = np.random.default_rng(seed)
    found = []
    for at, (source, _) in enumerate(words):
        rest = [pair for other, pair in enumerate(words) if other != at]
        shown = [rest[other] for other in rng.choice(len(rest), _EXAMPLES, replace=False)]
        lines = [f"{filled(sentence, one)} {answer}." for one, answer in shown]
        found.append("\n".join([*lines, filled(sentence, source)]))
    return found


def _sweep(
    model: Model, maps: Maps, relation: Relation, kind: PromptKind, seed: int, tell: Tell
) -> Sweep:
    _, pairs = mapped_pairs(model, maps, relation)
    texts = relation_prompts(relation, pairs.words, kind, seed)
    answers = [[int(target)] for target in pairs.targets]
    return Sweep(model, texts, metrics.recall(answers), tell=tell)


def _controls(
    model: Model,
    maps: Maps,
    relation: Relation,
    named: Sequence[str | Relation] | None,
    n: int,
    baseline: dict[str, float],
    kind: PromptKind,
    seed: int,
    tell: Tell,
) -> list[tuple[str, Sweep]]:
    """Sweeps of the named control relations, or of those that keep the rule, least overlap first."""
    own = set(heads_of(maps, relation.name))
    if named is not None:
        given = [mapped_pairs(model, maps, each)[0] for each in named]
        return [(each.name, _sweep(model, maps, each, kind, seed, tell)) for each in given]
    shipped = {each.name for each in shipped_relations()}
    candidates = []
    for each in maps.relations:
        if each.skipped or each.name == relation.name or each.name not in shipped:
            continue
        theirs = heads_of(maps, each.name)[: len(own)]
        overlap = len(own.intersection(theirs)) / len(theirs) if theirs else 0.0
        if overlap < _OVERLAP:
            candidates.append((overlap, each.name))
    found: list[tuple[str, Sweep]] = []
    for _, name in sorted(candidates):
        if len(found) == n:
            break
        other, _ = mapped_pairs(model, maps, name)
        sweep = _sweep(model, maps, other, kind, seed, tell)
        if abs(float(sweep.clean.mean()) - baseline[relation.name]) < _GAP:
            found.append((name, sweep))
    return found


# -- the table ---------------------------------------------------------------------------------------------------------


def _sizes(given: Sequence[int] | None, n_top: int, n_heads: int) -> list[int]:
    if given is None:
        most = next((least for heads, least in _AT_MOST if n_heads <= heads), _ABOVE)
        most = min(most, n_top)
        return sorted({max(1, round(most * share)) for share in (0.1, 0.25, 0.5, 1)})
    sizes = sorted(set(given))
    if not sizes or sizes[0] < 1 or sizes[-1] > n_top:
        raise PlanError(
            f"sizes={list(given)!r:.60} must be whole numbers from 1 to {n_top}, the heads with φ > 0"
        )
    return sizes


def _rows(
    relation: str,
    sets: Sequence[tuple[str, int, int, Sequence[Head]]],
    values: Float[np.ndarray, "set prompt"],
    clean: Float[np.ndarray, " prompt"],
    seed: int,
) -> list[dict[str, Any]]:
    low, high = bootstrap_interval(values.T, seed)
    return [
        {
            "relation": relation,
            "set": kind,
            "draw": draw,
            "m": m,
            "accuracy": values[at].mean(),
            "ci_low": low[at],
            "ci_high": high[at],
            "effect": (values[at] - clean).mean(),
            "n": values.shape[1],
            "p_value": np.nan,
            "q_value": np.nan,
        }
        for at, (kind, draw, m, _) in enumerate(sets)
    ]


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


__all__ = ["CausalCheck", "causal_check", "heads_of", "random_sets", "relation_prompts"]
