"""Plans run in the simulator: published ones take what was reported, and orders are kept."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import minimize_scalar

from env.cluster.cluster_scenario import NodeType, load_cluster
from env.cluster.plan import ClusterPlan, load_plan, plan_names
from training.placement.makespan_bound import makespan_bound
from training.placement.plan_simulation import WATCH_S, ClusterSimulator

CLUSTER = load_cluster("cca-part3")
PLANNED = Path(__file__).with_name("planned.yaml")
"""What `python -m training.place --scenario cca-part3` finds."""


def with_place(plan: ClusterPlan, job: str, **fields: object) -> ClusterPlan:
    jobs = tuple(
        place.model_copy(update=fields) if place.name == job else place for place in plan.jobs
    )
    return plan.model_copy(update={"jobs": jobs})


@pytest.mark.parametrize("name", plan_names())
def test_a_published_plan_takes_what_was_reported(name: str) -> None:
    plan = load_plan(name, CLUSTER)
    runs = ClusterSimulator(CLUSTER).run(plan)
    assert plan.reported is not None
    assert runs.makespans[0] == pytest.approx(plan.reported.makespan_s, rel=0.1)
    assert runs.violations[0] == 0 and runs.intervals[0] > 10


@pytest.mark.parametrize("kind", [kind for kind in CLUSTER.nodes if "031" in kind.job_speed.source])
def test_the_speeds_are_those_that_group_031s_job_times_say(kind: NodeType) -> None:
    """Least squares in seconds; the spread is that of the jobs around it, 0.1 of one job alone."""
    plan = load_plan("group-031", CLUSTER)
    jobs = [job.name for node in kind.nodes for job in plan.on(node)]
    own = [CLUSTER.job_names.index(job) for job in jobs]
    assert plan.reported is not None
    measured_s = np.array([plan.reported.job_s[job] for job in jobs])

    def durations_s(speed: float) -> npt.NDArray[np.float64]:
        job_speed = kind.job_speed.model_copy(update={"value": speed})
        changed = kind.model_copy(update={"job_speed": job_speed})
        nodes = tuple(changed if other == kind else other for other in CLUSTER.nodes)
        runs = ClusterSimulator(CLUSTER.model_copy(update={"nodes": nodes})).run(plan)
        return (runs.end_s - runs.start_s)[0, own]

    def squares(speed: float) -> float:
        return float(((durations_s(speed) - measured_s) ** 2).sum())

    fitted = minimize_scalar(squares, bounds=(0.2, 5.0), method="bounded").x
    assert kind.job_speed.value == pytest.approx(fitted, abs=0.001)
    off = np.log(durations_s(fitted) / measured_s)
    spread = 0.1 if len(jobs) == 1 else off.std(ddof=1)
    assert kind.job_speed.spread == pytest.approx(spread, abs=0.001)


def test_the_planned_one_beats_the_published_ones_and_not_the_bound() -> None:
    simulator = ClusterSimulator(CLUSTER)
    planned = simulator.run(load_plan(PLANNED, CLUSTER))
    published = [simulator.run(load_plan(name, CLUSTER)).makespans[0] for name in plan_names()]
    assert planned.makespans[0] <= 0.95 * min(published)
    assert planned.violations[0] == 0
    assert makespan_bound(CLUSTER) <= planned.makespans[0]


def test_a_job_starts_when_the_one_it_waits_for_has_ended_on_whatever_node() -> None:
    simulator, names = ClusterSimulator(CLUSTER), CLUSTER.job_names
    plan = load_plan("group-031", CLUSTER)
    vips, radix = names.index("vips"), names.index("radix")
    for waiting in (plan, with_place(plan, "radix", after=("vips",))):
        runs = simulator.run(waiting)
        before = names.index(waiting.job("radix").after[0])
        waited_s = runs.start_s[0, radix] - runs.end_s[0, before]
        assert CLUSTER.pod_start_s <= waited_s <= CLUSTER.pod_start_s + 2 * WATCH_S
    # What waits on another node leaves the others as they were.
    assert runs.end_s[0, vips] == simulator.run(plan).end_s[0, vips]


def test_draws_spread_around_the_stated_speeds() -> None:
    plan = load_plan("group-031", CLUSTER)
    stated, drawn = ClusterSimulator(CLUSTER).run(plan), ClusterSimulator(CLUSTER, 9).run(plan)
    canneal = CLUSTER.job_names.index("canneal")
    # The only job of its node: an even spread around what it takes at the stated speed.
    durations = (drawn.end_s - drawn.start_s)[:, canneal]
    stated_s = (stated.end_s - stated.start_s)[0, canneal]
    assert np.median(durations) == pytest.approx(stated_s, rel=0.01)
    assert durations.std() / stated_s == pytest.approx(0.09, abs=0.02)
    again = ClusterSimulator(CLUSTER, 9).run(plan)
    assert (again.end_s == drawn.end_s).all()


def test_a_node_without_memcached_counts_no_interval_and_one_with_it_all() -> None:
    plan = load_plan("group-031", CLUSTER)
    runs = ClusterSimulator(CLUSTER).run(plan)
    assert runs.intervals[0] == runs.end_s[0].max() // CLUSTER.service.load.interval_s
