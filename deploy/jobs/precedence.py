"""
memcached goes before the machine's other programs while a deployment lasts.

A deployment finds it with everybody's weight, and a busy program on its vCPU then keeps it waiting
for whole slices. So its threads get the kernel's real-time class SCHED_RR, at the least priority
(`deploy.linux.standing`): they run as soon as they wake, whoever else does. More weight does not
do that: a program that begins to run on memcached's vCPU got whole slices before a memcached of 87
times its weight (`benchmarks.priority`, docs/measured.md).

Where the kernel refuses that class, memcached's own group weighs `TIMES` as much as it was found
with: its control group, or in the root group its session's autogroup (sched(7)), by which the
kernel tells sessions apart there. A nice value of memcached's threads would act within that session
only. A group that memcached shares with other programs is left alone, as they would be lifted with
it.

One thread has no part in the real-time class: the one that tidies memcached's LRU lists, whose work
no request waits for. It wakes every millisecond while records are written, and each time interrupts
a job that shares its vCPU; so the kernel may wake it later.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from deploy.jobs.placement import session_members
from deploy.linux import service_process, standing
from deploy.linux.cgroups import GONE, Hierarchy, group_weight, members, weight_file
from deploy.linux.service_process import Identity
from deploy.records.state import Weighing
from env.errors import InputError, fault

CLASS, CLASS_NAME = os.SCHED_RR, "SCHED_RR"
"""memcached's threads take turns on a vCPU that they share, as its workers are equals."""

LIFTED = {os.SCHED_OTHER: "SCHED_OTHER", os.SCHED_BATCH: "SCHED_BATCH"}
"""The classes of threads that are put first; another was given to them for a reason."""

TIDIES = b"mc-lrumaint\n"
"""What memcached calls the thread that tidies its LRU lists."""

SLACK_NS = 10_000_000
"""
How much later than asked for that thread may be woken [ns] (prctl(2), PR_SET_TIMERSLACK).

The next tick of its vCPU's clock then wakes it: 310 times a second where it was 1,220 times, for
half of the CPU time (docs/decisions.md). The kernel grants no slack to the real-time classes.
"""

SLACK_AT_FIRST = 0
"""What the kernel takes for the slack that a thread began with."""

TIMES = 100
"""
How much more memcached's group weighs, where weight is all there is.

When another program begins to run on memcached's vCPU, four to five times as many requests are late
with ten in its place (docs/measured.md). On a vCPU that memcached never leaves, a loop that has no
real-time priority waits by this factor, and so does every other program, such as Docker.
"""

NICE = -20
"""The nearest to `TIMES` that an autogroup can have, 87: a step is worth 1.25 (sched(7))."""

HEAVIEST = {"cpu.shares": 262144, "cpu.weight": 10000}
"""The kernel's largest weights, by the names of the files that hold them."""

AUTOGROUP = re.compile(r"(/autogroup-\d+) nice (-?\d+)\s*")
SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")


def weighed(pid: int, hierarchy: Hierarchy, own: Collection[int]) -> Weighing:
    """
    How memcached stands now: what it would go before others by, and what it has of that.

    :param pid: a process of memcached's
    :param hierarchy: how control groups are mounted
    :param own: all processes of memcached's, which may be of one group
    :raises OSError: if the process is gone, or the kernel does not say
    :raises InputError: if the class cannot be had, and memcached has no group of its own
    """
    return by_class(pid) or by_group(pid, hierarchy, own)


def by_class(pid: int) -> Weighing | None:
    """
    The class of memcached's threads; None if they may not have another, or have several.

    Its first thread has the other for a moment, because nothing else tells: it depends on our
    rights, on the kernel's RT_GROUP_SCHED and on the control group. Nobody goes before a loop that
    may not go first itself.

    :param pid: a process of memcached's
    :raises OSError: if the process is gone
    """
    classes = {os.sched_getscheduler(thread) for thread in service_process.thread_ids(pid)}
    before = classes.pop()
    if classes or before not in LIFTED or not standing.may_go_first():
        return None
    try:
        os.sched_setscheduler(pid, CLASS, os.sched_param(standing.SERVICE))
        os.sched_setscheduler(pid, before, os.sched_param(0))
    except OSError:
        return None
    return Weighing(f"/proc/{pid}/task", before)


