"""Background jobs that are as many as their vCPUs have one each, and keep it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.loop.spreading import spread
from env.allocation import Allocation, JobAllocation, JobState, Weight

BOTH = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
NAMES = ("dedup", "radix", "vips")


def allocation(*jobs: JobAllocation) -> Allocation:
    return Allocation((0,), dict(zip(NAMES, jobs, strict=False)))


def cores(found: Allocation) -> list[tuple[int, ...]]:
    return [job.cores for job in found.jobs.values()]


def test_two_jobs_on_two_vcpus_have_one_each_whoever_is_paused_beside_them() -> None:
    paused = replace(BOTH, state=JobState.PAUSED)
    assert cores(spread(allocation(BOTH, paused, BOTH), {})) == [(0,), (0, 1), (1,)]


def test_who_has_a_vcpu_keeps_it_and_one_that_two_have_goes_to_the_first() -> None:
    assert cores(spread(allocation(BOTH, BOTH), {"dedup": (1,), "radix": (0, 1)})) == [(1,), (0,)]
    assert cores(spread(allocation(BOTH, BOTH), {"dedup": (1,), "radix": (1,)})) == [(1,), (0,)]
    assert cores(spread(allocation(BOTH, BOTH), {"dedup": (7,), "radix": (0,)})) == [(1,), (0,)]


@pytest.mark.parametrize(
    "other",
    [
        replace(BOTH, threads=2),
        replace(BOTH, weight=Weight.NORMAL),
        replace(BOTH, quota=0.5),
        replace(BOTH, cores=(1,)),
        replace(BOTH, state=JobState.PAUSED),
        replace(BOTH, state=JobState.PENDING),
    ],
)
def test_jobs_that_might_leave_a_vcpu_idle_stay_together(other: JobAllocation) -> None:
    together = allocation(BOTH, other)
    assert spread(together, {"dedup": (0,), "radix": (1,)}) is together


JOBS = st.builds(
    JobAllocation,
    state=st.sampled_from(JobState),
    cores=st.sampled_from([(0,), (1,), (0, 1), (0, 1, 2)]),
    weight=st.sampled_from(Weight),
    threads=st.sampled_from([1, 2]),
    quota=st.sampled_from([None, 0.5]),
)


@given(
    st.lists(st.one_of(st.just(BOTH), JOBS), max_size=3),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([(), (0,), (1,), (2,), (0, 1)])),
)
def test_nobody_gains_a_vcpu_and_each_stays_somebodys(
    jobs: list[JobAllocation], before: dict[str, tuple[int, ...]]
) -> None:
    wanted = allocation(*jobs)
    found = spread(wanted, before)
    changed = [name for name in wanted.jobs if found.jobs[name] != wanted.jobs[name]]
    for name in changed:
        assert replace(found.jobs[name], cores=wanted.jobs[name].cores) == wanted.jobs[name]
    running = {name for name, job in wanted.jobs.items() if job.state == JobState.RUNNING}
    assert set(changed) in (set(), running)
    if changed:
        mine = [found.jobs[name].cores for name in changed]
        assert sorted(core for each in mine for core in each) == list(wanted.jobs[changed[0]].cores)
        assert {len(each) for each in mine} == {1}
