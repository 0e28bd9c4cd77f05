"""The chance of a violation: by Student's t, the same for numbers and arrays."""

import numpy as np
import pytest
from scipy.stats import t as student_t

from env.simulator.scatter import violation_chance


def test_the_chance_is_that_of_students_t() -> None:
    p95_us = np.array([0.0, 100.0, 600.0, 800.0, 5000.0])
    wider = (np.clip(p95_us, 1.0, 800.0) / 480.0) ** 1.5
    above = (np.log(np.maximum(p95_us, 1.0) / 800.0) - 0.2) / (0.1 * wider)
    chances = violation_chance(p95_us, 800.0, -0.2, 0.1)
    assert chances == pytest.approx(student_t.cdf(above, 3), rel=1e-6, abs=1e-12)
    assert [violation_chance(one, 800.0, -0.2, 0.1) for one in p95_us] == chances.tolist()
