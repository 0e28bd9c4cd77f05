"""Sensing: what a latency probe and event counters show, and how it scatters."""

from __future__ import annotations

import numpy as np
import pytest

from env.allocation import Allocation, JobAllocation
from env.simulator.machine import SimulatedMachine
from tests.env.simulator.walks import (
    CALM,
    FACTORY,
    RUNNING,
)


def probing(window_s: float, targets: list[float]) -> SimulatedMachine:
    machine = SimulatedMachine(CALM)
    machine.begin(1, np.random.default_rng(1))
    machine.follow(np.array(targets))
    machine.probe(window_s)
    return machine


def test_nobody_asks_nothing_is_shown() -> None:
    machine = SimulatedMachine(FACTORY)
    machine.begin(1, np.random.default_rng(1))
    machine.probe(0.0)
    machine.advance(5.0)
    assert machine.telemetry().service.p95_us is None
    assert machine.telemetry().service.cpi is None


def test_the_probe_scatters_about_the_p95_as_its_samples_do() -> None:
    shape = float(FACTORY.profile.service["tail_shape"].value)
    for window_s in (1.0, 4.0):
        machine = probing(window_s, [20_000.0] * 1000)
        readings = []
        for second in range(1, 400):
            machine.advance(window_s * second)
            readings.append(machine.telemetry().service.p95_us / machine.host.p95_us)
        assert np.mean(readings) == pytest.approx(1.0, abs=0.01)
        # The spread of a log-logistic sample's own 95th percentile, drawn 1000 a second.
        rng = np.random.default_rng(0)
        uniform_ = rng.random((2000, int(1000 * window_s)))
        drawn = np.quantile((uniform_ / (1.0 - uniform_) / 19.0) ** (1.0 / shape), 0.95, axis=1)
        assert np.std(readings) == pytest.approx(drawn.std(), rel=0.2)


def test_a_reading_stands_until_its_window_has_passed() -> None:
    machine = probing(1.0, [20_000.0, 250_000.0])
    readings = []
    for poll in range(1, 42):  # the load moves at 10 s
        machine.advance(8.75 + 0.1 * poll)
        readings.append(machine.telemetry().service.p95_us)
    assert len(set(readings)) == 5
    first, moved = readings[11], readings[33]
    assert machine.scenario.service.slo_us > first
    assert moved > 1.3 * first  # the window that saw the load move only


def test_a_slow_reader_sees_all_since_his_last_look() -> None:
    machine = probing(1.0, [20_000.0, 20_000.0, 250_000.0, 20_000.0])
    machine.advance(20.0)
    calm = machine.telemetry().service.p95_us
    machine.advance(38.5)  # 10 s of overload, 8.5 s calm
    assert machine.host.p95_us < 1.2 * calm
    assert machine.telemetry().service.p95_us > 1.3 * calm


def test_batch_work_stretches_cycles_per_instruction() -> None:
    machine = probing(1.0, [20_000.0])
    machine.advance(5.0)
    alone = machine.telemetry().service.cpi
    jobs = {
        name: JobAllocation(RUNNING, (1, 2, 3), threads=4)
        for name in ("canneal", "ferret", "radix")
    }
    machine.apply(Allocation((0,), jobs))
    machine.advance(30.0)
    assert alone == pytest.approx(1.0, abs=0.2)
    assert machine.host.stretch > 1.02
    assert machine.telemetry().service.cpi != alone
