"""How fast the host is, by a piece of work that is always the same."""

import errno
import itertools
import math
import os
import time

import pytest

from deploy.linux import sensors
from deploy.linux.sensors import MEASURED_AT_ONCE, MEASURED_EVERY_S, Yardstick


def everywhere() -> list[int]:
    """The vCPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def test_the_work_is_timed_by_the_callers_own_cpu_time() -> None:
    begun_ns = time.thread_time_ns()
    us = Yardstick(everywhere()).read()
    assert 0.0 < us < 1e-3 * (time.thread_time_ns() - begun_ns)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Where each piece of the work is done; on vCPU n it takes n + 1 us."""
    seen = list[set[int]]()

    def noted(_: int) -> float:
        seen.append(os.sched_getaffinity(0))
        return 1.0 + min(seen[-1])

    monkeypatch.setattr(sensors, "_loop_us", noted)
    return seen


def test_vcpus_take_turns_and_the_caller_may_run_where_it_might_before(
    seen: list[set[int]],
) -> None:
    own = everywhere()
    yardstick = Yardstick(own, every_s=0.0)
    read_us = [yardstick.read() for _ in own]
    done = seen[:: sensors.LOOPS]
    at_once = min(MEASURED_AT_ONCE, len(own))
    assert len(done) == at_once * len(own) and all(done.count({vcpu}) == at_once for vcpu in own)
    for number, us in enumerate(read_us):
        places = done[number * at_once : (number + 1) * at_once]
        assert us == pytest.approx(at_once / sum(1.0 / (1 + min(one)) for one in places))
    assert everywhere() == own


def test_on_no_vcpu_of_its_own_it_is_done_where_the_caller_is(seen: list[set[int]]) -> None:
    own = everywhere()
    assert Yardstick([max(own) + 1]).read() > 0.0
    assert set.union(*seen) <= set(own) and everywhere() == own


def test_a_vcpu_that_is_taken_away_costs_a_reading_and_nothing_more(
    seen: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    yardstick = Yardstick(everywhere(), every_s=0.0)
    before = yardstick.read()

    def refused(_: int, __: set[int]) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    assert yardstick.read() == before


def test_it_is_done_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    yardstick, now_s = Yardstick(everywhere()), 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    ticks = itertools.count(0, 130_000)
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(ticks) ** 2)
    first = yardstick.read()
    now_s += 0.9 * MEASURED_EVERY_S
    assert yardstick.read() == first
    now_s += 0.2 * MEASURED_EVERY_S
    assert yardstick.read() > first and math.isfinite(first)
