"""
How a regulated allocation comes into force: what is sent to the actuator, and when it lands.

Memcached's vCPUs are written directly. Containers are made before the first decision, as the live
loop makes them, or once their job has arrived, and wait at a gate that a start opens, unless the
scenario has them started when that is decided. They are paused and resumed by calls to Docker, one
after another. Every function takes a host row `h` (`env.simulator.host`).
"""

import math

from env.codes import DONE, PAUSED, PENDING, RUNNING
from env.physics.compiled import compiled, inlined
from env.physics.parameters import (
    API_LATENCY_MEDIAN_S,
    API_LATENCY_P90_S,
    API_LATENCY_P99_S,
    CONTAINER_START_S,
    FAST_LATENCY_S,
    GATE_LATENCY_S,
    LAUNCH_OVERHEAD_S,
    MIGRATION_COST_S,
    RESUME_COST_S,
)
from env.simulator.random import api_latency

# --- sent -------------------------------------------------------------------------------------


@compiled
def send(h):
    """
    Send the regulated allocation to the actuator: only what differs from what was sent before.

    Calls to Docker are done one after another. A job has one change of its state under way at a
    time, and one of its place.

    :param h: host row
    """
    h.quiet_until_s = h.now_s
    if h.service != h.sent_service:
        h.sent_service = h.service
        h.service_lands_s = h.now_s + h.host_params[FAST_LATENCY_S]
        h.actuations += 1
    for job in range(h.state.shape[0]):
        _send_state(h, job)
        _send_move(h, job)


@compiled
def _send_state(h, job):
    """Start a job, or have Docker pause or resume it, unless that is still under way."""
    before, after = h.sent_state[job], h.state[job]
    if after == before or after == PENDING or after == DONE or h.lands_s[job] < math.inf:
        return
    h.actuations += 1
    if before != PENDING and after == PAUSED:
        h.pauses[job] += 1
    if before == PENDING and h.starts_ahead:
        h.lands_s[job] = max(h.now_s, h.ready_s[job]) + h.host_params[GATE_LATENCY_S]
    else:
        _call_docker(h, h.host_params[CONTAINER_START_S] if before == PENDING else 0.0)
        h.lands_s[job] = h.api_free_s
    h.sent_state[job] = after
    if before == PENDING:
        _send_place(h, job)


@compiled
def _send_move(h, job):
    """
    Have a job's vCPUs, weight and quota changed, unless they are just being changed.

    They are written directly unless `h.docker_moves`; then the container must be there first.
    """
    there = h.true_state if h.docker_moves else h.sent_state
    if there[job] == PENDING or h.state[job] == DONE or h.move_lands_s[job] < math.inf:
        return
    moved, weighed = h.cores[job] != h.sent_cores[job], h.weight[job] != h.sent_weight[job]
    limited = h.quota[job] != h.sent_quota[job]
    if not (moved or weighed or limited):
        return
    h.actuations += int(moved) + int(weighed) + int(limited)
    if h.docker_moves:
        _call_docker(h, 0.0)
        h.move_lands_s[job] = h.api_free_s
    else:
        h.move_lands_s[job] = h.now_s + h.host_params[FAST_LATENCY_S]
    _send_place(h, job)


@inlined
def _send_place(h, job):
    """Send a job's vCPUs, weight and quota."""
    h.sent_cores[job] = h.cores[job]
    h.sent_weight[job] = h.weight[job]
    h.sent_quota[job] = h.quota[job]


@compiled
def _call_docker(h, more_s):
    """One call to Docker, after those under way; `h.api_free_s` is when it has been done."""
    h.api_free_s = max(h.api_free_s, h.now_s) + (_docker_latency_s(h) + more_s)


@compiled
def _docker_latency_s(h):
    """Draw how long a call to Docker takes."""
    host = h.host_params
    return api_latency(
        h, host[API_LATENCY_MEDIAN_S], host[API_LATENCY_P90_S], host[API_LATENCY_P99_S]
    )


@compiled
def make_ahead(h):
    """
    Make the containers of jobs that arrived later, one after another; each then waits at its gate.

    Other calls do not wait for that: whoever makes containers ahead lets them go first. Those of
    jobs that were there at the start are made before the first decision.

    :param h: host row
    """
    ready_s = h.now_s
    for job in range(h.ready_s.shape[0]):
        ready_s = max(ready_s, h.ready_s[job])
    if h.starts_ahead:
        for job in range(h.ready_s.shape[0]):
            if h.true_state[job] != PENDING or h.arrival_s[job] <= 0.0 or h.ready_s[job] > 0.0:
                continue
            ready_s += _docker_latency_s(h) + h.host_params[CONTAINER_START_S]
            h.ready_s[job] = ready_s


# --- landed -----------------------------------------------------------------------------------


@compiled
def land_service(h):
    """
    Memcached's vCPUs change.

    :param h: host row
    """
    h.true_service = h.sent_service
    h.service_lands_s = math.inf


@compiled
def land_state(h, job):
    """
    Docker has started, paused or resumed a job; what was decided meanwhile is sent now.

    :param h: host row
    :param job: index of the job
    """
    h.lands_s[job] = math.inf
    take_state(h, job)
    _send_state(h, job)
    _send_move(h, job)


@compiled
def land_move(h, job):
    """
    A job's vCPUs, weight or quota change; what was decided meanwhile is sent now.

    A container that is still starting has none yet.

    :param h: host row
    :param job: index of the job
    """
    h.move_lands_s[job] = math.inf
    if h.true_state[job] == PENDING:
        return
    take_place(h, job)
    _send_move(h, job)


@inlined
def take_state(h, job):
    """
    A job is started, paused or resumed, as was sent.

    :param h: host row
    :param job: index of the job
    """
    was, now = h.true_state[job], h.sent_state[job]
    if was == PENDING:
        h.start_s[job] = h.now_s
        h.overhead_left_s[job] = h.job_params[job, LAUNCH_OVERHEAD_S]
        take_place(h, job)
    elif was == PAUSED and now == RUNNING:
        h.work_left_s[job] += h.host_params[RESUME_COST_S]
    h.true_state[job] = now


@inlined
def take_place(h, job):
    """
    A job has the vCPUs, weight and quota that were sent; other vCPUs cost work once it runs.

    :param h: host row
    :param job: index of the job
    """
    if h.true_state[job] != PENDING and h.true_cores[job] != h.sent_cores[job]:
        h.work_left_s[job] += h.host_params[MIGRATION_COST_S]
    h.true_cores[job] = h.sent_cores[job]
    h.true_weight[job] = h.sent_weight[job]
    h.true_quota[job] = h.sent_quota[job]
