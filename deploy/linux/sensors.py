"""
What the machine shows, read without ever waiting.

memcached's CPU time and run-queue delay come from its threads' schedstat through file
descriptors that are kept; its request counters come from `deploy.linux.stats_connection`,
asked for just before a poll and read in it if they are there. Each reading carries the time it
was taken. One that fails, makes no sense or goes back in time is dropped, never made up: the
last good one stays and grows old.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
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
    number_outside,
    program,
    serves,
    thread_ids,
)
from deploy.linux.stats_connection import Requests, StatsConnection

THREADS_EVERY_S = 1.0
"""How often memcached's threads are listed anew."""

RESTING_EVERY_S = 0.1
"""How often all threads are read; in between only those that had just run, as most rest."""

LONGEST_STAT_LINE = 256
"""More than a vCPU's line of `/proc/stat` has: its name and ten counters [bytes]."""

MOST_QPS = 1e8
"""More than any memcached serves [requests/s]."""

SLACK_S = 0.1
"""How much more than a whole window a thread's clock may have moved on in it."""

LONGEST_WINDOW_S = 1.0
"""Counters further apart than this say nothing about the rate now."""

STEADY_S = 1.0
"""Counters that fall again within this time are not believed until they have not for as long."""

MEASURED_EVERY_S = 0.9
"""How often a loop measures the host's speed at most; a little less than samples are apart."""

MEASURED_AT_ONCE = 2
"""How many vCPUs a measurement is made on, one after another."""

LOOPS, LOOP_TURNS = 4, 250
"""Passes of a measurement on a vCPU, and the turns of the loop in each; all of them take 0.1 ms."""

MOST_NEWS = 16
"""Lines that are kept for somebody to write down."""


@dataclass(slots=True)  # one is made at every poll: frozen ones take longer to make
class Cpu:
    """memcached's CPU seconds and run-queue delay, and when they were read."""

    time_s: float
    cpu_s: float
    run_delay_s: float


class ThreadClock:
    """
    CPU time and run-queue delay of a process, from its threads' schedstat.

    A thread that ends keeps what it has used in the sums. One that rests, or is new, is read less
    often, so that what it uses next may be seen `RESTING_EVERY_S` late. `complaint` says which
    threads are not seen; empty while all of them are.

    :param who: the process
    :param now_s: the present time, on the clock that `read` is given [s]
    :raises OSError: if it is gone, or there are not enough file descriptors
    """

    def __init__(self, who: Identity, now_s: float):
        self.who = who
        self.complaint = ""
        self._files: dict[int, int] = {}
        self._awake: dict[int, int] = {}  # those that had run when all were last read
        self._all_read_s = -math.inf
        self._last: dict[int, tuple[bytes, int, int]] = {}  # as read, and what it says [ns]
        self._cpu_ns = self._delay_ns = 0
        try:
            self._list_threads(now_s)
        except OSError:
            self.close()
            raise

    def read(self, now_s: float) -> Cpu:
        """
        Read the threads, a few µs each.

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
        due = self._awake
        if now_s - self._all_read_s >= RESTING_EVERY_S:
            self._all_read_s, self._awake, due = now_s, {}, self._files
        gone = [thread for thread, file in due.items() if not self._read_thread(file, thread)]
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
            if text == before:
                return True
            cpu, delay, _ = map(int, text.split())
        except (OSError, ValueError):
            return False
        self._last[thread] = (text, cpu, delay)
        self._awake[thread] = file
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
        self._awake.pop(thread, None)
        self._last.pop(thread, None)


class VcpuClock:
    """
    Busy seconds of each vCPU, from the finest source the machine has; see `source`.

    `stolen` tells of the time that others had of them. `bad_since_s` says since when readings make
    no sense, on the monotonic clock [s]; inf while they do make sense.

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
        self.stolen = StolenClock(self._vcpus)
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
        """Give the file descriptors back."""
        self.stolen.close()
        os.close(self._file)


