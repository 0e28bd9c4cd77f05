"""Fit the batch jobs: solo work, serial part, SMT factor, interference and launch overhead.

Three sources, one least-squares problem in the logarithms of the parameters:

* **logged runs**: each run is cut into states (which jobs run where beside which memcached cores);
  a job's predicted duration is ``overhead + work / mean speed``, where the mean goes over the
  states it was logged in, weighted by time. The speeds come from ``job_speeds``, the very function
  the simulator steps. Runs share states, so one evaluation of all runs takes milliseconds.
* **scaling tables** (each job alone with 1, 2, 4, 8 threads), through the same function.
* **priors**, where the runs identify little: which parameter, how wide and why is in `PRIORS`.

Groups differ by their VM: each gets a speed factor around 1 that the fit estimates and prediction
for a new group leaves at 1. Residuals are logarithms of predicted over measured, with a soft-L1
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from env.codes import BACKGROUND, NORMAL
from env.errors import InputError
from env.physics.compiled import allocating
from env.physics.jobs import JOB_FIELDS, LAUNCH_OVERHEAD_S, WORK_S, job_speeds
from env.physics.parameters import HOST_FIELDS
from training.calibration.tables import (
    VCPUS,
    Remark,
    RunTrace,
    mask_at,
    numeric,
    read_table,
    without,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Occupancy = Callable[[FloatArray, int], FloatArray]
"""Fraction of each of memcached's vCPUs that it asks for: of loads [1/s] and their number."""

JOBS = ("blackscholes", "canneal", "dedup", "ferret", "freqmine", "radix", "vips")
SIBLINGS = np.array([1, 0, 3, 2], dtype=np.int64)
BATCH_SIBLINGS = np.array([2, 3, 0, 1], dtype=np.int64)
SIBLINGS_8 = np.array([1, 0, 3, 2, 5, 4, 7, 6], dtype=np.int64)

RUN_SD = 0.06  # of ln(predicted / measured) for one job of one run
SCALING_SD = 0.10  # the same in the scaling tables
VM_SD = 0.05  # of ln(speed) between the VMs of two groups
MACHINE_SD = 0.30  # of ln(speed) between the scaling tables' machine and the VM
JOB_MACHINE_SD = 0.25  # the same, from job to job: caches and memory differ more than clocks


@dataclass(frozen=True)
class Prior:
    """A lognormal prior and the bounds the physics sets."""

    median: float
    sd: float
    low: float
    high: float


# work_s has no prior but its scaling table. Serial fractions: Amdahl's law on that table leaves
# them uncertain by a third. SMT factors: the tables' 8 threads on 4 cores against 4 threads give
# 0.53 to 0.79. Sensitivity and pressure: only their products show in the runs, a few per cent each.
# Overheads: container wall time minus the job's own clock (+1-3 s; dedup 6-8 s and blackscholes
# 4-9 s for unpacking their input) plus the controllers' polling.
PRIORS: dict[str, Prior] = {
    "serial_fraction": Prior(0.02, 1.0, 1e-4, 0.5),
    "cores_per_thread": Prior(1.0, 0.05, 1.0, 2.0),
    "smt": Prior(0.70, 0.15, 0.3, 0.98),
    "sensitivity": Prior(0.03, 0.7, 1e-3, 2.0),
    "pressure": Prior(0.5, 0.7, 0.01, 5.0),
    "launch_overhead_s": Prior(2.5, 0.4, 0.3, 20.0),
}
JOB_PRIORS: dict[tuple[str, str], Prior] = {
    ("blackscholes", "serial_fraction"): Prior(0.12, 0.3, 1e-4, 0.5),
    ("canneal", "serial_fraction"): Prior(0.16, 0.3, 1e-4, 0.5),
    ("blackscholes", "launch_overhead_s"): Prior(6.0, 0.3, 0.3, 20.0),
    ("dedup", "launch_overhead_s"): Prior(7.0, 0.3, 0.3, 20.0),
    ("ferret", "cores_per_thread"): Prior(1.30, 0.05, 1.0, 2.0),
    ("dedup", "cores_per_thread"): Prior(1.38, 0.05, 1.0, 2.0),
}
HOST_PRIORS = {
    "service_pressure": Prior(0.3, 0.7, 0.01, 5.0),
    "service_sibling": Prior(1.5, 0.4, 0.3, 5.0),
    "straggling": Prior(0.6, 0.3, 0.05, 1.0),
}

