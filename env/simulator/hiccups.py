"""
What real machines do now and then: clients that stall and catch up, and vCPUs that are stolen.

In a *stall* the clients send nothing; at its end they send what they missed as fast as memcached
takes it. Nobody waits for an answer meanwhile, so no request is late for the stall itself: a probe
beside them sees the queueing of the burst only. In a *steal* the host takes all vCPUs away: neither
requests nor jobs get on, and what is due waits until its end. Both begin at random (Poisson) and
last exponentially long, one at a time. On a host that is shared with others there are also *spells*
of many seconds in which steals come so often that a good part of the time is stolen. Every function
takes a host row `h` (`env.simulator.host`).
"""

import math

from env.codes import STALL, STEAL
from env.physics.backlog import served_qps
from env.physics.compiled import compiled
from env.physics.parameters import STALL_S, STALLS_PER_S, STEAL_S, STEALS_PER_S
from env.simulator.random import uniform
from env.simulator.rates import SOON_S, count_requests

SPELL_SHARES = (0.05, 0.4)
"""The part of the time that is stolen in a spell, by episode: the least and the most."""

# Seen on a shared VM of 2 vCPUs on 2026-11-23: 2 to 46 % of the time stolen for a minute or two,
# runs of the same length without; mean lengths of a spell, of what lies between two, and of a
# steal in one.
SPELL_S, BETWEEN_SPELLS_S, SPELL_STEAL_S = 30.0, 60.0, 0.02


@compiled
def plan_hiccup(h):
    """
    Draw when the next hiccup begins, or a spell turns; where there are none, nothing is drawn.

    :param h: host row
    """
    h.hiccup = 0
    h.hiccup_turns_s = max(h.spell_turns_s, h.now_s)
    per_s = h.host_params[STALLS_PER_S] + _steals_per_s(h)
    if per_s > 0.0:
        h.hiccup_turns_s = min(h.hiccup_turns_s, h.now_s - math.log(uniform(h)) / per_s)


@compiled
def _steals_per_s(h):
    """How often steals begin now [1/s]."""
    return h.spell_steals_per_s if h.in_spell else h.host_params[STEALS_PER_S]


@compiled
def begin_with_spells(h, share):
    """
    Let spells come and go, from the beginning of an episode on.

    :param h: host row
    :param share: of the time that is stolen in one, 0 to less than 1
    """
    h.spell_steals_per_s = share / ((1.0 - share) * SPELL_STEAL_S)
    h.in_spell = 1 if uniform(h) * (SPELL_S + BETWEEN_SPELLS_S) < SPELL_S else 0
    _plan_spell(h)


@compiled
def _plan_spell(h):
    """Draw when the spell under way ends, or the next one begins."""
    mean_s = SPELL_S if h.in_spell else BETWEEN_SPELLS_S
    h.spell_turns_s = h.now_s - mean_s * math.log(uniform(h))


@compiled
def turn_hiccup(h):
    """
    A hiccup begins or ends; whoever calls this refreshes the rates.

    :param h: host row
    """
    note_rates(h, served_qps(h.backlog, h.load_qps, h.capacity_qps))
    if h.hiccup == 0 and h.spell_turns_s <= h.now_s + SOON_S:
        h.in_spell = 1 - h.in_spell
        _plan_spell(h)
        plan_hiccup(h)
    elif h.hiccup == 0:
        _begin(h)
    else:
        _take_in_what_was_due(h)
        h.load_qps = h.due_qps
        h.backlog += h.held
        h.held = 0.0
        plan_hiccup(h)


@compiled
def _begin(h):
    """A stall or a steal begins, in proportion to how often each happens."""
    host = h.host_params
    stalls = uniform(h) * (host[STALLS_PER_S] + _steals_per_s(h)) < host[STALLS_PER_S]
    h.hiccup = STALL if stalls else STEAL
    steal_s = SPELL_STEAL_S if h.in_spell else host[STEAL_S]
    h.hiccup_s = -math.log(uniform(h)) * (host[STALL_S] if stalls else steal_s)
    h.hiccup_turns_s = h.now_s + h.hiccup_s
    h.due_since_s = h.now_s
    if stalls:  # the clients do not send what they are behind either
        h.held = h.backlog
        h.backlog = 0.0
        h.load_qps = 0.0


@compiled
def offer(h, qps):
    """
    The load moves; clients that stall will send it when they go on.

    :param h: host row
    :param qps: what is due from now on [requests/s]
    """
    if h.hiccup:
        _take_in_what_was_due(h)
    h.due_qps = qps
    if h.hiccup != STALL:
        h.load_qps = qps


@compiled
def _take_in_what_was_due(h):
    """Requests that came due in the hiccup so far are held, or counted as waiting for its end."""
    due = h.due_qps * (h.now_s - h.due_since_s)
    h.due_since_s = h.now_s
    if h.hiccup == STALL:
        h.held += due
    else:
        count_requests(h, due)
        h.counted += due


@compiled
def note_rates(h, served):
    """
    Remember what was served until now, and at which cost: a sensor's window may reach back there.

    :param h: host row, with the rates that held until now
    :param served: rate at which requests were served [1/s]
    """
    for turn in range(h.turned_s.shape[0] - 1, 0, -1):
        h.turned_s[turn] = h.turned_s[turn - 1]
        h.turned_qps[turn] = h.turned_qps[turn - 1]
        h.turned_cpu[turn] = h.turned_cpu[turn - 1]
    h.turned_s[0] = h.now_s
    h.turned_qps[0] = served
    h.turned_cpu[0] = h.service_cpu
