"""Measured runs as the simulator wants them: the tables read, checked and cut into traces.

The tables are those of a folder with ``runs``, ``intervals`` and ``events`` (``.csv`` or
``.csv.gz``). Whatever is left out is left out by a named rule and kept as a :class:`Remark`, with
file, run and row. Faults of a whole table (missing file or column, no rows) raise ``InputError``;
faults of a run skip that run; faults of a row drop that row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from env.errors import InputError

FloatArray = npt.NDArray[np.float64]

VCPUS = 4
# Latencies are in microseconds. Below this a p95 over a network is not believable: it is in ms.
LOWEST_P95_US = 20.0
# A predecessor's end may be logged this long after the start that it triggered.
LOG_JITTER_S = 1.0

COLUMNS: dict[str, tuple[str, ...]] = {
    "runs": ("run", "repo"),
    "intervals": ("run", "i", "t_start_s", "t_end_s", "target_qps", "p95_us"),
    "events": ("run", "t_s", "event", "job", "cores", "threads"),
    "job_scaling": (
        *("repo", "year", "machine", "job", "threads", "real_s", "user_s", "sys_s"),
        "path",
    ),
    "latency_curves": (
        *("repo", "path", "threads", "cores", "rep", "target_qps", "achieved_qps", "p95_us"),
        *("year", "cpu_util_pct"),
    ),
}
NOT_JOBS = ("memcached", "scheduler")


@dataclass(frozen=True)
class Trap:
    """What is known to be wrong in one group's logs.

    :param reason: shown and stored.
    :param service_cores: memcached's true core set where the logged one is not, else ``None``.
    :param moves_logged: whether memcached's cores, logged or corrected, are sure enough to judge
        latency by.
    :param yields: jobs left memcached's vCPUs although their logged sets hold them.
    :param background: batch jobs ran at background weight (cpu_shares 2 against 1024).
    """

    reason: str
    service_cores: int | None = None
    moves_logged: bool = True
    yields: bool = False
    background: bool = False


# On the corrected cores ImaGoodFella's latency has been looked at and fits; the others' has not.
_MAIN_THREAD = "only memcached's main thread was moved: its workers stayed on vCPUs 0-1"

# Soufiane-Barrada's report gives dedup, radix and vips one core each, its events the group's whole
# set. The events are right: with them its jobs are predicted to 4-8 %, with the report's widths
# dedup, radix and vips come out 40-90 % too long.
TRAPS: dict[str, Trap] = {
    "ImaGoodFella/cca_project": Trap(_MAIN_THREAD, 0b0011),
    "KockaAdmiralac/CCA": Trap(_MAIN_THREAD, 0b0011, False),
    "lorenzo-asquini/Cloud-Computing-Architecture-Project": Trap(_MAIN_THREAD, 0b0011, False),
    "FFGGSSJJ/cloud-comp-arch": Trap(_MAIN_THREAD, 0b0011, False),
    "dennisjueni/cca-2024": Trap(
        "latency on one logged vCPU is a third of what its own scan shows: memcached did not move",
        moves_logged=False,
    ),
    "frikai/cca-2024-part4": Trap("batch jobs ran at cpu_shares 2", background=True),
    "florianhitz/cca-group-090": Trap(
        "a CFS quota of 200-350 % went with the logged cpusets: memcached's latency is that of a "
        "vCPU of its own, so jobs are taken off its vCPUs",
        yields=True,
    ),
}
# Bruol's part 4.3 and 4.4 runs log memcached on 0;1 throughout although it was moved. Its rule,
# seen in the runs that do log moves: memcached leaves vCPU 1 while a job runs there.
UNLOGGED_MOVES = ("Bruol_part4-part4-3", "Bruol_part4-part4-4")


@dataclass(frozen=True)
class Remark:
    """One thing that was skipped, dropped or corrected, and why."""

    file: str
    run: str
    row: int
    what: str

    def __str__(self) -> str:
        row = f", row {self.row}" if self.row >= 0 else ""
        run = f", run {self.run}" if self.run else ""
        return f"{self.file}{run}{row}: {self.what}"


@dataclass(frozen=True)
class JobTrace:
    """One job of one run, as logged.

    :param moves: (time [s], core mask), the first at the start.
    :param pauses: (from [s], to [s]).
    :param quota: mean CPU quota [vCPUs] where the log gives one, else infinite.
    """

    name: str
    start_s: float
    end_s: float
    threads: int
    moves: tuple[tuple[float, int], ...]
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
    service_moves: tuple[tuple[float, int], ...]
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

    def predecessor(self, job: JobTrace) -> JobTrace | None:
        """The job whose logged end came last before this one's start, if any."""
        before = [
            other
            for other in self.jobs
            if other is not job
            and other.end_s <= job.start_s + LOG_JITTER_S
            and other.start_s < job.start_s
        ]
        return max(before, key=lambda other: other.end_s, default=None)


@dataclass(frozen=True)
class Tables:
    """What a folder of measured runs holds that can be used, and what was left out."""

    runs: tuple[RunTrace, ...]
    remarks: tuple[Remark, ...]

    def summary(self) -> list[str]:
        """The remarks, one line per kind and file with its number, up to three runs with rows."""
        return summarise(self.remarks, rows=True)


