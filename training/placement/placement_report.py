"""What a plan search says: figures as JSON, a table, and one picture of the best plan by node."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from env.cluster.cluster_scenario import ClusterScenario
from env.cluster.plan import ClusterPlan
from env.errors import InputError, os_reason
from training.analysis.palette import PALETTE
from training.placement.plan_simulation import ClusterSimulator, PlanRuns

DRAWS = 64
"""Draws of the nodes' speeds that the figures are over."""


@dataclass(frozen=True)
class EvaluatedPlan:
    """
    A plan and its runs.

    :param plan: the plan
    :param stated: its run at the speeds as they are stated
    :param drawn: its runs at drawn ones
    """

    plan: ClusterPlan
    stated: PlanRuns
    drawn: PlanRuns

    @property
    def makespan_s(self) -> float:
        """The mean over the draws [s]."""
        return float(self.drawn.makespans.mean())

    def figures(self) -> dict[str, float]:
        """What the JSON file has of it."""
        return {
            "makespan_s": self.makespan_s,
            "p90_s": float(np.quantile(self.drawn.makespans, 0.9)),
            "violation_ratio": self.drawn.violation_ratio,
        }


class PlanEvaluator:
    """
    Evaluates plans, all by the same draws.

    :param cluster: the problem
    """

    def __init__(self, cluster: ClusterScenario):
        self._stated, self._drawn = ClusterSimulator(cluster), ClusterSimulator(cluster, DRAWS)

    def evaluate(self, plan: ClusterPlan) -> EvaluatedPlan:
        """
        Run a plan.

        :param plan: a plan that fits the cluster
        """
        return EvaluatedPlan(plan, self._stated.run(plan), self._drawn.run(plan))


def placement_report(
    evaluated: list[EvaluatedPlan], bound_s: float, seconds: float
) -> dict[str, Any]:
    """
    The search, ready for JSON.

    :param evaluated: the plans
    :param bound_s: what no plan beats at the stated speeds [s]
    :param seconds: what the search took [s]
    """
    plans = {one.plan.name: one.figures() for one in evaluated}
    return {"plans": plans, "bound_s": bound_s, "seconds": seconds}


def show_placement(evaluated: list[EvaluatedPlan], bound_s: float, console: Console) -> None:
    """
    Print the plans beside each other.

    :param evaluated: the plans
    :param bound_s: what no plan beats at the stated speeds [s]
    :param console: where to print
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("plan")
    for column in ("reported [s]", "stated speeds [s]", "mean [s]", "p90 [s]", "violated"):
        table.add_column(column, justify="right")
    for one in evaluated:
        figures, reported = one.figures(), one.plan.reported
        table.add_row(
            one.plan.name,
            f"{reported.makespan_s:g}" if reported else "-",
            f"{one.stated.makespans[0]:.1f}",
            f"{figures['makespan_s']:.1f}",
            f"{figures['p90_s']:.1f}",
            f"{figures['violation_ratio']:.2%}",
        )
    table.add_row("bound", "-", f"{bound_s:.1f}", "-", "-", "-")
    console.print(table)
    console.print(
        f"simulated; mean, p90 and violated intervals over {DRAWS} draws of the nodes' speeds"
    )


def draw_plan(evaluated: EvaluatedPlan, cluster: ClusterScenario, path: Path) -> None:
    """
    Draw who has which vCPU of which node when, at the stated speeds.

    :param evaluated: the plan
    :param cluster: the problem
    :param path: the picture's file
    :raises InputError: if it cannot be written
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plan, runs = evaluated.plan, evaluated.stated
    rows = [
        (node, vcpu)
        for node in cluster.node_names
        for vcpu in range(cluster.type_of(node).machine.vcpus)
    ]
    height = {row: len(rows) - 1 - index for index, row in enumerate(rows)}
    figure, axes = pyplot.subplots(figsize=(9.0, 0.35 * len(rows) + 1.2), layout="constrained")
    end_s = float(runs.end_s.max())
    for vcpu in plan.service.vcpus:
        middle = height[plan.service.node, vcpu]
        axes.barh(middle, end_s, color="#DDDDDD", edgecolor="white")
        axes.text(end_s / 2, middle, "memcached", ha="center", va="center", fontsize=8)
    for index, name in enumerate(cluster.job_names):
        place = plan.job(name)
        start, end = float(runs.start_s[0, index]), float(runs.end_s[0, index])
        for vcpu in place.vcpus:
            # Jobs that share a vCPU share its row.
            beside = [
                other.name
                for other in plan.on(place.node)
                if vcpu in other.vcpus and _overlap(runs, cluster, name, other.name)
            ]
            part = 0.9 / len(beside)
            y = height[place.node, vcpu] - 0.45 + part * (beside.index(name) + 0.5)
            colour = PALETTE[index % len(PALETTE)]
            axes.barh(y, end - start, part, left=start, color=colour, edgecolor="white")
            axes.text((start + end) / 2, y, name, ha="center", va="center", fontsize=7)
    for first, second in itertools.pairwise(rows):
        if first[0] != second[0]:
            axes.axhline(height[first] - 0.5, color="black", linewidth=0.8)
    axes.set_yticks([height[row] for row in rows], [f"{node}  {vcpu}" for node, vcpu in rows])
    axes.set_xlabel("time [s]")
    axes.set_title(f"{plan.name}: {runs.makespans[0]:.0f} s, simulated")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be written ({reason})") from error
    finally:
        pyplot.close(figure)


def _overlap(runs: PlanRuns, cluster: ClusterScenario, one: str, other: str) -> bool:
    """Whether two jobs run at the same time; a job does beside itself."""
    first, second = cluster.job_names.index(one), cluster.job_names.index(other)
    latest_start = max(runs.start_s[0, first], runs.start_s[0, second])
    return bool(latest_start < min(runs.end_s[0, first], runs.end_s[0, second]))
