"""
The SLO guard: an error budget of late requests, and a ladder that keeps any policy from burning it.

Of the requests in an interval's length 5 % may be later than the SLO. Two fading shares account for
them: `late_share`, over about an interval, says how much of that budget is gone, and `late_lately`,
over about 0.1 s, how fast it burns (the multiwindow, multi-burn-rate alerts of Google's *The Site
Reliability Workbook*, 2018, chapter 5). Where it burns too fast the guard climbs, a level at a
time, and each level has the regulator keep more of the machine for memcached:

| level | what the regulator does |
|---|---|
| `REFUGE` | memcached has its refuge, the largest of its usual sets |
| `ALONE` | and no job shares its vCPUs |
| `APART` | memcached overflows its refuge, where it may; no job runs on the refuge's siblings |
| `PAUSED_ALL` | no job runs |

A level that changes nothing is passed at once. After a calm time the guard comes down a level; that
time grows where it had to climb again soon, and shrinks again where it had not. Where requests are
late even after every job has been paused for a while, jobs are not the cause: the guard gives them
back level by level and does not blame them for a while, so that a machine whose load alone breaks
the SLO still finishes its jobs. Hiccups of the machine that leave half of the budget neither keep
the guard up nor acquit the jobs. What is late because the hypervisor ran somebody else (*stolen*
time) gives memcached its refuge, in which it catches up sooner, but no job is blamed for it: jobs
that waited for its end would only end later. So there are two accounts, of all late requests and of
those that jobs may have a part in. Where a quarter of memcached's time is stolen, or more, all that
is late may be the hypervisor's, and the guard takes nothing from the jobs.

All times but `LATELY_S` are shares of an interval, because an interval is what a violation is
counted by. All functions work on a control row (`env.control`), plain Python here, compiled in the
kernel.
"""

import math

from env.codes import RUNNING

REFUGE, ALONE, APART, PAUSED_ALL = 1, 2, 3, 4
LEVELS = (
    "memcached's vCPUs are the policy's choice",
    "memcached has its refuge",
    "no job shares memcached's vCPUs",
    "memcached overflows its refuge, no job runs beside it",
    "no job runs",
)
"""What holds at each level, 0 first, in the words of the records."""

LATE_LIMIT = 0.05
"""The budget: this share of the requests of an interval may be later than the SLO."""

LATELY_S = 0.1  # what `late_lately` covers: four polls, so that one late poll shows and then fades
WINDOW = 0.5  # what `late_share` covers, as a share of an interval; a fading share weighs twice

# To climb to a level, the budget burns at more than FAST, which one poll with half of its requests
# late shows, or HARD where the level takes from the jobs, and a share of it that grows with the
# level is gone: after 75 ms in which every request was late of an interval of 10 s the first one,
# after 0.3 s all four. What is late for 50 ms and then no more is a hiccup of the machine, in
# which jobs have no part: it burns less than HARD. Or the budget burns slowly and SPENT of it is
# gone. The rest is for what comes late until the step has acted: of an interval of 1 s half of the
# budget is 25 ms, a poll.
FAST, HARD, GONE_A_LEVEL = 2.0, 8.0, 0.2
SLOW, SPENT = 1.0, 0.5

# Late requests for each one that would have come while a vCPU was stolen: it waits, and so do those
# that come until memcached has caught up, which takes 1 / (1 - use) times as long in all.
STOLEN_COSTS = 4.0

LASTS_S = 0.3  # what burns slowly does so for this long before it takes anything from the jobs
SETTLE_POLLS = 3  # a step that changed something has so many polls to act
REST = 0.1  # of an interval must be calm before a level is given back, times the back-off
LONGEST_REST = 1.0  # interval that a level which keeps jobs from running stands in calm, at most
TRIAL, LONGEST_TRIAL = 0.25, 1.0  # of an interval with every job paused for the last level to help
MOST_BACK_OFF = 16.0

# Without a probe: run delay a CPU second, as a multiple of its calm baseline. Disturbed memcached
# had five to eight times as much, an undisturbed one varied by less than two (2026-11-22, a VM with
# 16 vCPUs, Linux 6.18).
CALM_DELAYS, LATE_DELAYS = 2.0, 8.0


def late_by_delay(delay, calm_delay):
    """
    The share of late requests, guessed where no probe measures it.

    :param delay: memcached's run delay now [s a CPU second]
    :param calm_delay: the same where nothing disturbs memcached [s a CPU second]
    :return: 0 to 1
    """
    share = (delay / calm_delay - CALM_DELAYS) / (LATE_DELAYS - CALM_DELAYS)
    return min(max(share, 0.0), 1.0)


