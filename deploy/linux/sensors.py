"""
What the machine shows, read without ever waiting.

memcached's CPU time and run-queue delay come from its threads' schedstat through file
descriptors that are kept; its request counters come from `stats` over a connection of our own,
asked for just before a poll and read in it if they are there. Each reading carries the time it
was taken. One that fails, makes no sense or goes back in time is dropped, never made up: the
last good one stays and grows old.
"""

import contextlib
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import sub
from pathlib import Path

from deploy.linux.service_process import (
    MOST_THREADS,
    OUT_OF_FILES,
    Identity,
    Program,
    identify,
    is_alive,
    is_memcached,
    program,
    thread_ids,
)

THREADS_EVERY_S = 1.0
"""How often memcached's threads are listed anew."""

RECONNECT_S = 0.2
"""How often a lost connection is tried again."""

ANSWER_LIMIT_S = 2.0
"""A connection that owes an answer for so long is given up."""

LONGEST_ANSWER = 64 << 10
"""More than `stats` ever answers [bytes]."""

LONGEST_NUMBER = 20
"""Digits of the largest 64-bit counter."""

MOST_QPS = 1e8
"""More than any memcached serves [requests/s]."""

SLACK_S = 0.1
"""How much more than a whole window a thread's clock may have moved on in it."""

LONGEST_WINDOW_S = 1.0
"""Counters further apart than this say nothing about the rate now."""

STEADY_S = 1.0
"""Counters that fall again within this time are not believed until they have not for as long."""

MOST_NEWS = 16
"""Lines that are kept for somebody to write down."""


@dataclass(frozen=True)
class Cpu:
    """memcached's CPU seconds and run-queue delay, and when they were read."""

    time_s: float
    cpu_s: float
    run_delay_s: float


@dataclass(frozen=True)
class Requests:
    """memcached's request counter, and when it was asked for."""

    time_s: float
    count: int


class ThreadClock:
    """
    CPU time and run-queue delay of a process, from its threads' schedstat.

    A thread that ends keeps what it has used in the sums. `complaint` says which threads are not
    seen; empty while all of them are.

    :param who: the process
    :param now_s: the present time, on the clock that `read` is given [s]
    :raises OSError: if it is gone, or there are not enough file descriptors
    """

    def __init__(self, who: Identity, now_s: float):
        self.who = who
        self.complaint = ""
        self._files: dict[int, int] = {}
        self._last: dict[int, tuple[bytes, int, int]] = {}  # as read, and what it says [ns]
        self._cpu_ns = self._delay_ns = 0
        try:
            self._list_threads(now_s)
        except OSError:
            self.close()
            raise

    def read(self, now_s: float) -> Cpu:
        """
        Read all threads, about 1 µs each.

        :param now_s: the present time [s]
        :raises OSError: if the process is gone
        """
        if now_s - self._listed_s >= THREADS_EVERY_S:
            try:
                self._list_threads(now_s)
            except OSError as error:
                if error.errno not in OUT_OF_FILES:
                    raise
                self.complaint = f"its new threads are not seen: {error.strerror}"
        gone = [
            thread for thread, file in self._files.items() if not self._read_thread(file, thread)
        ]
        for thread in gone:
            self._forget(thread)
        if not self._files:
            raise ProcessLookupError(f"process {self.who.pid} has no thread left")
        return Cpu(now_s, self._cpu_ns * 1e-9, self._delay_ns * 1e-9)

    @property
    def threads(self) -> int:
        """How many threads are read."""
        return len(self._files)

    def close(self) -> None:
        """Give the file descriptors back."""
        for thread in list(self._files):
            self._forget(thread)

    def _read_thread(self, file: int, thread: int) -> bool:
        before, cpu_before, delay_before = self._last.get(thread, (b"", 0, 0))
        try:
            text = os.pread(file, 80, 0)
            if text == before:  # most threads rest most of the time
                return True
            cpu, delay, _ = map(int, text.split())
        except (OSError, ValueError):
            return False
        self._last[thread] = (text, cpu, delay)
        self._cpu_ns += cpu - cpu_before
        self._delay_ns += delay - delay_before
        return True

    def _list_threads(self, now_s: float) -> None:
        self._listed_s = now_s
        if not is_alive(self.who):
            raise ProcessLookupError(f"process {self.who.pid} is gone")
        listed = thread_ids(self.who.pid)
        for thread in listed:
            if thread not in self._files and len(self._files) < MOST_THREADS:
                path = f"/proc/{self.who.pid}/task/{thread}/schedstat"
                with contextlib.suppress(FileNotFoundError):
                    self._files[thread] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        crowd = len(listed) > MOST_THREADS
        self.complaint = f"only {MOST_THREADS} of its threads are followed" if crowd else ""

    def _forget(self, thread: int) -> None:
        os.close(self._files.pop(thread))
        self._last.pop(thread, None)


