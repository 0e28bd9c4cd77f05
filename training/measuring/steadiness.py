"""
How steadily this machine serves: how often the load stalls and catches up, and vCPUs are stolen.

memcached's counters are polled under a steady load, as the control loop polls them. A *stall* is a
run of polls below `STEADY` of the median rate, one of them below `STALLED`, after which most of
what was missed is caught up. A run in which memcached's vCPU was stolen is no stall but a *steal*,
as long as the guest's clock says (ticks of 10 ms, so that many short ones look like one).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deploy.engines.memcached import Memcached
from deploy.linux.service_process import pin
from deploy.linux.stats_connection import StatsConnection
from deploy.load.dynamic_load import Client
from training.measuring.readings import requests_served, stolen_s
from training.measuring.testbed import Testbed, sleep_until

POLL_S = 0.025
SETTLE_S = 0.5
STEADY, STALLED = 0.85, 0.5  # of the median rate
CAUGHT_UP = 0.5  # of what was missed, at least, in as many polls as were missed and `MORE`
MORE = 8

Readings = npt.NDArray[np.float64]


def watch(
    testbed: Testbed, server: Memcached, cores: tuple[int, ...], client: Client, watch_s: float
) -> Readings:
    """
    Poll memcached's counters under a load that has just started.

    :param testbed: the testbed to measure on
    :param server: a running memcached
    :param cores: its vCPUs; the first one's stolen time is read
    :param client: its steady load, which lasts for `SETTLE_S` more
    :param watch_s: how long to watch [s]
    :return: float64[n, 3], time [s], requests served and stolen time [s] at each poll
    """
    pin(server.pid, cores)
    stats = StatsConnection(server.host, server.port)
    readings = []
    try:
        for poll in range(round(watch_s / POLL_S) + 1):
            sleep_until(client.start_s + SETTLE_S + poll * POLL_S)
            time_s, count = requests_served(stats)
            readings.append((time_s, count, stolen_s(testbed.vcpus)[cores[0]]))
    finally:
        stats.close()
    return np.array(readings)


def find_steals(readings: Readings) -> list[float]:
    """
    Steals: runs of polls in each of which stolen time was added.

    :param readings: see `watch`
    :return: length of each [s]
    """
    stolen = np.diff(readings[:, 2])
    return [float(stolen[run].sum()) for run in _runs(stolen > 0.0)]


def find_stalls(readings: Readings) -> list[float]:
    """
    Stalls of the load, as the module describes them.

    :param readings: see `watch`
    :return: length of each [s]
    """
    lengths_s, served = np.diff(readings[:, 0]), np.diff(readings[:, 1])
    stolen = np.diff(readings[:, 2]) > 0.0
    rate = float(np.median(served / lengths_s))
    excess = served - rate * lengths_s
    found = []
    for run in _runs(served < STEADY * rate * lengths_s):
        if (served[run] >= STALLED * rate * lengths_s[run]).all() or stolen[run].any():
            continue
        missed = -float(excess[run].sum())
        after = excess[run.stop : run.stop + (run.stop - run.start) + MORE]
        if after.clip(min=0.0).sum() >= CAUGHT_UP * missed:
            found.append(_stalled_s(served / lengths_s, run, rate))
    return found


def _stalled_s(rates: Readings, run: slice, rate: float) -> float:
    """
    How long a stall lasted: whole polls, and the parts of those in which it began and ended.

    It ends within a poll whose rest is served at the rate of the burst, as the next poll is.
    """
    stalled = 1.0 - rates[run] / rate
    burst = float(rates[run.stop : run.stop + 2].max(initial=rate))
    if len(stalled) > 1:
        stalled[-1] = 1.0 - rates[run.stop - 1] / burst
    rest = 1.0 - rates[run.stop] / burst if run.stop < len(rates) else 0.0
    return POLL_S * float(stalled.sum() + rest)


def rows(readings: Readings) -> list[dict[str, object]]:
    """
    What was seen, for the table of what this machine's control paths take.

    :param readings: see `watch`
    :return: a row each for stalls and steals
    """
    watched_s = float(readings[-1, 0] - readings[0, 0])
    return [
        {
            "of": "hiccups",
            "action": name,
            "seen": len(lengths_s),
            "mean_s": float(np.mean(lengths_s)) if lengths_s else float("nan"),
            "watched_s": watched_s,
            "n": len(readings),
        }
        for name, lengths_s in (
            ("stalls", find_stalls(readings)),
            ("steals", find_steals(readings)),
        )
    ]


def _runs(marked: Sequence[bool] | npt.NDArray[np.bool_]) -> list[slice]:
    """The stretches of polls that are marked."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(marked, int), [0]))))
    return [slice(int(first), int(last)) for first, last in edges.reshape(-1, 2)]