def summarise(remarks: Iterable[Remark], rows: bool = False) -> list[str]:
    """One line per file and kind of remark, with how often and for which runs.

    :param remarks: in any order.
    :param rows: name the first row of each run, too. The shipped profiles, whose hash covers what
        was left out, are without.
    """
    kinds: dict[tuple[str, str], list[Remark]] = {}
    for remark in remarks:
        kinds.setdefault((remark.file, remark.what), []).append(remark)
    lines = []
    for (file, what), members in kinds.items():
        if len(members) == 1:
            lines.append(str(members[0]))
            continue
        runs: dict[str, int] = {}
        for member in members:
            if member.run:
                runs.setdefault(member.run, member.row)
        named = [f"{run} row {row}" if rows and row >= 0 else run for run, row in runs.items()]
        shown = ", ".join(named[:3]) + (", ..." if len(runs) > 3 else "")
        lines.append(f"{file}: {what}: {len(members)} times in {len(runs)} runs ({shown})")
    return lines


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """Read one table of a folder and check that it is there, has its columns and has rows.

    :raises InputError: one line that names the file and what is wrong.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    for suffix in (".csv.gz", ".csv"):
        path = folder / f"{name}{suffix}"
        if path.is_file():
            break
    else:
        raise InputError(f"{folder}: no table {name}.csv or {name}.csv.gz")
    try:
        table = pd.read_csv(path, low_memory=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    missing = [column for column in COLUMNS.get(name, ()) if column not in table.columns]
    if missing:
        raise InputError(f"{path}: missing columns: {', '.join(missing)}")
    if table.empty:
        raise InputError(f"{path}: has no rows")
    return table


def read_runs(
    folder: Path, jobs: Sequence[str], years: Sequence[int] = (), server: str = ""
) -> Tables:
    """Read the runs of a folder.

    :param folder: where ``runs``, ``intervals`` and ``events`` are.
    :param jobs: jobs the profile knows; runs with others are skipped.
    :param years: keep only these years, where the table gives dates (all if empty).
    :param server: keep only this machine type, where the table gives it (all if empty).
    :raises InputError: a table is missing, empty or without a column it needs.
    """
    runs = read_table(folder, "runs")
    intervals = read_table(folder, "intervals")
    events = read_table(folder, "events")
    remarks: list[Remark] = []
    intervals = numeric(intervals, "intervals", COLUMNS["intervals"][1:], remarks)
    events = numeric(events, "events", ("t_s",), remarks)
    events = events.assign(threads=pd.to_numeric(events["threads"], errors="coerce"))
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
    return Tables(tuple(traces), tuple(remarks))


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
    trap = TRAPS.get(group, Trap(""))
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
    if run.startswith(UNLOGGED_MOVES):
        moves = _yielding_moves(jobs)
        remarks.append(Remark("events", run, -1, "memcached: moves not logged: inferred from jobs"))
    else:
        moves = _service_moves(run, events[events["job"] == "memcached"], trap, remarks)
    logged = bool(moves)
    if not moves:
        moves = ((-np.inf, 0b0011),)
        remarks.append(Remark("events", run, -1, "memcached: cores not logged: taken as 0-1"))
    if trap.yields:
        jobs = [replace(job, moves=_without(job.moves, moves)) for job in jobs]
    threads = pd.to_numeric(
        events.loc[events["job"] == "memcached", "threads"], errors="coerce"
    ).dropna()
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
        moves_logged=logged and trap.moves_logged and not run.startswith(UNLOGGED_MOVES),
        background=trap.background,
    )


def whole_intervals(rows: pd.DataFrame) -> pd.DataFrame:
    """One run's intervals with the length that mcperf was asked for.

    The log gives the length as the run's divided by the number of intervals, which is too short
    where the run ends within its last one: 1000 s are 112 intervals of 9 s, not of 8.93 s. Left as
    it is, the load would seem to change earlier and earlier, 6 s too early after 90 intervals.

    :param rows: the run's intervals, from the first one on. Lengths are quarters of a second.
    """
    logged = float((rows["t_end_s"] - rows["t_start_s"]).median())
    asked = np.ceil(4.0 * logged) / 4.0
    if not asked * (1.0 - 1.0 / len(rows)) < logged < asked:
        return rows
    times = ["t_start_s", "t_end_s"]
    return rows.assign(**(rows[times] * asked / logged))


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
    """One job's events as a trace, or ``None`` where the job cannot be used."""

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
    percent = rows["note"].astype(str).str.extract(r"^Job quota percentage ([\d.]+)$")[0]
    known = percent.notna()
    if not known.any():
        return float(np.inf)
    times = np.clip(rows.loc[known, "t_s"].to_numpy(np.float64), start, end)
    lengths = np.diff(np.append(times, end))
    quotas = percent[known].to_numpy(np.float64) / 100.0
    return float(np.average(quotas, weights=np.maximum(lengths, 1e-6)))


