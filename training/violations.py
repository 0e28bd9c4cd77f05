"""
How probable it is that an interval breaks the SLO, given the p95 that was simulated for it.

A measured p95 scatters around the simulated one: parameters are known so well only, clocks differ
by parts of a second, the tail is one of a few thousand requests. What logged runs show of all that
together is one lognormal distribution; `docs/calibration.md` has what it was compared with.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import log_ndtr, ndtr

from env.simulator.profile import Profile

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scatter:
    """
    The normal distribution of ln(measured p95 / simulated p95), near the SLO.

    :param mean: below 0 where the simulator's p95 are too high
    :param spread: standard deviation
    """

    mean: float
    spread: float


SCATTERS = {2025: Scatter(-0.127, 0.289), 2024: Scatter(-0.379, 0.318)}
"""
By the year that a profile was fitted to: what `python -m training.validate` prints as `scatter`.

Fitted to the violations of the groups that the profile was fitted to. A run's VM is known from its
other runs only.
"""

RUN_SHARE = 0.2
"""
Share of the scatter's variance that is common to all intervals of a run.

With it the violations of left-out runs are most probable (2024; in 2025 0.2 to 0.5 are as good).
Without it 90 % intervals held those of 82 % of the runs of 2025, and of 74 % of 2024's.
"""

DRAWS = 400

LEAST_US = 1.0
"""An interval without requests has a simulated p95 of 0."""


def scatter_of(profile: Profile) -> Scatter | None:
    """
    How measured p95 scatter around a profile's; None where no runs have told.

    :param profile: the profile that the p95 are simulated with
    """
    return SCATTERS.get(profile.years[0]) if profile.years else None


def distance(simulated_us: FloatArray, slo_us: float, scatter: Scatter) -> FloatArray:
    """
    How many standard deviations the p95 to be expected lies above the SLO.

    :param simulated_us: float64[n], simulated p95 [us]
    :param slo_us: the latency objective [us]
    :param scatter: of the profile
    """
    above = np.log(np.maximum(simulated_us, LEAST_US) / slo_us)
    return np.asarray((above + scatter.mean) / scatter.spread)


def violation_probability(simulated_us: FloatArray, slo_us: float, scatter: Scatter) -> FloatArray:
    """
    How probable it is that each interval's p95 is above the SLO.

    :param simulated_us: float64[n], simulated p95 [us]
    :param slo_us: the latency objective [us]
    :param scatter: of the profile
    """
    return np.asarray(ndtr(distance(simulated_us, slo_us, scatter)))


def drawn_violations(
    simulated_us: FloatArray, slo_us: float, scatter: Scatter
) -> npt.NDArray[np.int64]:
    """
    How many intervals of one run violate, drawn again and again; always the same draws.

    :param simulated_us: float64[n], simulated p95 of the run's intervals [us]
    :param slo_us: the latency objective [us]
    :param scatter: of the profile
    :return: int64[DRAWS]
    """
    rng = np.random.default_rng(0)
    of_run = RUN_SHARE**0.5 * rng.standard_normal((DRAWS, 1))
    of_interval = (1.0 - RUN_SHARE) ** 0.5 * rng.standard_normal((DRAWS, len(simulated_us)))
    above = distance(simulated_us, slo_us, scatter) + of_run + of_interval > 0.0
    return np.asarray(above.sum(axis=1), dtype=np.int64)


def fit_scatter(
    simulated_us: FloatArray, violated: npt.NDArray[np.bool_], slo_us: float
) -> Scatter | None:
    """
    The scatter that makes measured violations most probable; None unless some violate, some not.

    It is fitted to violations, not to latencies: far below the SLO those scatter less.

    :param simulated_us: float64[n], simulated p95 [us]
    :param violated: bool[n], whether the measured p95 was above the SLO
    :param slo_us: the latency objective [us]
    """
    if violated.all() or not violated.any():
        return None
    sign = np.where(violated, 1.0, -1.0)

    def surprise(x: FloatArray) -> float:
        scatter = Scatter(float(x[0]), float(np.exp(x[1])))
        return -float(log_ndtr(sign * distance(simulated_us, slo_us, scatter)).sum())

    found = minimize(surprise, [0.0, np.log(0.3)], method="Nelder-Mead").x
    return Scatter(float(found[0]), float(np.exp(found[1])))
