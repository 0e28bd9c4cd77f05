"""
The load itself: requests at the rate a trace asks for, whatever memcached answers.

Requests are due at random moments (a Poisson process), collected in ticks of `TICK_S` and sent as
pipelined batches over a few connections. As in mcperf, a connection carries a bounded number of
requests; what is due while all are full waits and is sent as soon as there is room. Latencies are
not measured here: they would show the ticks (see `deploy.load.probe`).

Runs as a process of its own, started by `deploy.load`: it says `READY`, is told when to `START`,
and writes one `COUNT` after each interval.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

import numpy as np

from deploy.linux import realtime, standing
from deploy.load.mix import DEFAULT, Mix, add_mix_options, answers_in, mix_of
from env.errors import InputError
from env.inputs.commandline import OneLineParser, address, number, whole_number
from env.simulator.load import LoadTrace

TICK_S = 0.00025
CONNECTIONS = 8
OUTSTANDING = 256
"""Requests under way at most, over all connections: as the course's mcperf (-T 8 -C 8 -D 4)."""

BATCH = 16
"""Fewest requests worth a system call of their own, while more are due. On the vCPU that memcached
may have, too, batches of 4 took half as much CPU again at 100K requests/s, and p95 was the same."""

ANSWER_LIMIT_S = 1.0
"""A connection that owes answers and gives none for so long is opened anew."""

RETRY_S = 0.02
POISSON_BLOCK = 4096

READY, START = b"ready", struct.Struct("d")
"""What is written when everything is set up, and the start that is read then [monotonic s]."""

COUNT = struct.Struct("qqqdd")
"""An interval's requests due, GETs and SETs answered, share of late ticks, CPU time so far [s]."""


