"""
The least-squares problem of memcached's latency, and that of one VM's factors.

All in the logarithms of the parameters, with a soft-L1 loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from env.physics.service import SERVICE_FIELDS
from training.calibration.intervals import Intervals
from training.calibration.priors import (
    CAPACITY_SD,
    FREE,
    IDLE_SD,
    INTERVAL_SD,
    SCAN_SD,
    SERVICE_PRIORS,
)
from training.calibration.scans import Scans
from training.calibration.service_prediction import (
    balanced_accuracy,
    predict_intervals,
    predict_scans,
)

FloatArray = npt.NDArray[np.float64]

TAIL = FREE.index("tail_shape")
_FREE_INDEX = np.array([SERVICE_FIELDS.index(name) for name in FREE])

TAIL_SHAPES = (2.5, 3.0, 4.0, 5.0, 6.0)
"""
The shapes of the tail that are tried.

They are not among the free unknowns: least squares would choose the tail for the many intervals
that are far from violating. Steeper than 6 the tail is not: alone and below the knee, p90 is 0.885
of p95.
"""

LATE_RISE = {"rise_qps": 28e3, "queue_us": 85.0, "slice_exponent": 15.0, "level_us": 350.0}
"""A second place to start from: latency may begin to rise at a low load or at a high one."""

_STEP = 1e-4


class UnknownParts(NamedTuple):
    """
    Where the unknowns are.

    :param params: the `FREE` parameters
    :param scan_speed: speed factors of the scanned VMs
    :param scan_idle: their idle-latency factors
    :param run_speed: speed factors of the runs' VMs
    :param run_idle: their idle-latency factors
    """

    params: slice
    scan_speed: slice
    scan_idle: slice
    run_speed: slice
    run_idle: slice


class Problem:
    """
    The least-squares problem of one selection of scans and runs.

    The unknowns are logarithms, in the order of `UnknownParts`. A factor touches only its own rows,
    so all factors of one kind share one evaluation of the Jacobian.

    :param scans: scans of memcached alone
    :param intervals: intervals of runs
    :param weights: weight of each group's rows, 1 where not given
    """

    def __init__(
        self, scans: Scans, intervals: Intervals, weights: Mapping[str, float] | None = None
    ) -> None:
        weights = weights or {}
        of_vm = np.array([weights.get(group, 1.0) for group in scans.groups()]) ** 0.5
        self.scan_weight = of_vm[scans.vm] / SCAN_SD * np.where(scans.threads == 2, 1.0, 0.5)
        self.capacity_weight = of_vm[scans.vm[scans.saturated]] / CAPACITY_SD
        of_run = np.array([weights.get(group, 1.0) for group in intervals.groups]) ** 0.5
        self.tail_shape = SERVICE_PRIORS["tail_shape"].median
        self.converged = False  # whether the last solution has
        self.scans = scans
        self.intervals = intervals
        scanned, ran = len(scans.vm_names), len(intervals.vm_names)
        ends = np.cumsum([len(FREE), scanned, scanned, ran, ran])
        self.parts = UnknownParts(*(slice(int(a), int(b)) for a, b in pairwise([0, *ends])))
        self.size = int(ends[-1])
        self.log_median = np.log([SERVICE_PRIORS[name].median for name in FREE])
        self.log_sd = np.array([SERVICE_PRIORS[name].sd for name in FREE])
        self.log_p95 = np.log(scans.p95_us)
        self.log_capacity = np.log(scans.capacity)
        self.log_interval = np.log(intervals.p95_us)
        # A run's intervals are not independent: they weigh no more than the scans' points.
        count = max(len(intervals.qps), 1)
        balance = min(1.0, (len(scans.qps) / count) ** 0.5)
        self.interval_weight = of_run[intervals.vm] * balance / INTERVAL_SD

    @property
    def measurements(self) -> int:
        """How many of the residuals are measurements; they come first, the priors after them."""
        return len(self.scans.qps) + len(self.scans.capacity) + len(self.intervals.qps)

    def start(self) -> FloatArray:
        """Where the search begins: the priors' medians, every factor 1."""
        x = np.zeros(self.size)
        x[self.parts.params] = self.log_median
        return x

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Physical bounds; factors within a factor e of 1; the tail's shape held."""
        low = np.full(self.size, -1.0)
        high = np.full(self.size, 1.0)
        low[self.parts.params] = np.log([SERVICE_PRIORS[name].low for name in FREE])
        high[self.parts.params] = np.log([SERVICE_PRIORS[name].high for name in FREE])
        low[TAIL] = np.log(self.tail_shape) - 1e-5
        high[TAIL] = np.log(self.tail_shape) + 1e-5
        return low, high

    def scan_prediction(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """
        Predicted p95 and capacity of the scans' points.

        :param x: float64[n], the unknowns in the order of `UnknownParts`
        :return: p95 [us] and capacity [1/s], float64[n] each
        """
        return predict_scans(
            self.scans,
            params_of(x),
            np.exp(x[self.parts.scan_speed]),
            np.exp(x[self.parts.scan_idle]),
        )

    def interval_prediction(self, x: FloatArray) -> FloatArray:
        """
        Predicted p95 of the intervals.

        :param x: float64[n], the unknowns in the order of `UnknownParts`
        :return: p95 [us], float64[n]
        """
        return predict_intervals(
            self.intervals,
            params_of(x),
            np.exp(x[self.parts.run_speed]),
            np.exp(x[self.parts.run_idle]),
        )

    def residuals(self, x: FloatArray) -> FloatArray:
        """
        Weighted logarithmic errors, then the priors.

        :param x: float64[n], the unknowns in the order of `UnknownParts`
        """
        p95, capacity = self.scan_prediction(x)
        return np.concatenate(
            [
                (np.log(p95) - self.log_p95) * self.scan_weight,
                (np.log(capacity[self.scans.saturated]) - self.log_capacity) * self.capacity_weight,
                (np.log(self.interval_prediction(x)) - self.log_interval) * self.interval_weight,
                (x[self.parts.params] - self.log_median) / self.log_sd,
                x[self.parts.scan_speed] / self.scans.speed_sd,
                x[self.parts.scan_idle] / self.scans.idle_sd,
                x[self.parts.run_speed] / self.scans.speed_sd,
                x[self.parts.run_idle] / self.scans.idle_sd,
            ]
        )

    def jacobian(self, x: FloatArray) -> FloatArray:
        """
        Forward differences; one evaluation per parameter and per kind of factor.

        :param x: float64[n], the unknowns in the order of `UnknownParts`
        :return: float64[n_residuals, n_unknowns]
        """
        base = self.residuals(x)
        jacobian = np.zeros((len(base), self.size))

        def change(part: int | slice) -> FloatArray:
            moved = x.copy()
            moved[part] += _STEP
            return (self.residuals(moved) - base) / _STEP

        for column in range(len(FREE)):
            jacobian[:, column] = change(column)
        points, fits = len(self.scans.qps), len(self.scans.capacity)
        owner = np.concatenate([self.scans.vm, self.scans.vm[self.scans.saturated]])
        rows = np.arange(points + fits)
        for part in (self.parts.scan_speed, self.parts.scan_idle):
            jacobian[rows, part.start + owner] = change(part)[rows]
        rows = points + fits + np.arange(len(self.intervals.qps))
        for part in (self.parts.run_speed, self.parts.run_idle):
            jacobian[rows, part.start + self.intervals.vm] = change(part)[rows]
        priors = self.measurements + len(FREE)
        sds = [self.scans.speed_sd, self.scans.idle_sd] * 2
        for part, sd in zip(self.parts[1:], sds, strict=True):
            size = part.stop - part.start
            own = np.arange(size)
            jacobian[priors + own, part.start + own] = 1.0 / sd
            priors += size
        return jacobian

    def loss(self, x: FloatArray) -> float:
        """
        What the fit minimises.

        :param x: float64[n], the unknowns in the order of `UnknownParts`
        """
        return float(np.sum(np.sqrt(1.0 + self.residuals(x) ** 2) - 1.0))

    def solve(self, tail_shape: float, start: FloatArray | None = None) -> FloatArray:
        """
        The unknowns that fit best with one shape of the tail.

        :param tail_shape: the tail's shape
        :param start: the unknowns to begin at; `start()` if not given
        """
        self.tail_shape = tail_shape
        low, high = self.bounds()
        margin = 1e-3 * (high - low)
        guess = np.clip(self.start() if start is None else start, low + margin, high - margin)
        found = least_squares(
            self.residuals,
            guess,
            jac=self.jacobian,
            bounds=(low, high),
            loss="soft_l1",
            xtol=1e-5,
            ftol=1e-6,
            max_nfev=60,
        )
        self.converged = found.status > 0
        return found.x

    def solve_all(self, groups: Sequence[str]) -> FloatArray:
        """
        The unknowns that fit best, with the tail that tells violations best.

        :param groups: groups whose intervals choose the tail
        """
        chosen = np.isin(self.intervals.group(), list(groups)) & self.intervals.batch
        starts = [self.start(), self.start()]
        for name, value in LATE_RISE.items():
            starts[1][FREE.index(name)] = np.log(value)
        x = min((self.solve(TAIL_SHAPES[0], start) for start in starts), key=self.loss)
        best: tuple[float, FloatArray, bool] | None = None
        for shape in TAIL_SHAPES:
            x = self.solve(shape, x)
            score = balanced_accuracy(self.interval_prediction(x), self.intervals, chosen)
            if best is None or score > best[0] + 1e-9:
                best = score, x, self.converged
        assert best is not None
        _, x, self.converged = best
        return x

    def spread(self, x: FloatArray) -> FloatArray:
        """
        Standard deviation of the parameters' logarithms, from the curvature at the solution.

        :param x: float64[n], the solution in the order of `UnknownParts`
        """
        jacobian = self.jacobian(x)
        covariance = np.linalg.pinv(jacobian.T @ jacobian)
        return np.sqrt(np.diag(covariance)[self.parts.params])


def params_of(x: FloatArray) -> FloatArray:
    """
    The physics' parameters from the unknowns of a `Problem`.

    :param x: float64[n], the unknowns in the order of `UnknownParts`
    :return: float64[len(SERVICE_FIELDS)]
    """
    params = np.ones(len(SERVICE_FIELDS))
    params[_FREE_INDEX] = np.exp(x[: len(FREE)])
    return params


def soft_l1(z: FloatArray) -> FloatArray:
    """
    Residuals whose squares add up to the soft-L1 loss.

    :param z: residuals in standard deviations, one each
    """
    result: FloatArray = np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0))
    return result


