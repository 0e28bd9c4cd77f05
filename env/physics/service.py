"""
How memcached answers: latency, capacity and CPU use on a set of vCPUs.

One scalar function, `service_state`, maps a load and an allocation to the 95th percentile of
latency, the largest load that can be served, and the CPU time memcached uses. It is a closed form
fitted to measured runs (see `training.calibration` and `docs/calibration.md`), not a queueing
simulation: an operating system's scheduler, a virtual network card and a load generator with a
bounded number of outstanding requests leave a curve that a few terms describe:

* an **idle latency** and an early **rise** with load that levels off;
* a **queue** term proportional to utilisation, and a **knee** near capacity;
* a **plateau** beyond it: the load generator allows a bounded number of outstanding requests, so
  latency cannot pass outstanding / throughput (the interactive law);
* a **time slice** wait where threads outnumber vCPUs, and where a thread needs more of its vCPU
  than equal-weight work leaves it; it is few requests' wait, so it stretches the tail and leaves
  the median as it is;
* what batch work costs: SMT siblings, shared vCPUs, the memory system;
* what a load generator on the machine itself takes of its vCPU.

Units: seconds, microseconds (`_us`), requests per second (`_qps`), fractions of one vCPU.
"""

import math

from env.physics.compiled import compiled, inlined
from env.physics.parameters import column
from env.physics.steady_service import BACKGROUND_HALF

SERVICE_FIELDS: list[str] = []
"""The parameters of `service_state`, in the order of its `params` array."""

# Speed of this VM against the profile's; drawn from the vm_speed section.
VM_SPEED = column(SERVICE_FIELDS, "vm_speed")
# [1/s] What one vCPU alone serves, sibling idle.
CORE_CAPACITY_QPS = column(SERVICE_FIELDS, "core_capacity_qps")
# Speed of a vCPU whose sibling serves memcached too.
SMT = column(SERVICE_FIELDS, "smt")
# Speed of a vCPU whose sibling runs batch work all the time.
BATCH_SMT = column(SERVICE_FIELDS, "batch_smt")
# [us] p95 without load.
IDLE_US = column(SERVICE_FIELDS, "idle_us")
# [us] p95 where the early rise with load levels off.
LEVEL_US = column(SERVICE_FIELDS, "level_us")
# [1/s] The load at which half of that rise is reached.
RISE_QPS = column(SERVICE_FIELDS, "rise_qps")
# [us] p95 added in proportion to utilisation.
QUEUE_US = column(SERVICE_FIELDS, "queue_us")
# Sharpness of the knee: (load / capacity) ** exponent.
KNEE_EXPONENT = column(SERVICE_FIELDS, "knee_exponent")
# [requests] Outstanding requests at the 95th percentile: plateau x capacity.
OUTSTANDING = column(SERVICE_FIELDS, "outstanding")
# [us] Wait for a time slice at capacity, per thread that others keep waiting.
SLICE_US = column(SERVICE_FIELDS, "slice_us")
# How late that wait sets in.
SLICE_EXPONENT = column(SERVICE_FIELDS, "slice_exponent")
# Share of the latency below the knee that scales with 1 / vm_speed.
SPEED_LATENCY = column(SERVICE_FIELDS, "speed_latency")
# Latency below the knee, added per busy vCPU that runs batch elsewhere.
BATCH_LATENCY = column(SERVICE_FIELDS, "batch_latency")
# The same, added per unit of memory pressure.
PRESSURE_LATENCY = column(SERVICE_FIELDS, "pressure_latency")
# Largest share of a vCPU that equal-weight batch work takes.
EQUAL_SHARE = column(SERVICE_FIELDS, "equal_share")
# How late the wait for a time slice beside such work sets in.
EQUAL_EXPONENT = column(SERVICE_FIELDS, "equal_exponent")
# Latency added where such work sits on all of memcached's vCPUs.
EQUAL_LATENCY = column(SERVICE_FIELDS, "equal_latency")
# The same for background weight.
BACKGROUND_LATENCY = column(SERVICE_FIELDS, "background_latency")
# Capacity lost to background work on all of memcached's vCPUs.
BACKGROUND_CAPACITY = column(SERVICE_FIELDS, "background_capacity")
# CPU use per vCPU that memcached's own clock shows at saturation.
CPU_LIMIT = column(SERVICE_FIELDS, "cpu_limit")
# Shape of the log-logistic tail without such waits, see tail_fraction.
TAIL_SHAPE = column(SERVICE_FIELDS, "tail_shape")

LN_19 = math.log(19.0)
"""A log-logistic tail's shape times ln(p95 / p50): the logarithm of the odds 0.95 / 0.05."""


