"""
Fit the batch jobs: solo work, serial part, SMT factor, interference and launch overhead.

Three sources, one least-squares problem in the logarithms of the parameters:

* **logged runs**: each run is cut into states (which jobs run where beside which memcached cores);
  a job's predicted duration is `overhead + work / mean speed`, where the mean goes over the
  states it was logged in, weighted by time. The speeds come from `job_speeds`, the very function
  the simulator steps. Runs share states, so one evaluation of all runs takes milliseconds.
* **scaling tables** (each job alone with 1, 2, 4, 8 threads), through the same function.
* **priors**, where the runs identify little: `training.calibration.priors` says which, how
  wide and why.

Groups differ by their VM: each gets a speed factor around 1 that the fit estimates and prediction
for a new group leaves at 1. Residuals are logarithms of predicted over measured, with a soft-L1
loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from env.codes import NORMAL
from env.errors import InputError
from env.physics.compiled import allocating
from env.physics.jobs import job_speeds
from env.physics.parameters import (
    HOST_FIELDS,
    JOB_FIELDS,
    LAUNCH_OVERHEAD_S,
    REQUIRED_JOB_FIELDS,
    WORK_S,
)
from training.calibration.job_states import States
from training.calibration.logs.course import JOBS
from training.calibration.logs.tables import Remark, numeric, read_table, without
from training.calibration.priors import (
    FIXED,
    FIXED_SPREAD,
    HOST_PRIORS,
    JOB_MACHINE_SD,
    JOB_PRIORS,
    MACHINE_SD,
    OWN_JOB_PRIORS,
    RUN_SD,
    SCALING_SD,
    VM_SD,
    Prior,
)
from training.calibration.service_problem import soft_l1
from training.processes import side_by_side

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BOOTSTRAPS = 16

TOLERANCE = 1e-6
"""
Relative change of the loss, or of the unknowns, at which a fit ends.

