"""
Measure a group of memcacheds as a study asks, explain it, and write a report.

    python -m training.study --plan asl-2018 --out DIR [--quick]

A plan is a shipped one's name or a YAML file (`training.study.study_plan`). Every run is
written when it has ended: interrupted, the same command goes on with the next one.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from math import isnan
from pathlib import Path

import pandas as pd
from rich.console import Console

from deploy.group.group import programs_of
from deploy.linux.own_folder import OwnFolder
from deploy.linux.signals import interrupt_on_stop
from env.errors import InputError, exit_on_bad_input, fault
from env.inputs.commandline import OneLineParser
from env.inputs.text_files import MOST_RECORD_BYTES, read_json, read_text
from training.statistics import margin
from training.study.study_measure import Row, group_of, load_keys, measure, require_vcpus
from training.study.study_plan import DEFAULTS, FIELDS, Effort, StudyPlan, StudyPoint, load_plan
from training.study.study_report import MEASURED, write_report

WANTED_MARGIN = 0.05
"""Of the mean throughput: half the width of its 95 % interval (docs/characterisation.md)."""

LARGEST = 1e12
"""No figure of a run is as large: requests a second, microseconds, vCPUs."""

KINDS = {**dict.fromkeys(MEASURED, float), "disturbed": int}


class Runs:
    """
    The runs of all points so far, kept in a folder.

    :param folder: made if it is not there; nobody else may write to it
    :param purpose: what is measured; a folder with another purpose is refused
    :param points: of the plan
    :raises InputError: if the folder cannot be used, or holds something else
    """

    def __init__(self, folder: Path, purpose: dict[str, object], points: Sequence[StudyPoint]):
        self.path = folder / "runs.csv"
        plan = folder / "plan.json"
        try:
            OwnFolder(folder).close()  # root writes to it
            if plan.exists() and read_json(plan, "a study's plan") != purpose:
                raise InputError(
                    f"{folder}: holds another study (its plan.json differs); give another folder"
                )
            plan.write_text(json.dumps(purpose, indent=1) + "\n", encoding="utf-8")
            self.rows = self._read({_named(point) for point in points})
        except (OSError, ValueError, csv.Error) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{folder}: cannot be used: {fault(error)}") from error

    def add(self, row: Row) -> None:
        """
        Write a run.

        :param row: what `training.study.study_measure.measure` returned
        """
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0] if self.rows else row))
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append({name: str(value) for name, value in row.items()})

    def throughputs(self, point: StudyPoint) -> tuple[list[float], list[float]]:
        """
        What the calm runs of a point served, and what all of them did [requests/s].

        :param point: one of the plan's
        """
        own = {name: str(value) for name, value in point.fields.items()}
        rows = [row for row in self.rows if own.items() <= row.items()]
        calm = [float(row["throughput"]) for row in rows if row["disturbed"] == "0"]
        return calm, [float(row["throughput"]) for row in rows]

    def table(self) -> pd.DataFrame:
        """All runs."""
        kinds: dict[str, type] = {name: type(DEFAULTS[name][0]) for name in FIELDS}
        return pd.DataFrame(self.rows).astype(kinds | KINDS)

    def _read(self, points: Collection[tuple[str, ...]]) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        text = read_text(self.path, "a study's runs", MOST_RECORD_BYTES)
        whole = text[: text.rfind("\n") + 1]
        rows = list(csv.DictReader(io.StringIO(whole, newline="")))
        for number, row in enumerate(rows, 1):
            if not _is_run(row, points):
                raise InputError(f"{self.path}: row {number} is no run of this study; remove it")
        # A run that was being written when the machine went down is none.
        if not rows:
            self.path.unlink()
        elif whole != text:
            part = self.path.with_suffix(".part")
            part.write_text(whole, encoding="utf-8", newline="")
            part.replace(self.path)
        return rows


def _named(point: StudyPoint) -> tuple[str, ...]:
    return tuple(map(str, point.fields.values()))


def _is_run(row: dict[str, str], points: Collection[tuple[str, ...]]) -> bool:
    """Whether a row of the table is one that a run of one of some points has made."""
    try:
        figures = {name: float(row[name]) for name in MEASURED}
        gets = [int(count) for count in row["gets_by_member"].split(";")]
        return (
            tuple(row[name] for name in FIELDS) in points
            and len(gets) == int(row["members"])
            and row["disturbed"] in ("0", "1")
            and all(-LARGEST < figure < LARGEST or isnan(figure) for figure in figures.values())
            and min(*gets, figures["throughput"], figures["mean_us"]) >= 0.0
            and None not in row
        )
    except (ValueError, TypeError, KeyError, AttributeError):  # AttributeError: a short row
        return False


def is_known(runs: Runs, point: StudyPoint, effort: Effort, late: bool) -> bool:
    """
    Whether a point needs no more runs.

    :param runs: all so far
    :param point: one of the plan's
    :param effort: how often it is measured
    :param late: whether only the fewest runs are made
    """
    calm, tried = runs.throughputs(point)
    if len(tried) < effort.fewest:
        return False
    if late or len(tried) >= effort.most:
        return True
    return len(calm) >= effort.fewest and margin(calm) <= WANTED_MARGIN


def measure_all(plan: StudyPlan, quick: bool, runs: Runs, console: Console) -> None:
    """
    Measure what is not known, in rounds, so that no point is measured at one time alone.

    :param plan: what is measured
    :param quick: with less effort
    :param runs: receives the runs
    :param console: for a line after each round
    :raises InputError: if a group cannot run
    """
    effort, points = plan.effort(quick), plan.points(quick)
    begun_s = time.monotonic()

    def still_open(some: Sequence[StudyPoint]) -> list[StudyPoint]:
        late = time.monotonic() - begun_s > effort.limit_s
        return [one for one in some if not is_known(runs, one, effort, late)]

    for turn in itertools.count(1):
        if not (open_points := still_open(points)):
            return
        by_group: dict[object, list[StudyPoint]] = defaultdict(list)
        for point in open_points:
            by_group[(point.setup, point.proxy)].append(point)
        for own in by_group.values():
            if not (few := still_open(own)):  # a round may take minutes, and the time end in it
                continue
            with group_of(few[0].setup) as group:
                load_keys(group, few[0])
                for point in few:
                    runs.add(measure(group, point, effort))
        took_s = time.monotonic() - begun_s
        console.print(f"round {turn}: {len(open_points)} points, {took_s:.0f} s", highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run a study from the command line.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(
        prog="python -m training.study", description=__doc__.strip().split("\n")[0]
    )
    line.add_argument("--plan", required=True, help="asl-2016, asl-2018 or a YAML file")
    line.add_argument("--out", type=Path, required=True, help="folder for tables and the report")
    line.add_argument("--quick", action="store_true", help="fewer points, in 4 minutes on 2 vCPUs")
    given = line.parse_args(argv)
    interrupt_on_stop()
    console = Console(soft_wrap=True)
    with exit_on_bad_input():
        plan = load_plan(given.plan)
        require_vcpus()
        for proxy in {point.setup.proxy for point in plan.points(given.quick)}:
            programs_of(proxy)
        purpose = {"plan": plan.model_dump(mode="json"), "quick": given.quick}
        purpose |= {"vcpus": os.cpu_count()}
        runs = Runs(given.out, purpose, plan.points(given.quick))
        try:
            measure_all(plan, given.quick, runs, console)
            lines = write_report(plan, given.quick, runs.table(), given.out)
        except KeyboardInterrupt as stop:
            print("coretide: stopped; the same command goes on", file=sys.stderr)
            sys.exit(128 + int(stop.args[0]))
        except OSError as error:
            raise InputError(f"{given.out}: cannot be written to: {fault(error)}") from error
        for text in lines:
            console.print(text, markup=False, highlight=False)
        console.print(f"report: {given.out / 'report.html'}", highlight=False)
