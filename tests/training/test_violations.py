"""A simulated p95 says how probable a violation is, and how many a run may have."""

import numpy as np
import pytest

from env.simulator.profile import load_profile
from training.violations import (
    Scatter,
    drawn_violations,
    fit_scatter,
    scatter_of,
    violation_probability,
)

SCATTER = Scatter(mean=-0.2, spread=0.3)


def test_a_higher_p95_violates_more_probably():
    simulated_us = np.array([0.0, 100.0, 600.0, 800.0, 800.0 * np.exp(0.2), 5000.0])
    probability = violation_probability(simulated_us, 800.0, SCATTER)
    assert (np.diff(probability) > 0.0).all()
    assert probability[0] < 1e-9 and probability[-1] > 1.0 - 1e-6
    assert probability[4] == pytest.approx(0.5)


def test_draws_keep_the_expectation_and_are_wider_than_independent_intervals():
    simulated_us = np.full(200, 600.0)
    expected = violation_probability(simulated_us, 800.0, SCATTER).sum()
    drawn = drawn_violations(simulated_us, 800.0, SCATTER)
    assert drawn.mean() == pytest.approx(expected, rel=0.1)
    assert drawn.std() > 2.0 * np.sqrt(expected)
    assert (drawn_violations(simulated_us, 800.0, SCATTER) == drawn).all()
    assert (drawn_violations(np.zeros(0), 800.0, SCATTER) == 0).all()


@pytest.mark.parametrize("violated", [True, False])
def test_a_scatter_needs_violations_and_others(violated):
    assert fit_scatter(np.full(9, 700.0), np.full(9, violated), 800.0) is None


@pytest.mark.parametrize(("name", "told"), [("cca-2025", True), ("local", False)])
def test_scatter_is_known_where_runs_were_measured(name, told):
    assert (scatter_of(load_profile(name)) is not None) == told
