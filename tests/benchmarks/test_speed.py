"""The benchmark of speed: what it says of several values."""

import numpy as np
import pytest

from benchmarks.speed import interval


def test_a_single_value_has_no_interval() -> None:
    assert interval(np.array([3.0])) == {"mean": 3.0, "ci95": None}


def test_the_interval_of_a_mean_is_students() -> None:
    assert interval(np.array([1.0, 3.0])) == pytest.approx({"mean": 2.0, "ci95": 12.71})
