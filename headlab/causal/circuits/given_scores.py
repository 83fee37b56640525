"""Scores of heads and edges as users and other procedures give them, under the names circuits have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headlab.arguments import is_finite
from headlab.attention import Head, parse_heads
from headlab.causal.graph import Edge
from headlab.errors import PlanError

if TYPE_CHECKING:
    from headlab.causal.effects import Effects
    from headlab.model import Model


def scores_of_heads(model: Model, scores: Any) -> dict[str, float]:
    """Scores by ``"L3H2"`` from scores by any name of heads.

    Raises:
        HeadError: A head does not exist.
        PlanError: They are no such scores, two names are one head, or a score is not finite.
    """
    if not isinstance(scores, Mapping):
        raise PlanError(
            f"scores={scores!r:.60} must give each head its score, as {{'L0H1': 0.5}}, or be Effects of heads"
        )
    named: dict[str, float] = {}
    for name, score in scores.items():
        for head in parse_heads(name, model.spec):
            if str(head) in named:
                raise PlanError(f"head {head} has two scores; give it one")
            named[str(head)] = _finite(score, f"head {head}")
    return named


def scores_of_effects(model: Model, effects: Effects) -> dict[Head, float]:
    """What each head gives to the metric, from effects of taking it out or of restoring it.

    An effect of a key/value group stands for each of its query heads.

    Raises:
        HeadError: The model has no such head.
        PlanError: Effects are of whole layers, or there are several of one head.
    """
    sign = 1 if effects.about.get("direction") == "denoising" else -1
    found: dict[Head, float] = {}
    rows = effects.frame[["layer", "head", "effect"]].itertuples(index=False, name=None)
    for layer, head, effect in rows:
        if head < 0:
            raise PlanError(
                "these are effects of whole layers, which are no heads; use by='head' or by='kv_group'"
            )
        parse_heads((int(layer), int(head)), model.spec)
        members = 1
        if effects.about.get("by") == "kv_group":  # the row names the group's first head
            facts = model.spec.layers[int(layer)]
            members = facts.n_heads // facts.n_kv_heads
        for each in range(int(head), int(head) + members):
            if Head(int(layer), each) in found:
                raise PlanError(
                    "these effects have several rows for one head; select one in .frame"
                )
            found[Head(int(layer), each)] = sign * float(effect)
    return found


def scores_of_edges(scores: Any) -> dict[Edge, float]:
    """Scores by :class:`Edge` from scores by tuples.

    Raises:
        PlanError: They are no such scores, an edge is written otherwise or twice, or a score is not finite.
    """
    if not isinstance(scores, Mapping):
        raise PlanError(
            f"scores={scores!r:.60} must give each edge its score, as {{('mlp2', 'logits'): 0.1}}, or be Edges"
        )
    named: dict[Edge, float] = {}
    for given, score in scores.items():
        texts = isinstance(given, tuple) and all(isinstance(part, str) for part in given)
        if not texts or len(given) not in (2, 3):
            raise PlanError(
                f"{given!r:.80} is no edge; write ('L0H1', 'L2H3', 'k'), ('embed', 'mlp2') or ('mlp2', 'logits')"
            )
        edge = Edge(*given)
        if edge in named:
            raise PlanError(f"edge {edge} has two scores; give it one")
        named[edge] = _finite(score, f"edge {edge}")
    return named


def _finite(score: Any, of: str) -> float:
    if not is_finite(score):
        raise PlanError(
            f"the score of {of} is {score!r:.60}; scores must be finite numbers, so leave it out"
        )
    return float(score)
