"""Shapley values against enumeration of every order, and the stopping rule against its own promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tiny_models import build

import headlab as hl
from headlab.causal import metrics
from headlab.causal.head_sets.shapley import Bernstein, shapley_heads, shapley_values
from headlab.errors import HeadError, PlanError, UnsupportedError

PLAYERS = ("L0H0", "L0H1", "L1H0", "L1H1")
#: A game with interaction, [coalition, prompt]: bit i of the row's number says that player i is present.
TABLE = np.random.default_rng(3).normal(size=(16, 3))


def game(present: np.ndarray) -> np.ndarray:
    return TABLE[present @ (1 << np.arange(4))]


def by_enumeration(table: np.ndarray) -> np.ndarray:
    """Shapley's formula over subsets: Σ |S|!(n−|S|−1)!/n! · (v(S∪i) − v(S))."""
    n = 4
    values = np.zeros((n, table.shape[1]))
    for player in range(n):
        others = [other for other in range(n) if other != player]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for subset in itertools.combinations(others, size):
                code = sum(1 << member for member in subset)
                values[player] += weight * (table[code | 1 << player] - table[code])
    return values


class EveryOrder:
    """A stand-in for a generator: gives each of the 24 orders once."""

    def __init__(self) -> None:
        self._orders = itertools.permutations(range(4))

    def permutation(self, n: int) -> np.ndarray:
        return np.array(next(self._orders))


