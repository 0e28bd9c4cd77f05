"""How long this machine takes to be changed and to be read: what a control loop waits for."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from deploy.engines.images import STRESS_IMAGE
from deploy.engines.memcached import Memcached
from deploy.jobs import gate
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.runtimes import Instance, Runtime
from deploy.linux.sensors import ThreadClock
from deploy.linux.service_process import identify, pin
from deploy.linux.stats_connection import StatsConnection
from env.allocation import Weight
from env.scenario import Job
from env.simulator.load import LoadTrace
from training.measuring.pressure import SOURCES
from training.measuring.readings import requests_served
from training.measuring.testbed import Testbed, require_running, sleep_until

STARTS = 10
CHANGES = 5  # of each kind per start
READINGS = 60
NOISE_S, FEWEST_WINDOWS, MOST_WINDOWS = 3.0, 12, 120
"""For how long noise is measured [s], in at least and at most so many windows."""

SETTLE_S = 0.5
DEVIATIONS = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""

ACTUATED = Job(
    name="actuated", image=STRESS_IMAGE, command=SOURCES["cpu"], threads=(1,), memory_mib=64
)


class Stopwatch:
    """
    Durations by name.

    :param of: what was changed or read: `process`, `docker` or `service`
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self._seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """
        Time the `with` block.

        :param what: name of the action that the block takes
        """
        begun_s = time.monotonic()
        yield
        self._seconds.setdefault(what, []).append(time.monotonic() - begun_s)

    def rows(self) -> list[dict[str, object]]:
        """One row a name: median, 90 % and 99 % quantiles, number."""
        return [
            {
                "of": self._of,
                "action": what,
                "median_s": float(np.median(seconds)),
                "p90_s": float(np.quantile(seconds, 0.9)),
                "p99_s": float(np.quantile(seconds, 0.99)),
                "n": len(seconds),
            }
            for what, seconds in self._seconds.items()
        ]


def time_runtime(testbed: Testbed, runtime: Runtime, watch: Stopwatch) -> None:
    """
    Start, move, weigh, pause and resume a job, many times.

    :param testbed: the testbed to measure on
    :param runtime: runs the job
    :param watch: takes the times
    :raises RuntimeUnavailableError: if it cannot be reached
    :raises JobFailedError: if it cannot start the job
    :raises InputError: if the job ends at once
    """
    with testbed.job_group("actuated") as group:
        for _ in range(STARTS):
            attempt = testbed.attempt(ACTUATED, group)
            with watch.timing("start"):
                instance = runtime.start(attempt, tuple(range(testbed.vcpus)), Weight.NORMAL)
            require_running(runtime, instance)
            try:
                with watch.timing("gate"):
                    gate.await_passage(attempt.folder, 1)
                _change(testbed, runtime, instance, watch)
            finally:
                with watch.timing("remove"):
                    runtime.remove(instance)
                os.close(instance.ended)


def _change(testbed: Testbed, runtime: Runtime, instance: Instance, watch: Stopwatch) -> None:
    assert instance.placement is not None
    for k in range(CHANGES):
        cores = (k % testbed.vcpus,)
        with watch.timing("set_cores"):
            instance.placement.set_cores(cores)
        with watch.timing("set_weight"):
            instance.placement.set_weight(Weight(k % 2))
        if isinstance(runtime, DockerRuntime):  # what controllers that know no better wait for
            with watch.timing("update cpuset by its API"):
                runtime.move(instance, cores)
        with watch.timing("pause"):
            instance.placement.set_paused(True)
        with watch.timing("resume"):
            instance.placement.set_paused(False)


def time_service(testbed: Testbed, server: Memcached, watch: Stopwatch) -> None:
    """
    Move memcached's threads, read its CPU time and its counters, many times.

    :param testbed: the testbed to measure on
    :param server: a running memcached
    :param watch: takes the times
    """
    clock = ThreadClock(identify(server.pid), time.monotonic())
    stats = StatsConnection(server.host, server.port)
    try:
        requests_served(stats)
        for k in range(READINGS):
            with watch.timing("pin_service"):
                pin(server.pid, (k % testbed.vcpus,))
            with watch.timing("read_cpu"):
                clock.read(time.monotonic())
            with watch.timing("read_stats"):
                requests_served(stats)
            with watch.timing("read_vcpus"):
                testbed.clock.read()
    finally:
        clock.close()
        stats.close()


def sensor_noise(
    testbed: Testbed,
    server: Memcached,
    cores: tuple[int, ...],
    load_qps: float,
    window_s: float,
) -> float:
    """
    By how much readings of memcached's CPU use scatter under a steady load.

    Hiccups do not show: they are measured apart, so the median deviation decides. The scatter of
    the requests' number does not, either: the simulator adds it for the load that it has.

    :param testbed: the testbed to measure on
    :param server: a running memcached
    :param cores: its vCPUs
    :param load_qps: the load [requests/s]
    :param window_s: time between two readings [s]
    :return: relative standard deviation of one window's reading
    """
    pin(server.pid, cores)
    windows = min(max(FEWEST_WINDOWS, round(NOISE_S / window_s)), MOST_WINDOWS)
    length_s = windows * window_s + 2.0 * SETTLE_S
    client = testbed.client(server, LoadTrace.explicit([int(load_qps)], length_s))
    clock = ThreadClock(identify(server.pid), time.monotonic())
    readings = []
    try:
        for k in range(windows + 1):
            sleep_until(client.start_s + SETTLE_S + k * window_s)
            readings.append(clock.read(time.monotonic()))
    finally:
        clock.close()
        client.stop()
    use = [(b.cpu_s - a.cpu_s) / (b.time_s - a.time_s) for a, b in pairwise(readings)]
    return reading_noise(use, load_qps * window_s)


def reading_noise(use: Sequence[float], requests: float) -> float:
    """
    Relative standard deviation of readings beyond that of the requests' number.

    :param use: the readings
    :param requests: how many requests one of them covers
    """
    usual = median(use)
    deviation = DEVIATIONS * median(abs(one - usual) for one in use) / usual
    return math.sqrt(max(0.0, deviation**2 - 1.0 / requests))
