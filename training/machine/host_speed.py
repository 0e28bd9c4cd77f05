"""
Runs of jobs, as they would have been at one speed of the host.

Others on a host may halve the speed of a vCPU for a moment or for minutes, and steal nothing
meanwhile. A job that was measured alone in a good minute and in company in a bad one seems to
suffer from the company. So each run's times are brought to the mean speed of all runs, by what the
yardstick (`deploy.linux.sensors.Yardstick`) read on the run's own vCPUs. Why a job's time goes with
1 / speed is in docs/characterisation.md, "How fast the host is".
"""

from __future__ import annotations

from statistics import harmonic_mean

import pandas as pd

TIMES = ["real_s", "cpu_s", "overhead_s"]
"""The columns that go with the host's speed."""


def yardstick_us(jobs: pd.DataFrame) -> float | None:
    """
    What a fixed piece of work took while jobs were measured [µs].

    :param jobs: their runs
    :return: by the mean of the speeds; None where half of the runs do not say, as in a folder that
        an older version began
    """
    told = jobs["yardstick_us"].tolist() if "yardstick_us" in jobs else []
    known = [us for us in told if us > 0.0]
    return float(f"{harmonic_mean(known):.4g}") if 2 * len(known) > len(jobs) else None


def at_one_speed(jobs: pd.DataFrame) -> pd.DataFrame:
    """
    The runs, at the speed that `yardstick_us` stands for.

    :param jobs: the runs, with `TIMES`; those that do not say how fast the host was stay as they
        are, and all do where `yardstick_us` is None
    """
    mean_us = yardstick_us(jobs)
    if mean_us is None:
        return jobs
    told = jobs["yardstick_us"].where(jobs["yardstick_us"] > 0.0, mean_us)
    return jobs.assign(**{name: jobs[name] * mean_us / told for name in TIMES})
