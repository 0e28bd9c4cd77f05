"""What is made of readings that scatter."""

import numpy as np
import pytest

from training.measuring.actuation import reading_noise

REQUESTS = 2500.0


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_readings_scatter_by_their_noise_and_the_number_of_requests(noise: float) -> None:
    rng = np.random.default_rng(1)
    scatter = np.hypot(noise, REQUESTS**-0.5)
    readings = 0.5 * (1.0 + scatter * rng.standard_normal(10_000))
    assert reading_noise(readings.tolist(), REQUESTS) == pytest.approx(noise, rel=0.05)


def test_hiccups_are_not_taken_for_noise() -> None:
    rng = np.random.default_rng(1)
    readings = 0.5 * (1.0 + 0.05 * rng.standard_normal(1000))
    readings[::50] = 0.0  # one of two polls a second
    readings[1::50] = 1.0
    assert reading_noise(readings.tolist(), 1e6) == pytest.approx(0.05, rel=0.1)


def test_what_scatters_less_than_requests_do_has_no_noise() -> None:
    assert reading_noise([0.5, 0.501, 0.499], REQUESTS) == 0.0
