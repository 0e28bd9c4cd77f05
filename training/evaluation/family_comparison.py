"""
Policies on scenarios of the family, each against the best rule that is as safe there.

    python -m training.evaluate --family 200 --seed 1 --policy perfiso --json results.json

Which rule is best is asked anew in each scenario, so that nobody is compared with a rule that was
lucky on average. Where all jobs are there from the start makespans are compared, and where jobs
arrive their mean completion times.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.special import stdtrit

import agents
from env.errors import InputError
from env.family.arrivals import follow_trace, read_trace
from env.family.drawing import draw, drawn_names
from env.scenario import Scenario, load_scenario
from env.simulator.machine import EpisodeFactory
from training.evaluation.episodes import Run, run_episodes, starts_from
from training.evaluation.figures import completion_times, policy_table
from training.evaluation.schedule_search import short_search
from training.processes import process_pool

EPISODES = 2
"""Load traces of each scenario, if nobody says how many."""

AS_RUN = "-as-run"
"""Ending of rules that show what a published controller really did; they are no peers."""


@dataclass(frozen=True)
class FamilyCell:
    """
    What one process runs: all policies on one drawn scenario.

    :param scenario: its name
    :param policies: names of the policies
    :param entropy: what the load traces follow from
    :param episodes: number of load traces
    :param trace: file with times of arrival that its jobs follow, none if empty
    :param evaluations: schedules tried on each load trace; 0 for no search
    """

    scenario: str
    policies: tuple[str, ...]
    entropy: int
    episodes: int
    trace: str = ""
    evaluations: int = 0


@dataclass(frozen=True)
class CellResult:
    """
    What a cell's process has found.

    :param runs: of each policy, those on the load traces
    :param searched_s: what the best schedule found takes on each, infinite where there is none
    """

    runs: list[list[Run]]
    searched_s: list[float]


def rule_names() -> list[str]:
    """The shipped rules that a policy is compared with."""
    return [name for name in agents.names() if not name.endswith(AS_RUN)]


def scenario_of_cell(cell: FamilyCell) -> Scenario:
    """
    The scenario that a cell runs.

    :param cell: names it, and the trace that its jobs follow
    :raises InputError: if the trace cannot be read
    """
    scenario = load_scenario(cell.scenario)
    if not cell.trace:
        return scenario
    content = scenario.model_dump()
    index = int(cell.scenario.rpartition("-")[2])
    rng = np.random.default_rng([cell.entropy, index])
    follow_trace(content, read_trace(cell.trace), draw(cell.scenario).span_s, rng)
    last_s = max(job["arrival_s"] for job in content["jobs"])
    content["load"]["duration_s"] = math.ceil(last_s + scenario.load.duration_s)
    return Scenario.model_validate(content)


def measure_cell(cell: FamilyCell) -> CellResult:
    """
    Every policy's runs on a cell's scenario, on the same traces, and what a search finds there.

    :param cell: what to run
    """
    factory = EpisodeFactory(scenario_of_cell(cell))
    starts = starts_from(cell.entropy, cell.episodes)
    runs = [run_episodes(agents.make(name), factory, starts) for name in cell.policies]
    searches = starts if cell.evaluations else []
    return CellResult(runs, [short_search(factory, start, cell.evaluations) for start in searches])


def measured_cells(cells: Sequence[FamilyCell], workers: int) -> list[CellResult]:
    """
    What all cells come to, with a progress bar on a terminal.

    :param cells: what to run
    :param workers: processes
    """
    console = Console(stderr=True)
    shown = partial(track, console=console, transient=True, disable=not console.is_terminal)
    if workers == 1:
        return [measure_cell(cell) for cell in shown(cells, "family")]
    with process_pool(workers) as pool:
        return list(shown(pool.map(measure_cell, cells), "family", total=len(cells)))


def family_report(
    count: int,
    seed: int,
    policies: Sequence[str],
    episodes: int = EPISODES,
    trace: str = "",
    evaluations: int = 0,
    workers: int = 1,
) -> dict[str, Any]:
    """
    Policies on drawn scenarios, ready for JSON.

    :param count: number of scenarios
    :param seed: what they and their load traces follow from
    :param policies: names of the policies to report on
    :param episodes: load traces of each scenario
    :param trace: file with times of arrival that all jobs follow, none if empty
    :param evaluations: schedules that a search tries on each load trace; 0 for no search
    :param workers: processes
    :raises InputError: if a policy or the trace is none
    """
    rules = rule_names()
    everyone = tuple(dict.fromkeys([*policies, *rules]))
    for name in everyone:
        agents.make(name)
    if trace:
        read_trace(trace)
    cells = [
        FamilyCell(name, everyone, seed, episodes, trace, evaluations)
        for name in drawn_names("report", seed, count)
    ]
    measured = measured_cells(cells, workers)
    runs = {name: [of.runs[index] for of in measured] for index, name in enumerate(everyone)}
    searched = [of.searched_s for of in measured]
    arrivals = [scenario_of_cell(cell).has_arrivals for cell in cells]
    return {
        "family": count,
        "seed": seed,
        "episodes": episodes,
        "trace": trace,
        "with_arrivals": sum(arrivals),
        "policies": [
            policy_entry(name, runs, {rule: runs[rule] for rule in rules}, cells, arrivals)
            | (
                {"ratio_to_search": search_ratio(runs[name], searched, arrivals)}
                if evaluations
                else {}
            )
            for name in dict.fromkeys(policies)
        ],
    }


def policy_entry(
    name: str,
    runs: dict[str, list[list[Run]]],
    rules: dict[str, list[list[Run]]],
    cells: Sequence[FamilyCell],
    arrivals: Sequence[bool],
) -> dict[str, Any]:
    """
    A policy's figures.

    :param name: the policy's name
    :param runs: of every policy, for each scenario those on its traces
    :param rules: the same of the rules that it is compared with
    :param cells: the scenarios
    :param arrivals: in which of them jobs arrive
    """
    own = runs[name]
    makespans: list[float] = []
    jcts: list[float] = []
    scenarios: list[dict[str, Any]] = []
    for index, arrive in enumerate(arrivals):
        figure = partial(counted_s, arrive=arrive)
        best = best_safe(own[index], [of[index] for of in rules.values()], figure)
        ratio = None if best is None else figure(own[index]) / best
        if ratio is not None:
            (jcts if arrive else makespans).append(ratio)
        drawn = load_scenario(cells[index].scenario)
        scenarios.append(
            {
                "scenario": drawn.name,
                "vcpus": drawn.machine.vcpus,
                "jobs": len(drawn.jobs),
                "arrivals": arrive,
                "ratio": ratio,
                "violation_ratio": mean_violations(own[index]),
            }
        )
    flat = [run for of in own for run in of]
    jct_ratio = geometric_mean(jcts)
    return {
        "name": name,
        "violation_ratio": float(np.mean([run.violation_ratio for run in flat])),
        "completed": sum(run.completed for run in flat),
        "ratio_to_best_safe_rule": geometric_mean(makespans) | {"scenarios": len(makespans)},
        "jct_ratio": jct_ratio["geomean"],
        "jct_ratio_ci95": jct_ratio["ci95"],
        **completion_times(flat),
        "scenarios": scenarios,
        "runs": [
            {
                "scenario": cell.scenario,
                "seed": run.seed,
                "makespan_s": run.makespan_s,
                "mean_jct_s": run.mean_jct_s,
                "p95_jct_s": run.p95_jct_s,
                "slowdown": run.mean_slowdown,
                "violation_ratio": run.violation_ratio,
                "completed": run.completed,
                "error": run.error,
            }
            for cell, of in zip(cells, own, strict=True)
            for run in of
        ],
    }


def search_ratio(
    own: Sequence[Sequence[Run]], searched: Sequence[Sequence[float]], arrivals: Sequence[bool]
) -> dict[str, Any]:
    """
    How much longer a policy takes than the schedules that know the load, where there are any.

    :param own: the policy's runs, for each scenario those on its traces
    :param searched: what the best schedule found takes on each [s]
    :param arrivals: in which scenarios jobs arrive, so that their mean completion time counts
    :return: the geometric mean over all traces, its interval and how many they are, and the same of
        makespans and of completion times by themselves
    """
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for of, found, arrive in zip(own, searched, arrivals, strict=True):
        ratios[arrive] += [
            counted_s([run], arrive) / best
            for run, best in zip(of, found, strict=True)
            if math.isfinite(best)
        ]

    def figures(some: list[float]) -> dict[str, Any]:
        return geometric_mean(some) | {"traces": len(some)}

    makespans, jcts = ratios[False], ratios[True]
    return figures(makespans + jcts) | {"makespan": figures(makespans), "jct": figures(jcts)}


def best_safe(own: Sequence[Run], rules: Sequence[Sequence[Run]], figure: Any) -> float | None:
    """
    The best figure of a rule that is done on every trace and violates no more than a policy.

    :param own: the policy's runs on one scenario
    :param rules: each rule's runs on the same traces
    :param figure: of some runs, the smaller the better
    :return: None if no rule is as safe
    """
    limit = mean_violations(own) + 1e-12
    safe = [of for of in rules if all(run.completed for run in of) and mean_violations(of) <= limit]
    return min((figure(of) for of in safe), default=None)


def geometric_mean(ratios: Sequence[float]) -> dict[str, Any]:
    """
    The geometric mean and its 95 % confidence interval (Student's t of the logarithms).

    :param ratios: one a scenario; without any, both are None
    """
    logs = np.log(ratios)
    if not len(logs):
        return {"geomean": None, "ci95": None}
    mean = float(logs.mean())
    interval = None
    if len(logs) > 1:
        margin = float(stdtrit(len(logs) - 1, 0.975) * logs.std(ddof=1) / math.sqrt(len(logs)))
        interval = [math.exp(mean - margin), math.exp(mean + margin)]
    return {"geomean": math.exp(mean), "ci95": interval}


def mean_violations(runs: Sequence[Run]) -> float:
    """
    The mean share of intervals violated.

    :param runs: on one scenario
    """
    return float(np.mean([run.violation_ratio for run in runs]))


def counted_s(runs: Sequence[Run], arrive: bool) -> float:
    """
    What counts: the mean makespan, or where jobs arrive their mean completion time [s].

    :param runs: on one scenario
    :param arrive: whether its jobs arrive
    """
    return float(np.mean([run.mean_jct_s if arrive else run.makespan_s for run in runs]))


def _has(field: str, least: int, most: int, scenario: dict[str, Any]) -> bool:
    """Whether a scenario's size lies in a range."""
    return least <= int(scenario[field]) <= most


COLUMNS = ("makespan", "JCT", "violated", "done", "JCT, s", "p95, s", "slowdown")


def rows(content: dict[str, Any], with_intervals: bool = False) -> Iterator[tuple[str, ...]]:
    """
    A row a policy: its name, then `COLUMNS`; the smallest makespan ratio first.

    :param content: what `family_report` made
    :param with_intervals: whether ratios come with their confidence intervals
    """

    def rank(entry: dict[str, Any]) -> tuple[int, float]:
        ratio = entry["ratio_to_best_safe_rule"]["geomean"] or entry["jct_ratio"] or math.inf
        return -entry["completed"], ratio

    for entry in sorted(content["policies"], key=rank):
        ratio = entry["ratio_to_best_safe_rule"]
        yield (
            entry["name"],
            _ratio(ratio["geomean"], ratio["ci95"] if with_intervals else None),
            _ratio(entry["jct_ratio"], entry["jct_ratio_ci95"] if with_intervals else None),
            f"{100 * entry['violation_ratio']:.2f} %",
            f"{entry['completed']}/{len(entry['runs'])}",
            f"{entry['jct_s']['mean']:.1f}",
            f"{entry['jct_s']['p95']:.1f}",
            f"{entry['slowdown']:.2f}",
        )


def _ratio(geomean: float | None, interval: list[float] | None) -> str:
    if geomean is None:
        return "-"
    return f"{geomean:.3f}" + (f" ({interval[0]:.3f}-{interval[1]:.3f})" if interval else "")


def show_family(content: dict[str, Any]) -> None:
    """
    Print the table.

    :param content: what `family_report` made
    """
    view = policy_table(
        f"SIMULATED: {content['family']} drawn scenarios, {content['with_arrivals']} with "
        f"arrivals, {content['episodes']} load traces each",
        "Ratios to the best rule that is as safe in each scenario: makespan where all jobs "
        "are there from the start, mean job completion time where they arrive.",
        COLUMNS,
    )
    for row in rows(content):
        view.add_row(*row)
    Console().print(view)
    sizes = policy_table(
        "SIMULATED, by vCPUs (C) and jobs (J)",
        "Ratios to the best rule that is as safe, of makespans or mean job completion times; "
        "scenarios for training are never of a size with a star.",
        tuple(title for title, _ in SIZES),
    )
    for entry in content["policies"]:
        sizes.add_row(entry["name"], *size_cells(entry))
    Console().print(sizes)
    if any("ratio_to_search" in entry for entry in content["policies"]):
        Console().print(_search_table(content))


def _search_table(content: dict[str, Any]) -> Table:
    kinds = {"makespan": "makespan", "jct": "JCT"}
    table = policy_table(
        "SIMULATED, over the best schedule found for each load trace",
        "Ratios to the best of the schedules that a search tried; the search knows the load.",
        tuple(title for kind in kinds.values() for title in (kind, "traces")),
    )
    for entry in content["policies"]:
        found = [entry["ratio_to_search"][kind] for kind in kinds]
        cells = [(_ratio(of["geomean"], of["ci95"]), str(of["traces"])) for of in found]
        table.add_row(entry["name"], *itertools.chain(*cells))
    return table


SIZES: tuple[tuple[str, Callable[[dict[str, Any]], bool]], ...] = (
    *((f"{n} C", partial(_has, "vcpus", n, n)) for n in (2, 4, 8, 16)),
    *((f"{n} C*", partial(_has, "vcpus", n, n)) for n in (6, 12)),
    ("1-4 J", partial(_has, "jobs", 1, 4)),
    ("5-12 J", partial(_has, "jobs", 5, 12)),
    ("13-20 J*", partial(_has, "jobs", 13, 20)),
)
"""Groups of scenarios: what a table calls them, and which belong to them."""


def size_cells(entry: dict[str, Any]) -> list[str]:
    """
    A policy's ratio in each group of `SIZES`.

    :param entry: see `policy_entry`
    """
    known = [one for one in entry["scenarios"] if one["ratio"] is not None]
    groups = ([one["ratio"] for one in known if belongs(one)] for _, belongs in SIZES)
    return [_ratio(geometric_mean(ratios)["geomean"], None) for ratios in groups]


def family_page(content: dict[str, Any], command: str) -> Iterator[str]:
    """
    The table as Markdown, line by line.

    :param content: what `family_report` made
    :param command: that made it
    """
    yield "# Leaderboard of the scenario family"
    yield ""
    yield (
        f"**Every figure is simulated**, on {content['family']} scenarios drawn from "
        f"`env/scenarios/family.yaml` ({content['with_arrivals']} with jobs that arrive), "
        f"{content['episodes']} load traces each, the same for all. Ratios are geometric means "
        "over the scenarios, with their 95 % intervals, to the best rule that violates no more "
        "than the policy in that scenario: of makespans where all jobs are there from the start, "
        "of mean job completion times (JCT) where they arrive. Slowdown is the JCT over what the "
        "job takes alone on the machine."
    )
    yield ""
    yield f"| policy | {' | '.join(COLUMNS)} |"
    yield "|---|" + "--:|" * len(COLUMNS)
    for row in rows(content, with_intervals=True):
        yield f"| {' | '.join(row)} |"
    yield ""
    yield f"    {command}"


def check_no_others(given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """
    Make sure that no option was given which a drawn scenario leaves no room for.

    :param given: the options that do not go with `--family`, by name
    :param defaults: what they are where nobody gave them
    :raises InputError: naming the first that was
    """
    for option, value in given.items():
        if value != defaults[option]:
            raise InputError(f"--{option.replace('_', '-')}: does not go with --family")
