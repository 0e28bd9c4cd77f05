"""A part of a job instead of the whole: where a command says how much work there is."""

from __future__ import annotations

import math
import re

from env.scenario import Job
from training.machine.testbed import Testbed

OPERATIONS = re.compile(r"(--[a-z0-9-]+-ops)(?:=(\d+))?$")
SAMPLE_S = 1.5  # how long a part is meant to run, alone with one thread
LEAST_S = 0.1 * SAMPLE_S  # what a run takes at least to tell how long a part has to be
FIRST_PART, GROWTH = 0.005, 4.0


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


def choose_part(
    testbed: Testbed, job: Job, threads: int, cores: tuple[int, ...], limit_s: float
) -> tuple[float, float]:
    """
    How much of a job takes about `SAMPLE_S`, and what its start costs beside the work.

    :param testbed: the testbed to measure on
    :param job: the job to time
    :param threads: its thread count
    :param cores: its vCPUs
    :param limit_s: a run is ended after this time [s]
    :return: part of the job, and the time that each run takes whatever the part [s]
    """
    cut, part = shortened(job, FIRST_PART, threads)
    if part == 1.0:
        return 1.0, 0.0
    row = testbed.time_job(cut, threads, cores, limit_s)
    while row["real_s"] < LEAST_S and part < 1.0:
        cut, part = shortened(job, min(1.0, GROWTH * part), threads)
        row = testbed.time_job(cut, threads, cores, limit_s)
    if part == 1.0 or math.isnan(row["real_s"]):
        return 1.0, row["start_s"]
    cut, larger = shortened(job, min(1.0, max(2.0, SAMPLE_S / row["real_s"]) * part), threads)
    if larger == part:
        return part, row["start_s"]
    long = testbed.time_job(cut, threads, cores, limit_s)
    rate = (long["real_s"] - row["real_s"]) / (larger - part)
    # A disturbed run must not make the start look longer than the work.
    overhead_s = min(row["real_s"] - rate * part, 0.5 * row["real_s"])
    return larger, max(overhead_s, row["start_s"])
