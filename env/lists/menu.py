"""
The list schedules that a policy for any scenario chooses from.

List scheduling (Graham 1969) takes the jobs in an order and lets so many run. The order follows
from what counts (`env.lists.following`); a list says the rest: how many jobs run side by side, how
many of them in front of the others, with how many threads, and what load memcached's smallest set
serves. A list means the same in every scenario, and the menu is the same for all.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.action import EditTable
from env.allocation import mask_of
from env.codes import BACKGROUND, NORMAL, PAUSE, PLACE, SERVICE, START
from env.scenario import MAX_JOBS, Scenario

VERSION = 3
"""Raise it whenever the menu or what a list means changes: checkpoints of another version are
refused."""

AT_ONCE = (1, 2, 3, 4, 6, 8, MAX_JOBS)
"""How many jobs run side by side at most."""

FRONT = (0, 1, 2, 3, 4, MAX_JOBS)
"""Of those, how many have normal weight, where memcached is not. The others are in the background,
on memcached's vCPUs, too."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Most threads of a job, over the machine's vCPUs."""

SERVED = (0.0, 0.35, 0.5, 0.7, 1.0)
"""What load memcached's smallest set serves, over the largest load; larger sets serve as much more
as they are larger."""

PARTS = (len(AT_ONCE), len(FRONT), len(SHARES), len(SERVED))
MENU = np.array(list(itertools.product(*map(range, PARTS))), np.int64)
"""int64[n_lists, 4], for each list where in the four tuples its answers are."""

LISTS = np.column_stack(
    [
        np.array(AT_ONCE)[MENU[:, 0]],
        np.array(FRONT)[MENU[:, 1]],
        MENU[:, 2],
    ]
)
"""int64[n_lists, 3], for each list its jobs at once, those in front, and which of `SHARES`."""

LIST_SERVED = np.array(SERVED)[MENU[:, 3]]
"""float64[n_lists], what memcached's smallest set serves."""

ALL_IN_FRONT = LISTS[:, 1] == MAX_JOBS
"""Which lists have no job in the background."""

GIVES_BACK = LIST_SERVED > 0.0
"""Which lists have memcached give vCPUs back while its load is low."""


def meaningful_lists(
    sharing: npt.NDArray[np.bool_] | bool, room: npt.NDArray[np.bool_] | bool
) -> npt.NDArray[np.bool_]:
    """
    Which lists mean something, bool[..., n_lists].

    No more jobs are in front than run. Where no vCPU is shared, all are in front, and memcached
    gives some vCPUs back if its refuge is all of them: else no job would ever run.

    :param sharing: whether jobs may run on memcached's vCPUs
    :param room: whether its refuge leaves one
    """
    shared = ALL_IN_FRONT | (LISTS[:, 1] < LISTS[:, 0])
    meaningful: npt.NDArray[np.bool_] = np.where(
        sharing, shared, ALL_IN_FRONT & (GIVES_BACK | room)
    )
    return meaningful


@dataclass(frozen=True)
class ListTable:
    """
    The edits that lists lead to in a scenario; `env.codes.KEEP` stands for one that there is not.

    :param starts: int64[J, len(SHARES)], each job's start with the threads that a share allows
    :param places: int64[J, 2], its places on all vCPUs, in the background and at normal weight
    :param pauses: int64[J]
    :param sets: int64[k, 3], each of memcached's sets: bit mask, number of vCPUs, edit
    :param usual: how many of the sets it has while the SLO holds
    :param legal: bool[n_lists], which lists mean something here
    """

    starts: np.ndarray
    places: np.ndarray
    pauses: np.ndarray
    sets: np.ndarray
    usual: int
    legal: np.ndarray


def list_table(scenario: Scenario, edits: EditTable) -> ListTable:
    """
    The edits that lists lead to.

    :param scenario: the problem
    :param edits: its edits
    """
    n_jobs, vcpus = len(scenario.jobs), scenario.machine.vcpus
    everything = (1 << vcpus) - 1
    named = {edits[index]: index for index in range(len(edits))}
    by_job = {(edit.kind, edit.job): index for edit, index in named.items()}
    starts, places = np.zeros((n_jobs, len(SHARES)), np.int64), np.zeros((n_jobs, 2), np.int64)
    pauses = np.array([by_job.get((PAUSE, job), 0) for job in range(n_jobs)], np.int64)
    started = {
        (edit.job, edit.threads): index for edit, index in named.items() if edit.kind == START
    }
    placed = {
        (edit.job, edit.weight): index
        for edit, index in named.items()
        if edit.kind == PLACE and edit.cores == everything
    }
    for index, job in enumerate(scenario.jobs):
        for column, share in enumerate(SHARES):
            most = max(1, round(share * vcpus))
            fitting = [count for count in job.threads if count <= most]
            starts[index, column] = started[index, max(fitting, default=min(job.threads))]
        for weight in (BACKGROUND, NORMAL):
            places[index, weight] = placed.get((index, weight), 0)
    serving = {edit.cores: index for edit, index in named.items() if edit.kind == SERVICE}
    sets = [(mask_of(cores), len(cores)) for cores in scenario.service.sets]
    return ListTable(
        starts,
        places,
        pauses,
        np.array([(mask, size, serving.get(mask, 0)) for mask, size in sets], np.int64),
        len(scenario.service.core_choices),
        meaningful_lists(*_sharing_and_room(scenario)),
    )


def numbers_of(answers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """
    Which lists of the menu give some answers, int64[n].

    :param answers: int64[n, 4], as in `MENU`
    """
    numbers: npt.NDArray[np.int64] = np.ravel_multi_index(tuple(answers.T), PARTS)
    return numbers


def plain_list(scenario: Scenario) -> int:
    """
    A list that is good in many scenarios: three jobs at once on all vCPUs, memcached on its refuge.

    They are in the background, unless no vCPU is shared; memcached gives vCPUs back only where the
    jobs would have none.

    :param scenario: the problem
    """
    sharing, room = _sharing_and_room(scenario)
    front = FRONT.index(0 if sharing else MAX_JOBS)
    served = SERVED.index(0.0 if sharing or room else 1.0)
    answers = AT_ONCE.index(3), front, SHARES.index(1.0), served
    return int(numbers_of(np.array([answers]))[0])


def _sharing_and_room(scenario: Scenario) -> tuple[bool, bool]:
    """Whether jobs may run on memcached's vCPUs, and whether its refuge leaves them one."""
    refuge = scenario.service.core_choices[-1]
    return scenario.regulation.share_service_cores, len(refuge) < scenario.machine.vcpus
