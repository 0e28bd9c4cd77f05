"""
A measured run as a trace: its load, memcached's moves and its jobs, on one clock.

`stretches` cuts a run where anything changes, so that memcached and every job keep their vCPUs
within each piece.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Moves = tuple[tuple[float, int], ...]
"""When [s] something went to which vCPUs (bit mask), in rising order."""

# A predecessor's end may be logged this long after the start that it triggered.
LOG_JITTER_S = 1.0


@dataclass(frozen=True)
class JobTrace:
    """
    One job of one run, as logged.

    :param moves: (time [s], core mask), the first at the start
    :param pauses: (from [s], to [s])
    :param quota: mean CPU quota [vCPUs] where the log gives one, else infinite
    """

    name: str
    start_s: float
    end_s: float
    threads: int
    moves: Moves
    pauses: tuple[tuple[float, float], ...]
    quota: float = np.inf

    @property
    def run_s(self) -> float:
        """Seconds between start and end in which the job was not paused."""
        return self.end_s - self.start_s - sum(stop - begin for begin, stop in self.pauses)


@dataclass(frozen=True)
class RunTrace:
    """One run: the load, memcached's moves and the jobs. Times in seconds from mcperf's start."""

    run: str
    group: str
    year: int
    day: str
    server: str
    interval_start_s: FloatArray
    interval_end_s: FloatArray
    qps: FloatArray
    p95_us: FloatArray
    service_threads: int
    service_moves: Moves
    jobs: tuple[JobTrace, ...]
    moves_logged: bool
    background: bool

    @property
    def first_start_s(self) -> float:
        """Start of the first job."""
        return min(job.start_s for job in self.jobs)

    @property
    def last_end_s(self) -> float:
        """End of the last job."""
        return max(job.end_s for job in self.jobs)

    @property
    def makespan_s(self) -> float:
        """First start to last end."""
        return self.last_end_s - self.first_start_s

    @property
    def in_batch_window(self) -> npt.NDArray[np.bool_]:
        """Which intervals overlap the time between them."""
        return (self.interval_end_s > self.first_start_s) & (
            self.interval_start_s < self.last_end_s
        )

    def predecessor(self, job: JobTrace) -> JobTrace | None:
        """
        The job whose logged end came last before this one's start, if any.

        :param job: a job of this run
        """
        before = [
            other
            for other in self.jobs
            if other is not job
            and other.end_s <= job.start_s + LOG_JITTER_S
            and other.start_s < job.start_s
        ]
        return max(before, key=lambda other: other.end_s, default=None)


def mask_at(moves: Moves, time: float) -> int:
    """
    The vCPUs held at a time: those of the last move until then, or else of the first move.

    :param moves: at least one move, in order of time
    :param time: moment, on the clock of the moves [s]
    :return: bit mask of vCPUs
    """
    mask = moves[0][1]
    for moved, to in moves:
        if moved > time:
            break
        mask = to
    return mask


class RunningJob(NamedTuple):
    """
    A job within a stretch.

    :param job: the running job
    :param cores: bit mask of its vCPUs
    """

    job: JobTrace
    cores: int


@dataclass(frozen=True)
class Stretch:
    """
    A piece of a run in which nothing moves.

    :param begin_s: beginning [s], -inf for what was before the first change
    :param end_s: end [s], inf for what was after the last change
    :param service_cores: bit mask of memcached's vCPUs
    :param jobs: those that run, neither paused nor ended
    """

    begin_s: float
    end_s: float
    service_cores: int
    jobs: tuple[RunningJob, ...]

    @property
    def length_s(self) -> float:
        """End minus beginning."""
        return self.end_s - self.begin_s


def stretches(service_moves: Moves, jobs: Sequence[JobTrace]) -> tuple[Stretch, ...]:
    """
    Cut a run where memcached moves, and where a job starts, ends, moves, pauses or goes on.

    :param service_moves: memcached's
    :param jobs: of the run
    :return: pieces in their order, without gaps, the first from -inf, the last to inf
    """
    times = {time for time, _ in service_moves} | {-math.inf, math.inf}
    for job in jobs:
        times |= {job.start_s, job.end_s} | {time for time, _ in job.moves}
        times |= {time for pause in job.pauses for time in pause}
    return tuple(
        Stretch(
            begin,
            end,
            mask_at(service_moves, begin),
            tuple(
                RunningJob(job, mask_at(job.moves, begin))
                for job in jobs
                if job.start_s <= begin < job.end_s
                and not any(paused <= begin < resumed for paused, resumed in job.pauses)
            ),
        )
        for begin, end in pairwise(sorted(times))
    )


def between(pieces: Sequence[Stretch], begin_s: float, end_s: float) -> Iterator[Stretch]:
    """
    The part of a run between two moments.

    :param pieces: what `stretches` made
    :param begin_s: the first moment [s]
    :param end_s: the second [s]
    """
    first = bisect_right(pieces, begin_s, key=lambda piece: piece.begin_s) - 1
    for piece in pieces[first:]:
        if piece.begin_s >= end_s:
            return
        yield replace(piece, begin_s=max(piece.begin_s, begin_s), end_s=min(piece.end_s, end_s))
