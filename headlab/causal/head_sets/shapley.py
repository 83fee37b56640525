"""Shapley values of heads: each head's fair share of a metric (Shapley 1953; Held & Yang 2022).

φ_i is the mean, over all orders in which heads are taken out of the model, of what taking out head i costs:
v(S) − v(S∖i), where S are the heads still there. Values sum to v(all) − v(none). Held & Yang estimate them on random
orders from the full model downward, cut off when half the heads are gone, and stop sampling a head once an empirical
Bernstein bound says it is not harmful; then they prune the heads of negative value.

What differs here from their code:

* its bound is std·√(2 ln(3/δ))/n, without a root over n, and so too narrow. :class:`Bernstein` has the root, pays for
  every look it takes and knows that differences of a metric in [0, 1] span 2, not 1; ``as_published=True`` is theirs;
* a head that an order does not reach before its cut gets no sample from it, instead of a share of nothing; values of
  cut orders are mean costs in mostly whole models, and no longer sum to the total (``Shapley.total`` is then None).

The core, :func:`shapley_values`, plays any game: a function of sets. :func:`shapley_heads` plays the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from headlab.arguments import finite_number, seed_number, whole_number
from headlab.attention import HeadsLike
from headlab.causal.head_sets.stopping import Bernstein
from headlab.errors import PlanError
from headlab.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

    from headlab.causal.metrics import Metric
    from headlab.model import Model

#: Values of coalitions, [coalition, prompt] (or [coalition]), for ``present`` [coalition, player].
Game: TypeAlias = Callable[[Bool[np.ndarray, "coalition player"]], np.ndarray]
_Z = 1.959963984540054  # 97.5 % of a normal distribution


@dataclass(frozen=True)
class Shapley:
    """Shapley values.

    Attributes:
        frame: One row per player, in the order given: ``player``; ``value``; ``error``, the standard error from
            sampling orders; ``ci_low`` and ``ci_high``, 95 % from that error; ``prompts_low`` and ``prompts_high``,
            95 % bootstrap over prompts; ``n``, samples (pairs where antithetic); ``stopped``, by the stopping rule.
        values: Value per prompt, [player, prompt].
        full: Value with all players, [prompt].
        empty: Value with none, [prompt]; None where every order was cut off before.
        about: How they were found.
    """

    frame: pd.DataFrame
    values: Float[np.ndarray, "player prompt"] = field(repr=False)
    full: Float[np.ndarray, " prompt"] = field(repr=False)
    empty: Float[np.ndarray, " prompt"] | None = field(repr=False)
    about: dict[str, Any]

    @property
    def total(self) -> float | None:
        """v(all) − v(none), which the values sum to; None where orders were cut or players stopped early."""
        if self.empty is None or bool(self.frame["stopped"].any()):
            return None
        return float(self.full.mean() - self.empty.mean())

    @property
    def scores(self) -> dict[str, float]:
        """Value by player, as :func:`headlab.causal.pruning_curve` takes them."""
        return dict(zip(self.frame["player"], self.frame["value"].astype(float), strict=True))


def shapley_values(
    game: Game,
    players: Sequence[str],
    *,
    n_permutations: int = 100,
    truncation: float = 1.0,
    antithetic: bool = False,
    stop: Bernstein | None = None,
    at_once: int = 10,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Shapley:
    """Shapley values of a game by sampling orders from the full coalition downward.

    Untruncated and without a stopping rule, values sum to v(all) − v(none) exactly, whatever the number of orders.

    Args:
        game: Gives the value of coalitions.
        players: Their names.
        n_permutations: Orders to draw at most; with ``antithetic``, half of them are drawn and half reversed.
        truncation: Share of the players after whose leaving an order is cut off; Held & Yang: 0.5.
        antithetic: Follow each order with its reverse, which cancels part of the noise (Mitchell et al. 2022).
        stop: When to stop sampling a player; by default only after ``n_permutations``.
        at_once: Orders valued in one call of the game and between two looks of the stopping rule.
        seed: Seed of the orders.
        tell: Told how far it is.

    Raises:
        PlanError: An argument is out of range, the game gives values of another shape or that are not finite, or a
            marginal exceeds the range that the stopping rule was told.
    """
    n_players = len(players)
    _check(players, n_permutations, truncation, antithetic, at_once, stop, seed)
    # At least one player leaves in every order; a pair of orders reaches everybody only from half of them on.
    depth = max(1, int(np.ceil(truncation * n_players - 1e-9)))
    rng = np.random.default_rng(seed)
    tally: _Tally | None = None
    active = np.ones(n_players, dtype=bool)
    ends: dict[str, np.ndarray] = {}
    done, look = 0, 0
    while done < n_permutations and active.any():
        orders = _orders(rng, n_players, min(at_once, n_permutations - done), antithetic)
        marginals = _marginals(game, orders, depth, active, ends)  # [order, player, prompt]
        if tally is None:
            tally = _Tally(n_players, marginals.shape[2])
        tally.add(_paired(marginals) if antithetic else marginals)
        done, look = done + len(orders), look + 1
        if stop is not None:
            _check_span(tally, stop, players)
            active &= ~stop.done(tally.mean, tally.deviation, tally.n, look)
        tell(f"{done} of {n_permutations} orders; {int(active.sum())} of {n_players} players open")
    assert tally is not None  # n_permutations is at least 1
    about = {
        "n_permutations": done,
        "truncation": truncation,
        "antithetic": antithetic,
        "seed": seed,
        "stop": None if stop is None else vars(stop).copy(),
    }
    frame = _frame(players, tally, ~active, seed)
    empty = ends.get("empty") if depth == n_players else None
    return Shapley(frame, tally.values, ends["full"], empty, about)


def shapley_heads(
    model: Model,
    prompts: Any,
    metric: Metric | Callable[..., Any],
    *,
    groups: Literal["heads", "layers"] | Mapping[str, HeadsLike] = "heads",
    heads: HeadsLike | None = None,
    kind: Literal["zero", "mean"] = "zero",
    reference: Any = None,
    n_permutations: int = 100,
    truncation: float = 1.0,
    antithetic: bool = False,
    stop: Bernstein | None = None,
    at_once: int = 2,
    out: str | Path | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Shapley:
    """Shapley values of heads, or of groups of heads, for a metric on prompts.

    Args:
        model: The model.
        prompts: The prompts.
        metric: The metric; a higher value counts as better, so heads of negative value of a loss are the useful ones.
        groups: ``"heads"``, ``"layers"``, or groups by name, as ``{"name movers": "9.9, 10.0"}``.
        heads: The heads that play; the others always stay. By default all; not with groups by name, which say it.
        kind: What takes a head out: ``"zero"`` or ``"mean"`` z.
        reference: Prompts for the mean.
        out: Folder for finished parts, so that a killed run resumes.
        n_permutations, truncation, antithetic, stop, at_once, seed, tell: As in :func:`shapley_values`.

    Raises:
        HeadError: A head does not exist or is in two groups.
        PlanError: As in :func:`shapley_values`; or the metric is not finite on a prompt.
    """
    from headlab.causal.removal import Removal, groups_of
    from headlab.causal.sweep import Sweep

    named = groups_of(model, groups, heads)
    players = tuple(named)
    _check(players, n_permutations, truncation, antithetic, at_once, stop, seed)  # before any run
    removal = Removal(model, kind, reference=reference)
    about = {
        "removal": removal.about,
        "groups": [[name, [str(head) for head in named[name]]] for name in players],
    }
    sweep = Sweep(model, prompts, metric, out=out, about=about)

    def game(present: np.ndarray) -> np.ndarray:
        gone = [[players[at] for at in np.flatnonzero(~row)] for row in present]
        variants = [removal.edits([head for name in row for head in named[name]]) for row in gone]
        return sweep.run(variants, [np.packbits(row).tobytes().hex() for row in present])

    return shapley_values(
        game,
        players,
        n_permutations=n_permutations,
        truncation=truncation,
        antithetic=antithetic,
        stop=stop,
        at_once=at_once,
        seed=seed,
        tell=tell,
    )


class _Tally:
    """Running mean and variance of each player's marginals; the variance is of their mean over prompts."""

    def __init__(self, n_players: int, n_prompts: int) -> None:
        self.n = np.zeros(n_players)
        self._sums = np.zeros((n_players, n_prompts))
        self._mean = np.zeros(n_players)
        self._squares = np.zeros(n_players)
        self.low = np.full(n_players, np.inf)
        self.high = np.full(n_players, -np.inf)

    def add(self, samples: np.ndarray) -> None:
        """Count samples [sample, player, prompt]; NaN: the player was not reached."""
        for sample in samples:
            got = ~np.isnan(sample[:, 0])
            self.n += got
            self._sums[got] += sample[got]
            mean = sample[got].mean(1)
            self.low[got] = np.minimum(self.low[got], mean)
            self.high[got] = np.maximum(self.high[got], mean)
            step = mean - self._mean[got]
            self._mean[got] += step / self.n[got]  # Welford: sums of squares would cancel
            self._squares[got] += step * (mean - self._mean[got])

    @property
    def values(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return self._sums / self.n[:, None]

    @property
    def mean(self) -> np.ndarray:
        return self.values.mean(1)

    @property
    def deviation(self) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self._squares / np.where(self.n > 1, self.n - 1, np.nan))


