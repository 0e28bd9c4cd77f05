"""
Following a list schedule, edit by edit, from any state of any machine.

Plain functions over a control row: the simulator compiles them, the live loop runs them as they
are. Where the makespan counts, the jobs that take longest beside memcached come first (Graham 1969)
and who runs goes on; where jobs arrive and completion times count, those with the least work left
run, and interrupt those with more (Schrage 1968).
"""

import math

from env.action import is_legal
from env.codes import BACKGROUND, DONE, KEEP, NORMAL, NOT_ARRIVED, PENDING, RUNNING
from env.guard import PAUSED_ALL
from env.observation import WORST

STAYING = 0.7
"""What counts of the work that is left of a running job, where jobs with less come first. Who is
nearly as short does not interrupt it: it would be done hardly sooner, and twice something moves."""

RELEASE = 0.93
"""Share of what a smaller set serves at which memcached goes back to it."""

UNPROBED = 0.65
"""Factor on what sets serve while no probe shows whether the SLO holds: room for one vCPU, and for
what a second one adds, that both serve 20 % less than the profile says."""

FIRST, LAST = -math.inf, math.inf


def gone(control, job):
    """
    Whether a job is done or has not arrived.

    :param control: a control row (`env.control`)
    :param job: index of the job
    """
    return control.job_state[job] == DONE or control.job_state[job] == NOT_ARRIVED


def jobs_there(control, n_jobs):
    """
    The jobs that have arrived and are not done, a bit mask.

    :param control: a control row (`env.control`)
    :param n_jobs: number of jobs
    """
    there = 0
    for job in range(n_jobs):
        if not gone(control, job):
            there |= 1 << job
    return there


def work_left_s(control, job):
    """
    What is left of a job's work, as far as its CPU time tells [s].

    :param control: a control row (`env.control`)
    :param job: index of the job, which has a profile
    """
    return max(control.job_work_s[job] - control.job_cpu_s[job], 0.0)


def turn_of(control, job, interrupts):
    """
    When it is a job's turn to run: before those of a larger number.

    Unless jobs interrupt each other, who runs comes before who is paused, and who is paused before
    who has not begun. A job whose work nobody knows neither interrupts nor is interrupted, and who
    was paused just before may not be paused again.

    :param control: a control row (`env.control`)
    :param job: index of the job
    :param interrupts: whether the least work that is left comes first
    :return: -1 for who goes on before all others, infinite for no work that could be compared
    """
    pending, unknown = control.state[job] == PENDING, interrupts and control.job_known[job] == 0
    # Whom the guard or the regulator holds runs as far as a list is concerned.
    runs = not pending and control.desired_state[job] == RUNNING
    if runs and (unknown or control.now_s - control.paused_at_s[job] < control.pause_dwell_s):
        return -1.0
    if unknown:
        return LAST
    if interrupts:
        return work_left_s(control, job) * (STAYING if runs else 1.0)
    return 0.0 if runs else 2.0 if pending else 1.0


def rank_of(control, job, interrupts):
    """
    Which of the jobs comes first whose turn is the same: that of the least number.

    A job without a profile might be long: where the makespan counts it is not left to the end.

    :param control: a control row (`env.control`)
    :param job: index of the job
    :param interrupts: see `turn_of`
    """
    if control.job_known[job] == 0:
        return LAST if interrupts else FIRST
    return control.job_work_s[job] if interrupts else -control.job_length_s[job]


def first_jobs(control, n_jobs, at_once, front, interrupts):
    """
    The jobs that a list wants to run now, chosen by `turn_of`, and the first `front` of them.

    :param control: a control row (`env.control`)
    :param n_jobs: number of jobs
    :param at_once: how many run at most
    :param front: how many of them are in front
    :param interrupts: see `turn_of`
    :return: two bit masks
    """
    memory_free = control.memory_mib
    for job in range(n_jobs):
        if control.job_state[job] != DONE and control.state[job] != PENDING:
            memory_free -= control.job_memory_mib[job]
    chosen = in_front = 0
    for count in range(at_once):
        found, least, rank = -1, LAST, LAST
        for job in range(n_jobs):
            if chosen >> job & 1 != 0 or gone(control, job):
                continue
            if control.state[job] == PENDING and control.job_memory_mib[job] > memory_free:
                continue
            turn, own = turn_of(control, job, interrupts), rank_of(control, job, interrupts)
            if found < 0 or turn < least or (turn == least and own < rank):
                found, least, rank = job, turn, own
        if found < 0:
            break
        chosen |= 1 << found
        if count < front:
            in_front |= 1 << found
        if control.state[found] == PENDING:
            memory_free -= control.job_memory_mib[found]
    return chosen, in_front