class StatsConnection:
    """
    memcached's `stats`, asked for and picked up later.

    `complaint` says why there can be no connection that is not memcached's fault.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    """

    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self.complaint = ""
        self.pid = self.threads = 0
        self._socket: socket.socket | None = None
        self._answer = b""
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
            arrival = select.poll()
            arrival.register(self._socket, select.POLLIN)
            arrival.poll(1e3 * patience_s)
        try:
            while not self._answer.endswith(b"END\r\n"):
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

    def _send(self, now_s: float) -> None:
        assert self._socket is not None
        try:
            self._socket.send(b"stats\r\n")
            self._asked_s = now_s
        except BlockingIOError:
            pass  # still connecting
        except OSError:
            self.close()

    def _parse(self, answer: bytes, asked_s: float) -> Requests | None:
        try:
            self.pid = _number(answer, b"STAT pid ")
            self.threads = _number(answer, b"STAT threads ")
            commands = (b"STAT cmd_get ", b"STAT cmd_set ", b"STAT cmd_touch ")
            return Requests(asked_s, sum(_number(answer, name) for name in commands))
        except ValueError:
            return None


class VcpuClock:
    """
    Busy seconds of each vCPU, from the finest source the machine has; see `source`.

    `bad_since_s` says since when readings make no sense, on the monotonic clock [s]; inf while they
    do make sense.

    :param vcpus: number of vCPUs, counted from vCPU 0
    :param cpuacct: the mount of the version 1 controller, where there is one
    """

    def __init__(self, vcpus: int, cpuacct: Path | None):
        self.bad_since_s = math.inf
        self._vcpus = min(vcpus, os.cpu_count() or vcpus)  # a dry run may want more than there are
        self._busy_s = (0.0,) * self._vcpus
        candidates: list[tuple[Path, Callable[[bytes], list[float]]]] = [
            (Path("/proc/schedstat"), _from_schedstat),
            (Path("/proc/stat"), _from_stat),
        ]
        if cpuacct is not None:
            candidates.insert(0, (cpuacct / "cpuacct.usage_percpu", _from_cpuacct))
        path, self._parse = next(one for one in candidates if one[0].exists())
        self.source = str(path)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[float, ...]:
        """Busy seconds since boot; those of the last reading that made sense, 0 before it."""
        with contextlib.suppress(OSError, ValueError, IndexError, OverflowError):
            text = b""
            busy_s: tuple[float, ...] = ()
            # The kernel gives a page of a long file at a time, whatever it is asked for.
            while len(busy_s) < self._vcpus and (part := os.pread(self._file, 64 << 10, len(text))):
                text += part
                busy_s = tuple(self._parse(text)[: self._vcpus])
            if len(busy_s) == self._vcpus and min(map(sub, busy_s, self._busy_s)) >= 0.0:
                self._busy_s, self.bad_since_s = busy_s, math.inf
                return busy_s
        self.bad_since_s = min(self.bad_since_s, time.monotonic())
        return self._busy_s

    def close(self) -> None:
        """Give the file descriptor back."""
        os.close(self._file)