def fit_vm(
    scans: Scans | None,
    intervals: Intervals | None,
    params: FloatArray,
    speed_sd: float,
    with_idle: bool = True,
) -> tuple[float, float]:
    """
    Speed and idle-latency factor of one VM, everything else given.

    :param scans: its scans, all with `vm` 0, if any
    :param intervals: intervals of its runs, all with `vm` 0, if any
    :param params: parameters of the physics
    :param speed_sd: prior for ln(speed)
    :param with_idle: fit the idle-latency factor too, else it stays 1
    """

    def residuals(z: FloatArray) -> FloatArray:
        speed = np.exp(z[:1])
        idle = np.exp(z[1:]) if with_idle else np.ones(1)
        parts = [z / np.array([speed_sd, IDLE_SD])[: len(z)]]
        if scans is not None:
            p95, served = predict_scans(scans, params, speed, idle)
            parts.append(np.log(p95 / scans.p95_us) / SCAN_SD)
            parts.append(np.log(served[scans.saturated] / scans.capacity) / CAPACITY_SD)
        if intervals is not None:
            p95 = predict_intervals(intervals, params, speed, idle)
            parts.append(np.log(p95 / intervals.p95_us) / INTERVAL_SD)
        return np.concatenate(parts)

    start = np.zeros(2 if with_idle else 1)
    z = least_squares(residuals, start, loss="soft_l1", bounds=(-1.0, 1.0), diff_step=1e-4).x
    return float(np.exp(z[0])), float(np.exp(z[1])) if with_idle else 1.0
