"""What an evaluation says: figures with their confidence, as JSON and on the terminal."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table

from env.scenario import Scenario
from env.simulator.profile import Profile, Scatter, content_hash
from training.evaluation.endless_work import speed_alone, throughputs
from training.evaluation.episodes import Run
from training.evaluation.timeline import Interval
from training.statistics import mean_and_ci95
from training.violations import drawn_violations, violation_probability

FloatArray = npt.NDArray[np.float64]


def policy_report(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """
    A policy's figures, ready for JSON.

    :param name: what the table calls it
    :param runs: its episodes
    """
    makespan, ci95 = mean_and_ci95([run.makespan_s for run in runs])
    ratios = [run.violation_ratio for run in runs]
    return {
        "name": name,
        "makespan_s": {"mean": makespan, "ci95": ci95},
        "violation_ratio": {"mean": float(np.mean(ratios)), "max": max(ratios)},
        "completed": sum(run.completed for run in runs),
        "actuations_per_min": float(np.mean([run.actuations_per_min for run in runs])),
        "most_pauses_per_min": max(run.pauses_per_min for run in runs),
        "failures": [{"seed": run.seed, "error": run.error} for run in runs if run.error],
        "runs": [
            {
                "seed": run.seed,
                "makespan_s": run.makespan_s,
                "violation_ratio": run.violation_ratio,
            }
            for run in runs
        ],
    }


def completion_times(runs: Sequence[Run]) -> dict[str, Any]:
    """
    What counts where jobs arrive, ready for JSON: means over the runs.

    :param runs: a policy's episodes
    """
    return {
        "jct_s": {
            "mean": float(np.mean([run.mean_jct_s for run in runs])),
            "p95": float(np.mean([run.p95_jct_s for run in runs])),
        },
        "slowdown": float(np.mean([run.mean_slowdown for run in runs])),
    }


def counted_p95(intervals: Sequence[Interval], run: Run) -> FloatArray:
    """
    Simulated p95 of a run's intervals that count: those from the first job's start on [us].

    :param intervals: all of them, in their order
    :param run: the run
    """
    before = len(intervals) - int(run.summary["intervals"])
    return np.array([interval.p95_us for interval in intervals[before:]])


def expected_violations(
    p95_us: Sequence[FloatArray], slo_us: float, scatter: Scatter | None
) -> dict[str, float] | None:
    """
    Violation ratio to be expected where it is measured: mean, and 90 % interval of one run.

    It is that of a VM as fast as the simulated one: the scatter is of VMs whose speed was known.

    :param p95_us: each run's simulated p95, see `counted_p95`
    :param slo_us: the latency objective [us]
    :param scatter: of measured p95 around simulated ones; None where it is not known
    :return: None without it or without intervals
    """
    counted = [run for run in p95_us if len(run)]
    if scatter is None or not counted:
        return None
    drawn = [drawn_violations(run, slo_us, scatter) / len(run) for run in counted]
    low, high = np.quantile(np.concatenate(drawn), (0.05, 0.95))
    means = [float(violation_probability(run, slo_us, scatter).mean()) for run in counted]
    return {"mean": float(np.mean(means)), "p5": float(low), "p95": float(high)}


def profile_report(profile: Profile) -> dict[str, Any]:
    """
    What a simulated figure is shown with.

    :param profile: the fitted parameters behind it
    """
    return {
        "name": profile.name,
        "hash": profile.hash or content_hash(profile),
        "fit_error": dict(profile.fit_error),
    }


def fit_errors(profile: dict[str, Any]) -> str:
    """
    The errors on runs that the fit did not see, on one line; the profile's file has the rest.

    :param profile: what `profile_report` made
    """
    shown = [
        f"{name} {value:.3g}"
        for name, value in profile["fit_error"].items()
        if name.startswith("left-out") and "lookup" not in name and "known" not in name
    ]
    return ", ".join(shown) or "not fitted"


def report(
    scenario: Scenario,
    profile: Profile,
    results: Sequence[tuple[str, Sequence[Run]]],
    expected: Sequence[dict[str, float] | None],
) -> dict[str, Any]:
    """
    The evaluation, ready for JSON.

    :param scenario: the problem
    :param profile: the fitted parameters behind the simulator
    :param results: policy names with their runs
    :param expected: what `expected_violations` says of each policy
    """
    policies = [
        policy_report(name, runs) | {"expected_violations": violations}
        for (name, runs), violations in zip(results, expected, strict=True)
    ]
    if scenario.has_arrivals and not scenario.endless:
        for entry, (_, runs) in zip(policies, results, strict=True):
            entry |= completion_times(runs)
    if scenario.endless:
        alone = speed_alone(scenario, profile)
        for entry, (_, runs) in zip(policies, results, strict=True):
            mean, ci95 = mean_and_ci95(throughputs(runs, alone))
            entry["throughput"] = {"mean": mean, "ci95": ci95}
    return {
        "scenario": scenario.name,
        "interval_s": scenario.load.interval_s,
        "episodes": len(results[0][1]),
        "profile": profile_report(profile),
        "policies": policies,
    }


def policy_table(title: str, caption: str, columns: Sequence[str]) -> Table:
    """
    An empty table for the terminal with a policy a row.

    :param title: what stands above it
    :param caption: what stands below it
    :param columns: heads of the columns after the policy's name
    """
    view = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, caption=caption
    )
    view.add_column("policy", no_wrap=True)
    for column in columns:
        view.add_column(column, justify="right", no_wrap=True)
    return view


def table(content: dict[str, Any]) -> Table:
    """
    The report as a table for the terminal.

    :param content: what `report` made
    """
    profile = content["profile"]
    columns: tuple[str, ...]
    if any("throughput" in entry for entry in content["policies"]):
        columns, cells = ("best-effort", "QoS met", "worst", "ran"), _endless_cells
    elif any("jct_s" in entry for entry in content["policies"]):
        columns, cells = ("JCT, s", "p95, s", "slowdown", "violations", "done"), _arrival_cells
    else:
        columns, cells = ("makespan, s", "violations", "worst", "done"), _cells
    view = policy_table(
        f"SIMULATED: {content['scenario']}, {content['interval_s']:g} s intervals, "
        f"{content['episodes']} episode{'s' * (content['episodes'] != 1)}",
        f"Simulated, not measured. Profile {profile['name']} {profile['hash'][:12]}; "
        f"fit error: {fit_errors(profile)}",
        (*columns, "changes/min"),
    )
    for entry in content["policies"]:
        view.add_row(
            entry["name"],
            *cells(entry),
            f"{entry['actuations_per_min']:.1f}",
        )
    return view


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    makespan, ratio = entry["makespan_s"], entry["violation_ratio"]
    return (
        f"{makespan['mean']:.1f}{_margin(makespan['ci95'])}",
        f"{100 * ratio['mean']:.2f} %",
        f"{100 * ratio['max']:.2f} %",
        f"{entry['completed']}/{len(entry['runs'])}",
    )


def _arrival_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Jobs that arrive: their completion times, and how much longer than alone that is."""
    jct = entry["jct_s"]
    return (
        f"{jct['mean']:.1f}",
        f"{jct['p95']:.1f}",
        f"{entry['slowdown']:.2f}",
        f"{100 * entry['violation_ratio']['mean']:.2f} %",
        f"{entry['completed']}/{len(entry['runs'])}",
    )


