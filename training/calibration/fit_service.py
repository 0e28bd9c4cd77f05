"""
Fit memcached's latency: capacity, knee, plateau, what batch work costs, and how VMs differ.

One least-squares problem in the logarithms of the parameters, with a soft-L1 loss:

* **scans** (memcached alone, T threads on C vCPUs): p95 against load, and the largest throughput;
* **runs** (memcached beside batch jobs): the p95 of every interval of the dynamic load. Memcached
  moves within an interval, so each one is cut into states and their latencies are mixed, by
  the very functions the simulator calls;
* **priors** for what the tables identify poorly (`training.calibration.priors` says which and why).

VMs of one type differ. Each scanned VM and each run gets a speed factor and an idle-latency factor
around 1; a prediction for a new VM uses 1, and `vm_speed` states the distribution. Nothing here
is random but the bootstrap, whose seed is fixed: the same tables give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from env.errors import InputError
from env.physics.service import CPU_LIMIT, SERVICE_FIELDS
from env.simulator.profile import Parameter, Vm
from training.calibration.intervals import Intervals, read_intervals
from training.calibration.logs.tables import Remark
from training.calibration.priors import FREE, SERVICE_PRIORS, STATED_SPREAD
from training.calibration.scans import Scans, cpu_limit, read_scans
from training.calibration.service_errors import in_sample_errors, left_out_errors, widening
from training.calibration.service_problem import TAIL, Problem, params_of
from training.processes import side_by_side
from training.statistics import significant

FloatArray = npt.NDArray[np.float64]

BOOTSTRAPS = 8

LEAST_SPREAD = 0.02
"""No parameter is better known than that from one year's VMs."""


@dataclass(frozen=True)
class ServiceFit:
    """
    What `fit_service` returns.

    :param service: memcached's parameters in the order of `SERVICE_FIELDS`
    :param vm_speed: the VM-speed factor
    :param fit_error: named errors, measured on groups left out of the fit unless named otherwise
    :param vms: speed and idle-latency factor of each scanned VM (named by group and letter) and of
        each VM of the runs (by group and day)
    :param excluded: what was left out, and why
    """

    service: dict[str, Parameter]
    vm_speed: Parameter
    fit_error: dict[str, float]
    vms: dict[str, Vm]
    excluded: tuple[Remark, ...]


def fit_service(folder: Path, year: int, pressure: Mapping[str, float]) -> ServiceFit:
    """
    Fit memcached's parameters to the measured runs of one year.

    :param folder: of the tables (`latency_curves`, `runs`, `intervals`, `events`)
    :param year: 2024 (n2d) or 2025 (n2)
    :param pressure: memory pressure per vCPU in use of each job
    :return: parameters with spread and source, VM factors, errors and what was left out
    :raises InputError: a table is missing or has nothing that can be used, or the fit is no good
    """
    remarks: list[Remark] = []
    scans = read_scans(folder, year, remarks)
    if not len(scans.qps):
        raise InputError(f"{folder}: latency_curves: no scans of {year}")
    intervals = read_intervals(folder, year, remarks, pressure)
    groups = sorted(set(scans.groups()) | set(intervals.groups))
    problem = Problem(scans, intervals)
    x = problem.solve_all(groups)
    check(problem, x)
    params = params_of(x)
    params[CPU_LIMIT] = cpu_limit(folder, year)
    log_speed, log_idle = x[problem.parts.scan_speed], x[problem.parts.scan_idle]
    spread = _spread(problem, x, groups, year)
    spread["idle_us"] = float(np.hypot(spread["idle_us"], _between_vms(log_idle)))
    vms = {
        name: Vm(speed=round(float(np.exp(speed)), 4), idle=round(float(np.exp(idle)), 4))
        for name, speed, idle in zip(
            scans.vm_names + intervals.vm_names,
            np.concatenate([log_speed, x[problem.parts.run_speed]]),
            np.concatenate([log_idle, x[problem.parts.run_idle]]),
            strict=True,
        )
    }
    errors = in_sample_errors(problem, x) | left_out_errors(scans, intervals, groups)
    return ServiceFit(
        service=_service_section(params, spread),
        vm_speed=Parameter(
            value=1.0,
            spread=significant(_between_vms(log_speed), 3),
            source=f"latency_curves: {len(scans.vm_names)} scanned VMs of {year}",
        ),
        fit_error={name: significant(error, 4) for name, error in errors.items() if error == error},
        vms=vms,
        excluded=tuple(remarks),
    )


def _spread(problem: Problem, x: FloatArray, groups: Sequence[str], seed: int) -> dict[str, float]:
    """
    Standard deviation of ln(value) of each parameter that is fitted.

    Two things make a value unsure: the curvature at the solution, and which groups happened to be
    measured (a Bayesian bootstrap that weighs the groups at random).
    """
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=(BOOTSTRAPS, len(groups)))
    weights *= len(groups) / weights.sum(axis=1, keepdims=True)
    by_group = [dict(zip(groups, row, strict=True)) for row in weights.tolist()]
    draws = side_by_side(partial(_resampled, problem.scans, problem.intervals, x), by_group)
    spread = np.maximum(np.hypot(problem.spread(x), np.std(draws, axis=0)), LEAST_SPREAD)
    return dict(zip(FREE, spread.tolist(), strict=True)) | STATED_SPREAD


def _resampled(
    scans: Scans, intervals: Intervals, x: FloatArray, weights: Mapping[str, float]
) -> FloatArray:
    """The fitted parameters' logarithms where the groups weigh differently."""
    tail = float(np.exp(x[TAIL]))
    return Problem(scans, intervals, weights).solve(tail, x)[: len(FREE)]


def _between_vms(log_factors: FloatArray) -> float:
    """Spread between VMs; few were scanned, so it is widened as Student's t asks for."""
    return float(np.sqrt(np.mean(log_factors**2))) * widening(len(log_factors))


def _service_section(params: FloatArray, spread: Mapping[str, float]) -> dict[str, Parameter]:
    """The profile's parameters of memcached, in the order of `SERVICE_FIELDS`."""
    section = {}
    for name, value in zip(SERVICE_FIELDS, params.tolist(), strict=True):
        if name == "vm_speed":
            width, unit = 0.0, "1"
            source = "1 by definition; drawn from the vm_speed section"
        elif name == "cpu_limit":
            width, unit, source = 0.03, "vCPU", "latency_curves: CPU columns at saturation"
        else:
            prior = SERVICE_PRIORS[name]
            width, unit, source = significant(spread[name], 3), prior.unit, prior.source
        section[name] = Parameter(value=significant(value), spread=width, unit=unit, source=source)
    return section


def check(problem: Problem, x: FloatArray) -> None:
    """
    Refuse a fit that did not converge or that ended on a bound.

    :param problem: what was solved
    :param x: its solution, a number for each parameter; those whose spread is stated may be held by
        their bounds
    :raises InputError: if it cannot be trusted
    """
    if not problem.converged:
        raise InputError("memcached's fit did not converge: no profile written")
    low, high = problem.bounds()
    margin = 1e-3
    stuck = [
        name
        for name, value, lower, upper in zip(FREE, x, low, high, strict=False)
        if name not in STATED_SPREAD and not lower + margin <= value <= upper - margin
    ]
    if stuck:
        raise InputError(
            f"memcached's fit ended on the bound of {', '.join(stuck)}: no profile written"
        )
