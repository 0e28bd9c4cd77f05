"""
All policies on the same load traces, at every interval and on every profile.

    python -m training.leaderboard --out docs/leaderboard.md --json leaderboard.json

Every figure follows from the seed, the profiles and the versions that the page names.
"""

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

import agents
from agents.checkpoint import find_checkpoint
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, number, require_writable, whole_number, write_json
from env.scenario import Scenario, load_scenario
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import load_profile
from training.analysis.palette import PALETTE
from training.evaluation.bound import bound_report
from training.evaluation.episodes import run_episodes, starts_from
from training.evaluation.family_comparison import (
    EPISODES,
    check_no_others,
    family_page,
    family_report,
    rule_names,
)
from training.evaluation.figures import failure_lines, fit_errors, policy_report, profile_report
from training.processes import process_pool

GENERAL = Path("checkpoints/general.zip")
FAMILY = 100
"""Drawn scenarios in a table, if nobody says how many."""

CHECKPOINT = Path("checkpoints/best.zip")
SCENARIOS = ("cca-2025", "cca-2024")
INTERVALS_S = (10.0, 5.0, 2.0, 1.0)
SEARCHED = 25
"""In so many traces of a table the best schedule is searched: 5 s of one core each."""

LEAST_SHOWN = 0.1
"""The axis of violations goes up to this at least [%]: less hardly tells policies apart."""

# What a published controller really did, for docs/faithfulness.md; no peer of the others.
NOT_RANKED = ("stats-poll-packed-as-run", "threshold-groups-as-run")
PACKAGES = ("coretide", "numpy", "numba")


@dataclass(frozen=True)
class Cell:
    """One policy on one scenario at one interval."""

    policy: str
    scenario: str
    interval_s: float
    entropy: int
    episodes: int


@cache
def scenario_of(name: str, interval_s: float) -> Scenario:
    """
    A scenario at a load interval.

    :param name: a shipped scenario's name, or a YAML file
    :param interval_s: [s]
    """
    return load_scenario(name).with_changes(load={"interval_s": interval_s})


@cache
def factory_of(name: str, interval_s: float) -> EpisodeFactory:
    """
    The episodes of a scenario at a load interval; each process prepares them once.

    :param name: a shipped scenario's name, or a YAML file
    :param interval_s: [s]
    """
    scenario = scenario_of(name, interval_s)
    return EpisodeFactory(scenario, load_profile(scenario.profile))


def measure(cell: Cell) -> dict[str, Any]:
    """
    A policy's figures; see `training.evaluation.figures.policy_report`.

    :param cell: what to run
    """
    factory = factory_of(cell.scenario, cell.interval_s)
    policy = agents.make(cell.policy)
    runs = run_episodes(policy, factory, starts_from(cell.entropy, cell.episodes))
    return policy_report(policy.name, runs)


def bounds(cell: Cell) -> dict[str, Any]:
    """
    How far the best possible is on the cell's traces; see `training.evaluation.bound.bound_report`.

    :param cell: whose scenario, interval and traces
    """
    factory = factory_of(cell.scenario, cell.interval_s)
    return bound_report(factory, starts_from(cell.entropy, cell.episodes), SEARCHED)


def ranked_policies(scenario: str) -> list[str]:
    """
    Every shipped policy that is a peer of the others, the trained ones first.

    :param scenario: a checkpoint that was made for it takes part too
    """
    made = (CHECKPOINT, CHECKPOINT.with_name(f"{scenario}.zip"))
    shipped = [str(path) for path in made if find_checkpoint(path).is_file()]
    return shipped + [name for name in agents.names() if name not in NOT_RANKED]


