"""Background jobs that are as many as their vCPUs have one each once one is idle, and keep it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.linux.sensors import VcpuClock
from deploy.loop.spreading import LOOK_S, Cores, Spreading, spread
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


class Vcpus(VcpuClock):
    """Two vCPUs, and how busy they have been."""

    def __init__(self) -> None:
        self.now_s, self.busy_s = 0.0, [0.0, 0.0]

    def read(self) -> tuple[float, ...]:
        return tuple(self.busy_s)

    def go_on(self, *busy: float) -> float:
        """Let time pass until the next look, in which the vCPUs are busy for these parts of it."""
        self.now_s += LOOK_S
        for vcpu, part in enumerate(busy):
            self.busy_s[vcpu] += part * LOOK_S
        return self.now_s


@pytest.fixture
def apart() -> tuple[Spreading, Vcpus]:
    """Two jobs that have just been moved apart, dedup to vCPU 0."""
    vcpus = Vcpus()
    spreading = Spreading(vcpus)
    spreading.look(TWO, 0.0)
    spreading.look(TWO, vcpus.go_on(1.0, 0.8))
    assert spreading.own(TWO) == {"dedup": (0,), "radix": (1,)}
    return spreading, vcpus


def test_nobody_is_moved_while_both_vcpus_are_busy() -> None:
    vcpus = Vcpus()
    spreading = Spreading(vcpus)
    for busy in (1.0, 0.5):  # before the first look somebody else ran, or nobody
        spreading.look(TWO, vcpus.go_on(busy, 1.0))
        assert spreading.own(TWO) == {}
        spreading.look(TWO, vcpus.go_on(0.95, 1.0))
        assert spreading.own(TWO) == {}
        spreading.look({"dedup": BOTH}, vcpus.go_on(1.0, 0.5))


def test_who_stays_keeps_its_vcpu_and_who_comes_is_moved_only_where_one_is_idle(
    apart: tuple[Spreading, Vcpus],
) -> None:
    spreading, vcpus = apart
    now = {"vips": BOTH, "radix": BOTH}
    assert spreading.own(now) == {"radix": (1,)}
    spreading.look(now, vcpus.go_on(0.5, 1.0))  # most of that time another one ran
    assert spreading.own(now) == {"radix": (1,)}
    spreading.look(now, vcpus.go_on(1.0, 1.0))
    assert spreading.own(now) == {"radix": (1,)}
    spreading.look(now, vcpus.go_on(0.8, 1.0))
    assert spreading.own(now) == {"vips": (0,), "radix": (1,)}


def test_who_is_alone_at_a_look_has_all_its_vcpus_again(apart: tuple[Spreading, Vcpus]) -> None:
    spreading, vcpus = apart
    left = {"radix": BOTH}
    assert spreading.own(left) == {"radix": (1,)}
    spreading.look(left, vcpus.go_on(0.0, 1.0))
    assert spreading.own(left) == spreading.own(TWO) == {}


def test_nobody_keeps_a_vcpu_that_is_not_allocated_any_more(
    apart: tuple[Spreading, Vcpus],
) -> None:
    spreading, _ = apart
    elsewhere = {name: replace(BOTH, cores=(1, 2)) for name in TWO}
    assert spreading.own(elsewhere) == {"radix": (1,)}
