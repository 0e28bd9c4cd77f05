"""How fast the host is, by a piece of work that is always the same."""

import itertools
import math
import os
import time

import pytest

from deploy.linux import sensors
from deploy.linux.sensors import MEASURED_EVERY_S, Yardstick


def test_the_work_is_timed_by_the_callers_own_cpu_time() -> None:
    begun_ns = time.thread_time_ns()
    us = Yardstick().read()
    assert 0.0 < us < 1e-3 * (time.thread_time_ns() - begun_ns)


def test_it_may_be_done_on_any_vcpu_the_caller_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = os.sched_getaffinity(0), list[set[int]]()

    def noted(_: int) -> float:
        seen.append(os.sched_getaffinity(0))
        return 1.0

    monkeypatch.setattr(sensors, "_loop_us", noted)
    for vcpu in own:
        assert Yardstick().read_on(vcpu) == 1.0
    assert seen[:: sensors.LOOPS] == [{vcpu} for vcpu in own]
    assert os.sched_getaffinity(0) == own


def test_it_is_done_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    yardstick, now_s = Yardstick(), 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    ticks = itertools.count(0, 130_000)
    monkeypatch.setattr(time, "thread_time_ns", lambda: next(ticks) ** 2)
    first = yardstick.read()
    now_s += 0.9 * MEASURED_EVERY_S
    assert yardstick.read() == first
    now_s += 0.2 * MEASURED_EVERY_S
    assert yardstick.read() > first and math.isfinite(first)
