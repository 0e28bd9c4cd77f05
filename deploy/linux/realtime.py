"""A CPU for programs that must be on time: pinned, ahead of everything of normal priority."""

import os

from env.errors import InputError


def hold(cpu: int, priority: int) -> str:
    """
    Pin this process to a vCPU and put it ahead of others there.

    :param cpu: which vCPU
    :param priority: of the real-time class SCHED_FIFO, 1 to 99; higher goes first
    :return: empty, or why the priority could not be had (the pinning was)
    :raises OSError: if there is no such vCPU, or it may not be used
    """
    os.sched_setaffinity(0, {cpu})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError as error:
        return f"no real-time priority ({error.strerror}): its own delays will be measured too"
    return ""


def require_cpu(cpu: int) -> None:
    """
    Make sure that a program may run on a vCPU.

    :param cpu: what `--cpu` gives
    :raises InputError: if there is no such vCPU, or it may not be used
    """
    allowed = os.sched_getaffinity(0)
    if cpu not in allowed:
        known = ", ".join(map(str, sorted(allowed)))
        raise InputError(
            f"--cpu: vCPU {cpu} does not exist or may not be used; allowed are {known}"
        )


def last_cpu() -> int:
    """
    The highest vCPU that this process may use: load and probe get it.

    Scenarios have the first vCPUs, so on a machine that has more it is none of theirs.
    """
    return max(os.sched_getaffinity(0))