class Connection:
    """
    One pipelined connection: how many answers are due, and when the last one came.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    """

    def __init__(self, host: str, port: int):
        self.outstanding = 0
        self.heard_s = time.monotonic()
        self._rest = b""
        self._unsent = memoryview(b"")
        self._socket = socket.create_connection((host, port), 1.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)

    def send(self, requests: memoryview, count: int) -> None:
        """
        Send a batch; what the socket's buffer has no room for waits for `flush`.

        :param requests: the bytes of the requests
        :param count: how many requests they are
        """
        self._unsent = requests
        self.outstanding += count
        self.flush()

    def flush(self) -> bool:
        """Send what is left of a batch; whether all of it is sent."""
        if len(self._unsent):
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        return len(self._unsent) == 0

    def receive(self) -> tuple[int, int]:
        """How many answers to GETs and to SETs have come since the last call."""
        try:
            part = self._socket.recv(65536)
        except BlockingIOError:
            return 0, 0
        if not part:
            raise OSError("memcached has closed the connection")
        text = self._rest + part
        gets, sets, failed, end = answers_in(text)
        # Answers may be cut anywhere; what follows the last whole one is kept.
        self._rest = text[end:]
        self.outstanding -= gets + sets + failed
        return gets, sets

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Generator:
    """
    Sends what is due over all connections.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param connections: over how many; they share `OUTSTANDING` requests under way
    :param mix: what is asked for
    """

    def __init__(self, host: str, port: int, connections: int = CONNECTIONS, mix: Mix = DEFAULT):
        self._mix = mix
        self._address = (host, port)
        self._count = connections
        self._depth = max(1, OUTSTANDING // connections)
        rng = np.random.default_rng()
        texts = [request.text for request in mix.draw(rng)]
        self._drawn = len(texts)
        # Twice round, so that a batch can begin at any request.
        self._requests = memoryview(b"".join(texts * 2))
        self._offsets = [0, *itertools.accumulate(map(len, texts * 2))]
        self._next = 0
        self._turn = 0
        self._retry_at_s = 0.0
        self.due = self.read = self.updated = 0
        self.waiting = 0
        self.connections = self._connect()

    def tick(self, arrivals: int, now_s: float) -> None:
        """
        Take in answers, then send what is due and has room.

        :param arrivals: requests that came due since the last tick
        :param now_s: on the monotonic clock [s]
        """
        self.due += arrivals
        self.waiting += arrivals
        if not self.connections and now_s >= self._retry_at_s:
            self._reconnect()
        try:
            for connection in self.connections:
                if connection.outstanding:
                    self._receive(connection, now_s)
            if self.connections:
                self._send(now_s)
        except OSError:
            self._hang_up(now_s)

    def _receive(self, connection: Connection, now_s: float) -> None:
        gets, sets = connection.receive()
        if gets + sets:
            self.read += gets
            self.updated += sets
            connection.heard_s = now_s
        elif now_s - connection.heard_s > ANSWER_LIMIT_S:
            raise OSError("memcached is silent")

    def _send(self, now_s: float) -> None:
        share = max(BATCH, -(-self.waiting // self._count))
        for _ in range(self._count):
            if not self.waiting:
                return
            connection = self.connections[self._turn]
            self._turn = (self._turn + 1) % self._count
            room = min(self._drawn, self._depth - connection.outstanding)
            count = min(share, self.waiting, room)
            if connection.flush() and count > 0:
                if not connection.outstanding:
                    connection.heard_s = now_s
                start, end = self._offsets[self._next], self._offsets[self._next + count]
                connection.send(self._requests[start:end], count)
                self._next = (self._next + count) % self._drawn
                self.waiting -= count

    def _connect(self) -> list[Connection]:
        return [Connection(*self._address) for _ in range(self._count)]

    def _hang_up(self, now_s: float) -> None:
        """Give up what was on its way."""
        for connection in self.connections:
            connection.close()
        self.connections = []
        self._retry_at_s = now_s + RETRY_S

    def _reconnect(self) -> None:
        """Go on with a memcached that was started anew, so without records."""
        self._retry_at_s = time.monotonic() + RETRY_S
        with contextlib.suppress(OSError, InputError):
            self._mix.load(*self._address)
            self.connections = self._connect()


def arrivals_of(rng: np.random.Generator, qps: float) -> list[int]:
    """
    How many requests come due in each of the next ticks.

    :param rng: random numbers
    :param qps: the rate [requests/s]
    """
    counts: list[int] = rng.poisson(qps * TICK_S, POISSON_BLOCK).tolist()
    return counts


def run(generator: Generator, trace: LoadTrace, start_s: float) -> None:
    """
    Serve a trace, or as much of it as somebody waits for.

    :param generator: what sends
    :param trace: how much, interval by interval
    :param start_s: when the first interval starts, on the monotonic clock [s]
    """
    rng, cpu_s = np.random.default_rng(), time.process_time()
    reader = select.poll()
    reader.register(sys.stdout, 0)  # only its hanging up
    for index, qps in enumerate(trace.targets):
        end_s = start_s + (index + 1) * trace.interval_s
        due, read, updated = generator.due, generator.read, generator.updated
        ticks = late = 0
        arrivals: list[int] = []
        next_s = start_s + index * trace.interval_s
        while next_s < end_s:
            wait_s = next_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            now_s = time.monotonic()
            ticks, late = ticks + 1, late + (now_s - next_s > realtime.LATE_S)
            count = 0
            while next_s <= now_s:  # after a delay, the ticks that were missed as well
                if not arrivals:
                    arrivals = arrivals_of(rng, qps)
                    if reader.poll(0):
                        return
                count += arrivals.pop()
                next_s += TICK_S
            generator.tick(count, now_s)
        counts = (generator.due - due, generator.read - read, generator.updated - updated)
        figures = (*counts, late / max(1, ticks))
        os.write(sys.stdout.fileno(), COUNT.pack(*figures, time.process_time() - cpu_s))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m deploy.load.generator")
    add = line.add_argument
    add("--memcached", type=address, required=True)
    add("--cpu", type=whole_number(0), required=True)
    add("--interval", type=number(0.001), required=True)
    add("--connections", type=whole_number(1, OUTSTANDING), default=CONNECTIONS)
    add_mix_options(line)
    add("targets", type=whole_number(1), nargs="+")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Generate load as `deploy.load` asks.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    trace = LoadTrace.explicit(arguments.targets, arguments.interval)
    host, port = arguments.memcached
    generator = Generator(host, port, arguments.connections, mix_of(arguments))
    complaint = realtime.hold(arguments.cpu, standing.LOAD)
    if complaint:
        print(f"coretide: load: {complaint}", file=sys.stderr)
    gc.disable()  # nothing here makes cycles, and a collection would be a pause
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        os.write(sys.stdout.fileno(), READY)
        start = sys.stdin.buffer.read(START.size)
        if len(start) == START.size:
            run(generator, trace, *START.unpack(start))


if __name__ == "__main__":
    main()
