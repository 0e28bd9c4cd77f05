"""
What a run has come to: `report.json`, `intervals.csv`, pictures and one HTML page that holds all.

    python -m deploy.report report

writes the page, the pictures and what was predicted anew from the files of a finished run; with
`--mcperf FILE` it first lays the output of the course's client over the run
(`deploy.records.client_join`). Pictures and predictions need what training needs; processes of
their own make them (`training.evaluation.live_pictures`, `deploy.records.predicted`), and the page
does without them where that is not installed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import importlib.util
import io
import json
import math
import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from deploy.linux.helpers import helper_command
from deploy.linux.own_folder import OwnFolder, write_own
from deploy.records import mcperf
from deploy.records.client_join import join, read_client
from deploy.records.predicted import in_short, lines_of, predict, read_prediction, rows_of
from deploy.records.recorder import (
    INTERVALS_FILE,
    LOAD_FILE,
    MEMCACHED,
    PAGE_FILE,
    PICTURE_FILE,
    REPORT_FILE,
    Event,
    Sample,
    each_sample,
    guard_levels,
    read_events,
    scenario_of,
    started_at_s,
)
from deploy.records.stages import typical
from deploy.records.terminal import complain, say
from env.errors import InputError, escaped, exit_on_bad_input, fault, validation_message
from env.inputs.commandline import OneLineParser
from env.inputs.text_files import MOST_RECORD_BYTES, read_json, read_text
from env.scenario import Scenario

TEMPLATES = Path(__file__).with_name("templates")
DRAW_LIMIT_S = 120.0
INTERVAL_COLUMNS = ("start_s", "end_s", "target_qps", "qps", "p95_us", "client_late", "stolen")
"""Of the table of intervals: fields of `mcperf.Row`."""

ROW_DELAY_S = 1.0
"""How long after an interval's end the load prints its row, at most."""

LONGEST_WAIT_S = 300.0
"""How long a report waits for such a row: intervals last seconds, but a file says what it likes."""


@dataclass(frozen=True)
class JobOutcome:
    """
    How a job ended.

    :param exit_code: of the job; None if it never ended
    :param decided_s: when the first attempt's start was decided, since the run's start [s]; None
        if none started
    :param start_s: when that attempt's gate was opened, as the other times; None if none was
    :param begun_s: when the job had passed the gate; None if that was not seen
    :param end_s: when the job was done or given up, since the run's start [s]; None if neither
    :param paused_s: how long it was paused, a pause that the run's end has ended included [s]
    :param retries: attempts after the first
    """

    exit_code: int | None
    decided_s: float | None
    start_s: float | None
    begun_s: float | None
    end_s: float | None
    paused_s: float
    retries: int


@dataclass(frozen=True)
class LoopCost:
    """
    What the loop itself cost: its process alone, without guardian and probe.

    After a resume, the cost is that of the process that went on; earlier ones are not counted.

    :param period_ms: polling period [ms]
    :param overruns: polls that came late
    :param cpu_pct: CPU use of the process while it decided [% of one vCPU]; its start, the making
        of the jobs' containers and the putting right are not in it
    :param rss_mib: the most memory that was resident [MiB]
    """

    period_ms: float
    overruns: int
    cpu_pct: float
    rss_mib: float


