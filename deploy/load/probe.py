"""
A latency probe: about 1000 requests a second on a connection of its own, from a process of its own.

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
LIMIT_S = 0.25
RETRY_S = 0.02
WAITS_S = 0.001
"""A request that has had no answer for longer is told of while it waits: about an SLO."""

PRIORITY = 3
"""Above the load generator's: it shares the vCPU and must not delay the probe's clock."""

RECORD = struct.Struct("dff?")
"""When a request was due, on the monotonic clock [s], its latency [s], how much of that is the
probe's own, who was late to send it [s], and whether it was a SET. Of the oldest one that still
waits, the time so far, below zero: without that nobody could tell a silent memcached from a probe
that does not run."""


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
        self._records: deque[tuple[float, float, float, bool]] = deque()
        self._rest = b""
        self._told_s = time.monotonic()
        self._heard_s = 0.0
        # The oldest request without an answer, as last told.
        self._waiting = (0.0, 0.0, 0.0, False)
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
            if record[1] < 0.0:
                self._waiting = record
            else:
                self._records.append(record)
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

    def _due(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, float, bool]]:
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
        for due_s, late_s, own_s, _ in reversed(self._records):
            if due_s <= self._told_s:
                break
            count += 1
            late += late_s - own_s > limit_s
        self._told_s = max(self._told_s, self.known_until_s)
        due_s, waited_s, own_s, _ = self._waiting
        if due_s > self.known_until_s:
            until_s = due_s - waited_s - limit_s
            unanswered = int(RATE_QPS * (until_s - max(self._told_s, due_s + own_s)))
            if unanswered > 0:
                self._told_s = until_s
                return count + unanswered, late + unanswered
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
        self._socket: socket.socket | None = None
        self._retry_at_s = 0.0
        self._rest = b""
        # When the unanswered requests were due, how late they were sent and whether they are SETs;
        # the first `_late` of them count as late already.
        self._waiting: deque[tuple[float, float, bool]] = deque()
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
            self._tell_waiting()
            self._hand_over()

    def _send(self, due_s: float) -> None:
        request = next(self._requests)
        self._waiting.append((due_s, time.monotonic() - due_s, request.operation == SET))
        if self._socket is None:
            self._connect()
        if self._socket is None:
            self._lose()
            return
        try:
            if self._socket.send(request.text) != len(request.text):
                self._lose()
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
        text = self._rest + part
        gets, sets, failed, end = answers_in(text)
        self._rest = text[end:]
        for _ in range(min(gets + sets + failed, len(self._waiting))):
            due_s, own_s, is_set = self._waiting.popleft()
            if self._late:
                self._late -= 1
            else:
                self._report(due_s, min(now_s - due_s, LIMIT_S), own_s, is_set)

    def _count_late(self) -> None:
        now_s = time.monotonic()
        while self._late < len(self._waiting):
            due_s, own_s, is_set = self._waiting[self._late]
            if now_s - due_s <= LIMIT_S:
                return
            self._report(due_s, LIMIT_S, own_s, is_set)
            self._late += 1

    def _tell_waiting(self) -> None:
        if self._late < len(self._waiting):
            due_s, own_s, is_set = self._waiting[self._late]
            waited_s = time.monotonic() - due_s
            if waited_s - own_s > WAITS_S:
                self._report(due_s, -waited_s, own_s, is_set)

    def _lose(self) -> None:
        """The connection has gone: no answer to what was sent will come."""
        for due_s, own_s, is_set in list(self._waiting)[self._late :]:
            self._report(due_s, LIMIT_S, own_s, is_set)
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

    def _report(self, due_s: float, late_s: float, own_s: float, is_set: bool) -> None:
        self._out += RECORD.pack(due_s, late_s, own_s, is_set)

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
    complaint = realtime.hold(arguments.cpu, PRIORITY)
    if complaint:
        print(f"coretide: probe: {complaint}", file=sys.stderr)
    standing.spare()
    gc.disable()  # nothing here makes cycles, and a collection would be a pause
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _Prober(host, port, mix_of(arguments)).run()


if __name__ == "__main__":
    main()
