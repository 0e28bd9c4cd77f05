"""
How measured p95 scatter around a simulated one, and so how probably an interval breaks the SLO.

ln(measured / simulated) follows Student's t with three degrees of freedom: logged runs have heavy
tails. Its mean and its scale are a profile's (`env.simulator.profile.Scatter`); the scale grows
with p95, because a low one hangs on the machine alone, a high one on moments and backlogs.
`docs/calibration.md` has what it was compared with.
"""

import math
from typing import Any

import numpy as np

DEGREES = 3.0
"""Of freedom of Student's t."""

NEAR = 0.6
"""The part of the SLO at which p95 scatter by a profile's `Scatter`."""

GROWTH = 1.5
"""Up to the SLO the scale grows with simulated p95 to this power."""

LEAST_US = 1.0
"""An interval without requests has a simulated p95 of 0."""


def scatter_growth(p95_us: Any, slo_us: float) -> Any:
    """
    How many times as wide p95 scatter as a profile's `Scatter` says.

    :param p95_us: simulated p95, a number or an array [us]
    :param slo_us: the latency objective [us]
    """
    return (np.minimum(np.maximum(p95_us, LEAST_US), slo_us) / (NEAR * slo_us)) ** GROWTH


def spreads_above(p95_us: Any, slo_us: float, mean: float, spread: float) -> Any:
    """
    How many spreads the p95 to be expected lies above the SLO.

    :param p95_us: simulated p95, a number or an array [us]
    :param slo_us: the latency objective [us]
    :param mean: of measured over simulated p95 [ln], `env.simulator.profile.Scatter`
    :param spread: of the same [ln], more than 0
    """
    above = np.log(np.maximum(p95_us, LEAST_US) / slo_us) + mean
    return above / (spread * scatter_growth(p95_us, slo_us))


def violation_chance(p95_us: Any, slo_us: float, mean: float, spread: float) -> Any:
    """
    How probable it is that an interval's measured p95 is above the SLO.

    The distribution function of Student's t with three degrees of freedom has a closed form
    (Johnson, Kotz, Balakrishnan, "Continuous Univariate Distributions" 2, chapter 28).

    :param p95_us: simulated p95, a number or an array [us]
    :param slo_us: the latency objective [us]
    :param mean: of measured over simulated p95 [ln], `env.simulator.profile.Scatter`
    :param spread: of the same [ln], more than 0
    """
    t = spreads_above(p95_us, slo_us, mean, spread) / math.sqrt(DEGREES)
    return np.maximum(0.5 + (t / (1.0 + t * t) + np.arctan(t)) / math.pi, 0.0)
