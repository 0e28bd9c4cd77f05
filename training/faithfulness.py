"""
Published controllers in the simulator beside what their authors measured.

    python -m training.faithfulness --out docs/faithfulness.md

Each runs as it ran: on its course's official load trace, without the regulator. The first
figures are the profile as fitted; the range shows how far VMs of the same type, drawn from the
profile's uncertainty, lie apart: a published figure comes from one VM on one day.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import agents
from env.commandline import OneLineParser, whole_number
from env.errors import InputError, exit_on_bad_input
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, Variation
from training.commandline import read_profile
from training.episodes import repeats_of, run_episodes
from training.report import mean_and_ci95, profile_report, require_writable, write_json

OFFICIAL_TRACE = {"cca-2025": 2333, "cca-2024": 3274}
MAKESPAN_BOUND = 0.08
"""How far simulated and measured makespan may lie apart, as a share of the measured one."""
VIOLATION_BOUND = 0.04
"""How far simulated and measured violation ratio may lie apart."""


@dataclass(frozen=True)
class Case:
    """
    One published result.

    :param policy: as shipped
    :param scenario: the course's year
    :param interval_s: load interval [s]
    :param makespan_s: measured, mean over its runs
    :param makespan_sd_s: standard deviation over its runs; 0 where only a mean is known
    :param violation_ratio: measured, mean over its runs
    :param source: whose, and how many runs
    """

    policy: str
    scenario: str
    interval_s: float
    makespan_s: float
    makespan_sd_s: float
    violation_ratio: float
    source: str


CASES = (
    Case("threshold-groups", "cca-2025", 10, 868.3, 37.6, 0.026, "group 031, raw logs of 3 runs"),
    Case("threshold-groups", "cca-2025", 6, 726.9, 13.2, 0.027, "group 031, raw logs of 3 runs"),
    Case("stats-poll-packed-as-run", "cca-2025", 10, 707.5, 9.3, 0.0, "ImaGoodFella, 3 runs"),
    Case("stats-poll-packed-as-run", "cca-2025", 5, 688.6, 6.7, 0.0025, "ImaGoodFella, 3 runs"),
    Case("stats-poll-packed-as-run", "cca-2025", 3, 723.2, 8.1, 0.029, "ImaGoodFella, 3 runs"),
    Case("stats-poll-packed-as-run", "cca-2025", 2, 723.6, 17.8, 0.072, "ImaGoodFella, 3 runs"),
    Case("hysteresis-pause", "cca-2025", 10, 809.0, 0.0, 0.0, "project page, mean of 3 runs"),
    Case("shared-background", "cca-2024", 10, 548.2, 5.9, 0.015, "frikai, raw logs of 6 runs"),
    Case("shared-background", "cca-2024", 5, 553.3, 5.0, 0.022, "frikai, raw logs of 2 runs"),
    Case("shared-background", "cca-2024", 1, 547.8, 3.6, 0.021, "frikai, raw logs of 3 runs"),
)


def simulate(case: Case, episodes: int, entropy: int) -> dict[str, Any]:
    """
    The case in the simulator, on the profile as fitted and on VMs drawn around it.

    :param case: which
    :param episodes: runs of each kind
    :param entropy: what is random follows from it
    """
    scenario = load_scenario(case.scenario).with_changes(load={"interval_s": case.interval_s})
    profile = read_profile(scenario.profile)
    policy = agents.make(case.policy)
    starts = repeats_of(OFFICIAL_TRACE[case.scenario], entropy, episodes)
    fitted, drawn = (
        run_episodes(
            policy, EpisodeFactory(scenario, profile, Variation(spread)), starts, regulated=False
        )
        for spread in (0.0, 1.0)
    )
    makespan_s, _ = mean_and_ci95([run.makespan_s for run in fitted])
    ratio, _ = mean_and_ci95([run.violation_ratio for run in fitted])
    return {
        "policy": case.policy,
        "scenario": case.scenario,
        "interval_s": case.interval_s,
        "source": case.source,
        "measured": {
            "makespan_s": case.makespan_s,
            "makespan_sd_s": case.makespan_sd_s,
            "violation_ratio": case.violation_ratio,
        },
        "simulated": {
            "makespan_s": makespan_s,
            "violation_ratio": ratio,
            "makespan_range_s": _range([run.makespan_s for run in drawn]),
            "violation_range": _range([run.violation_ratio for run in drawn]),
            "completed": sum(run.completed for run in fitted),
        },
        "makespan_error": makespan_s / case.makespan_s - 1.0,
        "violation_error": ratio - case.violation_ratio,
        "within": abs(makespan_s / case.makespan_s - 1.0) <= MAKESPAN_BOUND
        and abs(ratio - case.violation_ratio) <= VIOLATION_BOUND,
        "profile": profile_report(profile),
    }


def _range(values: Sequence[float]) -> list[float]:
    """The 5th and 95th percentile."""
    return [float(value) for value in np.percentile(values, (5, 95))]


def page(rows: Sequence[dict[str, Any]], episodes: int) -> Iterator[str]:
    """
    The comparison as Markdown, line by line.

    :param rows: what `simulate` returned
    :param episodes: runs of each kind
    """
    yield "# Published controllers, simulated and measured"
    yield ""
    yield (
        f"Made by `python -m training.faithfulness --out docs/faithfulness.md`: {episodes} "
        "simulated runs a row on the course's official trace, regulator off. *Fitted* is the "
        "profile as it is; *VMs* is the 5 to 95 % range over machines drawn from the profile's "
        "uncertainty. A row is within bounds when the fitted makespan is within "
        f"{100 * MAKESPAN_BOUND:.0f} % of the measured one and the violation ratio within "
        f"{100 * VIOLATION_BOUND:.0f} points."
    )
    yield ""
    for name, profile in {row["scenario"]: row["profile"] for row in rows}.items():
        errors = ", ".join(f"{key} {value:.3g}" for key, value in profile["fit_error"].items())
        yield f"- {name}: profile `{profile['hash'][:16]}`, fit error: {errors or 'not fitted yet'}"
    yield ""
    yield (
        "| controller | interval | makespan measured [s] | fitted [s] | error | VMs [s] "
        "| violations measured [%] | fitted [%] | VMs [%] | within | source |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"
    for row in rows:
        yield _row(row)


def _row(row: dict[str, Any]) -> str:
    measured, simulated = row["measured"], row["simulated"]
    deviation = f" ± {measured['makespan_sd_s']:.0f}" if measured["makespan_sd_s"] else ""
    low_s, high_s = simulated["makespan_range_s"]
    low, high = simulated["violation_range"]
    return (
        f"| {row['policy']} ({row['scenario']}) | {row['interval_s']:g} s "
        f"| {measured['makespan_s']:.0f}{deviation} | {simulated['makespan_s']:.0f} "
        f"| {100 * row['makespan_error']:+.1f} % | {low_s:.0f} to {high_s:.0f} "
        f"| {100 * measured['violation_ratio']:.1f} | {100 * simulated['violation_ratio']:.1f} "
        f"| {100 * low:.1f} to {100 * high:.1f} | {'yes' if row['within'] else '**no**'} "
        f"| {row['source']} |"
    )


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.faithfulness",
        description="Compare simulated with published results.",
    )
    add = line.add_argument
    add("--out", type=Path, required=True, help="the page (.md)")
    add("--json", type=Path, help="write the figures here")
    add("--episodes", type=whole_number(1), default=20, help="runs of each kind (%(default)s)")
    add("--seed", type=whole_number(0), default=0, help="what is random follows from it (0)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Compare from the command line.

    :param argv: command line, the process's own if none is given
    """
    started_s = time.monotonic()
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        if arguments.out.suffix != ".md":
            raise InputError(f"{arguments.out}: --out wants a .md file")
        for path in (arguments.out, arguments.json):
            if path is not None:
                require_writable(path)
        rows = [simulate(case, arguments.episodes, arguments.seed) for case in CASES]
        text = "\n".join(page(rows, arguments.episodes)) + "\n"
        arguments.out.write_text(text, encoding="utf-8")
        if arguments.json is not None:
            write_json(rows, arguments.json)
    within = sum(row["within"] for row in rows)
    print(
        f"{arguments.out}: {within} of {len(rows)} within bounds "
        f"({time.monotonic() - started_s:.0f} s)"
    )


if __name__ == "__main__":
    main()