def measure_all(
    cells: Sequence[Cell], tables: Sequence[Cell], workers: int
) -> tuple[dict[Cell, dict[str, Any]], dict[tuple[str, float], dict[str, Any]]]:
    """
    Every cell, and the bounds of every table, in parallel.

    :param cells: what to run
    :param tables: one cell of each table that is to show its bounds
    :param workers: processes
    :return: the cells' figures, and the bounds by scenario and interval
    """
    # Policies that decide most often take longest: they go first, so that none is left alone.
    order = sorted(cells, key=lambda cell: agents.make(cell.policy).period_s)
    console = Console(stderr=True)
    with (
        process_pool(workers) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("leaderboard", total=len(order) + len(tables))
        # A table's bounds take longer than any policy.
        bounding = {pool.submit(bounds, cell): cell for cell in tables}
        running = {pool.submit(measure, cell): cell for cell in order}
        results, best = {}, {}
        for future in as_completed([*bounding, *running]):
            if future in running:
                results[running[future]] = future.result()
            else:
                cell = bounding[future]
                best[cell.scenario, cell.interval_s] = future.result()
            progress.advance(bar)
    return results, best


def boards(
    cells: Sequence[Cell],
    results: dict[Cell, dict[str, Any]],
    best: dict[tuple[str, float], dict[str, Any]],
) -> list[dict[str, Any]]:
    """
    One table per scenario and interval, the fastest first.

    Policies that did not complete every episode come last.

    :param cells: what was run
    :param results: their figures
    :param best: the bounds by scenario and interval, where they were asked for
    """
    tables: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell in cells:
        tables.setdefault((cell.scenario, cell.interval_s), []).append(results[cell])
    return [
        {
            "scenario": scenario,
            "interval_s": interval_s,
            "profile": profile_report(load_profile(scenario_of(scenario, interval_s).profile)),
            "policies": sorted(entries, key=_rank),
        }
        | ({"bound": best[scenario, interval_s]} if (scenario, interval_s) in best else {})
        for (scenario, interval_s), entries in tables.items()
    ]


def _rank(entry: dict[str, Any]) -> tuple[bool, float]:
    return entry["completed"] < len(entry["runs"]), entry["makespan_s"]["mean"]


def page(content: dict[str, Any], picture: str) -> Iterator[str]:
    """
    The leaderboard as Markdown, line by line.

    :param content: what `main` collected
    :param picture: the plot's file name
    """
    yield "# Leaderboard"
    yield ""
    yield (
        f"**Every figure is simulated**, {content['episodes']} load traces a row, the same "
        "traces and random numbers for all policies; the error of the fitted profile stands "
        "above each table. ± is the 95 % confidence interval of the mean (Student's t). "
        "Violations are measurement intervals in the batch window with p95 above the SLO: mean "
        "over the traces and worst trace. A policy that was not done at the time cap, or was "
        "stopped because it raised or asked for what the machine cannot hold, counts the cap "
        "as its makespan. Thresholds are those that were published, also on the kind of VM that "
        "they were not made for. The fastest policy comes first, whatever it violates; those "
        "that were not done in every trace come last. The search behind *best found* is limited: "
        "where the gap is negative, the policy is faster than what it found."
    )
    yield ""
    yield f"![Makespan against violations, one point a policy]({picture})"
    for board in content["boards"]:
        profile = board["profile"]
        yield ""
        yield f"## {board['scenario']}, {board['interval_s']:g} s intervals"
        yield ""
        yield (
            f"Profile {profile['name']} `{profile['hash'][:16]}`; fit error: {fit_errors(profile)}."
        )
        yield ""
        bound = board.get("bound")
        if bound is not None:
            yield _bound_line(bound)
            yield ""
        gaps = "gap to bound / best found [%] | " if bound is not None else ""
        yield f"| policy | makespan [s] | violations [%] | worst [%] | {gaps}done | changes/min |"
        yield "|---|" + "--:|" * (6 if bound is not None else 5)
        for entry in board["policies"]:
            yield _row(entry, bound)
        stopped = [line for entry in board["policies"] for line in failure_lines(entry, most=1)]
        if stopped:
            yield ""
            yield "Stopped: " + "; ".join(stopped) + "."
    yield ""
    yield "## The same table again"
    yield ""
    yield f"    {content['command']}"
    yield ""
    yield (
        f"Trace seeds: `env.simulator.load.trace_seeds({content['seed']}, "
        f'{content["episodes"]}, "report")`, beginning with '
        f"{', '.join(map(str, content['trace_seeds'][:5]))}. Versions: "
        f"{', '.join(f'{name} {number}' for name, number in content['versions'].items())}."
    )


def _bound_line(bound: dict[str, Any]) -> str:
    search = bound["search_s"]
    found = "none" if search["mean"] is None else f"{search['mean']:.1f} s"
    return (
        f"No schedule beats {bound['lower_s']['mean']:.1f} s (mean); best schedule without a "
        "violation that a search which knows the trace found, in "
        f"{search['found']} of the first {search['tried']} traces: {found}; the gap to it is that "
        "on these traces (`docs/bound.md`)."
    )


def _gaps(entry: dict[str, Any], bound: dict[str, Any]) -> str:
    """How much longer a policy takes than the bound, and than the best schedules found."""
    search = bound["search_s"]
    compared = [run["makespan_s"] for run in entry["runs"][: search["tried"]]]
    pairs = (
        (entry["makespan_s"]["mean"], bound["lower_s"]["mean"]),
        (statistics.fmean(compared), search["mean"]),
    )
    return " / ".join("-" if not best else f"{100 * (own / best - 1):.1f}" for own, best in pairs)


def _row(entry: dict[str, Any], bound: dict[str, Any] | None) -> str:
    makespan, ratio = entry["makespan_s"], entry["violation_ratio"]
    interval = "" if makespan["ci95"] is None else f" ± {makespan['ci95']:.1f}"
    gaps = "" if bound is None else f"| {_gaps(entry, bound)} "
    return (
        f"| {entry['name']} | {makespan['mean']:.1f}{interval} | {100 * ratio['mean']:.2f} "
        f"| {100 * ratio['max']:.1f} {gaps}| {entry['completed']}/{len(entry['runs'])} "
        f"| {entry['actuations_per_min']:.1f} |"
    )


def draw(content: dict[str, Any], path: Path) -> None:
    """
    Makespan against violations, one point a policy, one panel a table.

    :param content: what `main` collected
    :param path: the picture to write (.png)
    """
    tables = content["boards"]
    names = sorted({entry["name"] for board in tables for entry in board["policies"]})
    markers = "osD^vP*X"
    columns = len({board["interval_s"] for board in tables})
    rows = -(-len(tables) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.8 * rows + 1.0), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    ratios = [e["violation_ratio"]["mean"] for board in tables for e in board["policies"]]
    top = 1.1 * max(LEAST_SHOWN, 100.0 * max(ratios))
    for axes, board in zip(panels, tables, strict=False):
        for entry in board["policies"]:
            place = names.index(entry["name"])
            axes.plot(
                entry["makespan_s"]["mean"],
                100.0 * entry["violation_ratio"]["mean"],
                marker=markers[place // len(PALETTE) % len(markers)],
                color=PALETTE[place % len(PALETTE)],
                markeredgecolor="black",
                markeredgewidth=0.4,
                linestyle="none",
                label=entry["name"],
            )
        axes.set_title(f"{board['scenario']}, {board['interval_s']:g} s", fontsize="medium")
        axes.set_ylim(-0.05 * top, top)  # those without violations are seen whole
        axes.grid(alpha=0.3)
        axes.set_xlabel("makespan [s]")
        axes.set_ylabel("violations [%]")
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=5, fontsize=8
    )
    figure.suptitle("Simulated: makespan against SLO violations (left and low is better)")
    figure.savefig(path, dpi=100)


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.leaderboard",
        description="Rank all policies in the simulator.",
    )
    add = line.add_argument
    add("--out", type=Path, required=True, help="the page (.md); its plot goes beside it (.png)")
    add("--json", type=Path, help="write the figures here")
    add("--policy", action="append", help="only this policy; repeat it")
    add("--scenario", action="append", help="only this scenario; repeat it")
    add("--interval", action="append", type=number(0.01), help="only this interval [s]; repeat it")
    add("--episodes", type=whole_number(1), help="load traces (100, with --family 2 each)")
    add("--seed", type=whole_number(0), default=0, help="what the traces follow from (%(default)s)")
    add("--no-bound", action="store_true", help="leave out the bounds, which take longest")
    drawn = "on N scenarios drawn from the seed instead, %(const)s if not said"
    add("--family", nargs="?", type=whole_number(1), const=FAMILY, metavar="N", help=drawn)
    add("--workers", type=whole_number(1), default=2, help="processes (%(default)s)")
    return line