@inlined
def own_speed(c, sibling, background, equal, params, client):
    """
    Speed at which vCPU `c` would serve one memcached thread beside its batch work.

    :param c: index of the vCPU
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param background: float64[C], busy fraction of each vCPU by background batch work
    :param equal: float64[C], the same by batch work of memcached's weight
    :param params: float64[len(SERVICE_FIELDS)]
    :param client: fraction of the vCPU that a load generator takes
    :return: (speed, share of the vCPU's time), both 1 on an idle core
    """
    presence = background[c] / (background[c] + BACKGROUND_HALF)
    share = (1.0 - min(equal[c], params[EQUAL_SHARE])) * (
        1.0 - min(params[BACKGROUND_CAPACITY] * presence, 0.9)
    )
    share *= 1.0 - client
    s = sibling[c]
    busy = 0.0 if s < 0 else min(background[s] + equal[s], 1.0)
    return share * (1.0 - (1.0 - max(params[BATCH_SMT], params[SMT])) * busy), share


@inlined
def largest_share_taken(equal, client, cores_mask, threads, most):
    """
    Largest share of its vCPU that others take from one of memcached's threads.

    Others are equal-weight work and the load generator. Threads keep off them while they can.

    :param equal: float64[C], busy fraction of each vCPU by batch work of memcached's weight
    :param client: float64[C], the same by a load generator, which goes before all others
    :param cores_mask: memcached's vCPUs
    :param threads: its threads that have a vCPU of their own, at least 1
    :param most: the largest share that such work takes
    :return: the share
    """
    taken = 0
    share = 0.0
    for _ in range(threads):
        least = -1
        for c in range(len(equal)):
            if not ((cores_mask & ~taken) >> c) & 1:
                continue
            kept = min(equal[c], most)
            kept += (1.0 - kept) * client[c]
            if least < 0 or kept < share:
                least = c
                share = kept
        taken |= 1 << least
    return share


@inlined
def served(threads, cores_mask, sibling, background, equal, client, params):
    """
    What memcached's vCPUs are worth to its threads.

    :param threads: memcached's worker threads
    :param cores_mask: memcached's vCPUs (bit mask, not empty)
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param background: float64[C], busy fraction of each vCPU by background batch work
    :param equal: float64[C], the same by batch work of memcached's weight
    :param client: float64[C], the same by a load generator, which goes before all others
    :param params: float64[len(SERVICE_FIELDS)]
    :return: vCPUs' worth of service, the same had no thread another one of memcached for a
        sibling, and vCPUs' worth of time
    """
    vcpus = len(sibling)
    cores = 0
    for c in range(vcpus):
        cores += (cores_mask >> c) & 1
    # Threads settle where they are served best: first on physical cores of their own.
    speed = 0.0
    solo = 0.0
    time = 0.0
    taken = 0
    for _ in range(min(threads, cores)):
        best = -1
        best_gain = -1.0
        best_solo = 0.0
        best_time = 0.0
        for c in range(vcpus):
            if not ((cores_mask & ~taken) >> c) & 1:
                continue
            gain, gain_time = own_speed(c, sibling, background, equal, params, client[c])
            gain_solo = gain
            s = sibling[c]
            if s >= 0 and (cores_mask >> s) & 1:
                other, other_time = own_speed(s, sibling, background, equal, params, client[s])
                if other > gain or (other == gain and s < c):  # the second one on its core
                    gain = max((gain_time + other_time) * params[SMT] - other, 0.0)
            if gain > best_gain:
                best = c
                best_gain = gain
                best_solo = gain_solo
                best_time = gain_time
        taken |= 1 << best
        speed += best_gain
        solo += best_solo
        time += best_time
    return speed, solo, time


@compiled
def service_capacity(threads, cores_mask, sibling, background, equal, client, params):
    """
    Largest load that memcached can serve.

    :param threads: memcached's worker threads
    :param cores_mask: memcached's vCPUs (bit mask, not empty)
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param background: float64[C], busy fraction of each vCPU by background batch work
    :param equal: float64[C], the same by batch work of memcached's weight
    :param client: float64[C], the same by a load generator, which goes before all others
    :param params: float64[len(SERVICE_FIELDS)]
    :return: the load [1/s]
    """
    speed, _, _ = served(threads, cores_mask, sibling, background, equal, client, params)
    return params[CORE_CAPACITY_QPS] * params[VM_SPEED] * speed


@inlined
def relative_cost(load, exponent):
    """
    CPU time of a request at some load, relative to one at capacity.

    :param load: the load, as a part of the capacity
    :param exponent: all requests' CPU time goes with `load` to this power; below 1 where requests
        that come together cost less
    """
    return load ** (exponent - 1.0) if exponent != 1.0 and load > 0.0 else 1.0