@dataclass(frozen=True)
class Outcome:
    """
    A run's figures, but for latency.

    Times and jobs are the whole run's. Changes and overruled decisions are counted from the last
    resume on, as is the loop's cost: a loop that was killed takes its counts with it.

    :param policy: who decided
    :param lasted_s: when the run ended, since its start [s]
    :param jobs: how each job ended
    :param actuations: changes made, since the last resume
    :param overruled: decisions that the regulator changed, since the last resume
    :param loop: what the loop cost
    :param restored: whether the machine is as it was found
    :param queue: whether a queue was served: its jobs have outcomes of their own, and all of the
        run counts
    """

    policy: str
    lasted_s: float
    jobs: Mapping[str, JobOutcome]
    actuations: int
    overruled: int
    loop: LoopCost
    restored: bool
    queue: bool = False

    @property
    def finished(self) -> bool:
        """Whether every job is done or given up; a queue never is."""
        return not self.queue and all(job.end_s is not None for job in self.jobs.values())

    @property
    def window_s(self) -> tuple[float, float]:
        """
        From the first job's start to the last job's end, since the run's start.

        A job that never ended counts to the run's end. Empty where none has started.
        """
        if self.queue:
            return 0.0, self.lasted_s
        starts = [job.start_s for job in self.jobs.values() if job.start_s is not None]
        ends = [self.lasted_s if job.end_s is None else job.end_s for job in self.jobs.values()]
        return (min(starts), max(ends)) if starts else (0.0, 0.0)


class _ReportPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _AllOrNone(_ReportPart):
    @model_validator(mode="after")
    def _all_or_none(self) -> _AllOrNone:
        names = type(self).model_fields
        if len({getattr(self, name) is None for name in names}) > 1:
            raise ValueError(f"{' and '.join(names)} are all numbers, or all null")
        return self


class Percentiles(_AllOrNone):
    """Of the times in which memcached got vCPUs [ms]; None where there were none."""

    p50: float | None
    p99: float | None


class StartDelays(_AllOrNone):
    """From the decisions to start a job to the job's own work [ms]; None where none was seen."""

    p50: float | None
    max: float | None


class Guarding(_ReportPart):
    """What the SLO guard did: levels that it climbed, and the share of the run at one above 0."""

    steps: int
    share_of_time: float


class Predicted(_ReportPart):
    """What the scenario's profile makes of the same load, the policy free to decide."""

    makespan_s: float | None
    violation_ratio: float | None
    changes_per_min: float | None
    jobs: dict[str, float | None]


class StagesShown(_ReportPart):
    """See `env.telemetry.Stages`; the median over the run."""

    wait_us: float
    service_us: float


class Report(_ReportPart):
    """The form of `report.json`; `content` fills it."""

    policy: str
    makespan_s: float | None
    jobs: dict[str, JobOutcome]
    violation_ratio: float | None
    p95_us: list[float]
    spoiled: list[bool]
    actuations: int
    overruled: int
    guard: Guarding
    predicted: Predicted | None = None
    reaction_ms: Percentiles
    start_delay_ms: StartDelays
    stages: dict[str, StagesShown] = {}
    loop: LoopCost
    restored: bool


def reactions_ms(events: Sequence[Event], intervals: Sequence[mcperf.Row]) -> list[float]:
    """
    From each rise of the load that memcached was given vCPUs for, to the moment it had them.

    The load rises where an interval starts that asks for more than the one before. Rows without a
    target, which the run wrote itself, do not say when that was: they give no times.

    :param events: the run's events, oldest first
    :param intervals: the load, `start_s` and `end_s` counted from the run's start
    """
    moves = [event for event in events if event.job == MEMCACHED and event.cores]
    grown_s = [
        after.time_s for before, after in pairwise(moves) if len(after.cores) > len(before.cores)
    ]
    found = []
    for before, after in pairwise(intervals):
        if after.target_qps > before.target_qps:
            late_s = [time_s for time_s in grown_s if after.start_s <= time_s < after.end_s]
            found += [1e3 * (time_s - after.start_s) for time_s in late_s[:1]]
    return found


