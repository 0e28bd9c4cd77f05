"""
Cycles and instructions of memcached, and of jobs, from the kernel's perf events.

Every thread has a pair of counters of its own, which the kernel keeps while the thread runs. A
machine without such counters (as most VMs are), or a user who may not have them, is found out at
the start; from then on nothing raises, and what is not counted is None.
"""

import contextlib
import ctypes
import errno
import math
import os
import platform
import struct

from deploy.linux.service_process import MOST_THREADS, Identity, is_alive, thread_ids

Event = tuple[int, int]
"""What a counter counts: `type` and `config` of the kernel's `perf_event_attr`."""

CYCLES: Event = (0, 0)
INSTRUCTIONS: Event = (0, 1)

ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
"""The first, 64 bytes long version of `perf_event_attr`: type, size, config, ..."""

READING = struct.Struct("=5Q")
"""Number of counters, ns in which they should have run, ns in which they did, both counts."""

READ_FORMAT = 1 | 2 | 8
"""Makes readings look so: total time enabled, total time running, group."""

READING_ALONE = struct.Struct("=3Q")
"""The count, and the two times of `READING`, of a counter in no group."""

ALONE_FORMAT = 1 | 2
"""Makes readings look so; counters that children inherit are in no group."""

INHERITED = 1 << 1
"""The flag of `perf_event_attr` by which what is started meanwhile is counted, too."""

CLOSE_ON_EXEC = 8
ANY_VCPU = NO_LEADER = -1

_NUMBER = {"x86_64": 298, "aarch64": 241}.get(platform.machine(), -1)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.argtypes = [ctypes.c_long, ctypes.c_char_p, *[ctypes.c_long] * 4]


class CounterPair:
    """
    Two counters of one thread, from 0 on, that run at the same moments.

    :param thread: the thread's number
    :param events: what they count
    :raises OSError: if the thread is gone, or the machine or the user has no such counters
    """

    def __init__(self, thread: int, events: tuple[Event, Event]):
        self._leader = _open(events[0], thread, NO_LEADER)
        try:
            self._member = _open(events[1], thread, self._leader)
        except OSError:
            os.close(self._leader)
            raise

    def read(self) -> tuple[float, float]:
        """
        Both counts, scaled up for the time in which others had the processor's counters.

        :return: zeros if they never had their turn
        """
        reading = os.read(self._leader, READING.size)
        _, enabled_ns, running_ns, first, second = READING.unpack(reading)
        scale = enabled_ns / running_ns if running_ns else 0.0
        return first * scale, second * scale

    def close(self) -> None:
        """Give the counters back."""
        os.close(self._member)
        os.close(self._leader)


class DescendantCounters:
    """
    Cycles and instructions of a process of one thread and of all that it starts from now on.

    :param pid: the process
    :param events: what is counted
    :raises OSError: if it is gone, or the machine or the user has no such counters
    """

    def __init__(self, pid: int, events: tuple[Event, Event] = (CYCLES, INSTRUCTIONS)):
        self._files: list[int] = []
        try:
            for event in events:
                self._files.append(_open(event, pid, NO_LEADER, ALONE_FORMAT, INHERITED))
        except OSError:
            self.close()
            raise

    def read(self) -> tuple[float, float]:
        """
        Both counts so far, scaled as `CounterPair.read` does.

        :return: NaN for what never had its turn
        """
        found = []
        for file in self._files:
            count, enabled_ns, running_ns = READING_ALONE.unpack(os.read(file, READING_ALONE.size))
            found.append(count * enabled_ns / running_ns if running_ns else math.nan)
        return found[0], found[1]

    def close(self) -> None:
        """Give the counters back."""
        for file in self._files:
            os.close(file)


class CpiSensor:
    """
    Cycles per instruction of processes together, one window after the other.

    `cpi` is what the last whole window showed; before the first one is over, what was counted so
    far; None without a reading. Threads that come within a window are counted from the next on.

    :param who: the processes
    :param now_s: the present time, on the clock that `poll` is given [s]
    :param events: what is divided by what
    :raises OSError: if all are gone, or the machine or the user has no such counters
    """

    def __init__(
        self,
        who: tuple[Identity, ...],
        now_s: float,
        events: tuple[Event, Event] = (CYCLES, INSTRUCTIONS),
    ):
        self.cpi: float | None = None
        self._who = who
        self._events = events
        self._since_s = now_s
        self._first = True
        self._pairs = _open_pairs(who, events)

    def poll(self, who: tuple[Identity, ...], now_s: float, window_s: float) -> None:
        """
        Read what is due.

        :param who: the processes, maybe others than before
        :param now_s: the present time [s]
        :param window_s: length of a window [s]
        """
        over = now_s - self._since_s >= window_s
        if who != self._who:
            self._who, self._first, self.cpi = who, True, None
            self._begin(now_s)
        elif over or self._first:
            self.cpi = self._ratio()
            if over:
                self._first = False
                self._begin(now_s)

    def close(self) -> None:
        """Give the counters back."""
        _close(self._pairs)

    def _begin(self, now_s: float) -> None:
        """Begin a window with new counters."""
        # The old ones are closed last: while nobody counts, the kernel takes 10 ms to begin.
        old, self._pairs = self._pairs, []
        self._since_s = now_s
        with contextlib.suppress(OSError):
            self._pairs = _open_pairs(self._who, self._events)
        _close(old)

    def _ratio(self) -> float | None:
        try:
            counts = [pair.read() for pair in self._pairs]
        except (OSError, struct.error):
            return None
        dividend, divisor = (sum(one[index] for one in counts) for index in (0, 1))
        return dividend / divisor if divisor else None


def why_not_counted(error: OSError) -> str:
    """
    What to tell a user whose machine does not count cycles.

    :param error: what `CpiSensor` raised
    """
    who = "this user may not" if isinstance(error, PermissionError) else "this machine does not"
    return f"{who} count them ({error.strerror})"


def _open_pairs(who: tuple[Identity, ...], events: tuple[Event, Event]) -> list[CounterPair]:
    """
    Begin to count in all threads of those processes that live.

    :raises OSError: if none does, or the machine or the user has no such counters
    """
    living = [one for one in who if is_alive(one)]
    if not living:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    pairs: list[CounterPair] = []
    try:
        for one in living:
            for thread in thread_ids(one.pid)[:MOST_THREADS]:
                with contextlib.suppress(ProcessLookupError):  # a thread may end
                    pairs.append(CounterPair(thread, events))
    except OSError:
        _close(pairs)
        raise
    return pairs


def _close(pairs: list[CounterPair]) -> None:
    for pair in pairs:
        pair.close()


def _open(
    event: Event, thread: int, leader: int, read_format: int = READ_FORMAT, flags: int = 0
) -> int:
    """The file descriptor of a counter."""
    kind, config = event
    attributes = ATTRIBUTES.pack(kind, ATTRIBUTES.size, config, 0, 0, read_format, flags, 0, 0, 0)
    file: int = _LIBC.syscall(_NUMBER, attributes, thread, ANY_VCPU, leader, CLOSE_ON_EXEC)
    if file < 0:
        fault = ctypes.get_errno()
        raise OSError(fault, os.strerror(fault))
    return file
