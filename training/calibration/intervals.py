"""Intervals of runs, cut into states: what memcached had and what ran beside it, in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from training.calibration.logs.course import (
    DEFAULT_SLO_US,
    JOBS,
    LOAD_LAG_S,
    SERVERS,
    SIBLINGS,
    SLO_US,
    VCPUS,
)
from training.calibration.logs.known_faults import known_faults
from training.calibration.logs.run_logs import read_runs
from training.calibration.logs.tables import Remark
from training.calibration.logs.traces import RunTrace, Stretch, between, stretches

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SHORTEST_INTERVAL_S = 1.5
"""Shorter ones say more about the controller's timing than about latency."""

RUNS_PER_GROUP = 22
"""At most, evenly chosen; no group of 2025 has more."""

LEAST_STATE_S = 1e-3

FULL_VCPU_QPS = 125e3
"""At this load memcached leaves nothing of its vCPUs to jobs of background weight."""


@dataclass(frozen=True)
class Intervals:
    """Intervals of runs, cut into states; states of interval i are `first[i]:first[i + 1]`."""

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
    client: FloatArray | None = None  # of the states: share of the last vCPU that the load takes

    def group(self) -> npt.NDArray[np.str_]:
        """Group of each interval."""
        return np.array(self.groups)[self.vm]

    def select(self, rows: IntArray, vms: Sequence[int]) -> Intervals:
        """
        Some of the intervals, with the VMs numbered anew.

        :param rows: the intervals to keep, by number or one truth value each
        :param vms: the VMs to keep, in their new order
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


def read_intervals(
    folder: Path, year: int, remarks: list[Remark], pressure: Mapping[str, float]
) -> Intervals:
    """
    Read the runs of one year and cut their intervals into states.

    :param folder: folder of the tables
    :param year: the year to read
    :param remarks: what is left out is added here
    :param pressure: memory pressure per vCPU in use of each job
    """
    tables = read_runs(folder, JOBS, (year,), SERVERS.get(year, ""))
    remarks.extend(tables.remarks)
    usable = []
    for run in tables.runs:
        if not run.moves_logged:
            remarks.append(Remark("events", run.run, -1, "left out: memcached's moves not logged"))
        elif np.median(run.interval_end_s - run.interval_start_s) < SHORTEST_INTERVAL_S:
            remarks.append(Remark("intervals", run.run, -1, "left out: intervals under 1.5 s"))
        else:
            usable.append(run)
    for group in sorted({run.group for run in usable}):
        own = [run for run in usable if run.group == group]
        keep = {own[round(k)].run for k in np.linspace(0, len(own) - 1, RUNS_PER_GROUP)}
        for run in own:
            if run.run not in keep:
                remarks.append(Remark("runs", run.run, -1, f"thinned: {RUNS_PER_GROUP} per group"))
        usable = [run for run in usable if run.group != group or run.run in keep]
    vms = [f"{run.group} {run.day}" for run in usable]
    return cut_intervals(usable, vms, SLO_US.get(year, DEFAULT_SLO_US), pressure)


class _State(NamedTuple):
    """A piece of an interval; see `Intervals`."""

    duration_s: float
    mask: int
    threads: int
    background: FloatArray
    equal: FloatArray
    pressure: float


def cut_intervals(
    runs: Sequence[RunTrace], vms: Sequence[str], slo_us: float, pressure: Mapping[str, float]
) -> Intervals:
    """
    Cut runs into intervals and states.

    :param runs: runs whose memcached moves are logged
    :param vms: name of each run's VM
    :param slo_us: the latency objective of their year [µs]
    :param pressure: memory pressure per vCPU in use of each job
    """
    vm_names = tuple(dict.fromkeys(vms))
    of_run: list[int] = []
    batch: list[bool] = []
    qps: list[float] = []
    p95: list[float] = []
    first: list[int] = [0]
    states: list[_State] = []
    for n, run in enumerate(runs):
        pieces = stretches(run.service_moves, run.jobs)
        quiet_too = run.group in known_faults().quiet_after_jobs
        for begin, end, load, latency in zip(
            run.interval_start_s, run.interval_end_s, run.qps, run.p95_us, strict=True
        ):
            window = begin >= run.first_start_s and end <= run.last_end_s
            if not window and not (quiet_too and begin >= run.last_end_s):
                continue
            own = [
                _state(run, piece, load, pressure)
                for piece in between(pieces, begin + LOAD_LAG_S, end + LOAD_LAG_S)
                if piece.length_s >= LEAST_STATE_S
            ]
            if not own:
                continue
            states += own
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
        duration_s=np.array([state.duration_s for state in states]),
        mask=np.array([state.mask for state in states], dtype=np.int64),
        threads=np.array([state.threads for state in states], dtype=np.int64),
        background=np.array([state.background for state in states]).reshape(-1, VCPUS),
        equal=np.array([state.equal for state in states]).reshape(-1, VCPUS),
        pressure=np.array([state.pressure for state in states]),
    )


def _state(run: RunTrace, piece: Stretch, load_qps: float, pressure: Mapping[str, float]) -> _State:
    """What memcached meets in a piece of an interval."""
    busy, total_pressure = _batch_work(piece, pressure)
    own = np.array([(piece.service_cores >> c) & 1 for c in range(VCPUS)], dtype=bool)
    if known_faults().of_group(run.group).yields:
        busy[own] = 0.0
    nothing = np.zeros(VCPUS)
    if run.background:  # jobs get what memcached leaves of its vCPUs
        busy[own] *= max(1.0 - load_qps / FULL_VCPU_QPS, 0.0)
    equal, background = (nothing, busy) if run.background else (busy, nothing)
    return _State(
        piece.length_s,
        piece.service_cores,
        run.service_threads,
        background,
        equal,
        total_pressure,
    )


def _batch_work(piece: Stretch, pressure: Mapping[str, float]) -> tuple[FloatArray, float]:
    """Busy fraction of each vCPU by batch work, and the jobs' memory pressure."""
    busy = np.zeros(VCPUS)
    total = 0.0
    for job, mask in piece.jobs:
        width = mask.bit_count()
        used = min(job.threads, width)
        for c in range(VCPUS):
            if (mask >> c) & 1:
                busy[c] += used / width
        total += pressure[job.name] * used
    return np.minimum(busy, 1.0), total