@inlined
def busy_part(load, speed, solo):
    """
    Part of its time that memcached is busy at some load.

    Requests cost less CPU while a sibling thread rests, more once both are busy.

    :param load: the load, as a part of the capacity
    :param speed: vCPUs' worth of service, see `served`
    :param solo: the same without siblings that serve memcached too, see `served`
    """
    return load * (speed / solo + (1.0 - speed / solo) * load)


@compiled
def service_occupancy(
    qps, threads, cores_mask, sibling, background, equal, client, params, exponent=1.0
):
    """
    Fraction of each of its vCPUs that memcached asks for.

    :param qps: offered load [1/s]
    :param threads: memcached's worker threads
    :param cores_mask: memcached's vCPUs (bit mask, not empty)
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param background: float64[C], busy fraction of each vCPU by background batch work
    :param equal: float64[C], the same by batch work of memcached's weight
    :param client: float64[C], the same by a load generator, which goes before all others
    :param params: float64[len(SERVICE_FIELDS)]
    :param exponent: how CPU time grows with load, see `relative_cost`
    :return: the fraction
    """
    speed, solo, _ = served(threads, cores_mask, sibling, background, equal, client, params)
    load = min(1.0, qps / (params[CORE_CAPACITY_QPS] * params[VM_SPEED] * speed))
    cores = 0
    for c in range(len(sibling)):
        cores += (cores_mask >> c) & 1
    # Fewer threads than vCPUs keep no more of them busy than they are, moving among them.
    usable = min(1.0, threads / cores)
    return usable * busy_part(load, speed, solo) * relative_cost(load, exponent)


@compiled
def service_state(
    qps, threads, cores_mask, sibling, background, equal, client, pressure, params, exponent=1.0
):
    """
    Latency, capacity and CPU use of memcached at a steady load.

    :param qps: offered load [1/s]; at or above capacity the result is the plateau
    :param threads: memcached's worker threads
    :param cores_mask: memcached's vCPUs (bit mask, not empty)
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param background: float64[C], busy fraction of each vCPU by background batch work
    :param equal: float64[C], the same by batch work of memcached's weight
    :param client: float64[C], the same by a load generator, which goes before all others
    :param pressure: memory pressure of the running jobs, as `job_speeds` returns it
    :param params: float64[len(SERVICE_FIELDS)]
    :param exponent: how CPU time grows with load, see `relative_cost`
    :return: p95 [us], capacity [1/s], CPU use [vCPUs] and shape of the tail
    """
    vcpus = len(sibling)
    cores = 0
    elsewhere = 0.0
    shared_equal = 0.0
    shared_background = 0.0
    shared_client = 0.0
    for c in range(vcpus):
        if (cores_mask >> c) & 1:
            cores += 1
            shared_equal += min(equal[c] / params[EQUAL_SHARE], 1.0)
            shared_background += background[c] / (background[c] + BACKGROUND_HALF)
            shared_client += client[c]
        else:
            elsewhere += min(background[c] + equal[c], 1.0)
    shared_equal /= cores
    shared_background /= cores

    speed, solo, time = served(threads, cores_mask, sibling, background, equal, client, params)
    vm_speed = params[VM_SPEED]
    capacity = params[CORE_CAPACITY_QPS] * vm_speed * speed

    load = min(qps / capacity, 1.0)
    # The rise below goes with the offered load, not the served one: with the latter a vCPU taken
    # away in overload would lower p95.
    slower = 1.0 + params[SPEED_LATENCY] * (1.0 / vm_speed - 1.0)
    slower *= 1.0 + params[BATCH_LATENCY] * elsewhere + params[PRESSURE_LATENCY] * pressure
    # Threads move to vCPUs without batch work while there are some, hence the cube.
    slower *= 1.0 + params[EQUAL_LATENCY] * shared_equal * shared_equal * shared_equal
    slower *= 1.0 + params[BACKGROUND_LATENCY] * shared_background
    # Whatever shares a vCPU with a thread of memcached makes it wait.
    crowd = max(threads / cores + shared_equal, 1.0)
    rise = max(params[LEVEL_US] - params[IDLE_US], 0.0)
    calm = slower * (
        params[IDLE_US] + rise * qps / (qps + params[RISE_QPS]) + params[QUEUE_US] * crowd * load
    )
    calm_at_capacity = slower * (
        params[IDLE_US] + rise * capacity / (capacity + params[RISE_QPS]) + params[QUEUE_US] * crowd
    )
    plateau = 1e6 * params[OUTSTANDING] / capacity
    flow = calm + max(plateau - calm_at_capacity, 0.0) * load ** params[KNEE_EXPONENT]
    waiting = 0.0
    if threads > cores:
        waiting = (threads / cores - 1.0) * load ** params[SLICE_EXPONENT]
    if shared_equal > 0.0 or shared_client > 0.0:
        # Each thread serves its own connections: the slowest one's make the tail.
        taken = largest_share_taken(
            equal, client, cores_mask, min(threads, cores), params[EQUAL_SHARE]
        )
        own = params[CORE_CAPACITY_QPS] * vm_speed * (1.0 - taken) * min(threads, cores)
        need = max(load, min(qps / own, 1.0))
        waiting += taken / params[EQUAL_SHARE] * need ** params[EQUAL_EXPONENT]
    wait = params[SLICE_US] * waiting

    cpu = time * busy_part(load, speed, solo) * relative_cost(load, exponent)
    shape = LN_19 / (LN_19 / params[TAIL_SHAPE] + math.log1p(wait / flow))
    return flow + wait, capacity, min(cpu, params[CPU_LIMIT] * time), shape


