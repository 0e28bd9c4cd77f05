"""
Where a process stands with the kernel: whom it runs first, whom it kills first for want of memory.

**Priority** is for who must not wait. memcached goes before other programs
(`deploy.jobs.precedence`); on a vCPU that it never leaves, a loop of normal priority waited for it
up to 0.2 s each time (docs/decisions.md), so the loop goes before it. All threads of a process go
first: one that waits with the interpreter's lock keeps the others waiting.

**When the machine's memory runs out** a job is killed first, and the loop last of all.

The guardian uses this file: it needs the standard library alone.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SERVICE, SCHEDULER, LOAD, PROBE = 1, 2, 3, 4
"""
Real-time priorities: memcached waits for nobody else's work, loop and guardian not for memcached,
and load and probe, which measure, for none of them; the probe goes first, as the load must not
delay its clock.
"""

AHEAD = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
"""What a process that is ahead starts, a thread as well as a program, is not."""

ROUNDS = 20
"""
Looks for new threads before it is given up; a second one finds them all, as a rule. The guardian
would pay too much memory for `deploy.linux.service_process`, which looks for them in the same way.
"""

SPARED, KILLED_FIRST = -900, 500
"""What the kernel adds to the thousandths of the memory that a process takes."""


def set_class(process: int | str, policy: int, priority: int) -> None:
    """
    Give all threads of a process a class, and with it those that they start from now on.

    :param process: its number, or `self`
    :param policy: one of the kernel's classes
    :param priority: within it
    :raises OSError: if there is no such process, it may not be changed, or threads come faster
    """
    done: set[str] = set()
    for _ in range(ROUNDS):
        threads = set(os.listdir(f"/proc/{process}/task")) - done  # noqa: PTH208 - names alone
        if not threads:
            return
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # a thread may end
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
        done |= threads
    raise OSError(f"process {process} starts threads faster than they can be changed")


def may_go_first() -> bool:
    """Whether this thread may be ahead of others: it is for a moment."""
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, AHEAD, os.sched_param(SCHEDULER))
        os.sched_setscheduler(0, before, parameters)
    except OSError:
        return False
    return True


def go_first() -> None:
    """
    Put all threads of this process ahead of memcached's and of those of normal priority.

    :raises OSError: if they may not
    """
    set_class("self", AHEAD, SCHEDULER)


def step_back(pid: int | None = None) -> None:
    """
    Give all threads of a process normal priority.

    :param pid: the process; None is this one
    :raises OSError: if there is none, or it may not be changed
    """
    set_class("self" if pid is None else str(pid), os.SCHED_OTHER, 0)


@contextlib.contextmanager
def ahead(children: bool = False) -> Iterator[None]:
    """
    Put this thread ahead for a while, where that is allowed.

    :param children: whether what it starts meanwhile is ahead, too
    """
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO if children else AHEAD, os.sched_param(SCHEDULER))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, parameters)


def spare() -> None:
    """Protect this process and what it forks; without the right to, nothing changes."""
    with contextlib.suppress(OSError):
        _write("self", SPARED)


def sacrifice(pid: int) -> None:
    """
    Have a job die before those that serve.

    :param pid: its first process, before it has started others
    :raises OSError: if it is gone
    """
    _write(pid, KILLED_FIRST)


def expose() -> None:
    """Take the protection from this process, which has it from its parent."""
    with contextlib.suppress(OSError):
        if _now() < 0:
            _write("self", 0)


def _now() -> int:
    return int(_file("self").read_text(encoding="utf-8"))


def _file(whose: int | str) -> Path:
    return Path(f"/proc/{whose}/oom_score_adj")


def _write(whose: int | str, adjustment: int) -> None:
    _file(whose).write_text(str(adjustment), encoding="utf-8")
