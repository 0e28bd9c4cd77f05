"""
The latency tap: how long memcached's users wait, from the kernel, with no request of our own.

A request's latency counts from its arrival in memcached's socket until the answer has left it;
pipelined requests that are read together are one. One in `EVERY` is followed, drawn at random, so
that what is not followed costs next to nothing. What memcached does not read for too long is late
before it is answered.
"""

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.linux.helpers import helper_command
from deploy.linux.perf_events import stop_sampling
from deploy.linux.readiness import await_readable
from deploy.records.latencies import SILENT_S, Latencies
from env.errors import InputError
from env.telemetry import Stages

EVERY = 16
"""One request in so many is followed: 6000 a second of 100 000, 300 of 5000."""

START_LIMIT_S = 20.0
"""bpftrace compiles for one or two seconds, on a busy machine for longer."""

FORGOTTEN_S = 10.0
"""A request that is not read for so long is none any more: its connection broke."""

SLOTS = 768
"""`requests.bt` counts by slots, 32 for each power of two: up to 17 s, and longer times there."""

Counts = npt.NDArray[np.int64]


def asleep_s() -> float:
    """For how long the machine was suspended since it booted [s]: bpftrace's clock goes on then."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@functools.cache
def slot_times_s() -> npt.NDArray[np.float64]:
    """The times in the middle of the slots [s]; past the first 32 every other 16 are not used."""
    exponents, mantissas = np.divmod(np.arange(SLOTS), 32)
    return 512e-9 * (mantissas + 0.5) * 2.0**exponents


@dataclass(frozen=True)
class Reading:
    """
    What the tap has counted between two of its rows: int[processes, SLOTS].

    :param time_s: when it was read, on the monotonic clock [s]
    :param wait: requests by their time in the socket
    :param service: and by the time that the process took
    :param latency: and by both together
    """

    time_s: float
    wait: Counts
    service: Counts
    latency: Counts


class TapCounts:
    """
    What bpftrace prints, taken in line by line.

    Its maps only grow, so a row that is lost costs nothing.

    :param processes: how many serve
    :param proxied: whether the first is a proxy, so that clients ask that one alone
    """

    def __init__(self, processes: int = 1, proxied: bool = False) -> None:
        self.time_s = 0.0
        # Of each process that clients ask: requests answered, those that were late, and for how
        # long it has not read what is there [s].
        self._asked = [(0, 0, 0.0)] * (1 if proxied else processes)
        self._told = [(0, 0)] * len(self._asked)
        self._shape = (processes, SLOTS)
        names = ("@wait", "@service", "@latency")
        self._maps = {name: np.zeros(processes * SLOTS, np.int64) for name in names}
        self._before = {name: counts.copy() for name, counts in self._maps.items()}

    def take(self, line: bytes) -> Reading | None:
        """
        Take in a line.

        :param line: JSON, as `bpftrace -f json` prints it
        :return: a reading once it is complete
        :raises ValueError: if bpftrace does not print such a line
        """
        try:
            return self._take(json.loads(line))
        except (TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ValueError("no line of bpftrace's") from error

    def _take(self, said: Any) -> Reading | None:
        match said:
            case {"type": "printf", "data": "counted"}:
                return self._reading()
            case {"type": "printf", "data": str(words)}:
                self._note_row(*map(int, words.split()))
            case {"type": "map", "data": dict(data)}:
                for name, slots in data.items():
                    if name in self._maps:
                        self._fill(self._maps[name], slots)
        return None

    def _note_row(
        self, process: int, now_ns: int, answered: int, late: int, asked_ns: int, read_ns: int
    ) -> None:
        self.time_s = 1e-9 * now_ns - asleep_s()
        if 1 <= process <= len(self._asked):
            unread_s = 1e-9 * (now_ns - asked_ns) if asked_ns > read_ns else 0.0
            self._asked[process - 1] = (answered, late, unread_s)

    def late_lately(self, limit_s: float) -> tuple[int, int]:
        """
        How many followed requests are known of since the last call, and how many of them are late.

        Where a process has answered none, what it has not read for too long is late. Where there is
        nothing to read, nobody is: that counts as one on time.

        :param limit_s: what `requests.bt` counts as late, too [s]
        """
        known = known_late = 0
        for place, (answered, late, unread_s) in enumerate(self._asked):
            told, told_late = self._told[place]
            count = answered - told
            if count > 0:
                known, known_late = known + count, known_late + min(late - told_late, count)
            elif limit_s < unread_s < FORGOTTEN_S:
                known, known_late = known + 1, known_late + 1
            self._told[place] = (answered, late)
        return (known, known_late) if known else (1, 0)

    @staticmethod
    def _fill(counts: Counts, slots: dict[str, int]) -> None:
        if slots:
            counts[list(map(int, slots))] = list(slots.values())

    def _reading(self) -> Reading:
        grown = [
            (self._maps[name] - self._before[name]).reshape(self._shape) for name in self._maps
        ]
        self._before = {name: counts.copy() for name, counts in self._maps.items()}
        return Reading(self.time_s, *grown)


def shown(readings: Sequence[Reading], proxied: bool = False) -> Latencies | None:
    """
    What readings show together; None if no client was answered.

    :param readings: of a window
    :param proxied: whether the first process is a proxy, so that clients ask that one alone
    """
    if not any(asked(one.latency, proxied).any() for one in readings):
        return None
    latency, wait, service = (
        np.sum([getattr(one, name) for one in readings], axis=0)
        for name in ("latency", "wait", "service")
    )
    total = asked(latency, proxied)
    p50, p95, p99 = (_percentile_us(total, rank) for rank in (50.0, 95.0, 99.0))
    stages = _stages(asked(wait, proxied), asked(service, proxied))
    first = int(proxied) if len(wait) > 1 else len(wait)
    members = zip(wait[first:], service[first:], strict=True)
    by_member = [_stages(*both) if both[0].any() else None for both in members]
    return Latencies(p50, p95, p99, int(total.sum()), *stages, tuple(by_member))


def asked(counts: Counts, proxied: bool) -> Counts:
    """
    Requests by slots of the processes that clients ask.

    :param counts: int[processes, SLOTS]
    :param proxied: whether that is the first one alone
    """
    return counts[0] if proxied else counts.sum(axis=0)


def _stages(wait: Counts, service: Counts) -> Stages:
    return Stages(_percentile_us(wait, 95.0), _percentile_us(service, 95.0))


def _percentile_us(counts: Counts, rank: float) -> float:
    """The time that `rank` percent of the counted requests do not exceed [µs], to 3 %."""
    sums = np.cumsum(counts)
    slot = int(np.searchsorted(sums, max(1, math.ceil(sums[-1] * rank / 100.0))))
    return 1e6 * float(slot_times_s()[slot])


class Tap:
    """
    A running tap, as seen by the process that started it.

    :param ports: TCP ports of the processes that serve, the one that clients ask first
    :param pids: the processes, whose networks the ports are of
    :param limit_s: the SLO; what takes longer is late [s]
    :param proxied: whether the first process is a proxy, so that clients ask that one alone
    :param every: one request in so many is followed
    :raises InputError: if it cannot be had
    """

    name = "latency tap"

    def __init__(
        self,
        ports: Sequence[int],
        pids: Sequence[int],
        limit_s: float,
        proxied: bool = False,
        every: int = EVERY,
    ):
        self.keep_s = 1.0
        self._proxied = proxied
        self._counters = TapCounts(len(ports), proxied)
        self._readings: deque[Reading] = deque()
        self._rest = b""
        networks = [Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids]
        sockets = [f"{network}:{port}" for network, port in zip(networks, ports, strict=True)]
        if len(set(sockets)) < len(sockets):
            raise InputError("latency tap: processes are told apart by port; two have the same")
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self.process = subprocess.Popen(
            helper_command("deploy.tap.tracer", str(every), str(round(1e9 * limit_s)), *sockets),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )
        assert self.process.stdout is not None
        self._file = self.process.stdout.fileno()
        os.set_blocking(self._file, False)
        try:
            self._await_first_row()
        except BaseException:
            self.stop()
            raise

    def poll(self) -> bool:
        """
        Take in what the tap has counted; never waits.

        :return: False once it has ended
        """
        alive = True
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._file, 65536):
                self._rest += part
            alive = False
        *lines, self._rest = self._rest.split(b"\n")
        for line in filter(None, lines):
            with contextlib.suppress(ValueError):
                if (reading := self._counters.take(line)) is not None:
                    self._readings.append(reading)
        forgotten_s = time.monotonic() - self.keep_s
        while self._readings and self._readings[0].time_s < forgotten_s:
            self._readings.popleft()
        return alive

    @property
    def known_until_s(self) -> float:
        """What was answered before this moment is counted [monotonic s]."""
        return self._readings[-1].time_s if self._readings else 0.0

    @property
    def age_s(self) -> float:
        """Age of its last row [s]."""
        return time.monotonic() - self._counters.time_s

    @property
    def stale(self) -> bool:
        """Whether its last row is too old to decide by."""
        return self.age_s > SILENT_S

    def late_lately(self, limit_s: float) -> tuple[int, int]:
        """
        See `TapCounts.late_lately`.

        :param limit_s: what the tap was started with [s]
        """
        return self._counters.late_lately(limit_s)

    def latencies(self, window_s: float) -> Latencies | None:
        """
        What a window that ends now shows; None if nothing, or if the tap is stale.

        :param window_s: how far back, at most what is kept [s]
        """
        from_s = time.monotonic() - window_s
        if self.stale:
            return None
        return shown([one for one in self._readings if one.time_s >= from_s], self._proxied)

    def between(self, start_s: float, end_s: float) -> npt.NDArray[np.float64]:
        """
        Latencies of the followed requests that were answered in a stretch of time [s], to 3 %.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        """
        total = np.zeros(SLOTS, np.int64)
        for one in self._readings:
            if start_s <= one.time_s < end_s:
                total += asked(one.latency, self._proxied)
        return np.repeat(slot_times_s(), total)

    def own_late(self, start_s: float, end_s: float) -> float:
        """
        All where the tap was silent throughout: nothing is known of what nobody counted.

        Else none: the kernel takes the times.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        :return: 0 or 1
        """
        return float(not any(start_s <= one.time_s < end_s for one in self._readings))

    def stop(self) -> None:
        """End it; the kernel removes what it has put there."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._complaints.close()

    def _await_first_row(self) -> None:
        give_up_s = time.monotonic() + START_LIMIT_S
        while self._counters.time_s == 0.0:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0.0:
                raise InputError(f"latency tap: bpftrace says nothing for {START_LIMIT_S:g} s")
            await_readable([self._file], left_s)
            if not self.poll():
                raise InputError(f"latency tap: {self._complaint()}")
        # A kernel that refuses this has a tap that costs more, and shows the same.
        with contextlib.suppress(OSError):
            stop_sampling(self.process.pid)

    def _complaint(self) -> str:
        """Why the tap has ended: the last line of its own that it has called an error."""
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if re.search("ERROR|FATAL|coretide", line)]
        said = (errors or lines or ["bpftrace has ended"])[-1]
        return said.removeprefix("coretide: ").removeprefix("latency tap: ")
