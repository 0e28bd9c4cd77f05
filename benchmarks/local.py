"""
The trained policy and a published rule on the local scenario, in turn, on this machine.

    sudo .venv/bin/python -m benchmarks.local --scenario demo/machine/scenario.yaml
    sudo .venv/bin/python -m benchmarks.local --neighbour --policy random --policy static
    sudo .venv/bin/python -m benchmarks.local --scenario local-group --tap --turns 1

A machine's speed drifts from minute to minute, so policies alternate, another one beginning each
turn, and each turn is compared by itself. `make demo` measures the machine and leaves the scenario.
"""

import argparse
import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.checkpoint import shipped_for
from agents.registry import make
from deploy.demo import DRAW_S, END_S, FOLDER, PROBE, RULE, RUN_S, child, deploy
from deploy.engines.images import docker_daemon
from deploy.linux.helpers import helper_command
from deploy.linux.signals import interrupt_on_stop
from deploy.loop.live_machine import PREPARE_LIMIT_S
from deploy.records.run_report import read_report
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, whole_number, write_json
from env.scenario import load_scenario

ASKED = 0.9
"""The first policy's makespan over another's, with no more violations."""

LIMIT_S = RUN_S[1]
"""How long a policy may take, with all that ends a run [s]."""

MAKESPAN_S = LIMIT_S - PREPARE_LIMIT_S - END_S - DRAW_S
"""The makespan of a policy that was not done in its time, at least [s]."""


def disturbed() -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """A noisy neighbour for as long as this lasts."""
    return child(helper_command("benchmarks.neighbour"))


def turn(
    number: int, policies: Sequence[str], problem: str, url: str, folder: Path, sensor: str
) -> list[dict[str, Any]]:
    """
    Run each policy once.

    :param number: of the turn, says who begins
    :param policies: who runs
    :param problem: the scenario's file
    :param url: the Docker daemon's address
    :param folder: of the reports
    :param sensor: the option of `deploy.py` that says who measures latency
    :return: the reports in the order of the policies
    """
    found = {}
    begins = number % len(policies)
    for policy in (*policies[begins:], *policies[:begins]):
        where = folder / f"{Path(policy).stem}-{number}"
        deploy(policy, problem, url, where, LIMIT_S, sensor)
        found[policy] = read_report(where)
    return [found[policy] for policy in policies]


def reached(policy: dict[str, Any], others: Sequence[dict[str, Any]]) -> bool:
    """
    Whether the policy was as much better than all others as is asked for.

    :param policy: its report
    :param others: theirs
    """
    if policy["makespan_s"] is None or policy["violation_ratio"] is None:
        return False
    return all(
        policy["violation_ratio"] <= (other["violation_ratio"] or 0.0)
        and policy["makespan_s"] <= ASKED * (other["makespan_s"] or MAKESPAN_S)
        for other in others
    )


def line(report: dict[str, Any]) -> str:
    """
    A run in words.

    :param report: what `report.json` holds
    """
    makespan_s, ratio = report["makespan_s"], report["violation_ratio"]
    done = "not done" if makespan_s is None else f"{makespan_s:.1f} s"
    broken = "not measured" if ratio is None else f"{ratio:.1%} of {len(report['p95_us'])}"
    minutes = (makespan_s or MAKESPAN_S) / 60.0
    latest_ms = report["start_delay_ms"]["max"]
    delay = "" if latest_ms is None else f", starts within {latest_ms:.0f} ms"
    stages = "".join(
        f", {name} {each['wait_us']:.0f} + {each['service_us']:.0f} us"
        for name, each in report["stages"].items()
    )
    return (
        f"{report['policy']}: {done}, violated {broken}, {sum(report['spoiled'])} spoiled, "
        f"{report['actuations'] / minutes:.0f} changes a minute, guard {report['guard']['steps']} "
        f"steps{delay}{stages}"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = OneLineParser(prog="python -m benchmarks.local", description=__doc__.splitlines()[1])
    add = options.add_argument
    add("--scenario", default="local", help="as measured here, a YAML file (%(default)s)")
    shipped = f"the scenario's checkpoint, {RULE}"
    add("--policy", action="append", help=f"who runs, the first against the others ({shipped})")
    add("--neighbour", action="store_true", help="a busy process disturbs, half of the time")
    add("--tap", action="store_true", help="latency by the tap in the probe's place")
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
        # What is wrong is told before Docker and memcached start.
        require_writable(arguments.json)
        scenario = load_scenario(arguments.scenario)
        policies = arguments.policy or [shipped_for(scenario), str(RULE)]
        if not RULE.is_file():
            raise InputError(f"{RULE}: not found; run this in the repository's folder")
        for policy in policies:
            make(policy)
        interrupt_on_stop()  # a neighbour that outlived this would be busy for ever
        noise = disturbed() if arguments.neighbour else contextlib.nullcontext()
        sensor = "--tap" if arguments.tap else PROBE
        with docker_daemon() as url, noise:
            for number in range(arguments.turns):
                reports = turn(number, policies, arguments.scenario, url, FOLDER / "turns", sensor)
                turns.append(reports)
                verdict = "reached" if reached(reports[0], reports[1:]) else "MISSED"
                print(" | ".join(map(line, reports)), "|", verdict, flush=True)
        if arguments.json:
            write_json(turns, arguments.json)


if __name__ == "__main__":
    main()
