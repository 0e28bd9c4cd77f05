"""A CPU for programs that must be on time: pinned, ahead of everything of normal priority."""

import os
from pathlib import PurePosixPath

from deploy.linux.cgroups import REALTIME_FILE, find_hierarchy
from env.errors import InputError, os_reason

LATE_S = 0.001
"""A client that acts so much later than it was due has measured itself as well: about an SLO."""

REALTIME_US = 900_000
"""Of each second, for the clients' group: the generator alone takes up to 0.6 of a vCPU."""


def hold(cpu: int, priority: int) -> str:
    """
    Pin this process to a vCPU and put it ahead of others there.

    :param cpu: the vCPU's number
    :param priority: of the real-time class SCHED_FIFO, 1 to 99; higher goes first
    :return: empty, or why the priority could not be had (the pinning was)
    :raises OSError: if there is no such vCPU, or it may not be used
    """
    os.sched_setaffinity(0, {cpu})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError as error:
        return (
            f"no real-time priority ({os_reason(error)}): {_remedy()}; until then its own delays "
            "are measured too, and intervals that they spoil are marked"
        )
    return ""


def _remedy() -> str:
    """
    What lets this process have real-time priority.

    A kernel with RT_GROUP_SCHED gives the groups below the root one no real-time at first; cgroup
    version 2 has no file to change that (sched-rt-group and cgroup-v2 in the kernel's documents).
    """
    if os.geteuid() != 0:
        return "run as root"
    try:
        hierarchy = find_hierarchy()
        group = hierarchy.group_of("self")
    except OSError:
        return "it takes CAP_SYS_NICE"
    runtime = hierarchy.folder(group) / REALTIME_FILE
    root = f"run it in the root group: echo $$ > {hierarchy.mounts['cpu']}/cgroup.procs"
    if group == PurePosixPath("/"):
        return "it takes CAP_SYS_NICE and a control group that may have real-time"
    if runtime.exists():
        return f"echo {REALTIME_US} > {runtime}, or {root}"
    return f"control group {group} may have none: {root}"


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
