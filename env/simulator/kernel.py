"""
One simulated host, one step at a time: the equations that join load, service, jobs and control.

Between two events (the load moves, an actuation lands, a job ends, a backlog is gone, the
policy decides) every rate is constant, so a host is advanced from event to event exactly, with
no time step to choose. Every function takes a host row `h` (`env.simulator.host`) and is plain
scalar Python; numba compiles it, and `function.py_func` is the same code uncompiled.

What is assumed where the measured runs say little: requests that the clients could not send in
time are sent later (a backlog that grows with load - capacity and drains with capacity - load,
memcached answering at its plateau meanwhile).
"""

import math

from env import action, observation, regulator, reward
from env.codes import DONE, NORMAL, PAUSED, PENDING, RUNNING, TERMINATED, TRUNCATED
from env.physics.backlog import backlog_after, served_qps, time_to_drain
from env.physics.compiled import callable_from_kernel, compiled, inlined
from env.physics.jobs import LAUNCH_OVERHEAD_S, job_speeds
from env.physics.service import (
    CORE_CAPACITY_QPS,
    VM_SPEED,
    mixture_p95,
    relative_cost,
    service_capacity,
    service_occupancy,
    service_state,
    service_stretch,
    tail_fraction,
)
from env.simulator.profile import COST_FIELDS, HOST_FIELDS
from env.simulator.random import api_latency, two_noises

callable_from_kernel(
    action.open_edits,
    action.something_runs,
    action.can_serve,
    action.is_legal,
    action.legal_edits,
    action.apply_edit,
    action.resolve_sets,
    observation.remember,
    observation.shift_history,
    observation.observe,
    regulator.overrule,
    regulator.regulate_service,
    regulator.regulate_jobs,
    regulator.hold_pause,
    regulator.place,
    regulator.pass_through,
    reward.time_term,
    reward.slo_term,
    reward.churn_term,
    reward.potential,
    reward.shaping_term,
)

API_MEDIAN_S = HOST_FIELDS.index("api_latency_median_s")
API_P90_S = HOST_FIELDS.index("api_latency_p90_s")
API_P99_S = HOST_FIELDS.index("api_latency_p99_s")
FAST_LATENCY_S = HOST_FIELDS.index("fast_latency_s")
CONTAINER_START_S = HOST_FIELDS.index("container_start_s")
MIGRATION_COST_S = HOST_FIELDS.index("migration_cost_s")
RESUME_COST_S = HOST_FIELDS.index("resume_cost_s")
SENSOR_NOISE = HOST_FIELDS.index("sensor_noise")
SERVICE_EXPONENT, CLIENT_CPU, CLIENT_EXPONENT = range(len(COST_FIELDS))

# Run-queue delay per CPU second (measured on a 2-core VM, facts of section 5): memcached alone or
# with background work, and with work of equal weight on its vCPUs.
CALM_WAIT, CONTENDED_WAIT = 0.5, 2.4

# A load generator leaves others this much of its vCPU at least: Linux keeps real-time processes
# to 0.95 of one (sched_rt_runtime_us).
CLIENT_MOST = 0.95

# An interval breaks the SLO when more than this fraction of its requests exceeds it.
SLOW_LIMIT = 0.05

PROBES_PER_S = 1000.0

SOON_S = 1e-9  # events this close to now are due
_QUIET_S = 1e-3  # before an event that is due: far more than rounding can move it


# --- rates: what holds until the next event ---------------------------------------------------


@compiled
def client_share(h):
    """What the load generator takes of the last vCPU at the present load."""
    most = h.cost_params[CLIENT_CPU]
    if most == 0.0:
        return 0.0
    full = h.service_params[CORE_CAPACITY_QPS] * h.service_params[VM_SPEED]
    part = h.load_qps / full
    return min(most * part * relative_cost(part, h.cost_params[CLIENT_EXPONENT]), CLIENT_MOST)


