"""
The closed loop: a number of clients, each of whom waits for its answer, thinks, and asks again.

So the load follows memcached, as that of mcperf's and memtier's clients does without a target, and
as the models of `training.analysis` have it. Every latency counts from the sending of its request;
a client that thinks for a while does so for an exponentially distributed time.
"""

import heapq
import itertools
import math
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from deploy.linux import realtime
from deploy.linux.readiness import await_readable
from deploy.load.mix import GET, SET, Mix, answers_in
from env.errors import InputError, os_reason

ANSWER_LIMIT_S = 10.0
"""A memcached that is silent for so long is gone."""

MOST_CLIENTS = 1000


@dataclass
class ClientsInterval:
    """
    What the clients have seen in an interval.

    :param start_s: on the monotonic clock [s]
    :param end_s: on the monotonic clock [s]
    :param latencies_s: of the answered requests, by operation [s]
    :param late: requests that were sent more than `realtime.LATE_S` after their client had thought
    """

    start_s: float
    end_s: float
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {GET: [], SET: []})
    late: int = 0

    @property
    def count(self) -> int:
        """How many requests were answered."""
        return sum(map(len, self.latencies_s.values()))


class Clients:
    """
    Clients of a memcached, each with a connection of its own.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param count: how many
    :param think_s: how long each thinks between an answer and its next request, on average [s]
    :param mix: what they ask for
    :raises InputError: if memcached cannot be reached
    """

    def __init__(self, host: str, port: int, count: int, think_s: float, mix: Mix):
        self._where = f"{host}:{port}"
        self._think_s = think_s
        self._rng = np.random.default_rng()
        self._requests = itertools.cycle(mix.draw(self._rng))
        self._sockets: dict[int, socket.socket] = {}
        try:
            for _ in range(count):
                connection = socket.create_connection((host, port), ANSWER_LIMIT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets[connection.fileno()] = connection
        except OSError as error:
            self.close()
            raise self._gone(error) from error
        # Who waits for an answer: since when, to what, and what has come of it.
        self._waiting: dict[int, tuple[float, str, bytes]] = {}
        self._heard_s = 0.0
        self._thinking: list[tuple[float, int]] = []  # a heap: until when, and who

    def intervals(self, lengths_s: list[float]) -> Iterator[ClientsInterval]:
        """
        Ask until the last interval has ended.

        :param lengths_s: of the intervals, one after another [s]
        :return: each as it ends
        :raises InputError: if memcached hangs up or falls silent
        """
        end_s = self._heard_s = time.monotonic()
        self._thinking = [(end_s + self._thought_s(), one) for one in self._sockets]
        heapq.heapify(self._thinking)
        for length_s in lengths_s:
            interval = ClientsInterval(end_s, end_s + length_s)
            end_s = interval.end_s
            while (now_s := time.monotonic()) < end_s:
                try:
                    self._turn(interval, now_s)
                except OSError as error:
                    raise self._gone(error) from error
            yield interval

    def close(self) -> None:
        """Hang up."""
        for connection in self._sockets.values():
            connection.close()

    def _turn(self, interval: ClientsInterval, now_s: float) -> None:
        """Send what is due, then wait for an answer or the next client's decision."""
        while self._thinking and self._thinking[0][0] <= now_s:
            due_s, one = heapq.heappop(self._thinking)
            request = next(self._requests)
            sent_s = time.monotonic()
            interval.late += sent_s - due_s > realtime.LATE_S
            self._waiting[one] = (sent_s, request.operation, b"")
            self._sockets[one].sendall(request.text)
        until_s = min(interval.end_s, self._thinking[0][0] if self._thinking else math.inf)
        for one in await_readable(self._waiting, max(0.0, until_s - time.monotonic())):
            self._receive(one, interval)
        if self._waiting and time.monotonic() - self._heard_s > ANSWER_LIMIT_S:
            raise TimeoutError(f"no answer for {ANSWER_LIMIT_S:g} s")
        if not self._waiting:
            self._heard_s = time.monotonic()

    def _receive(self, one: int, interval: ClientsInterval) -> None:
        sent_s, operation, text = self._waiting[one]
        part = self._sockets[one].recv(1 << 20)
        if not part:
            raise ConnectionResetError("it has closed the connection")
        text += part
        self._heard_s = now_s = time.monotonic()
        if not answers_in(text).end:
            self._waiting[one] = (sent_s, operation, text)
            return
        del self._waiting[one]
        interval.latencies_s[operation].append(now_s - sent_s)
        heapq.heappush(self._thinking, (now_s + self._thought_s(), one))

    def _thought_s(self) -> float:
        return float(self._rng.exponential(self._think_s)) if self._think_s else 0.0

    def _gone(self, error: OSError) -> InputError:
        return InputError(f"{self._where}: memcached does not answer: {os_reason(error)}")
