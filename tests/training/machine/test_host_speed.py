"""Runs that were measured while the host was fast, and others while it was slow."""

import math

import pandas as pd
import pytest

from training.machine.host_speed import TIMES, at_one_speed, yardstick_us
from training.machine.job_traits import dearer_beside
from training.measuring.samples import SERVING


def test_how_fast_the_host_was_is_the_mean_of_the_speeds_if_most_runs_tell() -> None:
    told = pd.DataFrame({"job": list("abc"), "yardstick_us": [math.nan, 100.0, 200.0]})
    assert yardstick_us(told) == pytest.approx(133.3)
    assert yardstick_us(told.iloc[:2]) is None and yardstick_us(told[["job"]]) is None
    assert yardstick_us(told.iloc[1:2]) == 100.0


def runs(alone_us: float, beside_us: float) -> pd.DataFrame:
    """A job that needs a tenth more CPU time in company, on a host of other speeds meanwhile."""
    return pd.DataFrame(
        {
            "job": "pack",
            "threads": 1,
            "beside": ["none", SERVING],
            "real_s": [0.1 + 0.1 * alone_us, 0.1 + 0.3 * beside_us],
            "cpu_s": [0.1 * alone_us, 0.11 * beside_us],
            "overhead_s": 0.1,
            "sampled": 1.0,
            "instructions": math.nan,
            "yardstick_us": [alone_us, beside_us],
        }
    )


@pytest.mark.parametrize("beside_us", [60.0, 100.0, 170.0])
def test_company_is_not_blamed_for_a_host_that_was_slow_meanwhile(beside_us: float) -> None:
    even = at_one_speed(runs(100.0, beside_us))
    assert dearer_beside(SERVING, even) == pytest.approx(1.1)
    mean_us = yardstick_us(runs(100.0, beside_us))
    assert mean_us is not None
    assert even["cpu_s"][0] == pytest.approx(0.1 * mean_us)


def test_runs_that_do_not_tell_stay_as_they_are() -> None:
    silent = runs(100.0, 100.0).assign(yardstick_us=math.nan)
    pd.testing.assert_frame_equal(at_one_speed(silent), silent)
    told = runs(100.0, 200.0)
    some = pd.concat([told, silent.head(1)], ignore_index=True)
    assert (at_one_speed(some).loc[2, TIMES] == some.loc[2, TIMES]).all()
