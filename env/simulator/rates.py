"""
What holds on a host until the next event: how fast everything goes, and what that adds up to.

`refresh` works out the rates, `next_event` says how long they hold, and `elapse` lets time pass at
them. Every function takes a host row `h` (`env.simulator.host`).
"""

import math

from env.codes import NORMAL, PAUSED, RUNNING, STEAL
from env.physics.backlog import backlog_after, served_qps, time_to_drain
from env.physics.compiled import compiled, inlined
from env.physics.jobs import job_speeds
from env.physics.parameters import (
    AGENT_CPU,
    CLIENT_CPU,
    CLIENT_EXPONENT,
    SERVICE_EXPONENT,
)
from env.physics.service import (
    CORE_CAPACITY_QPS,
    LN_19,
    VM_SPEED,
    relative_cost,
    service_capacity,
    service_occupancy,
    service_state,
    service_stretch,
    tail_fraction,
)
from env.physics.steady_service import CLIENT_MOST
from env.simulator.guarding import (
    CALM_WAIT,
    CONTENDED_WAIT,
    PROBES_PER_S,
    account,
    crowding,
    next_guard_s,
)

SOON_S = 1e-9
"""Events this close to now are due."""

_QUIET_S = 1e-3  # before an event that is due: far more than rounding can move it


@compiled
def refresh(h):
    """
    Bring latency, shares and speeds up to date with the load and the allocation in force.

    :param h: host row
    """
    account(h)
    _place_batch(h)
    _ask_for_service(h)
    pressure = job_speeds(
        h.running, h.threads, h.true_cores, h.true_weight, h.true_quota, h.batch_sibling,
        h.occupancy, h.job_params, h.host_params, h.speed, h.used, h.busy, h.client,
    )  # fmt: skip
    _weigh_batch(h)
    _fill_vcpus(h)
    _answer(h, pressure)
    if h.hiccup == STEAL:
        _take_vcpus_away(h)
    h.rate_qps = served_qps(h.backlog, h.load_qps, h.capacity_qps)
    h.guard_at_s = next_guard_s(h)
    # With a backlog, or one that begins, rates change at no time that can be told from afar.
    keeps_up = h.backlog == 0.0 and h.load_qps <= h.capacity_qps
    h.quiet_until_s = next_event(h) - _QUIET_S if keeps_up else h.now_s


@inlined
def _place_batch(h):
    """Which jobs run, and the most that batch work may use of each vCPU."""
    n_jobs, n_vcpus = h.used.shape
    for vcpu in range(n_vcpus):
        h.background[vcpu] = 0.0
        h.equal[vcpu] = 0.0
    for job in range(n_jobs):
        h.running[job] = 1 if h.true_state[job] == RUNNING else 0
        if h.running[job]:
            batch = h.equal if h.true_weight[job] == NORMAL else h.background
            most = min(1.0, h.true_quota[job])
            for vcpu in range(n_vcpus):
                if (h.true_cores[job] >> vcpu) & 1:
                    batch[vcpu] = max(batch[vcpu], most)


@inlined
def _ask_for_service(h):
    """
    What memcached asks for of each vCPU.

    Batch work is taken to use all that it may: how the vCPUs that memcached shares with it or has
    for siblings are really used follows from what memcached asks for.
    """
    n_vcpus = h.occupancy.shape[0]
    h.client[h.client_vcpu] = _client_share(h)
    asked = service_occupancy(
        math.inf if h.backlog > 0.0 else h.load_qps, h.service_threads, h.true_service, h.sibling,
        h.background, h.equal, h.client, h.service_params, h.cost_params[SERVICE_EXPONENT],
    )  # fmt: skip
    for vcpu in range(n_vcpus):
        held = (h.true_service >> vcpu) & 1
        h.occupancy[vcpu] = held * (1.0 - h.client[vcpu]) * asked


@inlined
def _weigh_batch(h):
    """What batch work of either weight really uses of each vCPU."""
    n_jobs, n_vcpus = h.used.shape
    for vcpu in range(n_vcpus):
        h.background[vcpu] = 0.0
        h.equal[vcpu] = 0.0
    for job in range(n_jobs):
        if h.running[job]:
            batch = h.equal if h.true_weight[job] == NORMAL else h.background
            for vcpu in range(n_vcpus):
                batch[vcpu] += h.used[job, vcpu]


