"""
The course's own client beside a run: mcperf's rows, laid over what the run itself has measured.

mcperf prints when it has ended, stamped by a clock of its own; `deploy.records.clock_shift` finds
out where that clock is. Then each of its intervals is set beside what memcached counted in it, and
beside what the probe measured.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.linux.own_folder import write_own
from deploy.records import mcperf
from deploy.records.clock_shift import (
    FINEST_S,
    MOST_SHIFT_S,
    Array,
    Counted,
    count_between,
    find_shift,
    served_by,
)
from deploy.records.recorder import (
    CLIENT_FILE,
    PROBE_FILE,
    Sample,
    read_samples,
    started_at_s,
)
from env.errors import InputError, validation_message
from env.inputs.text_files import MOST_RECORD_BYTES, read_json, read_text

DRAIN_S = 2.5
"""How much longer than its intervals a run's stamps may be: connections are made and drained
(0.2 to 1.8 s in the public runs)."""

MOST_LENGTHS = 40
"""How many lengths of intervals are tried, to either side of the likeliest."""

LEAST_INTERVALS = 4
"""Fewer do not tell one clock from another."""

OTHERS_QPS = 1000.0
"""Requests per second that are not mcperf's: those of a probe."""

LAGGING = 0.95
"""A client that gets less than this part of what it says has lagged."""

NAMED = 5
"""How many intervals a finding names, at most."""

Measured = Annotated[float, Field(ge=0.0)]


class _ClientPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ClientInterval(_ClientPart):
    """
    One of mcperf's intervals, and what the run saw of it; None where it was not watched.

    :param start_s: since the run's start [s]
    :param end_s: since the run's start [s]
    :param target_qps: requests per second that mcperf was to ask for
    :param said_qps: requests per second that mcperf says it got
    :param counted_qps: requests per second that memcached counted, whoever sent them
    :param client_p95_us: 95th percentile by mcperf [µs]
    :param probe_p95_us: 95th percentile by the probe [µs]
    """

    start_s: float
    end_s: float
    target_qps: Measured | None
    said_qps: Measured
    counted_qps: Measured | None
    client_p95_us: Measured
    probe_p95_us: Measured | None


class ClientReport(_ClientPart):
    """
    What `CLIENT_FILE` holds.

    :param shift_s: how much later than mcperf's stamps its load reached memcached, by the run's
        clock [s]: the clocks' difference and mcperf's own delay
    :param margin_s: the shift is known to this [s]
    :param correlation: of mcperf's load and memcached's count, at this shift
    :param findings: who measured what and where they differ, a line each
    :param intervals: those that lie in the run
    """

    shift_s: float
    margin_s: Measured
    correlation: float
    findings: list[str]
    intervals: list[ClientInterval]


def join(folder: Path, path: Path, jobs_s: tuple[float, float], slo_us: float) -> ClientReport:
    """
    Lay a client's output over a run, and write down what both say.

    :param folder: of the run's records
    :param path: mcperf's output
    :param jobs_s: from the first job's start to the last one's end, since the run's start [s]
    :param slo_us: the SLO [µs]
    :raises InputError: if the output is not of this run, or does not say when its intervals were;
        nothing is written then
    :raises OSError: if the disk refuses it
    """
    output, notes = _read_output(path)
    samples = read_samples(folder)
    counted = count_between(samples)
    if not counted.qps.size:
        raise InputError(f"{folder}: the run's samples do not say what memcached served")
    candidates = _candidates(output, path, started_at_s(folder))
    _require_near(candidates[0], counted, path)
    shift = find_shift(candidates, counted)
    if shift is None:
        raise InputError(
            f"{path}: its load is not the one of this run, with clocks up to {MOST_SHIFT_S:g} s "
            "apart: it must be of the same run and move often, and clocks must agree"
        )
    intervals = _intervals(shift.rows, samples, _windows(folder))
    moved = "after" if shift.shift_s >= 0.0 else "before"
    findings = [
        f"{path.name}: {len(intervals)} of its {len(shift.rows)} intervals lie in this run; its "
        f"load moved {abs(shift.shift_s):.2f} s {moved} its stamps by the run's clock, known to "
        f"{shift.margin_s:.2f} s (the clocks' difference and mcperf's own delay; correlation "
        f"{shift.correlation:.3f})",
        *notes,
        *_findings(intervals, jobs_s, slo_us),
    ]
    report = ClientReport(
        shift_s=shift.shift_s,
        margin_s=shift.margin_s,
        correlation=shift.correlation,
        findings=findings,
        intervals=intervals,
    )
    write_own(folder / CLIENT_FILE, json.dumps(report.model_dump(), indent=2) + "\n")
    return report


