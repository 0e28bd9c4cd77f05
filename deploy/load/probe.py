"""
A latency probe: about 1000 requests a second on connections of its own, from a process of its own.

memcached deals connections to its worker threads in turn, and one worker may wait for a vCPU where
another does not. So the probe has several connections and asks on them in turn: on one alone it
would see what a single worker does.

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
import itertools
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

import numpy as np

from deploy.linux import realtime, standing
from deploy.linux.helpers import helper_command
from deploy.linux.readiness import await_readable
from deploy.load.mix import DEFAULT, GET, SET, Mix, add_mix_options, answers_in, mix_of
from deploy.records.latencies import SILENT_S, Latencies
from deploy.records.mcperf import percentile
from env.errors import InputError, exit_on_bad_input, os_reason
from env.inputs.commandline import OneLineParser, address, whole_number

RATE_QPS = 1000.0
CONNECTIONS = 12
"""As many for each worker where memcached has 1, 2, 3, 4, 6 or 12 of them, until one is lost."""

LIMIT_S = 0.25
CONNECT_S, RETRY_S = 0.05, 0.02
"""How long a connection may take, while nothing is asked, and the pause until the next try."""

WAITS_S = 0.001
"""A request that has had no answer for longer is told of once while it waits: about an SLO."""

RECORD = struct.Struct("dff?")
"""When a request was due, on the monotonic clock [s], its latency [s], how much of that is the
probe's own, who was late to send it [s], and whether it was a SET. Of one that still waits, the
time so far, below zero: without that nobody could tell a silent memcached from a probe that does
not run."""

Record = tuple[float, float, float, bool]


class Probe:
    """
    A running probe, as seen by the process that started it.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param cpu: the vCPU the probe runs on, with real-time priority
    :param keep_s: how long its records are kept [s]
    :param mix: what it asks for
    """

    name = "latency probe"

    def __init__(self, host: str, port: int, cpu: int, keep_s: float = 1.0, mix: Mix = DEFAULT):
        self.keep_s = keep_s
        self._records: deque[Record] = deque()  # by when they were due
        self._fresh: deque[Record] = deque()  # since `late_lately` was asked, as they came
        # How late they were sent, of requests that wait and have been told of, by when they were
        # due [s]; and those of them that count as late already.
        self._waiting: dict[float, float] = {}
        self._late: set[float] = set()
        self._rest = b""
        self._heard_s = 0.0
        self._latest_s = 0.0  # the latest moment that a record speaks of
        options = ["--raw", "--memcached", f"{host}:{port}", "--cpu", str(cpu), *mix.options()]
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
        if whole:
            self._heard_s = time.monotonic()
        for record in RECORD.iter_unpack(self._rest[:whole]):
            self._take(record)
        self._rest = self._rest[whole:]
        forgotten_s = time.monotonic() - self.keep_s
        for kept in (self._records, self._fresh):
            while kept and kept[0][0] < forgotten_s:
                kept.popleft()
        return alive

    def _take(self, record: Record) -> None:
        due_s, late_s, own_s, _ = record
        # When a request was given up, or lost with its connection, its latency does not say.
        self._latest_s = max(self._latest_s, due_s + (abs(late_s) if late_s < LIMIT_S else 0.0))
        if late_s < 0.0:
            self._waiting[due_s] = own_s
            return
        self._waiting.pop(due_s, None)
        self._fresh.append(record)
        later = []
        while self._records and self._records[-1][0] > due_s:
            later.append(self._records.pop())
        self._records.append(record)
        self._records.extend(reversed(later))

    @property
    def known_until_s(self) -> float:
        """Every request due before this moment was answered or counted as late [monotonic s]."""
        # The probe tells of what waits after `WAITS_S` only, and of the oldest request first.
        return next(iter(self._waiting), max(0.0, self._latest_s - WAITS_S))

    def between(self, start_s: float, end_s: float) -> list[float]:
        """
        Latencies of the requests that were due in a stretch of time [s], the latest first.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        """
        return [late_s for _, late_s, _, _ in self._due(start_s, end_s)]

    def by_operation(self, start_s: float, end_s: float) -> dict[str, list[float]]:
        """
        The same, GETs and SETs apart.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        """
        found: dict[str, list[float]] = {GET: [], SET: []}
        for _, late_s, _, is_set in self._due(start_s, end_s):
            found[SET if is_set else GET].append(late_s)
        return found

    def own_late(self, start_s: float, end_s: float) -> float:
        """
        Share of the requests due in a stretch of time that the probe itself sent late.

        About as many answers were read late: both wait for the probe's vCPU at random moments.

        :param start_s: on the monotonic clock [s]
        :param end_s: on the monotonic clock [s]
        :return: 0 to 1; 0 where none was due
        """
        own = [own_s > realtime.LATE_S for _, _, own_s, _ in self._due(start_s, end_s)]
        return sum(own) / max(1, len(own))

    def _due(self, start_s: float, end_s: float) -> Iterator[Record]:
        """The records of a stretch of time, the latest first; older ones are not looked at."""
        recent = itertools.takewhile(lambda record: record[0] >= start_s, reversed(self._records))
        return (record for record in recent if record[0] < end_s)

    def late_lately(self, limit_s: float) -> tuple[int, int]:
        """
        How many requests are known of since the last call, and how many of them are late.

        A request that waits for its answer counts as late once it is over the limit. When its
        answer comes it is not counted again. What the probe itself was late to send, or to say, is
        not the server's.

        :param limit_s: what is late [s]
        """
        count = late = 0
        for due_s, late_s, own_s, _ in self._fresh:
            if due_s not in self._late:
                count += 1
                late += late_s - own_s > limit_s
        self._fresh.clear()
        self._late &= self._waiting.keys()
        for due_s, own_s in self._waiting.items():
            if due_s not in self._late and self._latest_s - due_s - own_s > limit_s:
                self._late.add(due_s)
                count, late = count + 1, late + 1
        return count, late

    @property
    def stale(self) -> bool:
        """Whether nothing has been heard for long, though it tells of what waits, too."""
        return 0.0 < self._heard_s < time.monotonic() - SILENT_S

    def latencies(self, window_s: float) -> Latencies | None:
        """
        What the requests show that came due lately; None if there were none.

        :param window_s: how far back, at most what is kept [s]
        """
        now_s = time.monotonic()
        ordered = sorted(self.between(now_s - window_s, now_s))
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


@dataclass
class _Asked:
    """A request: when it was due, how late it was sent [s], if it is a SET, and has a latency."""

    due_s: float
    own_s: float
    is_set: bool
    measured: bool = False


class _Line:
    """One of the probe's connections, and the requests on it that have no answer, oldest first."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.waiting: deque[_Asked] = deque()
        self._rest = b""

    def connect(self, address: tuple[str, int]) -> None:
        """
        Connect.

        :param address: host and port
        :raises OSError: if nobody answers
        """
        self.socket = socket.create_connection(address, CONNECT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)

    def send(self, text: bytes) -> None:
        """
        Send a request.

        :param text: all of it
        :raises OSError: if the connection has gone, or does not take it whole
        """
        if self.socket is None or self.socket.send(text) != len(text):
            raise BrokenPipeError

    def answered(self) -> list[_Asked]:
        """
        The requests whose answers have come.

        :raises OSError: if the connection has gone
        """
        part = self.socket.recv(65536) if self.socket is not None else b""
        if not part:
            raise BrokenPipeError
        text = self._rest + part
        gets, sets, failed, end = answers_in(text)
        self._rest = text[end:]
        count = min(gets + sets + failed, len(self.waiting))
        return [self.waiting.popleft() for _ in range(count)]

    def hang_up(self) -> None:
        """Close the connection, and wait for nothing."""
        self.waiting.clear()
        self._rest = b""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class _Prober:
    """
    The probing process's loop.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param mix: what it asks for
    """

    def __init__(self, host: str, port: int, mix: Mix):
        self._address = (host, port)
        self._requests = itertools.cycle(mix.draw(np.random.default_rng()))
        self._lines = [_Line() for _ in range(CONNECTIONS)]
        self._turn = itertools.cycle(self._lines)
        # Requests that may still have to be told of as waiting, and as late, oldest first.
        self._untold: deque[_Asked] = deque()
        self._in_time: deque[_Asked] = deque()
        self._retry_at_s = 0.0
        self._out = bytearray()

    def run(self) -> None:
        """
        Probe for ever.

        :raises BrokenPipeError: when nobody reads the records any more
        """
        os.set_blocking(sys.stdout.fileno(), False)
        due_s = time.monotonic()
        while True:
            answering = self._await(due_s)
            now_s = time.monotonic()
            # All that is due is sent, and all that has waited for `WAITS_S` is told of, before an
            # answer is: so who reads of an answer has read of every request due earlier than that.
            while due_s <= now_s:
                self._send(due_s)
                due_s += random.expovariate(RATE_QPS)
            self._tell_waiting(now_s)
            for line in answering:
                self._receive(line, now_s)
            self._hand_over()

    def _await(self, until_s: float) -> list[_Line]:
        """Wait for answers, or for time to pass; the connections that have some."""
        left_s = until_s - time.monotonic()
        if left_s <= 0.0:
            return []
        asked = {line.socket.fileno(): line for line in self._lines if line.waiting and line.socket}
        return [asked[file] for file in await_readable(asked, left_s)]

    def _send(self, due_s: float) -> None:
        request, line = next(self._requests), self._next_line()
        asked = _Asked(due_s, time.monotonic() - due_s, request.operation == SET)
        for queue in (line.waiting, self._untold, self._in_time):
            queue.append(asked)
        try:
            line.send(request.text)
        except OSError:
            self._lose(line)

    def _next_line(self) -> _Line:
        """The next connection in turn; one that cannot be had is passed over for those that are."""
        line = next(self._turn)
        if line.socket is None:
            self._connect()
        for _ in self._lines:
            if line.socket is not None:
                break
            line = next(self._turn)
        return line

    def _receive(self, line: _Line, now_s: float) -> None:
        try:
            for asked in line.answered():
                self._measure(asked, min(now_s - asked.due_s, LIMIT_S))
        except OSError:
            self._lose(line)

    def _tell_waiting(self, now_s: float) -> None:
        """Tell of the requests that wait for an answer, and count those that wait for too long."""
        while self._untold and now_s - self._untold[0].due_s > WAITS_S:
            asked = self._untold.popleft()
            if not asked.measured:
                self._report(asked, asked.due_s - now_s)
        while self._in_time and now_s - self._in_time[0].due_s > LIMIT_S:
            self._measure(self._in_time.popleft(), LIMIT_S)

    def _lose(self, line: _Line) -> None:
        """The connection has gone: no answer to what was sent will come."""
        for asked in line.waiting:
            self._measure(asked, LIMIT_S)
        line.hang_up()

    def _connect(self) -> None:
        """Connect all that are not, one after another, so that memcached deals them in turn."""
        if time.monotonic() < self._retry_at_s:
            return
        with contextlib.suppress(OSError):
            for line in self._lines:
                if line.socket is None:
                    line.connect(self._address)
        self._retry_at_s = time.monotonic() + RETRY_S

    def _measure(self, asked: _Asked, late_s: float) -> None:
        """A latency is known; whatever comes of the request later does not count again."""
        if not asked.measured:
            asked.measured = True
            self._report(asked, late_s)

    def _report(self, asked: _Asked, late_s: float) -> None:
        self._out += RECORD.pack(asked.due_s, late_s, asked.own_s, asked.is_set)

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
        seen = probe.latencies(1.0)
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
    add("--raw", action="store_true", help="write binary records (due, latency, own delay, SET)")
    add_mix_options(line)
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
            probe = Probe(host, port, arguments.cpu, mix=mix_of(arguments))
            try:
                show(probe)
            finally:
                probe.stop()
        return
    complaint = realtime.hold(arguments.cpu, standing.PROBE)
    if complaint:
        print(f"coretide: probe: {complaint}", file=sys.stderr)
    standing.spare()
    gc.disable()  # nothing here makes cycles, and a collection would be a pause
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _Prober(host, port, mix_of(arguments)).run()


if __name__ == "__main__":
    main()