def rank_family(arguments: argparse.Namespace, command: str) -> None:
    """
    Write the table of drawn scenarios.

    :param arguments: what `parser` read
    :param command: as it was given
    :raises InputError: one line that says what is wrong
    """
    apart = ("scenario", "interval", "no_bound")
    defaults = vars(parser().parse_args(["--out", "x.md"]))
    check_no_others({name: getattr(arguments, name) for name in apart}, defaults)
    check_page(arguments)
    general = [str(GENERAL)] if find_checkpoint(GENERAL).is_file() else []
    episodes = EPISODES if arguments.episodes is None else arguments.episodes
    content = family_report(
        arguments.family,
        arguments.seed,
        arguments.policy or [*general, *rule_names()],
        episodes,
        workers=arguments.workers,
    )
    arguments.out.write_text("\n".join(family_page(content, command)) + "\n", encoding="utf-8")
    if arguments.json is not None:
        write_json(content, arguments.json)


def check_page(arguments: argparse.Namespace) -> None:
    """
    Make sure that the page can be written.

    :param arguments: what `parser` read
    :raises InputError: one line that says what is wrong
    """
    if arguments.out.suffix != ".md":
        raise InputError(f"{arguments.out}: --out wants a .md file")
    for path in (arguments.out, arguments.out.with_suffix(".png"), arguments.json):
        require_writable(path)


