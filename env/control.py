"""
The control state: everything that a policy's decision reads and writes, as plain arrays.

One row holds what the sensors show, what the policy desires, what the regulator made of it and
what both remember. The regulator, the observation and the action encoding are plain functions
over such a row: the simulator keeps thousands of rows in one structured array and compiles the
functions; the live loop keeps a single `ControlState` and runs them as they are. So they cannot
drift apart. Core sets are bit masks in a row.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from env.allocation import IDLE, Allocation, JobAllocation, JobState, Weight, cores_of, mask_of
from env.codes import NORMAL
from env.scenario import Scenario, profile_machine, profile_traits

STATES, WEIGHTS = tuple(JobState), tuple(Weight)

HISTORY = 3
"""How many past load readings the observation carries."""

PEAKS = 3
"""How many stretches the largest load and CPU use are kept of (`env.regulator.note_use`)."""

PROBE_WINDOW_S = 1.0
"""What a reading of the latency probe covers for a trained policy."""


def control_fields(n_jobs: int, n_vcpus: int) -> list[tuple[Any, ...]]:
    """
    The fields of a control row, as a NumPy dtype description.

    :param n_jobs: J, number of batch jobs
    :param n_vcpus: C, number of vCPUs
    """
    jobs, vcpus, whole, real = (n_jobs,), (n_vcpus,), "i8", "f8"
    return [
        # Limits, from the scenario.
        ("n_vcpus", whole),
        ("sibling", whole, vcpus),  # on the same physical core, or -1
        ("period_s", real),  # from one poll to the next
        ("interval_s", real),  # between two moves of the load
        ("share_service_cores", whole),
        ("service_dwell_s", real),
        ("pause_dwell_s", real),
        ("move_dwell_s", real),
        ("memory_mib", whole),
        ("job_memory_mib", whole, jobs),
        ("job_work_s", real, jobs),  # seconds alone on one vCPU, scales progress
        ("job_length_s", real, jobs),  # `expected_lengths_s`, by which list schedules order jobs
        ("qps_scale", real),
        ("wake_qps", real),
        ("hold_s", real),
        ("slo_us", real),
        ("refuge", whole),  # the largest of memcached's usual sets
        ("overflow", whole),  # the largest of all that it may have
        # What the sensors show.
        ("now_s", real),
        ("qps", real),  # over the last polling window
        ("cpu_cores", real),  # memcached's CPU use over the last polling window
        ("peak_qps", real),  # the largest of the last second or more
        ("peak_cpu_cores", real),
        ("probed_p95_us", real),  # by the latency probe over its last window; 0 without one
        ("job_state", whole, jobs),  # JobState
        ("job_cpu_s", real, jobs),
        # What the policy desires.
        ("desired_service", whole),
        ("desired_state", whole, jobs),
        ("desired_place", whole, jobs),  # the edit that names where the job is, or -1
        ("desired_set", whole, jobs),  # where a job may go; `env.action` turns it into vCPUs
        ("desired_cores", whole, jobs),
        ("desired_weight", whole, jobs),
        ("desired_threads", whole, jobs),
        ("desired_quota", real, jobs),  # [vCPUs], inf is no limit
        # What the regulator made of it: the allocation that is sent to the actuator.
        ("service", whole),
        ("state", whole, jobs),
        ("cores", whole, jobs),
        ("weight", whole, jobs),
        ("threads", whole, jobs),
        ("quota", real, jobs),
        # What the regulator and the observation remember.
        ("grown_at_s", real),
        ("paused_at_s", real, jobs),
        ("moved_at_s", real, jobs),
        ("past_qps", real, (HISTORY,)),
        ("settled_qps", real),  # load level the policy last saw move
        ("load_moved_at_s", real),
        ("load_gap_s", real),  # time between the last two moves
        ("smooth_qps", real),  # over some polls, which their noise does not pass
        ("smooth_cpu_cores", real),
        ("peaks_qps", real, (PEAKS,)),  # of each stretch, the one under way first
        ("peaks_cpu_cores", real, (PEAKS,)),
        ("peaks_began_s", real),  # the stretch under way
        ("worst_p95_us", real),  # largest reading of the probe, fading
        ("refuge_p95_us", real),  # the same while memcached held its refuge throughout
        ("decided_at_s", real),
        # What the tokens remember of the jobs' runs (`env.sets.tokens`).
        ("job_known", whole, jobs),  # 1: the job has a profile
        ("job_use", real, jobs),  # CPU use lately, and the most so far [vCPUs]
        ("job_most_use", real, jobs),
        ("started_at_s", real, jobs),  # negative before
        ("vcpu_use", real, vcpus),  # busy share lately
        ("noted_cpu_s", real, jobs),  # readings when they were last taken in, and when
        ("noted_busy_s", real, vcpus),
        ("use_noted_s", real),
        ("kept", whole),  # 1 when the last action changed nothing
        ("settled", whole),  # 1: regulating the desired allocation again would change nothing
        # The SLO guard (`env.guard`).
        ("guarded", whole),  # 1: the regulator is on, and the guard with it
        ("edited", whole),  # 1: what is desired was made by edits, so jobs' sets are resolved
        ("stolen_lately", real),  # share of stolen time over some polls
        ("late_lately", real),  # share of late requests over some polls
        ("late_share", real),  # and over about an interval
        ("blamed_lately", real),  # the same without what stolen time explains
        ("blamed_share", real),
        ("guard_level", whole),
        ("guard_back_off", real),
        ("guard_hot_s", real),  # last climb, or poll at which the budget burned on
        ("guard_cool_s", real),  # and last one at which it did not
        ("guard_acted_s", real),  # last climb that changed something
        ("guard_lowered_s", real),
        ("guard_acquitted_s", real),  # until then jobs are not blamed
        ("trial_late_s", real),  # late time since the guard last acted
        # Counts over the episode.
        ("guard_steps", whole),  # levels climbed
        ("guard_s", real),  # time at a level above 0
        ("illegal_edits", whole),
        ("overruled", whole),
        ("overruled_reasons", whole),  # reasons of the last decision, a sum of regulator flags
    ]


def initial_values(scenario: Scenario, job_work_s: Mapping[str, float]) -> dict[str, Any]:
    """
    A control row before the first decision: memcached on its refuge, no job started.

    :param scenario: the problem
    :param job_work_s: seconds each job needs alone on one vCPU, by name; one that is not named has
        no profile
    """
    n_jobs, machine, rules = len(scenario.jobs), scenario.machine, scenario.regulation
    refuge = mask_of(scenario.service.core_choices[-1])
    everything = (1 << machine.vcpus) - 1
    long_ago = -1e6
    values: dict[str, Any] = {
        name: [0] * shape[0][0] if shape else 0
        for name, _, *shape in control_fields(n_jobs, machine.vcpus)
    }
    values.update(
        n_vcpus=machine.vcpus,
        sibling=[machine.sibling_of(vcpu) for vcpu in range(machine.vcpus)],
        period_s=scenario.control.period_s,
        interval_s=scenario.load.interval_s,
        share_service_cores=int(rules.share_service_cores),
        service_dwell_s=rules.service_dwell_s,
        pause_dwell_s=rules.pause_dwell_s,
        move_dwell_s=rules.move_dwell_s,
        memory_mib=machine.memory_mib,
        job_memory_mib=[job.memory_mib for job in scenario.jobs],
        job_work_s=[job_work_s.get(name, 1.0) for name in scenario.job_names],
        job_length_s=expected_lengths_s(scenario, job_work_s),
        qps_scale=float(scenario.load.qps_max),
        wake_qps=scenario.control.wake_qps,
        hold_s=scenario.control.hold_s,
        slo_us=scenario.service.slo_us,
        refuge=refuge,
        overflow=mask_of(scenario.service.sets[-1]),
        desired_service=refuge,
        desired_place=[-1] * n_jobs,
        desired_set=[everything] * n_jobs,
        desired_cores=[everything] * n_jobs,
        desired_weight=[NORMAL] * n_jobs,
        desired_threads=[max(job.threads) for job in scenario.jobs],
        desired_quota=[math.inf] * n_jobs,
        service=refuge,
        cores=[everything] * n_jobs,
        weight=[NORMAL] * n_jobs,
        threads=[max(job.threads) for job in scenario.jobs],
        quota=[math.inf] * n_jobs,
        grown_at_s=long_ago,
        paused_at_s=[long_ago] * n_jobs,
        moved_at_s=[long_ago] * n_jobs,
        load_moved_at_s=0.0,
        job_known=[int(name in job_work_s) for name in scenario.job_names],
        started_at_s=[-1.0] * n_jobs,
        guard_back_off=1.0,
        guard_hot_s=long_ago,
        guard_cool_s=long_ago,
        guard_acted_s=long_ago,
        guard_lowered_s=long_ago,
        guard_acquitted_s=long_ago,
        kept=1,
    )
    return values


def expected_lengths_s(scenario: Scenario, job_work_s: Mapping[str, float]) -> list[float]:
    """
    What each job takes on one vCPU beside memcached and a load generator, at the mean load [s].

    By how much longer is `interruption` times the share of a vCPU that those take: the equations of
    `env.physics.jobs` and of `env.physics.steady_service.client_share`, without loop and probe. The
    share is the mean over all vCPUs, because nobody knows yet where the job will run.

    :param scenario: the problem
    :param job_work_s: seconds each job needs alone on one vCPU, by name; one that is not named
        counts as 1 s
    :return: in the order of the jobs [s]; a job whose `interruption` is not known takes its work
    """
    traits, machine = profile_traits(scenario.profile), profile_machine(scenario.profile)
    mean_qps = 0.5 * (scenario.load.qps_min + scenario.load.qps_max)
    served = mean_qps / machine["core_capacity_qps"]
    client = machine.get("client_cpu", 0.0) * served ** machine.get("client_exponent", 1.0)
    company = min((served + client) / scenario.machine.vcpus, 1.0)
    return [
        job_work_s.get(name, 1.0) * (1.0 + company * traits.get(name, {}).get("interruption", 0.0))
        for name in scenario.job_names
    ]


class ControlState(SimpleNamespace):
    """A single control row as a plain object, for the live loop, where lists are faster."""

    @classmethod
    def initial(cls, scenario: Scenario, job_work_s: Mapping[str, float]) -> "ControlState":
        """
        The row before the first decision.

        :param scenario: the problem
        :param job_work_s: seconds each job needs alone on one vCPU, by name
        """
        return cls(**initial_values(scenario, job_work_s))


JOB_FIELDS = tuple(name for name, _, *shape in control_fields(-1, 0) if shape == [(-1,)])
"""Those that have an entry for each job."""


def carried_over(
    control: Any, before: Scenario, after: Scenario, work_s: Mapping[str, float]
) -> ControlState:
    """
    The row of a scenario with other jobs, in which all else is as it was.

    Jobs that are in both keep what they have, but for the edit that names their place.

    :param control: the row so far
    :param before: its scenario
    :param after: the same with other jobs
    :param work_s: seconds each job needs alone on one vCPU, by name
    """
    row = ControlState.initial(after, work_s)
    kept = {job: index for index, job in enumerate(before.job_names)}
    for name, old in vars(control).items():
        if name not in JOB_FIELDS:
            setattr(row, name, old)
        elif name != "desired_place":
            fresh = getattr(row, name)
            for index, job in enumerate(after.job_names):
                if job in kept:
                    fresh[index] = old[kept[job]]
    row.settled = 0
    return row


def set_desired(control: Any, allocation: Allocation, scenario: Scenario) -> None:
    """
    Write an allocation into the row as the desired one.

    :param control: a control row
    :param allocation: what the policy desires; a job that it leaves out stays as it was desired
    :param scenario: gives the order of the jobs
    """
    control.desired_service = mask_of(allocation.service_cores)
    states, cores = control.desired_state, control.desired_cores
    weights, threads, quotas = (
        control.desired_weight,
        control.desired_threads,
        control.desired_quota,
    )
    for index, known in enumerate(scenario.jobs):
        job = allocation.jobs.get(known.name)
        if job is None or job.state in IDLE:
            continue
        states[index] = job.state
        cores[index] = mask_of(job.cores)
        weights[index] = job.weight
        threads[index] = job.threads
        quotas[index] = math.inf if job.quota is None else job.quota


def regulated(control: Any, scenario: Scenario) -> Allocation:
    """
    The allocation that the regulator let through, as a value.

    :param control: a control row
    :param scenario: gives the order of the jobs
    """
    fields = (control.state, control.cores, control.weight, control.threads, control.quota)
    names = scenario.job_names
    rows = zip(names, *(np.asarray(field[: len(names)]).tolist() for field in fields), strict=True)
    jobs = {
        name: JobAllocation(
            STATES[state],
            cores_of(cores),
            WEIGHTS[weight],
            threads,
            None if quota == math.inf else quota,
        )
        for name, state, cores, weight, threads, quota in rows
    }
    return Allocation(cores_of(int(control.service)), jobs)