def read_client(folder: Path) -> ClientReport | None:
    """
    What was joined to a run; None if nothing was.

    :param folder: of the run's records
    :raises InputError: if it cannot be read
    """
    path = folder / CLIENT_FILE
    if not path.exists():
        return None
    content: Any = read_json(path, "a client's figures")
    try:
        return ClientReport.model_validate(content)
    except ValidationError as error:
        raise InputError(validation_message(path, error)) from error


# --- mcperf's rows ----------------------------------------------------------------------------


def _read_output(path: Path) -> tuple[mcperf.Output, list[str]]:
    """Mcperf's output, and what has to be said of it."""
    text = read_text(path, "mcperf's output", MOST_RECORD_BYTES, errors="replace")
    refused = list[int]()
    output = mcperf.read_output(text.splitlines(), refused.append)
    count = len(output.rows)
    if not count:
        raise InputError(f"{path}: no row of mcperf's; it prints them when it has ended")
    if count < LEAST_INTERVALS:
        raise InputError(f"{path}: {count} of mcperf's rows; {LEAST_INTERVALS} are needed at least")
    if output.runs > 1:
        raise InputError(f"{path}: holds {output.runs} runs of mcperf; give one in a file")
    cut = bool(refused) or output.announced not in (None, count)
    if not output.stamped and (cut or not output.whole):
        raise InputError(
            f"{path}: cut off: without its end, {count} rows that have no times of their own do "
            "not say when they were"
        )
    if not cut:
        return output, []
    of = f" of {output.announced}" if output.announced else ""
    at = f", line {refused[0]} is no complete row" if refused else ""
    return output, [f"{path.name} is cut off: it holds {count}{of} rows{at}"]


def _candidates(output: mcperf.Output, path: Path, started_s: float) -> list[list[mcperf.Row]]:
    """The rows by the run's clock, for each length that their intervals may have."""
    count, runs_s = len(output.rows), output.end_s - output.start_s
    if output.stamped:
        tables = [output.rows]
    elif math.isnan(runs_s):
        raise InputError(f"{path}: no time stamps; mcperf prints them with -T of 2 or more")
    elif runs_s <= 0.0:
        raise InputError(f"{path}: by its time stamps it ended before it began")
    else:
        tables = [output.spread(length_s, output.start_s) for length_s in _lengths_s(runs_s, count)]
    times_s = np.array([(row.start_s, row.end_s) for row in tables[0]]).ravel()
    if np.diff(times_s).min() < -FINEST_S:
        raise InputError(f"{path}: its rows are not in the order of time: are they of one run?")
    return [
        [
            replace(row, start_s=row.start_s - started_s, end_s=row.end_s - started_s)
            for row in table
        ]
        for table in tables
    ]


def _lengths_s(run_s: float, count: int) -> list[float]:
    """
    How long a run's intervals may be, the likeliest first: mostly quarters of a second.

    They are shorter than the run over their number where the stamps hold its beginning and its end,
    and longer where it ended within the last one: 1000 s are 112 intervals of 9 s.
    """
    shortest, longest = (run_s - DRAIN_S) / count, run_s / (count - 1)
    logged_s = run_s / count
    near = round(4.0 * logged_s)
    least = max(1, math.ceil(4.0 * shortest), near - MOST_LENGTHS)
    quarters = range(least, min(math.ceil(4.0 * longest), near + MOST_LENGTHS))
    return [*sorted((i / 4.0 for i in quarters), key=lambda one: abs(one - logged_s)), logged_s]


def _require_near(rows: Sequence[mcperf.Row], counted: Counted, path: Path) -> None:
    """Refuse a client that was silent, as its clock has it, while the run went on."""
    early_s, late_s = counted.start_s[0] - rows[-1].end_s, rows[0].start_s - counted.end_s[-1]
    if max(early_s, late_s) >= MOST_SHIFT_S:
        where = f"end {early_s:.0f} s before" if early_s > 0.0 else f"start {late_s:.0f} s after"
        raise InputError(
            f"{path}: its intervals {where} the run: it is of another run, or the clocks differ "
            f"by more than {MOST_SHIFT_S:g} s and must be made to agree"
        )


# --- both sides of an interval ----------------------------------------------------------------


def _windows(folder: Path) -> list[mcperf.Row]:
    """What the probe has measured, by the run's clock; empty if there was none."""
    path = folder / PROBE_FILE
    if not path.exists():
        return []
    text = read_text(path, "a probe's windows", MOST_RECORD_BYTES, errors="replace")
    started_s = started_at_s(folder)
    return [
        replace(row, start_s=row.start_s - started_s, end_s=row.end_s - started_s)
        for row in mcperf.read_rows(text.splitlines())
        if row.p95_us > 0.0  # else nothing was measured in it
    ]


