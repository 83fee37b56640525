"""The CMR model against its own equations, its closed forms and planted profiles."""

from __future__ import annotations

import numpy as np
import pytest

from headlab.roles import cmr

N, LAGS = 100, 8


def plain_simulation(beta_enc, beta_rec, gamma, runs, seed):
    """The equations one by one in float64, counting the lags that are drawn, as the authors do."""
    rng = np.random.default_rng(seed)
    T = np.diag(np.ones(N), 1)
    M = np.linalg.inv(np.eye(N + 1) - (1 - beta_enc) * T) @ T
    curves = []
    for start in range(20):
        shares = []
        for _ in range(runs):
            t, at, count, recalls = np.eye(N + 1)[start], start, np.zeros(2 * LAGS + 1), 0
            while recalls < 100:
                p = M.T @ t
                item = rng.choice(N + 1, p=p / p.sum())
                if item == N:
                    break
                if abs(item - at) <= LAGS:
                    count[item - at + LAGS] += 1
                recalls += 1
                f = np.eye(N + 1)[item]
                brought = (1 - gamma) * f + gamma * M @ f
                t = (1 - beta_rec) * t + beta_rec * brought / np.linalg.norm(brought)
                t, at = t / np.linalg.norm(t), item
            if recalls:
                shares.append(count / recalls)
        curve = np.mean(shares, 0)
        curves.append(curve / curve.sum())
    return np.mean(curves, 0)


def from_markov_chain(beta_enc, gamma):
    """β_rec = 1: the context is the last item's alone, so items form a Markov chain; exact expected counts."""
    T = np.diag(np.ones(N), 1)
    M = np.linalg.inv(np.eye(N + 1) - (1 - beta_enc) * T) @ T
    strength = ((1 - gamma) * np.eye(N + 1) + gamma * M).T @ M  # row f: Mᵀ of what f brings
    P = strength / np.maximum(strength.sum(1, keepdims=True), 1e-300)
    law = M[:20] / M[:20].sum(1, keepdims=True)  # of the first item, by start
    visits, seen = law[:, :N], np.zeros((20, N))
    for _ in range(99):
        seen, visits = seen + visits, (visits @ P[:N])[:, :N]
    curves = []
    for start in range(20):
        count = np.array([law[start, start + d] if start + d >= 0 else 0 for d in range(-8, 9)])
        for d in range(-8, 9):
            i = np.arange(max(0, -d), min(N, N - d))
            count[d + 8] += (seen[start, i] * P[i, i + d]).sum()
        curves.append(count / count.sum())
    return np.mean(curves, 0)


def from_independent_draws(beta_enc):
    """β_rec = 0: every item is drawn from the start's own law p; lags spread as Σ p(i) p(i + d)."""
    curves = []
    for start in range(20):
        law = np.zeros(N + 1)
        law[start + 1 :] = (1 - beta_enc) ** np.arange(N - start)
        law /= law.sum()
        p, stays = law[:N], 1 - law[N]
        going = stays ** np.arange(1, 100)  # the chance of a k-th recall to go on from
        pairs = np.correlate(p / stays, p, "full")[N - 1 - 8 : N + 8]
        first = np.array([p[start + d] if start + d >= 0 else 0 for d in range(-8, 9)])
        count = first + going.sum() * pairs
        curves.append(count / count.sum())
    return np.mean(curves, 0)


def scaled(curve):
    window = curve[3:-3] - curve[3:-3].min()
    return window / window.max()


def apart(one, other):
    one, other = scaled(one), scaled(other)
    return ((one - other) ** 2).mean() / one.var()


@pytest.mark.parametrize(
    "parameters", [(0.6, 0.75, 0.3), (0.3, 0.5, 1.0), (0.9, 1.0, 0.6)], ids=str
)  # 60 runs of the plain kind are good to a few parts in a hundred
def test_the_expected_counts_agree_with_counting_draws_by_the_plain_equations(parameters):
    counted = plain_simulation(*parameters, runs=3, seed=5)
    assert apart(counted, cmr.crp(*parameters)) < 0.03
    assert np.abs(counted - cmr.crp(*parameters)).max() < 0.02


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("beta_enc", [0.2, 0.7, 1.0])
def test_full_drift_at_recall_is_a_markov_chain(beta_enc, gamma):
    assert apart(from_markov_chain(beta_enc, gamma), cmr.crp(beta_enc, 1, gamma)) < 1e-3


@pytest.mark.parametrize("beta_enc", [0.15, 0.5, 0.95])
def test_no_drift_at_recall_is_independent_draws(beta_enc):
    assert apart(from_independent_draws(beta_enc), cmr.crp(beta_enc, 0, 0.5)) < 5e-3
    np.testing.assert_array_equal(cmr.crp(beta_enc, 0, 0), cmr.crp(beta_enc, 0, 1))


