"""
memcached goes before the machine's other programs while a deployment lasts.

`training.characterise` measures memcached in a control group that outweighs the machine. A
deployment finds it with everybody's weight, and a busy program on its vCPU then keeps it waiting
for whole slices. So memcached's own group weighs `TIMES` as much as it was found with: its control
group, or in the root group its session's autogroup (sched(7)), by which the kernel tells sessions
apart there. A nice value of memcached's threads would act within that session only.

A group that memcached shares with other programs is left alone, as they would be lifted with it.
"""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from deploy.jobs.placement import session_members
from deploy.linux import service_process
from deploy.linux.cgroups import GONE, Hierarchy, group_weight, members, weight_file
from deploy.linux.service_process import Identity
from deploy.records.state import Weighing
from env.errors import InputError, fault

TIMES = 100
"""
How much more memcached's group weighs.

When another program begins to run on memcached's vCPU, four to five times as many requests are late
with ten in its place (docs/live.md). On a vCPU that memcached never leaves, a loop that has no
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
    What memcached's own group weighs now.

    :param pid: a process of memcached's
    :param hierarchy: how control groups are mounted
    :param own: all processes of memcached's, which may be of one group
    :raises OSError: if the process is gone, or the kernel does not say
    :raises InputError: if memcached has no group of its own; says why
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
    Have memcached's group weigh `TIMES` what it was found with.

    :param pid: a process of memcached's
    :param weighing: what it was found with, written down before
    :raises OSError: if the kernel refuses
    """
    if _is_autogroup(weighing):
        _write_nice(pid, min(NICE, weighing.before))
    else:
        file = Path(weighing.group)
        weight = min(TIMES * weighing.before, HEAVIEST[file.name])
        file.write_text(str(weight), encoding="utf-8")


def put_back(who: Identity, weighing: Weighing) -> str:
    """
    Have memcached's group weigh what it was found with, and read that back.

    :param who: the process of memcached's
    :param weighing: what its group was found with
    :return: what could not be put back, in one line; empty if all was, or the group is gone
    """
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
