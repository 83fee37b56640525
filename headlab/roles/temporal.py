"""Temporal heads (after Park et al. 2025): heads that carry the year to what the model says is true.

"In 1999, the president of the United States was" and the same with 2004 differ in the year alone. Let D be the logit
of the first token of what is right in the one (clean) year less that of what is right in the other (corrupted) one,
at the last position; the year's whole effect on a pair is T = D(clean) − D(corrupted). A pair counts when the model
follows the year: D(clean) > 0 > D(corrupted), with T at least 1 nat. The score of a head is its share of the effect:
its attribution by integrated gradients at z (:mod:`headlab.roles.integrated_gradients`) over the mean T of the
pairs; at 1 the head carries all of it. Dividing by the mean and not by each pair's own T keeps pairs of little
effect from having the loudest voice, and gives score and null one unit.

The null is the harder of two controls, whichever has the larger mean over the pairs, for a head must beat both:

- The same attribution on facts that no year changes ("In 1999, the shape of a football was": round, not square),
  under the same change of year, over the same mean T. Which of the two years favours the right answer is chance
  there, so each pair is turned until its own whole effect is not negative, as those of the temporal pairs are by
  choice. Heads that answer to any change of digits score as much on these.
- The same pair with the head's attention spread evenly over the keys it can see, but for what rests on the first
  token. A head that tells of the year without choosing where to look, as one of random queries and keys may, scores
  as much under this.

Heads that put the year together from its digits carry it as much as heads that turn it into an object; details say
at which positions (``share_at_time``, ``share_at_end``). For the heads of most attribution exact patches stand beside
the gradients' guess (``patched_effect``), and ablations in the paper's form (``ablation_*``).

Pairs share no prompt, as the prompt is the unit of the statistics. Unless the model follows the year in significantly
more pairs than it goes against (one-sided sign test, 3 %), nothing is measured: what is followed by chance says
nothing of knowledge. Prompts are plain text behind the beginning-of-sequence token, without a chat template.

A head with a sliding window is measured like any other: this is an effect, not attention to the year's tokens, and
earlier layers can bring the year within reach. A head that nothing of the year passes through scores a true 0.

What differs from the paper. Park et al. find circuits: they attribute edges (EAP-IG, 100 steps), keep the best
5000, prune, and call temporal the heads that stay in at least 90 % of the circuits of some year and in none of an
invariant fact. The graphs they released do not satisfy that rule, which is best read as a ranking by frequency.
Here nodes are attributed, in 5 steps (within 0.03 of a share of what 30 give on SmolLM2-135M), thresholds on the
share are headlab's, and the rest is left to the statistics. That objects are told apart by first tokens, and that
the embeddings alone are interpolated, is as theirs. ``analyses/temporal_heads.py`` puts the published effects of
ablating their heads beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from headlab.attention.heads import Head
from headlab.errors import PromptError
from headlab.roles.base import Arrays, Behaviour, Detail, Look, Measurement, Probing, Role, register
from headlab.roles.scores import RoleInfo
from headlab.roles.year_effects import (
    ablation_effects,
    attribution,
    differences,
    ends_of,
    followed,
    key,
    patched_effects,
)
from headlab.tasks import (
    Facts,
    RecordError,
    TimePair,
    TimePrompts,
    event_pairs,
    facts_of_records,
    invariant_pairs,
    temporal_facts,
    temporal_pairs,
)

#: Least share of the effect of a claimed head, and least distance from the null: headlab's own.
MIN_SHARE = 0.05
#: Heads of most attribution that are also patched and ablated.
TOP = 12
#: Pairs that these are ablated on, at most, of each kind.
ABLATED_ON = 8
_BEHAVIOUR_PAIRS = 24

SCHEMA: dict[str, Any] = {
    "title": "temporal",
    "description": "A fact that changes with the time (template and answers), or one that does not (template, "
    "times, answer and foil). Without facts of the second kind headlab's own are the null.",
    "type": "object",
    "properties": {
        "template": {
            "description": "The question as a text that ends where the answer begins, with {time} once.",
            "type": "string",
            "pattern": r"\{time\}",
        },
        "answers": {
            "description": "What is right by time, at least two. All times must be of as many tokens, and "
            "different answers must begin with different tokens. n times give up to n / 2 pairs.",
            "type": "object",
            "minProperties": 2,
            "additionalProperties": {"type": "string", "minLength": 1},
        },
        "times": {
            "description": "Times under which nothing changes, at least two, of as many tokens.",
            "type": "array",
            "minItems": 2,
            "uniqueItems": True,
            "items": {"type": "string", "minLength": 1},
        },
        "answer": {
            "description": "What is right at every time.",
            "type": "string",
            "minLength": 1,
        },
        "foil": {"description": "What never is.", "type": "string", "minLength": 1},
    },
    "required": ["template"],
    "oneOf": [
        {"required": ["answers"]},
        {"required": ["times", "answer", "foil"]},
    ],
    "dependentSchemas": {
        "answers": {"properties": {"times": False, "answer": False, "foil": False}}
    },
    "additionalProperties": False,
    "examples": [
        {
            "template": "In {time}, the chancellor of Germany was",
            "answers": {"1995": "Helmut Kohl", "2001": "Gerhard Schröder", "2010": "Angela Merkel"},
        },
        {
            "template": "In {time}, the shape of a football was",
            "times": ["1995", "2010"],
            "answer": "round",
            "foil": "square",
        },
    ],
}


def year_effect(probing: Probing) -> Float[np.ndarray, " prompt"]:
    """Half the total effect T of the year: how far, in nats, the right object leads, the mean over both years.

    Of pairs of as many facts as there are, whether or not the model follows them, so that the same pairs are looked
    at under every edit; of another seed than those that are scored.
    """
    prompts, facts = _facts(probing)
    groups = temporal_pairs(prompts, facts, probing.seed + 1)
    pairs = [group[0] for group, _ in zip(groups, range(_BEHAVIOUR_PAIRS), strict=False)]
    ends = differences(probing.model, pairs)
    return (ends[:, 0] - ends[:, 1]) / 2


class Temporal(Role):
    """See the module's docstring."""

    info = RoleInfo(
        name="temporal",
        title="Temporal",
        question="Does the head carry the year to what the model says is true in that year?",
        statistic="attribution, by integrated gradients at z, of the change that another year makes to the logit "
        "difference of two objects, as a share of the whole change",
        null="the harder of two: the same attribution on facts that no year changes, under the same years; and on the "
        "same facts with the head's attention spread evenly",
        decision="score ≥ 0.05 and at least 0.05 above the null, at q ≤ the false-discovery rate",
        reference="Park et al. 2025, Does time have its place? Temporal heads; nodes in place of edges, and the "
        "thresholds, are headlab's",
        min_score=MIN_SHARE,
        min_effect=MIN_SHARE,
        row_convention="z of every position; logits of the last position, which predicts the object",
        sink_convention="kept; where attention is spread evenly, that on the first token stays where it is",
        reduction="sum over positions, over the pairs' mean whole change; then mean over pairs",
    )
    schema: ClassVar[dict[str, Any]] = SCHEMA
    behaviour = Behaviour("lead of the object that is right in the year (nats)", year_effect)

    def measure(self, probing: Probing) -> Measurement:
        """Run the probe."""
        if any(layer.stack != "decoder" for layer in probing.model.spec.layers):
            return Measurement.not_measurable(
                probing, "it takes a model that predicts what follows"
            )
        try:
            prompts, facts = _facts(probing)
        except RecordError:
            raise
        except PromptError as error:  # no reason to give up the other roles of a run
            return Measurement.not_measurable(probing, str(error))
        found = followed(probing, temporal_pairs(prompts, facts, probing.seed))
        if not found.pairs:
            return Measurement.not_measurable(probing, found.said)
        steady, moved = _steady(probing, prompts, facts, found.pairs)
        if not steady:
            return Measurement.not_measurable(probing, "the tokenizer has no words for the null")
        total = float((found.ends[:, 0] - found.ends[:, 1]).mean())
        own, even = _attributed(probing, "temporal", found.pairs)
        still, _ = _attributed(probing, "invariant", steady)
        rows = [part / total for part in own]
        values = np.stack([row.sum(-1) for row in rows])
        even_null = np.stack([part.sum(-1) for part in even]) / total
        still_null = np.stack([part.sum(-1) for part in still]) / total
        still_null = still_null[np.arange(len(values)) % len(steady)]
        null = np.where(even_null.mean(0) > still_null.mean(0), even_null, still_null)
        at_time = [
            row[..., slice(*pair.span)].sum(-1) for pair, row in zip(found.pairs, rows, strict=True)
        ]
        at_end = [row[..., -1] for row in rows]
        looks = tuple(
            Look(np.array(pair.clean), np.arange(len(pair.clean)), row)
            for pair, row in zip(found.pairs[:2], rows, strict=False)
        )
        moved_still = still_null * total / max(moved, 1e-9)
        means: dict[str, tuple[Sequence[np.ndarray], str]] = {
            "share_at_time": (at_time, "share of the effect through z at the tokens of the time"),
            "share_at_end": (at_end, "share of the effect through z at the last position"),
            "even_share": ([*even_null], "share of the effect if attention were spread evenly"),
            "invariant_share": (
                [*moved_still],
                "share of what the change of year does to facts that it should not change",
            ),
        }
        details = {name: Detail(np.mean(x, 0), said) for name, (x, said) in means.items()}
        events = tuple(event_pairs(prompts, facts, found.pairs))
        details |= _exact(probing, values.mean(0), total, found.pairs, steady, events)
        return Measurement(values, null, looks, {(-1, -1): found.said}, details)