@compiled
def refresh(h):
    """Bring latency, shares and speeds up to date with the load and the allocation in force."""
    n_jobs, n_vcpus = h.used.shape
    # First what memcached asks for, taking every vCPU that batch work may use as busy: how the
    # vCPUs it shares or has for siblings are really used follows from that.
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
    h.client = client_share(h)
    asked = service_occupancy(
        math.inf if h.backlog > 0.0 else h.load_qps, h.service_threads, h.true_service, h.sibling,
        h.background, h.equal, h.service_params, h.client, h.cost_params[SERVICE_EXPONENT],
    )  # fmt: skip
    for vcpu in range(n_vcpus):
        held = (h.true_service >> vcpu) & 1
        own = 1.0 - h.client if vcpu == n_vcpus - 1 else 1.0
        h.occupancy[vcpu] = held * own * asked
    pressure = job_speeds(
        h.running, h.threads, h.true_cores, h.true_weight, h.true_quota, h.batch_sibling,
        h.occupancy, h.job_params, h.host_params, h.speed, h.used, h.busy, h.client,
    )  # fmt: skip
    for vcpu in range(n_vcpus):
        h.background[vcpu] = 0.0
        h.equal[vcpu] = 0.0
    for job in range(n_jobs):
        if h.running[job]:
            batch = h.equal if h.true_weight[job] == NORMAL else h.background
            for vcpu in range(n_vcpus):
                batch[vcpu] += h.used[job, vcpu]
    h.wait = CALM_WAIT
    moved = 0.0  # what memcached does elsewhere of what it asks for on vCPUs that are full
    for vcpu in range(n_vcpus):
        client = h.client if vcpu == n_vcpus - 1 else 0.0
        taken = h.occupancy[vcpu] + h.background[vcpu] + h.equal[vcpu] + client
        h.busy[vcpu] = min(1.0, taken)
        moved += taken - h.busy[vcpu]
        if h.occupancy[vcpu] > 0.0 and h.equal[vcpu] > 0.0:
            h.wait = CONTENDED_WAIT
    for vcpu in range(n_vcpus):
        if h.occupancy[vcpu] > 0.0:
            more = min(moved, 1.0 - h.busy[vcpu])
            h.busy[vcpu] += more
            moved -= more
    offered = h.load_qps
    if h.backlog > 0.0:
        offered = service_capacity(
            h.service_threads, h.true_service, h.sibling, h.background, h.equal, h.service_params,
            h.client,
        )  # fmt: skip
    h.p95_us, h.capacity_qps, h.service_cpu, h.tail_shape = service_state(
        offered, h.service_threads, h.true_service, h.sibling, h.background, h.equal, pressure,
        h.service_params, h.client, h.cost_params[SERVICE_EXPONENT],
    )  # fmt: skip
    h.slow_fraction = tail_fraction(h.slo_us, h.p95_us, h.tail_shape)
    if h.probe_window_s > 0.0:
        h.stretch = service_stretch(
            h.true_service, h.sibling, h.background, h.equal, pressure, h.service_params
        )
    # With a backlog, or one that begins, rates change at no time that can be told from afar.
    keeps_up = h.backlog == 0.0 and h.load_qps <= h.capacity_qps
    h.quiet_until_s = next_event(h) - _QUIET_S if keeps_up else h.now_s


@inlined
def next_event(h):
    """Time of whatever changes a rate first, the policy aside."""
    first = min(h.interval_ends_s, h.service_lands_s)
    for job in range(h.lands_s.shape[0]):
        first = min(first, h.lands_s[job], h.move_lands_s[job])
        if h.true_state[job] == RUNNING and h.speed[job] > 0.0:
            left = h.overhead_left_s[job] + h.work_left_s[job] / h.speed[job]
            first = min(first, h.now_s + left)
    return min(first, h.now_s + time_to_drain(h.backlog, h.load_qps, h.capacity_qps))


@inlined
def elapse(h, step_s):
    """Let time pass at the present rates."""
    rate = served_qps(h.backlog, h.load_qps, h.capacity_qps)
    count_requests(h, rate * step_s)
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
    """Add requests served at the present latency to the interval under way."""
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
    """Let the latency probe and the CPU's event counters run on at the present rates."""
    probes = PROBES_PER_S * step_s
    h.probe_count = mix(
        h.probe_weight, h.probe_p95, h.probe_shape, h.probe_count, h.p95_us, h.tail_shape, probes
    )
    h.probe_cpu_s += h.service_cpu * step_s
    h.probe_stretched_s += h.service_cpu * h.stretch * step_s