def by_group(pid: int, hierarchy: Hierarchy, own: Collection[int]) -> Weighing:
    """
    What memcached's own group weighs.

    :param pid: see `weighed`
    :param hierarchy: see there
    :param own: see there
    :raises OSError: see there
    :raises InputError: if it has no group of its own; says why
    """
    group = hierarchy.group_of(pid)
    if group == PurePosixPath("/"):
        if SWITCH.read_text(encoding="utf-8").strip() != "1":
            raise InputError(f"it is in the root control group, and {SWITCH.name} is not 1")
        _require_alone("its session", session_members(os.getsid(pid)), own)
        return _autogroup(pid)
    _require_alone(f"control group {group}", members(hierarchy, group), own)
    return Weighing(str(weight_file(hierarchy, group)), group_weight(hierarchy, group))


def put_first(pid: int, weighing: Weighing) -> None:
    """
    Have memcached go before others by the means that was found for it.

    :param pid: a process of memcached's
    :param weighing: what it was found with, written down before
    :raises OSError: if the kernel refuses
    """
    if is_class(weighing):
        standing.set_class(pid, CLASS, standing.SERVICE)
        _let_sleep(pid, weighing.before, SLACK_NS)
    elif _is_autogroup(weighing):
        _write_nice(pid, min(NICE, weighing.before))
    else:
        file = Path(weighing.group)
        weight = min(TIMES * weighing.before, HEAVIEST[file.name])
        file.write_text(str(weight), encoding="utf-8")


def put_back(who: Identity, weighing: Weighing) -> str:
    """
    Have memcached stand as it was found, and read that back.

    :param who: the process of memcached's
    :param weighing: what it was found with
    :return: what could not be put back, in one line; empty if all was, or it is gone
    """
    if is_class(weighing):
        return _put_class_back(who, weighing.before)
    try:
        if not _is_autogroup(weighing):
            file = Path(weighing.group)
            file.write_text(str(weighing.before), encoding="utf-8")
            now = int(file.read_text(encoding="utf-8"))
        elif service_process.is_alive(who) and _autogroup(who.pid).group == weighing.group:
            _write_nice(who.pid, weighing.before)
            now = _autogroup(who.pid).before
        else:
            return ""
    except OSError as error:
        if error.errno in GONE:
            return ""
        return f"memcached's {weighing.group} does not weigh {weighing.before}: {fault(error)}"
    if now != weighing.before:
        return f"memcached's {weighing.group} weighs {now}, not {weighing.before}"
    return ""


def in_words(weighing: Weighing) -> str:
    """
    What memcached goes before others by.

    :param weighing: what it was found with
    """
    if is_class(weighing):
        return "by the real-time class of its threads"
    return f"by the weight of {weighing.group}"


def name_of(weighing: Weighing) -> str:
    """
    The name of what memcached goes before others by: a class, or the file or session of a weight.

    :param weighing: what it was found with
    """
    return CLASS_NAME if is_class(weighing) else Path(weighing.group).name


def is_class(weighing: Weighing) -> bool:
    """
    Whether memcached goes first by its threads' class, and not by its group's weight.

    :param weighing: what it was found with
    """
    return weighing.group.startswith("/proc/")


def _put_class_back(who: Identity, before: int) -> str:
    if not service_process.is_alive(who):
        return ""
    try:
        standing.set_class(who.pid, before, 0)
        _let_sleep(who.pid, before, SLACK_AT_FIRST)
    except OSError as error:
        if service_process.is_alive(who):
            return f"memcached {who.pid} does not have {LIFTED[before]} back: {fault(error)}"
    return ""


def _let_sleep(pid: int, policy: int, slack_ns: int) -> None:
    """
    Give the thread that tidies a class and a slack [ns].

    A memcached that names no threads has none to be found, and where the kernel refuses a slack the
    thread does without: neither keeps memcached from going first.
    """
    for thread in service_process.thread_ids(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{thread}/comm").read_bytes() == TIDIES:
                os.sched_setscheduler(thread, policy, os.sched_param(0))
                slack = Path(f"/proc/{thread}/timerslack_ns")
                slack.write_text(str(slack_ns), encoding="utf-8")


def _is_autogroup(weighing: Weighing) -> bool:
    return weighing.group.startswith("/autogroup-")


def _autogroup(pid: int) -> Weighing:
    text = Path(f"/proc/{pid}/autogroup").read_text(encoding="utf-8")
    match = AUTOGROUP.fullmatch(text)
    if match is None:
        raise OSError(f"/proc/{pid}/autogroup holds {text.strip()!r}")
    return Weighing(match[1], int(match[2]))


def _write_nice(pid: int, nice: int) -> None:
    Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="utf-8")


def _require_alone(where: str, found: Iterable[int], own: Collection[int]) -> None:
    """
    Make sure that a group holds memcached and nobody else.

    :raises InputError: if it does not
    """
    for pid in found:
        if pid not in own:
            raise InputError(f"{where} holds other programs, too: process {pid}")
