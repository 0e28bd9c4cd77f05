"""
Ahead of all programs of normal priority: for who takes little and must not wait.

memcached's group outweighs others (`deploy.jobs.precedence`). On a vCPU that memcached never
leaves, a loop of normal priority waited for it up to 0.2 s each time (docs/decisions.md). All
threads of a process go first: one that waits with the interpreter's lock keeps the others waiting.
"""

import contextlib
import os
from collections.abc import Iterator

LOWEST = 1
"""Of the real-time class SCHED_FIFO: load and probe, which measure, go before loop and guardian."""

AHEAD = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
"""What a process that is ahead starts, a thread as well as a program, is not."""


def go_first() -> None:
    """
    Put all threads of this process ahead of those of normal priority.

    :raises OSError: if they may not
    """
    _set_all("self", AHEAD, LOWEST)


def step_back(pid: int | None = None) -> None:
    """
    Give all threads of a process normal priority.

    :param pid: the process; None is this one
    :raises OSError: if there is none, or it may not be changed
    """
    _set_all("self" if pid is None else str(pid), os.SCHED_OTHER, 0)


@contextlib.contextmanager
def ahead(children: bool = False) -> Iterator[None]:
    """
    Put this thread ahead for a while, where that is allowed.

    :param children: whether what it starts meanwhile is ahead, too
    """
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO if children else AHEAD, os.sched_param(LOWEST))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, parameters)


def _set_all(process: str, policy: int, priority: int) -> None:
    for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208 - names alone
        with contextlib.suppress(ProcessLookupError):  # a thread may end
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))