# --- events -----------------------------------------------------------------------------------


@compiled
def end_interval(h):
    """Close the measurement interval: it counts when it overlaps the batch window."""
    started = False
    for job in range(h.start_s.shape[0]):
        started |= h.start_s[job] <= h.interval_ends_s
    if started:
        h.intervals += 1
        if h.slow_requests > SLOW_LIMIT * h.sent_requests:
            h.violations += 1
            h.violated_s += h.interval_s
    h.sent_requests = 0.0
    h.slow_requests = 0.0
    h.mixing = 1 - h.mixing
    h.mix_count[h.mixing] = 0


@compiled
def interval_p95(h):
    """
    95th percentile of latency in the last interval that ended [us].

    Only recordings ask for it, so its requests are kept until the next interval has ended, too.
    """
    at = 1 - h.mixing
    return mixture_p95(h.mix_weight[at], h.mix_p95[at], h.mix_shape[at], h.mix_count[at])


@compiled
def begin_interval(h, targets):
    """Move the load to its next target; wake a sleeping policy if it can see the move."""
    h.interval += 1
    before = h.load_qps
    h.load_qps = targets[min(h.interval, targets.shape[0] - 1)]
    h.interval_ends_s += h.interval_s
    if abs(h.load_qps - before) > h.wake_qps:
        # The first poll whose whole window lies after the move.
        wake(h, h.now_s + h.period_s)


@compiled
def wake(h, earliest_s):
    """End a sleeping policy's step at the first poll that is not before `earliest_s`."""
    if h.wake_on_events:
        polls = math.ceil((earliest_s - h.decided_at_s) / h.period_s - 1e-6)
        poll_s = h.decided_at_s + polls * h.period_s
        h.until_s = min(h.until_s, poll_s)
        h.woken_s = min(h.woken_s, poll_s)


@compiled
def land_service(h):
    """Memcached's vCPUs change."""
    h.true_service = h.sent_service
    h.service_lands_s = math.inf


@inlined
def take_place(h, job):
    """A job has the vCPUs, weight and quota that were sent; other vCPUs cost work once it runs."""
    if h.true_state[job] != PENDING and h.true_cores[job] != h.sent_cores[job]:
        h.work_left_s[job] += h.host_params[MIGRATION_COST_S]
    h.true_cores[job] = h.sent_cores[job]
    h.true_weight[job] = h.sent_weight[job]
    h.true_quota[job] = h.sent_quota[job]


@inlined
def take_state(h, job):
    """A job is started, paused or resumed, as was sent."""
    was, now = h.true_state[job], h.sent_state[job]
    if was == PENDING:
        h.start_s[job] = h.now_s
        h.overhead_left_s[job] = h.job_params[job, LAUNCH_OVERHEAD_S]
        take_place(h, job)
    elif was == PAUSED and now == RUNNING:
        h.work_left_s[job] += h.host_params[RESUME_COST_S]
    h.true_state[job] = now


@compiled
def land_state(h, job):
    """Docker has started, paused or resumed a job; what was decided meanwhile is sent now."""
    h.lands_s[job] = math.inf
    take_state(h, job)
    send_state(h, job)
    send_move(h, job)


@compiled
def land_move(h, job):
    """
    A job's vCPUs, weight or quota change; what was decided meanwhile is sent now.

    A container that is still starting has none yet.
    """
    h.move_lands_s[job] = math.inf
    if h.true_state[job] == PENDING:
        return
    take_place(h, job)
    send_move(h, job)


