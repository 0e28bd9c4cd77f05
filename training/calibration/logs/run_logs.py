"""
Measured runs, read from the tables `runs`, `intervals` and `events` and cut into traces.

Faults of a run skip that run, faults of a row drop that row, each with a remark; what is known to
be wrong in a group's logs is corrected.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from env.allocation import mask_of
from training.calibration.logs.course import VCPUS
from training.calibration.logs.known_faults import GroupFault, known_faults
from training.calibration.logs.tables import (
    COLUMNS,
    Remark,
    numbers,
    numeric,
    p95_faults,
    read_table,
    summarise,
    without,
)
from training.calibration.logs.traces import (
    LOG_JITTER_S,
    JobTrace,
    Moves,
    RunTrace,
    mask_at,
    stretches,
)

NOT_JOBS = ("memcached", "scheduler")

COINCIDENCE = 0.2
"""How probable it may be that a length that was not asked for seems to be a round one."""

SETUP_S = 2.0
"""
How long a run may take before its first interval, at most.

Where p95 says when the load moved, it moved as much later than the log's start as the run took
longer than its intervals: by 0.3 s in 2025, 0.5 to 1.8 s in 2024.
"""


@dataclass(frozen=True)
class MeasuredRuns:
    """What a folder of measured runs holds that can be used, and what was left out."""

    runs: tuple[RunTrace, ...]
    remarks: tuple[Remark, ...]

    def summary(self) -> list[str]:
        """The remarks, one line per kind and file with its number, up to three runs with rows."""
        return summarise(self.remarks, rows=True)


def read_runs(
    folder: Path, jobs: Sequence[str], years: Sequence[int] = (), server: str = ""
) -> MeasuredRuns:
    """
    Read the runs of a folder.

    :param folder: folder of the tables `runs`, `intervals` and `events`
    :param jobs: jobs the profile knows; runs with others are skipped
    :param years: keep only these years, where the table gives dates (all if empty)
    :param server: keep only this machine type, where the table gives it (all if empty)
    :raises InputError: a table is missing, empty or without a column it needs
    """
    runs = read_table(folder, "runs")
    intervals = read_table(folder, "intervals")
    events = read_table(folder, "events")
    remarks: list[Remark] = []
    intervals = numeric(intervals, "intervals", COLUMNS["intervals"][1:], remarks)
    events = numeric(events, "events", ("t_s",), remarks)
    events = events.assign(threads=numbers(events["threads"]))
    by_run = {str(run): rows for run, rows in intervals.groupby("run", sort=False)}
    events_by_run = {str(run): rows for run, rows in events.groupby("run", sort=False)}
    traces = []
    seen: set[str] = set()
    for index, row in enumerate(runs.to_dict("records")):
        run = str(row["run"])
        year = _year(row)
        if years and year and year not in years:
            continue
        if server and isinstance(row.get("server"), str) and row["server"] != server:
            continue

        def skip(what: str, file: str = "runs", at: int = index, run: str = run) -> None:
            remarks.append(Remark(file, run, at, f"skipped: {what}"))

        valid = row.get("valid", "yes")
        if run in seen:
            skip("the run is listed twice")
        elif isinstance(valid, float) and np.isnan(valid):
            skip("no job log belongs to it")
        elif str(valid) != "yes":
            skip(f"marked not valid ({valid})")
        elif run not in by_run:
            skip("it has no intervals", "intervals", -1)
        elif run not in events_by_run:
            skip("it has no events", "events", -1)
        else:
            seen.add(run)
            try:
                traces.append(
                    _trace(row, year, by_run[run], events_by_run[run], set(jobs), remarks)
                )
            except _UnusableError as error:
                skip(str(error), error.file, error.row)
    return MeasuredRuns(tuple(traces), tuple(remarks))


class _UnusableError(ValueError):
    """A run that cannot be used: which table says so, in which row (-1: in many), and why."""

    def __init__(self, file: str, what: str, row: int = -1) -> None:
        super().__init__(what)
        self.file = file
        self.row = int(row)


def _trace(
    row: dict[str, object],
    year: int,
    intervals: pd.DataFrame,
    events: pd.DataFrame,
    known: set[str],
    remarks: list[Remark],
) -> RunTrace:
    run = str(row["run"])
    group = str(row["repo"])
    load = _intervals(intervals, remarks)
    events = events.sort_values("t_s", kind="stable")
    names = [name for name in events["job"].dropna().unique() if name not in NOT_JOBS]
    strangers = sorted(set(names) - known)
    if strangers:
        at = events.index[events["job"].isin(strangers)].min()
        raise _UnusableError("events", f"unknown jobs: {', '.join(strangers)}", at)
    fault = known_faults().of_group(group)
    ghosts = sorted({core for text in events["cores"].dropna().unique() for core in _ghosts(text)})
    if ghosts:
        at = events.index[[ghosts[0] in _ghosts(text) for text in events["cores"]]].min()
        raise _UnusableError("events", f"names vCPU {ghosts[0]}, which the VM does not have", at)
    jobs = []
    for name in names:
        job = _job(run, str(name), events[events["job"] == name], remarks)
        if job is not None:
            jobs.append(job)
    if not jobs:
        raise _UnusableError("events", "no job starts and ends")
    inferred = known_faults().infers_moves(run)
    if inferred:
        moves = _yielding_moves(jobs)
        remarks.append(Remark("events", run, -1, "memcached: moves not logged: inferred from jobs"))
    else:
        moves = _service_moves(run, events[events["job"] == "memcached"], fault, remarks)
    logged = bool(moves)
    if not moves:
        moves = ((-np.inf, 0b0011),)
        remarks.append(Remark("events", run, -1, "memcached: cores not logged: taken as 0-1"))
    if fault.yields:
        jobs = [replace(job, moves=_without(job.moves, moves)) for job in jobs]
    threads = events.loc[events["job"] == "memcached", "threads"].dropna()
    return RunTrace(
        run=run,
        group=group,
        year=year,
        day=_day(row),
        server=str(row.get("server", "")),
        interval_start_s=load["t_start_s"].to_numpy(np.float64),
        interval_end_s=load["t_end_s"].to_numpy(np.float64),
        qps=load["target_qps"].to_numpy(np.float64),
        p95_us=load["p95_us"].to_numpy(np.float64),
        service_threads=int(threads.iloc[0]) if len(threads) else 2,
        service_moves=moves,
        jobs=tuple(sorted(jobs, key=lambda job: (job.start_s, job.name))),
        moves_logged=logged and fault.moves_logged and not inferred,
        background=fault.background,
    )


def whole_intervals(rows: pd.DataFrame) -> pd.DataFrame:
    """
    One run's intervals with the length that mcperf was asked for, when its load really moved.

    The log gives the length as the run's divided by the number of intervals. A run takes longer
    than its intervals, as mcperf connects before the first one, so each seems a few milliseconds
    too long; a run that ends within its last interval makes each seem too short: 1000 s are 112
    intervals of 9 s, not of 8.93 s. Left as it is, the load would seem to change ever later, or 6 s
    too early after 90 intervals. A whole second or a quarter is restored only where the number of
    intervals leaves so little room that it is there by no coincidence. Any other length, such as
    8.65 s, is what was asked for.

    :param rows: the run's intervals, from the first one on
    """
    logged = float((rows["t_end_s"] - rows["t_start_s"]).median())
    run_s = logged * len(rows)
    for step in (1.0, 0.25):
        below, above = np.floor(logged / step) * step, np.ceil(logged / step) * step
        room = logged / max(len(rows) - 1, 1)
        if 0.0 < above - logged < room <= COINCIDENCE * step:
            asked, setup_s = above, run_s % 1.0  # whole seconds were asked for
        elif below > 0.0 and SETUP_S / len(rows) <= COINCIDENCE * step:
            asked, setup_s = below, run_s - below * len(rows)
        else:
            continue
        if setup_s <= SETUP_S:
            times = ["t_start_s", "t_end_s"]
            return rows.assign(**(rows[times] * asked / logged + setup_s))
    return rows


def _intervals(rows: pd.DataFrame, remarks: list[Remark]) -> pd.DataFrame:
    rows = whole_intervals(rows.sort_values("t_start_s", kind="stable"))
    length = rows["t_end_s"] - rows["t_start_s"]
    faults = (
        (length <= 0.0, "the interval ends before it starts"),
        (rows["target_qps"] < 0.0, "negative QPS"),
        *p95_faults(rows["p95_us"]),
    )
    count = len(rows)
    rows = without(rows, "intervals", faults, remarks)
    if len(rows) < max(0.5 * count, 1.0):
        raise _UnusableError("intervals", "more than half of its intervals are unusable")
    overlap = rows["t_start_s"].to_numpy()[1:] < rows["t_end_s"].to_numpy()[:-1] - LOG_JITTER_S
    if overlap.any():
        first = rows.index[1:][overlap].min()
        raise _UnusableError("intervals", f"{int(overlap.sum())} intervals overlap", first)
    return rows


def _job(run: str, name: str, rows: pd.DataFrame, remarks: list[Remark]) -> JobTrace | None:
    """One job's events as a trace, or `None` where the job cannot be used."""

    def remark(index: object, what: str) -> None:
        remarks.append(Remark("events", run, int(str(index)), f"{name}: {what}"))

    start = end = early_end = None
    threads = 0
    moves: list[tuple[float, int]] = []
    pauses: list[tuple[float, float]] = []
    paused: float | None = None
    for index, time, event, cores, given in zip(
        rows.index, rows["t_s"], rows["event"], rows["cores"], rows["threads"], strict=True
    ):
        if event == "custom":
            continue
        if event == "start":
            if start is not None:
                raise _UnusableError("events", f"{name} starts twice", index)
            mask = core_mask(cores)
            if mask == 0:
                raise _UnusableError("events", f"{name} starts on no known core", index)
            start = time
            threads = int(given) if given == given and given >= 1 else 0
            moves.append((time, mask))
        elif start is None or end is not None:
            if event == "end" and start is None:
                early_end = index
            if event != "update_cores":
                remark(index, f"dropped: {event} while it does not run")
        elif event == "end":
            end = time
        elif event == "pause":
            if paused is None:
                paused = time
        elif event == "unpause":
            if paused is not None:
                pauses.append((paused, time))
                paused = None
        elif event == "update_cores":
            mask = core_mask(cores)
            if mask == 0:
                remark(index, f"dropped: move to unknown cores {cores!r}")
            elif mask != moves[-1][1]:
                moves.append((time, mask))
        else:
            remark(index, f"dropped: unknown event {event!r}")
    if start is not None and end is None and early_end is not None:
        raise _UnusableError("events", f"{name} ends before it starts", early_end)
    if start is None or end is None:
        remark(rows.index[0], "left out: it does not start and end")
        return None
    if paused is not None:
        pauses.append((paused, end))
    if end <= start:
        raise _UnusableError("events", f"{name} ends before it starts", rows.index[0])
    if threads == 0:
        remark(rows.index[0], "thread count not logged: taken as its core count")
        threads = moves[0][1].bit_count()
    quota = _mean_quota(rows, start, end)
    job = JobTrace(name, start, end, threads, tuple(moves), tuple(pauses), quota)
    if job.run_s <= 0.0:
        raise _UnusableError("events", f"{name} is paused for longer than it runs", rows.index[0])
    return job