def _facts(probing: Probing) -> tuple[TimePrompts, Facts]:
    """What prompts are made with and of: the user's facts, or headlab's."""
    model = probing.model
    prompts = TimePrompts(model.tokenizer, probing.bos, model.spec.max_context)
    if probing.records is None:
        return prompts, temporal_facts()
    return prompts, facts_of_records(prompts, probing.records)


def _steady(
    probing: Probing, prompts: TimePrompts, facts: Facts, pairs: tuple[TimePair, ...]
) -> tuple[tuple[TimePair, ...], float]:
    """As many pairs of invariant facts, where there are so many, each turned so that its whole effect is ≥ 0.

    Returns:
        The pairs, and the mean of their whole effects in nats.
    """
    made = invariant_pairs(prompts, facts, [pair.times for pair in pairs], probing.seed)
    steady = [pair for pair, _ in zip(made, pairs, strict=False)]
    if not steady:
        return (), 0.0
    effects = -np.diff(ends_of(probing, "invariant", steady), axis=1)[:, 0]
    turned = tuple(
        pair if effect >= 0 else pair.swapped for pair, effect in zip(steady, effects, strict=True)
    )
    return turned, float(np.abs(effects).mean())


def _attributed(
    probing: Probing, kind: str, pairs: tuple[TimePair, ...]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Attributions in nats, [layer, head, position] per pair: with own attention and with even attention."""
    found = []
    for at, pair in enumerate(pairs):
        probing.tell(f"{kind} fact {at + 1} of {len(pairs)}")
        found.append(
            probing.part(f"temporal-{kind}", key([pair]), partial(_attribution, probing, pair))
        )
    return [part["own"] for part in found], [part["even"] for part in found]


def _attribution(probing: Probing, pair: TimePair) -> Arrays:
    return asdict(attribution(probing.model, pair))


def _exact(
    probing: Probing,
    scores: Float[np.ndarray, "layer head"],
    total: float,
    pairs: tuple[TimePair, ...],
    steady: tuple[TimePair, ...],
    events: tuple[TimePair, ...],
) -> dict[str, Detail]:
    """Patches and ablations of the heads of most attribution, which says at one step what gradients only guess."""
    known = np.argwhere(~np.isnan(scores))
    ranked = known[np.argsort(-scores[tuple(known.T)])][:TOP]
    top = [Head(int(layer), int(head)) for layer, head in ranked]
    effects: dict[str, tuple[np.ndarray, str]] = {}

    def remember(name: str, asked: Sequence[TimePair], run: Callable[[], np.ndarray]) -> np.ndarray:
        probing.tell(f"{name} of {len(top)} heads")
        ids = np.r_[key(asked), ranked.ravel()]
        return probing.part(f"temporal-{name}", ids, lambda: {"effects": run()})["effects"]

    patched = remember("patched", pairs, lambda: patched_effects(probing.model, pairs, top).mean(1))
    effects["patched_effect"] = (
        patched / total,
        "share of the effect that goes when z of this head alone is patched in from the other year",
    )
    for name, asked, of in (
        ("ablation_temporal", pairs, "temporal facts"),
        ("ablation_invariant", steady, "facts that no year changes"),
        ("ablation_events", events, "temporal facts whose year is named by an event"),
    ):
        few = asked[:ABLATED_ON]
        if few:
            run = partial(ablation_effects, probing.model, few, top)
            said = f"points that zeroing z of this head adds to the right object's probability of two, on {of}"
            effects[name] = remember(name, few, run), said
    found = {}
    for name, (effect, meaning) in effects.items():
        spread = np.full(scores.shape, np.nan)
        spread[tuple(ranked.T)] = effect
        found[name] = Detail(spread, meaning)
    return found


register(Temporal())
