"""
Edits by the tokens they name, so that one network can choose among those of any scenario.

A *slot* is an edit said in tokens (`env.sets.tokens`): a kind, and the job, the vCPU or the number
of threads it points at. The slots depend only on how many tokens there is room for, J jobs and C
vCPUs; a scenario's edits (`env.action`) are some of them, one to one unless a job may start with
several thread counts of MOST_THREADS or more.

| slots | edit | pointer |
|---|---|---|
| 1 | keep | |
| C | memcached holds the smallest of its sets with this vCPU; its sets grow | vCPU |
| J x (MOST_THREADS | start with 1, 2, ... threads; the last one: so many or more | job, threads |
| + 2 | place on the whole machine, background and normal | job |
| + 2 C | place on the physical core whose first vCPU this is, background and normal | job, vCPU |
| + C | place on this one vCPU, normal | job, vCPU |
| + 1) | pause | job |
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.action import Edit, EditTable
from env.allocation import cores_of, mask_of
from env.codes import KEEP, PAUSE, SERVICE, START
from env.errors import InputError
from env.scenario import Scenario

MOST_THREADS = 16
"""Thread counts that have a slot of their own; where a job starts with more, it has no choice."""

EVERYWHERE = MOST_THREADS
"""Where a job's places begin among its slots: the whole machine, twice."""
CORE = EVERYWHERE + 2
"""Where its places on physical cores begin."""

NO_EDIT = -1


@dataclass(frozen=True)
class Slots:
    """
    The slots that there is room for.

    :param jobs: J
    :param vcpus: C
    """

    jobs: int
    vcpus: int

    @property
    def per_job(self) -> int:
        """Slots of one job."""
        return CORE + 3 * self.vcpus + 1

    @property
    def first_job(self) -> int:
        """The first slot of the first job."""
        return 1 + self.vcpus

    def __len__(self) -> int:
        return self.first_job + self.jobs * self.per_job

    def of(self, edit: Edit, scenario: Scenario) -> int:
        """
        The slot of an edit.

        :param edit: one of the scenario's
        :param scenario: the machine and memcached's sets
        """
        if edit.kind == KEEP:
            return 0
        if edit.kind == SERVICE:
            return 1 + last_joined(scenario)[edit.cores]
        own = self.first_job + edit.job * self.per_job
        if edit.kind == START:
            return own + min(edit.threads, MOST_THREADS) - 1
        if edit.kind == PAUSE:
            return own + self.per_job - 1
        if edit.cores == mask_of(tuple(range(scenario.machine.vcpus))):
            return own + EVERYWHERE + edit.weight
        first = cores_of(edit.cores)[0]
        if edit.cores.bit_count() == 1:
            return own + CORE + 2 * self.vcpus + first
        return own + CORE + 2 * first + edit.weight


def last_joined(scenario: Scenario) -> dict[int, int]:
    """
    For each of memcached's vCPU sets, a bit mask, the vCPU that names it: the last that it adds.

    :param scenario: the problem
    """
    named, before = {}, set[int]()
    for cores in scenario.service.sets:
        named[mask_of(cores)] = max(set(cores) - before)
        before = set(cores)
    return named


def slots_of(scenario: Scenario, table: EditTable, slots: Slots) -> npt.NDArray[np.int64]:
    """
    The slot of each edit, int64[n_edits].

    :param scenario: the problem
    :param table: its edits
    :param slots: what there is room for
    :raises InputError: if there is no room for its jobs or vCPUs
    """
    n_jobs, n_vcpus = len(scenario.jobs), scenario.machine.vcpus
    if n_jobs > slots.jobs or n_vcpus > slots.vcpus:
        raise InputError(
            f"scenario {scenario.name}: {n_jobs} jobs on {n_vcpus} vCPUs; "
            f"allowed are up to {slots.jobs} on {slots.vcpus}"
        )
    return np.array([slots.of(table[edit], scenario) for edit in range(len(table))], np.int64)


def edits_of(slot_of: npt.NDArray[np.int64], slots: Slots) -> npt.NDArray[np.int64]:
    """
    The edit of each slot, int64[n_slots], `NO_EDIT` where a scenario has none.

    :param slot_of: see `slots_of`
    :param slots: what there is room for
    :raises InputError: if two edits have one slot
    """
    if len(np.unique(slot_of)) < len(slot_of):
        raise InputError(
            f"a job may start with two thread counts of {MOST_THREADS} or more; "
            "one such count is allowed where edits are chosen by their slots"
        )
    edits = np.full(len(slots), NO_EDIT, np.int64)
    edits[slot_of] = np.arange(len(slot_of))
    return edits


def legal_slots(tokens, layout, legal):
    """
    Mark the legal slots, from what the tokens say; the same edits as `env.action.legal_edits`.

    :param tokens: float[size], an observation (`env.sets.tokens`)
    :param layout: see `env.sets.tokens.Layout.offsets`
    :param legal: float[n_slots], receives 1.0 or 0.0
    """
    n_jobs, n_vcpus, _, vcpus_at, n_vcpu, _, jobs_at, n_job, cores_at = layout
    legal[0] = tokens[0]
    none_left = tokens[1] == 0.0 and tokens[3] == 0.0  # as `env.action.leaves_none`
    for vcpu in range(n_vcpus):
        has = vcpus_at + vcpu * n_vcpu
        legal[1 + vcpu] = tokens[has + 1]
        none_left = none_left and tokens[has] == tokens[has + 5]
    at = 1 + n_vcpus
    for job in range(n_jobs):
        own, core = jobs_at + job * n_job, at + CORE
        start, place, pause = tokens[own], tokens[own + 1], tokens[own + 2]
        if none_left:
            start = place = 0.0
        for count in range(MOST_THREADS):
            legal[at + count] = start * tokens[own + n_job - MOST_THREADS + count]
        for weight in range(2):
            legal[at + EVERYWHERE + weight] = place * tokens[1 + weight]
        for vcpu in range(n_vcpus):
            has = vcpus_at + vcpu * n_vcpu
            for weight in range(2):
                legal[core + 2 * vcpu + weight] = place * tokens[has + 2 + weight]
            legal[core + 2 * n_vcpus + vcpu] = place * tokens[has + 4]
        there = int(tokens[cores_at + job * (n_vcpus + 1) + n_vcpus])
        if there > 0:
            legal[at + EVERYWHERE + there - 1] = 0.0
        legal[core + 3 * n_vcpus] = pause
        at = core + 3 * n_vcpus + 1