@compiled
def finish_jobs(h):
    """Mark the jobs whose work is done; True if there are any. The next poll shows it."""
    any_done = False
    for job in range(h.work_left_s.shape[0]):
        if (
            h.true_state[job] == RUNNING
            and h.overhead_left_s[job] <= SOON_S
            and h.work_left_s[job] <= SOON_S * max(1.0, h.speed[job])
        ):
            h.true_state[job] = DONE
            h.work_left_s[job] = 0.0
            h.end_s[job] = h.now_s
            h.settled = 0
            h.lands_s[job] = math.inf
            h.move_lands_s[job] = math.inf
            wake(h, h.now_s)
            any_done = True
    return any_done


@compiled
def all_done(h):
    """Whether every job has ended."""
    for job in range(h.true_state.shape[0]):
        if h.true_state[job] != DONE:
            return False
    return True


@compiled
def advance(h, targets, until_s):
    """
    Run the host until `until_s`, until a sleeping policy is woken, or until all jobs are done.

    When all are done the interval under way is completed, so that its p95 counts whole, but the
    clock of the episode stops at the last job's end.
    """
    h.until_s = min(until_s, h.duration_s)
    while h.now_s < h.until_s - SOON_S:
        if h.until_s < h.quiet_until_s:  # most steps: nothing happens
            elapse(h, h.until_s - h.now_s)
            break
        behind = h.backlog > 0.0
        elapse(h, max(min(h.until_s, next_event(h)), h.now_s) - h.now_s)
        changed = behind != (h.backlog > 0.0)
        changed |= finish_jobs(h)
        if h.service_lands_s <= h.now_s + SOON_S:
            land_service(h)
            changed = True
        for job in range(h.lands_s.shape[0]):
            if h.lands_s[job] <= h.now_s + SOON_S:
                land_state(h, job)
                changed = True
            if h.move_lands_s[job] <= h.now_s + SOON_S:
                land_move(h, job)
                changed = True
        if h.interval_ends_s <= h.now_s + SOON_S:
            end_interval(h)
            begin_interval(h, targets)
            changed = True
        if changed:
            refresh(h)
        if all_done(h):
            complete_interval(h)
            return
    if h.now_s >= h.duration_s - SOON_S and h.sent_requests > 0.0:
        end_interval(h)  # cut short by the time cap; it counts as far as it came


@compiled
def complete_interval(h):
    """
    Serve the rest of the last interval without batch work.

    The schedule is over: beside what memcached holds, it gets back the refuge it began with.
    """
    ended_s = h.now_s
    h.true_service |= h.refuge
    refresh(h)
    while h.now_s < h.interval_ends_s - SOON_S:
        drained_s = time_to_drain(h.backlog, h.load_qps, h.capacity_qps)
        elapse(h, min(h.interval_ends_s - h.now_s, drained_s))
        refresh(h)
    end_interval(h)
    h.now_s = ended_s


# --- sensing and acting -----------------------------------------------------------------------


@inlined
def sense(h):
    """Read the sensors: load and CPU over the last polling window, job states."""
    rate = served_qps(h.backlog, h.load_qps, h.capacity_qps)
    # Requests arrive at random, so a window's count scatters by its square root at least.
    spread = math.sqrt(1.0 / (rate * h.period_s) + h.host_params[SENSOR_NOISE] ** 2)
    rate_noise, cpu_noise = two_noises(h)
    h.qps = rate * max(0.0, 1.0 + spread * rate_noise)
    h.cpu_cores = h.service_cpu * max(0.0, 1.0 + spread * cpu_noise)
    for job in range(h.job_state.shape[0]):
        starting = h.true_state[job] == PENDING and h.sent_state[job] != PENDING
        h.job_state[job] = RUNNING if starting else h.true_state[job]
    if h.probe_window_s > 0.0:
        read_probe(h)


