"""Simulated p95 say how probable a violation is, and how many a run may have."""

import numpy as np
import pytest

from env.simulator.profile import Scatter
from training.violations import drawn_violations, fit_scatter, violation_probability

SCATTER = Scatter(mean=-0.2, spread=0.1)


def test_a_higher_p95_violates_more_probably():
    simulated_us = np.array([0.0, 100.0, 600.0, 800.0, 800.0 * np.exp(0.2), 5000.0])
    probability = violation_probability(simulated_us, 800.0, SCATTER)
    assert (np.diff(probability) > 0.0).all()
    assert probability[0] < 1e-3 and probability[-1] > 0.99
    assert probability[4] == pytest.approx(0.5)


def test_p95_far_below_the_slo_scatter_less():
    """As many times the SLO away, the one that scatters more violates more probably."""
    far, near = violation_probability(np.array([200.0, 400.0]), 800.0, SCATTER)
    twice = violation_probability(np.array([400.0]), 1600.0, SCATTER)
    assert far == pytest.approx(twice[0]) and near > 5.0 * far


def test_a_probability_is_the_mean_over_draws():
    drawn_us = np.array([[400.0, 900.0], [1600.0, 900.0]])
    by_draw = [violation_probability(drawn, 800.0, SCATTER) for drawn in drawn_us]
    together = violation_probability(drawn_us, 800.0, SCATTER)
    assert together == pytest.approx(np.mean(by_draw, axis=0))


def test_draws_keep_the_expectation_and_are_wider_where_the_vm_is_not_known():
    known_us = np.full(200, 800.0)
    unknown_us = np.stack([known_us * 0.8, known_us / 0.8])
    expected = violation_probability(unknown_us, 800.0, SCATTER).sum()
    drawn = drawn_violations(unknown_us, 800.0, SCATTER)
    assert drawn.mean() == pytest.approx(expected, rel=0.05)
    assert drawn.std() > 2.0 * drawn_violations(known_us, 800.0, SCATTER).std()
    assert (drawn_violations(unknown_us, 800.0, SCATTER) == drawn).all()
    assert (drawn_violations(np.zeros(0), 800.0, SCATTER) == 0).all()


def test_a_scatter_needs_intervals_near_the_slo():
    assert fit_scatter(np.full((1, 9), 300.0), np.full(9, 310.0), 800.0, np.ones(9)) is None
