"""
What it costs a job's work to be moved to another vCPU, and to be paused and resumed.

A fixed amount of work that fills a vCPU's caches is done alone: undisturbed, moved every few
milliseconds, and paused as often, in turns. The CPU time that it takes more, over the number of
changes, is the cost of one: a job that fills less loses less.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np

from deploy.jobs.placement import Placement
from deploy.linux.readiness import await_readable
from env.allocation import Weight
from env.scenario import Job
from training.measuring.pressure import SOURCES
from training.measuring.samples import choose_part, shortened
from training.measuring.testbed import Testbed

EVERY_S = 0.005  # a control loop decides at most once in so long; many changes average noise out
ROUNDS = 3
PART = 0.25  # of the part that takes `samples.SAMPLE_S`
WORK = Job(
    name="changed",
    command=(*SOURCES["l2"], "--cache-ops", "1000000"),
    threads=(1,),
    memory_mib=64,
)

Change = Callable[[Placement, int], None]


def change_costs(testbed: Testbed) -> list[dict[str, object]]:
    """
    CPU time that a job takes more for each change, one row a kind of change.

    :param testbed: the testbed to measure on
    :return: rows of the table `actuation`: `of` is "work", `action` "resume" or, where there is a
        vCPU to move to, "move", `median_s` the median over `ROUNDS` of what one costs [s]
    :raises InputError: if the work cannot be done
    """
    part, _, _ = choose_part(testbed, WORK, 1, (0,))
    work, _ = shortened(WORK, PART * part, 1)
    kinds: dict[str, Change] = {"resume": _pause_and_resume}
    if testbed.vcpus > 1:
        kinds["move"] = _move
    cost_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    counts = dict.fromkeys(kinds, 0)
    for _ in range(ROUNDS):
        alone_s, _ = _changed(testbed, work, _nothing)
        for kind, change in kinds.items():
            cpu_s, changes = _changed(testbed, work, change)
            cost_s[kind].append((cpu_s - alone_s) / max(changes, 1))
            counts[kind] += changes
    return [
        {"of": "work", "action": kind, "median_s": float(np.median(costs)), "n": counts[kind]}
        for kind, costs in cost_s.items()
    ]


def _changed(testbed: Testbed, work: Job, change: Change) -> tuple[float, int]:
    """Do the work once, changed over and over: its CPU time [s] and the number of changes."""
    with testbed.job_group(work.name) as group, contextlib.ExitStack() as stack:
        instance = testbed.start(work, 1, (0,), Weight.NORMAL, group)
        stack.callback(os.close, instance.ended)
        stack.callback(testbed.processes.remove, instance)
        assert instance.placement is not None
        count = 0
        while not await_readable([instance.ended], EVERY_S):
            with contextlib.suppress(OSError):  # it may be gone
                change(instance.placement, count)
            count += 1
        return group.cpu_s(), count


def _nothing(placement: Placement, count: int) -> None:
    """Leave the work alone."""


def _move(placement: Placement, count: int) -> None:
    placement.set_cores((1 - count % 2,))


def _pause_and_resume(placement: Placement, count: int) -> None:
    placement.set_paused(True)
    await_readable([], EVERY_S)
    placement.set_paused(False)
