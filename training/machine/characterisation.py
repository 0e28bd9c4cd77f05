"""
Measure a machine, explain it, and fit a profile to it.

    python -m training.characterise --scenario FILE --out DIR [--quick]
    python -m training.characterise --data DIR --out DIR

The first form measures this machine: memcached alone and beside something, the jobs alone, under
pressure and in pairs, and how long changes take. It writes the tables, a profile, a scenario with a
load and an SLO that suit the machine, and a report. Jobs of the scenario may be any commands, also
ones that no profile knows. It ends with a rehearsal (`training.refinement.rehearsal`), which says
what the profile is good enough for, and then corrects it. Interrupted, it goes on where it was.
The second form analyses published tables in the same way.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from deploy.linux.signals import interrupt_on_stop
from env.errors import InputError, exit_on_bad_input, fault
from env.inputs.commandline import OneLineParser, number
from env.scenario import Scenario, load_scenario
from env.simulator.profile import Background, load_profile
from training.analysis.findings import job_times
from training.machine import published
from training.machine.fit_machine import fit_machine, write_profile
from training.machine.host_speed import at_one_speed, yardstick_us
from training.machine.job_traits import fit_pairs, unhindered
from training.machine.machine_report import Measured, write_report
from training.measuring import experiment, preflight
from training.measuring.campaign import FULL, QUICK, Campaign, CampaignPlan, job_runs
from training.measuring.rounds import Store
from training.measuring.testbed import Testbed, open_testbed
from training.refinement.rehearsal import rehearse


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.characterise", description=__doc__.strip().split("\n")[0]
    )
    add = line.add_argument
    what = line.add_mutually_exclusive_group(required=True)
    what.add_argument("--scenario", help="measure this machine for a scenario (name or file)")
    what.add_argument("--data", type=Path, help="analyse a folder of published tables instead")
    add("--out", type=Path, required=True, help="folder for tables, pictures and the report")
    add("--quick", action="store_true", help="the essentials, in 3 minutes on 2 vCPUs")
    add(
        "--minutes",
        type=number(1.0),
        help="no rounds are added after so much time (22, --quick 1.6); jobs that cannot be cut "
        "have a budget of their own besides, 30 (4.7), or so much where that is more; larger, the "
        "same command goes on with what is not known yet",
    )
    add(
        "--factors",
        nargs="+",
        type=experiment.factor,
        metavar="NAME=LOW,HIGH",
        help="of a 2^k r experiment: threads, cores, connections or beside (without --quick: "
        f"{' '.join(map(str, experiment.DEFAULT))})",
    )
    add("--despite-load", action="store_true", help="measure although the machine is busy")
    return line


def machine_name() -> str:
    """The processor's name and its number of vCPUs."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"{len(names)} x {names[0] if names else platform.machine()}"


def _mode_of(given: argparse.Namespace) -> CampaignPlan:
    """What the command line asks for."""
    mode = QUICK if given.quick else FULL
    if given.minutes is not None:
        limit_s = 60.0 * given.minutes
        mode = replace(mode, limit_s=limit_s, whole_s=max(mode.whole_s, limit_s))
    if given.factors is not None:
        mode = replace(mode, factors=tuple(given.factors))
    return mode


def characterise(
    scenario: Scenario, mode: CampaignPlan, out: Path, despite_load: bool
) -> tuple[list[str], pd.DataFrame]:
    """
    Measure this machine, as far as that is not done, and write what follows from it.

    :param scenario: what it is measured for
    :param mode: how thoroughly
    :param out: folder of the results
    :param despite_load: see `training.measuring.testbed.open_testbed`
    :return: what was found, a sentence each, and how well
        (`training.machine.machine_report.summarise`)
    :raises InputError: if the machine or the folder cannot be used, or a measurement failed
    """
    base = load_profile(scenario.profile)
    preflight.require(scenario)
    experiment.require(mode.factors, scenario)
    purpose = {
        "machine": machine_name(),
        "mode": mode.name,
        "factors": list(map(str, mode.factors)),
    }
    store = Store(out, purpose | {"scenario": scenario.model_dump(mode="json")})
    with open_testbed(out / "work", despite_load) as testbed:
        testbed.require_images(scenario.jobs)
        measure(scenario, mode, store, testbed)
        background = Background(mechanism=testbed.background, kernel=platform.release())
    latency, jobs, actuation = store.table("latency"), job_runs(store), store.table("actuation")
    measured = Measured(latency, jobs, actuation, store.table("factorial"), mode.factors)
    even = at_one_speed(jobs)
    profile = fit_machine(scenario, base, latency, even, actuation, machine_name())
    profile = fit_pairs(profile, job_times(even.assign(source="here")))
    told = {"background": background, "yardstick_us": yardstick_us(jobs)}
    profile = profile.model_copy(update=told)
    rule = write_profile(profile, scenario, latency, store.table("capacity"), out)
    derived = load_scenario(out / "scenario.yaml")
    # Of threads that hinder each other the physics has no word: other traits would learn of them.
    rehearsed = derived.with_jobs(unhindered(job, jobs) for job in derived.jobs)
    verdicts, profile = rehearse(rehearsed, profile, out)
    measured = replace(measured, verdicts=verdicts)
    lines, summary = write_report(derived, profile, measured, out)
    return [rule, *lines], summary


def measure(scenario: Scenario, mode: CampaignPlan, store: Store, testbed: Testbed) -> None:
    """
    Measure under a bar that shows the time left.

    :param scenario: what the machine is measured for
    :param mode: how thoroughly
    :param store: the store that receives the measurements
    :param testbed: the testbed to measure on
    """
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    # A thread that draws it would keep the interpreter's lock where it waits for a vCPU.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        bar = progress.add_task("starting")

        def advance(seconds: float, what: str) -> None:
            progress.update(bar, advance=seconds, description=what, refresh=True)

        campaign = Campaign(scenario, mode, store, advance)
        progress.update(bar, total=campaign.expected_s(testbed.vcpus))
        campaign.run(testbed)
        # It may be known well enough before the time is up.
        done = progress.tasks[0].completed
        progress.update(bar, total=done, description="measured", refresh=True)


def table_of(summary: pd.DataFrame) -> Table:
    """
    The margins for the terminal.

    :param summary: see `training.machine.machine_report.summarise`
    """
    view = Table(box=box.SIMPLE_HEAD, title="half the width of 95 % intervals, of the mean")
    for name in summary.columns:
        view.add_column(name, justify="left" if name == "measured" else "right")
    for row in summary.itertuples(index=False):
        view.add_row(*map(_cell, row))
    return view


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "-" if math.isnan(value) else f"{value:.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    """
    Characterise from the command line.

    :param argv: command line, the process's own if none is given
    """
    given = parser().parse_args(argv)
    os.umask(os.umask(0) | 0o022)  # nobody else may write to what root makes
    interrupt_on_stop()
    summary = None
    with exit_on_bad_input(f"stopped; the same command goes on from {given.out}"):
        if given.data is not None:
            lines = published.write_report(given.data, given.out)
        else:
            scenario = load_scenario(given.scenario, unmeasured=True)
            try:
                lines, summary = characterise(
                    scenario, _mode_of(given), given.out, given.despite_load
                )
            except OSError as error:
                raise InputError(f"measuring failed: {fault(error)}") from error
        if summary is not None and summary["median margin"].notna().any():
            Console().print(table_of(summary))
        for text in lines:
            print(text)
        print(f"report: {given.out / 'report.html'}")


if __name__ == "__main__":
    main()
