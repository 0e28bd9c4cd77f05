"""
A latency probe: about 1000 GETs a second on a connection of its own, from a process of its own.

A latency counts from the moment the request was due, whether or not it could be sent then; what
is not answered within `LIMIT_S` counts as that late. So a stall is seen at its full length, where
counting from the actual send would hide it (coordinated omission). Requests are due at random
moments, so that the probe falls into step with nothing.

    python -m deploy.load.probe --memcached 127.0.0.1:11211
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from deploy.linux import oom, realtime
from deploy.linux.helpers import helper_command
from deploy.linux.readiness import await_readable
from deploy.load.keys import ANSWERED, RECORDS, get_request
from deploy.records.lines import LineFile
from deploy.records.mcperf import HEADER, format_row, percentile
from env.errors import InputError, exit_on_bad_input, os_reason
from env.inputs.commandline import OneLineParser, address, whole_number

RATE_QPS = 1000.0
LIMIT_S = 0.25
RETRY_S = 0.02
SILENT_S = 0.01
"""Requests come so close that for longer than this one is due; then it is late, not yet to come."""

PRIORITY = 3
"""Above the load generator's: it shares the vCPU and must not delay the probe's clock."""

RECORD = struct.Struct("dff")
"""When a request was due, on the monotonic clock [s], its latency [s], and how much of that is the
probe's own, who was late to send it [s]."""


@dataclass(frozen=True)
class Latencies:
    """Latencies in a window [µs], and how many requests were due in it."""

    p50_us: float
    p95_us: float
    p99_us: float
    count: int