@compiled
def read_probe(h):
    """
    Read p95 and cycles per instruction over a window that has passed, and begin the next one.

    Between two windows the last reading stands. The first reading comes at once, as if the probe
    had been running before the loop.
    """
    window_s = h.now_s - h.probe_began_s
    if window_s < h.probe_window_s - SOON_S and h.probed_p95_us > 0.0:
        return
    p95_us, stretch = h.p95_us, h.stretch
    if h.probe_count > 0:
        p95_us = mixture_p95(h.probe_weight, h.probe_p95, h.probe_shape, h.probe_count)
        stretch = h.probe_stretched_s / h.probe_cpu_s
    # A sample's quantile scatters by sqrt(q (1 - q) / n) / density; the density of the
    # log-logistic tail at its p95 is 0.0475 x shape / p95.
    probes = PROBES_PER_S * max(window_s, h.probe_window_s)
    p95_noise, cpi_noise = two_noises(h)
    h.probed_p95_us = p95_us * math.exp(p95_noise / (h.tail_shape * math.sqrt(0.0475 * probes)))
    # A reading of one polling window scatters by the sensor noise; a longer one averages.
    polls = max(1.0, max(window_s, h.probe_window_s) / h.period_s)
    h.probed_cpi = stretch * (1.0 + h.host_params[SENSOR_NOISE] / math.sqrt(polls) * cpi_noise)
    h.probe_began_s = h.now_s
    h.probe_count = 0
    h.probe_cpu_s = 0.0
    h.probe_stretched_s = 0.0


@compiled
def call_docker(h, more_s):
    """One call to Docker, after those under way; `h.api_free_s` is when it has been done."""
    host = h.host_params
    latency_s = api_latency(h, host[API_MEDIAN_S], host[API_P90_S], host[API_P99_S]) + more_s
    h.api_free_s = max(h.api_free_s, h.now_s) + latency_s


@inlined
def send_place(h, job):
    """Send a job's vCPUs, weight and quota."""
    h.sent_cores[job] = h.cores[job]
    h.sent_weight[job] = h.weight[job]
    h.sent_quota[job] = h.quota[job]


@compiled
def send_state(h, job):
    """Have Docker start, pause or resume a job, unless a call for it is still under way."""
    before, after = h.sent_state[job], h.state[job]
    if after == before or after == PENDING or after == DONE or h.lands_s[job] < math.inf:
        return
    h.actuations += 1
    if before != PENDING and after == PAUSED:
        h.pauses[job] += 1
    call_docker(h, h.host_params[CONTAINER_START_S] if before == PENDING else 0.0)
    h.lands_s[job] = h.api_free_s
    h.sent_state[job] = after
    if before == PENDING:
        send_place(h, job)


@compiled
def send_move(h, job):
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
        call_docker(h, 0.0)
        h.move_lands_s[job] = h.api_free_s
    else:
        h.move_lands_s[job] = h.now_s + h.host_params[FAST_LATENCY_S]
    send_place(h, job)


@compiled
def send(h):
    """
    Send the regulated allocation to the actuator: only what differs from what was sent before.

    Calls to Docker are done one after another. A job has one change of its state under way at a
    time, and one of its place.
    """
    h.quiet_until_s = h.now_s
    if h.service != h.sent_service:
        h.sent_service = h.service
        h.service_lands_s = h.now_s + h.host_params[FAST_LATENCY_S]
        h.actuations += 1
    for job in range(h.state.shape[0]):
        send_state(h, job)
        send_move(h, job)


@inlined
def work_left(h):
    """Solo-core seconds of work left, launch overheads included."""
    total = 0.0
    for job in range(h.work_left_s.shape[0]):
        total += h.work_left_s[job] + h.overhead_left_s[job]
        if h.true_state[job] == PENDING:
            total += h.job_params[job, LAUNCH_OVERHEAD_S]
    return total


@compiled
def apply_desired(h, regulator_on):
    """Regulate an explicit wish and send what comes of it."""
    if regulator_on:
        regulator.regulate_service(h)
        regulator.regulate_jobs(h)
    else:
        regulator.pass_through(h)
    send(h)
    h.settled = 0
    h.decisions += 1
    h.decided_at_s = h.now_s


@compiled
def start_episode(h, targets):
    """Bring a freshly initialised host to its first decision."""
    h.load_qps = targets[0]
    h.settled_qps = h.load_qps
    refresh(h)
    sense(h)