def check(arguments: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """
    Find what is wrong before the work begins.

    :param arguments: what `parser` read
    :param cells: what is to be run
    :raises InputError: one line that says what is wrong
    """
    check_page(arguments)
    for cell in cells:
        factory_of(cell.scenario, cell.interval_s)
        agents.make(cell.policy).reset(scenario_of(cell.scenario, cell.interval_s))


def main(argv: Sequence[str] | None = None) -> None:
    """
    Make the leaderboard from the command line.

    :param argv: command line, the process's own if none is given
    """
    started_s = time.monotonic()
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    with exit_on_bad_input():
        if arguments.family is not None:
            rank_family(arguments, shlex.join(["python", "-m", "training.leaderboard", *given]))
            return
        arguments.episodes = arguments.episodes or 100
        cells = [
            Cell(policy, scenario, interval_s, arguments.seed, arguments.episodes)
            for scenario in arguments.scenario or SCENARIOS
            for interval_s in arguments.interval or INTERVALS_S
            for policy in arguments.policy or ranked_policies(scenario)
        ]
        check(arguments, cells)
        tables = {(cell.scenario, cell.interval_s): cell for cell in cells}
        bounded = [] if arguments.no_bound else list(tables.values())
        results, best = measure_all(cells, bounded, arguments.workers)
        seeds = [start.trace_seed for start in starts_from(arguments.seed, arguments.episodes)]
        content = {
            "simulated": True,
            "command": shlex.join(["python", "-m", "training.leaderboard", *given]),
            "seed": arguments.seed,
            "episodes": arguments.episodes,
            "trace_seeds": seeds,
            "versions": {"python": platform.python_version()}
            | {package: version(package) for package in PACKAGES},
            "boards": boards(cells, results, best),
        }
        picture = arguments.out.with_suffix(".png")
        draw(content, picture)
        arguments.out.write_text("\n".join(page(content, picture.name)) + "\n", encoding="utf-8")
        if arguments.json is not None:
            write_json(content, arguments.json)
    print(f"{arguments.out}: {len(cells)} rows in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