class StolenClock:
    """
    Time that the hypervisor ran others while one of the first vCPUs wanted to run.

    :param vcpus: how many vCPUs, counted from vCPU 0
    :raises OSError: if the kernel does not show it
    """

    def __init__(self, vcpus: int):
        self._stolen_s = (0.0,) * vcpus
        self._ticks: list[int] = []
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._file = os.open("/proc/stat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[float, ...]:
        """Seconds since boot, one a vCPU; those of the last reading that made sense."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            last = len(self._stolen_s) + 1  # the first line is of all vCPUs
            lines = os.pread(self._file, LONGEST_STAT_LINE * last, 0).split(b"\n", last)[1:last]
            ticks = [int(line.split(None, 9)[8]) for line in lines if line.startswith(b"cpu")]
            if ticks != self._ticks:  # mostly nothing is stolen
                # Its counters may fall for a moment.
                self._stolen_s = tuple(
                    max(before_s, now * self._tick_s)
                    for before_s, now in zip(self._stolen_s, ticks, strict=True)
                )
                self._ticks = ticks
        return self._stolen_s

    def close(self) -> None:
        """Give the file descriptor back."""
        os.close(self._file)


class Yardstick:
    """
    What a fixed piece of work costs now: how fast the host is, which no counter of a VM shows.

    Others on the same host may halve a vCPU's speed for seconds or minutes without stealing any of
    its time, and that of the next vCPU or not. So the work, a loop of the interpreter's, is done on
    several vCPUs, in turn if they are many. The quickest of `LOOPS` counts, in which no interrupt
    fell, and which found in the caches what it needs. On each vCPU the caller waits for what goes
    before it there.

    :param vcpus: where it is done; wherever the caller is if it may run on none of them
    :param every_s: how often it is measured at most [s]
    """

    def __init__(self, vcpus: Sequence[int], every_s: float = MEASURED_EVERY_S):
        self._vcpus, self._every_s = vcpus, every_s
        self._measured_s = -math.inf
        self._us = math.nan
        self._turn = 0

    def read(self) -> float:
        """
        The CPU time that the work took when it was last done [µs]; NaN if it never was.

        Of several vCPUs it is the harmonic mean, as what jobs get done goes with the mean speed.
        """
        now_s = time.monotonic()
        if now_s - self._measured_s >= self._every_s:
            self._measured_s = now_s
            with contextlib.suppress(OSError):  # a vCPU may be taken from the caller at any moment
                self._us = self._measure()
        return self._us

    def _measure(self) -> float:
        own = os.sched_getaffinity(0)
        there = [vcpu for vcpu in self._vcpus if vcpu in own] or [*own]
        count = min(MEASURED_AT_ONCE, len(there))
        speed = 0.0
        try:
            for _ in range(count):
                self._turn += 1
                os.sched_setaffinity(0, {there[self._turn % len(there)]})
                speed += 1.0 / min(map(_loop_us, range(LOOPS)))
        finally:
            os.sched_setaffinity(0, own)
        return count / speed


def _loop_us(number: int) -> float:
    """The CPU time of a loop that begins with some number [µs]."""
    before_ns = time.thread_time_ns()
    for _ in range(LOOP_TURNS):
        number = (1103515245 * number + 12345) & 0x7FFFFFFF
    return 1e-3 * (time.thread_time_ns() - before_ns)


class ServiceSensor:
    """
    memcached as the loop sees it: found by its address, followed when it restarts.

    Counters go on where they stood when a new process takes over, which must be the same program of
    the same user: whoever comes first may take the port of a memcached that restarts. Times are on
    whatever clock `ask` and `receive` are given. `news` has what is out of the ordinary, one line
    each, for whoever writes it down; `clock` reads the process's threads, None while there is none.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param known: what the process must run that answers first; None for whatever it runs
    :param inside: lists the processes of the pod that memcached is in; None where it is in none
    """

    def __init__(
        self,
        host: str,
        port: int,
        known: Program | None = None,
        inside: Callable[[], Sequence[int]] | None = None,
    ):
        self.stats = StatsConnection(host, port)
        self.who: Identity | None = None
        self.cpu: Cpu | None = None
        self.requests: Requests | None = None
        self.qps = self.cpu_cores = 0.0
        self.news: deque[str] = deque(maxlen=MOST_NEWS)
        self._program = known
        self._inside = inside
        self._called = 0  # what memcached says its number is
        self._told: set[str] = set()
        self.clock: ThreadClock | None = None
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
        if self.clock is not None:
            self.clock.close()

    def _follow(self, called: int, now_s: float) -> bool:
        """
        Turn to the process that answers, if it is another one than before.

        :param called: what it says its number is
        :param now_s: the present time [s]
        :return: whether what it says is memcached's
        """
        if self.who is not None and self._called == called and self.clock is not None:
            return True
        pid = called if self._inside is None else number_outside(called, self._inside())
        try:
            if not serves(pid, self.stats.port, self.stats.program):
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
        if self.clock is not None:
            self.clock.close()
        successor = self.who is not None
        self._program = runs
        self._told.clear()
        self.clock = clock
        if self.who is not None and self.requests is not None:
            self._requests_offset = self.requests.count
        if self.who is not None and self.cpu is not None:
            self._cpu_offset, self._delay_offset = self.cpu.cpu_s, self.cpu.run_delay_s
        self.who, self._called = who, called
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
        if self.clock is None:
            return
        try:
            reading = self.clock.read(now_s)
        except OSError:
            self.clock.close()
            self.clock = None
            return
        if self.clock.complaint:
            self._tell_once("threads", self.clock.complaint)
        before, self._cpu_before = self._cpu_before, reading
        if before is not None:
            window_s, used_s = reading.time_s - before.time_s, reading.cpu_s - before.cpu_s
            delay_s = reading.run_delay_s - before.run_delay_s
            most_s = (window_s + SLACK_S) * self.clock.threads
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
