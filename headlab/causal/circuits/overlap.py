"""How much two circuits share, beside what chance would give (circuit reuse; Merullo, Eickhoff & Pavlick 2024)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from headlab.attention import Head
from headlab.causal.circuits.circuit import Circuit
from headlab.errors import PlanError


@dataclass(frozen=True)
class Overlap:
    """What circuit ``b`` shares with circuit ``a``.

    Chance: both drawn at random, of their sizes, from all heads or edges of the model (hypergeometric).

    Attributes:
        what: ``"heads"`` or ``"edges"``.
        n_a: How many ``a`` has.
        n_b: How many ``b`` has.
        n_shared: How many are in both.
        n_possible: How many the model has.
        jaccard: Shared over those in either; NaN where both are empty.
        recall: Share of ``a`` that is in ``b``; NaN where ``a`` is empty.
        precision: Share of ``b`` that is in ``a``; NaN where ``b`` is empty.
        chance_jaccard: Expectation of ``jaccard`` by chance.
        chance_recall: Expectation of ``recall`` by chance.
        p_value: Probability that chance shares at least as many.
    """

    what: Literal["heads", "edges"]
    n_a: int
    n_b: int
    n_shared: int
    n_possible: int
    jaccard: float
    recall: float
    precision: float
    chance_jaccard: float
    chance_recall: float
    p_value: float


def overlap(a: Circuit, b: Circuit, what: Literal["heads", "edges"] = "heads") -> Overlap:
    """Compare two circuits of one model, or of two of the same shape (other weights, another task).

    Args:
        a: The circuit that is to be found again.
        b: The other.
        what: Compare their heads (of edge circuits: the heads their edges touch), or their edges.

    Raises:
        PlanError: They are of models of different shapes, or a circuit of heads is to be compared by edges.
    """
    if what not in ("heads", "edges"):
        raise PlanError(f"what={what!r} must be 'heads' or 'edges'")
    for name, one in (("a", a), ("b", b)):
        if not isinstance(one, Circuit):
            raise PlanError(f"{name}={one!r:.60} must be a Circuit")
    if a.n_heads != b.n_heads or (what == "edges" and a.parallel != b.parallel):
        raise PlanError(
            f"the circuits are of models of different shapes, {a.model} and {b.model}, so their parts cannot be "
            "matched; compare circuits of one model"
        )
    ours: Collection[Head | tuple[str, ...]] = set(a.edges if what == "edges" else a.heads)
    theirs: Collection[Head | tuple[str, ...]] = set(b.edges if what == "edges" else b.heads)
    possible = a.n_possible if what == "edges" else sum(a.n_heads)
    shared = len(set(ours) & set(theirs))
    return _overlap(what, len(ours), len(theirs), shared, possible)


def _overlap(
    what: Literal["heads", "edges"], n_a: int, n_b: int, shared: int, possible: int
) -> Overlap:
    from scipy.stats import hypergeom

    counts = range(max(0, n_a + n_b - possible), min(n_a, n_b) + 1)
    weights = hypergeom.pmf(list(counts), possible, n_a, n_b)
    chance = sum(w * _ratio(k, n_a + n_b - k) for k, w in zip(counts, weights, strict=True))
    return Overlap(
        what,
        n_a,
        n_b,
        shared,
        possible,
        _ratio(shared, n_a + n_b - shared),
        _ratio(shared, n_a),
        _ratio(shared, n_b),
        float(chance),
        n_b / possible if n_a else float("nan"),
        float(hypergeom.sf(shared - 1, possible, n_a, n_b)),
    )


def _ratio(part: int, whole: int) -> float:
    return float(part / whole) if whole else float("nan")


__all__ = ["Overlap", "overlap"]