def _service_moves(
    run: str, rows: pd.DataFrame, trap: Trap, remarks: list[Remark]
) -> tuple[tuple[float, int], ...]:
    if trap.service_cores is not None:
        remarks.append(Remark("events", run, -1, f"memcached: cores corrected: {trap.reason}"))
        return ((-np.inf, trap.service_cores),)
    elif trap.reason:
        remarks.append(Remark("events", run, -1, f"trap: {trap.reason}"))
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
        elif not moves or mask != moves[-1][1]:
            # Before its first logged move memcached was where that move found it.
            moves.append((time if moves else -np.inf, mask))
    return tuple(moves)


def _yielding_moves(jobs: Sequence[JobTrace]) -> tuple[tuple[float, int], ...]:
    """Memcached's moves if it holds vCPUs 0-1 but leaves vCPU 1 to any job that runs there."""
    times = {t for job in jobs for t in (job.start_s, job.end_s, *(m for m, _ in job.moves))}
    times |= {t for job in jobs for pause in job.pauses for t in pause}
    moves = [(-np.inf, 0b0011)]
    for time in sorted(times):
        taken = any(
            job.start_s <= time < job.end_s
            and (mask_at(job.moves, time) & 0b0010)
            and not any(a <= time < b for a, b in job.pauses)
            for job in jobs
        )
        mask = 0b0001 if taken else 0b0011
        if mask != moves[-1][1]:
            moves.append((time, mask))
    return tuple(moves)


def _without(
    moves: Sequence[tuple[float, int]], service: Sequence[tuple[float, int]]
) -> tuple[tuple[float, int], ...]:
    """A job's moves without the vCPUs that memcached holds at the time."""
    times = sorted({t for t, _ in moves} | {t for t, _ in service if t > moves[0][0]})
    result: list[tuple[float, int]] = []
    for time in times:
        mask = mask_at(moves, time)
        mask = mask & ~mask_at(service, time) or mask
        if not result or mask != result[-1][1]:
            result.append((time, mask))
    return tuple(result)


def mask_at(moves: Sequence[tuple[float, int]], time: float) -> int:
    """The core set that holds at a time: the last move before it, the first one before all."""
    mask = moves[0][1]
    for moved, to in moves:
        if moved > time:
            break
        mask = to
    return mask


def core_mask(cores: object) -> int:
    """Bit mask of a core list such as ``"1;2;3"``; vCPUs the VM does not have are ignored."""
    mask = 0
    for part in str(cores).split(";"):
        try:
            core = int(float(part))
        except ValueError:
            continue
        if 0 <= core < VCPUS:
            mask |= 1 << core
    return mask


def _ghosts(text: object) -> list[int]:
    """Find what a core list names that a 4-vCPU VM does not have."""
    parts = [part for part in str(text).split(";") if part.replace(".", "", 1).isdigit()]
    return [core for core in (int(float(part)) for part in parts) if core >= VCPUS]


def numeric(
    table: pd.DataFrame,
    file: str,
    columns: Sequence[str],
    remarks: list[Remark],
    label: str = "run",
) -> pd.DataFrame:
    """Drop rows whose numbers are not finite numbers; see :func:`without`."""
    table = table.assign(
        **{column: pd.to_numeric(table[column], errors="coerce") for column in columns}
    )
    faults = [(~np.isfinite(table[name]), f"{name} is not a number") for name in columns]
    return without(table, file, faults, remarks, label)


def p95_faults(p95_us: pd.Series) -> tuple[tuple[pd.Series, str], ...]:
    """What a measured p95 cannot be, and which ones are."""
    return (
        (p95_us <= 0.0, "p95 is not positive"),
        (p95_us < LOWEST_P95_US, f"p95 under {LOWEST_P95_US:g} us: in ms?"),
    )


def without(
    table: pd.DataFrame,
    file: str,
    faults: Iterable[tuple[pd.Series, str]],
    remarks: list[Remark],
    label: str = "run",
) -> pd.DataFrame:
    """Drop faulty rows.

    :param table: what is checked.
    :param file: the table's name.
    :param faults: which rows have it, and what it is; a row is named for its first one.
    :param remarks: each row is added here.
    :param label: the column that says where a row is from.
    """
    good = pd.Series(True, index=table.index)
    for bad, what in faults:
        for index in table.index[bad & good]:
            run = str(table.at[index, label])
            remarks.append(Remark(file, run, int(index), f"dropped: {what}"))
        good &= ~bad
    return table[good]


def _year(row: dict[str, object]) -> int:
    """Year of a run's date, 0 where the table has none."""
    text = str(row.get("date", ""))[:4]
    return int(text) if text.isdigit() else 0


def _day(row: dict[str, object]) -> str:
    """Day of a run, empty without a date; a session that runs past midnight stays on its VM."""
    date = pd.to_datetime(str(row.get("date", "")), errors="coerce")
    return "" if pd.isna(date) else str((date - pd.Timedelta(hours=6)).date())


def count_by_group(runs: Iterable[RunTrace]) -> dict[str, int]:
    """Runs of each group."""
    return dict(Counter(run.group for run in runs))
