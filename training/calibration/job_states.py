"""
Runs of batch jobs, cut into the distinct situations that they went through.

Runs share states, so one evaluation of all runs takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.codes import BACKGROUND, NORMAL
from env.physics.service import service_occupancy
from training.calibration.logs.course import BATCH_SIBLINGS, JOBS, SIBLINGS, VCPUS
from training.calibration.logs.traces import RunningJob, RunTrace, between, stretches

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Occupancy = Callable[[FloatArray, int], FloatArray]
"""Fraction of each of memcached's vCPUs that it asks for: of loads [1/s] and their number."""


@dataclass(frozen=True)
class States:
    """
    All runs, cut into the distinct situations they went through.

    State `s` has `running[s]`, `threads[s]`, `cores[s]` (by job) and the mean occupancy of
    each vCPU by memcached. Sample `sample[k]` (one job of one run) spent `seconds[k]` in state
    `state[k]`, under a CPU quota of `quota[k]` vCPUs. `sibling[c]` shares a core with vCPU `c`.
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
    sibling: IntArray


def build_states(
    runs: Sequence[RunTrace], occupancy_of: Occupancy, sibling: IntArray = BATCH_SIBLINGS
) -> States:
    """
    Cut runs into states.

    :param runs: logged runs
    :param occupancy_of: how busy memcached is
    :param sibling: int64[VCPUS], the vCPU that shares a core with each one for batch work, or -1
    """
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
            samples[job] = len(measured)
            jobs_of.append(JOBS.index(job.name))
            group_of.append(groups.index(run.group))
            run_of.append(number)
            measured.append(job.run_s)
        spent: dict[tuple[tuple[RunningJob, ...], int], list[float]] = {}
        pieces = stretches(run.service_moves, run.jobs)
        for piece in between(pieces, run.first_start_s, run.last_end_s):
            if piece.jobs:
                entry = spent.setdefault((piece.jobs, piece.service_cores), [0.0, 0.0])
                entry[0] += piece.length_s
                entry[1] += load.between(
                    piece.begin_s, piece.end_s, piece.service_cores.bit_count()
                )
        for (present, mask), (duration, busy) in spent.items():
            row = len(running)
            running.append(np.zeros(len(JOBS), np.uint8))
            threads.append(np.ones(len(JOBS), np.int64))
            cores.append(np.zeros(len(JOBS), np.int64))
            weight.append(np.full(len(JOBS), BACKGROUND if run.background else NORMAL))
            share = busy / duration
            occupancy.append([share if (mask >> c) & 1 else 0.0 for c in range(VCPUS)])
            for job, job_cores in present:
                column = JOBS.index(job.name)
                running[row][column] = 1
                threads[row][column] = job.threads
                cores[row][column] = job_cores
                state.append(row)
                sample.append(samples[job])
                seconds.append(duration)
                quota.append(job.quota)
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
        sibling,
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


def fitted_occupancy(service: FloatArray) -> Occupancy:
    """
    How busy memcached's vCPUs are while batch jobs keep the others busy.

    :param service: float64[len(SERVICE_FIELDS)], the fitted parameters
    """

    def occupancy(qps: FloatArray, width: int) -> FloatArray:
        mask = (1 << width) - 1
        equal = np.array([0.0 if (mask >> c) & 1 else 1.0 for c in range(VCPUS)])
        nobody = np.zeros(VCPUS)
        asked = [
            service_occupancy(load, 2, mask, SIBLINGS, nobody, equal, nobody, service)
            for load in qps
        ]
        return np.array(asked)

    return occupancy
