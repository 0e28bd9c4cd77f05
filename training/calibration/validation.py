"""Replay logged runs in the simulator's physics and compare with what was measured.

    python -m training.validate --data DIR --profile cca-2025 --json out.json [--cross-validate]

Each run is driven with its logged load and its logged allocations (starts, cores, threads, pauses,
memcached's cores). The loop below advances from event to event as the simulator's kernel does and
calls the very same physics, ``job_speeds``, ``service_state`` and ``mixture_p95``; only the
decisions come from the log instead of a policy.

Two replays of every run:

* *open*: jobs start when the log says and each meets the neighbours that the log gives it, for as
  long as the log says: the error of one job does not become its neighbour's. What a job has left at
  its logged end is done at its mean speed. Job durations (seconds not paused) and the p95 of every
  interval of the measured batch window are taken from this one.
* *closed*: each job starts at its predecessor's simulated end plus the logged gap. Moves and pauses
  stay on the clock; a job that outlives its logged allocation keeps the last one. The makespan is
  taken from this one.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from scipy.stats import mannwhitneyu

from env.codes import BACKGROUND, NORMAL
from env.commandline import OneLineParser, require_writable
from env.errors import InputError, exit_on_bad_input
from env.physics.compiled import allocating, compiled
from env.physics.jobs import (
    LAUNCH_OVERHEAD_S,
    PRESSURE,
    WORK_S,
    job_speeds,
)
from env.physics.service import (
    CPU_LIMIT,
    IDLE_US,
    VM_SPEED,
    mixture_p95,
    service_occupancy,
    service_state,
)
from env.simulator.profile import HOST_FIELDS, Profile
from training.calibration.fit_jobs import fit_jobs, read_scaling
from training.calibration.intervals import cut_intervals, read_intervals
from training.calibration.job_states import build_states
from training.calibration.logs.course import (
    BATCH_SIBLINGS,
    DEFAULT_SLO_US,
    JOBS,
    LOAD_LAG_S,
    SIBLINGS,
    SLO_US,
)
from training.calibration.logs.run_logs import read_runs
from training.calibration.logs.tables import Remark
from training.calibration.logs.traces import RunTrace
from training.calibration.scans import read_scans
from training.calibration.service_problem import Problem, fit_vm, params_of
from training.calibration.year_profile import fitted_occupancy
from training.evaluation.figures import write_json
from training.profiles import read_profile

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# A VM shows its speed and idle latency in its first runs.
FIRST_RUNS = 3

PAUSE, RESUME, CORES, SERVICE, LOAD, END, CLOSE = range(7)
PENDING, RUNNING, DONE = range(3)
_MIXTURE = 256
_SOON_S = 1e-9


@dataclass(frozen=True)
class Script:
    """A run as arrays: what happens when, and which job waits for which."""

    time_s: FloatArray
    kind: IntArray
    job: IntArray
    value: FloatArray
    start_s: FloatArray  # by job
    predecessor: IntArray  # by job, -1 for none
    gap_s: FloatArray  # by job
    cores: IntArray  # by job, at its start
    threads: IntArray
    weight: IntArray
    quota: FloatArray  # CPU quota of each job [vCPUs]


@dataclass(frozen=True)
class Replay:
    """What the physics made of a run.

    :param run_s: seconds each job ran without pauses.
    :param end_s: end of each job.
    :param p95_us: p95 of each interval.
    """

    run_s: FloatArray
    end_s: FloatArray
    p95_us: FloatArray


def build_script(run: RunTrace) -> Script:
    """Turn a run into arrays for :func:`_replay`."""
    events: list[tuple[float, int, int, float]] = []
    begin = run.first_start_s - 1.0
    for moved, mask in run.service_moves:
        events.append((max(moved, begin), SERVICE, -1, float(mask)))
    for start, end, qps in zip(run.interval_start_s, run.interval_end_s, run.qps, strict=True):
        events.append((start + LOAD_LAG_S, LOAD, -1, qps))
        events.append((end, CLOSE, -1, 0.0))
    events.append((run.interval_end_s[-1] + LOAD_LAG_S, LOAD, -1, 0.0))
    order = {job.name: number for number, job in enumerate(run.jobs)}
    predecessors = []
    gaps = []
    for number, job in enumerate(run.jobs):
        for moved, mask in job.moves[1:]:
            events.append((moved, CORES, number, float(mask)))
        events.append((job.end_s, END, number, 0.0))
        for paused, resumed in job.pauses:
            events.append((paused, PAUSE, number, 0.0))
            events.append((resumed, RESUME, number, 0.0))
        before = run.predecessor(job)
        predecessors.append(-1 if before is None else order[before.name])
        gaps.append(job.start_s if before is None else job.start_s - before.end_s)
    # An interval closes before the next one's load arrives; moves at one time keep their order.
    events.sort(key=lambda event: (event[0], event[1] != CLOSE))
    return Script(
        np.array([event[0] for event in events], np.float64),
        np.array([event[1] for event in events], np.int64),
        np.array([event[2] for event in events], np.int64),
        np.array([event[3] for event in events], np.float64),
        np.array([job.start_s for job in run.jobs], np.float64),
        np.array(predecessors, np.int64),
        np.array(gaps, np.float64),
        np.array([job.moves[0][1] for job in run.jobs], np.int64),
        np.array([job.threads for job in run.jobs], np.int64),
        np.full(len(run.jobs), BACKGROUND if run.background else NORMAL),
        np.array([job.quota for job in run.jobs], np.float64),
    )


@allocating
def _rates(  # type: ignore[no-untyped-def]
    running,
    threads,
    cores,
    weight,
    batch_sibling,
    sibling,
    service_threads,
    service_cores,
    qps,
    backlog,
    quota,
    job_params,
    host_params,
    service_params,
    occupancy,
    background,
    equal,
    speed,
    used,
):
    """Latency, capacity, tail and job speeds under an allocation and load, as the kernel has it."""
    n_jobs, n_vcpus = used.shape
    for vcpu in range(n_vcpus):
        background[vcpu] = 0.0
        equal[vcpu] = 0.0
        for job in range(n_jobs):
            if running[job] and (cores[job] >> vcpu) & 1:
                if weight[job] == NORMAL:
                    equal[vcpu] = 1.0
                else:
                    background[vcpu] = 1.0
    demand = np.inf if backlog > 0.0 else qps
    asked = service_occupancy(
        demand, service_threads, service_cores, sibling, background, equal, service_params
    )
    for vcpu in range(n_vcpus):
        occupancy[vcpu] = ((service_cores >> vcpu) & 1) * asked
    pressure = job_speeds(
        running,
        threads,
        cores,
        weight,
        np.full(n_jobs, np.inf),  # nobody set quotas
        batch_sibling,
        occupancy,
        job_params,
        host_params,
        speed,
        used,
        np.zeros(n_vcpus),
    )
    for vcpu in range(n_vcpus):
        background[vcpu] = 0.0
        equal[vcpu] = 0.0
        for job in range(n_jobs):
            if weight[job] == NORMAL:
                equal[vcpu] += used[job, vcpu]
            else:
                background[vcpu] += used[job, vcpu]
    for job in range(n_jobs):
        cpu = 0.0
        for vcpu in range(n_vcpus):
            cpu += used[job, vcpu]
        if cpu > quota[job]:
            speed[job] *= quota[job] / cpu
    p95, capacity, _, shape = service_state(
        qps, service_threads, service_cores, sibling, background, equal, pressure, service_params
    )
    if backlog > 0.0:
        p95, capacity, _, shape = service_state(
            capacity, service_threads, service_cores, sibling, background, equal, pressure,
            service_params,
        )  # fmt: skip
    return p95, capacity, shape


@allocating
def _replay(  # type: ignore[no-untyped-def]
    time_s,
    kind,
    event_job,
    value,
    start_s,
    predecessor,
    gap_s,
    first_cores,
    threads,
    weight,
    quota,
    closed,
    batch_sibling,
    sibling,
    service_threads,
    job_params,
    host_params,
    service_params,
    run_s,
    end_s,
    p95_us,
):
    """Advance one run from event to event; fills durations, ends and the p95 of each interval."""
    n_jobs = len(start_s)
    n_vcpus = len(sibling)
    state = np.zeros(n_jobs, np.int64)
    paused = np.zeros(n_jobs, np.uint8)
    cores = first_cores.copy()
    running = np.zeros(n_jobs, np.uint8)
    overhead = np.zeros(n_jobs)
    work = np.zeros(n_jobs)
    speed = np.zeros(n_jobs)
    used = np.zeros((n_jobs, n_vcpus))
    occupancy = np.zeros(n_vcpus)
    background = np.zeros(n_vcpus)
    equal = np.zeros(n_vcpus)
    mix_weight = np.zeros(_MIXTURE)
    mix_p95 = np.zeros(_MIXTURE)
    mix_shape = np.ones(_MIXTURE)
    mixed = 0
    interval = 0
    qps = 0.0
    backlog = 0.0
    service_cores = 1
    event = 0
    ended = 0
    worked = np.zeros(n_jobs, np.uint8)
    now = time_s[0]
    p95, capacity, shape = 0.0, 1.0, 1.0
    stale = True
    while event < len(time_s) or ended < n_jobs:
        # Everything that happens at this moment.
        while event < len(time_s) and time_s[event] <= now + _SOON_S:
            job = event_job[event]
            what = kind[event]
            if what == SERVICE:
                service_cores = int(value[event])
            elif what == LOAD:
                qps = value[event]
            elif what == CORES:
                cores[job] = int(value[event])
            elif what == PAUSE:
                paused[job] = 1
            elif what == RESUME:
                paused[job] = 0
            elif what == END and not closed and state[job] == RUNNING:
                if not worked[job]:
                    pace = job_params[job, WORK_S] - work[job]
                    pace /= max(run_s[job] - job_params[job, LAUNCH_OVERHEAD_S], _SOON_S)
                    rest = overhead[job] + work[job] / max(pace, _SOON_S)
                    run_s[job] += rest
                    end_s[job] = now + rest
                state[job] = DONE
                ended += 1
            elif what == CLOSE:
                p95_us[interval] = mixture_p95(mix_weight, mix_p95, mix_shape, mixed)
                interval += 1
                mixed = 0
            stale = stale or what != CLOSE
            event += 1
        for job in range(n_jobs):
            if (
                state[job] == PENDING
                and _start(job, closed, start_s, predecessor, gap_s, state, end_s) <= now + _SOON_S
            ):
                state[job] = RUNNING
                overhead[job] = job_params[job, LAUNCH_OVERHEAD_S]
                work[job] = job_params[job, WORK_S]
                stale = True
        if stale:
            for job in range(n_jobs):
                # A job that outlives its log and was last seen paused would never end.
                running[job] = state[job] == RUNNING and (paused[job] == 0 or event >= len(time_s))
            p95, capacity, shape = _rates(
                running, threads, cores, weight, batch_sibling, sibling, service_threads,
                service_cores, qps, backlog, quota, job_params, host_params, service_params,
                occupancy, background, equal, speed, used,
            )  # fmt: skip
            stale = False
        # The next moment at which something changes.
        until = math.inf
        if event < len(time_s):
            until = time_s[event]
        for job in range(n_jobs):
            if running[job] and not worked[job] and speed[job] > 0.0:
                until = min(until, now + overhead[job] + work[job] / speed[job])
            elif state[job] == PENDING:
                until = min(until, _start(job, closed, start_s, predecessor, gap_s, state, end_s))
        if backlog > 0.0 and capacity > qps:
            until = min(until, now + backlog / (capacity - qps))
        if until == math.inf:
            break
        step = max(until - now, 0.0)
        rate = qps
        if backlog > 0.0 or qps > capacity:
            rate = capacity
        if rate > 0.0 and step > 0.0:
            if mixed == _MIXTURE:
                mixed -= 1  # more states than anyone needs: the last one stands for the rest
            mix_weight[mixed] = rate * step
            mix_p95[mixed] = p95
            mix_shape[mixed] = shape
            mixed += 1
        was_behind = backlog > 0.0
        backlog = max(0.0, backlog + (qps - capacity) * step)
        if backlog < 1e-3:
            backlog = 0.0
        stale = stale or was_behind != (backlog > 0.0)
        for job in range(n_jobs):
            if running[job] and not worked[job]:
                run_s[job] += step
                launching = min(step, overhead[job])
                overhead[job] -= launching
                work[job] -= speed[job] * (step - launching)
        now += step
        for job in range(n_jobs):
            if (
                running[job]
                and not worked[job]
                and overhead[job] <= _SOON_S
                and work[job] <= _SOON_S * max(1.0, speed[job])
            ):
                worked[job] = 1
                end_s[job] = now
                if closed:
                    state[job] = DONE
                    running[job] = 0
                    ended += 1
                    stale = True


@compiled
def _start(job, closed, start_s, predecessor, gap_s, state, end_s):  # type: ignore[no-untyped-def]
    """When a pending job starts; infinity while its predecessor still runs."""
    before = predecessor[job]
    if not closed or before < 0:
        return start_s[job]
    if state[before] != DONE:
        return math.inf
    return end_s[before] + gap_s[job]


def replay(
    run: RunTrace,
    job_params: FloatArray,
    host_params: FloatArray,
    service_params: FloatArray,
    closed: bool,
) -> Replay:
    """Replay one run.

    :param run: its load, its allocations and what was measured.
    :param job_params: one row per job of the run, in its order.
    :param host_params: in the order of ``HOST_FIELDS``.
    :param service_params: in the order of ``SERVICE_FIELDS``, for the run's VM.
    :param closed: start each job at its predecessor's simulated end plus the logged gap.
    """
    script = build_script(run)
    run_s = np.zeros(len(run.jobs))
    end_s = np.full(len(run.jobs), np.inf)
    p95_us = np.zeros(len(run.qps))
    _replay(
        script.time_s,
        script.kind,
        script.job,
        script.value,
        script.start_s,
        script.predecessor,
        script.gap_s,
        script.cores,
        script.threads,
        script.weight,
        script.quota,
        closed,
        BATCH_SIBLINGS,
        SIBLINGS,
        run.service_threads,
        job_params,
        host_params,
        service_params,
        run_s,
        end_s,
        p95_us,
    )
    return Replay(run_s, end_s, p95_us)


class Tally:
    """Measured and simulated figures of all runs, and their errors.

    :param slo_us: the latency objective of their year.
    """

    def __init__(self, slo_us: float) -> None:
        self.slo_us = slo_us
        self.open_jobs: list[float] = []
        self.closed_jobs: list[float] = []
        self.job_rows: list[tuple[str, str, str, float, float, float]] = []
        self.makespans: list[float] = []
        self.p95: list[float] = []
        self.violated: list[bool] = []
        self.simulated_us: list[float] = []
        self.per_run: list[dict[str, Any]] = []
        self.groups: dict[str, dict[str, int]] = {}

    def add(self, run: RunTrace, opened: Replay, closed: Replay) -> None:
        """Count one run in."""
        measured = np.array([job.run_s for job in run.jobs])
        self.open_jobs += (np.abs(opened.run_s / measured - 1.0)).tolist()
        self.closed_jobs += (np.abs(closed.run_s / measured - 1.0)).tolist()
        for job, seconds, simulated, chained in zip(
            run.jobs, measured, opened.run_s, closed.run_s, strict=True
        ):
            self.job_rows.append(
                (run.group, run.run, job.name, float(seconds), float(simulated), float(chained))
            )
        makespan = float(closed.end_s.max() - run.first_start_s)
        self.makespans.append(abs(makespan / run.makespan_s - 1.0))
        window = (run.interval_end_s > run.first_start_s) & (run.interval_start_s < run.last_end_s)
        hit = window & (run.p95_us > self.slo_us)
        predicted = window & (opened.p95_us > self.slo_us)
        group = self.groups.setdefault(run.group, {"runs": 0, "intervals": 0, "violations": 0})
        group["runs"] += 1
        if run.moves_logged:
            calm = window & ~hit
            self.p95 += np.abs(opened.p95_us[calm] / run.p95_us[calm] - 1.0).tolist()
            self.violated += hit[window].tolist()
            self.simulated_us += opened.p95_us[window].tolist()
            group["intervals"] += int(window.sum())
            group["violations"] += int(hit.sum())
        self.per_run.append(
            {
                "run": run.run,
                "makespan_measured_s": round(run.makespan_s, 2),
                "makespan_simulated_s": round(makespan, 2),
                "violations_measured": int(hit.sum()),
                "violations_simulated": int(predicted.sum()),
                "moves_logged": run.moves_logged,
            }
        )

    def report(self, profile: str) -> dict[str, Any]:
        """All figures, ready for JSON; ``None`` where nothing could be compared."""
        violated = np.array(self.violated, dtype=bool)
        simulated_us = np.array(self.simulated_us)
        alarmed = simulated_us > self.slo_us
        recall = _share(alarmed[violated])
        kept = _share(~alarmed[~violated])
        balanced = None if recall is None or kept is None else (recall + kept) / 2.0
        return {
            "profile": profile,
            "runs": len(self.per_run),
            "job_duration": {
                "median_abs_rel_error": _quantile(self.open_jobs, 0.5),
                "p90_abs_rel_error": _quantile(self.open_jobs, 0.9),
                "closed_median_abs_rel_error": _quantile(self.closed_jobs, 0.5),
                "closed_p90_abs_rel_error": _quantile(self.closed_jobs, 0.9),
            },
            "makespan": {"median_abs_rel_error": _quantile(self.makespans, 0.5)},
            "p95": {"median_abs_rel_error": _quantile(self.p95, 0.5), "intervals": len(self.p95)},
            "violations": {
                "precision": _share(violated[alarmed]),
                "recall": recall,
                "balanced_accuracy": balanced,
                "auc": _auc(simulated_us, violated),
                "measured": int(violated.sum()),
                "simulated": int(alarmed.sum()),
            },
            "groups": self.groups,
            "per_run": self.per_run,
        }


def _share(flags: npt.NDArray[np.bool_]) -> float | None:
    """How many are set; None of none."""
    return round(float(flags.mean()), 4) if len(flags) else None


def _auc(simulated_us: FloatArray, violated: npt.NDArray[np.bool_]) -> float | None:
    """How often a violating interval has the higher simulated p95 of the two; None without both.

    The area under the ROC curve: whatever threshold one would put on the simulated p95.
    """
    if violated.all() or not violated.any():
        return None
    pairs = np.count_nonzero(violated) * np.count_nonzero(~violated)
    u, _ = mannwhitneyu(simulated_us[violated], simulated_us[~violated])
    return round(float(u / pairs), 4)


def _quantile(values: Sequence[float], level: float) -> float | None:
    return round(float(np.quantile(values, level)), 4) if values else None


# --- parameters of each run ---------------------------------------------------------------------


@dataclass(frozen=True)
class Physics:
    """Parameters that a run is replayed with.

    :param jobs: one row per job of ``JOBS``.
    :param host: in the order of ``HOST_FIELDS``.
    :param service: in the order of ``SERVICE_FIELDS``, for a VM of average speed.
    """

    jobs: FloatArray
    host: FloatArray
    service: FloatArray


def profile_physics(profile: Profile) -> Physics:
    """A profile's parameters."""
    return Physics(profile.job_array(JOBS), profile.host_array(), profile.service_array())


