"""Policies whose jobs come and go: what they know of all else stays known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import agents
from agents.general_checkpoint import GeneralCheckpoint
from agents.policy import Policy
from agents.ppo.attention_network import RELATIONS, shapes
from agents.ppo.general_policy import GeneralPolicy
from env.allocation import Allocation, JobAllocation, JobState
from env.errors import InputError
from env.scenario import Job, Scenario
from env.sets.tokens import HOST
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry

STRANGER = Job(name="stranger", command=("true",), threads=(1, 2), memory_mib=64)
OPEN = ("first-come", "sequential", "concurrent", "perfiso", "parties", "heracles")
CLOSED = ("threshold-groups", "shared-background", "static", "stats-poll-packed")


def network() -> GeneralPolicy:
    """A network of random weights, which has opinions."""
    rng = np.random.default_rng(3)
    widths = {
        "embed_0_weight": np.zeros((32, HOST), np.float32),
        "biases_0": np.zeros((2, RELATIONS), np.float32),
        "widen_0_weight": np.zeros((64, 32), np.float32),
        "ask_weight": np.zeros((48, 64), np.float32),
    }
    arrays = {
        name: (0.3 * rng.normal(size=shape)).astype(np.float32)
        for name, shape in shapes(widths).items()
    }
    return GeneralPolicy(GeneralCheckpoint(Path("network"), {}, arrays), "network")


def make(name: str) -> Policy:
    return network() if name == "network" else agents.make(name)


@pytest.mark.parametrize("name", [*OPEN, "network"])
def test_telling_a_policy_of_the_jobs_it_has_changes_nothing(name: str, scenario: Scenario) -> None:
    told, left_alone = make(name), make(name)
    machine = SimulatedMachine(EpisodeFactory(scenario))
    machine.begin(2333, np.random.default_rng(1))
    for policy in (told, left_alone):
        policy.reset(scenario)
    machine.probe(1.0)
    for turn in range(120):
        if turn % 7 == 3:
            told.change_jobs(scenario)
        seen = machine.telemetry()
        desired = told.decide(seen)
        assert desired == left_alone.decide(seen), turn
        machine.apply(desired)
        machine.advance(seen.time_s + told.period_s, told.wakes)


@pytest.mark.parametrize("name", [*OPEN, "network"])
def test_a_job_that_nobody_knows_is_run_among_others_and_forgotten(
    name: str, scenario: Scenario
) -> None:
    """It comes before the others, so that theirs are other places in every table."""
    policy = make(name)
    machine = SimulatedMachine(EpisodeFactory(scenario))
    machine.begin(2333, np.random.default_rng(1))
    policy.reset(scenario)
    machine.probe(1.0)
    for _ in range(60):
        seen = machine.telemetry()
        machine.apply(policy.decide(seen).validate(scenario))
        machine.advance(seen.time_s + policy.period_s, policy.wakes)
    more = scenario.with_jobs([STRANGER, *scenario.jobs])
    policy.change_jobs(more)
    seen = machine.telemetry()
    jobs = {STRANGER.name: JobTelemetry(JobState.PENDING, 0.0), **seen.jobs}
    held = {STRANGER.name: JobAllocation(threads=2), **seen.applied.jobs}
    after = replace(seen, jobs=jobs, applied=replace(seen.applied, jobs=held))
    policy.decide(after).validate(more)
    policy.change_jobs(scenario)
    assert STRANGER.name not in policy.decide(machine.telemetry()).validate(scenario).jobs


@pytest.mark.parametrize("name", [*OPEN, "network"])
def test_a_queue_that_is_empty_is_decided_for_until_a_job_comes(
    name: str, scenario: Scenario
) -> None:
    policy = make(name)
    empty, one = scenario.with_jobs(()), scenario.with_jobs([STRANGER])
    policy.reset(empty)
    service = ServiceTelemetry(0.0, 0.0, 0.0, 20000.0, 0.5, p95_us=300.0)
    idle = (0.0,) * scenario.machine.vcpus
    applied = Allocation(scenario.service.core_choices[-1])
    for turn in range(5):
        seen = Telemetry(0.5 * turn, service, idle, {}, applied)
        applied = policy.decide(seen).validate(empty)
    policy.change_jobs(one)
    applied = replace(applied, jobs={STRANGER.name: JobAllocation()})
    jobs = {STRANGER.name: JobTelemetry(JobState.PENDING, 0.0)}
    policy.decide(Telemetry(3.0, service, idle, jobs, applied)).validate(one)


@pytest.mark.parametrize("name", CLOSED)
def test_a_rule_that_arranges_its_jobs_beforehand_takes_no_others(
    name: str, scenario: Scenario
) -> None:
    policy = agents.make(name)
    policy.reset(scenario)
    with pytest.raises(InputError, match=f"policy {name}: arranges its jobs beforehand"):
        policy.change_jobs(scenario)


def test_a_rule_that_must_know_the_work_says_whose(scenario: Scenario) -> None:
    policy = agents.make("shortest-first")
    policy.reset(scenario)
    policy.change_jobs(scenario.with_jobs(scenario.jobs[:2]))
    with pytest.raises(InputError, match="profile cca-2025 does not have that of stranger"):
        policy.change_jobs(scenario.with_jobs([STRANGER]))


def test_a_checkpoint_for_certain_jobs_takes_no_others(scenario: Scenario) -> None:
    policy = agents.make("best.zip")
    policy.reset(scenario)
    with pytest.raises(InputError, match="was trained for certain jobs"):
        policy.change_jobs(scenario)
