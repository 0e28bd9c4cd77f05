"""
One run of one point: clients in a closed loop on the last vCPU, the group on all others.

What a request takes is told apart as the studies do: the proxy knows how long members took (from
when it handed a request on until the last answer), the rest of what clients see is the way to the
proxy and the wait for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from deploy.group.group import Group, GroupSetup, MemberCounters, ProxyCounters, running
from deploy.linux.service_process import pin
from deploy.load.closed_loop import Clients
from deploy.load.mix import GET, SET
from env.errors import InputError
from training.study.study_plan import Effort, StudyPoint

FOREIGN_LIMIT = 0.10
"""Of the machine's CPU: a run in which others used more is disturbed (docs/characterisation.md)."""

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PERCENTILES = (25, 50, 75, 90, 95, 99)

Row = dict[str, float | int | str]


@dataclass(frozen=True)
class StudyReading:
    """
    What adds up over time, at one moment.

    :param time_s: the moment, on the monotonic clock [s]
    :param busy_s: CPU time of the machine [s]
    :param client_s: CPU time of the clients, which are this process [s]
    :param members: their counters
    :param proxy: its counters
    """

    time_s: float
    busy_s: float
    client_s: float
    members: list[MemberCounters]
    proxy: ProxyCounters


def require_vcpus() -> tuple[set[int], set[int]]:
    """
    The vCPUs of the group, and that of the clients.

    :raises InputError: if there are not two
    """
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        raise InputError("this machine has one vCPU; it takes 2: one for clients, one for servers")
    return usable - {max(usable)}, {max(usable)}


@contextlib.contextmanager
def group_of(setup: GroupSetup) -> Iterator[Group]:
    """
    A group on its vCPUs, and this process on the clients'.

    :param setup: what it is made of
    """
    before = os.sched_getaffinity(0)
    service, own = require_vcpus()
    with running(setup) as group:
        for each in (*group.members, group.proxy):
            pin(each.pid, service)
        os.sched_setaffinity(0, own)
        try:
            yield group
        finally:
            os.sched_setaffinity(0, before)


def measure(group: Group, point: StudyPoint, effort: Effort) -> Row:
    """
    One run of a point.

    :param group: the group that it asks for, with all its keys
    :param point: what clients do
    :param effort: how long
    :return: its row of the table of runs
    :raises InputError: if a member or the proxy does not answer
    """
    server = group.members[0] if point.proxy == "none" else group.proxy
    clients = Clients(server.host, server.port, point.clients, 0.0, point.mix)
    try:
        intervals = clients.intervals([effort.warm_s, effort.length_s])
        next(intervals)
        before = _read(group)
        seen = next(intervals)
        after = _read(group)
    finally:
        clients.close()
    if not seen.count:
        raise InputError(f"nobody answered {point.clients} clients for {effort.length_s:g} s")
    length_s = seen.end_s - before.time_s  # nobody asks while counters are read
    latencies_us = 1e6 * np.array([*seen.latencies_s[GET], *seen.latencies_s[SET]])
    row: Row = dict(point.fields)
    row["throughput"] = seen.count / length_s
    row["mean_us"] = float(latencies_us.mean())
    for each, value in zip(PERCENTILES, np.percentile(latencies_us, PERCENTILES), strict=True):
        row[f"p{each}_us"] = float(value)
    for operation, name in ((GET, "get_us"), (SET, "set_us")):
        taken_s = seen.latencies_s[operation]
        row[name] = 1e6 * fmean(taken_s) if taken_s else float("nan")
    row |= _stages(point, before, after)
    return row | _use(before, after, length_s)


def _read(group: Group) -> StudyReading:
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    # user, nice, system and stolen; what interrupts take is mostly the network between us.
    ticks = sum(int(fields[k]) for k in (0, 1, 2, 7))
    members, proxy = group.read_members(), group.read_proxy()
    return StudyReading(time.monotonic(), ticks / CLOCK_TICKS, time.process_time(), members, proxy)


def _stages(point: StudyPoint, before: StudyReading, after: StudyReading) -> Row:
    """Mean times at members, by operation, and failures; memcached's proxy alone knows them."""
    nothing = float("nan")
    if point.proxy != "memcached":
        return dict.fromkeys(("get_server_us", "set_server_us", "failed"), nothing)
    old, new = before.proxy, after.proxy
    gets, sets = new.gets - old.gets, new.sets - old.sets
    return {
        "get_server_us": 1e6 * (new.gets_server_s - old.gets_server_s) / gets if gets else nothing,
        "set_server_us": 1e6 * (new.sets_server_s - old.sets_server_s) / sets if sets else nothing,
        "failed": new.failed - old.failed,
    }


def _use(before: StudyReading, after: StudyReading, length_s: float) -> Row:
    """Who used how many vCPUs, how keys were spread, and whether others disturbed it."""
    pairs = list(zip(before.members, after.members, strict=True))
    members_s = [new.cpu_s - old.cpu_s for old, new in pairs]
    proxy_s = after.proxy.cpu_s - before.proxy.cpu_s
    client_s = after.client_s - before.client_s
    busy_s = after.busy_s - before.busy_s
    foreign_s = max(busy_s - sum(members_s) - proxy_s - client_s, 0.0)
    foreign = foreign_s / (after.time_s - before.time_s)
    vcpus = os.cpu_count() or 1
    gets = [new.gets - old.gets for old, new in pairs]
    return {
        "members_vcpus": sum(members_s) / length_s,
        "busiest_member_vcpus": max(members_s) / length_s,
        "proxy_vcpus": proxy_s / length_s,
        "client_vcpus": client_s / length_s,
        "foreign_vcpus": foreign,
        "disturbed": int(foreign > FOREIGN_LIMIT * vcpus),
        "gets_by_member": ";".join(map(str, gets)),
        "misses": sum(new.misses - old.misses for old, new in pairs),
    }


def load_keys(group: Group, point: StudyPoint) -> None:
    """
    Store all keys, by the way that clients take.

    :param group: a running group
    :param point: of which the keys are
    """
    server = group.members[0] if point.proxy == "none" else group.proxy
    replace(point.mix, update=0.0).load(server.host, server.port)
