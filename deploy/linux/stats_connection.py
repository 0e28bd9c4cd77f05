"""memcached's `stats` over a connection of our own, asked for and picked up without a wait."""

import contextlib
import math
import select
import socket
from dataclasses import dataclass

from deploy.linux.service_process import MEMCACHED, NUTCRACKER, who_serves

RECONNECT_S = 0.2
"""How often a lost connection is tried again."""

ANSWER_LIMIT_S = 2.0
"""A connection that owes an answer for so long is given up."""

LONGEST_ANSWER = 64 << 10
"""More than `stats` ever answers [bytes]."""

ASKED: tuple[bytes, ...] = (b"STAT cmd_get ", b"STAT cmd_set ", b"STAT cmd_touch ")
HANDED_ON: tuple[bytes, ...] = (b"STAT proxy_conn_requests ",)
"""What `stats` counts of a memcached that holds keys, and of a proxy, our questions included."""

LONGEST_NUMBER = 20
"""Digits of the largest 64-bit counter."""


@dataclass(slots=True)  # one is made at every poll: frozen ones take longer to make
class Requests:
    """memcached's request counter, and when it was asked for."""

    time_s: float
    count: int


class StatsConnection:
    """
    memcached's `stats`, asked for and picked up later.

    `complaint` says why there can be no connection that is not memcached's fault; `counters` are
    those that count its requests.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    """

    program, question, end = MEMCACHED, b"stats\r\n", b"END\r\n"

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self.complaint = ""
        self.pid = self.threads = 0
        self.counters = ASKED
        self._socket: socket.socket | None = None
        self._arrival = select.poll()
        self._head = b""  # what an answer begins with as long as one process gives it
        self._answer = self.last = b""  # so far, and the last one that made sense
        self._asked_s: float | None = None
        self._tried_s = -math.inf

    def ask(self, now_s: float) -> None:
        """
        Send `stats`, unless an answer is still due; reconnect if there is no connection.

        :param now_s: the present time [s]
        """
        if self._socket is None:
            self._connect(now_s)
        elif self._asked_s is None:
            self._send(now_s)
        elif now_s - self._asked_s > ANSWER_LIMIT_S:
            self.close()

    def receive(self, patience_s: float = 0.0) -> Requests | None:
        """
        The answer, if all of it has come and it makes sense.

        :param patience_s: how long to wait for its first part [s]
        """
        if self._socket is None or self._asked_s is None:
            return None
        if patience_s > 0.0:
            self._arrival.poll(1e3 * patience_s)
        try:
            while not self._answer.endswith(self.end):
                part = self._socket.recv(LONGEST_ANSWER)
                self._answer += part
                if not part or len(self._answer) > LONGEST_ANSWER:  # hung up, or no memcached
                    self.close()
                    return None
        except BlockingIOError:
            return None
        except OSError:
            self.close()
            return None
        reading = self._parse(self._answer, self._asked_s)
        self._answer, self._asked_s = b"", None
        if reading is None:
            self.close()
        return reading

    def close(self) -> None:
        """Hang up; `ask` connects again."""
        if self._socket is not None:
            self._arrival.unregister(self._socket)
            self._socket.close()
        self._socket, self._asked_s, self._answer = None, None, b""

    def _connect(self, now_s: float) -> None:
        if now_s - self._tried_s < RECONNECT_S:
            return
        self._tried_s = now_s
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self.complaint = f"it cannot be asked: {error.strerror}"
            return
        self.complaint = ""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BlockingIOError):
            try:
                connection.connect((self.host, self.port))
            except BlockingIOError:
                raise
            except OSError:
                connection.close()
                return
        self._socket = connection
        self._arrival.register(connection, select.POLLIN)

    def _send(self, now_s: float) -> None:
        assert self._socket is not None
        try:
            self._socket.send(self.question)
            self._asked_s = now_s
        except BlockingIOError:
            pass  # still connecting
        except OSError:
            self.close()

    def _parse(self, answer: bytes, asked_s: float) -> Requests | None:
        try:
            if not (self._head and answer.startswith(self._head)):
                self.pid = number_in(answer, b"STAT pid ")
                self.threads = number_in(answer, b"STAT threads ")
                self._head = b"STAT pid %d\r\n" % self.pid
            reading = Requests(asked_s, sum(number_in(answer, name) for name in self.counters))
        except ValueError:
            return None
        self.last = answer
        return reading


class VersionConnection(StatsConnection):
    """
    nutcracker has no `stats` and counts nothing here: members do. That it answers is all it tells.

    It hands `version` on to one of its members, and says so where that does not answer.
    """

    program, question, end = NUTCRACKER, b"version\r\n", b"\r\n"

    def close(self) -> None:
        """Hang up; another process may answer next."""
        super().close()
        self.pid = 0

    def _parse(self, answer: bytes, asked_s: float) -> Requests | None:
        if not answer.startswith((b"VERSION ", b"SERVER_ERROR ")):
            return None
        try:
            self.pid = self.pid or who_serves(self.port, self.program)
        except OSError as error:  # no file descriptor left
            self.complaint = f"it cannot be looked for: {error.strerror}"
        self.threads = 1
        return Requests(asked_s, 0) if self.pid else None


def number_in(answer: bytes, name: bytes) -> int:
    """
    A counter in an answer to `stats`.

    :param answer: all of it
    :param name: as it stands there, with a space behind it
    :raises ValueError: if it is not there, or no number
    """
    start = answer.index(name) + len(name)
    text = answer[start : answer.index(b"\r", start)]
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"{name!r} is a number of {len(text)} digits")
    return int(text)