@inlined
def step(h, rows, targets, edit, gamma, terms):
    """
    One decision of an edit policy: act, let time pass, sense, reward.

    :param h: host row
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param targets: float64[n_intervals], the load trace [requests/s]
    :param edit: index of the edit
    :param gamma: the trainer's discount, for the shaping term
    :param terms: float64[4], receives the reward terms (`env.reward.TERMS`)
    :return: 0, `TERMINATED` or `TRUNCATED`
    """
    before_s = h.now_s
    actuations = h.actuations
    before = reward.potential(work_left(h), h.n_vcpus)
    h.violated_s = 0.0
    h.over_slo_s = 0.0
    action.apply_edit(h, rows, edit)
    if not h.kept or not h.settled:  # else it would come to what it came to before
        regulator.regulate_service(h)
        action.resolve_sets(h)
        regulator.regulate_jobs(h)
        send(h)
        h.settled = h.overruled_reasons == 0
    h.decisions += 1
    h.edits += 1 - h.kept
    observation.shift_history(h)
    h.wake_on_events = 1
    advance(h, targets, h.now_s + (h.hold_s if h.kept else h.period_s))
    sense(h)
    observation.remember(h)
    ended = 0
    after = 0.0
    if all_done(h):
        ended = TERMINATED
    else:
        after = reward.potential(work_left(h), h.n_vcpus)
        if h.now_s >= h.duration_s - SOON_S:
            ended = TRUNCATED
    terms[0] = reward.time_term(h.now_s - before_s)
    terms[1] = reward.slo_term(h.violated_s, h.over_slo_s)
    terms[2] = reward.churn_term(1 - h.kept + h.actuations - actuations)
    terms[3] = reward.shaping_term(gamma, before, after)
    for term in range(terms.shape[0]):
        h.term_sums[term] += terms[term]
    return ended


@inlined
def observe(h, rows, row):
    """Write the observation of a host: features, then the action mask."""
    n_features = row.shape[0] - rows.shape[0]
    observation.observe(h, h.occupancy.shape[0], row[:n_features])
    action.legal_edits(h, rows, row[n_features:])


# Python hands over an array and an index: a record by itself costs 27 us a call.


@compiled
def start_episode_at(hosts, b, targets):
    """`start_episode` of host b."""
    start_episode(hosts[b], targets)


@compiled
def step_at(hosts, b, rows, targets, edit, gamma, terms):
    """`step` of host b."""
    return step(hosts[b], rows, targets, edit, gamma, terms)


@compiled
def observe_at(hosts, b, rows, row):
    """`observe` of host b."""
    observe(hosts[b], rows, row)


@compiled
def apply_desired_at(hosts, b, regulator_on):
    """`apply_desired` on host b."""
    apply_desired(hosts[b], regulator_on)


@compiled
def advance_at(hosts, b, targets, until_s, wake_on_events):
    """`advance` host b."""
    h = hosts[b]
    h.wake_on_events = wake_on_events
    advance(h, targets, until_s)


@compiled
def sense_at(hosts, b):
    """`sense` on host b."""
    sense(hosts[b])


@compiled
def interval_p95_at(hosts, b):
    """`interval_p95` of host b."""
    return interval_p95(hosts[b])


@compiled
def over_at(hosts, b):
    """Whether the episode of host b has ended, completed or cut off."""
    h = hosts[b]
    return h.now_s >= h.duration_s - SOON_S or all_done(h)


@compiled
def step_batch(hosts, rows, targets, edits, gamma, terms, rewards, ended, observations):
    """
    One decision on each of B hosts; the hosts are independent.

    :param hosts: structured array[B]
    :param rows: int64[n_edits, 7]
    :param targets: float64[B, n_intervals]
    :param edits: int64[B]
    :param gamma: discount for the shaping term
    :param terms: float64[B, 4], receives the reward terms
    :param rewards: float32[B], receives their sums
    :param ended: int64[B], receives 0, `TERMINATED` or `TRUNCATED`
    :param observations: float32[B, n_features + n_edits]
    """
    for b in range(hosts.shape[0]):
        ended[b] = step(hosts[b], rows, targets[b], edits[b], gamma, terms[b])
        rewards[b] = terms[b].sum()
        observe(hosts[b], rows, observations[b])