@inlined
def _fill_vcpus(h):
    """
    How busy each vCPU is, and how long memcached waits for one.

    What memcached asks for of vCPUs that are full, it does on others of its own that are not.
    """
    n_vcpus = h.busy.shape[0]
    h.wait = CALM_WAIT
    held, busiest = 0, 0.0
    moved = 0.0
    for vcpu in range(n_vcpus):
        taken = h.occupancy[vcpu] + h.background[vcpu] + h.equal[vcpu] + h.client[vcpu]
        h.busy[vcpu] = min(1.0, taken)
        moved += taken - h.busy[vcpu]
        held += (h.true_service >> vcpu) & 1
        busiest = max(busiest, h.occupancy[vcpu])
        if h.occupancy[vcpu] > 0.0 and h.equal[vcpu] > 0.0:
            h.wait = CONTENDED_WAIT
    h.wait += crowding(busiest, h.service_threads / max(held, 1))
    for vcpu in range(n_vcpus):
        if h.occupancy[vcpu] > 0.0:
            more = min(moved, 1.0 - h.busy[vcpu])
            h.busy[vcpu] += more
            moved -= more


@inlined
def _answer(h, pressure):
    """Latency, capacity and CPU use of memcached beside what batch work really uses."""
    offered = h.load_qps
    if h.backlog > 0.0:
        offered = service_capacity(
            h.service_threads, h.true_service, h.sibling, h.background, h.equal, h.client,
            h.service_params,
        )  # fmt: skip
    h.p95_us, h.capacity_qps, h.service_cpu, h.tail_shape = service_state(
        offered, h.service_threads, h.true_service, h.sibling, h.background, h.equal, h.client,
        pressure, h.service_params, h.cost_params[SERVICE_EXPONENT],
    )  # fmt: skip
    h.slow_fraction = tail_fraction(h.slo_us, h.p95_us, h.tail_shape)
    if h.probe_window_s > 0.0:
        h.stretch = service_stretch(
            h.true_service, h.sibling, h.background, h.equal, pressure, h.service_params
        )


@compiled
def _take_vcpus_away(h):
    """
    Nothing gets on until the steal is over.

    Requests that come due meanwhile wait between its length and nothing, all waits as likely. A
    log-logistic tail with the 95th percentile of that and its share over the SLO stands for it.
    """
    n_jobs, n_vcpus = h.used.shape
    for vcpu in range(n_vcpus):
        h.occupancy[vcpu] = h.background[vcpu] = h.equal[vcpu] = h.busy[vcpu] = 0.0
        for job in range(n_jobs):
            h.used[job, vcpu] = 0.0
    for job in range(n_jobs):
        h.speed[job] = 0.0
    h.capacity_qps = h.service_cpu = 0.0
    longest_us = 1e6 * h.hiccup_s
    if 0.95 * longest_us > h.p95_us:  # else it does not show
        in_time = min(h.slo_us / longest_us, 0.94)
        h.p95_us = 0.95 * longest_us
        h.tail_shape = (LN_19 - math.log(in_time / (1.0 - in_time))) / math.log(0.95 / in_time)
        h.slow_fraction = tail_fraction(h.slo_us, h.p95_us, h.tail_shape)


@compiled
def _client_share(h):
    """What load generator, loop and probe take of their vCPU at the present load."""
    most = h.cost_params[CLIENT_CPU]
    if most == 0.0:
        return 0.0
    full = h.service_params[CORE_CAPACITY_QPS] * h.service_params[VM_SPEED]
    part = h.load_qps / full
    used = most * part * relative_cost(part, h.cost_params[CLIENT_EXPONENT])
    return min(h.cost_params[AGENT_CPU] + used, CLIENT_MOST)


