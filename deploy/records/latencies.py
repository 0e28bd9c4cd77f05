"""What is known of memcached's latency, whoever measures it, and the log of it by intervals."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deploy.records.lines import LineFile
from deploy.records.mcperf import HEADER, format_row
from env.telemetry import Stages

SILENT_S = 0.5
"""A latency sensor speaks many times a second; one that says nothing for longer is not gone by."""

SETTLED_S = 1.0
"""What a latency sensor has to say about a moment it has said by so long after it."""


@dataclass(frozen=True)
class Latencies:
    """
    Latencies in a window.

    :param p50_us: of all that a request takes [µs], as are the next two
    :param p95_us: see above
    :param p99_us: see above
    :param count: how many requests were measured
    :param wait_us: 95th percentile of the time until memcached reads a request [µs], where that is
        told apart
    :param service_us: 95th percentile of the time from there to the answer [µs], likewise
    :param members: both by member of a group, likewise; None of one that has answered nothing
    """

    p50_us: float
    p95_us: float
    p99_us: float
    count: int
    wait_us: float | None = None
    service_us: float | None = None
    members: tuple[Stages | None, ...] = ()


class LatencySensor(Protocol):
    """Whatever measures memcached's latency: the probe, or the tap."""

    name: str
    """What it is called in the log."""

    keep_s: float
    """How long readings are kept [s]."""

    @property
    def known_until_s(self) -> float:
        """Everything is known of what happened before this moment [monotonic s]."""

    @property
    def stale(self) -> bool:
        """Whether it has not been heard for so long that its last words mean nothing."""

    def poll(self) -> bool:
        """Take in what it has measured; never waits. False once it has ended."""

    def late_lately(self, limit_s: float) -> tuple[int, int]:
        """
        How many requests are known of since the last call, and how many of them are late.

        :param limit_s: what is late [s]
        """

    def latencies(self, window_s: float) -> Latencies | None:
        """
        What a window that ends now shows; None if nothing.

        :param window_s: how far back, at most what is kept [s]
        """

    def between(self, start_s: float, end_s: float) -> Sequence[float] | npt.NDArray[np.float64]:
        """
        Latencies of the measured requests of a stretch of time [s].

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        """

    def own_late(self, start_s: float, end_s: float) -> float:
        """
        Share of the requests of a stretch of time whose latency is the sensor's own doing.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        """

    def stop(self) -> None:
        """End it."""


class IntervalLog:
    """
    Latency interval by interval, for runs whose load does not tell: written in mcperf's columns.

    Nobody here knows what was asked for, nor when it changed: an interval starts where the one
    before has ended, whatever the load does. So the rows have no target.

    :param sensor: measures; its readings of a whole interval are kept from now on
    :param lines: where the rows go; rows of an earlier part of the run stay
    :param interval_s: length of an interval [s]
    """

    def __init__(self, sensor: LatencySensor, lines: LineFile, interval_s: float):
        self._sensor = sensor
        self._lines = lines
        self._interval_s = interval_s
        self._start_s = time.monotonic()
        self._epoch_s = time.time() - self._start_s
        # When requests were counted, and how many so far; from the interval's start on.
        self._counts: list[tuple[float, float]] = []
        sensor.keep_s = max(sensor.keep_s, interval_s + SETTLED_S)

    def poll(self, now_s: float, requests: float) -> None:
        """
        Write the rows of the intervals that have ended.

        :param now_s: when requests were counted last, on the monotonic clock [s]
        :param requests: memcached's count of them so far
        """
        self._counts.append((now_s, requests))
        while (end_s := self._start_s + self._interval_s) <= self._sensor.known_until_s:
            self._write(end_s)

    def finish(self, end_s: float, requests: float) -> None:
        """
        Write the rest, the interval under way as far as it came.

        :param end_s: when the run ended, on the monotonic clock [s]
        :param requests: memcached's count of them so far
        """
        self.poll(end_s, requests)
        if len(self._sensor.between(self._start_s, end_s)):  # else nothing was measured
            self._write(end_s)

    def _write(self, end_s: float) -> None:
        """Write the row of the interval that ends."""
        latencies_us = 1e6 * np.asarray(self._sensor.between(self._start_s, end_s))
        times_s = (self._epoch_s + self._start_s, self._epoch_s + end_s)
        if self._lines.size == 0:
            self._lines.append(HEADER)
        own_late = self._sensor.own_late(self._start_s, end_s)
        self._lines.append(format_row(latencies_us, self._qps(end_s), math.nan, *times_s, own_late))
        self._start_s = end_s
        while len(self._counts) > 1 and self._counts[1][0] <= end_s:
            del self._counts[0]

    def _qps(self, end_s: float) -> float:
        """Requests per second in the interval, its limits interpolated between the counts."""
        counted_s, requests = zip(*self._counts, strict=True)
        limits_s = np.clip((self._start_s, end_s), counted_s[0], counted_s[-1])
        first, last = np.interp(limits_s, counted_s, requests)
        length_s = limits_s[1] - limits_s[0]
        return float(max(0.0, last - first) / length_s) if length_s > 0.0 else 0.0
