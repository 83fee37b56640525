"""p-values against draws, and their correction, against the definitions."""

from __future__ import annotations

import numpy as np
from scipy.stats import false_discovery_control

from headlab.statistics import corrected, p_among


def test_p_among_counts_draws_that_reach_the_value_and_the_value_itself() -> None:
    null = np.array([0.1, 0.2, 0.2, 0.5])
    found = p_among(np.array([0.0, 0.2, 0.3, 0.5, 0.6, np.nan]), null)
    np.testing.assert_allclose(found, [1, 4 / 5, 2 / 5, 2 / 5, 1 / 5, np.nan])


def test_p_among_is_uniform_under_its_null() -> None:
    rng = np.random.default_rng(0)
    p = p_among(rng.standard_normal(20_000), rng.standard_normal(5_000))
    for level in (0.01, 0.05, 0.5):
        assert abs((p <= level).mean() - level) < 0.02


def test_correction_leaves_nan_out() -> None:
    p = np.array([[0.01, np.nan], [0.02, 0.5]])
    expected = false_discovery_control([0.01, 0.02, 0.5])
    np.testing.assert_allclose(corrected(p), [[expected[0], np.nan], expected[1:]])
    assert np.isnan(corrected(np.full(3, np.nan))).all()
