"""Fit memcached's latency: capacity, knee, plateau, what batch work costs, and how VMs differ.

One least-squares problem in the logarithms of the parameters, with a soft-L1 loss:

* **scans** (memcached alone, T threads on C vCPUs): p95 against load, and the largest throughput;
* **runs** (memcached beside batch jobs): the p95 of every interval of the dynamic load. Memcached
  moves within an interval, so each one is cut into states and their latencies are mixed, by
  the very functions the simulator calls;
* **priors** for what the tables identify poorly (``PRIORS`` says which and why).

VMs of one type differ. Each scanned VM and each run gets a speed factor and an idle-latency factor
around 1; a prediction for a new VM uses 1, and ``vm_speed`` states the distribution. Nothing here
is random but the bootstrap, whose seed is fixed: the same tables give the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares
from scipy.stats import norm
from scipy.stats import t as student_t

from env.errors import InputError
from env.physics.compiled import allocating
from env.physics.service import (
    CPU_LIMIT,
    IDLE_US,
    SERVICE_FIELDS,
    VM_SPEED,
    mixture_p95,
    service_state,
)
from training.analysis.curves import knee_qps
from training.calibration.fit_jobs import JOBS, SIBLINGS
from training.calibration.tables import (
    VCPUS,
    Remark,
    RunTrace,
    numeric,
    p95_faults,
    read_runs,
    read_table,
    without,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: The load changes this long after the boundary that the log implies. Groups' clocks differ: where
#: a late second vCPU begins to break intervals says 0.1 to 0.2 s for Soufiane-Barrada,
#: ImaGoodFella's reactions say 0.4 to 0.7 s. From 0.1 to 0.55 s the fit is equally good within 1 %.
LOAD_LAG_S = 0.2
SHORTEST_INTERVAL_S = 4.0  # shorter ones say more about the controller's timing than about latency
SLO_US = {2023: 1000.0, 2024: 1000.0}  # later editions: 800
SERVERS = {2023: "n2d-highmem-4", 2024: "n2d-highmem-4", 2025: "n2-highmem-4"}

SCAN_SD = 0.06  # of ln(p95) between repetitions of one point of a scan
CAPACITY_SD = 0.02  # of ln(throughput) at saturation
INTERVAL_SD = 0.12  # of ln(p95) of one interval of a run
SPEED_SD = {2024: 0.06}  # prior for ln(speed) between VMs; other years:
SPEED_SD_ELSE = 0.17
IDLE_SD = 0.20  # prior for ln(idle latency) between VMs
BOOTSTRAPS = 8
LEAST_SPREAD = 0.02  # no parameter is better known than that from one year's VMs
RUNS_PER_GROUP = 22  # evenly chosen; no group of 2025 has more
STATES = 512  # at most, in one interval


class Prior(NamedTuple):
    """A lognormal prior, the physical bounds, and where the prior comes from."""

    median: float
    sd: float
    low: float
    high: float
    unit: str
    source: str = "latency_curves (scans)"


_PART_1 = "memcached_interference (Part 1): equal weight on memcached's only vCPU"
_WIDE = (
    "prior between two sources: frikai/cca-2024-part4 (n2d, to 100K QPS) and docs/data/sharing.csv "
    "(a 2-vCPU VM, none seen); nothing measured covers background weight on n2 above 100K QPS"
)

#: Where the fit starts, how firmly it is held there, and what the physics allows.
PRIORS: dict[str, Prior] = {
    "core_capacity_qps": Prior(110e3, 0.5, 3e4, 4e5, "1/s"),
    "smt": Prior(0.75, 0.10, 0.5, 0.98, "1"),
    "batch_smt": Prior(0.85, 0.10, 0.5, 0.99, "1", "intervals and events (runs)"),
    "idle_us": Prior(300.0, 0.5, 50.0, 2000.0, "us"),
    "level_us": Prior(400.0, 0.5, 50.0, 2000.0, "us"),
    "rise_qps": Prior(15e3, 0.7, 1e3, 1e5, "1/s"),
    "queue_us": Prior(60.0, 0.7, 1.0, 1000.0, "us"),
    "knee_exponent": Prior(12.0, 0.4, 3.0, 40.0, "1"),
    "outstanding": Prior(105.0, 0.3, 20.0, 400.0, "requests"),
    "slice_us": Prior(700.0, 0.4, 50.0, 3000.0, "us"),
    "slice_exponent": Prior(6.0, 1.0, 0.5, 40.0, "1"),
    "speed_latency": Prior(0.3, 0.3, 0.01, 1.0, "1"),
    "batch_latency": Prior(0.02, 1.0, 1e-4, 0.5, "1/vCPU", "intervals and events (runs)"),
    "pressure_latency": Prior(0.02, 1.0, 1e-4, 0.5, "1", "intervals and events (runs)"),
    "equal_share": Prior(0.5, 0.01, 0.3, 0.7, "1", "equal cgroup weights; " + _PART_1),
    "equal_exponent": Prior(4.0, 0.5, 0.5, 40.0, "1", "intervals and events (runs)"),
    "equal_latency": Prior(2.3, 0.3, 0.1, 10.0, "1", _PART_1),
    "background_latency": Prior(0.03, 0.8, 1e-4, 1.0, "1", _WIDE),
    "background_capacity": Prior(0.10, 0.2, 1e-4, 0.25, "1", _WIDE),
    "tail_shape": Prior(3.0, 0.3, 1.0, 8.0, "1", "runs: tells violations best"),
}
#: Least squares would choose the tail for the many intervals that are far from violating. Steeper
#: than 6 it is not: alone and below the knee, p90 is 0.885 of p95.
TAIL_SHAPES = (2.5, 3.0, 4.0, 5.0, 6.0)
#: Stated whatever the fit says. At most one of the course's VMs shows what background weight costs,
#: and its speed cannot be told from it: 0.1 to 0.45 of the capacity fit equally well, though with a
#: quarter gone the middle VM would break a 1 ms SLO at 90K QPS, where that VM held it. Our own
#: measurements leave room for 0.05 at most. The prior is the geometric mean of 0.21 and 0.05, held
#: firmly, and its spread has both within one standard deviation.
STATED_SPREAD = {"background_latency": 0.8, "background_capacity": 0.8, "tail_shape": 0.3}
#: A second place to start from.
LATE_RISE = {"rise_qps": 28e3, "queue_us": 85.0, "slice_exponent": 15.0, "level_us": 350.0}
FREE = tuple(PRIORS)
TAIL = FREE.index("tail_shape")
FREE_INDEX = np.array([SERVICE_FIELDS.index(name) for name in FREE])

#: Memory pressure per vCPU in use, canneal = 1 (training.calibration.fit_jobs fits its own).
PRESSURE: dict[str, float] = {
    "blackscholes": 0.3,
    "canneal": 1.0,
    "dedup": 0.8,
    "ferret": 0.6,
    "freqmine": 0.6,
    "radix": 0.5,
    "vips": 0.5,
}

#: Groups whose batch jobs ran at background weight (cpu_shares 2 beside memcached's 1024).
BACKGROUND_GROUPS = ("frikai/cca-2024-part4",)
#: Groups whose logged moves of memcached left its latency as it was, and how that shows.
UNMOVED_GROUPS: dict[str, str] = {
    "dennisjueni/cca-2024": "memcached did not move: 600 us at 90K QPS on one logged vCPU, "
    "1900 us in its own scan",
}
#: Groups whose jobs were logged on memcached's vCPU, but held off it by a CFS quota.
QUOTA_GROUPS = ("florianhitz/cca-group-090",)

#: Groups whose memcached stays where it was logged after the last job: these intervals show the
#: VM without batch work. (Elsewhere the controller's end moves it, unlogged.)
ALONE_GROUPS = ("Soufiane-Barrada/CCA",)

#: Scans that are left out: (repository, pattern of the path, threads, vCPUs, reason).
SCAN_TRAPS: tuple[tuple[str, str, int, int, str], ...] = (
    ("Soufiane-Barrada/CCA", "q1d", 2, 1, "serves 205K QPS on one vCPU: not pinned"),
    ("NixoN2/cca-2024-016", "", 2, 1, "serves 122K QPS on one vCPU: not pinned"),
    ("FFGGSSJJ/cloud-comp-arch", "", 2, 1, "p99 of 12 ms: only the main thread was pinned"),
    ("Soufiane-Barrada/CCA", "q1_logs/scan_T2_C2_run1", 2, 2, "shows one thread's curve"),
)
#: Which scans of one repository ran on which VM, where a repository has several (saturation and
#: idle latency tell; names are ours).
SCAN_VMS: tuple[tuple[str, str, str], ...] = (
    ("Bruol/cloud-computing-architecture-project", r"_d_logs", "d"),
    ("Bruol/cloud-computing-architecture-project", r"logs_run1|run1_new", "slow"),
    ("Soufiane-Barrada/CCA", r"q1d", "d"),
    ("florianhitz/cca-group-090", r"4-1-d", "d"),
    ("czanoli/ETH-Cloud-Computing-Architectures-2024", r"Q4\.1\.d", "d"),
)


@dataclass(frozen=True)
class Scans:
    """Scans of memcached alone, one entry per point; ``saturated`` has one entry per scan."""

    vm_names: tuple[str, ...]
    vm: IntArray
    threads: IntArray
    cores: IntArray
    qps: FloatArray
    p95_us: FloatArray
    speed_sd: float  # prior for ln(speed) of a VM
    saturated: IntArray  # index of a point of the scan
    capacity: FloatArray
    siblings: IntArray = field(default_factory=lambda: SIBLINGS)
    idle_sd: float = IDLE_SD  # prior for ln(idle latency) of a VM
    client: FloatArray | None = None  # of the last vCPU, where the load generator runs there

    def groups(self) -> list[str]:
        """Group of each VM."""
        return [name.split(" ")[0] for name in self.vm_names]


@dataclass(frozen=True)
class Intervals:
    """Intervals of runs, cut into states; states of interval i are ``first[i]:first[i + 1]``."""

    vm_names: tuple[str, ...]  # one per group and day
    groups: tuple[str, ...]  # of the VMs
    vm: IntArray  # of the intervals
    run: IntArray  # of the intervals
    batch: npt.NDArray[np.bool_]  # of the intervals: inside the batch window
    qps: FloatArray
    p95_us: FloatArray
    slo_us: float
    first: IntArray
    duration_s: FloatArray  # of the states
    mask: IntArray
    threads: IntArray
    background: FloatArray
    equal: FloatArray
    pressure: FloatArray
    siblings: IntArray = field(default_factory=lambda: SIBLINGS)

    def group(self) -> npt.NDArray[np.str_]:
        """Group of each interval."""
        return np.array(self.groups)[self.vm]

    def select(self, rows: IntArray, vms: Sequence[int]) -> Intervals:
        """Some of the intervals, with the VMs numbered anew.

        :param rows: the intervals to keep.
        :param vms: the VMs to keep, in their new order.
        """
        lengths = self.first[rows + 1] - self.first[rows]
        states = np.concatenate(
            [np.arange(self.first[i], self.first[i + 1]) for i in rows] or [np.zeros(0, np.int64)]
        )
        renumbered = np.full(len(self.vm_names), -1)
        renumbered[list(vms)] = np.arange(len(vms))
        return Intervals(
            vm_names=tuple(self.vm_names[v] for v in vms),
            groups=tuple(self.groups[v] for v in vms),
            vm=renumbered[self.vm[rows]],
            run=self.run[rows],
            batch=self.batch[rows],
            qps=self.qps[rows],
            p95_us=self.p95_us[rows],
            slo_us=self.slo_us,
            first=np.concatenate([[0], np.cumsum(lengths)]),
            duration_s=self.duration_s[states],
            mask=self.mask[states],
            threads=self.threads[states],
            background=self.background[states],
            equal=self.equal[states],
            pressure=self.pressure[states],
            siblings=self.siblings,
        )


@dataclass(frozen=True)
class ServiceFit:
    """What :func:`fit_service` returns.

    :param service: ``{field: {value, spread, unit, source}}`` in the order of ``SERVICE_FIELDS``.
    :param vm_speed: the same keys for the VM-speed factor.
    :param fit_error: named errors, measured on groups left out of the fit unless named otherwise.
    :param vms: speed and idle-latency factor of each scanned VM (named by group and letter) and of
        each VM of the runs (by group and day).
    :param excluded: what was left out, and why.
    """

    service: dict[str, dict[str, Any]]
    vm_speed: dict[str, Any]
    fit_error: dict[str, float]
    vms: dict[str, dict[str, float]]
    excluded: tuple[Remark, ...] = field(default=())


@allocating
def scan_curve(vm, threads, cores, qps, siblings, client, speed, idle, params, p95, capacity):
    """Predict the points of scans; ``p95`` and ``capacity`` are filled."""
    params = params.copy()
    idle_us = params[IDLE_US]
    nobody = np.zeros(len(siblings))
    for i in range(len(qps)):
        params[VM_SPEED] = speed[vm[i]]
        params[IDLE_US] = idle_us * idle[vm[i]]
        mask = (1 << cores[i]) - 1
        p95[i], capacity[i], _, _ = service_state(
            qps[i], threads[i], mask, siblings, nobody, nobody, 0.0, params, client[i]
        )


@allocating
def interval_p95(
    vm,
    run,
    qps,
    first,
    duration,
    mask,
    threads,
    background,
    equal,
    pressure,
    siblings,
    speed,
    idle,
    params,
    p95,
):
    """Predict the p95 of the intervals of runs; ``p95`` is filled."""
    params = params.copy()
    idle_us = params[IDLE_US]
    weights = np.empty(STATES)
    latencies = np.empty(STATES)
    shapes = np.empty(STATES)
    backlog = 0.0
    for i in range(len(qps)):
        if i > 0 and run[i] != run[i - 1]:
            backlog = 0.0
        params[VM_SPEED] = speed[vm[i]]
        params[IDLE_US] = idle_us * idle[vm[i]]
        n = 0
        for k in range(first[i], first[i + 1]):
            latency, capacity, _, shape = service_state(
                qps[i], threads[k], mask[k], siblings, background[k], equal[k], pressure[k], params
            )
            rest = duration[k]
            surplus = capacity - qps[i]
            # Requests that waited at the client are served first: at capacity, at the plateau.
            if surplus <= 0.0:
                backlog -= surplus * rest
            elif backlog > 0.0 and n < STATES - 2:
                drain = min(backlog / surplus, rest)
                backlog -= drain * surplus
                rest -= drain
                weights[n] = drain * capacity
                latencies[n], _, _, shapes[n] = service_state(
                    capacity,
                    threads[k],
                    mask[k],
                    siblings,
                    background[k],
                    equal[k],
                    pressure[k],
                    params,
                )
                n += 1
            if rest > 0.0 and n < STATES - 1:
                weights[n] = rest * min(qps[i], capacity)
                latencies[n] = latency
                shapes[n] = shape
                n += 1
        p95[i] = mixture_p95(weights, latencies, shapes, n)


def read_points(folder: Path, year: int, remarks: list[Remark]) -> pd.DataFrame:
    """Read the points of one year's scans; what is left out goes to ``remarks``.

    :raises InputError: the table is missing or has none that can be used.
    """
    table = read_table(folder, "latency_curves")
    # Scans without a year are Soufiane-Barrada's one-thread scans of 2025.
    table = table[table["year"].fillna(2025) == year]
    if table.empty:
        raise InputError(f"{folder}: latency_curves: no scans of {year}")
    columns = ("threads", "cores", "rep", "target_qps", "achieved_qps", "p95_us")
    table = numeric(table, "latency_curves", columns, remarks, "path")
    table = without(table, "latency_curves", p95_faults(table["p95_us"]), remarks, "path")
    if table.empty:
        raise InputError(f"{folder}: no usable scans of {year}: {remarks[-1]}")
    return table


def read_scans(folder: Path, year: int, remarks: list[Remark]) -> Scans:
    """Read the scans of one year; what is left out goes to ``remarks``."""
    table = read_points(folder, year, remarks)
    table = table[table["cores"] <= 2]
    for repo, pattern, threads, cores, reason in SCAN_TRAPS:
        hit = (
            (table["repo"] == repo)
            & table["path"].str.contains(pattern)
            & (table["threads"] == threads)
            & (table["cores"] == cores)
        )
        for path in sorted(table.loc[hit, "path"].unique()):
            remarks.append(Remark("latency_curves", path, -1, f"left out: {reason}"))
        table = table[~hit]
    table = table.sort_values(["repo", "path", "rep", "target_qps"], kind="stable")
    table = table.reset_index(drop=True)
    vm = [scan_vm(repo, path) for repo, path in zip(table["repo"], table["path"], strict=True)]
    names = tuple(sorted(set(vm)))
    saturated = []
    capacity = []
    for _, scan in table.groupby(["repo", "path", "rep"], sort=True):
        served = scan["achieved_qps"]
        if served.max() < 0.97 * scan["target_qps"].max():
            saturated.append(int(scan.index[0]))
            capacity.append(float(served.nlargest(3).median()))
    return Scans(
        vm_names=names,
        vm=np.array([names.index(name) for name in vm], dtype=np.int64),
        threads=table["threads"].to_numpy(np.int64),
        cores=table["cores"].to_numpy(np.int64),
        qps=table["target_qps"].to_numpy(np.float64),
        p95_us=table["p95_us"].to_numpy(np.float64),
        speed_sd=SPEED_SD.get(year, SPEED_SD_ELSE),
        saturated=np.array(saturated, dtype=np.int64),
        capacity=np.array(capacity),
    )


def scan_vm(repo: str, path: str) -> str:
    """Which VM a scan ran on, named by repository and letter."""
    for name, pattern, vm in SCAN_VMS:
        if repo == name and re.search(pattern, path):
            return f"{repo} {vm}"
    return f"{repo} a"


def read_intervals(
    folder: Path, year: int, remarks: list[Remark], pressure: Mapping[str, float] = PRESSURE
) -> Intervals:
    """Read the runs of one year and cut their intervals into states."""
    tables = read_runs(folder, JOBS, (year,), SERVERS.get(year, ""))
    remarks.extend(tables.remarks)
    usable = []
    for run in tables.runs:
        if not run.moves_logged:
            remarks.append(Remark("events", run.run, -1, "left out: memcached's moves not logged"))
        elif run.group in UNMOVED_GROUPS:
            reason = f"left out: {UNMOVED_GROUPS[run.group]}"
            remarks.append(Remark("events", run.run, -1, reason))
        elif np.median(run.interval_end_s - run.interval_start_s) < SHORTEST_INTERVAL_S:
            remarks.append(Remark("intervals", run.run, -1, "left out: intervals under 4 s"))
        else:
            usable.append(run)
    for group in sorted({run.group for run in usable}):
        own = [run for run in usable if run.group == group]
        keep = {own[round(k)].run for k in np.linspace(0, len(own) - 1, RUNS_PER_GROUP)}
        for run in own:
            if run.run not in keep:
                remarks.append(Remark("runs", run.run, -1, f"thinned: {RUNS_PER_GROUP} per group"))
        usable = [run for run in usable if run.group != group or run.run in keep]
    table = read_table(folder, "runs")
    dates = pd.to_datetime(table.get("date", pd.Series(pd.NaT, table.index)), errors="coerce")
    # A session that runs past midnight stays on its VM.
    names = (dates - pd.Timedelta(hours=6)).astype(str).str[:10]
    days = dict(zip(table["run"], names, strict=True))
    vms = [f"{run.group} {days[run.run]}" for run in usable]
    return cut(usable, vms, SLO_US.get(year, 800.0), pressure)


def cut(
    runs: Sequence[RunTrace],
    vms: Sequence[str],
    slo_us: float,
    pressure: Mapping[str, float] = PRESSURE,
) -> Intervals:
    """Cut runs into intervals and states.

    :param runs: runs whose memcached moves are logged.
    :param vms: name of each run's VM.
    :param slo_us: the latency objective of their year.
    :param pressure: memory pressure per vCPU in use of each job.
    """
    vm_names = tuple(dict.fromkeys(vms))
    of_run: list[int] = []
    batch: list[bool] = []
    qps: list[float] = []
    p95: list[float] = []
    first: list[int] = [0]
    states: list[tuple[float, int, int, list[float], list[float], float]] = []
    for n, run in enumerate(runs):
        background_weight = run.group in BACKGROUND_GROUPS
        times = {time for time, _ in run.service_moves}
        for job in run.jobs:
            times |= {job.start_s, job.end_s}
            times |= {time for time, _ in job.moves}
            times |= {time for pause in job.pauses for time in pause}
        changes = np.array(sorted(times))
        for begin, end, load, latency in zip(
            run.interval_start_s, run.interval_end_s, run.qps, run.p95_us, strict=True
        ):
            window = begin >= run.first_start_s and end <= run.last_end_s
            if not window and (run.group not in ALONE_GROUPS or begin < run.last_end_s):
                continue
            begin, end = begin + LOAD_LAG_S, end + LOAD_LAG_S
            inside = changes[(changes > begin) & (changes < end)]
            edges = np.concatenate([[begin], inside, [end]])
            before = len(states)
            for a, b in pairwise(edges):
                if b - a < 1e-3:
                    continue
                mask = _mask_at(run.service_moves, a)
                busy, total_pressure = _batch_at(run, a, pressure)
                own = np.array([(mask >> c) & 1 for c in range(VCPUS)], dtype=bool)
                if run.group in QUOTA_GROUPS:
                    busy[own] = 0.0
                nothing = np.zeros(VCPUS)
                if background_weight:  # gets what memcached leaves of its vCPUs
                    busy[own] *= max(1.0 - load / 125e3, 0.0)
                equal, background = (nothing, busy) if background_weight else (busy, nothing)
                states.append(
                    (
                        b - a,
                        mask,
                        run.service_threads,
                        list(background),
                        list(equal),
                        total_pressure,
                    )
                )
            if len(states) == before:
                continue
            of_run.append(n)
            batch.append(window)
            qps.append(load)
            p95.append(latency)
            first.append(len(states))
    return Intervals(
        vm_names=vm_names,
        groups=tuple(runs[list(vms).index(name)].group for name in vm_names),
        vm=np.array([vm_names.index(vms[n]) for n in of_run], dtype=np.int64),
        run=np.array(of_run, dtype=np.int64),
        batch=np.array(batch, dtype=bool),
        qps=np.array(qps),
        p95_us=np.array(p95),
        slo_us=slo_us,
        first=np.array(first, dtype=np.int64),
        duration_s=np.array([state[0] for state in states]),
        mask=np.array([state[1] for state in states], dtype=np.int64),
        threads=np.array([state[2] for state in states], dtype=np.int64),
        background=np.array([state[3] for state in states]).reshape(-1, VCPUS),
        equal=np.array([state[4] for state in states]).reshape(-1, VCPUS),
        pressure=np.array([state[5] for state in states]),
    )


def _mask_at(moves: Sequence[tuple[float, int]], time: float) -> int:
    """The core set in force at a time."""
    mask = moves[0][1]
    for at, to in moves:
        if at > time + 1e-9:
            break
        mask = to
    return mask


def _batch_at(
    run: RunTrace, time: float, pressure: Mapping[str, float]
) -> tuple[FloatArray, float]:
    """Busy fraction of each vCPU by batch work, and the jobs' memory pressure."""
    busy = np.zeros(VCPUS)
    total = 0.0
    for job in run.jobs:
        if not job.start_s <= time < job.end_s:
            continue
        if any(a <= time < b for a, b in job.pauses):
            continue
        mask = _mask_at(job.moves, time)
        width = mask.bit_count()
        part = min(job.threads, width) / width
        for c in range(VCPUS):
            if (mask >> c) & 1:
                busy[c] += part
        total += pressure[job.name] * min(job.threads, width)
    return np.minimum(busy, 1.0), total