@inlined
def next_event(h):
    """
    Time of whatever changes a rate first, the policy aside.

    :param h: host row
    """
    first = min(
        h.interval_ends_s, h.service_lands_s, h.hiccup_turns_s, h.guard_at_s, h.next_arrival_s
    )
    for job in range(h.lands_s.shape[0]):
        first = min(first, h.lands_s[job], h.move_lands_s[job])
        if h.true_state[job] == RUNNING and h.speed[job] > 0.0:
            left = h.overhead_left_s[job] + h.work_left_s[job] / h.speed[job]
            first = min(first, h.now_s + left)
    return min(first, h.now_s + time_to_drain(h.backlog, h.load_qps, h.capacity_qps))


@inlined
def elapse(h, step_s):
    """
    Let time pass at the present rates.

    :param h: host row
    :param step_s: time that passes [s]
    """
    rate = served_qps(h.backlog, h.load_qps, h.capacity_qps)
    known = min(h.counted, rate * step_s)
    h.counted -= known
    if h.hiccup == 0:
        count_requests(h, rate * step_s - known)
    if h.probe_window_s > 0.0:
        probe(h, step_s)
    h.backlog = backlog_after(h.backlog, h.load_qps, h.capacity_qps, step_s)
    h.over_slo_s += h.slow_fraction * step_s
    h.requests += rate * step_s
    h.service_cpu_s += h.service_cpu * step_s
    h.service_wait_s += h.service_cpu * step_s * h.wait
    for vcpu in range(h.busy.shape[0]):
        h.vcpu_busy_s[vcpu] += h.busy[vcpu] * step_s
    # Without branches: which jobs run is another question on every host, and who does not run has
    # no speed and uses nothing.
    for job in range(h.work_left_s.shape[0]):
        state = h.true_state[job]
        cpu_s = h.job_cpu_s[job]
        for vcpu in range(h.busy.shape[0]):
            cpu_s += h.used[job, vcpu] * step_s
        h.job_cpu_s[job] = cpu_s
        launching = min(step_s if state == RUNNING else 0.0, h.overhead_left_s[job])
        h.overhead_left_s[job] -= launching
        h.work_left_s[job] -= h.speed[job] * (step_s - launching)
        h.paused_s[job] += step_s if state == PAUSED else 0.0
    h.now_s += step_s


@inlined
def count_requests(h, count):
    """
    Add requests served at the present latency to the interval under way.

    :param h: host row
    :param count: number of requests, not necessarily whole
    """
    h.sent_requests += count
    h.slow_requests += count * h.slow_fraction
    at = h.mixing
    h.mix_count[at] = mix(
        h.mix_weight[at], h.mix_p95[at], h.mix_shape[at], h.mix_count[at], h.p95_us, h.tail_shape,
        count,
    )  # fmt: skip


@inlined
def mix(weights, p95s, shapes, levels, p95_us, shape, count):
    """
    Add requests of one latency to a mixture.

    :param weights: float64[L], requests of each level
    :param p95s: float64[L], their p95 [us]
    :param shapes: float64[L], the shapes of their tails
    :param levels: how many of the L levels are in use
    :param p95_us: p95 of the new requests [us]; where no level is free they join the nearest
    :param shape: the shape of their tail
    :param count: how many there are
    :return: how many levels are in use now
    """
    if levels > 0 and p95s[levels - 1] == p95_us:  # still as it was
        weights[levels - 1] += count
        return levels
    nearest, distance = -1, math.inf
    for level in range(levels):
        apart = abs(p95s[level] - p95_us)
        if apart < distance:
            nearest, distance = level, apart
    if distance > 0.0 and levels < p95s.shape[0]:
        nearest = levels
        p95s[nearest] = p95_us
        shapes[nearest] = shape
        weights[nearest] = 0.0
        levels += 1
    weights[nearest] += count
    return levels


@compiled
def probe(h, step_s):
    """
    Let the latency probe and the CPU's event counters run on at the present rates.

    :param h: host row
    :param step_s: time that passes [s]
    """
    probes = PROBES_PER_S * step_s
    h.probe_count = mix(
        h.probe_weight, h.probe_p95, h.probe_shape, h.probe_count, h.p95_us, h.tail_shape, probes
    )
    h.probe_cpu_s += h.service_cpu * step_s
    h.probe_stretched_s += h.service_cpu * h.stretch * step_s