FIXED_SPREAD = 0.02
# Not fitted: canneal sets the unit of pressure; one thread of a plain job keeps one vCPU busy.
FIXED = {("canneal", "pressure"): 1.0} | {
    (job, "cores_per_thread"): 1.0 for job in JOBS if job not in ("ferret", "dedup")
}


@dataclass(frozen=True)
class States:
    """All runs, cut into the distinct situations they went through.

    State ``s`` has ``running[s]``, ``threads[s]``, ``cores[s]`` (by job) and the mean occupancy of
    each vCPU by memcached. Sample ``sample[k]`` (one job of one run) spent ``seconds[k]`` in state
    ``state[k]``, under a CPU quota of ``quota[k]`` vCPUs.
    """

    running: npt.NDArray[np.uint8]
    threads: IntArray
    cores: IntArray
    weight: IntArray
    occupancy: FloatArray
    state: IntArray
    sample: IntArray
    seconds: FloatArray
    quota: FloatArray
    job: IntArray  # by sample
    group: IntArray  # by sample
    run: IntArray  # by sample
    measured_s: FloatArray  # by sample
    groups: tuple[str, ...]


def build_states(runs: Sequence[RunTrace], occupancy_of: Occupancy) -> States:
    """Cut runs into states.

    :param runs: logged runs.
    :param occupancy_of: how busy memcached is.
    """
    index = {job: k for k, job in enumerate(JOBS)}
    groups = tuple(dict.fromkeys(run.group for run in runs))
    running: list[npt.NDArray[np.uint8]] = []
    threads: list[IntArray] = []
    cores: list[IntArray] = []
    weight: list[IntArray] = []
    occupancy: list[list[float]] = []
    state: list[int] = []
    sample: list[int] = []
    seconds: list[float] = []
    quota: list[float] = []
    jobs_of: list[int] = []
    group_of: list[int] = []
    run_of: list[int] = []
    measured: list[float] = []
    for number, run in enumerate(runs):
        load = _LoadIntegral(run, occupancy_of)
        samples = {}
        for job in run.jobs:
            samples[job.name] = len(measured)
            jobs_of.append(index[job.name])
            group_of.append(groups.index(run.group))
            run_of.append(number)
            measured.append(job.run_s)
        times = {run.first_start_s, run.last_end_s}
        times |= {t for t, _ in run.service_moves if np.isfinite(t)}
        for job in run.jobs:
            times |= {job.start_s, job.end_s} | {t for t, _ in job.moves}
            times |= {t for pause in job.pauses for t in pause}
        edges = sorted(t for t in times if run.first_start_s <= t <= run.last_end_s)
        width = {job.name: job.threads for job in run.jobs}
        limit = {job.name: job.quota for job in run.jobs}
        spent: dict[tuple[tuple[tuple[str, int], ...], int], list[float]] = {}
        for begin, end in pairwise(edges):
            middle = 0.5 * (begin + end)
            present = tuple(
                (job.name, mask_at(job.moves, middle))
                for job in run.jobs
                if job.start_s <= middle < job.end_s
                and not any(a <= middle < b for a, b in job.pauses)
            )
            if not present:
                continue
            mask = mask_at(run.service_moves, middle)
            entry = spent.setdefault((present, mask), [0.0, 0.0])
            entry[0] += end - begin
            entry[1] += load.between(begin, end, mask.bit_count())
        for (present, mask), (duration, busy) in spent.items():
            row = len(running)
            running.append(np.zeros(len(JOBS), np.uint8))
            threads.append(np.ones(len(JOBS), np.int64))
            cores.append(np.zeros(len(JOBS), np.int64))
            weight.append(np.full(len(JOBS), BACKGROUND if run.background else NORMAL))
            share = busy / duration
            occupancy.append([share if (mask >> c) & 1 else 0.0 for c in range(VCPUS)])
            for name, job_mask in present:
                running[row][index[name]] = 1
                threads[row][index[name]] = width[name]
                cores[row][index[name]] = job_mask
                state.append(row)
                sample.append(samples[name])
                seconds.append(duration)
                quota.append(limit[name])
    return States(
        np.array(running, np.uint8),
        np.array(threads, np.int64),
        np.array(cores, np.int64),
        np.array(weight, np.int64),
        np.array(occupancy, np.float64),
        np.array(state, np.int64),
        np.array(sample, np.int64),
        np.array(seconds, np.float64),
        np.array(quota, np.float64),
        np.array(jobs_of, np.int64),
        np.array(group_of, np.int64),
        np.array(run_of, np.int64),
        np.array(measured, np.float64),
        groups,
    )


