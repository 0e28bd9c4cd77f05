"""
The action: one edit of the allocation at a time.

A decision keeps the allocation or changes one thing in it: memcached's vCPUs, or one job's
start (with threads and weight), place or pause. Which edits are legal depends on the state,
so each state comes with a mask; an edit drawn under the mask can be carried out. Keeping is legal
except while nothing runs though a job could; while the SLO guard lets no job run, none could.
Edits in a row are one polling period apart.

A job's place is a *set* and a weight. A normal job uses the vCPUs of its set that memcached
does not hold, and follows when memcached comes and goes; a background job may share them. Where
memcached holds every vCPU, and shares them, normal jobs are in the background meanwhile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from env.allocation import Weight, cores_of, mask_of
from env.codes import (
    BACKGROUND,
    DONE,
    KEEP,
    NORMAL,
    NOT_ARRIVED,
    PAUSE,
    PAUSED,
    PENDING,
    PLACE,
    RUNNING,
    SERVICE,
    START,
)
from env.guard import PAUSED_ALL, least_service
from env.regulator import was_busier
from env.scenario import Scenario

KINDS = ("keep", "service", "start", "place", "pause")

# Columns of the edit table: an `Edit`, its bit in the word of `open_edits` (0 for memcached's), and
# the edit that names the place it leads to (else -1).
KIND, JOB, CORES, WEIGHT, THREADS, GATE, PLACE_EDIT = range(7)

# One 64-bit word says which edits are open: a bit for keeping, and three bits for each job.
OPEN_KEEP = 1 << 62
OPEN_START, OPEN_PLACE, OPEN_PAUSE = 1, 2, 4
BITS_PER_JOB = 3


class Edit(NamedTuple):
    """
    What one edit says; what its kind does not need is 0.

    :param kind: `KEEP`, `SERVICE`, `START`, `PLACE` or `PAUSE`
    :param job: index of the job in the scenario
    :param cores: vCPU set, a bit mask
    :param weight: `BACKGROUND` or `NORMAL`
    :param threads: number of threads a job is launched with
    """

    kind: int
    job: int = 0
    cores: int = 0
    weight: int = 0
    threads: int = 0


@dataclass(frozen=True)
class EditTable:
    """
    All edits of a scenario.

    :param rows: int64[n_edits, 7], stored column by column; `KIND` and its fellows name the columns
    :param job_names: the scenario's jobs, in order
    """

    rows: np.ndarray
    job_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, edit: int) -> Edit:
        """
        What an edit says.

        :param edit: its index
        """
        return Edit(*self.rows[edit, : len(Edit._fields)].tolist())

    def describe(self, edit: int) -> str:
        """
        An edit in words, for logs and histograms.

        :param edit: its index
        """
        kind, job, cores, weight, threads = self[edit]
        parts = [KINDS[kind]]
        if kind not in (KEEP, SERVICE):
            parts.append(self.job_names[job])
        if kind in (SERVICE, START, PLACE):
            parts.append(",".join(map(str, cores_of(cores))))
        if kind in (START, PLACE):
            parts.append(Weight(weight).name.lower())
        if kind == START:
            parts.append(f"{threads} threads")
        return " ".join(parts)


def edit_table(scenario: Scenario) -> EditTable:
    """
    The edits of a scenario: keep, one per vCPU set of memcached, and a few per job.

    A job starts on the whole machine, at background weight where it may share memcached's vCPUs,
    with any thread count it allows up to one per vCPU; a poll later it can be placed elsewhere.
    It may be placed on the whole machine, on one physical core, or on one vCPU outside memcached's
    refuge.

    :param scenario: the machine, the jobs and the regulation
    """
    machine = scenario.machine
    everything = mask_of(tuple(range(machine.vcpus)))
    refuge = mask_of(scenario.service.core_choices[-1])
    sharing = scenario.regulation.share_service_cores
    both = (NORMAL, BACKGROUND) if sharing else (NORMAL,)
    places = [(everything, weight) for weight in both]
    physical = [mask_of(core) for core in machine.physical_cores]
    for core_set in physical + [1 << vcpu for vcpu in range(machine.vcpus)]:
        shares = core_set & refuge != 0
        single = core_set.bit_count() == 1
        known = any(core_set == place for place, _ in places)
        if known or (single and shares):
            continue
        places += [(core_set, weight) for weight in (both if shares else (NORMAL,))]
    edits = [Edit(KEEP)]
    edits += [Edit(SERVICE, cores=mask_of(choice)) for choice in scenario.service.sets]
    for index, job in enumerate(scenario.jobs):
        edits += [
            Edit(START, index, everything, both[-1], threads)
            for threads in job.threads
            if threads <= max(machine.vcpus, job.threads[0])
        ]
        edits += [Edit(PLACE, index, core_set, weight) for core_set, weight in places]
        edits.append(Edit(PAUSE, index))
    places_by_key = {
        (edit.job, edit.cores, edit.weight): index
        for index, edit in enumerate(edits)
        if edit.kind == PLACE
    }
    bits = {START: OPEN_START, PLACE: OPEN_PLACE, PAUSE: OPEN_PAUSE}
    rows = []
    for edit in edits:
        gate = OPEN_KEEP if edit.kind == KEEP else bits.get(edit.kind, 0) << BITS_PER_JOB * edit.job
        key = (edit.job, edit.cores, edit.weight)
        place = places_by_key.get(key, -1) if edit.kind in (START, PLACE) else -1
        rows.append((*edit, gate, place))
    return EditTable(np.asfortranarray(np.array(rows, dtype=np.int64)), scenario.job_names)


def open_edits(control):
    """
    The edits that are open now, memcached's vCPUs aside, as a word of `OPEN_` bits.

    A job that has arrived can start while the memory that no launched job holds is enough for it,
    and it can be moved or paused again once its dwell time has passed. Keeping is open unless
    nothing runs though something could, and open while the SLO guard lets no job run: who waits
    for it has nothing to change.

    :param control: a control row (`env.control`)
    """
    memory_free = control.memory_mib
    for job in range(len(control.state)):
        launched = control.state[job] == RUNNING or control.state[job] == PAUSED
        if launched and control.job_state[job] != DONE:
            memory_free -= control.job_memory_mib[job]
    word = 0
    for job in range(len(control.state)):
        state = DONE if control.job_state[job] == DONE else control.state[job]
        bits = 0
        if state == PENDING:
            here = control.job_state[job] != NOT_ARRIVED
            if here and control.job_memory_mib[job] <= memory_free:
                bits = OPEN_START
        elif state == RUNNING:
            if control.now_s - control.moved_at_s[job] >= control.move_dwell_s:
                bits |= OPEN_PLACE
            if control.now_s - control.paused_at_s[job] >= control.pause_dwell_s:
                bits |= OPEN_PAUSE
        elif state == PAUSED:
            bits = OPEN_PLACE
        word |= bits << BITS_PER_JOB * job
    if word == 0 or may_keep(control):
        word |= OPEN_KEEP
    return word


def leaves_none(control):
    """
    Whether memcached holds every vCPU, shares none, and not because the SLO guard has it do so.

    No job can then run. The regulator would pause it, and the policy, who sees that, would have it
    go on in another way and ask again.

    :param control: a control row (`env.control`)
    """
    whole = control.service == (1 << control.n_vcpus) - 1
    return whole and control.share_service_cores == 0 and control.guard_level == 0


def may_keep(control):
    """
    Whether a job runs, or would if the regulator did not hold it; or whether none can, or may.

    :param control: a control row (`env.control`)
    """
    if control.guard_level == PAUSED_ALL:
        return True
    if leaves_none(control):
        return True
    for job in range(len(control.state)):
        state = control.state[job]
        held = state == PAUSED and control.desired_state[job] == RUNNING
        if (state == RUNNING or held) and control.job_state[job] != DONE:
            return True
    return False


def can_serve(control, cores):
    """
    Whether memcached's vCPUs may change to `cores`, as the regulator sees it.

    No vCPU is taken before its dwell time is over, while it was needed within the last second, or
    while the SLO guard has memcached hold it.

    :param control: a control row (`env.control`)
    :param cores: vCPU set, a bit mask; the desired set itself is no change
    """
    leaving = control.service & ~cores
    held = control.now_s - control.grown_at_s < control.service_dwell_s
    busy = leaving != 0 and (held or was_busier(control, cores))
    guarded = least_service(control) & ~cores != 0
    return cores != control.desired_service and not busy and not guarded


def runs_job(rows, edit):
    """
    Whether an edit starts a job, or has one go on somewhere.

    :param rows: int64[n_edits, 7], see `EditTable`
    :param edit: index of the edit
    """
    return rows[edit, KIND] == START or rows[edit, KIND] == PLACE


def legal_edits(control, rows, legal):
    """
    Mark the edits that can be carried out now and change something.

    The first loop reads one column and has no branches, because it runs at every decision. The
    places that jobs have already, those that nobody can have and the edits of memcached's vCPUs are
    corrected afterwards.

    :param control: a control row (`env.control`)
    :param rows: int64[n_edits, 7], see `EditTable`
    :param legal: float[n_edits], receives 1.0 or 0.0
    """
    word = open_edits(control)
    for edit in range(len(rows)):
        legal[edit] = 1.0 if word & rows[edit, GATE] != 0 else 0.0
    for job in range(len(control.state)):
        if control.desired_place[job] >= 0 and control.desired_state[job] == RUNNING:
            legal[control.desired_place[job]] = 0.0
    if leaves_none(control):
        for edit in range(len(rows)):
            if runs_job(rows, edit):
                legal[edit] = 0.0
    for edit in range(1, len(rows)):
        if rows[edit, KIND] != SERVICE:
            break
        legal[edit] = 1.0 if can_serve(control, rows[edit, CORES]) else 0.0


def is_legal(control, rows, edit):
    """
    Whether one edit is legal, as `legal_edits` would mark it.

    :param control: a control row (`env.control`)
    :param rows: int64[n_edits, 7], see `EditTable`
    :param edit: index of the edit
    """
    if rows[edit, KIND] == SERVICE:
        return can_serve(control, rows[edit, CORES])
    if rows[edit, KIND] == KEEP:
        # Most decisions are answered without asking what else is open.
        return may_keep(control) or open_edits(control) & rows[edit, GATE] != 0
    if runs_job(rows, edit) and leaves_none(control):
        return False
    job = rows[edit, JOB]
    there = control.desired_place[job] == edit and control.desired_state[job] == RUNNING
    return not there and open_edits(control) & rows[edit, GATE] != 0


def apply_edit(control, rows, edit):
    """
    Write one edit into the desired allocation; an illegal one is counted and changes nothing.

    :param control: a control row (`env.control`)
    :param rows: int64[n_edits, 7], see `EditTable`
    :param edit: index of the edit
    """
    kind, job = rows[edit, KIND], rows[edit, JOB]
    if not is_legal(control, rows, edit):
        control.illegal_edits += 1
        kind = KEEP
    control.kept = 1 if kind == KEEP else 0
    if kind == SERVICE:
        control.desired_service = rows[edit, CORES]
    elif kind == START or kind == PLACE:
        control.desired_state[job] = RUNNING
        control.desired_place[job] = rows[edit, PLACE_EDIT]
        control.desired_set[job] = rows[edit, CORES]
        control.desired_weight[job] = rows[edit, WEIGHT]
        if kind == START:
            control.desired_threads[job] = rows[edit, THREADS]
    elif kind == PAUSE:
        control.desired_state[job] = PAUSED


def resolve_sets(control):
    """
    Turn each job's set into vCPUs, once memcached's vCPUs are decided.

    A normal job gets the part of its set that memcached does not hold, or all vCPUs that are left
    if that part is empty. If none is left it keeps its set, and the regulator says what becomes
    of it.

    :param control: a control row (`env.control`)
    """
    left = ((1 << control.n_vcpus) - 1) & ~control.service
    for job in range(len(control.state)):
        cores = control.desired_set[job]
        apart = control.desired_weight[job] == NORMAL and left != 0
        if apart and cores & control.service != 0:
            cores = cores & left if cores & left != 0 else left
        control.desired_cores[job] = cores
