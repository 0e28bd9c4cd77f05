import pytest

from training.statistics import mean_and_ci95


def test_mean_and_ci95_is_students():
    assert mean_and_ci95([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.4841), abs=1e-4)
    assert mean_and_ci95([7.0]) == (7.0, None)
