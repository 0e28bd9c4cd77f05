"""Requests are neither lost nor made, and a backlog drains when the equations say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.physics.backlog import backlog_after, served_qps, time_to_drain

RATES = st.floats(1.0, 300e3)
BACKLOGS = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))


@given(BACKLOGS, RATES, RATES, st.floats(1e-6, 100.0))
def test_what_is_not_served_is_served_later(
    backlog: float, load_qps: float, capacity_qps: float, step_s: float
) -> None:
    step_s = min(step_s, time_to_drain(backlog, load_qps, capacity_qps))
    served = served_qps(backlog, load_qps, capacity_qps) * step_s
    after = backlog_after(backlog, load_qps, capacity_qps, step_s)
    assert after >= 0.0 and served <= capacity_qps * step_s
    assert served + after == pytest.approx(backlog + load_qps * step_s, rel=1e-9, abs=2e-3)


@given(st.floats(1e-3, 1e6), RATES, RATES)
def test_a_backlog_is_gone_when_it_is_said_to_be(
    backlog: float, load_qps: float, capacity_qps: float
) -> None:
    drained_s = time_to_drain(backlog, load_qps, capacity_qps)
    if load_qps >= capacity_qps:
        assert drained_s == math.inf
    else:
        assert backlog_after(backlog, load_qps, capacity_qps, drained_s) == 0.0


def test_who_keeps_up_has_nothing_to_drain() -> None:
    assert time_to_drain(0.0, 10e3, 100e3) == math.inf
    assert served_qps(0.0, 10e3, 100e3) == 10e3
    assert served_qps(1.0, 10e3, 100e3) == served_qps(0.0, 200e3, 100e3) == 100e3
