"""
Ahead of all programs of normal priority: for who takes little and must not wait.

memcached's group outweighs others (`deploy.jobs.precedence`). On a vCPU that memcached never
leaves, a loop of normal priority waited for it up to 0.2 s each time (docs/decisions.md).
"""

import contextlib
import os
from collections.abc import Iterator

LOWEST = 1
"""Of the real-time class SCHED_FIFO: load and probe, which measure, go before loop and guardian."""


def go_first() -> None:
    """
    Put this thread ahead of all others of normal priority; what it starts stays behind.

    :raises OSError: if it may not
    """
    policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    os.sched_setscheduler(0, policy, os.sched_param(LOWEST))


def step_back(thread: int = 0) -> None:
    """
    Give a thread normal priority.

    :param thread: 0 is this one
    :raises OSError: if there is none, or it may not be changed
    """
    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@contextlib.contextmanager
def ahead(children: bool = False) -> Iterator[None]:
    """
    Put this thread ahead for a while, where that is allowed.

    :param children: whether what it starts meanwhile is ahead, too
    """
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        policy = os.SCHED_FIFO | (0 if children else os.SCHED_RESET_ON_FORK)
        os.sched_setscheduler(0, policy, os.sched_param(LOWEST))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, parameters)
