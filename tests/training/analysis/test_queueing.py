"""Queueing models against worked examples of the textbooks and against exact solutions."""

import math

import numpy as np
import pytest

from training.analysis.queueing import (
    ClosedModel,
    Point,
    bottleneck,
    compare,
    erlang_c,
    fit_open,
    law_error,
    mmm,
)


def test_mm1_gateway_of_jain() -> None:
    """Jain, example 31.1: 125 packets/s, 2 ms each."""
    gateway = mmm(125.0, 0.002)
    assert gateway.utilisation == pytest.approx(0.25)
    assert gateway.response_s == pytest.approx(0.002667, abs=5e-7)
    assert gateway.in_system == pytest.approx(0.3333, abs=5e-5)


def test_mmm_computer_centre_of_jain() -> None:
    """Jain, example 31.2: 10 students an hour, 20 minutes each, five terminals."""
    centre = mmm(10.0 / 60.0, 20.0, 5)
    idle = 1.0 / (
        sum((10 / 3) ** n / math.factorial(n) for n in range(5))
        + (10 / 3) ** 5 / math.factorial(5) * 3
    )
    busy = (10 / 3) ** 5 / math.factorial(5) * 3 * idle
    assert idle == pytest.approx(0.0318, abs=5e-5)  # as printed
    assert centre.waiting == pytest.approx(busy, rel=1e-9)
    assert centre.waiting == pytest.approx(0.33, abs=0.005)  # as printed
    assert centre.response_s == pytest.approx(24.0, abs=0.1)  # minutes, as printed
    assert centre.in_system == pytest.approx(4.0, abs=0.05)  # as printed


def test_erlang_c_of_the_tables() -> None:
    """Eight erlangs offered to ten servers: 0.4092 in the tables of Erlang's C formula."""
    assert erlang_c(8.0, 10) == pytest.approx(0.4092, abs=5e-5)
    assert erlang_c(0.5, 1) == pytest.approx(0.5)


def test_an_overloaded_queue_has_no_steady_state() -> None:
    with pytest.raises(ValueError, match="keep 2 of 2 servers busy"):
        mmm(1000.0, 0.002, 2)


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
@pytest.mark.parametrize("customers", [1, 5, 64, 150])
@pytest.mark.parametrize("delay_s", [2.0, 20.0, 50.0])
def test_the_closed_network_is_the_machine_repair_model(
    servers: int, customers: int, delay_s: float
) -> None:
    """The birth-death process of N machines and m repairers, solved state by state."""
    log_p = [0.0]
    for n in range(1, customers + 1):
        log_p.append(log_p[-1] + math.log((customers - n + 1) / delay_s / min(n, servers)))
    p = np.exp(np.array(log_p) - max(log_p))
    exact = float(p @ np.minimum(np.arange(customers + 1), servers) / p.sum())
    state = ClosedModel(servers, 1.0, delay_s).predict(Point(math.inf, 0.0, 0.0, customers))
    assert state is not None
    assert state.throughput == pytest.approx(exact, rel=1e-4)
    assert state.response_s == pytest.approx(customers / state.throughput)


def test_the_interactive_law_tells_a_wrong_point() -> None:
    good = Point(math.inf, 20e3, 1.6e-3, 32.0)
    assert law_error(good) == pytest.approx(0.0)
    assert law_error(Point(math.inf, 20e3, 1.2e-3, 32.0)) == pytest.approx(1 / 3)


def sweep(servers: int, service_s: float, delay_s: float) -> list[Point]:
    """What an open M/M/m with a constant delay would be measured to do."""
    return [
        Point(
            rate,
            rate,
            mmm(rate, service_s, servers).response_s + delay_s,
            256.0,
            rate * service_s / servers,
        )
        for rate in np.linspace(0.05, 0.95, 12) * servers / service_s
    ]


def test_a_fit_finds_the_queue_that_made_the_sweep() -> None:
    model = fit_open(sweep(2, 15e-6, 80e-6), 2)
    assert model.service_s == pytest.approx(15e-6, rel=0.01)
    assert model.delay_s == pytest.approx(80e-6, rel=0.01)


def test_the_right_model_holds_and_the_wrong_one_says_where_it_fails() -> None:
    points = sweep(2, 15e-6, 80e-6)
    one, two, closed = compare(points, 2)
    assert (one.model.name, two.model.name) == ("M/M/1", "M/M/2")
    assert "holds over the whole sweep" in two.verdict()
    assert abs(two.utilisation_error()) < 0.01
    assert closed.model.capacity == pytest.approx(2 / 15e-6, rel=0.05)
    # Response times that do not grow with the load are nobody's queue.
    flat = [Point(p.offered, p.throughput, 1e-3 * (1 + 3 * (p.offered < 5e4)), 256) for p in points]
    assert "fails" in compare(flat, 2)[1].verdict() or "predicts" in compare(flat, 2)[1].verdict()


def test_only_the_closed_network_has_an_answer_past_saturation() -> None:
    truth = ClosedModel(1, 10e-6, 100e-6)
    points = []
    for offered in (10e3, 30e3, 50e3, 70e3, 90e3, 120e3, 150e3):
        state = truth.predict(Point(offered, 0.0, 0.0, 64.0))
        assert state is not None
        points.append(Point(offered, state.throughput, state.response_s, 64.0, state.utilisation))
    assert points[-1].saturated
    one, closed = compare(points, 1)
    assert one.states[-1] is None
    assert "no steady state from 120,000/s on" in one.verdict()
    assert "holds over the whole sweep" in closed.verdict()
    assert closed.model.service_s == pytest.approx(10e-6, rel=0.02)
    # The plateau is the interactive law without thinking.
    assert points[-1].response_s == pytest.approx(64 / points[-1].throughput)


def test_a_closed_loop_needs_no_rate() -> None:
    truth = ClosedModel(2, 20e-6, 60e-6)
    points = []
    for customers in (1, 2, 4, 8, 16, 32):
        state = truth.predict(Point(math.inf, 0.0, 0.0, customers))
        assert state is not None
        points.append(Point(math.inf, state.throughput, state.response_s, customers))
    with pytest.raises(ValueError, match="0 points below saturation"):
        compare(points, 2)
    for point in points:
        assert law_error(point) == pytest.approx(0.0, abs=1e-9)


def test_the_bottleneck_is_the_busiest_resource() -> None:
    use = {"memcached": 0.62, "load generator": 0.98, "disk": math.nan}
    assert bottleneck(use) == "load generator, 98% busy (memcached 62%)"
    with pytest.raises(ValueError, match="no utilisation"):
        bottleneck({"disk": math.nan})
