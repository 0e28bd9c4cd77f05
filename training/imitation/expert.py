"""
The expert: it follows one good schedule, edit by edit, from any state on any machine.

The schedule comes from a search over training traces (`training.evaluation.schedule_search`). The
expert follows it on hosts of every kind the recipe asks for, and from states that the schedule
would not have led to, too.
"""

import numpy as np

from env import action
from env.codes import BACKGROUND, DONE, KEEP, PENDING, PLACE, SERVICE, START
from env.observation import WORST
from env.physics.compiled import compiled
from env.reward import VIOLATION_WEIGHT
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory
from training.evaluation.episodes import EpisodeStart
from training.evaluation.schedule_search import (
    CORES,
    LATE_CORES,
    LATE_WEIGHT,
    THREADS,
    WEIGHT,
    Schedule,
    general_schedule,
    ready_jobs,
    set_for,
)
from training.recipe import Imitation


@compiled
def _legal_edit(h, rows, kind, job, cores, weight, threads):
    """The edit of that description, or `KEEP` where it is none or cannot be carried out."""
    for edit in range(rows.shape[0]):
        same = rows[edit, action.KIND] == kind and rows[edit, action.JOB] == job
        same &= kind == START or rows[edit, action.CORES] == cores
        same &= kind != PLACE or rows[edit, action.WEIGHT] == weight
        same &= kind != START or rows[edit, action.THREADS] == threads
        if same and action.is_legal(h, rows, edit):
            return edit
    return KEEP


@compiled
def _up_to(choices, most, qps, threshold_qps):
    """The smallest of memcached's sets that serves a load, a bit mask; `most` for the largest."""
    fitting = set_for(choices, qps, threshold_qps)
    return most if fitting == choices[-1, 0] else fitting


@compiled
def expert_edit(
    h, rows, jobs, order, late, threshold_qps, choices, overflow, release, unprobed
):  # fmt: skip
    """
    The edit that brings a host nearer to a `Schedule`.

    The schedule was found with the profile's physics. Without a probe memcached gets its vCPUs
    sooner; on a machine whose probe has shown the SLO broken, the threshold falls as the
    worst reading rises, as far as an observation shows it. Where the SLO was broken although
    memcached had its refuge, it gets more than that.

    :param h: a host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param jobs: the schedule's, as the next three
    :param order: in which jobs that may start do so
    :param late: the jobs' last places are for when so many are unfinished, or fewer
    :param threshold_qps: load that memcached's smallest set serves [requests/s]
    :param choices: int64[k, 2], see `training.evaluation.schedule_search.choices_of`
    :param overflow: memcached's largest set, a bit mask
    :param release: see `training.recipe.Imitation`, as the next
    :param unprobed: factor on the threshold while there is no probe
    :return: index of the edit
    """
    if h.probed_p95_us <= 0.0:
        threshold_qps *= unprobed
    elif h.worst_p95_us > h.slo_us:
        threshold_qps *= max(h.slo_us / h.worst_p95_us, 1.0 / WORST)
    most = overflow if h.refuge_p95_us > h.slo_us else choices[-1, 0]
    service = _up_to(choices, most, h.qps, threshold_qps)
    if service < h.desired_service:  # sets grow, and so do their bit masks
        service = min(_up_to(choices, most, h.qps / release, threshold_qps), h.desired_service)
    if service != h.desired_service:
        edit = _legal_edit(h, rows, SERVICE, 0, service, 0, 0)
        if edit != KEEP:
            return edit
    unfinished = 0
    for job in range(jobs.shape[0]):
        unfinished += h.job_state[job] != DONE
    # A normal job needs a vCPU that memcached leaves, or shares.
    left = ((1 << h.n_vcpus) - 1) & ~h.service != 0 or h.share_service_cores != 0
    cores, weight = (LATE_CORES, LATE_WEIGHT) if unfinished <= late else (CORES, WEIGHT)
    ready = ready_jobs(h, jobs, order)
    for position in range(order.shape[0]):
        job = order[position]
        if ready >> job & 1 == 0:
            continue
        edit = KEEP
        if h.state[job] == PENDING:
            edit = _legal_edit(h, rows, START, job, 0, 0, jobs[job, THREADS])
        elif left or jobs[job, weight] == BACKGROUND:
            edit = _legal_edit(h, rows, PLACE, job, jobs[job, cores], jobs[job, weight], 0)
        if edit != KEEP:
            return edit
    return KEEP


@compiled
def expert_edits(
    hosts, rows, jobs, order, late, threshold_qps, choices, overflow, release, unprobed, edits
):
    """See `expert_edit`; of each of B hosts, into `edits`, int64[B]."""
    for b in range(hosts.shape[0]):
        edits[b] = expert_edit(
            hosts[b], rows, jobs, order, late, threshold_qps, choices, overflow, release, unprobed
        )


def find_schedule(
    factory: EpisodeFactory, seed: int, imitation: Imitation
) -> tuple[float, Schedule]:
    """
    The schedule to imitate: of little cost on training traces, with the profile's physics.

    Violations that are to be expected cost what the reward charges for them.

    :param factory: the problem as the profile has it
    :param seed: of the training run
    :param imitation: how long to search, and on how many traces
    :return: its mean cost on those traces [s], see `schedule_search.Search.cost`, and the schedule
    """
    count = imitation.search_traces
    starts = [EpisodeStart(trace, seed) for trace in trace_seeds(seed, count, "training")]
    rng = np.random.default_rng([seed, count])
    return general_schedule(factory, starts, imitation.search_evaluations, rng, VIOLATION_WEIGHT)
