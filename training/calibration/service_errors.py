"""How far memcached's fit can be believed: its errors on groups, VMs and runs it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import norm
from scipy.stats import t as student_t

from training.analysis.curves import knee_qps
from training.calibration.intervals import Intervals
from training.calibration.priors import SERVICE_PRIORS
from training.calibration.scans import Scans
from training.calibration.service_prediction import (
    balanced_accuracy,
    predict_intervals,
    predict_scans,
)
from training.calibration.service_problem import Problem, fit_vm, params_of
from training.processes import side_by_side

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LeftOut:
    """
    What is said of one group by a fit that never saw it.

    :param rows: int64[n], numbers of the group's intervals
    :param new_vm_us: float64[n], p95 predicted for a VM never seen [us]
    :param known_vm_us: float64[n], p95 predicted for the VM that other runs show [us]
    :param lookup_us: float64[n], median p95 at a like load on as many vCPUs, NaN if none [us]
    :param curves: relative error of its scans' curves, by what is predicted, a number per VM
    :param inside: whether the speed of each scanned VM is inside the 90 % interval
    """

    rows: IntArray
    new_vm_us: FloatArray
    known_vm_us: FloatArray
    lookup_us: FloatArray
    curves: dict[str, list[float]]
    inside: list[bool]


def left_out_errors(scans: Scans, intervals: Intervals, groups: Sequence[str]) -> dict[str, float]:
    """
    Errors on each group by a fit that never saw it.

    :param scans: scans of memcached alone
    :param intervals: intervals of runs
    :param groups: the groups to leave out, one after the other
    """
    new_vm, known_vm, lookup = np.full((3, len(intervals.qps)), np.nan)
    curves: dict[str, list[float]] = {}
    inside = []
    left_out = partial(_left_out, scans, intervals, groups)
    for found in side_by_side(left_out, groups if len(groups) > 1 else ()):
        new_vm[found.rows] = found.new_vm_us
        known_vm[found.rows] = found.known_vm_us
        lookup[found.rows] = found.lookup_us
        inside += found.inside
        for what, errors_of in found.curves.items():
            curves.setdefault(what, []).extend(errors_of)
    held = intervals.batch & (intervals.p95_us <= intervals.slo_us) & np.isfinite(lookup)

    def median(p95: FloatArray) -> float:
        error = np.abs(p95 / intervals.p95_us - 1.0)[held]
        return float(np.nanmedian(error)) if len(error) else np.nan

    errors = {
        "left-out p95 under SLO, median, new VM": median(new_vm),
        "left-out p95 under SLO, median, VM known from other runs": median(known_vm),
        "left-out p95 under SLO, median, lookup": median(lookup),
        "left-out violations, balanced accuracy, new VM": balanced_accuracy(
            new_vm, intervals, intervals.batch
        ),
        "left-out violations, balanced accuracy, VM known from other runs": balanced_accuracy(
            known_vm, intervals, intervals.batch
        ),
    }
    for name, values in sorted(curves.items()):
        errors[f"{name}, median"] = float(np.nanmedian(values))
        errors[f"{name}, worst VM"] = float(np.nanmax(values))
    if inside:
        errors["left-out VMs inside the 90 % interval of vm_speed, share"] = float(np.mean(inside))
    return errors


def _left_out(scans: Scans, intervals: Intervals, groups: Sequence[str], group: str) -> LeftOut:
    """Fit without one group, then predict it."""
    problem = Problem(scans, intervals, {group: 0.0})
    if group in intervals.groups:
        x = problem.solve_all([other for other in groups if other != group])
    else:  # scans alone do not see the tail
        x = problem.solve(SERVICE_PRIORS["tail_shape"].median)
    params = params_of(x)
    names = intervals.group()
    rows = np.flatnonzero((names == group) & intervals.batch)
    train = np.flatnonzero((names != group) & intervals.batch)
    ones = np.ones(len(intervals.vm_names))
    seen = np.array([name != group for name in scans.groups()])
    width = vm_width(x[problem.parts.scan_speed][seen], scans.speed_sd)
    curves: dict[str, list[float]] = {}
    inside = []
    for vm in np.flatnonzero(~seen):
        own = scans.of_vm(int(vm))
        if not len(own.qps):
            continue
        for label, with_idle in (("speed", False), ("speed and idle", True)):
            factors = fit_vm(own, None, params, scans.speed_sd, with_idle)
            for what, error in curve_errors(own, params, *factors).items():
                curves.setdefault(f"scan, {label}, {what}", []).append(abs(error))
            if not with_idle:
                inside.append(bool(abs(np.log(factors[0])) <= norm.ppf(0.95) * width))
    return LeftOut(
        rows,
        predict_intervals(intervals, params, ones, ones)[rows],
        predict_new_runs(intervals, params, scans.speed_sd, rows),
        _lookup_p95(intervals, train, rows),
        curves,
        inside,
    )


def in_sample_errors(problem: Problem, x: FloatArray) -> dict[str, float]:
    """
    Errors on the data of the fit itself, with its VM factors.

    :param problem: the problem that was solved
    :param x: float64[n], its solution in the order of `UnknownParts`
    """
    intervals = problem.intervals
    p95 = problem.interval_prediction(x)
    held = intervals.batch & (intervals.p95_us <= intervals.slo_us)
    error = np.abs(p95 / intervals.p95_us - 1.0)
    return {
        "in-sample p95 under SLO, median": float(np.median(error[held])) if held.any() else np.nan,
        "in-sample violations, balanced accuracy": balanced_accuracy(
            p95, intervals, intervals.batch
        ),
    }


def predict_new_runs(
    intervals: Intervals, params: FloatArray, speed_sd: float, rows: IntArray
) -> FloatArray:
    """
    Predict runs with the VM factors that the other runs of their VM show.

    :param intervals: intervals of runs
    :param params: parameters of the physics, fitted without these runs' group
    :param speed_sd: prior for ln(speed)
    :param rows: numbers of the intervals to predict
    """
    p95 = np.full(len(intervals.qps), np.nan)
    for run in np.unique(intervals.run[rows]):
        own = rows[intervals.run[rows] == run]
        vm = int(intervals.vm[own[0]])
        others = np.flatnonzero((intervals.vm == vm) & (intervals.run != run))
        speed, idle = 1.0, 1.0
        if len(others):
            speed, idle = fit_vm(None, intervals.select(others, [vm]), params, speed_sd)
        p95[own] = predict_intervals(
            intervals.select(own, [vm]), params, np.array([speed]), np.array([idle])
        )
    return p95[rows]


def _lookup_p95(intervals: Intervals, train: IntArray, test: IntArray) -> FloatArray:
    """The plain alternative: median p95 by vCPUs and 10K QPS; NaN where none was seen."""
    cores = np.array([int(mask).bit_count() for mask in intervals.mask], dtype=np.float64)
    held = np.add.reduceat(cores * intervals.duration_s, intervals.first[:-1])
    whole = np.add.reduceat(intervals.duration_s, intervals.first[:-1])
    key = np.rint(held / whole).astype(int) * 1000 + (intervals.qps // 10_000).astype(int)
    medians = pd.Series(intervals.p95_us[train]).groupby(key[train]).median()
    return medians.reindex(key[test]).to_numpy(np.float64)


def curve_errors(scans: Scans, params: FloatArray, speed: float, idle: float) -> dict[str, float]:
    """
    Errors of one VM's two-thread curves: below the knee, knee and plateau.

    :param scans: one VM's scans (`one_vm`)
    :param params: parameters of the physics
    :param speed: the VM's speed factor
    :param idle: the VM's idle-latency factor
    :return: per curve and quantity, the relative error (median of the absolute one below the knee)
    """
    errors = {}
    p95, _ = predict_scans(scans, params, np.array([speed]), np.array([idle]))
    for cores in (1, 2):
        rows = scans.cores == cores
        if not rows.any():
            continue
        table = pd.DataFrame({"qps": scans.qps, "p95": scans.p95_us, "model": p95})[rows]
        curve = table.groupby(table["qps"].round(-3)).median()
        qps, measured, model = (curve[name].to_numpy() for name in ("qps", "p95", "model"))
        knee = knee_qps(qps, measured)
        below = qps < (0.9 * knee if knee == knee else np.inf)
        name = f"T2C{cores}"
        errors[f"{name} below the knee"] = float(np.median(np.abs(model / measured - 1.0)[below]))
        if knee == knee:
            errors[f"{name} knee"] = knee_qps(qps, model) / knee - 1.0
        plateau = float(np.median(measured[-4:]))
        if plateau > 1.25 * float(np.interp(0.25 * qps[-1], qps, measured)):
            errors[f"{name} plateau"] = float(np.median(model[-4:])) / plateau - 1.0
    return errors


def vm_width(log_speed: FloatArray, speed_sd: float) -> float:
    """
    How wide ln(speed) of a VM never seen is distributed.

    :param log_speed: of the VMs that were seen
    :param speed_sd: prior for ln(speed)
    """
    width = float(np.sqrt(np.mean(log_speed**2)))
    return float(np.hypot(width, speed_sd / 2.0)) * widening(len(log_speed))


def widening(n: int) -> float:
    """
    Student's t over the normal distribution at 90 %, for `n` VMs around a known centre.

    :param n: number of VMs
    """
    return float(student_t.ppf(0.95, n) / norm.ppf(0.95))