def load_intervals(folder: Path, until_s: float = 0.0) -> list[mcperf.Row]:
    """
    What the load beside a run has measured, `start_s` and `end_s` counted from the run's start.

    :param folder: of the run's records
    :param until_s: the interval of this moment [s] is waited for, but not much longer than it
        lasts, and never longer than `LONGEST_WAIT_S`; rows without a target are the run's own, and
        complete
    :raises InputError: if the load's output cannot be read, or the log does not say when the run
        started
    """
    rows, refused = _load_rows(folder)
    length_s = rows[-1].end_s - rows[-1].start_s if rows else 0.0
    give_up_s = time.monotonic() + min(length_s, LONGEST_WAIT_S) + ROW_DELAY_S
    foreign = bool(rows) and not math.isnan(rows[-1].target_qps)
    while foreign and rows[-1].end_s < until_s and time.monotonic() < give_up_s:
        time.sleep(0.05)
        rows, refused = _load_rows(folder)
    if refused:
        said = f"{len(refused)} of its lines are" if len(refused) > 1 else "one of its lines is"
        complain(f"{folder / LOAD_FILE}: {said} left out, line {refused[0]} first: no complete row")
    return with_stolen(rows, each_sample(folder)) if rows else rows


def with_stolen(rows: Sequence[mcperf.Row], samples: Iterable[Sample]) -> list[mcperf.Row]:
    """
    Intervals, and the share of the vCPUs' time that was stolen in each.

    Samples come once a second and at every change; between two of them time is taken to be stolen
    evenly.

    :param rows: the intervals, `start_s` and `end_s` counted from the run's start
    :param samples: the run's
    """
    found = ((one.time_s, one.stolen_s, len(one.busy_s)) for one in samples)
    readings = np.fromiter(found, np.dtype((np.float64, 3)))
    if not len(readings) or not rows:
        return list(rows)
    times_s, stolen_s, vcpus = readings.T
    # All at once: a queue's run may have a hundred thousand of either.
    limits_s = np.array([(row.start_s, row.end_s) for row in rows])
    at_s = np.interp(limits_s, times_s, stolen_s)
    all_s = vcpus[0] * np.maximum(1e-9, np.diff(limits_s)[:, 0])
    shares = np.diff(at_s)[:, 0] / all_s
    return [replace(row, stolen=share) for row, share in zip(rows, shares.tolist(), strict=True)]


def _load_rows(folder: Path) -> tuple[list[mcperf.Row], list[int]]:
    """The load's rows, and the numbers of the lines that are left out."""
    path, refused = folder / LOAD_FILE, list[int]()
    if not path.exists():
        return [], refused
    lines = read_text(path, "a load's output", MOST_RECORD_BYTES, errors="replace").splitlines()
    start_s = started_at_s(folder)
    rows = [
        replace(row, start_s=row.start_s - start_s, end_s=row.end_s - start_s)
        for row in mcperf.read_rows(lines, refused.append)
        if not math.isnan(row.start_s)
    ]
    return rows, refused


def content(
    outcome: Outcome, intervals: Sequence[mcperf.Row], events: Sequence[Event], slo_us: float
) -> dict[str, Any]:
    """
    The report, ready for JSON.

    An interval violates if its p95 exceeds the SLO; those that overlap the time from the first
    job's start to the last one's end count, those that are spoiled (`mcperf.Row`) with the others:
    they are marked. None counts where no job has started. A run with jobs that never ended has no
    makespan.

    :param outcome: the run's figures
    :param intervals: latency, `start_s` and `end_s` counted from the run's start
    :param events: the run's events, oldest first
    :param slo_us: the SLO [µs]
    """
    first_s, last_s = outcome.window_s
    counted = [
        row
        for row in intervals
        # An empty window lies within the interval in which it is, too.
        if first_s < last_s and row.end_s > first_s and row.start_s < last_s
    ]
    violations = sum(row.p95_us > slo_us for row in counted)
    return {
        "policy": outcome.policy,
        "makespan_s": last_s - first_s if outcome.finished else None,
        "jobs": {name: asdict(job) for name, job in outcome.jobs.items()},
        "violation_ratio": violations / len(counted) if counted else None,
        "p95_us": [row.p95_us for row in counted],
        "spoiled": [row.spoiled for row in counted],
        "actuations": outcome.actuations,
        "overruled": outcome.overruled,
        "guard": _guarding(events, outcome.lasted_s),
        "predicted": None,
        "reaction_ms": _percentiles(reactions_ms(events, intervals), p50=50.0, p99=99.0),
        "start_delay_ms": _percentiles(start_delays_ms(outcome.jobs.values()), p50=50.0, max=100.0),
        "stages": {},
        "loop": asdict(outcome.loop),
        "restored": outcome.restored,
    }


