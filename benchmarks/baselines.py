"""
What the baselines cost: one decision, and an evaluation of a hundred episodes.

    python -m benchmarks.baselines --json baselines.json

Decisions are timed one by one (wall clock, median); episodes by the CPU time that they take, so
that a busy machine slows neither much. Both are simulated runs of the shipped scenario.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import agents
from env.allocation import Allocation
from env.errors import exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, whole_number, write_json
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.telemetry import Telemetry
from training.evaluation.episodes import run_episode, starts_from

MOST_DECISION_US = 50.0
MOST_EVALUATION_S = 12.0
EPISODES = 100


class TimedPolicy:
    """
    A policy whose decisions are timed.

    :param policy: the policy to time
    """

    def __init__(self, policy: agents.Policy):
        self._policy = policy
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        """All else is the policy's own."""
        return getattr(self._policy, name)

    def decide(self, telemetry: Telemetry) -> Allocation:
        """See `agents.Policy.decide`; notes how long it took."""
        begun_s = time.perf_counter()
        allocation = self._policy.decide(telemetry)
        self.seconds.append(time.perf_counter() - begun_s)
        return allocation


def measure(name: str, machine: SimulatedMachine, episodes: int) -> dict[str, Any]:
    """
    One baseline's costs.

    :param name: name of the baseline
    :param machine: the simulated machine to run on
    :param episodes: number of episodes to run; the cost of `EPISODES` is extrapolated from them
    """
    policy = agents.make(name)
    watch = TimedPolicy(policy)
    first, *starts = starts_from(0, episodes + 1)
    run_episode(machine, watch, first)
    begun_s = time.process_time()
    for start in starts:
        run_episode(machine, policy, start)
    spent_s = time.process_time() - begun_s
    return {
        "policy": name,
        "decision_us": 1e6 * statistics.median(watch.seconds),
        "evaluation_s": EPISODES * spent_s / episodes,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """
    Print measured beside asked.

    :param rows: of each baseline, see `measure`
    """
    table = Table("baseline", "a decision, median [µs]", f"{EPISODES} episodes [CPU s]")
    for row in rows:
        table.add_row(row["policy"], f"{row['decision_us']:.1f}", f"{row['evaluation_s']:.1f}")
    Console().print(table)
    slowest_us = max(row["decision_us"] for row in rows)
    longest_s = max(row["evaluation_s"] for row in rows)
    print(
        f"slowest decision {slowest_us:.1f} µs (asked: <= {MOST_DECISION_US:g}), "
        f"longest evaluation {longest_s:.1f} s (asked: <= {MOST_EVALUATION_S:g})"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure all shipped baselines from the command line.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m benchmarks.baselines", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--episodes", type=whole_number(1), default=10, help="runs of each (%(default)s)")
    add("--json", type=Path, help="write the figures here")
    arguments = line.parse_args(argv)
    with exit_on_bad_input():
        require_writable(arguments.json)
        machine = SimulatedMachine(EpisodeFactory(load_scenario("cca-2025")))
        rows = [measure(name, machine, arguments.episodes) for name in agents.names()]
        show(rows)
        if arguments.json:
            write_json(rows, arguments.json)


if __name__ == "__main__":
    main()