def _mean_quota(rows: pd.DataFrame, start: float, end: float) -> float:
    """Mean over a job's life of the CPU quota that its notes give, infinite without notes."""
    if "note" not in rows.columns:
        return float(np.inf)
    noted = rows["note"].astype(str).str.extract(r"^Job quota percentage ([\d.]+)$")[0]
    percent = numbers(noted)
    known = percent.notna()
    if not known.any():
        return float(np.inf)
    times = np.clip(rows.loc[known, "t_s"].to_numpy(np.float64), start, end)
    lengths = np.diff(np.append(times, end))
    quotas = percent[known].to_numpy(np.float64) / 100.0
    return float(np.average(quotas, weights=np.maximum(lengths, 1e-6)))


def _service_moves(run: str, rows: pd.DataFrame, fault: GroupFault, remarks: list[Remark]) -> Moves:
    if fault.service_cores is not None:
        remarks.append(Remark("events", run, -1, f"memcached: cores corrected: {fault.reason}"))
        return ((-np.inf, mask_of(fault.service_cores)),)
    if fault.reason:
        remarks.append(Remark("events", run, -1, f"trap: {fault.reason}"))
    moves: list[tuple[float, int]] = []
    for index, time, event, cores in zip(
        rows.index, rows["t_s"], rows["event"], rows["cores"], strict=True
    ):
        if event not in ("start", "update_cores"):
            continue
        mask = core_mask(cores)
        if mask == 0:
            remarks.append(
                Remark("events", run, int(index), f"memcached: dropped: cores {cores!r} unknown")
            )
        elif not moves:
            # The first row is the controller's first act: until then nothing restricts memcached.
            moves += [(-np.inf, mask | 0b0011), (time, mask)]
        elif mask != moves[-1][1]:
            moves.append((time, mask))
    return tuple(moves)


