"""Jobs that arrive during an episode, in hosts with room for scenarios of all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import agents
from env.allocation import Allocation, JobAllocation, JobState
from env.errors import InputError
from env.reward import UNIT_S
from env.scenario import FAMILY_ROOM, Scenario, load_scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from training.evaluation.episodes import Run, run_episode, starts_from

LATE_S = 20.0


def late_scenario() -> Scenario:
    """The shipped problem with two short jobs, of which the second arrives after `LATE_S`."""
    scenario = load_scenario("cca-2025")
    jobs = [job.model_dump() for job in scenario.jobs if job.name in ("dedup", "radix")]
    jobs[1]["arrival_s"] = LATE_S
    return Scenario.model_validate(scenario.model_dump() | {"jobs": jobs})


@pytest.fixture(scope="module")
def factory() -> EpisodeFactory:
    return EpisodeFactory(late_scenario(), room=FAMILY_ROOM)


def begun(factory: EpisodeFactory) -> SimulatedMachine:
    machine = SimulatedMachine(factory)
    machine.begin(1, np.random.default_rng(0))
    return machine


def test_nobody_sees_or_starts_a_job_before_it_arrives(factory: EpisodeFactory) -> None:
    machine = begun(factory)
    table = factory.table
    start = next(i for i in range(len(table)) if table.describe(i).startswith("start radix"))
    row = np.empty(factory.observation_size, np.float32)
    wanted = JobAllocation(JobState.RUNNING, (2, 3), threads=1)
    machine.apply(Allocation((0, 1), {"radix": wanted}))
    machine.advance(LATE_S - 1.0)
    machine.observe(row)
    assert machine.telemetry().jobs["radix"].state == JobState.NOT_ARRIVED
    assert row[len(row) - len(table) + start] == 0.0
    machine.apply(Allocation((0, 1), {"radix": wanted}))  # decided by the load as it is
    machine.advance(LATE_S + 5.0, wake=True)
    assert machine.telemetry().time_s == pytest.approx(LATE_S, abs=0.03)  # the policy is woken
    machine.observe(row)
    assert machine.telemetry().jobs["radix"].state == JobState.PENDING
    assert row[len(row) - len(table) + start] == 1.0
    machine.apply(Allocation((0, 1), {"radix": wanted}))
    machine.advance(LATE_S + 2.0)
    assert machine.telemetry().jobs["radix"].state == JobState.RUNNING


def test_the_reward_counts_completion_times_where_jobs_arrive(factory: EpisodeFactory) -> None:
    run = greedy_run(factory)
    mean_s = float(np.mean(run.jct_s))
    assert run.completed
    assert run.summary["reward_terms"]["jct"] == pytest.approx(-mean_s / UNIT_S)
    assert run.summary["jobs"]["radix"]["arrival_s"] == LATE_S
    assert run.summary["jobs"]["radix"]["start_s"] > LATE_S
    assert run.mean_slowdown > 1.0
    together = late_scenario().model_dump()
    together["jobs"] = [job | {"arrival_s": 0.0} for job in together["jobs"]]
    calm = greedy_run(EpisodeFactory(Scenario.model_validate(together), room=FAMILY_ROOM))
    assert calm.summary["reward_terms"]["jct"] == 0.0


def greedy_run(factory: EpisodeFactory) -> Run:
    """An episode of somebody who starts whatever may be started."""
    machine = begun(factory)
    n_edits, ended = len(factory.table), 0
    row = np.empty(factory.observation_size, np.float32)
    while not ended:
        machine.observe(row)
        starts = [i for i in range(1, n_edits) if factory.table.describe(i).startswith("start")]
        legal = [edit for edit in starts if row[len(row) - n_edits + edit]]
        ended, _ = machine.step(legal[0] if legal else 0, 1.0)
    return Run(1, machine.summary())


@pytest.mark.parametrize(
    ("name", "makespan_s"), [("cca-2025", 765.5123216866652), ("local", None)]
)  # local's load generator runs on its last vCPU
def test_a_host_with_room_to_spare_is_the_same_machine(name: str, makespan_s: float | None) -> None:
    figures: list[Any] = []
    for room in (None, FAMILY_ROOM):
        machine = SimulatedMachine(EpisodeFactory(load_scenario(name), room=room))
        runs = [run_episode(machine, agents.make("perfiso"), start) for start in starts_from(0, 1)]
        figures.append([run.summary for run in runs])
    assert figures[0] == figures[1]
    if makespan_s is not None:
        assert figures[0][0]["makespan_s"] == pytest.approx(makespan_s)


def test_a_scenario_that_a_host_has_no_room_for_is_refused() -> None:
    with pytest.raises(InputError, match=r"machine\.vcpus: 17; a host has room for 16"):
        EpisodeFactory(load_scenario("prm-2020"), room=FAMILY_ROOM)


def test_a_job_cannot_arrive_after_the_load() -> None:
    content = late_scenario().model_dump()
    content["jobs"][1]["arrival_s"] = 1800.0
    with pytest.raises(ValueError, match=r"radix\.arrival_s: 1800 is not before the load's end"):
        Scenario.model_validate(content)