@compiled
def service_stretch(cores_mask, sibling, background, equal, pressure, params):
    """
    How much longer memcached's instructions take than without batch work.

    SMT siblings, the memory system and the cold caches that background work leaves behind stretch
    its cycles per instruction; the time that equal-weight work gets on its vCPUs does not, as it
    counts no cycles there.

    :param cores_mask: memcached's vCPUs (bit mask, not empty)
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param background: float64[C], busy fraction of each vCPU by background batch work
    :param equal: float64[C], the same by batch work of memcached's weight
    :param pressure: memory pressure of the running jobs, as `job_speeds` returns it
    :param params: float64[len(SERVICE_FIELDS)]
    :return: the factor, 1 without batch work
    """
    cores = 0
    elsewhere = 0.0
    pace = 0.0
    for c in range(len(sibling)):
        if (cores_mask >> c) & 1:
            cores += 1
            speed, _ = own_speed(c, sibling, background, equal, params, 0.0)
            pace += speed / (1.0 - min(equal[c], params[EQUAL_SHARE]))
        else:
            elsewhere += min(background[c] + equal[c], 1.0)
    memory = 1.0 + params[BATCH_LATENCY] * elsewhere + params[PRESSURE_LATENCY] * pressure
    return memory * cores / pace


@compiled
def tail_fraction(limit_us, p95_us, shape):
    """
    Fraction of requests slower than a limit, from a log-logistic tail through the p95.

    :param limit_us: the limit [us]
    :param p95_us: 95th percentile of latency [us]
    :param shape: tail shape; larger is steeper
    :return: the fraction, 0.05 where the limit is the p95
    """
    return 1.0 / (1.0 + 19.0 * (limit_us / p95_us) ** shape)


@inlined
def _excess(latency_us, weights, p95s, shapes, n, total):
    """Requests slower than a latency, over the 5 % that a p95 leaves."""
    slower = 0.0
    for i in range(n):
        if weights[i] > 0.0:
            slower += weights[i] * tail_fraction(latency_us, p95s[i], shapes[i])
    return slower - 0.05 * total


@compiled
def mixture_p95(weights, p95s, shapes, n):
    """
    95th percentile over an interval that went through several states.

    :param weights: float64[N], requests in each state
    :param p95s: float64[N], p95 of each state [us]
    :param shapes: float64[N], tail shape of each state, see `tail_fraction`
    :param n: number of states used
    :return: p95 of the mixture [us]; 0 without requests
    """
    total = 0.0
    low = 0.0
    high = 0.0
    for i in range(n):
        if weights[i] > 0.0:
            total += weights[i]
            low = p95s[i] if total == weights[i] else min(low, p95s[i])
            high = max(high, p95s[i])
    if high - low <= 1e-9 * high:
        return high
    above = _excess(low, weights, p95s, shapes, n, total)
    below = _excess(high, weights, p95s, shapes, n, total)
    # False position with the Illinois rule: an end that stays counts half the next time.
    side = 0
    middle = high
    for _ in range(50):
        if above - below <= 0.0 or high - low <= 1e-9 * high:
            break
        middle = (above * high - below * low) / (above - below)
        excess = _excess(middle, weights, p95s, shapes, n, total)
        if abs(excess) <= 1e-9 * total:
            break
        if excess > 0.0:
            low = middle
            above = excess
            if side == 1:
                below *= 0.5
            side = 1
        else:
            high = middle
            below = excess
            if side == -1:
                above *= 0.5
            side = -1
    return middle