def left_out_physics(data: Path, profile: Profile, runs: Sequence[RunTrace], group: str) -> Physics:
    """Parameters refitted without one group, as the group's runs may not be known.

    :raises InputError: the folder lacks the tables that a fit needs, or has no other group.
    """
    others = [run for run in runs if run.group != group]
    if not others:
        raise InputError(f"--cross-validate: {group} is the only group")
    full = profile_physics(profile)
    remarks: list[Remark] = []
    scaling = read_scaling(data, profile.years, remarks)
    pressure = {job: float(full.jobs[k, PRESSURE]) for k, job in enumerate(JOBS)}
    year = profile.years[0]
    scans = read_scans(data, year, remarks)
    intervals = read_intervals(data, year, remarks, pressure)
    problem = Problem(scans, intervals, {group: 0.0})
    names = sorted({*scans.groups(), *intervals.groups} - {group})
    service = params_of(problem.solve_all(names))
    service[CPU_LIMIT] = full.service[CPU_LIMIT]
    fit = fit_jobs(build_states(others, fitted_occupancy(service)), scaling)
    host = full.host.copy()
    for field, value in fit.host.items():
        host[HOST_FIELDS.index(field)] = value
    return Physics(fit.params, host, service)


class KnownVms:
    """Speed and idle-latency factor of each run's VM, from the VM's other runs.

    Runs of one group and day share a VM. A run whose VM has no other run gets factors of 1, the
    middle of the fitted distribution.
    """

    def __init__(self, runs: Sequence[RunTrace], slo_us: float, speed_sd: float) -> None:
        self._slo_us = slo_us
        self._speed_sd = speed_sd
        self._by_vm: dict[tuple[str, str], list[RunTrace]] = {}
        for run in runs:
            if run.moves_logged:
                self._by_vm.setdefault((run.group, run.day), []).append(run)

    def factors(self, run: RunTrace, physics: Physics) -> tuple[float, float]:
        """Speed and idle factor of one run's VM."""
        others = [other for other in self._by_vm.get((run.group, run.day), []) if other is not run]
        if not others:
            return 1.0, 1.0
        pressure = {job: float(physics.jobs[k, PRESSURE]) for k, job in enumerate(JOBS)}
        others = others[:FIRST_RUNS]
        intervals = cut_intervals(others, ["vm"] * len(others), self._slo_us, pressure)
        if not len(intervals.qps):
            return 1.0, 1.0
        return fit_vm(None, intervals, physics.service, self._speed_sd)