def _guarding(events: Sequence[Event], lasted_s: float) -> dict[str, float]:
    levels = guard_levels(events)
    steps = sum(max(0, after - before) for (_, before), (_, after) in pairwise(levels))
    above_s = sum(
        end_s - start_s
        for (start_s, level), (end_s, _) in pairwise([*levels, (lasted_s, 0)])
        if level
    )
    return {"steps": steps, "share_of_time": min(1.0, max(0.0, above_s / max(1e-9, lasted_s)))}


def start_delays_ms(jobs: Iterable[JobOutcome]) -> list[float]:
    """
    From the decision to start a job to the moment at which it had passed its gate.

    :param jobs: those whose first attempt was not seen to begin are left out
    """
    return [
        1e3 * (job.begun_s - job.decided_s)
        for job in jobs
        if job.begun_s is not None and job.decided_s is not None
    ]


def _percentiles(values: Sequence[float], **ranks: float) -> dict[str, float | None]:
    ordered = sorted(values)
    return {
        name: mcperf.percentile(ordered, rank) if ordered else None for name, rank in ranks.items()
    }


def write(
    folder: Path,
    scenario: Scenario,
    outcome: Outcome,
    intervals: Sequence[mcperf.Row],
) -> dict[str, Any]:
    """
    Write the run's own figures.

    :param folder: of the run's records; everything goes there
    :param scenario: the problem
    :param outcome: the run's figures
    :param intervals: latency, `start_s` and `end_s` counted from the run's start
    :return: what `report.json` holds
    :raises OSError: if the disk refuses it
    """
    report = content(outcome, intervals, read_events(folder), scenario.service.slo_us)
    with contextlib.suppress(InputError):  # a report can do without samples
        report["stages"] = typical(each_sample(folder), scenario.service)
    _write_report(folder, report)
    lines = io.StringIO(newline="")
    table = csv.writer(lines)
    table.writerow(INTERVAL_COLUMNS)
    for row in intervals:
        times = (f"{row.start_s:.3f}", f"{row.end_s:.3f}")
        load = (f"{row.target_qps:.0f}", f"{row.qps:.1f}", f"{row.p95_us:.1f}")
        table.writerow((*times, *load, f"{row.client_late:.4f}", f"{row.stolen:.4f}"))
    write_own(folder / INTERVALS_FILE, lines.getvalue())
    return report


def _write_report(folder: Path, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, indent=2, allow_nan=False)
    write_own(folder / REPORT_FILE, text + "\n")


def read_report(folder: Path) -> dict[str, Any]:
    """
    What `report.json` holds.

    :param folder: what `write` wrote to
    :raises InputError: if there is none, or it is not what `write` writes
    """
    path = folder / REPORT_FILE
    report: dict[str, Any] = read_json(path, "a finished run's report")
    try:
        Report.model_validate(report)
    except ValidationError as error:
        raise InputError(validation_message(path, error)) from error
    return report


def read_intervals(folder: Path) -> list[mcperf.Row]:
    """
    The measurement intervals of a finished run.

    :param folder: what `write` wrote to
    :raises InputError: if they cannot be read
    """
    path = folder / INTERVALS_FILE
    text = read_text(path, "a finished run's intervals", MOST_RECORD_BYTES)
    try:
        rows = list(csv.DictReader(text.splitlines()))
        numbers = [{name: float(row[name]) for name in INTERVAL_COLUMNS} for row in rows]
        return [mcperf.Row(quantiles=(), **one) for one in numbers]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        allowed = ", ".join(INTERVAL_COLUMNS)
        raise InputError(f"{path}: must be rows of numbers under {allowed}") from error


