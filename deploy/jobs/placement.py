"""
The fast path: a job's vCPUs, weight, quota and pauses, written without asking anybody.

Where control groups can be written that is a matter of 10-20 µs. Where they cannot, the threads
themselves are moved, the background is the scheduling class SCHED_IDLE, and a pause is a signal.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from deploy.linux.cgroups import (
    JobGroup,
    effective_cpuset,
    parse_cpus,
    read_cpuset,
    threads_in,
    write_cpuset,
)
from deploy.linux.service_process import ROUNDS, stat_fields, thread_ids
from env.allocation import Weight

COUNT_EVERY_S = 1.0

SESSION_NICE = {Weight.NORMAL: 0, Weight.BACKGROUND: 19}
"""Of a job's session where the kernel makes a group of each session, which cannot be idle."""


class Placement(Protocol):
    """Where a running job's place on the machine is written."""

    def set_cores(self, cores: tuple[int, ...]) -> None:
        """
        Move the job.

        :param cores: the vCPUs that it may use from now on, at least one
        """

    def unpin(self) -> int:
        """
        Let the job's threads run on all of its vCPUs, also those that have pinned themselves.

        :return: how many had
        """

    def set_weight(self, weight: Weight) -> None:
        """
        Give the job memcached's weight, or put it into the background.

        :param weight: normal or background
        """

    def set_quota(self, vcpus: float | None) -> None:
        """
        Limit the job's CPU time.

        :param vcpus: CPU seconds per second; None lifts the limit
        """

    def set_paused(self, paused: bool) -> None:
        """
        Pause the job, or let it go on.

        :param paused: whether it is to stand still
        """

    def paused(self) -> bool:
        """Whether the job is paused, read back."""

    def cores(self) -> tuple[int, ...]:
        """The vCPUs in force, read back."""

    def weight(self) -> Weight:
        """The weight in force, read back."""

    def cpu_s(self) -> float:
        """CPU seconds used so far."""

    def close(self) -> None:
        """Give what was kept open back."""


class GroupPlacement:
    """
    A job in control groups.

    :param group: its parent group, which carries weight and quota
    :param cpuset: the folder of the group that carries its vCPUs
    """

    def __init__(self, group: JobGroup, cpuset: Path):
        self._group = group
        self._cpuset = cpuset

    def set_cores(self, cores: tuple[int, ...]) -> None:
        """See `Placement.set_cores`; :raises OSError: if the group is gone."""
        write_cpuset(self._cpuset, cores)

    def unpin(self) -> int:
        """See `Placement.unpin`; :raises OSError: if the group is gone."""
        version = self._group.hierarchy.version
        cores = effective_cpuset(self._cpuset, version)
        # A thread whose own vCPUs are all follows every change of its group's by itself.
        return _unpin(threads_in(self._cpuset, version), cores, online_vcpus)

    def set_weight(self, weight: Weight) -> None:
        """See `Placement.set_weight`; :raises OSError: if the group is gone."""
        self._group.set_weight(weight)

    def set_quota(self, vcpus: float | None) -> None:
        """See `Placement.set_quota`; :raises OSError: if the group is gone."""
        self._group.set_quota(vcpus)

    def set_paused(self, paused: bool) -> None:
        """See `Placement.set_paused`; :raises OSError: if the group is gone."""
        self._group.set_frozen(paused)

    def paused(self) -> bool:
        """See `Placement.paused`; :raises OSError: if the group is gone."""
        return self._group.frozen()

    def cores(self) -> tuple[int, ...]:
        """See `Placement.cores`; :raises OSError: if the group is gone."""
        return read_cpuset(self._cpuset)

    def weight(self) -> Weight:
        """See `Placement.weight`; :raises OSError: if the group is gone."""
        return self._group.weight()

    def cpu_s(self) -> float:
        """See `Placement.cpu_s`; :raises OSError: if the group is gone."""
        return self._group.cpu_s()

    def close(self) -> None:
        """See `Placement.close`."""
        self._group.close()