class StolenClock:
    """
    Time that the hypervisor ran others while one of the first vCPUs wanted to run.

    :param vcpus: how many vCPUs, counted from vCPU 0
    :raises OSError: if the kernel does not show it
    """

    def __init__(self, vcpus: int):
        self._vcpus = vcpus
        self._stolen_s = 0.0
        self._file = os.open("/proc/stat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> float:
        """Seconds since boot, all vCPUs together; those of the last reading that made sense."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = os.pread(self._file, 64 << 10, 0).splitlines()[1 : self._vcpus + 1]
            ticks = sum(int(line.split()[8]) for line in lines if line.startswith(b"cpu"))
            # Its counters may fall for a moment.
            self._stolen_s = max(self._stolen_s, ticks / os.sysconf("SC_CLK_TCK"))
        return self._stolen_s

    def close(self) -> None:
        """Give the file descriptor back."""
        os.close(self._file)


class ServiceSensor:
    """
    memcached as the loop sees it: found by its address, followed when it restarts.

    Counters go on where they stood when a new process takes over, which must be the same program of
    the same user: whoever comes first may take the port of a memcached that restarts. Times are on
    whatever clock `ask` and `receive` are given. `news` has what is out of the ordinary, one line
    each, for whoever writes it down.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param known: what the process must run that answers first; None for whatever it runs
    """

    def __init__(self, host: str, port: int, known: Program | None = None):
        self.stats = StatsConnection(host, port)
        self.who: Identity | None = None
        self.cpu: Cpu | None = None
        self.requests: Requests | None = None
        self.qps = self.cpu_cores = 0.0
        self.news: deque[str] = deque(maxlen=MOST_NEWS)
        self._program = known
        self._told: set[str] = set()
        self._clock: ThreadClock | None = None
        self._cpu_before: Cpu | None = None
        self._requests_before: Requests | None = None
        self._cpu_offset = self._delay_offset = 0.0
        self._requests_offset = 0
        self._fell_s = self._doubted_until_s = -math.inf

    def ask(self, now_s: float) -> None:
        """
        Read the CPU time, and ask for the counters.

        :param now_s: the present time [s]
        """
        self.stats.ask(now_s)
        self._read_cpu(now_s)
        if self.stats.complaint:
            self._tell_once("files", self.stats.complaint)

    def receive(self, now_s: float, patience_s: float = 0.0) -> None:
        """
        Take in the counters that were asked for, if they are there.

        :param now_s: the present time [s]
        :param patience_s: how long to wait for them [s]
        """
        reading = self.stats.receive(patience_s)
        if reading is None:
            return
        if self._follow(self.stats.pid, now_s):
            self._count(reading)
        else:
            self.stats.close()  # the next connection may find memcached

    def age_s(self, now_s: float) -> float:
        """
        Age of the older of both readings [s]; infinite before the first.

        :param now_s: the present time [s]
        """
        if self.cpu is None or self.requests is None:
            return math.inf
        return now_s - min(self.cpu.time_s, self.requests.time_s)

    def close(self) -> None:
        """Hang up and give the file descriptors back."""
        self.stats.close()
        if self._clock is not None:
            self._clock.close()

    def _follow(self, pid: int, now_s: float) -> bool:
        """
        Turn to the process that answers, if it is another one than before.

        :return: whether what it says is memcached's
        """
        if self.who is not None and self.who.pid == pid and self._clock is not None:
            return True
        try:
            if not is_memcached(pid, self.stats.port):
                return False
            who, runs = identify(pid), program(pid)
            if self._program not in (None, runs):
                stranger = f"{runs.path} of user {runs.users[1]}"
                self._tell_once("stranger", f"not followed: {stranger} answers in its place")
                return False
            clock = ThreadClock(who, now_s)
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                self._tell_once("files", f"it cannot be followed: {error.strerror}")
            return False
        try:
            first = clock.read(now_s)
        except OSError:
            clock.close()
            return False
        if self._clock is not None:
            self._clock.close()
        successor = self.who is not None
        self._program = runs
        self._told.clear()
        self._clock = clock
        if self.who is not None and self.requests is not None:
            self._requests_offset = self.requests.count
        if self.who is not None and self.cpu is not None:
            self._cpu_offset, self._delay_offset = self.cpu.cpu_s, self.cpu.run_delay_s
        self.who = who
        self._cpu_before = self._requests_before = None
        self._cpu_offset -= first.cpu_s
        self._delay_offset -= first.run_delay_s
        self._read_cpu(now_s)
        return not successor  # a stranger may have had the port when we connected

    def _tell_once(self, kind: str, what: str) -> None:
        """Tell something of a kind once for each process that is followed: strangers may go on."""
        if kind not in self._told:
            self._told.add(kind)
            self.news.append(what)

    def _read_cpu(self, now_s: float) -> None:
        if self._clock is None:
            return
        try:
            reading = self._clock.read(now_s)
        except OSError:
            self._clock.close()
            self._clock = None
            return
        if self._clock.complaint:
            self._tell_once("threads", self._clock.complaint)
        before, self._cpu_before = self._cpu_before, reading
        if before is not None:
            window_s, used_s = reading.time_s - before.time_s, reading.cpu_s - before.cpu_s
            delay_s = reading.run_delay_s - before.run_delay_s
            most_s = (window_s + SLACK_S) * self._clock.threads
            if not 0.0 <= used_s <= most_s or delay_s < 0.0 or window_s <= 0.0:
                # No process does that: count on from the last good reading.
                if self.cpu is not None:
                    self._cpu_offset = self.cpu.cpu_s - reading.cpu_s
                    self._delay_offset = self.cpu.run_delay_s - reading.run_delay_s
                return
            if window_s <= LONGEST_WINDOW_S:
                self.cpu_cores = used_s / window_s
        self.cpu = Cpu(
            now_s, reading.cpu_s + self._cpu_offset, reading.run_delay_s + self._delay_offset
        )

    def _count(self, reading: Requests) -> None:
        before, self._requests_before = self._requests_before, reading
        if before is None:
            # What was served before we came, or by the process before, is not ours to count.
            self._requests_offset -= reading.count
        else:
            window_s, served = reading.time_s - before.time_s, reading.count - before.count
            if served < 0:
                self._note_fall(before.count, reading)
            senseless = not 0 <= served <= MOST_QPS * max(window_s, 1.0) or window_s <= 0.0
            if senseless or reading.time_s < self._doubted_until_s:
                # Count on from the last good reading.
                self._requests_offset += before.count - reading.count
                return
            if window_s <= LONGEST_WINDOW_S:
                self.qps = served / window_s
        self.requests = Requests(reading.time_s, reading.count + self._requests_offset)

    def _note_fall(self, before: int, reading: Requests) -> None:
        """
        Somebody has reset memcached's counters, as any of its clients may.

        Who does so all the time makes the load look like next to nothing, also between two falls.
        So counters that fall again are doubted for a while, in which the readings grow old.

        :param before: the count so far
        :param reading: a lower one
        """
        if reading.time_s >= self._fell_s + STEADY_S:
            self.news.append(f"its counters fell from {before} to {reading.count}: they were reset")
        else:
            if reading.time_s >= self._doubted_until_s:
                self.news.append("its counters are reset all the time: they are not believed")
            self._doubted_until_s = reading.time_s + STEADY_S
        self._fell_s = reading.time_s


def _number(answer: bytes, name: bytes) -> int:
    start = answer.index(name) + len(name)
    text = answer[start : answer.index(b"\r", start)]
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"{name!r} is a number of {len(text)} digits")
    return int(text)


def _from_cpuacct(text: bytes) -> list[float]:
    return [int(value) * 1e-9 for value in text.split()]


def _from_schedstat(text: bytes) -> list[float]:
    lines = (line.split() for line in text.splitlines() if line.startswith(b"cpu"))
    return [int(fields[7]) * 1e-9 for fields in lines]


def _from_stat(text: bytes) -> list[float]:
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    lines = (line.split() for line in text.splitlines() if line.startswith(b"cpu"))
    return [
        sum(map(int, (*fields[1:4], *fields[6:8]))) * tick_s
        for fields in lines
        if fields[0] != b"cpu"
    ]
