"""
What is read at a moment of a measurement, and what two readings make of the time between.

A point says how trustworthy it is: others may have used its vCPUs, or the client was held up.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from deploy.linux.sensors import ThreadClock
from deploy.linux.stats_connection import StatsConnection
from deploy.load import generator
from deploy.records.mcperf import percentile
from env.errors import InputError

IN_FLIGHT = generator.OUTSTANDING + 1  # the load's requests and the probe's
FOREIGN_LIMIT = 0.10  # of each measured core: more by other processes disturbs a measurement
LATE_LIMIT = 0.0003  # share of the load's ticks over 1 ms late: the client's vCPU stood still
BACKLOG = 1.1  # more served than asked by this factor: the client had fallen behind before
STATS_LIMIT_S = 5.0
STATS_PATIENCE_S = 0.05  # then it is asked whether the connection has to be made anew
STATS_POLL_S = 0.00005


@dataclass(frozen=True)
class Counters:
    """
    What adds up over time, at one moment.

    :param time_s: the moment, on the monotonic clock [s]
    :param requests: served by memcached
    :param service_s: CPU seconds of memcached
    :param beside_s: CPU seconds of what runs beside it
    :param client_s: CPU seconds of the load, its probe and this program
    :param probe_s: of these, the probe's
    :param busy_s: seconds that each vCPU was busy with anything
    """

    time_s: float
    requests: int
    service_s: float
    beside_s: float
    client_s: float
    probe_s: float
    busy_s: tuple[float, ...]


def latency_row(
    target: int,
    latencies_s: Sequence[float],
    before: Counters,
    after: Counters,
    cores: tuple[int, ...],
    client_cpu: int,
    late: float,
) -> dict[str, float]:
    """
    A row of the latency table.

    :param target: load asked for [1/s]
    :param latencies_s: what the probe saw [s]
    :param before: reading at the beginning
    :param after: reading at the end
    :param cores: memcached's vCPUs
    :param client_cpu: the load's vCPU
    :param late: share of the load's ticks that came late
    """
    ordered = sorted(latencies_s)
    length_s = after.time_s - before.time_s
    service = (after.service_s - before.service_s) / length_s
    beside = (after.beside_s - before.beside_s) / length_s
    client = float(np.nan_to_num((after.client_s - before.client_s) / length_s))
    busy = sum(after.busy_s[c] - before.busy_s[c] for c in cores) / length_s
    probe = float(np.nan_to_num((after.probe_s - before.probe_s) / length_s))
    shared = client_cpu in cores
    foreign = max(busy - service - beside - (client if shared else 0.0), 0.0)
    # Nothing at all, if the probe's vCPU stood still.
    achieved = (after.requests - before.requests) / length_s
    p50, p95, p99 = (
        1e6 * percentile(ordered, rank) if ordered else math.nan for rank in (50.0, 95.0, 99.0)
    )
    return {
        "target_qps": float(target),
        "achieved_qps": achieved,
        "avg_us": 1e6 * fmean(ordered) if ordered else math.nan,
        "p50_us": p50,
        "p95_us": p95,
        "p99_us": p99,
        "cpu_util_pct": 100.0 * service,
        "beside_cores": beside,
        "client_cores": client,
        "probe_cores": probe,
        "foreign_cores": foreign,
        "late": late,
        "in_flight": float(IN_FLIGHT),
        "shares_client": float(shared),
        "disturbed": _disturbance(foreign / len(cores), late, achieved / target, ordered),
    }


def _disturbance(foreign: float, late: float, served: float, latencies: Sequence[float]) -> float:
    """0 for a calm point, 1 if others used its vCPUs, 2 if the client was held up."""
    if not latencies or late > LATE_LIMIT or served > BACKLOG:
        return 2.0
    return 1.0 if foreign > FOREIGN_LIMIT else 0.0


def stolen_s(vcpus: int) -> list[float]:
    """
    Seconds since boot that the hypervisor ran others while a vCPU wanted to run.

    :param vcpus: number of vCPUs to read, from the first on
    :return: seconds of each vCPU
    """
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[1 : vcpus + 1]
    return [int(line.split()[8]) / os.sysconf("SC_CLK_TCK") for line in lines]


def cpu_s(clocks: Sequence[ThreadClock], now_s: float) -> float:
    """
    CPU seconds of the client; NaN once it has ended, before this program could ask.

    :param clocks: clocks of the client's processes
    :param now_s: present time, on the monotonic clock [s]
    """
    try:
        return sum(clock.read(now_s).cpu_s for clock in clocks)
    except ProcessLookupError:
        return math.nan


def requests_served(stats: StatsConnection) -> tuple[float, int]:
    """
    When memcached was asked, and how many requests it has served.

    :param stats: connection to memcached
    :return: time on the monotonic clock [s], and the count
    :raises InputError: if memcached does not answer in time
    """
    give_up_s = time.monotonic() + STATS_LIMIT_S
    while time.monotonic() < give_up_s:
        now_s = time.monotonic()
        stats.ask(now_s)
        for _ in range(round(STATS_PATIENCE_S / STATS_POLL_S)):
            reading = stats.receive()
            if reading is not None:
                return reading.time_s, reading.count
            time.sleep(STATS_POLL_S)
    raise InputError(f"memcached does not answer within {STATS_LIMIT_S:g} s")
