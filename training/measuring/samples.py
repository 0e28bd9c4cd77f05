"""
How much of a job is run: a part where its command says how much work there is, else the whole.

Whole runs have a budget of time of their own. Every job is run once with the most threads that fit,
which is quickest, then once with the fewest, then in the background of a memcached under load;
what time is left repeats the first two until they are known. A run that would not end in what is
left is not begun.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from env.scenario import Job, Scenario
from training.analysis.findings import ALONE
from training.measuring.testbed import Testbed
from training.statistics import margin

OPERATIONS = re.compile(r"(--[a-z0-9-]+-ops)(?:=(\d+))?$")
SAMPLE_S = 1.5  # how long a part is meant to run, alone with one thread
LEAST_S = 0.1 * SAMPLE_S  # what a run takes at least to tell how long a part has to be
FIRST_PART, GROWTH = 0.005, 4.0
PART_LIMIT_S = 60.0
"""A part that takes longer is ended, and the job is not measured."""

MARGIN = 0.05
"""Half the width of a 95 % interval over the mean, at which a point is known."""

SERVING = "memcached"
"""Stands in the place of `findings.ALONE` where a job ran in the background of memcached."""

LOADED = "load generator"
"""The same where it ran beside the load generator, on that one's vCPU."""

SERVED = 0.4
"""Of what one vCPU serves: memcached's load meanwhile."""

SERVED_PART = 0.25
"""Of the part that is run alone: so much costs enough CPU time to be compared."""

RESERVED_S = 20.0
"""What a whole run leaves of the budget for each job that has not been run yet."""

LEAST_WINDOW_S = 5.0
"""Where instructions are counted, so much of a job beside memcached says what one costs there."""

SLOWED = 2.5
"""A job beside a memcached that uses half of the vCPU takes at most so many times as long."""


@dataclass(frozen=True)
class WholeRun:
    """
    One run of a job that cannot be cut.

    :param job: the job
    :param threads: its thread count
    :param beside: `findings.ALONE` or `SERVING`
    :param limit_s: how long it may take [s]
    """

    job: Job
    threads: int
    beside: str
    limit_s: float

    @property
    def key(self) -> str:
        """Name of its rounds."""
        beside = "alone" if self.beside == ALONE else f"beside {self.beside}"
        return f"{self.job.name} T{self.threads} {beside}"


def is_cut(job: Job) -> bool:
    """
    Whether a part of a job can stand for the whole.

    :param job: the job
    """
    return shortened(job, FIRST_PART, job.threads[0])[1] < 1.0


def company(scenario: Scenario, own: tuple[int, ...], last: int) -> dict[str, tuple[int, ...]]:
    """
    Whom a background job meets under load, and on which vCPUs.

    :param scenario: says which vCPUs count
    :param own: memcached's
    :param last: the load generator's
    :return: vCPUs by `SERVING`, and `LOADED` where that one runs on a vCPU of the scenario's
    """
    shares = last < scenario.machine.vcpus and last not in own
    return {SERVING: own} | ({LOADED: (last,)} if shares else {})


def next_whole_run(
    jobs: Sequence[Job], vcpus: int, rows: pd.DataFrame, left_s: float, most: int
) -> WholeRun | None:
    """
    The run that says most about jobs that cannot be cut; None if there is none, or no time for it.

    :param jobs: those jobs
    :param vcpus: number of vCPUs of this machine
    :param rows: their runs so far: job, threads, beside, real_s (NaN if it was ended), cpu_s,
        cycles
    :param left_s: what is left of the budget [s]
    :param most: runs of a point at most
    """
    counts = {job: [n for n in job.threads if n <= vcpus] for job in jobs}
    fitting = [job for job in jobs if counts[job]]
    runs = dict(iter(rows.groupby(["job", "threads", "beside"])))
    for round_ in range(most):
        ways = [(-1, ALONE), (0, ALONE), *([] if round_ else [(0, SERVING)])]
        for which, beside in ways:
            waiting = [
                job
                for job in fitting
                if _is_wanted(runs.get((job.name, counts[job][which], beside)), round_)
            ]
            for place, job in enumerate(waiting):
                threads, others = counts[job][which], len(waiting) - place - 1
                first = runs.get((job.name, counts[job][-1], ALONE))
                own = runs.get((job.name, threads, beside))
                limit_s = _limit_s(first, own, beside, left_s, others)
                if limit_s > 0.0:
                    return WholeRun(job, threads, beside, limit_s)
    return None