def _endless_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Jobs that never end: their throughput, and the share of intervals within the SLO."""
    throughput, ratio, runs = entry["throughput"], entry["violation_ratio"], len(entry["runs"])
    margin = None if throughput["ci95"] is None else 100 * throughput["ci95"]
    return (
        f"{100 * throughput['mean']:.1f}{_margin(margin)} %",
        f"{100 * (1 - ratio['mean']):.2f} %",
        f"{100 * (1 - ratio['max']):.2f} %",
        f"{runs - len(entry['failures'])}/{runs}",
    )


def _margin(ci95: float | None) -> str:
    return "" if ci95 is None else f" ± {ci95:.1f}"


def show(content: dict[str, Any]) -> None:
    """
    Print the table, and what went wrong in which episode.

    :param content: what `report` made
    """
    console = Console()
    console.print(table(content))
    if "bound" in content:
        lower, search = content["bound"]["lower_s"], content["bound"]["search_s"]
        found = "none" if search["mean"] is None else f"{search['mean']:.1f} s"
        # Where jobs arrive the search is for another figure than the bound.
        of = ", by mean JCT" if "jct_s" in content["policies"][0] else ""
        console.print(
            f"no schedule's makespan is below {lower['mean']:.1f} s; best schedule found{of}, "
            f"without a violation, in {search['found']} of {search['tried']} episodes: {found} "
            "(simulated)"
        )
    for entry in content["policies"]:
        if entry["expected_violations"] is not None:
            line = expected_line(entry["name"], entry["expected_violations"])
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in failure_lines(entry):
            console.print(line, style="red", markup=False, soft_wrap=True)


def expected_line(name: str, expected: dict[str, float]) -> str:
    """
    What a policy's violations would be on a machine, on one line.

    :param name: the policy's name
    :param expected: what `expected_violations` made
    """
    mean, low, high = (f"{100 * expected[key]:.1f}" for key in ("mean", "p5", "p95"))
    return (
        f"{name}: on a machine {mean} % violations are to be expected, "
        f"{low} to {high} % (90 %) a run"
    )


def failure_lines(entry: dict[str, Any], most: int = 3) -> list[str]:
    """
    Which episodes a policy was stopped in, and why.

    :param entry: what `policy_report` made
    :param most: how many to name
    """
    failures = entry["failures"]
    lines = [
        f"{entry['name']}: trace seed {failure['seed']}, {failure['error']}"
        for failure in failures[:most]
    ]
    if len(failures) > most:
        lines.append(f"{entry['name']}: and {len(failures) - most} more")
    return lines
