"""
The best plan that a search finds for a cluster, beside those that were published.

    python -m training.place --scenario cca-part3 --out plan.yaml --json place.json

The search is simulated annealing over the simulator, some runs side by side. Its plan goes to
`deploy.py --cluster`.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from env.cluster.cluster_scenario import ClusterScenario, load_cluster
from env.cluster.plan import ClusterPlan, check_plan, load_plan, plan_names, save_plan
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, whole_number, write_json
from training.placement.makespan_bound import makespan_bound
from training.placement.placement_report import (
    EvaluatedPlan,
    PlanEvaluator,
    draw_plan,
    placement_report,
    show_placement,
)
from training.placement.plan_search import PlanSearch, as_plan, in_turn
from training.processes import process_pool

RUNS, EVALUATIONS = 4, 6000
"""Runs of the search, and candidates that each one tries."""

WORKERS = 2


def parser() -> OneLineParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m training.place", description="Search for a plan of a cluster."
    )
    add = line.add_argument
    add("--scenario", default="cca-part3", help="a cluster scenario or a YAML file (%(default)s)")
    add("--out", type=Path, required=True, help="write the best plan here")
    add("--json", type=Path, help="write the figures here")
    add("--picture", type=Path, help="draw the best plan by node into this file")
    add("--seed", type=whole_number(0), default=0, help="seed of the search (%(default)s)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Plan as the command line says.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    with exit_on_bad_input():
        cluster = load_cluster(arguments.scenario)
        outputs = (arguments.out, arguments.json, arguments.picture)
        for path in outputs:
            require_writable(path)
        began_s = time.monotonic()
        evaluator = PlanEvaluator(cluster)
        published = [load_plan(name) for name in plan_names()]
        known = [plan for plan in published if plan.scenario == cluster.name]
        for plan in known:
            check_plan(plan, cluster)
        evaluated = [
            evaluator.evaluate(plan) for plan in known
        ]  # compiles what the processes share
        best = best_plan(cluster, evaluator, arguments.seed)
        evaluated.insert(0, best)
        bound_s = makespan_bound(cluster)
        seconds = time.monotonic() - began_s
        save_plan(best.plan, arguments.out)
        if arguments.json:
            write_json(placement_report(evaluated, bound_s, seconds), arguments.json)
        if arguments.picture:
            draw_plan(best, cluster, arguments.picture)
        show_placement(evaluated, bound_s, Console())


def best_plan(cluster: ClusterScenario, evaluator: PlanEvaluator, seed: int) -> EvaluatedPlan:
    """
    The best plan of several runs of the search.

    :param cluster: the problem
    :param evaluator: of what each run has found
    :param seed: what the search follows from
    :raises InputError: if no run finds a plan that fits and keeps the SLO
    """
    with process_pool(WORKERS) as pool:
        runs = range(seed * RUNS, seed * RUNS + RUNS)
        plans = list(pool.map(_search, [cluster] * RUNS, runs))
    evaluated = [evaluator.evaluate(plan) for plan in plans if plan is not None]
    kept = [one for one in evaluated if not one.drawn.violations.any()]
    if not kept:
        raise InputError(
            f"scenario {cluster.name}: no plan found that fits the nodes and keeps the SLO of "
            f"{cluster.service.slo_us:g} us"
        )
    return min(kept, key=lambda one: one.makespan_s)


def _search(cluster: ClusterScenario, run: int) -> ClusterPlan | None:
    """The plan of one run, or none if it does not fit."""
    search = PlanSearch(cluster, run)
    node = cluster.service.node or cluster.node_names[run % len(cluster.node_names)]
    _, candidate = search.anneal(in_turn(cluster, node), EVALUATIONS)
    plan = as_plan(candidate, cluster)
    try:
        check_plan(plan, cluster)
    except InputError:
        return None
    return plan
