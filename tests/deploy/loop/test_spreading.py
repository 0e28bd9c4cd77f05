"""Background jobs that are as many as their vCPUs have one each, and keep it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.loop.spreading import Cores, spread
from env.allocation import JobAllocation, JobState, Weight

BOTH = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
TWO = {"dedup": BOTH, "radix": BOTH}


def test_two_jobs_on_two_vcpus_have_one_each() -> None:
    assert spread(TWO, {}) == {"dedup": (0,), "radix": (1,)}


@pytest.mark.parametrize(
    ("before", "dedup"),
    [
        ({"dedup": (1,)}, (1,)),
        ({"radix": (0,)}, (1,)),
        ({"dedup": (7,), "radix": (0,)}, (1,)),
        ({"dedup": (1,), "radix": (1,)}, (1,)),
    ],
)
def test_who_had_a_vcpu_keeps_it_and_one_that_two_had_is_the_firsts(
    before: dict[str, Cores], dedup: Cores
) -> None:
    assert spread(TWO, before) == {"dedup": dedup, "radix": (1 - dedup[0],)}


@pytest.mark.parametrize(
    "other",
    [
        replace(BOTH, threads=2),
        replace(BOTH, weight=Weight.NORMAL),
        replace(BOTH, quota=0.5),
        replace(BOTH, cores=(1,)),
    ],
)
def test_jobs_of_which_one_might_idle_a_vcpu_stay_together(other: JobAllocation) -> None:
    assert spread({"dedup": BOTH, "radix": other}, {"dedup": (0,), "radix": (1,)}) == {}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_jobs_or_more_than_vcpus_stay_together(count: int) -> None:
    assert spread({f"job-{number}": BOTH for number in range(count)}, {}) == {}


@given(
    st.sets(st.integers(0, 15), min_size=1).map(lambda some: tuple(sorted(some))),
    st.lists(st.integers(0, 15), max_size=16),
)
def test_each_vcpu_is_somebodys_and_a_vcpu_of_ones_own_is_kept(
    cores: Cores, before: list[int]
) -> None:
    jobs = {f"job-{number}": replace(BOTH, cores=cores) for number in range(len(cores))}
    had = {f"job-{number}": (core,) for number, core in enumerate(before)}
    found = spread(jobs, had)
    assert sorted(found.values()) == [(core,) for core in cores]
    for name in found.keys() & had.keys():
        if had[name][0] in cores and list(had.values()).count(had[name]) == 1:
            assert found[name] == had[name]
