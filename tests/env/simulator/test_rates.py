"""Rates: how memcached answers and falls behind under an allocation, whatever the parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.codes import STALL
from env.physics.service import service_state
from env.simulator import kernel
from tests.conftest import Rig
from tests.env.simulator.walks import (
    DONE,
    SCENARIO,
    VARIED,
    host_value,
    seeds,
    walk,
    walks,
)

# --- jobs -------------------------------------------------------------------------------------


@walks
@given(seeds)
def test_every_request_is_served_or_waits(seed: int) -> None:
    offered = 0.0
    for before, after in walk(seed):
        if after["true_state"].min() == DONE:
            break  # what is counted beyond the end completes the last interval
        step_s = after["now_s"] - before["now_s"]
        offered += before["due_qps"] * step_s
        waiting = after["backlog"] + after["held"]
        if after["hiccup"] == STALL:
            waiting += after["due_qps"] * (after["now_s"] - after["due_since_s"])
        assert after["requests"] + waiting == pytest.approx(offered, abs=1.0)
        assert after["requests"] >= before["requests"]
        assert after["service_cpu_s"] >= before["service_cpu_s"]
        assert after["service_wait_s"] >= before["service_wait_s"]
        assert after["backlog"] >= 0.0
        if after["backlog"] > before["backlog"] and before["hiccup"] != STALL:
            assert before["load_qps"] > before["capacity_qps"]
        served = after["requests"] - before["requests"]
        assert served <= before["capacity_qps"] * step_s + 1e-6
        if before["backlog"] > 0.0:  # whoever is behind answers as fast as possible
            assert served == pytest.approx(before["capacity_qps"] * step_s, abs=1e-3)


def test_a_backlog_builds_and_drains(rig: Rig) -> None:
    """Ten seconds above what one vCPU serves, then ten far below."""
    rig.begin(1, [20_000.0, 175_000.0, 20_000.0])
    rig.set_desired((0,), regulator_on=False)
    kernel.advance(rig.row, rig.targets, 9.9)
    assert rig.row["backlog"] == 0.0
    calm_us = float(rig.row["p95_us"])
    capacity = float(rig.row["capacity_qps"])
    assert 20_000.0 < capacity < 175_000.0
    kernel.advance(rig.row, rig.targets, 15.0)
    assert rig.row["backlog"] == pytest.approx((175_000.0 - rig.row["capacity_qps"]) * 5.0)
    plateau_us = float(rig.row["p95_us"])
    assert plateau_us > SCENARIO.service.slo_us > calm_us
    kernel.advance(rig.row, rig.targets, 20.0)
    peak = float(rig.row["backlog"])
    drained_at_s = 20.0 + peak / (rig.row["capacity_qps"] - 20_000.0)
    assert 20.0 < drained_at_s < 30.0
    kernel.advance(rig.row, rig.targets, drained_at_s - 0.01)
    assert 0.0 < rig.row["backlog"] < 0.02 * rig.row["capacity_qps"]
    assert rig.row["p95_us"] == pytest.approx(plateau_us)
    kernel.advance(rig.row, rig.targets, drained_at_s + 0.01)
    assert rig.row["backlog"] == 0.0
    assert rig.row["p95_us"] == pytest.approx(calm_us)
    assert rig.row["requests"] == pytest.approx(
        10.0 * (20_000.0 + 175_000.0) + 20_000.0 * (drained_at_s + 0.01 - 20.0)
    )


def test_more_vcpus_end_an_overload_at_once(rig: Rig) -> None:
    rig.begin(1, [175_000.0])
    rig.set_desired((0,), regulator_on=False)
    kernel.advance(rig.row, rig.targets, 2.0)
    behind = float(rig.row["backlog"])
    assert behind > 0.0
    rig.set_desired((0, 1), regulator_on=False)
    kernel.advance(rig.row, rig.targets, 2.0 + 2 * host_value("fast_latency_s"))
    assert rig.row["capacity_qps"] > 175_000.0
    kernel.advance(rig.row, rig.targets, 2.1)
    assert rig.row["backlog"] < behind


@st.composite
def services(draw: st.DrawFn) -> dict[str, Any]:
    """A load, a set of vCPUs with one more to come, and batch work everywhere else."""
    rig = Rig(VARIED)
    rig.begin(draw(st.integers(0, 200)))
    fraction = st.floats(0.0, 1.0)
    extra = draw(st.integers(0, 3))
    others = [vcpu for vcpu in range(4) if vcpu != extra]
    held = draw(st.sets(st.sampled_from(others), min_size=1))
    background, equal = np.zeros(4), np.zeros(4)
    for vcpu in others:
        background[vcpu] = draw(fraction)
        equal[vcpu] = draw(fraction) * (1.0 - background[vcpu])
    return {
        "qps": draw(st.floats(1.0, 400_000.0)),
        "threads": draw(st.integers(1, 4)),
        "mask": sum(1 << vcpu for vcpu in held),
        "extra": extra,
        "background": background,
        "equal": equal,
        "pressure": draw(st.floats(0.0, 3.0)),
        "sibling": rig.row["sibling"].copy(),
        "params": rig.row["service_params"].copy(),
    }


def answer(case: dict[str, Any], **changes: Any) -> tuple[float, float, float]:
    """p95 [us], capacity [requests/s] and CPU use [vCPUs]."""
    given_ = {**case, **changes}
    names = ("qps", "threads", "mask", "sibling", "background", "equal")
    where = [given_[name] for name in names]
    p95_us, capacity_qps, cpu, _ = service_state(
        *where, np.zeros(4), given_["pressure"], given_["params"]
    )
    return p95_us, capacity_qps, cpu


@settings(max_examples=300)
@given(services())
def test_an_idle_vcpu_more_never_raises_p95(case: dict[str, Any]) -> None:
    p95_us, capacity_qps, _ = answer(case)
    more_us, more_qps, _ = answer(case, mask=case["mask"] | 1 << case["extra"])
    assert more_us <= p95_us * (1.0 + 1e-9)
    assert more_qps >= capacity_qps * (1.0 - 1e-9)


@settings(max_examples=200)
@given(services(), st.floats(1.0, 2.0))
def test_more_load_never_lowers_p95(case: dict[str, Any], factor: float) -> None:
    p95_us, capacity_qps, cpu = answer(case)
    more_us, same_qps, more_cpu = answer(case, qps=case["qps"] * factor)
    assert same_qps == capacity_qps
    assert more_us >= p95_us * (1.0 - 1e-9)
    assert more_cpu >= cpu * (1.0 - 1e-9)
    assert 0.0 < cpu <= case["mask"].bit_count()


@settings(max_examples=200)
@given(services(), st.integers(0, 3))
def test_less_batch_work_never_hurts(case: dict[str, Any], vcpu: int) -> None:
    p95_us, capacity_qps, _ = answer(case)
    background, equal = case["background"].copy(), case["equal"].copy()
    background[vcpu] = equal[vcpu] = 0.0
    calm_us, calm_qps, _ = answer(case, background=background, equal=equal)
    assert calm_qps >= capacity_qps * (1.0 - 1e-9)
    assert calm_us <= p95_us * (1.0 + 1e-9)
