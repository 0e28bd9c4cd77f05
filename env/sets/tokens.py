"""
The observation as sets: a token for the host, one for memcached, one a vCPU, one a job.

It says the same thing by the same number in every scenario, so that one network can read all of
them. `lg` is log10 of a time in seconds, halved: 0 is 1 s, 1 is 100 s; times count as 0.01 s at
least and 10000 s at most. Shares are of the machine's vCPUs where nothing else is said. What is not
known is 0, and a flag says so: a job without a profile shows what its run has shown so far. A VM
shows the CPU time of a job and not its progress, so for such a job a slow-down is CPU time that it
did not get. With room for J jobs and C vCPUs the row has these parts:

| part | content |
|---|---|
| host, HOST | keeping is legal; a place on the whole machine exists at background, normal |
| | weight; the SLO guard's level over its highest; last action changed nothing; time since the |
| | last decision over the hold time; log2 of vCPUs / 4; share of vCPUs with a sibling; free |
| | share of the memory; log2 of 1 + unfinished jobs / 4; share of them that has a profile; lg of |
| | the known work left a vCPU; lg of the hold time, of the dwell times of a move and of a pause; |
| | log2 of 1 + running, paused jobs, threads of running jobs a vCPU / 4; jobs arrive, so their |
| | completion times count, else the makespan; from the profile: what a load generator takes of |
| | the last vCPU at the least, at the largest load; how far jobs wait for their slowest thread |
| service, SERVICE | load and the HISTORY before it over the load's maximum; CPU use a vCPU it |
| | holds, and a vCPU of the machine; log10 of the CPU time a request [us] / 2; largest load and |
| | CPU use a held vCPU of the last second; lg of the times since the load moved, between its |
| | last two moves, since its vCPUs grew; that one's share of the dwell time, at most 1; a probe |
| | runs; p95, its worst, its worst in the refuge over the SLO, at most 2; log10 of the SLO in |
| | ms; held share of vCPUs; share of the smallest set, of the refuge; threads a vCPU of the |
| | refuge; from the profile: `known_machine.SHOWN_COSTS` |
| vcpus, C x VCPU | it exists; memcached may get the set it names (`pointers`); places that |
| | begin with it exist: a core at background, normal weight, itself alone; memcached holds it, |
| | it lies in the smallest set, in the refuge; its sibling exists, memcached holds that one; |
| | busy share; threads of background, normal jobs there / 4; busy share of the sibling; its |
| | number over how many the machine has; from the profile: the load that the set it names serves |
| | within the SLO, alone, beside background work, over the largest load, at most 2; what a load |
| | generator takes there at the largest load |
| siblings, C | the sibling's number + 1, 0 without one |
| jobs, J x JOB | it can start, be placed, be paused; it is pending, running, paused; it has a |
| | profile; done share of the known work, at most 2; lg of the known work left, of the CPU time |
| | used; its share of vCPUs, threads a vCPU it has / 4, log2 of threads / 4, background weight; |
| | CPU use a vCPU it has, a thread, over the most so far; lg of the times since its start, its |
| | last move, its last pause; log2 of 1 + jobs with a profile that have less, more work left / 4; |
| | its share of the memory; from the profile: lg of the work, serial |
| | fraction, vCPUs a thread / 4, SMT factor, 10 x sensitivity, pressure, lg of the launch, |
| | interruption; for each of 1 to MOST_THREADS threads whether it may start with so many |
| cores, J x (C + 1) | vCPU belongs to the job; its place: 1 + the place's slot among the job's, |
| | or 0 |

A job that has not arrived, or is done, has no token: all its numbers are 0. CPU use of jobs and
vCPUs fades with `FADE_S`.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.action import (
    BITS_PER_JOB,
    OPEN_KEEP,
    OPEN_PAUSE,
    OPEN_PLACE,
    OPEN_START,
    EditTable,
    can_serve,
    edit_table,
    open_edits,
)
from env.allocation import mask_of
from env.codes import BACKGROUND, NORMAL, PAUSED, PENDING, PLACE, RUNNING, START
from env.control import HISTORY
from env.guard import PAUSED_ALL
from env.scenario import Scenario, profile_traits
from env.sets.known_machine import SHOWN_COSTS, known_machine
from env.sets.pointers import (
    CORE,
    EVERYWHERE,
    MOST_THREADS,
    Slots,
    last_joined,
    slots_of,
)

VERSION = 3
"""Raise it whenever the layout or a scale changes: checkpoints of another version are refused."""

HOST, SERVICE, VCPU = 22, 19 + HISTORY + len(SHOWN_COSTS), 18
TRAITS = ("work_s", "serial_fraction", "cores_per_thread", "smt", "sensitivity", "pressure",
          "launch_overhead_s", "interruption")  # fmt: skip
JOB_STATIC = 1 + len(TRAITS) + MOST_THREADS
JOB = 22 + JOB_STATIC

FADE_S = 5.0  # what CPU use of jobs and vCPUs covers [s]
WORST = 2.0  # largest p95 that is shown, as a multiple of the SLO


@dataclass(frozen=True)
class Layout:
    """
    Where the parts of a row are.

    :param jobs: J, number of jobs that there is room for
    :param vcpus: C, the same of vCPUs
    """

    jobs: int
    vcpus: int

    @property
    def slots(self) -> Slots:
        """The edits by the tokens they name."""
        return Slots(self.jobs, self.vcpus)

    @property
    def offsets(self) -> tuple[int, ...]:
        """
        The same for compiled code.

        J and C; where service and vCPUs begin, the numbers of a vCPU; where siblings and jobs
        begin, the numbers of a job; where their vCPUs begin.
        """
        vcpus_at = HOST + SERVICE
        siblings_at = vcpus_at + self.vcpus * VCPU
        jobs_at = siblings_at + self.vcpus
        cores_at = jobs_at + self.jobs * JOB
        return (self.jobs, self.vcpus, HOST, vcpus_at, VCPU, siblings_at, jobs_at, JOB, cores_at)

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return self.offsets[-1] + self.jobs * (self.vcpus + 1)


@dataclass(frozen=True)
class TokenTable:
    """
    What the tokens of a scenario need besides the control row.

    :param layout: where everything goes
    :param blank: float32[size], what never changes; a row begins as a copy of it
    :param edits: the scenario's edits
    :param slot_of: int64[n_edits], their slots
    :param sets: int64[n_sets, 2], of each of memcached's sets the bit mask and the vCPU that names
        it
    """

    layout: Layout
    blank: npt.NDArray[np.float32]
    edits: EditTable
    slot_of: npt.NDArray[np.int64]
    sets: npt.NDArray[np.int64]


def lg(seconds):
    """
    The logarithm of a time on the scale of the tokens.

    :param seconds: the time
    """
    return 0.5 * math.log10(min(max(seconds, 0.01), 1e4))


def token_table(scenario: Scenario, layout: Layout, arrivals: bool | None = None) -> TokenTable:
    """
    The tables of a scenario.

    :param scenario: the machine, the jobs, memcached; its profile gives the jobs' traits
    :param layout: what there is room for
    :param arrivals: whether jobs arrive later; if nobody says so, whether the scenario's do
    :raises InputError: if there is not enough
    """
    table = edit_table(scenario)
    slot_of = slots_of(scenario, table, layout.slots)
    machine, service, control = scenario.machine, scenario.service, scenario.control
    n_jobs, n_vcpus, at, vcpus_at, _, siblings_at, jobs_at, _, _ = layout.offsets
    blank = np.zeros(layout.size, np.float32)
    paired = sum(machine.sibling_of(vcpu) >= 0 for vcpu in range(machine.vcpus))
    refuge = service.core_choices[-1]
    blank[6:8] = math.log2(machine.vcpus) / 4.0, paired / machine.vcpus
    rules = scenario.regulation
    blank[12:15] = lg(control.hold_s), lg(rules.move_dwell_s), lg(rules.pause_dwell_s)
    blank[at + 14 + HISTORY] = math.log10(service.slo_us / 1000.0)
    known = known_machine(scenario)
    blank[at + 16 + HISTORY : at + SERVICE] = (
        len(service.core_choices[0]) / machine.vcpus,
        len(refuge) / machine.vcpus,
        service.threads / len(refuge),
        *known.costs,
    )
    blank[18] = scenario.has_arrivals if arrivals is None else arrivals
    blank[19:22] = *known.client_share, known.straggling
    gates = blank[vcpus_at:siblings_at].reshape(n_vcpus, VCPU)
    for vcpu in range(machine.vcpus):
        sibling = machine.sibling_of(vcpu)
        gates[vcpu, 0] = 1.0
        gates[vcpu, 6:9] = vcpu in service.core_choices[0], vcpu in refuge, sibling >= 0
        gates[vcpu, 14] = vcpu / machine.vcpus
        blank[siblings_at + vcpu] = sibling + 1
    rows = blank[jobs_at : jobs_at + n_jobs * JOB].reshape(n_jobs, JOB)[:, -JOB_STATIC:]
    traits = profile_traits(scenario.profile)
    for index, job in enumerate(scenario.jobs):
        rows[index, 0] = job.memory_mib / machine.memory_mib
        if job.name not in traits:
            continue
        work_s, serial, cores, smt, sensitivity, pressure, launch_s, interruption = (
            traits[job.name].get(name, 0.0) for name in TRAITS
        )
        rows[index, 1 : 1 + len(TRAITS)] = (
            lg(work_s), serial, cores / 4.0, smt, 10.0 * sensitivity, pressure, lg(launch_s),
            interruption,
        )  # fmt: skip
    for edit, slot in enumerate(slot_of):
        kind, owner, *_ = table[edit]
        inside = (slot - layout.slots.first_job) - owner * layout.slots.per_job
        if kind == START:
            rows[owner, 1 + len(TRAITS) + inside] = 1.0
        elif kind == PLACE and inside < CORE:
            blank[1 + inside - EVERYWHERE] = 1.0
        elif kind == PLACE and inside < CORE + 2 * n_vcpus:
            gates[(inside - CORE) // 2, 2 + (inside - CORE) % 2] = 1.0
        elif kind == PLACE:
            gates[inside - CORE - 2 * n_vcpus, 4] = 1.0
    named = last_joined(scenario)
    gates[machine.vcpus - 1, 17] = known.client_share[1]
    for held, served in zip(service.sets, known.served, strict=True):
        gates[named[mask_of(held)], 15:17] = served
    sets = np.array([(mask_of(cores), named[mask_of(cores)]) for cores in service.sets], np.int64)
    return TokenTable(layout, blank, table, slot_of, sets)


def note_use_of_jobs(control):
    """
    Take in what jobs and vCPUs have used since the last call; once a decision, before the tokens.

    :param control: a control row (`env.control`) with up-to-date readings
    """
    span_s = control.now_s - control.use_noted_s
    if span_s <= 0.0:
        return
    weight = -math.expm1(-span_s / FADE_S)
    control.use_noted_s = control.now_s
    for job in range(len(control.state)):
        used = control.job_cpu_s[job] - control.noted_cpu_s[job]
        control.noted_cpu_s[job] = control.job_cpu_s[job]
        if control.state[job] == RUNNING or control.state[job] == PAUSED:
            if control.started_at_s[job] < 0.0:
                control.started_at_s[job] = control.now_s - span_s
            control.job_use[job] += (used / span_s - control.job_use[job]) * weight
            control.job_most_use[job] = max(control.job_most_use[job], control.job_use[job])
    for vcpu in range(control.n_vcpus):
        busy = control.vcpu_busy_s[vcpu] - control.noted_busy_s[vcpu]
        control.noted_busy_s[vcpu] = control.vcpu_busy_s[vcpu]
        control.vcpu_use[vcpu] += (min(busy / span_s, 1.0) - control.vcpu_use[vcpu]) * weight


def write_tokens(control, sets, slot_of, layout, tokens):
    """
    Write what changes into a row that began as a copy of `TokenTable.blank`.

    :param control: a control row (`env.control`) with up-to-date readings
    :param sets: see `TokenTable`, as the next
    :param slot_of: int64[n_edits]
    :param layout: `Layout.offsets`
    :param tokens: float[size], the row
    """
    n_vcpus = control.n_vcpus
    word = open_edits(control)
    write_service(control, layout, tokens)
    write_vcpus(control, sets, layout, tokens)
    _, room, _, vcpus_at, n_vcpu, _, jobs_at, n_job, cores_at = layout
    memory_free, unfinished, known, work_left_s = float(control.memory_mib), 0, 0, 0.0
    running = paused = running_threads = 0
    per_job = CORE + 3 * room + 1
    for job in range(min(len(control.state), layout[0])):  # beyond them is a host's padding
        at, own = jobs_at + job * n_job, cores_at + job * (room + 1)
        state = control.job_state[job] if control.job_state[job] > PAUSED else control.state[job]
        if state != PENDING and state != RUNNING and state != PAUSED:
            for feature in range(n_job):
                tokens[at + feature] = 0.0
            for vcpu in range(room + 1):
                tokens[own + vcpu] = 0.0
            continue
        unfinished += 1
        active = state != PENDING
        if active:
            memory_free -= control.job_memory_mib[job]
        bits = word >> BITS_PER_JOB * job
        tokens[at] = 1.0 if bits & OPEN_START != 0 else 0.0
        tokens[at + 1] = 1.0 if bits & OPEN_PLACE != 0 else 0.0
        tokens[at + 2] = 1.0 if bits & OPEN_PAUSE != 0 else 0.0
        tokens[at + 3] = 1.0 if state == PENDING else 0.0
        tokens[at + 4] = 1.0 if state == RUNNING else 0.0
        tokens[at + 5] = 1.0 if state == PAUSED else 0.0
        used_s = control.job_cpu_s[job]
        if control.job_known[job] != 0:
            left_s = max(control.job_work_s[job] - used_s, 0.0)
            known += 1
            work_left_s += left_s
            tokens[at + 6] = 1.0
            tokens[at + 7] = min(used_s / control.job_work_s[job], 2.0)
            tokens[at + 8] = lg(left_s)
        else:
            for feature in range(6, 9):
                tokens[at + feature] = 0.0
            for trait in range(8):
                tokens[at + 23 + trait] = 0.0
        tokens[at + 9] = lg(used_s)
        size = 0
        for vcpu in range(n_vcpus):
            held = (control.cores[job] >> vcpu) & 1 if active else 0
            size += held
            tokens[own + vcpu] = held
        tokens[own + room] = 0.0
        if active:
            threads, use = control.threads[job], control.job_use[job]
            tokens[at + 10] = size / n_vcpus
            tokens[at + 11] = threads / max(size, 1) / 4.0
            tokens[at + 12] = math.log2(threads) / 4.0
            tokens[at + 13] = 1.0 if control.weight[job] == BACKGROUND else 0.0
            tokens[at + 14] = use / max(size, 1)
            tokens[at + 15] = use / threads
            tokens[at + 16] = use / max(control.job_most_use[job], 0.01)
            tokens[at + 17] = lg(control.now_s - control.started_at_s[job])
            tokens[at + 18] = lg(control.now_s - control.moved_at_s[job])
            tokens[at + 19] = lg(control.now_s - control.paused_at_s[job])
            place = control.desired_place[job]
            if place >= 0 and state == RUNNING:
                first = 1 + room + job * per_job
                tokens[own + room] = slot_of[place] - first - EVERYWHERE + 1
            share = threads / max(size, 1) / 4.0
            column = 12 if control.weight[job] == NORMAL else 11
            paused += state == PAUSED
            if state == RUNNING:
                running += 1
                running_threads += threads
                for vcpu in range(n_vcpus):
                    if (control.cores[job] >> vcpu) & 1:
                        tokens[vcpus_at + vcpu * n_vcpu + column] += share
        else:
            for feature in range(10, 20):
                tokens[at + feature] = 0.0
    tokens[0] = 1.0 if word & OPEN_KEEP != 0 else 0.0
    tokens[3] = control.guard_level / PAUSED_ALL
    tokens[4] = control.kept
    tokens[5] = min(control.now_s - control.decided_at_s, control.hold_s) / control.hold_s
    tokens[8] = max(memory_free, 0.0) / control.memory_mib
    tokens[9] = math.log2(1.0 + unfinished) / 4.0
    tokens[10] = known / max(unfinished, 1)
    tokens[11] = lg(work_left_s / n_vcpus)
    tokens[15] = math.log2(1.0 + running) / 4.0
    tokens[16] = math.log2(1.0 + paused) / 4.0
    tokens[17] = math.log2(1.0 + running_threads / n_vcpus) / 4.0
    write_ranks(layout, tokens)


def write_ranks(layout, tokens):
    """
    Write how many jobs have less and more work left than each; of those that have a profile.

    Who is the shortest is hard to see for a network that mixes tokens. Of equals the first counts
    as the shortest, as one of them has to start.

    :param layout: `Layout.offsets`
    :param tokens: float[size], the row, whose jobs are written already
    """
    n_jobs, jobs_at, n_job = layout[0], layout[6], layout[7]
    for job in range(n_jobs):
        at = jobs_at + job * n_job
        if tokens[at + 6] == 0.0:
            tokens[at + 20] = tokens[at + 21] = 0.0
            continue
        less = more = 0
        for other in range(n_jobs):
            there = jobs_at + other * n_job
            if other == job or tokens[there + 6] == 0.0:
                continue
            shorter = tokens[there + 8] < tokens[at + 8]
            if shorter or (other < job and tokens[there + 8] == tokens[at + 8]):
                less += 1
            else:
                more += 1
        tokens[at + 20] = math.log2(1.0 + less) / 4.0
        tokens[at + 21] = math.log2(1.0 + more) / 4.0


def write_service(control, layout, tokens):
    """
    Write the token of memcached.

    :param control: a control row (`env.control`)
    :param layout: `Layout.offsets`
    :param tokens: float[size], the row
    """
    at = layout[2]
    held = 0
    for vcpu in range(control.n_vcpus):
        held += (control.service >> vcpu) & 1
    tokens[at] = control.qps / control.qps_scale
    for age in range(HISTORY):
        tokens[at + 1 + age] = control.past_qps[age] / control.qps_scale
    at += 1 + HISTORY
    tokens[at] = control.cpu_cores / max(held, 1)
    tokens[at + 1] = control.cpu_cores / control.n_vcpus
    tokens[at + 2] = 0.5 * math.log10(
        min(max(1e6 * control.cpu_cores / max(control.qps, 1.0), 0.1), 1e4)
    )
    tokens[at + 3] = control.peak_qps / control.qps_scale
    tokens[at + 4] = control.peak_cpu_cores / max(held, 1)
    grown_s = control.now_s - control.grown_at_s
    tokens[at + 5] = lg(control.now_s - control.load_moved_at_s)
    tokens[at + 6] = lg(control.load_gap_s)
    tokens[at + 7] = lg(grown_s)
    tokens[at + 8] = min(grown_s / control.service_dwell_s, 1.0)
    tokens[at + 9] = 1.0 if control.probed_p95_us > 0.0 else 0.0
    tokens[at + 10] = min(control.probed_p95_us / control.slo_us, WORST)
    tokens[at + 11] = min(control.worst_p95_us / control.slo_us, WORST)
    tokens[at + 12] = min(control.refuge_p95_us / control.slo_us, WORST)
    tokens[at + 14] = held / control.n_vcpus


def write_vcpus(control, sets, layout, tokens):
    """
    Write the tokens of the vCPUs, without the jobs' threads there.

    :param control: a control row (`env.control`)
    :param sets: see `TokenTable`
    :param layout: `Layout.offsets`
    :param tokens: float[size], the row
    """
    at, size = layout[3], layout[4]
    for vcpu in range(control.n_vcpus):
        own, sibling = at + vcpu * size, control.sibling[vcpu]
        tokens[own + 1] = 0.0
        tokens[own + 5] = (control.service >> vcpu) & 1
        tokens[own + 9] = (control.service >> sibling) & 1 if sibling >= 0 else 0.0
        tokens[own + 10] = control.vcpu_use[vcpu]
        tokens[own + 11] = tokens[own + 12] = 0.0
        tokens[own + 13] = control.vcpu_use[sibling] if sibling >= 0 else 0.0
    for index in range(len(sets)):
        if can_serve(control, sets[index, 0]):
            tokens[at + sets[index, 1] * size + 1] = 1.0
