"""
How much jobs on different cores slow each other down, from pairs of them.

The physics says that job i beside job j takes 1 + sensitivity_i x pressure_j times as long as alone
(`env.physics.jobs`). Only the products show, so the priors of `training.calibration.priors` set
the scale.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from env.simulator.profile import Parameter, Profile
from training.analysis.findings import PAIRED
from training.calibration.priors import JOB_PRIORS
from training.machine.fit_machine import HERE, NARROWED
from training.statistics import significant

FloatArray = npt.NDArray[np.float64]

LEAST_SD = 0.02  # of a ratio: what the model leaves out
FIELDS = ("sensitivity", "pressure")


def fit_pairs(profile: Profile, times: pd.DataFrame) -> Profile:
    """
    The profile with the sensitivity and pressure of those jobs that pairs say enough about.

    :param profile: of the machine
    :param times: what `training.analysis.findings.job_times` made; without pairs nothing changes
    """
    names = sorted(profile.jobs)
    pairs = times[times["beside"].str.startswith(PAIRED) & times["job"].isin(names)].dropna(
        subset=["ratio", "ratio_ci"]
    )
    if pairs.empty:
        return profile
    place = {name: k for k, name in enumerate(names)}
    slowed = pairs["job"].map(place).to_numpy()
    pressing = pairs["beside"].str.removeprefix(PAIRED).map(place).to_numpy()
    ratio = pairs["ratio"].to_numpy(np.float64)
    # Half the width of a 95 % interval is about two standard deviations.
    sd = np.hypot(pairs["ratio_ci"].to_numpy(np.float64) / 2.0, LEAST_SD)
    median = np.log(np.repeat([JOB_PRIORS[field].median for field in FIELDS], len(names)))
    width = np.repeat([JOB_PRIORS[field].sd for field in FIELDS], len(names))

    def residuals(x: FloatArray) -> FloatArray:
        sensitivity, pressure = np.exp(x).reshape(2, -1)
        errors = (1.0 + sensitivity[slowed] * pressure[pressing] - ratio) / sd
        return np.concatenate([errors, (x - median) / width])

    bounds = tuple(
        np.log(np.repeat([getattr(JOB_PRIORS[field], end) for field in FIELDS], len(names)))
        for end in ("low", "high")
    )
    found = least_squares(residuals, median, bounds=bounds)
    spread = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    values, spreads = np.exp(found.x).reshape(2, -1), spread.reshape(2, -1)
    jobs = {}
    for name in names:
        fields = dict(profile.jobs[name])
        for field, value, wide in zip(
            FIELDS, values[:, place[name]], spreads[:, place[name]], strict=True
        ):
            if wide < NARROWED * JOB_PRIORS[field].sd:
                fields[field] = Parameter(
                    value=significant(value),
                    spread=significant(wide, 3),
                    unit="1",
                    source=f"{HERE}, in pairs, with its prior",
                )
        jobs[name] = fields
    return profile.model_copy(update={"jobs": jobs})