With 1e-8 a fit takes up to twice as long, and no parameter differs by more than 0.2 %.
"""

SIBLINGS_8 = np.array([1, 0, 3, 2, 5, 4, 7, 6], dtype=np.int64)
"""Of the machine of the scaling tables."""


@allocating
def _mean_speeds(  # type: ignore[no-untyped-def]
    running,
    threads,
    cores,
    weight,
    sibling,
    occupancy,
    state,
    sample,
    seconds,
    quota,
    job,
    params,
    host,
    speeds,
):
    """Time-weighted mean speed of each sample over its states."""
    n_states, n_jobs = running.shape
    used, busy = np.zeros((n_jobs, len(sibling))), np.zeros(len(sibling))
    by_state = np.zeros((n_states, n_jobs))
    cpu = np.zeros((n_states, n_jobs))
    unlimited = np.full(n_jobs, np.inf)
    nobody = np.zeros(len(sibling))
    for s in range(n_states):
        job_speeds(
            running[s],
            threads[s],
            cores[s],
            weight[s],
            unlimited,
            sibling,
            occupancy[s],
            params,
            host,
            by_state[s],
            used,
            busy,
            nobody,
        )
        for c in range(len(sibling)):
            for j in range(n_jobs):
                cpu[s, j] += used[j, c]
    total = np.zeros(len(speeds))
    speeds[:] = 0.0
    for k in range(len(state)):
        speed = by_state[state[k], job[sample[k]]]
        speed *= min(1.0, quota[k] / max(cpu[state[k], job[sample[k]]], 1e-9))
        speeds[sample[k]] += seconds[k] * speed
        total[sample[k]] += seconds[k]
    for k in range(len(speeds)):
        speeds[k] /= total[k]


def predict(states: States, params: FloatArray, host: FloatArray) -> FloatArray:
    """
    Predicted duration [s] of every sample, each with its logged neighbours.

    :param states: which jobs ran together, and for how long
    :param params: float64[J, len(JOB_FIELDS)] in the order of `JOBS`
    :param host: float64[len(HOST_FIELDS)], the host parameters in that order
    """
    speeds = np.empty(len(states.measured_s))
    _mean_speeds(
        states.running,
        states.threads,
        states.cores,
        states.weight,
        states.sibling,
        states.occupancy,
        states.state,
        states.sample,
        states.seconds,
        states.quota,
        states.job,
        params,
        host,
        speeds,
    )
    result: FloatArray = params[states.job, LAUNCH_OVERHEAD_S] + params[
        states.job, WORK_S
    ] / np.maximum(speeds, 1e-9)
    return result


@dataclass(frozen=True)
class Scaling:
    """Median run times alone, by job and thread count, from the scaling tables."""

    job: IntArray
    threads: IntArray
    seconds: FloatArray


def read_scaling(folder: Path, years: Sequence[int], remarks: list[Remark]) -> Scaling:
    """
    Median solo times of the given years; what is left out goes to `remarks`.

    :param folder: folder of measured tables
    :param years: the years to read
    :param remarks: receives what is left out
    :raises InputError: the table is missing or has none
    """
    table = read_table(folder, "job_scaling")
    table = table[table["year"].isin(years) & table["job"].isin(JOBS)]
    table = numeric(table, "job_scaling", ("threads", "real_s"), remarks, "path")
    faults = (
        (table["real_s"] <= 0.0, "real_s is not positive"),
        (~table["threads"].isin(range(1, 9)), "threads are not 1 to 8"),
    )
    table = without(table, "job_scaling", faults, remarks, "path")
    if table.empty:
        raise InputError(f"{folder}: job_scaling: no rows of {', '.join(map(str, years))}")
    medians = table.groupby(["job", "threads"], sort=True)["real_s"].median()
    job = np.array([JOBS.index(name) for name, _ in medians.index], np.int64)
    threads = np.array([count for _, count in medians.index], np.int64)
    return Scaling(job, threads, medians.to_numpy(np.float64))


def predict_scaling(scaling: Scaling, params: FloatArray, host: FloatArray) -> FloatArray:
    """
    Predicted solo times on an idle 8-vCPU machine.

    :param scaling: jobs and thread counts to predict
    :param params: float64[J, len(JOB_FIELDS)]
    :param host: float64[len(HOST_FIELDS)]
    :return: float64[n], one time per row of `scaling` [s]
    """
    count = len(scaling.job)
    rows = np.arange(count)
    running = np.zeros((count, len(JOBS)), np.uint8)
    running[rows, scaling.job] = 1
    threads = np.ones((count, len(JOBS)), np.int64)
    threads[rows, scaling.job] = scaling.threads
    cores = np.full((count, len(JOBS)), 255, np.int64)
    speeds = np.empty(count)
    _mean_speeds(
        running,
        threads,
        cores,
        np.full((count, len(JOBS)), NORMAL),
        SIBLINGS_8,
        np.zeros((count, 8)),
        rows,
        rows,
        np.ones(count),
        np.full(count, np.inf),
        scaling.job,
        params,
        host,
        speeds,
    )
    result: FloatArray = params[scaling.job, WORK_S] / speeds
    return result


@dataclass(frozen=True)
class JobFit:
    """
    What one fit found.

    :param params: float64[J, len(JOB_FIELDS)]
    :param host: parameters of the host that the fit estimates, by name
    :param vm_speed: speed factor of each group's VM
    :param converged: whether the optimiser has converged
    :param at_bound: names of parameters that ended on a bound
    :param standard_errors: of ln(value), of the free parameters in their order
    """

    params: FloatArray
    host: dict[str, float]
    vm_speed: dict[str, float]
    converged: bool
    at_bound: tuple[str, ...]
    standard_errors: FloatArray


def fit_jobs(
    states: States,
    scaling: Scaling,
    start: JobFit | None = None,
    group_weights: Mapping[str, float] | None = None,
    host_priors: Mapping[str, Prior] = HOST_PRIORS,
) -> JobFit:
    """
    Fit all parameters to states and scaling tables.

    :param states: which jobs ran together, and for how long
    :param scaling: run times alone, by thread count
    :param start: the fit to begin at; a bootstrap sample begins at the full fit
    :param group_weights: weight of each group's squared residuals, 1 if not given
    :param host_priors: of the host's parameters
    """
    names, priors = _free_parameters(scaling, host_priors)
    medians = np.log([prior.median for prior in priors])
    sds = np.array([prior.sd for prior in priors])
    low = np.log([prior.low for prior in priors])
    high = np.log([prior.high for prior in priors])
    n_groups = len(states.groups)
    n_extra = n_groups + 1 + len(JOBS)
    x0 = np.concatenate([medians, np.zeros(n_extra)])
    if start is not None:
        x0[: len(names)] = [_value(start, name) for name in names]
        x0[: len(names)] = np.clip(np.log(x0[: len(names)]), low + 1e-6, high - 1e-6)
    runs_per_group = np.array(
        [len(np.unique(states.run[states.group == g])) for g in range(n_groups)]
    )
    # Runs of one group repeat one policy on one VM: they are not independent samples.
    weight = (runs_per_group[states.group] ** -0.25) / RUN_SD
    if group_weights is not None:
        by_group = np.array([group_weights[name] for name in states.groups])
        weight *= np.sqrt(by_group)[states.group]

    def residuals(x: FloatArray) -> FloatArray:
        params, host = _unpack(names, x)
        vm = x[len(names) : len(names) + n_groups]
        machine = x[len(names) + n_groups]
        by_job = x[len(names) + n_groups + 1 :]
        logged = np.log(predict(states, params, host) / states.measured_s) - vm[states.group]
        alone = np.log(predict_scaling(scaling, params, host) / scaling.seconds)
        alone -= machine + by_job[scaling.job]
        prior = (x[: len(names)] - medians) / sds
        return np.concatenate(
            [
                soft_l1(logged * weight),
                soft_l1(alone / SCALING_SD),
                prior,
                vm / VM_SD,
                [machine / MACHINE_SD],
                by_job / JOB_MACHINE_SD,
            ]
        )

    free = np.concatenate([low, np.full(n_extra, -1.0)])
    top = np.concatenate([high, np.full(n_extra, 1.0)])
    found = least_squares(
        residuals,
        x0,
        bounds=(free, top),
        x_scale="jac",
        ftol=TOLERANCE,
        xtol=TOLERANCE,
        max_nfev=500,
    )
    params, host = _unpack(names, found.x)
    of_host = dict(zip(HOST_FIELDS, host.tolist(), strict=True))
    margin = 1e-3
    stuck = tuple(
        ".".join(name)
        for name, value, lower, upper in zip(names, found.x, low, high, strict=False)
        if value < lower + margin or value > upper - margin
    )
    vm = np.exp(found.x[len(names) : len(names) + n_groups])
    return JobFit(
        params,
        {field: of_host[field] for field in HOST_PRIORS},
        dict(zip(states.groups, vm.tolist(), strict=True)),
        bool(found.status > 0),
        stuck,
        _standard_errors(found.jac)[: len(names)],
    )


def job_spreads(
    states: States, scaling: Scaling, fit: JobFit
) -> tuple[FloatArray, dict[str, float]]:
    """
    Standard deviation of ln(value) of each parameter.

    Two things make a value unsure: how sharply the data speak (curvature at the solution) and which
    groups happened to be measured (a Bayesian bootstrap that weighs the groups at random).

    :param states: the states that were fitted
    :param scaling: the scaling tables that were fitted
    :param fit: the full fit to them
    :return: float64[J, len(JOB_FIELDS)], and the host's parameters by name
    """
    names, _ = _free_parameters(scaling, HOST_PRIORS)
    rng = np.random.default_rng(2025)
    weights = rng.exponential(size=(BOOTSTRAPS, len(states.groups)))
    weights *= len(states.groups) / weights.sum(axis=1, keepdims=True)
    by_group = [dict(zip(states.groups, row, strict=True)) for row in weights.tolist()]
    fits = side_by_side(partial(fit_jobs, states, scaling, fit), by_group)
    draws = [[np.log(_value(draw, name)) for name in names] for draw in fits]
    spread = np.hypot(fit.standard_errors, np.std(draws, axis=0))
    params = np.full((len(JOBS), len(JOB_FIELDS)), FIXED_SPREAD)
    host = {}
    for (owner, field), value in zip(names, spread, strict=True):
        if owner == "host":
            host[field] = float(value)
        else:
            params[JOBS.index(owner), JOB_FIELDS.index(field)] = value
    return params, host


def _standard_errors(jacobian: FloatArray) -> FloatArray:
    """Standard errors of the unknowns from the curvature of the squared residuals."""
    result: FloatArray = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    return result


def _free_parameters(
    scaling: Scaling, host_priors: Mapping[str, Prior]
) -> tuple[list[tuple[str, str]], list[Prior]]:
    names: list[tuple[str, str]] = []
    priors = []
    for number, job in enumerate(JOBS):
        for field in REQUIRED_JOB_FIELDS:
            if (job, field) in FIXED:
                continue
            names.append((job, field))
            if field == "work_s":
                alone = scaling.seconds[(scaling.job == number) & (scaling.threads == 1)]
                priors.append(Prior(float(alone[0]), 0.5, 1.0, 5000.0))
            else:
                priors.append(OWN_JOB_PRIORS.get((job, field), JOB_PRIORS[field]))
    for field, prior in host_priors.items():
        names.append(("host", field))
        priors.append(prior)
    return names, priors


def _unpack(names: Sequence[tuple[str, str]], x: FloatArray) -> tuple[FloatArray, FloatArray]:
    params = np.ones((len(JOBS), len(JOB_FIELDS)))
    of_host: dict[str, float] = {}
    for (job, field), value in FIXED.items():
        params[JOBS.index(job), JOB_FIELDS.index(field)] = value
    for (owner, field), value in zip(names, np.exp(x[: len(names)]), strict=True):
        if owner == "host":
            of_host[field] = value
        else:
            params[JOBS.index(owner), JOB_FIELDS.index(field)] = value
    return params, host_parameters(of_host)


def _value(fit: JobFit, name: tuple[str, str]) -> float:
    if name[0] == "host":
        return fit.host[name[1]]
    return float(fit.params[JOBS.index(name[0]), JOB_FIELDS.index(name[1])])


def host_parameters(values: Mapping[str, float]) -> FloatArray:
    """
    Host parameters for `job_speeds`, all others 1: a VM of the fitted speed.

    :param values: values of the parameters that are not 1, by name
    :return: float64[len(HOST_FIELDS)]
    """
    return np.array([values.get(field, 1.0) for field in HOST_FIELDS], dtype=np.float64)


def duration_errors(states: States, fit: JobFit) -> FloatArray:
    """
    Signed relative error of every sample's duration, on a VM of speed 1.

    :param states: the runs, cut into states
    :param fit: the fit to judge
    :return: float64[n], predicted over measured duration minus 1
    """
    predicted = predict(states, fit.params, host_parameters(fit.host))
    result: FloatArray = predicted / states.measured_s - 1.0
    return result