class Probe:
    """
    A running probe, as seen by the process that started it.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param cpu: the vCPU the probe runs on, with real-time priority
    :param keep_s: how long its records are kept [s]
    """

    def __init__(self, host: str, port: int, cpu: int, keep_s: float = 1.0):
        self.keep_s = keep_s
        self._records: deque[tuple[float, float, float]] = deque()
        self._rest = b""
        self._told_s = time.monotonic()
        options = ["--raw", "--memcached", f"{host}:{port}", "--cpu", str(cpu)]
        self.process = subprocess.Popen(
            helper_command("deploy.load.probe", *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.file = self.process.stdout.fileno()
        os.set_blocking(self.file, False)

    def poll(self) -> bool:
        """
        Take in what the probe has measured; never waits.

        :return: False once the probe has ended
        """
        alive = True
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.file, 65536):
                self._rest += part
            alive = False
        whole = len(self._rest) - len(self._rest) % RECORD.size
        self._records.extend(RECORD.iter_unpack(self._rest[:whole]))
        self._rest = self._rest[whole:]
        forgotten_s = time.monotonic() - self.keep_s
        while self._records and self._records[0][0] < forgotten_s:
            self._records.popleft()
        return alive

    @property
    def known_until_s(self) -> float:
        """Every request due before this moment was answered or counted as late [monotonic s]."""
        return self._records[-1][0] if self._records else 0.0

    def between(self, start_s: float, end_s: float) -> list[float]:
        """
        Latencies of the requests that were due in a stretch of time [s], the latest first.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        """
        return [late_s for _, late_s, _ in self._due(start_s, end_s)]

    def own_late(self, start_s: float, end_s: float) -> float:
        """
        Share of the requests due in a stretch of time that the probe itself sent late.

        About as many answers were read late: both wait for the probe's vCPU at random moments.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        :return: 0 to 1; 0 where none was due
        """
        own = [own_s > realtime.LATE_S for _, _, own_s in self._due(start_s, end_s)]
        return sum(own) / max(1, len(own))

    def _due(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, float]]:
        """The records of a stretch of time, the latest first; older ones are not looked at."""
        recent = takewhile(lambda record: record[0] >= start_s, reversed(self._records))
        return (record for record in recent if record[0] < end_s)

    def late_lately(self, limit_s: float) -> tuple[int, int]:
        """
        How many requests are known of since the last call, and how many of them are late.

        A request that has no answer yet counts as late once it is over the limit. When its answer
        comes it is not counted again. What the probe itself was late to send is not the server's.

        :param limit_s: what is late [s]
        """
        count = late = 0
        for due_s, late_s, own_s in reversed(self._records):
            if due_s <= self._told_s:
                break
            count += 1
            late += late_s - own_s > limit_s
        self._told_s = max(self._told_s, self.known_until_s)
        overdue_s = time.monotonic() - limit_s - self._told_s
        if overdue_s > SILENT_S and self._records:
            unanswered = int(RATE_QPS * overdue_s)
            self._told_s += overdue_s
            return count + unanswered, late + unanswered
        return count, late

    def p95_us(self, window_s: float) -> float | None:
        """
        95th percentile of the requests that came due lately [µs]; None if there were none.

        :param window_s: how far back, at most what is kept [s]
        """
        now_s = time.monotonic()
        ordered = sorted(self.between(now_s - window_s, now_s))
        return 1e6 * percentile(ordered, 95.0) if ordered else None

    def latencies(self) -> Latencies | None:
        """What the records that are kept show; None before the first."""
        ordered = sorted(late_s for _, late_s, _ in self._records)
        if not ordered:
            return None
        p50, p95, p99 = (1e6 * percentile(ordered, rank) for rank in (50.0, 95.0, 99.0))
        return Latencies(p50, p95, p99, len(ordered))

    def stop(self) -> None:
        """End the probe."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class IntervalLog:
    """
    Latency interval by interval, for runs whose load does not tell: written in mcperf's columns.

    Nobody here knows what was asked for, nor when it changed: an interval starts where the one
    before has ended, whatever the load does. So the rows have no target.

    :param probe: measures; its records of a whole interval are kept from now on
    :param lines: where the rows go; rows of an earlier part of the run stay
    :param interval_s: length of an interval [s]
    """

    def __init__(self, probe: Probe, lines: LineFile, interval_s: float):
        self._probe = probe
        self._lines = lines
        self._interval_s = interval_s
        self._start_s = time.monotonic()
        self._epoch_s = time.time() - self._start_s
        # When requests were counted, and how many so far; from the interval's start on.
        self._counts: list[tuple[float, float]] = []
        probe.keep_s = max(probe.keep_s, interval_s + 4.0 * LIMIT_S)

    def poll(self, now_s: float, requests: float) -> None:
        """
        Write the rows of the intervals that have ended.

        :param now_s: when requests were counted last, on the monotonic clock [s]
        :param requests: memcached's count of them so far
        """
        self._counts.append((now_s, requests))
        while (end_s := self._start_s + self._interval_s) <= self._probe.known_until_s:
            self._write(end_s)

    def finish(self, end_s: float, requests: float) -> None:
        """
        Write the rest, the interval under way as far as it came.

        :param end_s: when the run ended, on the monotonic clock [s]
        :param requests: memcached's count of them so far
        """
        self.poll(end_s, requests)
        if self._probe.between(self._start_s, end_s):  # else nothing was measured
            self._write(end_s)

    def _write(self, end_s: float) -> None:
        """Write the row of the interval that ends."""
        latencies_us = [1e6 * late_s for late_s in self._probe.between(self._start_s, end_s)]
        times_s = (self._epoch_s + self._start_s, self._epoch_s + end_s)
        if self._lines.size == 0:
            self._lines.append(HEADER)
        own_late = self._probe.own_late(self._start_s, end_s)
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


class _Prober:
    """
    The probing process's loop.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    """

    def __init__(self, host: str, port: int):
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._retry_at_s = 0.0
        self._rest = b""
        # When the unanswered requests were due and how late they were sent; the first `_late` of
        # them count as late already.
        self._waiting: deque[tuple[float, float]] = deque()
        self._late = 0
        self._out = bytearray()

    def run(self) -> None:
        """
        Probe for ever.

        :raises BrokenPipeError: when nobody reads the records any more
        """
        os.set_blocking(sys.stdout.fileno(), False)
        due_s = time.monotonic()
        while True:
            due_s += random.expovariate(RATE_QPS)
            while (left_s := due_s - time.monotonic()) > 0:
                self._receive(left_s)
            self._send(due_s)
            self._count_late()
            self._hand_over()

    def _send(self, due_s: float) -> None:
        self._waiting.append((due_s, time.monotonic() - due_s))
        if self._socket is None:
            self._connect()
        if self._socket is None:
            self._lose()
            return
        try:
            self._socket.send(get_request(random.randrange(RECORDS)))
        except OSError:
            self._lose()

    def _receive(self, left_s: float) -> None:
        """Wait for an answer, or for time to pass."""
        if self._socket is None or not self._waiting:
            time.sleep(left_s)
            return
        if not await_readable([self._socket.fileno()], left_s):
            return
        try:
            part = self._socket.recv(65536)
        except OSError:
            part = b""
        now_s = time.monotonic()
        if not part:
            self._lose()
            return
        *answers, self._rest = (self._rest + part).split(ANSWERED)
        for _ in answers[: len(self._waiting)]:
            due_s, own_s = self._waiting.popleft()
            if self._late:
                self._late -= 1
            else:
                self._report(due_s, min(now_s - due_s, LIMIT_S), own_s)

    def _count_late(self) -> None:
        now_s = time.monotonic()
        while self._late < len(self._waiting):
            due_s, own_s = self._waiting[self._late]
            if now_s - due_s <= LIMIT_S:
                return
            self._report(due_s, LIMIT_S, own_s)
            self._late += 1

    def _lose(self) -> None:
        """The connection has gone: no answer to what was sent will come."""
        for due_s, own_s in list(self._waiting)[self._late :]:
            self._report(due_s, LIMIT_S, own_s)
        self._waiting.clear()
        self._late, self._rest = 0, b""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        if time.monotonic() < self._retry_at_s:
            return
        self._retry_at_s = time.monotonic() + RETRY_S
        with contextlib.suppress(OSError):
            self._socket = socket.create_connection(self._address, LIMIT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)

    def _report(self, due_s: float, late_s: float, own_s: float) -> None:
        self._out += RECORD.pack(due_s, late_s, own_s)

    def _hand_over(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._out:
                del self._out[: os.write(sys.stdout.fileno(), self._out)]


def show(probe: Probe) -> None:
    """
    Print a line each second until interrupted.

    :param probe: a running one
    """
    print("p50_us p95_us p99_us requests")
    while True:
        time.sleep(1.0)
        if not probe.poll():
            return
        seen = probe.latencies()
        if seen is not None:
            print(f"{seen.p50_us:.0f} {seen.p95_us:.0f} {seen.p99_us:.0f} {seen.count}", flush=True)


def require_server(host: str, port: int) -> None:
    """
    Make sure that somebody listens: a running probe takes one that is away for a slow one.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :raises InputError: if nobody does
    """
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError as error:
        raise InputError(
            f"{host}:{port}: memcached cannot be reached: {os_reason(error)}"
        ) from error


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m deploy.load.probe", description="Measure memcached's latency."
    )
    add = line.add_argument
    add("--memcached", type=address, required=True, help="where it listens, HOST:PORT")
    add(
        "--cpu",
        type=whole_number(0),
        default=realtime.last_cpu(),
        help="the vCPU to run on (%(default)s)",
    )
    add("--raw", action="store_true", help="write binary records (due, latency, own delay)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Probe from the command line.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    host, port = arguments.memcached
    with exit_on_bad_input():
        realtime.require_cpu(arguments.cpu)
    if not arguments.raw:
        with exit_on_bad_input(), contextlib.suppress(KeyboardInterrupt):
            require_server(host, port)
            probe = Probe(host, port, arguments.cpu)
            try:
                show(probe)
            finally:
                probe.stop()
        return
    complaint = realtime.hold(arguments.cpu, PRIORITY)
    if complaint:
        print(f"coretide: probe: {complaint}", file=sys.stderr)
    oom.spare()
    gc.disable()  # nothing here makes cycles, and a collection would be a pause
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _Prober(host, port).run()


if __name__ == "__main__":
    main()
