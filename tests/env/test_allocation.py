"""Allocations: what has to be actuated to get from one to another, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.allocation import (
    Allocation,
    Change,
    JobAllocation,
    JobState,
    Weight,
    cores_of,
    mask_of,
)
from env.scenario import Scenario

NAMES = ("a", "b", "c")
IN_FORCE = (JobState.RUNNING, JobState.PAUSED)

core_sets = st.sets(st.integers(0, 3), min_size=1).map(lambda cores: tuple(sorted(cores)))
job_allocations = st.builds(
    JobAllocation,
    state=st.sampled_from([state for state in JobState if state != JobState.NOT_ARRIVED]),
    cores=core_sets,
    weight=st.sampled_from(Weight),
    threads=st.integers(1, 4),
    quota=st.none() | st.sampled_from((0.01, 0.5, 4.0)),
)
allocations = st.builds(
    Allocation, core_sets, st.fixed_dictionaries(dict.fromkeys(NAMES, job_allocations))
)


def carried_out(current: Allocation, changes: tuple[Change, ...]) -> Allocation:
    """What a machine holds after it was told to make these changes, one after the other."""
    service, jobs = current.service_cores, dict(current.jobs)
    for change in changes:
        if change.what == "service-cores":
            service = change.cores
            continue
        job = jobs[change.job]
        if change.what == "start":
            assert job.state == JobState.PENDING
            job = JobAllocation(
                JobState.RUNNING, change.cores, change.weight, change.threads, change.quota
            )
        elif change.what == "cores":
            job = replace(job, cores=change.cores)
        elif change.what == "weight":
            job = replace(job, weight=change.weight)
        elif change.what == "quota":
            job = replace(job, quota=change.quota)
        elif change.what == "pause":
            assert job.state == JobState.RUNNING
            job = replace(job, state=JobState.PAUSED)
        elif change.what == "resume":
            assert job.state == JobState.PAUSED
            job = replace(job, state=JobState.RUNNING)
        else:
            raise AssertionError(change)
        jobs[change.job] = job
    return Allocation(service, jobs)


def reachable(now: JobAllocation, wanted: JobAllocation) -> JobAllocation:
    """What a job can become: a launch fixes the threads, and nothing is undone or paused unborn."""
    if now.state == JobState.DONE or wanted.state not in IN_FORCE:
        return now
    if now.state == JobState.PENDING:
        return wanted if wanted.state == JobState.RUNNING else now
    return replace(wanted, threads=now.threads)


@given(allocations)
def test_equal_allocations_need_no_change(allocation: Allocation) -> None:
    assert allocation.changes_from(allocation) == ()
    shuffled = Allocation(
        tuple(reversed(allocation.service_cores)),
        {
            name: replace(job, cores=tuple(reversed(job.cores)))
            for name, job in reversed(list(allocation.jobs.items()))
        },
    )
    assert shuffled.changes_from(allocation) == ()


@given(allocations, allocations)
def test_the_changes_lead_from_one_to_the_other(current: Allocation, wanted: Allocation) -> None:
    result = carried_out(current, wanted.changes_from(current))
    assert result.service_cores == wanted.service_cores
    for name in NAMES:
        assert result.jobs[name] == reachable(current.jobs[name], wanted.jobs[name])
    assert wanted.changes_from(result) == ()


@given(allocations, allocations)
def test_every_change_changes_something(current: Allocation, wanted: Allocation) -> None:
    changes = wanted.changes_from(current)
    state = current
    for change in changes:
        after = carried_out(state, (change,))
        assert after != state
        state = after
    assert len({(change.what, change.job) for change in changes}) == len(changes)


@given(allocations, st.sampled_from(NAMES), core_sets)
def test_one_difference_is_one_change(
    allocation: Allocation, name: str, cores: tuple[int, ...]
) -> None:
    job = JobAllocation(JobState.RUNNING, allocation.jobs[name].cores, threads=2)
    now = replace(allocation, jobs={**allocation.jobs, name: job})
    moved = replace(now, jobs={**now.jobs, name: replace(job, cores=cores)})
    expected = (Change("cores", name, cores),) if cores != job.cores else ()
    assert moved.changes_from(now) == expected
    calm = replace(now, jobs={**now.jobs, name: replace(job, weight=Weight.BACKGROUND)})
    assert calm.changes_from(now) == (Change("weight", name, weight=Weight.BACKGROUND),)
    capped = replace(now, jobs={**now.jobs, name: replace(job, quota=0.5)})
    assert capped.changes_from(now) == (Change("quota", name, quota=0.5),)
    assert now.changes_from(capped) == (Change("quota", name, quota=None),)
    held = replace(now, jobs={**now.jobs, name: replace(job, state=JobState.PAUSED)})
    assert held.changes_from(now) == (Change("pause", name),)
    assert now.changes_from(held) == (Change("resume", name),)
    grown = replace(now, service_cores=(0, 1, 2, 3))
    expected = (Change("service-cores", cores=(0, 1, 2, 3)),)
    assert grown.changes_from(now) == (() if len(now.service_cores) == 4 else expected)


def test_a_start_carries_everything_the_launch_needs() -> None:
    wanted = Allocation(
        (0,), {"a": JobAllocation(JobState.RUNNING, (2, 3), Weight.BACKGROUND, 4, quota=1.5)}
    )
    assert wanted.changes_from(Allocation((0,))) == (
        Change("start", "a", (2, 3), Weight.BACKGROUND, 4, 1.5),
    )


def test_a_job_that_is_not_named_is_left_alone() -> None:
    now = Allocation((0,), {"a": JobAllocation(JobState.RUNNING, (1,), threads=1)})
    assert Allocation((0,)).changes_from(now) == ()


@given(st.sets(st.integers(0, 61)))
def test_a_mask_is_a_core_set(cores: set[int]) -> None:
    assert cores_of(mask_of(tuple(cores))) == tuple(sorted(cores))
    assert mask_of(tuple(cores)).bit_count() == len(cores)


# --- validation -------------------------------------------------------------------------------


def test_what_the_machine_can_hold_is_valid(scenario: Scenario) -> None:
    allocation = Allocation(
        (0,),
        {
            "radix": JobAllocation(JobState.RUNNING, (1, 2), threads=2, quota=4.0),
            "vips": JobAllocation(JobState.PENDING),
        },
    )
    assert allocation.validate(scenario) is allocation


@pytest.mark.parametrize(
    ("allocation", "named"),
    [
        (Allocation(()), "memcached"),
        (Allocation((0, 4)), "memcached"),
        (Allocation((0,), {"lu_cb": JobAllocation()}), "lu_cb: unknown job"),
        (Allocation((0,), {"vips": JobAllocation(JobState.RUNNING, (), threads=1)}), "vips: cores"),
        (
            Allocation((0,), {"vips": JobAllocation(JobState.RUNNING, (-1,), threads=1)}),
            "vips: cores",
        ),
        (
            Allocation((0,), {"radix": JobAllocation(JobState.PAUSED, (1,), threads=3)}),
            "radix: 3 threads; allowed are",
        ),
        *(
            (
                Allocation(
                    (0,), {"vips": JobAllocation(JobState.RUNNING, (1,), threads=1, quota=q)}
                ),
                f"vips: quota {q:g}; allowed are 0.01 to 4 vCPUs, or none",
            )
            for q in (0.0, -1.0, 0.009, 4.1, math.inf, math.nan)
        ),
    ],
)
def test_what_the_machine_cannot_hold_is_named(
    scenario: Scenario, allocation: Allocation, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        allocation.validate(scenario)