class Problem:
    """The least-squares problem of one selection of scans and runs.

    The unknowns are the logarithms of the ``FREE`` parameters, then speed and idle-latency factors
    of the scanned VMs, then those of the runs. A factor touches only its own rows, so all factors
    of one kind share one evaluation of the Jacobian.

    :param scans: scans of memcached alone.
    :param intervals: intervals of runs.
    :param weights: weight of each group's rows, 1 where not given.
    """

    def __init__(
        self, scans: Scans, intervals: Intervals, weights: Mapping[str, float] | None = None
    ) -> None:
        weights = weights or {}
        of_vm = np.array([weights.get(group, 1.0) for group in scans.groups()]) ** 0.5
        self.scan_weight = of_vm[scans.vm] / SCAN_SD * np.where(scans.threads == 2, 1.0, 0.5)
        self.capacity_weight = of_vm[scans.vm[scans.saturated]] / CAPACITY_SD
        of_run = np.array([weights.get(group, 1.0) for group in intervals.groups]) ** 0.5
        self.tail_shape = PRIORS["tail_shape"].median
        self.converged = False  # whether the last solution has
        self.scans = scans
        self.intervals = intervals
        self.vms = len(scans.vm_names)
        self.runs = len(intervals.vm_names)
        ends = np.cumsum([len(FREE), self.vms, self.vms, self.runs, self.runs])
        self.parts = [slice(int(a), int(b)) for a, b in pairwise([0, *ends])]
        self.size = int(ends[-1])
        self.log_median = np.log([PRIORS[name].median for name in FREE])
        self.log_sd = np.array([PRIORS[name].sd for name in FREE])
        self.log_p95 = np.log(scans.p95_us)
        self.log_capacity = np.log(scans.capacity)
        self.log_interval = np.log(intervals.p95_us)
        # A run's intervals are not independent: they weigh no more than the scans' points.
        count = max(len(intervals.qps), 1)
        balance = min(1.0, (len(scans.qps) / count) ** 0.5)
        self.interval_weight = of_run[intervals.vm] * balance / INTERVAL_SD

    def start(self) -> FloatArray:
        """Where the search begins: the priors' medians, every factor 1."""
        x = np.zeros(self.size)
        x[self.parts[0]] = self.log_median
        return x

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Physical bounds; factors within a factor e of 1; the tail's shape held."""
        low = np.full(self.size, -1.0)
        high = np.full(self.size, 1.0)
        low[self.parts[0]] = np.log([PRIORS[name].low for name in FREE])
        high[self.parts[0]] = np.log([PRIORS[name].high for name in FREE])
        low[TAIL] = np.log(self.tail_shape) - 1e-5
        high[TAIL] = np.log(self.tail_shape) + 1e-5
        return low, high

    def scan_prediction(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Predicted p95 and capacity of the scans' points."""
        return predict_scans(
            self.scans, params_of(x), np.exp(x[self.parts[1]]), np.exp(x[self.parts[2]])
        )

    def interval_prediction(self, x: FloatArray) -> FloatArray:
        """Predicted p95 of the intervals."""
        return predict_intervals(
            self.intervals, params_of(x), np.exp(x[self.parts[3]]), np.exp(x[self.parts[4]])
        )

    def residuals(self, x: FloatArray) -> FloatArray:
        """Weighted logarithmic errors, then the priors."""
        p95, capacity = self.scan_prediction(x)
        return np.concatenate(
            [
                (np.log(p95) - self.log_p95) * self.scan_weight,
                (np.log(capacity[self.scans.saturated]) - self.log_capacity) * self.capacity_weight,
                (np.log(self.interval_prediction(x)) - self.log_interval) * self.interval_weight,
                (x[self.parts[0]] - self.log_median) / self.log_sd,
                x[self.parts[1]] / self.scans.speed_sd,
                x[self.parts[2]] / self.scans.idle_sd,
                x[self.parts[3]] / self.scans.speed_sd,
                x[self.parts[4]] / self.scans.idle_sd,
            ]
        )

    def jacobian(self, x: FloatArray) -> FloatArray:
        """Forward differences; one evaluation per parameter and per kind of factor."""
        step = 1e-4
        base = self.residuals(x)
        jacobian = np.zeros((len(base), self.size))
        for column in range(len(FREE)):
            moved = x.copy()
            moved[column] += step
            jacobian[:, column] = (self.residuals(moved) - base) / step
        points = len(self.scans.qps)
        fits = len(self.scans.capacity)
        owner = np.concatenate([self.scans.vm, self.scans.vm[self.scans.saturated]])
        rows = np.arange(points + fits)
        for part in self.parts[1:3]:
            moved = x.copy()
            moved[part] += step
            change = (self.residuals(moved) - base) / step
            jacobian[rows, part.start + owner] = change[rows]
        rows = points + fits + np.arange(len(self.intervals.qps))
        for part in self.parts[3:5]:
            moved = x.copy()
            moved[part] += step
            change = (self.residuals(moved) - base) / step
            jacobian[rows, part.start + self.intervals.vm] = change[rows]
        priors = points + fits + len(self.intervals.qps) + len(FREE)
        sds = [self.scans.speed_sd, self.scans.idle_sd] * 2
        for part, sd in zip(self.parts[1:], sds, strict=True):
            size = part.stop - part.start
            own = np.arange(size)
            jacobian[priors + own, part.start + own] = 1.0 / sd
            priors += size
        return jacobian

    def loss(self, x: FloatArray) -> float:
        """What the fit minimises."""
        return float(np.sum(np.sqrt(1.0 + self.residuals(x) ** 2) - 1.0))

    def solve(self, tail_shape: float, start: FloatArray | None = None) -> FloatArray:
        """The unknowns that fit best with one shape of the tail."""
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
        """The unknowns that fit best, with the tail that tells violations best.

        :param groups: groups whose intervals choose the tail.
        """
        chosen = np.isin(self.intervals.group(), list(groups)) & self.intervals.batch
        # The surface has more than one valley: the early rise may be early or late.
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
        """Standard deviation of the parameters' logarithms, from the curvature at the solution."""
        jacobian = self.jacobian(x)
        covariance = np.linalg.pinv(jacobian.T @ jacobian)
        return np.sqrt(np.diag(covariance)[self.parts[0]])


def params_of(x: FloatArray) -> FloatArray:
    """The physics' parameters from the unknowns of a :class:`Problem`."""
    params = np.ones(len(SERVICE_FIELDS))
    params[FREE_INDEX] = np.exp(x[: len(FREE)])
    return params


def predict_scans(
    scans: Scans,
    params: FloatArray,
    speed: FloatArray | None = None,
    idle: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """P95 [us] and capacity [1/s] at the points of scans, given factors per VM (1 if not)."""
    ones = np.ones(len(scans.vm_names))
    p95 = np.empty(len(scans.qps))
    capacity = np.empty(len(scans.qps))
    scan_curve(
        scans.vm,
        scans.threads,
        scans.cores,
        scans.qps,
        scans.siblings,
        np.zeros(len(scans.qps)) if scans.client is None else scans.client,
        ones if speed is None else speed,
        ones if idle is None else idle,
        params,
        p95,
        capacity,
    )
    return p95, capacity


def predict_intervals(
    intervals: Intervals, params: FloatArray, speed: FloatArray, idle: FloatArray
) -> FloatArray:
    """P95 of the intervals of runs [us], given factors per run."""
    p95 = np.empty(len(intervals.qps))
    interval_p95(
        intervals.vm,
        intervals.run,
        intervals.qps,
        intervals.first,
        intervals.duration_s,
        intervals.mask,
        intervals.threads,
        intervals.background,
        intervals.equal,
        intervals.pressure,
        intervals.siblings,
        speed,
        idle,
        params,
        p95,
    )
    return p95


def balanced_accuracy(
    p95: FloatArray, intervals: Intervals, chosen: npt.NDArray[np.bool_]
) -> float:
    """Mean of the hit rates on violating and on other intervals; 0 without one of them."""
    violated = (intervals.p95_us > intervals.slo_us)[chosen]
    predicted = (p95 > intervals.slo_us)[chosen]
    if violated.all() or not violated.any():
        return 0.0
    return float((predicted[violated].mean() + (~predicted)[~violated].mean()) / 2.0)


def fit_vm(
    scans: Scans | None,
    intervals: Intervals | None,
    params: FloatArray,
    speed_sd: float,
    with_idle: bool = True,
) -> tuple[float, float]:
    """Speed and idle-latency factor of one VM, everything else given.

    :param scans: its scans, all with ``vm`` 0, if any.
    :param intervals: intervals of its runs, all with ``vm`` 0, if any.
    :param params: parameters of the physics.
    :param speed_sd: prior for ln(speed).
    :param with_idle: fit the idle-latency factor too, else it stays 1.
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


def one_vm(scans: Scans, vm: int, two_threads: bool = True) -> Scans:
    """The scans of one VM, numbered 0; with two threads only, as memcached ran."""
    rows = np.flatnonzero((scans.vm == vm) & ((scans.threads == 2) | (not two_threads)))
    place = {int(row): n for n, row in enumerate(rows)}
    kept = [n for n, row in enumerate(scans.saturated) if int(row) in place]
    return Scans(
        vm_names=(scans.vm_names[vm],),
        vm=np.zeros(len(rows), dtype=np.int64),
        threads=scans.threads[rows],
        cores=scans.cores[rows],
        qps=scans.qps[rows],
        p95_us=scans.p95_us[rows],
        speed_sd=scans.speed_sd,
        saturated=np.array([place[int(scans.saturated[n])] for n in kept], dtype=np.int64),
        capacity=scans.capacity[kept],
        siblings=scans.siblings,
        idle_sd=scans.idle_sd,
    )


def predict_new_runs(
    intervals: Intervals, params: FloatArray, speed_sd: float, rows: IntArray
) -> FloatArray:
    """Predict runs with the VM factors that the other runs of their VM show.

    :param intervals: intervals of runs.
    :param params: parameters of the physics, fitted without these runs' group.
    :param speed_sd: prior for ln(speed).
    :param rows: the intervals to predict.
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


def lookup_p95(intervals: Intervals, train: IntArray, test: IntArray) -> FloatArray:
    """The plain alternative: median p95 by vCPUs and 10K QPS; NaN where none was seen."""
    cores = np.array([int(mask).bit_count() for mask in intervals.mask], dtype=np.float64)
    held = np.add.reduceat(cores * intervals.duration_s, intervals.first[:-1])
    whole = np.add.reduceat(intervals.duration_s, intervals.first[:-1])
    key = np.rint(held / whole).astype(int) * 1000 + (intervals.qps // 10_000).astype(int)
    medians = pd.Series(intervals.p95_us[train]).groupby(key[train]).median()
    return medians.reindex(key[test]).to_numpy(np.float64)


def curve_errors(scans: Scans, params: FloatArray, speed: float, idle: float) -> dict[str, float]:
    """Errors of one VM's two-thread curves: below the knee, knee and plateau.

    :param scans: one VM's scans (:func:`one_vm`).
    :param params: parameters of the physics.
    :param speed: the VM's speed factor.
    :param idle: the VM's idle-latency factor.
    :return: per curve and quantity, the relative error (median of the absolute one below the knee).
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


def cpu_limit(folder: Path, year: int) -> float:
    """CPU use per vCPU at saturation, as memcached's own clock shows it: median over scans."""
    table = read_points(folder, year, [])
    table = table[(table["threads"] == 2) & (table["cores"] <= 2)]
    uses = []
    for _, scan in table.groupby(["repo", "path", "rep"], sort=True):
        full = scan["target_qps"] > 1.05 * scan["achieved_qps"].max()
        use = (scan["cpu_util_pct"] / 100.0 / scan["cores"])[full].dropna()
        if len(use) >= 3:
            uses.append(float(use.median()))
    return float(np.median(uses)) if uses else 0.8


def check(problem: Problem, x: FloatArray) -> None:
    """Refuse a fit that did not converge or that ended on a bound.

    :param problem: what was solved.
    :param x: its solution. Parameters whose spread is stated may be held by their bounds.
    :raises InputError: if it cannot be trusted.
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


def fit_service(
    data_dir: Path | str, year: int, pressure: Mapping[str, float] | None = None
) -> ServiceFit:
    """Fit memcached's parameters to the measured runs of one year.

    :param data_dir: folder of the tables (``latency_curves``, ``runs``, ``intervals``, ``events``).
    :param year: 2024 (n2d) or 2025 (n2).
    :param pressure: memory pressure per vCPU in use of each job; :data:`PRESSURE` if not given.
    :return: parameters with spread and source, VM factors, errors and what was left out.
    :raises InputError: a table is missing or has nothing that can be used, or the fit is no good.
    """
    folder = Path(data_dir)
    remarks: list[Remark] = []
    scans = read_scans(folder, year, remarks)
    if not len(scans.qps):
        raise InputError(f"{folder}: latency_curves: no scans of {year}")
    intervals = read_intervals(folder, year, remarks, pressure or PRESSURE)
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
    vm_spread = float(np.sqrt(np.mean(log_speed**2))) * _widening(n)
    idle_spread = float(np.sqrt(np.mean(log_idle**2))) * _widening(n)
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
            prior = PRIORS[name]
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
    errors = _in_sample(problem, x) | _left_out(scans, intervals, groups)
    errors = {name: float(f"{value:.4g}") for name, value in errors.items() if value == value}
    return ServiceFit(service, vm_speed, errors, vms, tuple(remarks))


def _widening(n: int) -> float:
    """Student's t over the normal distribution at 90 %, for ``n`` VMs around a known centre."""
    return float(student_t.ppf(0.95, n) / norm.ppf(0.95))


def _in_sample(problem: Problem, x: FloatArray) -> dict[str, float]:
    """Errors on the data of the fit itself, with its VM factors."""
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


def _left_out(scans: Scans, intervals: Intervals, groups: Sequence[str]) -> dict[str, float]:
    """Errors on each group by a fit that never saw it."""
    count = len(intervals.qps)
    new_vm = np.full(count, np.nan)
    known_vm = np.full(count, np.nan)
    lookup = np.full(count, np.nan)
    names = intervals.group()
    curves: dict[str, list[float]] = {}
    inside = []
    for group in groups:
        others = [other for other in groups if other != group]
        if not others:
            continue
        problem = Problem(scans, intervals, {group: 0.0})
        if group in intervals.groups:
            x = problem.solve_all(others)
        else:  # scans alone do not see the tail
            x = problem.solve(PRIORS["tail_shape"].median)
        params = params_of(x)
        rows = np.flatnonzero((names == group) & intervals.batch)
        if len(rows):
            ones = np.ones(len(intervals.vm_names))
            new_vm[rows] = predict_intervals(intervals, params, ones, ones)[rows]
            known_vm[rows] = predict_new_runs(intervals, params, scans.speed_sd, rows)
            train = np.flatnonzero((names != group) & intervals.batch)
            lookup[rows] = lookup_p95(intervals, train, rows)
        log_speed = x[problem.parts[1]]
        seen = np.array([name != group for name in scans.groups()])
        for vm in np.flatnonzero(~seen):
            own = one_vm(scans, int(vm))
            if not len(own.qps):
                continue
            for label, with_idle in (("speed", False), ("speed and idle", True)):
                factors = fit_vm(own, None, params, scans.speed_sd, with_idle)
                for what, error in curve_errors(own, params, *factors).items():
                    curves.setdefault(f"scan, {label}, {what}", []).append(abs(error))
                if not with_idle:
                    width = float(np.sqrt(np.mean(log_speed[seen] ** 2)))
                    width = np.hypot(width, scans.speed_sd / 2.0) * _widening(int(seen.sum()))
                    inside.append(abs(np.log(factors[0])) <= norm.ppf(0.95) * width)
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