def note_stolen(control, share, span_s):
    """
    Take in what share of a stretch of time was stolen; to be called before `note_late`.

    :param control: a control row (`env.control`)
    :param share: stolen part of it, of the vCPUs that memcached holds, 0 to 1
    :param span_s: its length, which ends now [s]
    """
    control.stolen_lately += (share - control.stolen_lately) * -math.expm1(-span_s / LATELY_S)


def note_late(control, share, span_s):
    """
    Take in what share of the requests of a stretch of time was late.

    :param control: a control row (`env.control`)
    :param share: late part of the requests that were due in it, 0 to 1
    :param span_s: its length, which ends now [s]
    """
    lately = -math.expm1(-span_s / LATELY_S)
    window = -math.expm1(-span_s / (WINDOW * control.interval_s))
    if control.blamed_lately <= SLOW * LATE_LIMIT:
        control.guard_cool_s = control.now_s - span_s
    blamed = max(0.0, share - STOLEN_COSTS * control.stolen_lately)
    control.late_lately += (share - control.late_lately) * lately
    control.late_share += (share - control.late_share) * window
    control.blamed_lately += (blamed - control.blamed_lately) * lately
    control.blamed_share += (blamed - control.blamed_share) * window
    if burns_on(control, control.guard_level > harmless(control)):
        control.guard_hot_s = control.now_s
    if control.guard_level > 0:
        control.guard_s += span_s
    control.trial_late_s += blamed * span_s


def budget(control, without_stolen):
    """
    How much of the budget is gone, and how fast it burns: as parts of it, and as a multiple of it.

    :param control: a control row (`env.control`)
    :param without_stolen: whether only what jobs may have a part in counts
    """
    gone = control.blamed_share if without_stolen else control.late_share
    burn = control.blamed_lately if without_stolen else control.late_lately
    return gone / LATE_LIMIT, burn / LATE_LIMIT


def burns_on(control, without_stolen):
    """
    Whether the budget burns, and a good part of it is gone.

    :param control: a control row (`env.control`)
    :param without_stolen: see `budget`
    """
    gone, burn = budget(control, without_stolen)
    return gone > SPENT and burn > SLOW


def step_guard(control):
    """
    Climb or come down, if it is time to; to be called at every poll.

    :param control: a control row (`env.control`)
    :return: whether the level has changed, so that the regulator must look again
    """
    before = control.guard_level
    if before == PAUSED_ALL and still_runs(control):
        act(control)
    while must_climb(control):
        climb(control)
    if control.guard_level == before and before > 0 and may_come_down(control):
        come_down(control)
    return control.guard_level != before


def still_runs(control):
    """
    Whether a job is seen to run: what pauses it is still under way.

    :param control: a control row (`env.control`)
    """
    runs = False
    for job in range(len(control.state)):
        runs |= control.job_state[job] == RUNNING
    return runs


def must_climb(control):
    """
    Whether the budget burns too fast for the present level.

    :param control: a control row (`env.control`)
    """
    level = control.guard_level
    acquitted = control.now_s < control.guard_acquitted_s
    if level == PAUSED_ALL or (acquitted and level >= harmless(control)):
        return False
    if control.now_s - control.guard_acted_s < (SETTLE_POLLS - 0.5) * control.period_s:
        return False
    without_stolen = level >= harmless(control)
    gone, burn = budget(control, without_stolen)
    if burn > (FAST if level < REFUGE else HARD) and gone >= GONE_A_LEVEL * (level + 1):
        return True
    lasts = level < REFUGE or control.now_s - control.guard_cool_s >= LASTS_S
    return lasts and burns_on(control, without_stolen)


def climb(control):
    """
    One level up; a step that changes something is judged by what comes after it.

    :param control: a control row (`env.control`)
    """
    blamed = control.guard_level >= harmless(control)
    blamed |= 2.0 * control.blamed_share > control.late_share
    if blamed and control.guard_lowered_s > control.guard_acted_s:
        # A climb as soon as it may again doubles the back-off, one that comes after the back-off's
        # own length leaves it, and every further such length halves it. One for what was stolen
        # for the most part says nothing of the jobs.
        free_s = control.guard_lowered_s
        if control.guard_acquitted_s <= control.now_s:
            free_s = max(free_s, control.guard_acquitted_s)
        again_s = control.guard_back_off * control.interval_s
        factor = 2.0 ** (1.0 - (control.now_s - free_s) / again_s)
        control.guard_back_off = min(max(control.guard_back_off * factor, 1.0), MOST_BACK_OFF)
        control.guard_lowered_s = control.guard_acted_s
    before = control.guard_level
    control.guard_level += 1
    while leaves_nothing(control):
        control.guard_level += 1
    control.guard_steps += control.guard_level - before
    control.guard_hot_s = control.now_s
    if control.guard_level == PAUSED_ALL or not kept_already(control):
        act(control)
        control.late_lately = control.blamed_lately = 0.0


