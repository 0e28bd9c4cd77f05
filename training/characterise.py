"""
Measure a machine, explain it, and fit a profile to it.

    python -m training.characterise --scenario FILE --out DIR [--quick]
    python -m training.characterise --data DIR --out DIR

The first form measures this machine: memcached alone and beside something, the jobs alone, under
pressure and in pairs, and how long changes take. It writes the tables, a profile, a scenario with a
load and an SLO that suit the machine, and a report. Interrupted, it goes on where it was. The
second form analyses published tables in the same way.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from env.commandline import OneLineParser
from env.errors import InputError, exit_on_bad_input
from env.scenario import Scenario, load_scenario
from training import published
from training.commandline import read_profile
from training.fit_machine import fit_machine, write_profile
from training.machine_report import write_report
from training.measure import FULL, QUICK, Campaign, Mode, Store
from training.workbench import workbench


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
    add("--quick", action="store_true", help="the essentials, in about 3 minutes on 2 vCPUs")
    add("--despite-load", action="store_true", help="measure although the machine is busy")
    return line


def machine_name() -> str:
    """The processor's name and its number of vCPUs."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return f"{len(names)} x {names[0] if names else platform.machine()}"


def characterise(scenario: Scenario, mode: Mode, out: Path, despite_load: bool) -> list[str]:
    """
    Measure this machine, as far as that is not done, and write what follows from it.

    :param scenario: what it is measured for
    :param mode: how thoroughly
    :param out: folder of the results
    :param despite_load: see `training.workbench.workbench`
    :return: what was found, a sentence each
    :raises InputError: if the machine or the folder cannot be used, or a measurement failed
    """
    base = read_profile(scenario.profile)
    purpose = {"machine": machine_name(), "mode": mode.name}
    store = Store(out, purpose | {"scenario": scenario.model_dump(mode="json")})
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with (
        workbench(out / "work", despite_load) as bench,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("starting")

        def advance(seconds: float, what: str) -> None:
            progress.update(bar, advance=seconds, description=what)

        campaign = Campaign(scenario, mode, store, advance)
        progress.update(bar, total=campaign.expected_s(bench.vcpus))
        campaign.run(bench)
    latency, jobs, actuation = (store.table(name) for name in ("latency", "jobs", "actuation"))
    profile = fit_machine(scenario, base, latency, jobs, actuation, machine_name())
    rule = write_profile(profile, scenario, latency, out)
    return [rule, *write_report(scenario, profile, latency, jobs, actuation, out)]


def main(argv: Sequence[str] | None = None) -> None:
    """
    Characterise from the command line.

    :param argv: command line, the process's own if none is given
    """
    given = parser().parse_args(argv)
    # Whatever ends this program, what it has started is stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with exit_on_bad_input():
            if given.data is not None:
                lines = published.write_report(given.data, given.out)
            else:
                scenario = load_scenario(given.scenario)
                mode = QUICK if given.quick else FULL
                try:
                    lines = characterise(scenario, mode, given.out, given.despite_load)
                except OSError as error:
                    raise InputError(f"measuring failed: {error}") from error
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {given.out}", file=sys.stderr)
        sys.exit(130)
    for text in lines:
        print(text)
    print(f"report: {given.out / 'report.html'}")


if __name__ == "__main__":
    main()
