"""
What happened between decisions, for the regulator and the SLO guard, and when that one acts.

Rates are constant between two events, so a whole stretch is taken in at once, and the first poll at
which the guard (`env.guard`) may have to act is known beforehand: calm time costs nothing. Every
function takes a host row `h` (`env.simulator.host`).
"""

import math

from env import guard, regulator
from env.codes import RUNNING, STEAL
from env.physics.compiled import callable_from_kernel, compiled
from env.simulator.random import two_noises

callable_from_kernel(
    guard.late_by_delay,
    guard.note_stolen,
    guard.note_late,
    guard.budget,
    guard.burns_on,
    guard.step_guard,
    guard.still_runs,
    guard.must_climb,
    guard.climb,
    guard.act,
    guard.leaves_nothing,
    guard.may_come_down,
    guard.come_down,
    guard.rest_s,
    guard.harmless,
    guard.last_trouble_s,
    guard.kept_already,
    guard.least_service,
    guard.kept_off,
    regulator.note_use,
    regulator.was_busier,
)

# Run-queue delay per CPU second (measured on a 2-core VM): memcached alone or with background work,
# and with work of equal weight on its vCPUs. Where threads share a vCPU, `crowding` is added.
CALM_WAIT, CONTENDED_WAIT = 0.5, 2.4

PROBES_PER_S = 1000.0
"""What a latency probe sends, as that of `deploy/load/probe.py` does."""

_SOON_S = 1e-9


@compiled
def crowding(busy, threads_each):
    """
    How long threads that share a vCPU wait for one another.

    Threads that are runnable with one probability p, each by itself, keep the vCPU busy for
    1 - (1 - p)^n of the time; what they are runnable beyond that they wait.

    :param busy: the part of the vCPU's time that they use, 0 to 1
    :param threads_each: n, threads of the service for each of its vCPUs
    :return: [s a CPU second]; 0 where each has a vCPU
    """
    if threads_each <= 1.0 or busy <= 0.0:
        return 0.0
    runnable = 1.0 - (1.0 - min(busy, 1.0)) ** (1.0 / threads_each)
    return threads_each * runnable / busy - 1.0


@compiled
def account(h):
    """
    Take in what has happened since the last call, at the rates that held; none may have changed.

    :param h: host row
    """
    span_s = h.now_s - h.accounted_s
    h.accounted_s = h.now_s
    if h.guarded and span_s > 0.0:
        regulator.note_use(h, h.rate_qps, h.service_cpu, span_s)
        guard.note_stolen(h, 1.0 if h.hiccup == STEAL else 0.0, span_s)
        guard.note_late(h, seen_late(h), span_s)


@compiled
def seen_late(h):
    """
    The share of late requests that the guard can know of: the probe's, or a guess without one.

    :param h: host row
    """
    return h.slow_fraction if h.probe_runs else guard.late_by_delay(h.wait, CALM_WAIT)


@compiled
def guard_changes_level(h):
    """
    A poll of the guard; what it sees scatters as the few requests of a probe do.

    :param h: host row
    """
    span_s = min(h.now_s - h.accounted_s, guard.LATELY_S)
    account(h)
    if h.probe_runs and span_s > 0.0:
        noise, _ = two_noises(h)
        late = h.slow_fraction
        weight = -math.expm1(-span_s / guard.LATELY_S)
        spread = weight * math.sqrt(late * (1.0 - late) / (PROBES_PER_S * span_s))
        h.late_lately = max(0.0, h.late_lately + spread * noise)
        h.blamed_lately = max(0.0, h.blamed_lately + spread * noise)
    return guard.step_guard(h)


@compiled
def next_guard_s(h):
    """
    The first poll at which the guard may change its level if all rates stay as they are.

    What it sees scatters at that poll and not before: where the budget burns at little more than
    its limit, a real guard, which sees every poll's scatter, acts somewhat sooner.

    :param h: host row
    """
    if h.guarded == 0:
        return math.inf
    late, level, limit = seen_late(h), h.guard_level, guard.LATE_LIMIT
    harmless = guard.harmless(h)
    burns = late > limit or h.late_lately > limit
    at_s = h.now_s
    if level == 0 and late > limit:
        climbs_s = _climbs_s(h, late, guard.SPENT, guard.SLOW)
        if late > guard.FAST * limit:
            climbs_s = min(climbs_s, _climbs_s(h, late, guard.GONE_A_LEVEL, guard.FAST))
        at_s += climbs_s
        if harmless == 0:
            at_s = max(at_s, h.guard_acquitted_s)
    elif level > 0 and h.now_s < h.guard_acquitted_s and (late > limit or level > harmless):
        at_s = h.guard_acquitted_s
        if level > harmless:
            at_s = min(at_s, h.guard_lowered_s + guard.REST * h.interval_s)
    elif level == guard.PAUSED_ALL and late > limit and h.hiccup != STEAL:
        if not _runs(h):  # else the trial has not begun
            at_s = h.guard_acted_s + guard.TRIAL * h.interval_s
    elif not burns:
        if level == 0:
            return math.inf
        at_s = guard.last_trouble_s(h) + guard.rest_s(h)
    polls = math.ceil((max(at_s, h.now_s + _SOON_S) - h.decided_at_s) / h.period_s - 1e-6)
    poll_s = h.decided_at_s + polls * h.period_s
    return poll_s if poll_s > h.now_s + _SOON_S else poll_s + h.period_s


@compiled
def _runs(h):
    """Whether any job runs."""
    for job in range(h.true_state.shape[0]):
        if h.true_state[job] == RUNNING:
            return True
    return False


@compiled
def _climbs_s(h, late, gone, burn):
    """How long it takes until a part of the budget is gone and what is left is seen to burn [s]."""
    limit = guard.LATE_LIMIT
    return max(
        _reaches_s(h.late_share, late, gone * limit, guard.WINDOW * h.interval_s),
        _reaches_s(h.late_lately, late, burn * limit, guard.LATELY_S),
    )


@compiled
def _reaches_s(share, late, threshold, window_s):
    """How long a fading share takes to reach a threshold below the share that it tends to [s]."""
    if share >= threshold:
        return 0.0
    return window_s * math.log((late - share) / (late - threshold))