def test_all_orders_give_the_exact_values(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", _first(EveryOrder()))
    found = shapley_values(game, PLAYERS, n_permutations=24, at_once=5)
    assert found.values == pytest.approx(by_enumeration(TABLE), abs=1e-12)
    assert list(found.frame["value"]) == pytest.approx(list(by_enumeration(TABLE).mean(1)))
    assert found.frame["n"].tolist() == [24] * 4


def _first(stand_in):
    """default_rng that gives the stand-in once, then real generators."""
    real, given = np.random.default_rng, []
    return lambda seed: real(seed) if given else given.append(1) or stand_in


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("n_permutations", [2, 14])
def test_values_sum_to_the_total_whatever_the_number_of_orders(n_permutations, antithetic):
    found = shapley_values(
        game, PLAYERS, n_permutations=n_permutations, antithetic=antithetic, at_once=4, seed=1
    )
    total = TABLE[15] - TABLE[0]
    assert found.values.sum(0) == pytest.approx(total, abs=1e-12)
    assert found.total == pytest.approx(total.mean(), abs=1e-12)
    assert sum(found.scores.values()) == pytest.approx(total.mean(), abs=1e-12)


def test_sampled_values_lie_within_their_errors_of_the_exact_ones():
    exact = by_enumeration(TABLE).mean(1)
    found = shapley_values(game, PLAYERS, n_permutations=4000, seed=5).frame
    error = found["error"].to_numpy()
    assert np.abs(found["value"] - exact).max() < 4 * error.max()
    # The standard error itself: of marginals over all orders, from the subsets' weights.
    for player in range(4):
        samples = [
            TABLE[_code(order[at:])].mean() - TABLE[_code(order[at + 1 :])].mean()
            for order in itertools.permutations(range(4))
            for at in [order.index(player)]
        ]
        assert error[player] == pytest.approx(np.std(samples) / math.sqrt(4000), rel=0.05)
    half = (found["ci_high"] - found["value"]).to_numpy()
    assert half == pytest.approx(1.959964 * error, rel=1e-6)


def _code(members) -> int:
    return sum(1 << member for member in members)


def test_antithetic_orders_are_exact_for_games_of_pairs():
    """An order and its reverse together see each pair once from both ends."""
    pair = np.random.default_rng(0).normal(size=(4, 4))

    def quadratic(present: np.ndarray) -> np.ndarray:
        return np.einsum("ci,ij,cj->c", present, pair, present)

    found = shapley_values(quadratic, PLAYERS, n_permutations=2, antithetic=True, at_once=2)
    assert list(found.frame["value"]) == pytest.approx(list((pair + pair.T).sum(1) / 2), abs=1e-12)


def test_each_coalition_is_asked_for_once_per_call_and_both_ends_once_in_all():
    asked: list[set[int]] = []

    def counting(present: np.ndarray) -> np.ndarray:
        codes = (present @ (1 << np.arange(4))).tolist()
        assert len(codes) == len(set(codes))
        asked.append(set(codes))
        return game(present)

    shapley_values(counting, PLAYERS, n_permutations=30, at_once=10)
    assert len(asked) == 3
    assert {0, 15} <= asked[0]
    assert not asked[1] & {0, 15}
    assert not asked[2] & {0, 15}


def test_cut_orders_never_remove_more_and_give_mean_costs_in_mostly_whole_models():
    def watched(present: np.ndarray) -> np.ndarray:
        assert present.sum(1).min() >= 2
        return game(present)

    found = shapley_values(watched, PLAYERS, n_permutations=3000, truncation=0.5, seed=2)
    assert found.total is None
    assert found.empty is None
    for player in range(4):
        others = [other for other in range(4) if other != player]
        costs = [TABLE[15] - TABLE[15 - (1 << player)]]  # the first to leave
        costs += [
            np.mean(
                [TABLE[15 - (1 << o)] - TABLE[15 - (1 << o) - (1 << player)] for o in others], 0
            )
        ]
        row = found.frame.iloc[player]
        assert abs(row["value"] - np.mean(costs)) < 4 * row["error"]
        assert row["n"] == pytest.approx(1500, abs=120)


def test_groups_can_be_a_single_player():
    found = shapley_values(lambda present: present[:, 0] * 3.0 + 1, ["all"], n_permutations=5)
    assert found.frame["value"].tolist() == [3.0]
    assert found.total == 3.0


def test_bernstein_width_by_hand():
    rule = Bernstein(delta=0.1, span=2.0)
    log = math.log(3 / (0.1 / 6))  # the second look spends 0.1/(2·3)
    hand = 0.4 * math.sqrt(2 * log / 50) + 3 * 2.0 * log / 50
    assert rule.width(np.array(0.4), np.array(50), 2) == pytest.approx(hand)
    published = Bernstein(delta=0.1, span=1.0, as_published=True)
    log = math.log(3 / 0.1)
    hand = 0.4 * math.sqrt(2 * log) / 50 + 3 * log / 50
    assert published.width(np.array(0.4), np.array(50), 2) == pytest.approx(hand)


def test_the_stopping_rule_settles_clear_players_and_saves_their_runs():
    rng = np.random.default_rng(0)
    asked = []

    def noisy(present: np.ndarray) -> np.ndarray:
        asked.append(len(present))
        return (present @ [0.5, -0.5, 0.0, 0.0]) + rng.uniform(-0.1, 0.1, len(present))

    rule = Bernstein(above=-0.01, delta=0.1, span=2.0)
    found = shapley_values(noisy, PLAYERS, n_permutations=600, at_once=20, stop=rule).frame
    assert found["stopped"].tolist() == [True, True, False, False]
    assert found["n"][0] < 600
    assert found["n"][2] == 600
    assert asked[-1] <= asked[0]


def test_the_bound_holds_at_every_look_and_the_published_one_does_not():
    """Marginals of a player worth exactly nothing: how often is it called harmful or harmless on the wrong side?"""
    rng = np.random.default_rng(1)
    wrong = {False: 0, True: 0}
    for as_published in wrong:
        rule = Bernstein(above=0.0, delta=0.1, span=2.0, as_published=as_published)
        for _ in range(200):
            samples = rng.choice([-1.0, 1.0], 400)
            for look, n in enumerate(range(20, 401, 20), 1):
                deviation = samples[:n].std(ddof=1, keepdims=True)
                mean = samples[:n].mean(keepdims=True)
                if rule.done(mean, deviation, np.array([n]), look)[0]:
                    wrong[as_published] += 1
                    break
    assert wrong[False] <= 0.1 * 200
    assert wrong[True] > 0.1 * 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_permutations": 0}, "n_permutations=0 must be a whole number of at least 1"),
        ({"n_permutations": 3, "antithetic": True}, "n_permutations=3 must be even"),
        ({"truncation": 0}, "truncation=0 must be a share"),
        ({"players": ["a", "a"]}, "each named once"),
        ({"players": []}, "at least one"),
        ({"game": lambda present: present[:1].sum(1)}, "values \\[coalition, prompt\\] of"),
        ({"game": lambda present: present.sum(1) / 0.0}, "not finite with 0 of 4 players"),
        ({"stop": Bernstein(span=0.1)}, "more than span=0.1"),
    ],
)
def test_bad_input_is_named(options, message):
    arguments = {"game": game, "players": PLAYERS, "n_permutations": 10} | options
    with np.errstate(all="ignore"), pytest.raises(PlanError, match=message):
        shapley_values(arguments.pop("game"), arguments.pop("players"), **arguments)
    with pytest.raises(PlanError, match="delta=0"):
        Bernstein(delta=0)


