"""
How probable it is that an interval breaks the SLO, given the p95 that were simulated for it.

Its VM and the moment at which its load moved are known so well only: they are drawn, and each draw
has a simulated p95. Around that the measured p95 scatters (`env/simulator/scatter.py`): the tail is
one of a few thousand requests, and machines do now and then what no model has.
"""

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from env.simulator.profile import Scatter
from env.simulator.scatter import (
    DEGREES,
    LEAST_US,
    NEAR,
    scatter_growth,
    spreads_above,
    violation_chance,
)

FloatArray = npt.NDArray[np.float64]

DRAWS = 400

VERDICTS = 10.0
"""
What an interval's being violated counts in the fit of the scatter, against its p95.

Few violate, so p95 alone would say little of how far the tail reaches. From 1 to 20 the log loss of
groups left out differs by 1 %.
"""


def violation_probability(simulated_us: FloatArray, slo_us: float, scatter: Scatter) -> FloatArray:
    """
    How probable it is that each interval's p95 is above the SLO.

    :param simulated_us: float64[n] or float64[draws, n], simulated p95 [us]
    :param slo_us: the latency objective [us]
    :param scatter: of the profile
    :return: float64[n], the mean over draws
    """
    drawn_us = np.atleast_2d(simulated_us)
    chances = violation_chance(drawn_us, slo_us, scatter.mean, scatter.spread)
    return np.asarray(chances.mean(axis=0))


def drawn_violations(
    simulated_us: FloatArray, slo_us: float, scatter: Scatter
) -> npt.NDArray[np.int64]:
    """
    How many intervals of one run violate, drawn again and again; always the same draws.

    :param simulated_us: float64[n] or float64[draws, n], simulated p95 of the run's intervals [us]
    :param slo_us: the latency objective [us]
    :param scatter: of the profile
    :return: int64[DRAWS]
    """
    drawn_us = np.atleast_2d(simulated_us)
    above = spreads_above(drawn_us, slo_us, scatter.mean, scatter.spread)
    of_run = above[np.arange(DRAWS) % len(above)]
    noise = np.random.default_rng(0).standard_t(DEGREES, of_run.shape)
    return np.asarray((of_run + noise > 0.0).sum(axis=1), dtype=np.int64)


def fit_scatter(
    simulated_us: FloatArray, measured_us: FloatArray, slo_us: float, weights: FloatArray
) -> Scatter | None:
    """
    The scatter that makes measured p95 near the SLO, and violations, most probable.

    None where no p95 is near the SLO.

    :param simulated_us: float64[draws, n], simulated p95 [us]
    :param measured_us: float64[n], measured p95 [us]
    :param slo_us: the latency objective [us]
    :param weights: float64[n], how much each interval counts
    """
    near = np.maximum(simulated_us.max(axis=0), measured_us) > NEAR * slo_us  # no others violate
    if not near.any():
        return None
    drawn_us, violated = simulated_us[:, near], measured_us[near] > slo_us
    error = np.log(measured_us[near] / np.maximum(drawn_us, LEAST_US))
    growth = scatter_growth(drawn_us, slo_us)

    def surprise(x: FloatArray) -> float:
        spread = np.exp(x[1]) * growth
        t = (error - x[0]) / spread
        density = (1.0 + t * t / DEGREES) ** (-(DEGREES + 1.0) / 2.0) / spread
        scatter = Scatter(mean=float(x[0]), spread=float(np.exp(x[1])))
        probability = violation_probability(drawn_us, slo_us, scatter)
        given = np.where(violated, probability, 1.0 - probability)
        told = np.log(density.mean(axis=0)) + VERDICTS * np.log(given)
        return -float(weights[near] @ told)

    start = [[0.0, np.log(0.05)], [-0.05, np.log(0.05)], [0.0, np.log(0.1)]]
    found = minimize(surprise, start[0], method="Nelder-Mead", options={"initial_simplex": start}).x
    return Scatter(mean=round(float(found[0]), 4), spread=round(float(np.exp(found[1])), 4))