def replay_with(
    run: RunTrace, physics: Physics, factors: tuple[float, float]
) -> tuple[Replay, Replay]:
    """The open and the closed replay of one run on a VM with the given factors."""
    service = physics.service.copy()
    service[VM_SPEED], service[IDLE_US] = factors[0], service[IDLE_US] * factors[1]
    rows = physics.jobs[[JOBS.index(job.name) for job in run.jobs]]
    opened = replay(run, rows, physics.host, service, False)
    return opened, replay(run, rows, physics.host, service, True)


def validate(
    data: Path,
    profile: Profile,
    cross_validate: bool = False,
    plots: Path | None = None,
    say: Console | None = None,
) -> dict[str, Any]:
    """Replay every usable run of a folder and compare.

    :param data: folder of measured tables, which may hold groups never seen before.
    :param profile: the physics; says which years, machine and jobs are taken.
    :param cross_validate: refit without each group before predicting it.
    :param plots: folder for plots, if wanted.
    :param say: where to report; silent if not given.
    :raises InputError: unusable tables, or no run that the profile can judge.
    """
    console = say or Console(quiet=True)
    tables = read_runs(data, profile.job_names, profile.years, profile.server)
    for line in tables.summary():
        console.print(line, markup=False, highlight=False)
    if not tables.runs:
        raise InputError(f"{data}: no usable runs for profile {profile.name}")
    slo_us = SLO_US.get(profile.years[0] if profile.years else 0, DEFAULT_SLO_US)
    vms = KnownVms(tables.runs, slo_us, profile.vm_speed.spread)
    tally = Tally(slo_us)
    overlays: dict[str, tuple[RunTrace, Replay]] = {}
    physics = profile_physics(profile)
    for group in dict.fromkeys(run.group for run in tables.runs):
        if cross_validate:
            physics = left_out_physics(data, profile, tables.runs, group)
            console.print(f"refitted without {group}", markup=False, highlight=False)
        for run in tables.runs:
            if run.group != group:
                continue
            factors = vms.factors(run, physics) if run.moves_logged else (1.0, 1.0)
            opened, closed = replay_with(run, physics, factors)
            tally.add(run, opened, closed)
            overlays.setdefault(group, (run, opened))
    report = tally.report(profile.name)
    report["cross_validated"] = cross_validate
    report["skipped"] = tables.summary()
    if plots is not None:
        draw(plots, tally, overlays)
    return report


