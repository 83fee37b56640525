"""p-values, intervals, corrections and decisions, against enumeration, scipy and simulation."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from headlab.roles import Measurement, RoleInfo
from headlab.roles.evidence import decide
from headlab.roles.scores import COLUMNS
from headlab.statistics import bootstrap_interval, sign_flip_p

NAN = math.nan


def info(**changes: Any) -> RoleInfo:
    base = RoleInfo("toy", "Toy", "?", "s", "n", "d", "r", 0.3, 0.2, "own row")
    return replace(base, **changes)


def enumerated(difference: np.ndarray) -> float:
    """The definition: the share of all sign patterns whose sum is at least the one observed."""
    known = difference[~np.isnan(difference)]
    if not len(known):
        return NAN
    sums = [
        math.fsum(sign * value for sign, value in zip(signs, known, strict=True))
        for signs in itertools.product((1, -1), repeat=len(known))
    ]
    slack = 1e-12 * np.abs(known).sum()
    return sum(total >= math.fsum(known) - slack for total in sums) / len(sums)


# -- sign flips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 6, 11])
def test_sign_flip_p_is_the_share_of_all_sign_patterns(n: int):
    rng = np.random.default_rng(n)
    difference = rng.normal(0.3, 1, (n, 12))
    difference[:, :3] = rng.integers(-2, 3, (n, 3))  # ties
    difference[:, 3] = 0.0
    difference[:, 4] = np.abs(difference[:, 4])
    wanted = [enumerated(column) for column in difference.T]
    np.testing.assert_allclose(sign_flip_p(difference, 0), wanted, rtol=1e-12)
    assert sign_flip_p(difference, 0)[3] == 1.0
    assert sign_flip_p(difference, 0)[4] == 2.0**-n


@settings(max_examples=60, deadline=None)
@given(
    arrays(
        float,
        st.tuples(st.integers(1, 8), st.integers(1, 3)),
        elements=st.one_of(st.just(NAN), st.floats(-4, 4, width=16), st.sampled_from([0.1, -0.3])),
    )
)
def test_sign_flip_p_is_the_share_of_all_sign_patterns_of_what_is_known(difference: np.ndarray):
    wanted = [enumerated(column) for column in difference.T]
    np.testing.assert_allclose(sign_flip_p(difference, 3), wanted, rtol=1e-9)


def test_sign_flip_p_agrees_with_scipys_paired_permutation_test():
    rng = np.random.default_rng(0)
    difference = rng.normal(0.4, 1, (9, 8))
    wanted = stats.permutation_test(
        (difference,),
        np.mean,
        permutation_type="samples",
        alternative="greater",
        n_resamples=np.inf,
        axis=0,
    )
    np.testing.assert_allclose(sign_flip_p(difference, 0), wanted.pvalue, rtol=1e-12)


def test_drawn_flips_agree_with_enumeration_and_never_give_zero():
    rng = np.random.default_rng(1)
    difference = rng.normal(0.15, 1, (20, 30))
    signs = 1.0 - 2.0 * (np.arange(2**20)[:, None] >> np.arange(20) & 1)
    exact = (signs @ difference >= difference.sum(0) - 1e-9).mean(0)
    drawn = sign_flip_p(difference, 5)
    error = np.sqrt(exact * (1 - exact) / 2**17)
    assert (np.abs(drawn - exact) <= 5 * error + 2**-17).all()
    strong = np.full((20, 2), 0.7)
    assert (sign_flip_p(strong, 0) >= 1 / 2**17).all()
    assert (sign_flip_p(strong, 0) <= 2 / 2**17).all()


@pytest.mark.parametrize("prompts", [17, 18])
def test_exact_and_drawn_flips_meet_where_one_gives_way_to_the_other(prompts: int):
    difference = np.random.default_rng(2).normal(0.2, 1, (prompts, 10))
    signs = 1.0 - 2.0 * (np.arange(2**prompts)[:, None] >> np.arange(prompts) & 1)
    exact = (signs @ difference >= difference.sum(0) - 1e-9).mean(0)
    tolerance = 1e-12 if prompts <= 17 else 0.01
    np.testing.assert_allclose(sign_flip_p(difference, 0), exact, atol=tolerance)


@pytest.mark.parametrize("prompts", [10, 20])
@pytest.mark.parametrize("noise", ["normal", "heavy-tailed"])
def test_p_values_are_uniform_when_nothing_is_there(prompts: int, noise: str):
    rng = np.random.default_rng(prompts)
    shape = (prompts, 1500)
    difference = rng.normal(size=shape) if noise == "normal" else rng.standard_t(2, shape)
    p = sign_flip_p(difference, 0)
    assert stats.kstest(p, "uniform").pvalue > 1e-3
    for level in (0.01, 0.05, 0.2):
        limit = level + 4 * math.sqrt(level * (1 - level) / len(p))
        assert (p <= level).mean() <= limit


def test_one_sidedness_a_score_below_its_null_is_never_significant():
    assert (sign_flip_p(np.full((12, 2), -0.4), 0) == 1.0).all()


def test_missing_prompts_count_for_nothing():
    rng = np.random.default_rng(3)
    whole = rng.normal(0.3, 1, (8, 4))
    holed = np.insert(whole, [2, 5], NAN, axis=0)
    np.testing.assert_allclose(sign_flip_p(holed, 0), sign_flip_p(whole, 0), rtol=1e-12)
    assert np.isnan(sign_flip_p(np.full((5, 2), NAN), 0)).all()


# -- intervals -----------------------------------------------------------------------------------


def test_intervals_cover_the_mean_about_ninety_five_times_in_a_hundred():
    rng = np.random.default_rng(4)
    values = rng.normal(0.4, 0.2, (50, 3000))
    low, high = bootstrap_interval(values, 0)
    covered = ((low <= 0.4) & (high >= 0.4)).mean()
    # A percentile interval of 50 values covers 94.2 % in theory; four standard errors either way.
    assert covered == pytest.approx(0.945, abs=0.018)
    assert (low > 0.4).mean() == pytest.approx((high < 0.4).mean(), abs=0.02)


def test_intervals_agree_with_scipys_percentile_bootstrap():
    rng = np.random.default_rng(5)
    values = rng.gamma(2.0, 0.2, (20, 12))
    low, high = bootstrap_interval(values, 0)
    theirs = stats.bootstrap(
        (values,), np.mean, axis=0, method="percentile", n_resamples=20_000, rng=1
    ).confidence_interval
    width = theirs.high - theirs.low
    assert (np.abs(low - theirs.low) < 0.06 * width).all()
    assert (np.abs(high - theirs.high) < 0.06 * width).all()


def test_intervals_of_other_levels_nest():
    values = np.random.default_rng(6).normal(size=(20, 5))
    narrow, wide = bootstrap_interval(values, 0, 0.5), bootstrap_interval(values, 0, 0.99)
    assert (wide[0] < narrow[0]).all()
    assert (narrow[1] < wide[1]).all()


def test_intervals_leave_missing_prompts_out():
    rng = np.random.default_rng(7)
    whole = rng.normal(0.5, 0.1, (40, 1))
    holed = np.concatenate([whole, np.full((12, 1), NAN)])
    low, high = bootstrap_interval(holed, 0)
    wanted_low, wanted_high = bootstrap_interval(whole, 0)
    width = float(wanted_high[0] - wanted_low[0])
    assert low[0] == pytest.approx(wanted_low[0], abs=0.15 * width)
    assert high[0] == pytest.approx(wanted_high[0], abs=0.15 * width)
    one = np.full((12, 2), NAN)
    one[3] = 0.25
    low, high = bootstrap_interval(one, 0)
    assert low.tolist() == high.tolist() == [0.25, 0.25]


# -- decisions -----------------------------------------------------------------------------------


def measured(seed: int = 0, prompts: int = 12, layers: int = 3, heads: int = 5) -> Measurement:
    rng = np.random.default_rng(seed)
    values = rng.normal(0.2, 0.1, (prompts, layers, heads))
    values[:, 1, 2] += 0.5
    values[:, 2, 4] += 0.3
    return Measurement(values, rng.normal(0.1, 0.05, (prompts, layers, heads)))


def benjamini_hochberg(p: np.ndarray) -> np.ndarray:
    """q_i = min over j with p_j >= p_i of p_j * m / rank(j)."""
    m = len(p)
    rank = np.array([(p <= value).sum() for value in p])
    return np.array([min(1.0, min(p[j] * m / rank[j] for j in range(m) if p[j] >= pi)) for pi in p])


def test_the_table_holds_means_counts_and_effects_in_layer_major_order():
    found = measured()
    table = decide(info(), found, 0.05, 0)
    assert tuple(table.columns) == COLUMNS
    assert list(zip(table["layer"], table["head"], strict=True)) == [
        (layer, head) for layer in range(3) for head in range(5)
    ]
    for row in table.itertuples():
        values = found.values[:, row.layer, row.head]
        null = found.null[:, row.layer, row.head]
        assert row.role == "toy"
        assert row.n == 12
        assert row.score == pytest.approx(values.mean(), abs=1e-12)
        assert row.null_mean == pytest.approx(null.mean(), abs=1e-12)
        assert row.effect == pytest.approx(values.mean() - null.mean(), abs=1e-12)
        assert row.p_value == pytest.approx(enumerated(values - null), rel=1e-9)
        assert row.ci_low <= row.score <= row.ci_high
    assert table[table["claimed"]][["layer", "head"]].values.tolist() == [[1, 2], [2, 4]]


def test_corrected_p_values_are_benjamini_and_hochbergs_over_the_measured_heads_of_the_role():
    found = measured(seed=3)
    found.values[:, 0, 1] = NAN
    table = decide(info(), found, 0.05, 0)
    known = table["p_value"].notna().to_numpy()
    assert known.sum() == 14
    p = table["p_value"].to_numpy()[known]
    q = table["q_value"].to_numpy()
    assert np.isnan(q[~known]).all()
    np.testing.assert_allclose(q[known], benjamini_hochberg(p), rtol=1e-12)
    np.testing.assert_allclose(q[known], stats.false_discovery_control(p), rtol=1e-12)


def test_false_discoveries_stay_below_alpha():
    rng = np.random.default_rng(8)
    share = []
    for at in range(60):
        values = rng.normal(0.5, 0.2, (12, 4, 10))
        null = rng.normal(0.5, 0.2, (12, 4, 10))
        values[:, 0] += 0.4
        table = decide(info(min_score=-9, min_effect=-9), Measurement(values, null), 0.1, at)
        claimed = table[table["claimed"]]
        share.append((claimed["layer"] > 0).mean() if len(claimed) else 0.0)
        assert (table[table["layer"] == 0]["claimed"]).mean() > 0.5
    # Expected at most 0.1 * 30 / 40; the allowance is four standard errors.
    assert np.mean(share) <= 0.075 + 4 * np.std(share) / math.sqrt(60)


@pytest.mark.parametrize(
    ("score", "null", "claimed"),
    [
        (0.6, 0.1, True),
        (0.375, 0.125, True),  # at both thresholds
        (0.3125, 0.0, False),  # below the score
        (0.6, 0.45, False),  # too little effect
        (0.1, 0.6, False),  # below the null
    ],
)
def test_a_claim_needs_the_score_and_the_effect(score: float, null: float, claimed: bool):
    found = Measurement(np.full((10, 1, 1), score), np.full((10, 1, 1), null))
    table = decide(info(min_score=0.375, min_effect=0.25), found, 0.05, 0)
    assert table["claimed"].tolist() == [claimed]


def test_a_claim_needs_significance():
    values = np.full((4, 1, 1), 0.9)  # sixteen sign patterns: p is 1/16 at best
    null = np.zeros((4, 1, 1))
    assert decide(info(), Measurement(values, null), 0.05, 0)["claimed"].tolist() == [False]
    assert decide(info(), Measurement(values, null), 0.07, 0)["claimed"].tolist() == [True]
    one = decide(info(), Measurement(values[:1], null[:1]), 0.05, 0)
    assert one["claimed"].tolist() == [False]
    assert one["p_value"].tolist() == [0.5]


def test_what_cannot_be_measured_is_not_a_number_not_zero_and_not_claimed():
    found = measured()
    found.values[:, 0, 0] = NAN
    found.null[:, 0, 1] = NAN
    found.values[:5, 1, 2] = NAN
    table = decide(info(), found, 0.05, 0).set_index(["layer", "head"])
    for head in ((0, 0), (0, 1)):
        row = table.loc[head]
        assert row["n"] == 0
        assert not row["claimed"]
        numbers = row[["score", "ci_low", "ci_high", "null_mean", "effect", "p_value", "q_value"]]
        assert numbers.isna().all()
    part = table.loc[(1, 2)]
    assert part["n"] == 7
    assert part["score"] == pytest.approx(found.values[5:, 1, 2].mean())
    assert part["null_mean"] == pytest.approx(found.null[5:, 1, 2].mean())
    assert part["claimed"]


def test_a_role_nothing_could_be_measured_for_is_a_table_without_claims():
    blank = np.full((1, 2, 3), NAN)
    table = decide(info(), Measurement(blank, blank, notes={(-1, -1): "not measurable"}), 0.05, 0)
    assert len(table) == 6
    assert table["score"].isna().all()
    assert table["q_value"].isna().all()
    assert not table["claimed"].any()
    assert (table["note"] == "not measurable").all()


def test_a_heads_own_note_goes_before_the_general_one():
    found = replace(measured(), notes={(-1, -1): "all", (1, 2): "own"})
    table = decide(info(), found, 0.05, 0).set_index(["layer", "head"])
    assert table.loc[(1, 2), "note"] == "own"
    assert (table.drop((1, 2))["note"] == "all").all()


@pytest.mark.parametrize("prompts", [12, 20])
def test_the_same_seed_gives_the_same_table(prompts: int):
    found = measured(prompts=prompts)
    pd.testing.assert_frame_equal(decide(info(), found, 0.05, 3), decide(info(), found, 0.05, 3))
    other = decide(info(), found, 0.05, 4)
    assert not decide(info(), found, 0.05, 3)["ci_low"].equals(other["ci_low"])


def test_deciding_leaves_the_measurement_alone_and_warns_of_nothing(recwarn):
    found = measured()
    found.values[:, 0, 0] = NAN
    before = found.values.copy(), found.null.copy()
    decide(info(), found, 0.05, 0)
    np.testing.assert_array_equal(found.values, before[0])
    np.testing.assert_array_equal(found.null, before[1])
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