def _yielding_moves(jobs: Sequence[JobTrace]) -> Moves:
    """Memcached's moves if it holds vCPUs 0-1 but leaves vCPU 1 to any job that runs there."""
    moves: list[tuple[float, int]] = []
    for piece in stretches(((-np.inf, 0b0011),), jobs):
        taken = any(running.cores & 0b0010 for running in piece.jobs)
        mask = 0b0001 if taken else 0b0011
        if not moves or mask != moves[-1][1]:
            moves.append((piece.begin_s, mask))
    return tuple(moves)


def _without(moves: Moves, service: Moves) -> Moves:
    """A job's moves without the vCPUs that memcached holds at the time."""
    times = sorted({t for t, _ in moves} | {t for t, _ in service if t > moves[0][0]})
    result: list[tuple[float, int]] = []
    for time in times:
        mask = mask_at(moves, time)
        mask = mask & ~mask_at(service, time) or mask
        if not result or mask != result[-1][1]:
            result.append((time, mask))
    return tuple(result)


def core_mask(cores: object) -> int:
    """
    Bit mask of a core list such as `"1;2;3"`; vCPUs the VM does not have are ignored.

    :param cores: what the table has
    """
    return mask_of(tuple(core for core in _listed(cores) if 0 <= core < VCPUS))


def _ghosts(cores: object) -> list[int]:
    """Find what a core list names that a 4-vCPU VM does not have."""
    return [core for core in _listed(cores) if core >= VCPUS]


def _listed(cores: object) -> list[int]:
    found = []
    for part in str(cores).split(";"):
        with contextlib.suppress(ValueError, OverflowError):  # no number, or an endless one
            found.append(int(float(part)))
    return found


def _year(row: dict[str, object]) -> int:
    """Year of a run's date, 0 where the table has none."""
    text = str(row.get("date", ""))[:4]
    return int(text) if text.isdecimal() else 0


def _day(row: dict[str, object]) -> str:
    """Day of a run, empty without a date; a session that runs past midnight stays on its VM."""
    date = pd.to_datetime(str(row.get("date", "")), errors="coerce")
    if pd.isna(date):
        return ""
    date -= pd.Timedelta(hours=6)
    return f"{date.year:04}-{date.month:02}-{date.day:02}"  # Python has no dates before year 1


def count_by_group(runs: Iterable[RunTrace]) -> dict[str, int]:
    """
    Runs of each group.

    :param runs: runs of any groups
    """
    return dict(Counter(run.group for run in runs))