def draw(folder: Path, tally: Tally, overlays: Mapping[str, tuple[RunTrace, Replay]]) -> None:
    """Plot measured against simulated durations, and the p95 of one run of each group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(6, 6))
    for name in JOBS:
        rows = [(row[3], row[4]) for row in tally.job_rows if row[2] == name]
        if rows:
            measured, simulated = zip(*rows, strict=True)
            axes.scatter(measured, simulated, s=12, alpha=0.6, label=name)
    top = max(max(row[3], row[4]) for row in tally.job_rows)
    axes.plot([0, top], [0, top], color="black", linewidth=0.8)
    axes.set(xlabel="measured duration [s]", ylabel="simulated duration [s]")
    axes.legend(frameon=False)
    figure.savefig(folder / "durations.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    for group, (run, opened) in overlays.items():
        figure, axes = plt.subplots(figsize=(10, 4))
        axes.step(run.interval_start_s, run.p95_us / 1e3, where="post", label="measured")
        axes.step(run.interval_start_s, opened.p95_us / 1e3, where="post", label="simulated")
        axes.axhline(tally.slo_us / 1e3, color="black", linestyle=":", linewidth=0.8)
        axes.set(xlabel="time [s]", ylabel="p95 [ms]", title=run.run)
        axes.set_xlim(run.first_start_s, run.last_end_s)
        axes.legend(frameon=False)
        figure.savefig(folder / f"p95-{group.split('/')[0]}.png", dpi=120, bbox_inches="tight")
        plt.close(figure)


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.validate",
        description="Replay logged runs in the simulator's physics and compare.",
    )
    add = line.add_argument
    add("--data", type=Path, required=True, help="folder with runs, intervals and events")
    add("--profile", required=True, help="a profile's name, or the path of its file")
    add("--json", type=Path, required=True, help="report to write")
    add("--cross-validate", action="store_true", help="refit without each group, then predict it")
    add("--plots", type=Path, help="folder for plots")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """Validate from the command line.

    :param argv: command line, the process's own if none is given.
    """
    given = parser().parse_args(argv)
    console = Console(soft_wrap=True)
    begun = time.monotonic()
    with exit_on_bad_input():
        for path in (given.json, given.plots and given.plots / "durations.png"):
            require_writable(path)
        profile = read_profile(given.profile)
        report = validate(given.data, profile, given.cross_validate, given.plots, console)
        write_json(report, given.json)
    for what in ("job_duration", "makespan", "p95", "violations"):
        console.print(f"{what}: {report[what]}", markup=False, highlight=False)
    console.print(f"{report['runs']} runs in {time.monotonic() - begun:.1f} s; wrote {given.json}")


if __name__ == "__main__":
    main(sys.argv[1:])