class TaskPlacement:
    """
    A job without control groups: every thread of its session is moved by itself.

    :param leader: the session's first process
    """

    def __init__(self, leader: int):
        self._leader = leader
        self._cores: tuple[int, ...] | None = None  # as written
        self._cpu_s, self._counted_s = 0.0, -COUNT_EVERY_S
        self._session_nice: int | None = None  # what the session is still to get

    def set_cores(self, cores: tuple[int, ...]) -> None:
        """See `Placement.set_cores`."""
        self._cores = cores
        self._change_all(lambda thread: os.sched_setaffinity(thread, cores))

    def unpin(self) -> int:
        """See `Placement.unpin`."""
        cores = self._cores
        return 0 if cores is None else _unpin(self._threads(), cores, lambda: cores)

    def set_weight(self, weight: Weight) -> None:
        """
        See `Placement.set_weight`.

        A job stays in the background where the user may not take it out again; `--check` says so.
        """
        self._session_nice = SESSION_NICE[weight]
        self._set_session_nice()
        if weight == Weight.BACKGROUND:
            self._change_all(lambda thread: set_policy(thread, os.SCHED_IDLE))
        else:
            with contextlib.suppress(PermissionError):
                self._change_all(lambda thread: set_policy(thread, os.SCHED_OTHER))

    def set_quota(self, vcpus: float | None) -> None:
        """See `Placement.set_quota`; :raises OSError: for any limit, which needs a group."""
        if vcpus is not None:
            raise OSError("a CPU quota needs a control group, and none can be written here")

    def set_paused(self, paused: bool) -> None:
        """See `Placement.set_paused`; whoever is started meanwhile is looked for again."""
        for _ in range(2 if paused else 1):
            for pid in session_members(self._leader):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def paused(self) -> bool:
        """See `Placement.paused`; a process stops when it is next scheduled."""
        return stat_fields(self._leader)[0] == "T"

    def cores(self) -> tuple[int, ...]:
        """See `Placement.cores`."""
        return tuple(sorted(os.sched_getaffinity(self._leader)))

    def weight(self) -> Weight:
        """See `Placement.weight`."""
        idle = os.sched_getscheduler(self._leader) == os.SCHED_IDLE
        return Weight.BACKGROUND if idle else Weight.NORMAL

    def cpu_s(self) -> float:
        """See `Placement.cpu_s`: to the clock tick, counted anew every second."""
        self._set_session_nice()
        now_s = time.monotonic()
        if now_s - self._counted_s >= COUNT_EVERY_S:
            self._counted_s = now_s
            used = 0
            for pid in session_members(self._leader):
                with contextlib.suppress(OSError):
                    # Own and waited-for children's, in user and in kernel mode.
                    used += sum(map(int, stat_fields(pid)[11:15]))
            self._cpu_s = max(self._cpu_s, used / os.sysconf("SC_CLK_TCK"))
        return self._cpu_s

    def close(self) -> None:
        """See `Placement.close`."""

    def _set_session_nice(self) -> None:
        """
        Have the whole session yield, or not, to the other ones.

        Where the kernel groups tasks by session, SCHED_IDLE acts within the own session only. Users
        other than root may change one session's nice every 0.1 s; `cpu_s`, which is asked at every
        decision, goes on with the others.
        """
        if self._session_nice is None:
            return
        file = Path(f"/proc/{self._leader}/autogroup")
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                file.write_text(str(self._session_nice), encoding="utf-8")
            self._session_nice = None

    def _change_all(self, change: Callable[[int], None]) -> None:
        """Whoever is started meanwhile may still have what its parent had: look for it again."""
        changed: set[int] = set()
        for _ in range(ROUNDS):
            new = [thread for thread in self._threads() if thread not in changed]
            for thread in new:
                with contextlib.suppress(ProcessLookupError):
                    change(thread)
            if not new:
                return
            changed.update(new)

    def _threads(self) -> Iterator[int]:
        for pid in session_members(self._leader):
            with contextlib.suppress(OSError):
                yield from thread_ids(pid)


def _unpin(
    threads: Iterable[int], cores: tuple[int, ...], wider: Callable[[], tuple[int, ...]]
) -> int:
    """Give the threads that may not run on all of these vCPUs a wider choice; how many."""
    found = 0
    for thread in threads:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pinned = os.sched_getaffinity(thread)
            if pinned != set(cores):
                os.sched_setaffinity(thread, wider())
                found += os.sched_getaffinity(thread) != pinned
    return found


def set_policy(thread: int, policy: int) -> None:
    """
    Put a thread into a scheduling class without priorities.

    :param thread: its number
    :param policy: `os.SCHED_IDLE` or `os.SCHED_OTHER`
    :raises OSError: if it is gone, or this user may not
    """
    os.sched_setscheduler(thread, policy, os.sched_param(0))


def session_members(leader: int) -> list[int]:
    """
    The processes of a session.

    :param leader: pid of the session's first process
    """
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def online_vcpus() -> tuple[int, ...]:
    """The machine's vCPUs that are switched on."""
    return parse_cpus(Path("/sys/devices/system/cpu/online").read_text(encoding="utf-8"))