def _orders(rng: np.random.Generator, n_players: int, n: int, antithetic: bool) -> np.ndarray:
    """Orders in which players leave, [order, step]; reversed ones right after their own."""
    drawn = np.stack([rng.permutation(n_players) for _ in range(n // 2 if antithetic else n)])
    if not antithetic:
        return drawn
    return np.stack([drawn, drawn[:, ::-1]], 1).reshape(-1, n_players)


def _marginals(
    game: Game, orders: np.ndarray, depth: int, active: np.ndarray, ends: dict[str, np.ndarray]
) -> np.ndarray:
    """What each player's leaving costs, [order, player, prompt]; NaN where it left too late or is settled."""
    n_orders, n_players = orders.shape
    place = orders.argsort(1)
    # Coalition k of an order has lost its first k players. Only those next to an open player are valued.
    lost = np.arange(depth + 1)
    present = place[:, None, :] >= lost[None, :, None]  # [order, lost, player]
    leaves_open = active[orders[:, :depth]]
    wanted = np.zeros((n_orders, depth + 1), dtype=bool)
    wanted[:, :-1] |= leaves_open
    wanted[:, 1:] |= leaves_open
    known = np.zeros_like(wanted)
    if "full" in ends:  # valued once, and the same in every order
        known[:, 0] = True
    if "empty" in ends:
        known[:, n_players:] = True
    asked = wanted & ~known
    valued: dict[bytes, np.ndarray] = {}
    if asked.any():
        unique = np.unique(present[asked], axis=0)
        valued = {
            key.tobytes(): value for key, value in zip(unique, _valued(game, unique), strict=True)
        }
    if (
        "full" not in ends
    ):  # in the first call every player is open, so both ends are among the asked
        ends["full"] = valued[present[0, 0].tobytes()]
    if depth == n_players and "empty" not in ends:
        ends["empty"] = valued[present[0, depth].tobytes()]
    values = np.full((n_orders, depth + 1, len(ends["full"])), np.nan)
    for order, step in np.argwhere(asked):
        values[order, step] = valued[present[order, step].tobytes()]
    values[:, 0] = ends["full"]
    if depth == n_players:
        values[:, depth] = ends["empty"]
    steps = values[:, :-1] - values[:, 1:]  # [order, step, prompt]
    steps[~leaves_open] = np.nan
    marginals = np.full((n_orders, n_players, values.shape[2]), np.nan)
    np.put_along_axis(marginals, orders[:, :depth, None], steps, 1)
    return marginals


def _valued(game: Game, present: np.ndarray) -> np.ndarray:
    values = np.asarray(game(present), dtype=np.float64)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim != 2 or len(values) != len(present) or values.shape[1] == 0:
        raise PlanError(
            f"the game must give values [coalition, prompt] of {len(present)} coalitions, not "
            f"{list(values.shape)}"
        )
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
        raise PlanError(
            f"the game gives a value that is not finite with {int(present[at].sum())} of {present.shape[1]} "
            "players present; use a metric that is finite everywhere"
        )
    return values


def _paired(marginals: np.ndarray) -> np.ndarray:
    """Means over each order and its reverse, [pair, player, prompt], of those that reached the player."""
    pairs = marginals.reshape(-1, 2, *marginals.shape[1:])
    reached = ~np.isnan(pairs)
    with np.errstate(invalid="ignore"):
        return np.where(reached, pairs, 0).sum(1) / reached.sum(1)


def _frame(players: Sequence[str], tally: _Tally, stopped: np.ndarray, seed: int) -> pd.DataFrame:
    import pandas as pd

    with np.errstate(invalid="ignore", divide="ignore"):
        error = tally.deviation / np.sqrt(tally.n)
    values = tally.values
    low = high = np.full(len(players), np.nan)
    if values.shape[1] > 1:
        low, high = bootstrap_interval(values.T, seed)
    return pd.DataFrame(
        {
            "player": list(players),
            "value": tally.mean,
            "error": error,
            "ci_low": tally.mean - _Z * error,
            "ci_high": tally.mean + _Z * error,
            "prompts_low": low,
            "prompts_high": high,
            "n": tally.n.astype(int),
            "stopped": stopped,
        }
    )


def _check(
    players: Sequence[str],
    n_permutations: int,
    truncation: float,
    antithetic: bool,
    at_once: int,
    stop: Bernstein | None,
    seed: int,
) -> None:
    seed_number(seed)
    if len(set(players)) != len(players) or not players:
        raise PlanError(f"players={list(players)!r:.60} must be at least one, each named once")
    for name, number in (("n_permutations", n_permutations), ("at_once", at_once)):
        if whole_number(number, name, 1) % 2 and antithetic:
            raise PlanError(f"{name}={number} must be even, since antithetic orders come in pairs")
    if not 0 < finite_number(truncation, "truncation") <= 1:
        raise PlanError(f"truncation={truncation!r} must be a share above 0 and at most 1")
    if stop is not None and not isinstance(stop, Bernstein):
        raise PlanError(f"stop={stop!r:.60} must be a stopping rule, as Bernstein(), or None")


def _check_span(tally: _Tally, stop: Bernstein, players: Sequence[str]) -> None:
    """The bound assumes a range; two marginals further apart refute it."""
    seen = tally.high - tally.low
    at = int(seen.argmax())
    if seen[at] > stop.span:
        raise PlanError(
            f"marginals of {players[at]} differ by {seen[at]:.3g}, more than span={stop.span:g}; give Bernstein the "
            "true range of the metric's differences"
        )


__all__ = ["Bernstein", "Game", "Shapley", "shapley_heads", "shapley_values"]
