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
| `APART` | and none runs on their siblings |
| `PAUSED_ALL` | no job runs |

A level that changes nothing is passed at once. After a calm time the guard comes down a level; that
time grows where it had to climb again soon, and shrinks again where it had not. Where not even
`PAUSED_ALL` helps, jobs are not the cause: the guard gives them back and does not blame them for a
while, so that a machine whose load alone breaks the SLO still finishes its jobs.

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
    "no job runs on memcached's vCPUs or their siblings",
    "no job runs",
)
"""What holds at each level, 0 first, in the words of the records."""

LATE_LIMIT = 0.05
"""The budget: this share of the requests of an interval may be later than the SLO."""

LATELY_S = 0.1  # what `late_lately` covers: four polls, so that one late poll shows and then fades
WINDOW = 0.5  # what `late_share` covers, as a share of an interval; a fading share weighs twice

# To climb to a level, the budget burns at more than FAST and a share of it that grows with the
# level is gone: after 50 ms in which every request was late of an interval of 10 s the first one,
# after 0.2 s all four. Or it burns slowly and is nearly gone.
FAST, GONE_A_LEVEL = 2.0, 0.2
SLOW, NEARLY_GONE = 1.0, 0.9

SETTLE_POLLS = 3  # a step that changed something has so many polls to act
REST = 0.1  # of an interval must be calm before a level is given back, times the back-off
TRIAL = 0.25  # of an interval for the last level to help
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


def note_late(control, share, span_s):
    """
    Take in what share of the requests of a stretch of time was late.

    :param control: a control row (`env.control`)
    :param share: late part of the requests that were due in it, 0 to 1
    :param span_s: its length, which ends now [s]
    """
    window_s = WINDOW * control.interval_s
    control.late_lately += (share - control.late_lately) * -math.expm1(-span_s / LATELY_S)
    control.late_share += (share - control.late_share) * -math.expm1(-span_s / window_s)
    if control.guard_level > 0:
        control.guard_s += span_s


def step_guard(control):
    """
    Climb or come down, if it is time to; to be called at every poll.

    :param control: a control row (`env.control`)
    :return: whether the level has changed, so that the regulator must look again
    """
    before = control.guard_level
    burning = control.late_lately > SLOW * LATE_LIMIT
    if burning:
        control.guard_hot_s = control.now_s
    while must_climb(control):
        climb(control)
    if control.guard_level == before and before > 0:
        rest_s = min(REST * control.guard_back_off, 1.0) * control.interval_s
        if before == PAUSED_ALL and burning:
            if control.now_s - control.guard_acted_s >= TRIAL * control.interval_s:
                acquit(control)
        elif control.now_s - last_trouble_s(control) >= rest_s:
            control.guard_level -= 1
            control.guard_lowered_s = control.now_s
    return control.guard_level != before


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
    gone, burn = control.late_share / LATE_LIMIT, control.late_lately / LATE_LIMIT
    return (burn > FAST and gone >= GONE_A_LEVEL * (level + 1)) or (
        burn > SLOW and gone >= NEARLY_GONE
    )


def climb(control):
    """
    One level up; a step that changes something is judged by what comes after it.

    :param control: a control row (`env.control`)
    """
    if control.guard_lowered_s > control.guard_acted_s:
        # A climb right after coming down doubles the back-off, one that comes after the back-off's
        # own length leaves it, and every further such length halves it.
        again_s = control.guard_back_off * control.interval_s
        factor = 2.0 ** (1.0 - (control.now_s - control.guard_lowered_s) / again_s)
        control.guard_back_off = min(max(control.guard_back_off * factor, 1.0), MOST_BACK_OFF)
        control.guard_lowered_s = control.guard_acted_s
    control.guard_level += 1
    control.guard_steps += 1
    if not kept_already(control):
        control.guard_acted_s = control.now_s
        control.late_lately = 0.0


def acquit(control):
    """
    Pausing all jobs has not helped: give them back, and do not blame them for a while.

    :param control: a control row (`env.control`)
    """
    control.guard_acquitted_s = control.now_s + control.guard_back_off * control.interval_s
    control.guard_back_off = min(2.0 * control.guard_back_off, MOST_BACK_OFF)
    control.guard_level = harmless(control)
    control.guard_lowered_s = control.now_s


def harmless(control):
    """
    The level that keeps no job from running, so that it may stand while jobs are not blamed.

    That is `REFUGE`, but where the refuge is the whole machine: jobs that share nothing would wait
    as long as it stood.

    :param control: a control row (`env.control`)
    """
    return 0 if control.refuge == (1 << control.n_vcpus) - 1 else REFUGE


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
    if control.refuge & ~control.service != 0:
        return False
    for job in range(len(control.state)):
        if control.state[job] == RUNNING and (
            control.guard_level == PAUSED_ALL or control.cores[job] & kept_off(control) != 0
        ):
            return False
    return True


def kept_off(control):
    """
    The vCPUs that the level keeps every job off, a bit mask.

    :param control: a control row (`env.control`)
    """
    if control.guard_level < ALONE:
        return 0
    cores = control.service
    if control.guard_level >= APART:
        for vcpu in range(control.n_vcpus):
            if (control.service >> vcpu) & 1 and control.sibling[vcpu] >= 0:
                cores |= 1 << control.sibling[vcpu]
    return cores