class _LoadIntegral:
    """Integral of memcached's occupancy over time, for each number of vCPUs."""

    def __init__(self, run: RunTrace, occupancy_of: Occupancy) -> None:
        self.edges = np.append(run.interval_start_s, run.interval_end_s[-1])
        lengths = np.diff(self.edges)
        self.total = [
            np.append(0.0, np.cumsum(occupancy_of(run.qps, width) * lengths))
            for width in range(1, VCPUS + 1)
        ]

    def between(self, begin: float, end: float, cores: int) -> float:
        total = self.total[cores - 1]
        low, high = np.interp([begin, end], self.edges, total)
        return float(high - low)


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
    """Predicted duration [s] of every sample, each with its logged neighbours.

    :param states: who ran beside whom, and for how long.
    :param params: float64[J, len(JOB_FIELDS)] in the order of `JOBS`.
    :param host: host parameters in the order of ``HOST_FIELDS``.
    """
    speeds = np.empty(len(states.measured_s))
    _mean_speeds(
        states.running,
        states.threads,
        states.cores,
        states.weight,
        BATCH_SIBLINGS,
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
    """Median solo times of the given years; what is left out goes to ``remarks``.

    :raises InputError: the table is missing or has none.
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
    """Predicted solo times on an idle 8-vCPU machine."""
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
    """What one fit found.

    :param params: float64[J, len(JOB_FIELDS)].
    :param host: parameters of the host that the fit estimates, by name.
    :param vm_speed: speed factor of each group's VM.
    :param standard_errors: of ln(value), of the free parameters in their order.
    :param machine_speed: predicted over measured time in the scaling tables: overall, then by job.
    :param at_bound: names of parameters that ended on a bound.
    """

    params: FloatArray
    host: dict[str, float]
    vm_speed: dict[str, float]
    machine_speed: FloatArray
    converged: bool
    at_bound: tuple[str, ...]
    standard_errors: FloatArray


def fit_jobs(
    states: States,
    scaling: Scaling,
    start: JobFit | None = None,
    group_weights: Mapping[str, float] | None = None,
) -> JobFit:
    """Fit all parameters to states and scaling tables.

    :param states: who ran beside whom, and for how long.
    :param scaling: run times alone, by thread count.
    :param start: where to begin; a bootstrap sample begins at the full fit.
    :param group_weights: weight of each group's squared residuals, 1 if not given.
    """
    names, priors = _free_parameters(scaling)
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
                _soft(logged * weight),
                _soft(alone / SCALING_SD),
                prior,
                vm / VM_SD,
                [machine / MACHINE_SD],
                by_job / JOB_MACHINE_SD,
            ]
        )

    free = np.concatenate([low, np.full(n_extra, -1.0)])
    top = np.concatenate([high, np.full(n_extra, 1.0)])
    found = least_squares(residuals, x0, bounds=(free, top), x_scale="jac", max_nfev=200)
    params, host = _unpack(names, found.x)
    margin = 1e-3
    stuck = tuple(
        ".".join(name)
        for name, value, lower, upper in zip(names, found.x, low, high, strict=False)
        if value < lower + margin or value > upper - margin
    )
    vm = np.exp(found.x[len(names) : len(names) + n_groups])
    return JobFit(
        params,
        {field: float(host[HOST_FIELDS.index(field)]) for field in HOST_PRIORS},
        dict(zip(states.groups, vm.tolist(), strict=True)),
        np.exp(found.x[len(names) + n_groups :]),
        bool(found.status > 0),
        stuck,
        _standard_errors(found.jac)[: len(names)],
    )


BOOTSTRAPS = 16


def job_spreads(
    states: States, scaling: Scaling, fit: JobFit
) -> tuple[FloatArray, dict[str, float]]:
    """Standard deviation of ln(value) of each parameter.

    Two things make a value unsure: how sharply the data speak (curvature at the solution) and which
    groups happened to be measured (a Bayesian bootstrap that weighs the groups at random).

    :returns: float64[J, len(JOB_FIELDS)], and the host's parameters by name.
    """
    names, _ = _free_parameters(scaling)
    rng = np.random.default_rng(2025)
    draws = []
    for _ in range(BOOTSTRAPS):
        weights = rng.exponential(size=len(states.groups))
        weights *= len(weights) / weights.sum()
        by_name = dict(zip(states.groups, weights.tolist(), strict=True))
        draw = fit_jobs(states, scaling, fit, by_name)
        draws.append([np.log(_value(draw, name)) for name in names])
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


def _soft(z: FloatArray) -> FloatArray:
    """Residuals whose squares add up to the soft-L1 loss."""
    result: FloatArray = np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0))
    return result


def _free_parameters(scaling: Scaling) -> tuple[list[tuple[str, str]], list[Prior]]:
    names: list[tuple[str, str]] = []
    priors = []
    for number, job in enumerate(JOBS):
        for field in JOB_FIELDS:
            if (job, field) in FIXED:
                continue
            names.append((job, field))
            if field == "work_s":
                alone = scaling.seconds[(scaling.job == number) & (scaling.threads == 1)]
                priors.append(Prior(float(alone[0]), 0.5, 1.0, 5000.0))
            else:
                priors.append(JOB_PRIORS.get((job, field), PRIORS[field]))
    for field, prior in HOST_PRIORS.items():
        names.append(("host", field))
        priors.append(prior)
    return names, priors


def _unpack(names: Sequence[tuple[str, str]], x: FloatArray) -> tuple[FloatArray, FloatArray]:
    params = np.ones((len(JOBS), len(JOB_FIELDS)))
    host = host_parameters({})
    for (job, field), value in FIXED.items():
        params[JOBS.index(job), JOB_FIELDS.index(field)] = value
    for (owner, field), value in zip(names, np.exp(x[: len(names)]), strict=True):
        if owner == "host":
            host[HOST_FIELDS.index(field)] = value
        else:
            params[JOBS.index(owner), JOB_FIELDS.index(field)] = value
    return params, host


def _value(fit: JobFit, name: tuple[str, str]) -> float:
    if name[0] == "host":
        return fit.host[name[1]]
    return float(fit.params[JOBS.index(name[0]), JOB_FIELDS.index(name[1])])


def host_parameters(values: Mapping[str, float]) -> FloatArray:
    """Host parameters for ``job_speeds``, all others 1: a VM of the fitted speed."""
    return np.array([values.get(field, 1.0) for field in HOST_FIELDS], dtype=np.float64)


def errors(states: States, fit: JobFit) -> FloatArray:
    """Signed relative error of every sample's duration, on a VM of speed 1."""
    predicted = predict(states, fit.params, host_parameters(fit.host))
    result: FloatArray = predicted / states.measured_s - 1.0
    return result
