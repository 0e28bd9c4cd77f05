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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from env.errors import InputError
from env.physics.service import CPU_LIMIT, SERVICE_FIELDS
from training.calibration.intervals import read_intervals
from training.calibration.left_out import in_sample_errors, left_out_errors, widening
from training.calibration.logs.tables import Remark
from training.calibration.priors import FREE, SERVICE_PRIORS, STATED_SPREAD
from training.calibration.scans import cpu_limit, read_scans
from training.calibration.service_problem import TAIL, Problem, params_of

FloatArray = npt.NDArray[np.float64]

BOOTSTRAPS = 8

LEAST_SPREAD = 0.02
"""No parameter is better known than that from one year's VMs."""


@dataclass(frozen=True)
class ServiceFit:
    """
    What `fit_service` returns.

    :param service: `{field: {value, spread, unit, source}}` in the order of `SERVICE_FIELDS`
    :param vm_speed: the same keys for the VM-speed factor
    :param fit_error: named errors, measured on groups left out of the fit unless named otherwise
    :param vms: speed and idle-latency factor of each scanned VM (named by group and letter) and of
        each VM of the runs (by group and day)
    :param excluded: what was left out, and why
    """

    service: dict[str, dict[str, Any]]
    vm_speed: dict[str, Any]
    fit_error: dict[str, float]
    vms: dict[str, dict[str, float]]
    excluded: tuple[Remark, ...] = field(default=())


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
    tail = float(np.exp(x[TAIL]))

    # Bayesian bootstrap over groups: what would the fit be, had chance picked others?
    rng = np.random.default_rng(year)
    draws = []
    for _ in range(BOOTSTRAPS):
        weights = rng.exponential(size=len(groups))
        weights *= len(groups) / weights.sum()
        resampled = Problem(scans, intervals, dict(zip(groups, weights.tolist(), strict=True)))
        draws.append(resampled.solve(tail, x)[: len(FREE)])
    spread = np.hypot(problem.spread(x), np.std(draws, axis=0))
    spread = np.maximum(spread, LEAST_SPREAD)
    for name, stated in STATED_SPREAD.items():
        spread[FREE.index(name)] = stated

    # Few VMs were scanned: the spread between them is widened as Student's t asks for.
    n = len(scans.vm_names)
    log_speed = x[problem.parts[1]]
    log_idle = x[problem.parts[2]]
    vm_spread = float(np.sqrt(np.mean(log_speed**2))) * widening(n)
    idle_spread = float(np.sqrt(np.mean(log_idle**2))) * widening(n)
    spread[FREE.index("idle_us")] = np.hypot(spread[FREE.index("idle_us")], idle_spread)

    params = params_of(x)
    params[CPU_LIMIT] = cpu_limit(folder, year)
    service: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(SERVICE_FIELDS):
        entry = {"value": float(f"{params[index]:.5g}"), "spread": 0.03, "unit": "1", "source": ""}
        if name == "vm_speed":
            entry |= {"spread": 0.0, "source": "1 by definition; drawn from the vm_speed section"}
        elif name == "cpu_limit":
            entry |= {"unit": "vCPU", "source": "latency_curves: CPU columns at saturation"}
        else:
            prior = SERVICE_PRIORS[name]
            width = float(f"{spread[FREE.index(name)]:.3g}")
            entry |= {"spread": width, "unit": prior.unit, "source": prior.source}
        service[name] = entry
    vm_speed = {
        "value": 1.0,
        "spread": float(f"{vm_spread:.3g}"),
        "unit": "1",
        "source": f"latency_curves: {n} scanned VMs of {year}",
    }
    vms = {
        name: {"speed": round(float(np.exp(a)), 4), "idle": round(float(np.exp(b)), 4)}
        for name, a, b in zip(
            scans.vm_names + intervals.vm_names,
            np.concatenate([log_speed, x[problem.parts[3]]]),
            np.concatenate([log_idle, x[problem.parts[4]]]),
            strict=True,
        )
    }
    errors = in_sample_errors(problem, x) | left_out_errors(scans, intervals, groups)
    errors = {name: float(f"{value:.4g}") for name, value in errors.items() if value == value}
    return ServiceFit(service, vm_speed, errors, vms, tuple(remarks))


def check(problem: Problem, x: FloatArray) -> None:
    """
    Refuse a fit that did not converge or that ended on a bound.

    :param problem: what was solved
    :param x: its solution; parameters whose spread is stated may be held by their bounds
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
