"""
The trained policy and a published rule on the local scenario, in turn, on this machine.

    sudo .venv/bin/python -m benchmarks.local --scenario demo/machine/scenario.yaml

A machine's speed drifts from minute to minute, so the two alternate, each beginning every other
turn, and each turn is compared by itself. `make demo` measures the machine and leaves the scenario.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.demo import CHECKPOINT, DRAW_S, END_S, FOLDER, RULE, RUN_S, deploy
from deploy.engines.images import docker_daemon
from deploy.records.run_report import read_report
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, whole_number
from env.scenario import load_scenario
from training.outputs import write_json

ASKED = 0.9
"""The policy's makespan over the rule's, with no more violations."""

POLICIES = ((str(CHECKPOINT), RUN_S[0]), (str(RULE), RUN_S[1]))
"""Who runs, and how long at most [s]."""

RULE_S = RUN_S[1] - END_S - DRAW_S
"""The makespan of a rule that was not done in its time, at least."""


def turn(number: int, problem: str, url: str, folder: Path) -> list[dict[str, Any]]:
    """
    Run policy and rule once each.

    :param number: of the turn, says who begins
    :param problem: the scenario's file
    :param url: the Docker daemon's address
    :param folder: of the reports
    :return: both reports, the policy's first
    """
    found = {}
    for policy, limit_s in POLICIES[:: -1 if number % 2 else 1]:
        where = folder / f"{Path(policy).stem}-{number}"
        deploy(policy, problem, url, where, limit_s)
        found[policy] = read_report(where)
    return [found[policy] for policy, _ in POLICIES]


def reached(policy: dict[str, Any], rule: dict[str, Any]) -> bool:
    """
    Whether the policy was as much better than the rule as is asked for.

    :param policy: its report
    :param rule: its report
    """
    if policy["makespan_s"] is None or policy["violation_ratio"] is None:
        return False
    calmer = policy["violation_ratio"] <= (rule["violation_ratio"] or 0.0)
    return calmer and policy["makespan_s"] <= ASKED * (rule["makespan_s"] or RULE_S)


def line(report: dict[str, Any]) -> str:
    """
    A run in words.

    :param report: what `report.json` holds
    """
    makespan_s, ratio = report["makespan_s"], report["violation_ratio"]
    done = "not done" if makespan_s is None else f"{makespan_s:.1f} s"
    broken = "not measured" if ratio is None else f"{ratio:.1%} of {len(report['p95_us'])}"
    return f"{report['policy']}: {done}, violated {broken}, {sum(report['spoiled'])} spoiled"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = OneLineParser(prog="python -m benchmarks.local", description=__doc__.splitlines()[1])
    add = options.add_argument
    add("--scenario", default="local", help="as measured here, a YAML file (%(default)s)")
    add("--turns", type=whole_number(1), default=3, help="runs of each (%(default)s)")
    add("--json", type=Path, help="write the reports there")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run and compare.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    turns = []
    with exit_on_bad_input():
        require_writable(arguments.json)
        load_scenario(arguments.scenario)  # a wrong name is told before Docker starts
        if not CHECKPOINT.is_file():
            raise InputError(f"{CHECKPOINT}: not found; run this in the repository's folder")
        with docker_daemon() as url:
            for number in range(arguments.turns):
                reports = turn(number, arguments.scenario, url, FOLDER / "turns")
                turns.append(reports)
                verdict = "reached" if reached(*reports) else "MISSED"
                print(" | ".join(map(line, reports)), "|", verdict, flush=True)
        if arguments.json:
            write_json(turns, arguments.json)


if __name__ == "__main__":
    main()