def _intervals(
    rows: Sequence[mcperf.Row], samples: Sequence[Sample], windows: Sequence[mcperf.Row]
) -> list[ClientInterval]:
    """
    The rows that lie in the run, at least in part.

    An interval begins between two samples. What was counted between them is dealt out by what
    mcperf says it got in both intervals, and evenly for the requests of others.
    """
    time_s = np.array([sample.time_s for sample in samples])
    requests = np.maximum.accumulate([sample.requests for sample in samples])
    times_s, served = served_by(rows)

    def expected(at_s: Array) -> Array:
        return np.interp(at_s, times_s, served) + OTHERS_QPS * at_s

    found = []
    for row in rows:
        limits_s = np.clip((row.start_s, row.end_s), time_s[0], time_s[-1])
        watched_s = float(limits_s[1] - limits_s[0])
        if watched_s <= 0.0:
            continue
        counted_qps = probe_p95_us = None
        if watched_s >= 0.5 * (row.end_s - row.start_s):
            first, last = np.interp(expected(limits_s), expected(time_s), requests)
            counted_qps = float(last - first) / watched_s
            probe_p95_us = merged_p95_us(windows, float(limits_s[0]), float(limits_s[1]))
        found.append(
            ClientInterval(
                start_s=row.start_s,
                end_s=row.end_s,
                target_qps=None if math.isnan(row.target_qps) else row.target_qps,
                said_qps=row.qps,
                counted_qps=counted_qps,
                client_p95_us=row.p95_us,
                probe_p95_us=probe_p95_us,
            )
        )
    return found


def merged_p95_us(windows: Sequence[mcperf.Row], start_s: float, end_s: float) -> float | None:
    """
    95th percentile of all requests of a stretch of time, from their windows' percentiles [µs].

    Each window counts by how much of it lies in the stretch, as the probe's requests come at a
    constant rate; between two of its percentiles its tail falls by a power law. None if windows
    cover less than half of the stretch.

    :param windows: in order of time
    :param start_s: of the stretch, on the windows' clock [s]
    :param end_s: of the stretch [s]
    """
    shares_s = [min(one.end_s, end_s) - max(one.start_s, start_s) for one in windows]
    inside = [(one, share_s) for one, share_s in zip(windows, shares_s, strict=True) if share_s > 0]
    covered_s = sum(share_s for _, share_s in inside)
    if covered_s < 0.5 * (end_s - start_s) or not covered_s > 0.0:
        return None
    marks = [
        np.log(np.maximum([late_us for _, late_us in one.quantiles], 1e-3)) for one, _ in inside
    ]
    known = np.concatenate(marks)
    at = np.unique(np.concatenate([known, known - 1e-6]))  # many requests may be equally late
    above = np.zeros(len(at))
    for (one, share_s), mark in zip(inside, marks, strict=True):
        falls = -np.log1p(-np.array([rank for rank, _ in one.quantiles]))
        above += share_s / covered_s * np.exp(-np.interp(at, mark, falls, right=math.inf))
    return float(np.exp(np.interp(-math.log(0.05), -np.log(np.maximum(above, 1e-9)), at)))


def _findings(
    intervals: Sequence[ClientInterval], jobs_s: tuple[float, float], slo_us: float
) -> list[str]:
    """Who measured what, and where they differ."""
    ran = [one for one in intervals if one.end_s > jobs_s[0] and one.start_s < jobs_s[1]]
    over = sum(one.client_p95_us > slo_us for one in ran)
    found = [f"by mcperf {over} of {len(ran)} intervals with jobs have p95 above {slo_us:g} µs"]
    both = [one for one in ran if one.probe_p95_us is not None]
    if both:
        probed = [one.probe_p95_us or 0.0 for one in both]
        pairs = list(zip(both, probed, strict=True))
        ratio = np.median([one.client_p95_us / max(p95, 1e-9) for one, p95 in pairs])
        apart = [one for one, p95 in pairs if (one.client_p95_us > slo_us) != (p95 > slo_us)]
        found += [
            f"by the probe {sum(p95 > slo_us for p95 in probed)} of {len(both)}; mcperf's p95 is "
            f"{ratio:.2f} times the probe's in the median",
            f"they disagree about {_listed(apart)}" if apart else "they agree about each of them",
        ]
    else:
        found.append("the probe did not watch (deploy.py --probe): mcperf's p95 stands alone")
    late = [
        one
        for one in intervals
        if one.counted_qps is not None and one.counted_qps < LAGGING * one.said_qps
    ]
    if late:
        least = min((one.counted_qps or 0.0) / one.said_qps for one in late)
        found.append(
            f"the client lagged: memcached counted less than {100 * LAGGING:.0f} % of what mcperf "
            f"says it got, down to {100 * least:.0f} %, in {_listed(late)}"
        )
    return found


def _listed(intervals: Sequence[ClientInterval]) -> str:
    """How many intervals, and where the first of them begin."""
    starts = ", ".join(f"{one.start_s:.0f}" for one in intervals[:NAMED])
    more = " and later" if len(intervals) > NAMED else ""
    return f"{len(intervals)} of them (from {starts} s{more})"