PROMPTS = torch.randint(4, 97, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_heads_of_a_model_get_the_values_of_its_own_game(kind):
    model = hl.load(build("llama").double())
    metric = metrics.logit_difference(20, 30)
    reference = PROMPTS[:2, :5] if kind == "mean" else None
    table = np.empty((16, 3))
    heads = [hl.Head(*(int(n) for n in name[1:].split("H"))) for name in PLAYERS]
    for code in range(16):
        gone = [head for at, head in enumerate(heads) if not code >> at & 1]
        with model.edit(*([hl.ablate(gone, kind, reference=reference)] if gone else [])):
            logits = model.logits(PROMPTS)[:, -1]
        table[code] = (logits[:, 20] - logits[:, 30]).detach().numpy()
    found = shapley_heads(
        model,
        PROMPTS,
        metric,
        heads="0.0, 0.1, 1.0, 1.1",
        kind=kind,
        reference=reference,
        n_permutations=400,
        at_once=400,
        antithetic=True,
    )
    assert found.frame["player"].tolist() == list(PLAYERS)
    assert found.values.sum(0) == pytest.approx(table[15] - table[0], abs=1e-10)
    exact = by_enumeration(table)
    error = found.frame["error"].to_numpy()
    assert (np.abs(found.values.mean(1) - exact.mean(1)) < 4 * error + 1e-10).all()


def test_whole_layers_play_as_groups(lab):
    model = lab("gpt2")
    found = shapley_heads(
        model, PROMPTS, metrics.probability(20), groups="layers", n_permutations=2, antithetic=True,
    )  # fmt: skip
    assert found.frame["player"].tolist() == ["L0", "L1"]
    with model.edit(hl.ablate("1.*")):
        without = model.logits(PROMPTS)[:, -1].softmax(-1)[:, 20].mean()
    with model.edit(hl.ablate("*.*")):
        nothing = model.logits(PROMPTS)[:, -1].softmax(-1)[:, 20].mean()
    with model.edit(hl.ablate("0.*")):
        upper = model.logits(PROMPTS)[:, -1].softmax(-1)[:, 20].mean()
    whole = model.logits(PROMPTS)[:, -1].softmax(-1)[:, 20].mean()
    hand = ((whole - upper) + (without - nothing)) / 2
    assert found.scores["L0"] == pytest.approx(float(hand), abs=1e-6)


def test_groups_that_share_a_head_are_refused(lab):
    for groups, message in [
        ({"a": "0.0, 0.1", "b": "0.1"}, "head L0H1 is in the groups 'a' and 'b'"),
        ({"a": "9.0"}, "L9H0 does not exist"),
    ]:
        with pytest.raises(HeadError, match=message):
            shapley_heads(lab("llama"), PROMPTS, metrics.probability(20), groups=groups)
    with pytest.raises(PlanError, match="'heads', 'layers' or groups by name"):
        shapley_heads(lab("llama"), PROMPTS, metrics.probability(20), groups="mlps")
    with pytest.raises(PlanError, match="needs reference="):
        shapley_heads(lab("llama"), PROMPTS, metrics.probability(20), kind="mean")
    with pytest.raises(UnsupportedError, match="has an encoder and a decoder"):
        shapley_heads(lab("t5"), PROMPTS, metrics.probability(20))