def test_studied_associations_are_the_inverse_of_the_paper():
    T = np.diag(np.ones(N), 1)
    M = np.linalg.inv(np.eye(N + 1) - 0.7 * T) @ T
    np.testing.assert_allclose(cmr.associations(0.3), M, atol=1e-12)


@pytest.mark.parametrize("at", [(0, 0, 0), (5, 14, 3), (11, 20, 10), (19, 7, 2)])
def test_the_stored_grid_is_what_the_simulation_gives(at):
    i, j, k = at
    curve = cmr.crp(cmr.BETA_ENC[i], cmr.BETA_REC[j], cmr.GAMMA[k])
    np.testing.assert_allclose(cmr.grid()[at], curve, atol=1e-5)


def test_the_stored_grid_is_whole():
    grid = cmr.grid()
    assert grid.shape == (20, 21, 11, 17)
    assert (grid >= 0).all()
    np.testing.assert_allclose(grid.sum(-1), 1, atol=1e-5)
    # Without drift at recall γ has no effect; where nothing studied comes back, recall never goes backward.
    assert (grid[:, 0] == grid[:, 0, :1]).all()
    assert (grid[:, 20, 0, :9] == 0).all()


def curve(at):
    return cmr.grid()[at][3:-3]


def brute_force(profile):
    """The paper's distance, curve by curve."""
    raised = profile - profile.min()
    least = np.inf
    for c in cmr.grid().reshape(-1, 17)[:, 3:-3]:
        c = c / c.sum()
        c_hat = (c - c.min()) * raised.max() / (c - c.min()).max()
        least = min(least, ((c_hat - raised) ** 2).mean() / raised.var())
    return least


def test_the_distance_is_the_paper_s():
    rng = np.random.default_rng(0)
    profiles = np.stack([rng.normal(size=11), np.arange(11.0), 40 * curve((9, 9, 4)) - 3])
    found = cmr.fit(profiles)
    np.testing.assert_allclose(found.distance, [brute_force(p) for p in profiles], atol=1e-12)


def drawn(rng, n):
    return [tuple(rng.integers([0, 1, 0], [20, 21, 11])) for _ in range(n)]


def test_parameters_of_planted_profiles_are_recovered():
    rng = np.random.default_rng(1)
    for at in drawn(rng, 40):
        found = cmr.fit(rng.uniform(0.5, 80) * curve(at) + rng.uniform(-80, 20))
        assert found.distance < 1e-9
        got = (found.beta_enc, found.beta_rec, found.gamma)
        wanted = (cmr.BETA_ENC[at[0]], cmr.BETA_REC[at[1]], cmr.GAMMA[at[2]])
        if not np.allclose(got, wanted):  # another curve of the same shape
            other = cmr.grid().reshape(-1, 17)[found.curve]
            assert apart(cmr.grid()[at], other) < 1e-9


def test_the_inverse_temperature_is_the_scale_of_the_profile():
    c = curve((11, 14, 3))
    found = cmr.fit(25 * c / c.sum() - 7)
    assert found.inverse_temperature == pytest.approx(25, rel=1e-4)


def test_small_noise_leaves_the_curve_recognisable():
    rng = np.random.default_rng(2)
    for at in drawn(rng, 40):
        c = scaled(cmr.grid()[at])
        noisy = 6 * (c + rng.normal(0, 0.01, 11)) - 30
        found = cmr.fit(noisy)
        assert found.distance < 0.02
        other = cmr.grid().reshape(-1, 17)[found.curve]
        assert apart(cmr.grid()[at], other) < 0.03


def test_gamma_is_unknown_where_it_has_no_effect():
    found = cmr.fit(curve((9, 0, 7)) * 3)
    assert found.beta_rec == 0
    assert np.isnan(found.gamma)
    assert found.beta_enc == pytest.approx(0.5)


def test_noise_is_mostly_far_and_a_flat_or_unknown_profile_has_no_curve():
    noise = np.random.default_rng(3).normal(size=(500, 11))
    assert (cmr.fit(noise).distance > 0.5).mean() > 0.75
    assert np.isinf(cmr.fit(np.full(11, 4.0)).distance)
    unknown = np.arange(11.0)
    unknown[2] = -np.inf
    assert np.isnan(cmr.fit(unknown).distance)


def test_profiles_keep_their_axes():
    profiles = np.random.default_rng(4).normal(size=(2, 3, 11))
    found = cmr.fit(profiles)
    assert found.distance.shape == found.gamma.shape == found.curve.shape == (2, 3)
    assert found.distance[1, 2] == cmr.fit(profiles[1, 2]).distance