def illustrate(folder: Path, scenario: Scenario, report: Mapping[str, Any]) -> None:
    """
    Predict the run, draw the pictures, write the page, and say predicted against measured.

    :param folder: of the run's records
    :param scenario: the problem
    :param report: what `report.json` holds
    :raises OSError: if the disk refuses it, or the folder or a picture in it is not ours
    """
    with OwnFolder(folder) as own, contextlib.suppress(FileNotFoundError):
        os.close(own.open(PICTURE_FILE, os.O_RDONLY))  # who draws it would follow a link
    picture = ""
    if _draw(folder):
        picture = base64.b64encode((folder / PICTURE_FILE).read_bytes()).decode()
    prediction = predict(folder)
    complete = {**report, "predicted": in_short(prediction)}
    _write_report(folder, complete)
    write_page(folder, scenario, complete, picture)
    for line in lines_of(prediction, scenario.service.slo_us):
        say(line)


def write_page(folder: Path, scenario: Scenario, report: Mapping[str, Any], picture: str) -> None:
    """
    Write the page alone.

    :param folder: of the run's records
    :param scenario: the problem
    :param report: what `report.json` holds
    :param picture: the run's, in base64; empty if there is none
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    prediction = read_prediction(folder)
    page = environment.get_template("report.html").render(
        report=report,
        scenario=scenario,
        intervals=read_intervals(folder),
        events=[_in_words(event) for event in read_events(folder)],
        picture=picture,
        spoiled_share=mcperf.SPOILED,
        client=read_client(folder),
        prediction=prediction,
        predicted=rows_of(prediction, scenario.service.slo_us) if prediction else [],
    )
    write_own(folder / PAGE_FILE, page)


def _in_words(event: Event) -> tuple[float, str, str, str]:
    return event.time_s, event.job, event.what, event.detail or event.arguments()


def _draw(folder: Path) -> bool:
    """Draw in a process of its own: the agent imports neither matplotlib nor tensorboard."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    command = helper_command("training.evaluation.live_pictures", str(folder.resolve()))
    try:
        subprocess.run(command, check=True, timeout=DRAW_LIMIT_S, capture_output=True, text=True)
    except (subprocess.SubprocessError, OSError) as error:
        complain(f"no pictures: {fault(error)}")
        return False
    return True


def _jobs_s(report: Mapping[str, Any]) -> tuple[float, float]:
    """From the first job's start to the last one's end; to the run's end if one never ended."""
    starts = [job["start_s"] for job in report["jobs"].values() if job["start_s"] is not None]
    ends = [job["end_s"] for job in report["jobs"].values()]
    return min(starts, default=math.inf), math.inf if None in ends else max(ends, default=0.0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m deploy.report", description="Write the page of a finished run anew."
    )
    line.add_argument("folder", type=Path, help="the run's report folder")
    line.add_argument(
        "--mcperf", type=Path, metavar="FILE", help="mcperf's output beside the run, to be joined"
    )
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Write the page from the command line.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        report = read_report(arguments.folder)
        scenario = scenario_of(arguments.folder)
        if not scenario.jobs:
            raise InputError(f"{arguments.folder}: of a queue, which has {REPORT_FILE} and no page")
        try:
            if arguments.mcperf is not None:
                client = join(
                    arguments.folder, arguments.mcperf, _jobs_s(report), scenario.service.slo_us
                )
                print("\n".join(map(escaped, client.findings)))
            illustrate(arguments.folder, scenario, report)
        except OSError as error:
            reason = f"cannot be written to: {error.strerror}"
            raise InputError(f"{arguments.folder}: {reason}") from error
        print(arguments.folder / PAGE_FILE)


if __name__ == "__main__":
    main()
