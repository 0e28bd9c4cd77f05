"""
What real machines do now and then: clients that stall and catch up, and vCPUs that are stolen.

In a *stall* the clients send nothing; at its end they send what they missed as fast as memcached
takes it. Nobody waits for an answer meanwhile, so no request is late for the stall itself: a probe
beside them sees the queueing of the burst only. In a *steal* the host takes all vCPUs away: neither
requests nor jobs get on, and what is due waits until its end. Both begin at random (Poisson) and
last exponentially long, one at a time. Every function takes a host row `h` (`env.simulator.host`).
"""

import math

from env.codes import STALL, STEAL
from env.physics.backlog import served_qps
from env.physics.compiled import compiled
from env.physics.parameters import STALL_S, STALLS_PER_S, STEAL_S, STEALS_PER_S
from env.simulator.random import uniform
from env.simulator.rates import count_requests


@compiled
def plan_hiccup(h):
    """
    Draw when the next hiccup begins; where there are none, nothing is drawn.

    :param h: host row
    """
    h.hiccup = 0
    h.hiccup_turns_s = math.inf
    per_s = h.host_params[STALLS_PER_S] + h.host_params[STEALS_PER_S]
    if per_s > 0.0:
        h.hiccup_turns_s = h.now_s - math.log(uniform(h)) / per_s


@compiled
def turn_hiccup(h):
    """
    A hiccup begins or ends; whoever calls this refreshes the rates.

    :param h: host row
    """
    note_rates(h, served_qps(h.backlog, h.load_qps, h.capacity_qps))
    if h.hiccup == 0:
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
    stalls = uniform(h) * (host[STALLS_PER_S] + host[STEALS_PER_S]) < host[STALLS_PER_S]
    h.hiccup = STALL if stalls else STEAL
    h.hiccup_s = -math.log(uniform(h)) * (host[STALL_S] if stalls else host[STEAL_S])
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