def act(control):
    """
    A step changes something now; at the last level a trial begins.

    :param control: a control row (`env.control`)
    """
    control.guard_acted_s = control.now_s
    control.trial_late_s = 0.0


def may_come_down(control):
    """
    Whether it is time to give a level back.

    It is after a calm time. It is, too, where requests are late though all jobs have been paused
    for a while, and so much of a budget went meanwhile that it was no hiccup: jobs are then
    acquitted, and come back level by level, calm or not. They do not wait longer than an interval
    for a machine that is never calm.

    :param control: a control row (`env.control`)
    """
    level, interval_s = control.guard_level, control.interval_s
    tried_s = control.now_s - control.guard_acted_s
    if level == PAUSED_ALL and control.blamed_lately > SLOW * LATE_LIMIT:
        innocent = control.trial_late_s > SPENT * LATE_LIMIT * interval_s
        if tried_s >= (TRIAL if innocent else LONGEST_TRIAL) * interval_s:
            control.guard_acquitted_s = control.now_s + control.guard_back_off * interval_s
            return True
    if control.now_s < control.guard_acquitted_s and level > harmless(control):
        return control.now_s - control.guard_lowered_s >= REST * interval_s
    return control.now_s - last_trouble_s(control) >= rest_s(control)


def come_down(control):
    """
    One level down, and past levels that leave the jobs no vCPU either.

    :param control: a control row (`env.control`)
    """
    control.guard_level -= 1
    while leaves_nothing(control):
        control.guard_level -= 1
    control.guard_lowered_s = control.now_s


def leaves_nothing(control):
    """
    Whether the level pauses every job without being the one that does.

    :param control: a control row (`env.control`)
    """
    if control.guard_level == PAUSED_ALL:
        return False
    return kept_off(control) == (1 << control.n_vcpus) - 1


def rest_s(control):
    """
    How long it must be calm before the present level is given back [s].

    :param control: a control row (`env.control`)
    """
    rest = REST * control.guard_back_off
    if control.guard_level > harmless(control):
        rest = min(rest, LONGEST_REST)
    return rest * control.interval_s


def harmless(control):
    """
    The level that keeps no job from running, so that it may stand while jobs are not blamed.

    That is `REFUGE`, but where the refuge is the whole machine and not shared: jobs would wait as
    long as it stood.

    :param control: a control row (`env.control`)
    """
    whole = control.refuge == (1 << control.n_vcpus) - 1
    return 0 if whole and control.share_service_cores == 0 else REFUGE


def last_trouble_s(control):
    """
    When the calm time began: after the last poll at which the budget burned, or the last step.

    :param control: a control row (`env.control`)
    """
    moved_s = max(control.guard_acted_s, control.guard_lowered_s)
    return max(moved_s, control.guard_hot_s)


def kept_already(control):
    """
    Whether what the level asks for holds without it.

    :param control: a control row (`env.control`)
    """
    if least_service(control) & ~control.service != 0:
        return False
    for job in range(len(control.state)):
        if control.state[job] == RUNNING and (
            control.guard_level == PAUSED_ALL or control.cores[job] & kept_off(control) != 0
        ):
            return False
    return True


def least_service(control):
    """
    The vCPUs that the level has memcached hold at least, a bit mask; 0 if any will do.

    :param control: a control row (`env.control`)
    """
    if control.guard_level >= APART:
        return control.overflow
    return control.refuge if control.guard_level >= REFUGE else 0


def kept_off(control):
    """
    The vCPUs that the level keeps every job off, a bit mask.

    The refuge's siblings are among them, those of what memcached overflows to are not: on four
    vCPUs nothing would be left.

    :param control: a control row (`env.control`)
    """
    if control.guard_level < ALONE:
        return 0
    cores = control.service
    if control.guard_level >= APART:
        for vcpu in range(control.n_vcpus):
            if (control.refuge >> vcpu) & 1 and control.sibling[vcpu] >= 0:
                cores |= 1 << control.sibling[vcpu]
    return cores