def set_serving(sets, usual, qps, threshold_qps, most):
    """
    Which of memcached's sets serves a load: the smallest that does, `most` if no smaller one does.

    :param sets: int64[k, 3], see `env.lists.menu.ListTable`, as the next
    :param usual: number of sets
    :param qps: the load [requests/s]
    :param threshold_qps: the load that the smallest set serves [requests/s]
    :param most: index of a set
    """
    for index in range(usual - 1):
        if qps * sets[0, 1] <= threshold_qps * sets[index, 1]:
            return index
    return most


def service_edit(control, sets, usual, served):
    """
    The edit that gives memcached the set that a list wants, or `KEEP`.

    The menu was made for the profile's physics. Without a probe memcached gets its vCPUs sooner;
    on a machine whose probe has shown the SLO broken, the threshold falls as the worst reading
    rises, as far as an observation shows it. Where the SLO was broken although memcached had its
    refuge, it gets more than that.

    :param control: a control row (`env.control`)
    :param sets: int64[k, 3], see `env.lists.menu.ListTable`, as the next
    :param usual: number of sets
    :param served: what the smallest set serves, over the largest load
    """
    threshold_qps = served * control.qps_scale
    if control.probed_p95_us <= 0.0:
        threshold_qps *= UNPROBED
    elif control.worst_p95_us > control.slo_us:
        threshold_qps *= max(control.slo_us / control.worst_p95_us, 1.0 / WORST)
    most = len(sets) - 1 if control.refuge_p95_us > control.slo_us else usual - 1
    wanted = set_serving(sets, usual, control.qps, threshold_qps, most)
    if sets[wanted, 0] < control.desired_service:  # sets grow, and so do their bit masks
        wanted = set_serving(sets, usual, control.qps / RELEASE, threshold_qps, most)
        if sets[wanted, 0] >= control.desired_service:
            return KEEP
    return KEEP if sets[wanted, 0] == control.desired_service else sets[wanted, 2]


def list_edit(
    control, n_jobs, rows, starts, places, pauses, sets, usual, at_once, front, share, served,
    interrupts,
):  # fmt: skip
    """
    The edit that brings a machine nearer to a list schedule.

    memcached comes first, then whoever runs and should not, then starts and places, the jobs of the
    least rank (`rank_of`) first.

    :param control: a control row (`env.control`)
    :param n_jobs: number of jobs
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param starts: see `env.lists.menu.ListTable`, as the next four
    :param places: int64[J, 2]
    :param pauses: int64[J]
    :param sets: int64[k, 3]
    :param usual: number of sets
    :param at_once: jobs that run side by side at most
    :param front: of those, how many have normal weight
    :param share: which of `env.lists.menu.SHARES` a job's threads are
    :param served: what memcached's smallest set serves, over the largest load
    :param interrupts: see `turn_of`
    """
    edit = service_edit(control, sets, usual, served)
    if edit != KEEP and is_legal(control, rows, edit):
        return edit
    chosen, in_front = first_jobs(control, n_jobs, at_once, front, interrupts)
    # A normal job needs a vCPU that memcached leaves, or shares.
    left = ((1 << control.n_vcpus) - 1) & ~control.service != 0
    left = left or control.share_service_cores != 0
    for job in range(n_jobs):
        # Nobody is paused for jobs that could not run in its place.
        surplus = (
            control.state[job] == RUNNING and chosen >> job & 1 == 0 and not gone(control, job)
        )
        if left and surplus and pauses[job] != KEEP and is_legal(control, rows, pauses[job]):
            return pauses[job]
    found, best = KEEP, LAST
    for job in range(n_jobs):
        if chosen >> job & 1 == 0:
            continue
        if control.state[job] == PENDING:
            # While the guard has all jobs paused, a start that it holds back is asked for once; it
            # keeps its threads, whatever list is followed by then.
            held = control.guard_level == PAUSED_ALL and control.desired_state[job] == RUNNING
            edit = KEEP if held else starts[job, share]
        else:
            weight = NORMAL if in_front >> job & 1 != 0 else BACKGROUND
            edit = places[job, weight] if left or weight == BACKGROUND else KEEP
        rank = rank_of(control, job, interrupts)
        if edit != KEEP and (found == KEEP or rank < best) and is_legal(control, rows, edit):
            found, best = edit, rank
    return found
