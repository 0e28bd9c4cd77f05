"""Hiccups in memcached's counters: drawn ones, and a real load that is stopped now and then."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from env.simulator.load import LoadTrace
from training.measuring.steadiness import POLL_S, SETTLE_S, find_stalls, find_steals, rows, watch
from training.measuring.testbed import open_testbed

QPS = 60_000.0


def polled(
    stalls: list[tuple[float, float]], watch_s: float = 60.0, burst: float = 2.0
) -> npt.NDArray[np.float64]:
    """
    Readings of a steady load with the scatter of random arrivals.

    :param stalls: when each begins, and its length [s]
    :param watch_s: how long was polled [s]
    :param burst: what is caught up at, over the steady load; 0 where it never is
    """
    grid_s = np.arange(0.0, watch_s + POLL_S, 0.001)
    rate = np.full(len(grid_s), QPS)
    for begins_s, length_s in stalls:
        ends_s = begins_s + length_s
        rate[(grid_s >= begins_s) & (grid_s < ends_s)] = 0.0
        if burst:
            caught_up_s = ends_s + length_s / (burst - 1.0)
            rate[(grid_s >= ends_s) & (grid_s < caught_up_s)] = burst * QPS
    arrivals = np.random.default_rng(1).poisson(0.001 * rate)
    count = np.concatenate(([0], np.cumsum(arrivals)))
    polls = np.arange(0, len(grid_s), round(1000 * POLL_S))
    times_s = polls * 0.001
    return np.column_stack((times_s, count[polls], np.zeros(len(polls))))


def test_a_steady_load_has_no_stalls() -> None:
    assert find_stalls(polled([])) == []
    assert find_steals(polled([])) == []


@pytest.mark.parametrize("length_s", [0.04, 0.07, 0.2])
def test_stalls_are_found_and_have_their_lengths(length_s: float) -> None:
    stalls = [(1.0 + 2.007 * k, length_s) for k in range(25)]
    found = find_stalls(polled(stalls))
    assert len(found) == 25
    assert np.mean(found) == pytest.approx(length_s, rel=0.1)


def test_a_load_that_falls_and_stays_low_has_not_stalled() -> None:
    assert find_stalls(polled([(5.0, 0.1)], burst=0.0)) == []


def test_what_the_host_took_is_no_stall_of_the_load() -> None:
    readings = polled([(5.0, 0.05), (9.0, 0.05)])
    readings[readings[:, 0] > 5.04, 2] += 0.05
    assert find_steals(readings) == pytest.approx([0.05])
    assert len(find_stalls(readings)) == 1
    stalls, steals = rows(readings)
    assert (stalls["seen"], steals["seen"]) == (1, 1)
    assert stalls["watched_s"] == pytest.approx(60.0, abs=0.05)


@pytest.mark.survival
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("memcached") or len(os.sched_getaffinity(0)) < 2,
    reason="needs root, memcached and 2 vCPUs",
)
def test_a_load_that_is_stopped_now_and_then_is_found_out(tmp_path: Path) -> None:
    stops, watch_s = 6, 5.0
    trace = LoadTrace.explicit([20_000], watch_s + 2.0 * SETTLE_S)
    with (
        open_testbed(tmp_path / "work", despite_load=True) as testbed,
        testbed.serving(2, (0,)) as server,
    ):
        client = testbed.client(server, trace)

        def stop_now_and_then() -> None:
            for k in range(stops):
                begins_s = client.start_s + SETTLE_S + 0.5 + 0.7 * k
                time.sleep(max(0.0, begins_s - time.monotonic()))
                client.generator.send_signal(signal.SIGSTOP)
                time.sleep(0.05)
                client.generator.send_signal(signal.SIGCONT)

        stopper = threading.Thread(target=stop_now_and_then)
        stopper.start()
        try:
            readings = watch(testbed, server, (0,), client, watch_s)
        finally:
            stopper.join()
            client.stop()
    assert len(readings) == round(watch_s / POLL_S) + 1
    # A host that takes vCPUs meanwhile makes steals of them, and adds stalls of its own.
    readings[:, 2] = 0.0
    found = find_stalls(readings)
    assert sum(0.03 < length_s < 0.15 for length_s in found) >= stops - 1
