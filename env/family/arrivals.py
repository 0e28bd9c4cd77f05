"""When jobs arrive: all at once, one by one at random, in bursts, or as in a trace file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from env.errors import InputError
from env.inputs.text_files import read_expanded

FloatArray = npt.NDArray[np.float64]

COLUMN = "creation_time"
"""The column of a trace file that has the times of arrival [s]."""

MOST_TRACE_BYTES = 32 << 20
"""A larger trace file is refused, and one that expands to more [bytes]."""


def draw_arrivals(
    ranges: dict[str, Any], n_jobs: int, span_s: float, rng: np.random.Generator
) -> FloatArray:
    """
    Times of arrival in rising order, the first job's 0.

    :param ranges: section `arrivals` of the family's file
    :param n_jobs: how many jobs arrive
    :param span_s: time in which so many arrive on average [s]
    :param rng: source of what is random
    :return: float64[n_jobs] [s]
    """
    kind = rng.random() - ranges["together_share"]
    if kind < 0.0:
        return np.zeros(n_jobs)
    gaps = rng.exponential(span_s / n_jobs, n_jobs)
    if kind < ranges["bursts_share"]:
        ends = rng.random(n_jobs) < 1.0 / ranges["burst"]
        gaps = np.where(ends, gaps * ranges["burst"], 0.0)
    return first_at_zero(np.cumsum(gaps))


def first_at_zero(times_s: FloatArray) -> FloatArray:
    """
    The same times, counted from the first and rounded to milliseconds.

    :param times_s: float64[n], in rising order [s]
    """
    return np.round(times_s - times_s[0], 3)


def read_trace(path: str | Path) -> FloatArray:
    """
    Times of arrival in a trace file.

    :param path: a CSV file, compressed if its name ends in `.gz`, with a column `creation_time`
    :return: float64[n], in rising order [s]
    :raises InputError: one line that says what is wrong with it
    """
    path = Path(path)
    content = read_expanded(path, "a trace", MOST_TRACE_BYTES)
    lines = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="")
    try:
        found = (float(row[COLUMN]) for row in csv.DictReader(lines))
        times_s = np.sort(np.fromiter(found, np.float64))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise InputError(
            f"{path}: must be a CSV file with numbers in its column {COLUMN}"
        ) from error
    if not np.isfinite(times_s).all() or len(times_s) < 2 or times_s[0] == times_s[-1]:
        raise InputError(f"{path}: {COLUMN} must have two different times at least, all finite")
    return times_s


def follow_trace(
    scenario: dict[str, Any], trace_s: FloatArray, span_s: float, rng: np.random.Generator
) -> None:
    """
    Let the jobs of a scenario arrive as consecutive entries of a trace did, within the span.

    :param scenario: a drawn scenario's content, which is changed
    :param trace_s: see `read_trace`
    :param span_s: time in which the jobs arrive [s]
    :param rng: source of what is random: where in the trace they begin
    """
    jobs = scenario["jobs"]
    first = int(rng.integers(max(1, len(trace_s) - len(jobs) + 1)))
    times_s = np.sort(np.resize(trace_s[first : first + len(jobs)], len(jobs)))
    took_s = max(times_s[-1] - times_s[0], 1e-9)  # entries of one moment arrive together
    for job, at_s in zip(jobs, first_at_zero(times_s * (span_s / took_s)).tolist(), strict=True):
        job["arrival_s"] = at_s