def _limit_s(
    first: pd.DataFrame | None, own: pd.DataFrame | None, beside: str, left_s: float, others: int
) -> float:
    """
    How long a run may take [s]; 0 if it would not end in what is left.

    :param first: the job's quickest runs
    :param own: runs like this one
    :param beside: what it runs beside
    :param left_s: what is left of the budget [s]
    :param others: number of jobs that wait for a run of this kind
    """
    share_s = left_s / (others + 1)
    if first is None:
        return max(left_s - RESERVED_S * others, share_s)
    if first["real_s"].isna().any():
        return 0.0
    if beside == SERVING and first["cycles"].notna().any():
        window_s = max(LEAST_WINDOW_S, share_s)
        return window_s if window_s <= left_s else 0.0
    return left_s if _expected_s(first, own, beside) <= left_s else 0.0


def _is_wanted(own: pd.DataFrame | None, round_: int) -> bool:
    """Whether a point is to be measured in a round; one that did not end would not, once more."""
    if own is None:
        return True
    if len(own) > round_ or own["real_s"].isna().any():
        return False
    return len(own) < 2 or margin(own["real_s"].tolist()) > MARGIN


def _expected_s(first: pd.DataFrame, own: pd.DataFrame | None, beside: str) -> float:
    """How long a run will take [s], by the job's first ones: its threads' CPU time one by one."""
    if own is not None:
        return float(own["real_s"].max())
    longest_s = float(max(first["real_s"].max(), first["cpu_s"].max()))
    return SLOWED * longest_s if beside == SERVING else longest_s


def shortened(job: Job, part: float, threads: int) -> tuple[Job, float]:
    """
    A job that does a part of its work.

    :param job: a stress-ng job with a number of operations in all (`--matrix-ops 1000`)
    :param part: of the operations
    :param threads: number of threads; each does the same number of them, and one at least
    :return: the job and the part it really does; the whole job if its command says no number
    """
    command = list(job.command)
    for k, word in enumerate(command):
        found = OPERATIONS.match(word)
        if not found:
            continue
        joined = found[2] is not None
        said = found[2] if joined else "".join(command[k + 1 : k + 2])
        if not said.isdigit() or int(said) == 0:
            continue
        each = max(1, round(int(said) * part / threads))
        number = min(each * threads, int(said))
        command[k : k + 2 - joined] = [f"{found[1]}={number}"] if joined else [word, str(number)]
        return job.model_copy(update={"command": tuple(command)}), number / int(said)
    return job, 1.0


def scaled(row: dict[str, float], part: float, overhead_s: float) -> dict[str, float]:
    """
    What the whole job takes, by a part of it: the start is paid once, the rest scales.

    :param row: see `Testbed.time_job`
    :param part: of the job that was run
    :param overhead_s: what each run takes whatever the part [s]; its start took so long, at least
    """
    overhead_s = max(overhead_s, row["start_s"])
    return row | {
        "real_s": overhead_s + (row["real_s"] - overhead_s) / part,
        "cpu_s": row["cpu_s"] / part,
        "sampled": part,
        "overhead_s": overhead_s,
    }


def choose_part(
    testbed: Testbed, job: Job, threads: int, cores: tuple[int, ...]
) -> tuple[float, float, dict[str, float]]:
    """
    How much of a job takes about `SAMPLE_S`, and what its start costs beside the work.

    :param testbed: the testbed to measure on
    :param job: the job to time, one that can be cut
    :param threads: its thread count
    :param cores: its vCPUs
    :return: part of the job, the time that each run takes whatever the part [s], and a run of that
        part (see `Testbed.time_job`)
    """
    cut, part = shortened(job, FIRST_PART, threads)
    row = testbed.time_job(cut, threads, cores, PART_LIMIT_S)
    while row["real_s"] < LEAST_S and part < 1.0:
        cut, part = shortened(job, min(1.0, GROWTH * part), threads)
        row = testbed.time_job(cut, threads, cores, PART_LIMIT_S)
    if part == 1.0 or math.isnan(row["real_s"]):
        return 1.0, row["start_s"], row
    cut, larger = shortened(job, min(1.0, max(2.0, SAMPLE_S / row["real_s"]) * part), threads)
    if larger == part:
        return part, row["start_s"], row
    long = testbed.time_job(cut, threads, cores, PART_LIMIT_S)
    rate = (long["real_s"] - row["real_s"]) / (larger - part)
    # A disturbed run must not make the start look longer than the work.
    overhead_s = min(row["real_s"] - rate * part, 0.5 * row["real_s"])
    return larger, max(overhead_s, row["start_s"]), long
