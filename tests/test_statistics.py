"""p-values against draws, and their correction, against the definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from headlab.statistics import corrected, p_among, random_rotations


def test_p_among_counts_draws_that_reach_the_value_and_the_value_itself() -> None:
    null = np.array([0.1, 0.2, 0.2, 0.5])
    found = p_among(np.array([0.0, 0.2, 0.3, 0.5, 0.6, np.nan]), null)
    np.testing.assert_allclose(found, [1, 4 / 5, 2 / 5, 2 / 5, 1 / 5, np.nan])


def test_p_among_is_uniform_under_its_null() -> None:
    rng = np.random.default_rng(0)
    p = p_among(rng.standard_normal(20_000), rng.standard_normal(5_000))
    for level in (0.01, 0.05, 0.5):
        assert abs((p <= level).mean() - level) < 0.02


@pytest.mark.parametrize("width", [1, 2, 16])
def test_random_rotations_are_uniform(width: int) -> None:
    drawn = random_rotations(4000, width, np.random.default_rng(0))
    np.testing.assert_allclose(
        drawn @ drawn.transpose(0, 2, 1), np.broadcast_to(np.eye(width), drawn.shape), atol=1e-9
    )
    # Of uniform ones every entry has mean 0 and mean square 1 / width, and the trace variance 1.
    traces = np.trace(drawn, axis1=1, axis2=2)
    assert abs(traces.mean()) < 0.08
    assert abs(traces.var() - 1) < 0.15
    np.testing.assert_allclose((drawn**2).mean(0), 1 / width, atol=0.05)


def test_correction_leaves_nan_out() -> None:
    p = np.array([[0.01, np.nan], [0.02, 0.5]])
    expected = false_discovery_control([0.01, 0.02, 0.5])
    np.testing.assert_allclose(corrected(p), [[expected[0], np.nan], expected[1:]])
    assert np.isnan(corrected(np.full(3, np.nan))).all()
