"""How much of a model's behaviour a circuit carries: faithfulness, and its curve over sizes (MIB; Mueller et al. 2025).

    f = (m(C) − m(∅)) / (m(N) − m(∅)),

m being the metric's mean over prompts, C the circuit, N the whole model and ∅ the empty circuit. Everything outside a
circuit computes what it computes in the corrupted run (or its mean, or nothing). Over circuits of 0.1 to 100 % of the
edges, CPR is the area under f for the ranking by score, and CMD the area under |1 − f| for the ranking by |score|, both
by trapezoids over the *linear* share of edges: MIB's code computes logarithms of the shares and then does not use them.
So the largest share, 50 to 100 %, makes half of either number; look at the curve.

The empty and the whole circuit have f = 0 and f = 1 by definition, whatever the circuit finder did: 100 % says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from jaxtyping import Float

from headlab.arguments import finite_number, seed_number
from headlab.attention import Head, keep
from headlab.causal.circuits.circuit import Circuit
from headlab.causal.circuits.head_names import heads_of
from headlab.causal.prompt_pairs import pairs
from headlab.causal.removal import Removal
from headlab.causal.sweep import Sweep
from headlab.errors import PlanError
from headlab.statistics import RESAMPLES

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal.metrics import Metric
    from headlab.model import Model
    from headlab.prompts import Prompt

#: Shares of the edges (or heads) that MIB evaluates.
SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Runs(Protocol):
    """What runs circuits: :class:`~headlab.causal.EdgeRuns` for edges, :class:`HeadRuns` for heads.

    Attributes:
        model: The model.
        clean: Metric of the whole model, [prompt].
        corrupted: Metric of the empty circuit, [prompt].
    """

    model: Model
    clean: Float[np.ndarray, " prompt"]
    corrupted: Float[np.ndarray, " prompt"]

    def run(self, kept: Sequence[Iterable[Any]]) -> Float[np.ndarray, "circuit prompt"]:
        """Metric of circuits, given as sets of edges or heads."""
        ...


class HeadRuns:
    """Runs circuits of heads: the heads outside are taken out at z; MLPs and embedding always stay.

    Args:
        model: The model.
        clean: The prompts.
        corrupted: As many prompts of the same lengths, where ``kind`` is ``"patch"``.
        metric: What to measure.
        kind: What the heads outside give instead: ``"patch"``, their z in the corrupted run, as MIB; ``"mean"``, their
            mean z over ``reference``; or ``"zero"``.
        reference: Prompts for the mean.
        out: Folder for finished parts, so that a killed run resumes.
        tell: Told how far it is.

    Attributes:
        clean: Metric of the whole model, [prompt].
        corrupted: Metric with every head taken out, [prompt].

    Raises:
        PromptError: Clean and corrupted prompts differ in number or length.
        PlanError: What the kind needs is missing, or the metric does not fit.
    """

    def __init__(
        self,
        model: Model,
        clean: Prompt,
        corrupted: Prompt | None,
        metric: Metric | Callable[..., Any],
        *,
        kind: Literal["patch", "mean", "zero"] = "patch",
        reference: Any = None,
        out: Any = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        source = None
        if kind == "patch":
            if corrupted is None:
                raise PlanError("kind='patch' needs corrupted= prompts to take values from")
            both = pairs(model, clean, corrupted)
            clean = both.clean
            source = model.trace(both.corrupted, keep=[keep.tensors("z")], logits="none")
        self.model = model
        self._removal = Removal(model, kind, reference=reference, source=source)
        self._sweep = Sweep(model, clean, metric, out=out, about=self._removal.about, tell=tell)
        self._heads = frozenset(
            Head(layer, head)
            for layer, facts in enumerate(model.spec.layers)
            for head in range(facts.n_heads)
        )
        self.clean = self._sweep.clean
        self.corrupted = self.run([()])[0]

    def run(self, kept: Sequence[Any]) -> Float[np.ndarray, "circuit prompt"]:
        """Metric of circuits, each given as a :class:`~headlab.causal.Circuit` or as heads by any names.

        Raises:
            HeadError: A name cannot be read, or the model has no such head.
            PlanError: What is given is no list of circuits, or one is of edges or of another model.
        """
        if isinstance(kept, str) or not isinstance(kept, Iterable):
            raise PlanError(
                f"kept={kept!r:.60} must be a list of circuits, each of them a set of heads, as [['L0H1', 'L2H0']]"
            )
        sets = [frozenset(self._kept(one)) for one in kept]
        distinct = list(dict.fromkeys(sets))
        variants = [self._removal.edits(sorted(self._heads - heads)) for heads in distinct]
        labels = [" ".join(map(str, sorted(heads))) or "no head" for heads in distinct]
        values = self._sweep.run(variants, labels)
        return values[[distinct.index(heads) for heads in sets]]

    def _kept(self, circuit: Any) -> tuple[Head, ...]:
        return heads_of(
            _fitting(self, circuit) if isinstance(circuit, Circuit) else circuit, self.model
        )


@dataclass(frozen=True)
class Faithfulness:
    """Faithfulness of one circuit.

    Attributes:
        value: f; 1 for the whole model, 0 for the empty circuit; it may exceed 1 or be negative.
        ci_low, ci_high: 95 % bootstrap interval over prompts; NaN for a single prompt.
        metric: Mean metric of the circuit.
        full, empty: Mean metric of the whole model and of the empty circuit.
        n: Edges or heads of the circuit that lie on a path to the logits.
        weighted_edges: See :attr:`~headlab.causal.Circuit.weighted_edges`.
    """

    value: float
    ci_low: float
    ci_high: float
    metric: float
    full: float
    empty: float
    n: int
    weighted_edges: float


@dataclass(frozen=True)
class FaithfulnessCurve:
    """Faithfulness over circuit sizes.

    Attributes:
        frame: One row per ranking and size: ``ranking`` (``"score"`` or ``"absolute"``), ``share``, ``n`` (edges or
            heads asked for), ``n_kept`` (without dead ends), ``weighted_edges``, ``metric``, ``faithfulness``,
            ``ci_low``, ``ci_high``.
        cpr: Area under f of the ranking by score, with its 95 % interval: (value, low, high). At most the largest share
            less the smallest, 0.999, for f between 0 and 1.
        cmd: Area under |1 − f| of the ranking by absolute score: (value, low, high); 0 is best.
        full, empty: Metric of the whole model and of the empty circuit, [prompt].
    """

    frame: pd.DataFrame
    cpr: tuple[float, float, float]
    cmd: tuple[float, float, float]
    full: Float[np.ndarray, " prompt"] = field(repr=False)
    empty: Float[np.ndarray, " prompt"] = field(repr=False)


def faithfulness(runs: Runs, circuit: Circuit, *, seed: int = 0) -> Faithfulness:
    """Faithfulness of one circuit as it is, without its dead ends.

    Args:
        runs: ``EdgeRuns`` for a circuit of edges, :class:`HeadRuns` for one of heads.
        circuit: The circuit.
        seed: Seed of the bootstrap over prompts. Draws of prompts in which whole and empty circuit measure the same,
            as of a single pair that is not told apart, have no faithfulness and are left out.

    Raises:
        PlanError: The circuit does not fit the model or the runs, or whole and empty circuit measure the same.
    """
    seed_number(seed)
    alive = _fitting(runs, circuit).without_dead_ends()
    values = runs.run([_items(alive)])
    f, draws = _ratios(values, runs.clean, runs.corrupted, seed)
    low, high = _interval(draws, len(runs.clean))
    return Faithfulness(
        float(f[0]),
        float(low[0]),
        float(high[0]),
        float(values.mean()),
        float(runs.clean.mean()),
        float(runs.corrupted.mean()),
        len(alive),
        alive.weighted_edges,
    )


def faithfulness_curve(
    runs: Runs, circuit: Circuit, *, sizes: Sequence[float] = SIZES, seed: int = 0
) -> FaithfulnessCurve:
    """Faithfulness of the best n edges (or heads) of a ranking, for several n, with CPR and CMD.

    Of n = ⌊share · all⌋ edges, those without a path from embedding to logits are dropped, as MIB does. Where corruption
    raises the metric (a loss), the ranking by score is turned round: what brings the model back comes first.

    Args:
        runs: ``EdgeRuns`` for a circuit of edges, :class:`HeadRuns` for one of heads.
        circuit: The ranking: it must score as many edges, or heads, as the largest size takes.
        sizes: Shares of all the model's edges, or heads, rising, above 0 and at most 1.
        seed: Seed of the bootstrap, as in :func:`faithfulness`.

    Raises:
        PlanError: Sizes do not rise, the circuit is too small, does not fit, or whole and empty measure the same.
    """
    import pandas as pd

    seed_number(seed)
    shares = _sizes(sizes)
    possible = _fitting(runs, circuit).n_possible
    counts = [int(share * possible + 1e-9) for share in shares]
    if counts[-1] > len(circuit):
        raise PlanError(
            f"the circuit scores {len(circuit)} of the model's {possible} {circuit.kind}, but a curve up to "
            f"{shares[-1]:.3g} needs {counts[-1]}; score them all, or give smaller sizes="
        )
    signed = circuit
    if runs.clean.mean() < runs.corrupted.mean():
        signed = circuit.negated()
    rankings: list[tuple[Literal["score", "absolute"], list[Circuit]]] = [
        ("score", [signed.top(n).without_dead_ends() for n in counts]),
        ("absolute", [circuit.top(n, "absolute").without_dead_ends() for n in counts]),
    ]
    values = runs.run([_items(one) for _, circuits in rankings for one in circuits])
    f, draws = _ratios(values, runs.clean, runs.corrupted, seed)
    low, high = _interval(draws, len(runs.clean))
    rows = [
        (ranking, share, n, len(one), one.weighted_edges)
        for ranking, circuits in rankings
        for share, n, one in zip(shares, counts, circuits, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["ranking", "share", "n", "n_kept", "weighted_edges"])
    frame = frame.assign(metric=values.mean(1), faithfulness=f, ci_low=low, ci_high=high)
    by_score, by_absolute = slice(0, len(shares)), slice(len(shares), None)
    cpr_low, cpr_high = _interval(area(shares, draws[:, by_score]), len(runs.clean))
    cmd_low, cmd_high = _interval(area(shares, abs(1 - draws[:, by_absolute])), len(runs.clean))
    return FaithfulnessCurve(
        frame,
        (float(area(shares, f[by_score])), float(cpr_low), float(cpr_high)),
        (float(area(shares, abs(1 - f[by_absolute]))), float(cmd_low), float(cmd_high)),
        runs.clean,
        runs.corrupted,
    )


def area(shares: Sequence[float], heights: Float[np.ndarray, "*draw size"]) -> Any:
    """Area under a curve by trapezoids over the last axis, between the first and the last share."""
    x = np.asarray(shares)
    return (np.diff(x) * (heights[..., 1:] + heights[..., :-1]) / 2).sum(-1)


def _ratios(
    values: np.ndarray, full: np.ndarray, empty: np.ndarray, seed: int
) -> tuple[Float[np.ndarray, " circuit"], Float[np.ndarray, "draw circuit"]]:
    """f of means over the prompts, and over resampled prompts."""
    size = np.abs(full).max() + np.abs(empty).max()
    if abs(full.mean() - empty.mean()) <= 1e-12 * size:
        raise PlanError(
            f"the whole model and the empty circuit both measure {full.mean():.4g}, so faithfulness is undefined; use "
            "corrupted prompts that change the metric"
        )
    n = len(full)
    draws = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    weights = np.zeros((RESAMPLES, n))
    np.add.at(weights, (np.arange(RESAMPLES)[:, None], draws), 1 / n)

    def ratio(weights: np.ndarray) -> np.ndarray:
        nothing = weights @ empty[:, None]
        span = weights @ full[:, None] - nothing
        span = np.where(np.abs(span) > 1e-12 * size, span, np.nan)  # less is rounding
        found: np.ndarray = (weights @ values.T - nothing) / span
        return found

    return ratio(np.full((1, n), 1 / n))[0], ratio(weights)


def _interval(draws: np.ndarray, n_prompts: int) -> tuple[Any, Any]:
    if n_prompts < 2:
        return (np.full(draws.shape[1:], np.nan),) * 2
    known = draws[~np.isnan(draws).reshape(len(draws), -1).any(1)]
    if not len(known):
        return (np.full(draws.shape[1:], np.nan),) * 2
    low, high = np.percentile(known, [2.5, 97.5], axis=0)
    return low, high


def _items(circuit: Circuit) -> Iterable[Any]:
    return circuit.heads if circuit.kind == "heads" else circuit.edges


def _fitting(runs: Runs, circuit: Circuit) -> Circuit:
    if not isinstance(circuit, Circuit):
        raise PlanError(f"circuit={circuit!r:.60} must be a Circuit, as of Circuit.of_heads")
    circuit.check(runs.model)
    kind = "heads" if isinstance(runs, HeadRuns) else "edges"
    if circuit.kind != kind:
        raise PlanError(
            f"these runs are of circuits of {kind}, but this circuit is one of {circuit.kind}; use EdgeRuns for edges "
            "and HeadRuns for heads"
        )
    return circuit


def _sizes(sizes: Sequence[float]) -> list[float]:
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise PlanError(f"sizes={sizes!r:.60} must be a list of shares, as (0.1, 0.5, 1.0)")
    shares = [finite_number(share, "a share of sizes") for share in sizes]
    if len(shares) < 2 or sorted(set(shares)) != shares or not 0 < shares[0] <= shares[-1] <= 1:
        raise PlanError(f"sizes={list(sizes)} must be two or more rising shares above 0, up to 1")
    return shares


__all__ = [
    "SIZES",
    "Faithfulness",
    "FaithfulnessCurve",
    "HeadRuns",
    "Runs",
    "area",
    "faithfulness",
    "faithfulness_curve",
]
