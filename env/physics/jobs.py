"""
How fast batch jobs run: who gets which share of which vCPU, and what that share is worth.

Everything is an average over time. A job is described by the seconds it needs alone with one
thread (`work_s`); its speed is how many of those seconds it gets done per second. `job_speeds`
answers three questions, in this order:

1. *Where do the threads settle?* Each job wants `demand = 1 / (s + (1 - s) / m)` vCPUs on average
   (Amdahl: serial fraction `s`, `m` vCPUs in the parallel part). It takes free room first, a
   vCPU with an idle sibling before one with a busy sibling; what does not fit is spread so that
   the loads even out, as the kernel's load balancer does. Narrow sets and few threads settle
   first, jobs that differ in neither settle as one.
2. *Who gets an overloaded vCPU?* A load generator of the machine's own first, wherever it runs;
   then memcached, except that a job of equal weight may take half; then the normal jobs,
   then the background ones. Jobs of one weight share a vCPU as sibling cgroups do: in proportion to
   the part of each job's weight that its threads bring there. A job with a CPU quota asks for no
   more than that: it runs for a part of each quota period only.
3. *What is a share worth?* A vCPU whose SMT sibling is busy runs at `smt` of its solo speed, in
   proportion to how busy the sibling is, and every other job's memory traffic slows a job by
   `1 + sensitivity x sum(pressure x vCPUs in use)`. Beside memcached or a load generator it is
   slower by `1 + interruption x the share of the vCPU that those take`: thousands of times a
   second they come first, their packets' interrupts are charged to the job, and they leave cold
   caches.

A core set is a bit mask. All functions are plain scalar Python compiled by numba.
"""

from env.codes import BACKGROUND, NORMAL
from env.physics.compiled import compiled, inlined
from env.physics.parameters import (
    CORES_PER_THREAD,
    INTERRUPTION,
    JOB_SPEED,
    PRESSURE,
    SENSITIVITY,
    SERIAL_FRACTION,
    SERVICE_PRESSURE,
    SERVICE_SIBLING,
    SMT,
    STRAGGLING,
)

# Demands settle in two rounds: the first places the jobs group by group, the second lets the early
# ones react to the late ones.
_ROUNDS = 2
_NOTHING = 1e-12
"""What differs by less is equal: sums round differently in another order of the jobs."""


@inlined
def _jobs_take(used, core):
    """Sum of all jobs' shares of a vCPU."""
    total = 0.0
    for job in range(used.shape[0]):
        total += used[job, core]
    return total


@inlined
def _taken(used, core, client):
    """Share of a vCPU that the jobs and the load generator take."""
    return _jobs_take(used, core) + client[core]


@inlined
def _service_demand(service_occupancy, used, busy, client):
    """
    What memcached asks for of its vCPUs together.

    :return: what it asks for, what jobs and load generator leave free there, and what there would
        be without jobs [vCPUs each]
    """
    wanted = 0.0
    room = 0.0
    width = 0.0
    for core in range(busy.shape[0]):
        if service_occupancy[core] > 0.0:
            width += 1.0 - client[core]
            wanted += min(1.0, service_occupancy[core])
            room += max(0.0, 1.0 - busy[core])
    return wanted, room, width


@inlined
def _service_takes(core, wanted, room, width, used, busy, client):
    """
    Share of a vCPU that memcached takes once its threads have moved away from batch work.

    Its wake-ups go to an idle vCPU of its set while there is one, so batch work on one of two
    vCPUs keeps nearly all of it (measured: ImaGoodFella's radix, beside memcached on vCPUs 0-1).
    """
    own_room = max(0.0, 1.0 - busy[core])
    if wanted <= room:
        return wanted * own_room / room
    batch = 1.0 - client[core] - own_room
    return own_room + (wanted - room) * batch / (width - room)


@inlined
def _parallel_vcpus(job, threads, cores, job_params, n_cores):
    """VCPUs a job keeps busy in its parallel part: as many as its threads and its set allow."""
    size = 0
    for core in range(n_cores):
        size += (cores[job] >> core) & 1
    return min(threads[job] * job_params[job, CORES_PER_THREAD], float(size))


@inlined
def _demand(job, parallel, job_params):
    """VCPUs a job keeps busy on average (Amdahl), `parallel` of them in its parallel part."""
    serial = job_params[job, SERIAL_FRACTION]
    return min(parallel, 1.0 / (serial + (1.0 - serial) / max(parallel, 1.0)))


@inlined
def _place_threads(job, demand, duty, layer, cores, sibling, service_occupancy, used, busy, client):
    """
    Place a demand: free room first, quiet siblings before busy ones, then level.

    :param job: whose demand it is, or in whose row that of several is placed
    :param demand: vCPUs that are kept busy on average
    :param duty: part of the time in which all its threads run, the most that one vCPU gets of it
    :param layer: the job's weight, `BACKGROUND` or `NORMAL`
    """
    n_cores = used.shape[1]
    mask = cores[job]
    most = 0.5 if layer == NORMAL else 1.0
    left = demand
    visited = 0
    while left > _NOTHING:
        best = -1
        best_sibling_load = 0.0
        best_room = 0.0
        for core in range(n_cores):
            if (mask >> core) & 1 == 0 or (visited >> core) & 1 == 1:
                continue
            room = 1.0 - min(service_occupancy[core], most) - busy[core]
            if room <= _NOTHING:
                continue
            load = 0.0
            if sibling[core] >= 0:
                load = service_occupancy[sibling[core]] + busy[sibling[core]]
            if best < 0 or load < best_sibling_load - _NOTHING:
                best, best_sibling_load, best_room = core, load, room
        if best < 0:
            break
        visited |= 1 << best
        step = min(left, min(best_room, duty))
        used[job, best] += step
        busy[best] = _taken(used, best, client)
        left -= step
    # No room is left: each step lifts the least loaded vCPUs of the set to the next level.
    while left > _NOTHING:
        low = 1e300
        unfilled = 0
        for core in range(n_cores):
            if (mask >> core) & 1 == 1 and used[job, core] < duty - _NOTHING:
                unfilled |= 1 << core
                low = min(low, service_occupancy[core] + busy[core])
        if unfilled == 0:
            break
        lowest = 0
        width = 0
        step = left
        for core in range(n_cores):
            if (unfilled >> core) & 1 == 1:
                load = service_occupancy[core] + busy[core]
                if load <= low + _NOTHING:
                    lowest |= 1 << core
                    width += 1
                    step = min(step, duty - used[job, core])
                else:
                    step = min(step, load - low)
        step = min(step, left / width)
        for core in range(n_cores):
            if (lowest >> core) & 1 == 1:
                used[job, core] += step
                busy[core] = _taken(used, core, client)
                left -= step


@inlined
def _share_vcpu(core, limit, layer, running, weight, demand, used):
    """
    Cut the demands on one vCPU down to its limit, as sibling cgroups of one weight share it.

    :param limit: share of the vCPU that memcached and the load generator leave
    :param layer: whose demands are cut, `BACKGROUND` or `NORMAL`
    """
    n_jobs = used.shape[0]
    total = 0.0
    for job in range(n_jobs):
        if weight[job] == layer:
            total += used[job, core]
        else:  # background work gets what normal work leaves
            limit -= used[job, core]
    if total <= limit:
        return
    limit = max(limit, 0.0)
    served = 0  # jobs whose whole demand fits: they leave their rest to the others
    while True:
        left = limit
        weights = 0.0
        for job in range(n_jobs):
            if running[job] and weight[job] == layer:
                if (served >> job) & 1:
                    left -= used[job, core]
                elif demand[job] > 0.0:
                    weights += used[job, core] / demand[job]
        level = max(left, 0.0) / weights if weights > 0.0 else 0.0
        more = False
        for job in range(n_jobs):
            waits = running[job] and weight[job] == layer and (served >> job) & 1 == 0
            if waits and demand[job] <= level and used[job, core] > 0.0:
                served |= 1 << job
                more = True
        if not more:
            break
    for job in range(n_jobs):
        waits = running[job] and weight[job] == layer and (served >> job) & 1 == 0
        if waits and demand[job] > 0.0:
            used[job, core] *= level / demand[job]


@inlined
def _sibling_busy(job, core, parallel, sibling, service_occupancy, host_params, used, busy):
    """
    How busy memcached and the other jobs keep the sibling of one of a job's vCPUs.

    A job's only thread is on one vCPU at a time: what others have of a sibling that it uses too
    they have in the rest of the time.
    """
    twin = sibling[core]
    if twin < 0:
        return 0.0
    others = max(0.0, busy[twin] - used[job, twin])
    if parallel <= 1.0 and others > 0.0:
        others = min(1.0, others / max(1.0 - used[job, twin], others))
    return min(1.0, host_params[SERVICE_SIBLING] * service_occupancy[twin]) + others


@inlined
def _parallel_value(
    job, kept, waits, parallel, sibling, service_occupancy, job_params, host_params, used, busy
):
    """
    What a job's shares of some vCPUs are worth to its parallel part, and the slowest of them.

    :param kept: the vCPUs, of those it uses, as a bit mask
    :param waits: whether each of them has a thread that the others wait for
    :return: vCPUs' worth with an idle sibling each, and the index of the slowest
    """
    lost = 1.0 - job_params[job, SMT]
    total = 0.0
    width = 0
    slowest = -1
    least = 2.0
    for core in range(used.shape[1]):
        if (kept >> core) & 1 == 0:
            continue
        share = used[job, core]
        twin = sibling[core]
        twin_busy = _sibling_busy(
            job, core, parallel, sibling, service_occupancy, host_params, used, busy
        )
        if parallel > 1.0 and twin >= 0 and (kept >> twin) & 1:
            twin_busy += min(1.0, used[job, twin] / share)
        value = share * (1.0 - lost * min(1.0, twin_busy))
        total += value
        width += 1
        if value < least:
            slowest, least = core, value
    if waits:
        straggling = host_params[STRAGGLING]
        total = (1.0 - straggling) * total + straggling * width * least
    return total, slowest


@inlined
def _ask(running, threads, cores, quota, job_params, speed, used):
    """
    What each job asks for, before any share is known.

    :param speed: float64[J], receives each job's demand [vCPUs], 0 for jobs that do not run
    """
    n_jobs, n_cores = used.shape
    for job in range(n_jobs):
        speed[job] = 0.0
        for core in range(n_cores):
            used[job, core] = 0.0
        if running[job]:
            parallel = _parallel_vcpus(job, threads, cores, job_params, n_cores)
            if parallel > 0.0:
                speed[job] = min(_demand(job, parallel, job_params), quota[job])


@inlined
def _next_to_settle(layer, settled, running, threads, cores, weight, job_params, n_cores):
    """
    The job that settles next: that with the narrowest set, then that with the fewest threads.

    Nothing depends on which job comes first in the arrays.

    :param layer: the jobs' weight, `BACKGROUND` or `NORMAL`
    :param settled: bit mask of the jobs that have settled
    :return: its index, -1 if all have settled, and the vCPUs that it keeps busy
    """
    first = -1
    first_size = 0
    first_parallel = 0.0
    for job in range(running.shape[0]):
        if not running[job] or weight[job] != layer or (settled >> job) & 1:
            continue
        size = 0
        for core in range(n_cores):
            size += (cores[job] >> core) & 1
        parallel = _parallel_vcpus(job, threads, cores, job_params, n_cores)
        sooner = size < first_size
        if size == first_size:
            sooner = parallel < first_parallel
            if parallel == first_parallel:
                sooner = cores[job] < cores[first]
        if first < 0 or sooner:
            first, first_size, first_parallel = job, size, parallel
    return first, first_parallel


@inlined
def _like(lead, parallel, running, threads, cores, weight, job_params, n_cores):
    """
    The jobs that settle with one: those of its weight that keep as many of the same vCPUs busy.

    :param lead: index of that job, which is one of them
    :param parallel: vCPUs that it keeps busy
    :return: a bit mask of jobs
    """
    group = 0
    for job in range(running.shape[0]):
        beside = running[job] and weight[job] == weight[lead] and cores[job] == cores[lead]
        if beside and _parallel_vcpus(job, threads, cores, job_params, n_cores) == parallel:
            group |= 1 << job
    return group


@inlined
def _settle(
    layer, rounds, running, threads, cores, weight, sibling, service_occupancy, job_params, demand,
    used, busy, client,
):  # fmt: skip
    """
    Question 1: where the threads of the jobs of one weight settle.

    Jobs that keep as many of the same vCPUs busy are placed as one, and each has the part of every
    share that it has of their demand: which of them is where changes, and this is an average.

    :param layer: the weight, `BACKGROUND` or `NORMAL`
    :param rounds: how often each job is placed
    """
    n_jobs, n_cores = used.shape
    for turn in range(rounds):
        settled = 0
        while True:
            lead, parallel = _next_to_settle(
                layer, settled, running, threads, cores, weight, job_params, n_cores
            )
            if lead < 0:
                break
            group = _like(lead, parallel, running, threads, cores, weight, job_params, n_cores)
            settled |= group
            together = 0.0
            for job in range(n_jobs):
                if (group >> job) & 1:
                    together += demand[job]
                    if turn > 0:
                        for core in range(n_cores):
                            used[job, core] = 0.0
            if turn > 0:
                for core in range(n_cores):
                    busy[core] = _taken(used, core, client)
            if together <= 0.0:
                continue
            duty = together / max(parallel, 1.0)
            _place_threads(
                lead, together, duty, layer, cores, sibling, service_occupancy, used, busy, client
            )
            for core in range(n_cores):
                placed = used[lead, core]
                for job in range(n_jobs):
                    if (group >> job) & 1:
                        used[job, core] = placed * (demand[job] / together)


@inlined
def _share_out(layer, running, cores, weight, service_occupancy, demand, used, busy, client):
    """
    Question 2: who gets the overloaded vCPUs; who gets less looks for the rest elsewhere.

    :param layer: the weight of the jobs, `BACKGROUND` or `NORMAL`
    """
    n_jobs, n_cores = used.shape
    wanted, room, width = _service_demand(service_occupancy, used, busy, client)
    for core in range(n_cores):
        if _jobs_take(used, core) <= _NOTHING:
            continue
        limit = 1.0 - client[core]
        if service_occupancy[core] > 0.0:
            taken = _service_takes(core, wanted, room, width, used, busy, client)
            limit -= min(taken, 0.5) if layer == NORMAL else taken
        _share_vcpu(core, limit, layer, running, weight, demand, used)
        busy[core] = _taken(used, core, client)
    for core in range(n_cores):
        claims = 0.0
        for job in range(n_jobs):
            if running[job] and weight[job] == layer:
                claims += _claim(job, core, cores, demand, used)
        free = 1.0 - busy[core]
        if service_occupancy[core] > 0.0:
            wanted, room, width = _service_demand(service_occupancy, used, busy, client)
            free = min(free, room - wanted)
        if claims > _NOTHING and free > 0.0:
            part = min(1.0, free / claims)
            for job in range(n_jobs):
                if running[job] and weight[job] == layer:
                    used[job, core] += part * _claim(job, core, cores, demand, used)
            busy[core] = _taken(used, core, client)


@inlined
def _claim(job, core, cores, demand, used):
    """What a job still misses and could use of a vCPU."""
    if not (cores[job] >> core) & 1:
        return 0.0
    missing = demand[job]
    for other in range(used.shape[1]):
        missing -= used[job, other]
    return max(0.0, min(missing, 1.0 - used[job, core]))


@inlined
def _stay(job, parallel, weight, service_occupancy, used, busy, client):
    """
    Cut a background job's shares to what threads get that stay where they wait.

    Where a load generator runs thousands of times a second, its vCPU and memcached's are idle in
    pieces shorter than the kernel moves a thread for: who waits for one vCPU waits there while
    another one is idle. So each share takes the part of the time that it is of what is left there,
    and all parts together no more than the job has threads, which wait where most is left.
    """
    visited = 0
    for _ in range(used.shape[1]):
        best, most = -1, 0.0
        for core in range(used.shape[1]):
            left = 1.0 - service_occupancy[core] - client[core]
            for other in range(used.shape[0]):
                if weight[other] == NORMAL:
                    left -= used[other, core]
            left = max(left, used[job, core])
            if left > most and not (visited >> core) & 1:
                best, most = core, left
        if best < 0:
            break
        visited |= 1 << best
        part = min(used[job, best] / most, parallel)
        used[job, best] = part * most
        busy[best] = _taken(used, best, client)
        parallel -= part


@inlined
def _pace(
    job, demand, pressure, service_pressure, threads, cores, sibling, service_occupancy, job_params,
    host_params, used, busy, client,
):  # fmt: skip
    """
    Question 3: what a job's shares are worth.

    :param demand: vCPUs that it asked for
    :param pressure: memory pressure of all jobs, its own included
    :param service_pressure: memory pressure of memcached
    :param client: float64[C], share of each vCPU that a load generator takes
    :return: seconds of `work_s` done per second
    """
    n_cores = used.shape[1]
    parallel = _parallel_vcpus(job, threads, cores, job_params, n_cores)
    lost = 1.0 - job_params[job, SMT]
    own = 0.0
    kept = 0
    width = 0
    serial_value = 0.0
    for core in range(n_cores):
        if used[job, core] > _NOTHING:
            own += used[job, core]
            kept |= 1 << core
            width += 1
            # A lone thread settles on its best vCPU.
            sibling_busy = _sibling_busy(
                job, core, parallel, sibling, service_occupancy, host_params, used, busy
            )
            serial_value = max(serial_value, 1.0 - lost * min(1.0, sibling_busy))
    if own <= 0.0:
        return 0.0
    # Where each vCPU has a thread to wait for, the kernel can also leave the slowest ones out.
    waits = threads[job] >= width
    parallel_value = 0.0
    while kept != 0:
        value, slowest = _parallel_value(
            job, kept, waits, parallel, sibling, service_occupancy, job_params, host_params, used,
            busy,
        )  # fmt: skip
        parallel_value = max(parallel_value, value)
        kept = kept & ~(1 << slowest) if waits else 0
    # The part of the time in which its quota lets it run: there it runs as it would without.
    unthrottled = demand / _demand(job, parallel, job_params)
    serial = job_params[job, SERIAL_FRACTION]
    seconds = serial / serial_value
    seconds += (
        (1.0 - serial) * job_params[job, CORES_PER_THREAD] * own / (parallel * parallel_value)
    )
    # A job that gets a part of what it wants is that much slower in both its phases.
    seconds *= max(1.0, demand / own)
    neighbours = pressure - job_params[job, PRESSURE] * own + service_pressure
    slow_down = 1.0 + job_params[job, SENSITIVITY] * max(0.0, neighbours)
    interrupted = 0.0
    for core in range(n_cores):
        first = min(1.0, client[core] + service_occupancy[core])
        interrupted += job_params[job, INTERRUPTION] * first * used[job, core]
    slow_down *= 1.0 + interrupted / own
    return host_params[JOB_SPEED] * unthrottled / (seconds * slow_down)


@compiled
def job_speeds(
    running, threads, cores, weight, quota, sibling, service_occupancy, job_params, host_params,
    speed, used, busy, client,
):  # fmt: skip
    """
    Shares and speeds of all jobs under one allocation.

    :param running: uint8[J], 1 for jobs that run (started, not paused, not done)
    :param threads: int64[J], threads each job was launched with
    :param cores: int64[J], core set of each job as a bit mask
    :param weight: int64[J], `BACKGROUND` or `NORMAL` (equal to memcached's)
    :param quota: float64[J], most CPU time each job gets [vCPUs], inf without a limit
    :param sibling: int64[C], SMT sibling of each vCPU or -1
    :param service_occupancy: float64[C], fraction of each vCPU that memcached asks for
    :param job_params: float64[J, len(JOB_FIELDS)]
    :param host_params: float64[len(HOST_FIELDS)]
    :param speed: float64[J], output: seconds of `work_s` done per second
    :param used: float64[J, C], output: share of each vCPU that each job keeps busy
    :param busy: float64[C], output: their sum over the jobs, and the load generator's
    :param client: float64[C], fraction of each vCPU that a load generator takes, before all others
    :return: the jobs' memory pressure, the sum of pressure x vCPUs in use
    """
    n_jobs, n_cores = used.shape
    for core in range(n_cores):
        busy[core] = client[core]  # from here on kept up to date with `used`
    # `speed` carries each job's demand until the shares are known.
    _ask(running, threads, cores, quota, job_params, speed, used)
    for layer in (NORMAL, BACKGROUND):
        present = 0
        for job in range(n_jobs):
            if running[job] and weight[job] == layer:
                present += 1
        if present == 0:
            continue
        _settle(
            layer, _ROUNDS if present > 1 else 1, running, threads, cores, weight, sibling,
            service_occupancy, job_params, speed, used, busy, client,
        )  # fmt: skip
        _share_out(layer, running, cores, weight, service_occupancy, speed, used, busy, client)
    generated = 0.0
    for core in range(n_cores):
        generated += client[core]
    if generated > 0.0:
        for job in range(n_jobs):
            if running[job] and weight[job] == BACKGROUND:
                parallel = _parallel_vcpus(job, threads, cores, job_params, n_cores)
                _stay(job, parallel, weight, service_occupancy, used, busy, client)
    pressure = 0.0
    for job in range(n_jobs):
        for core in range(n_cores):
            pressure += job_params[job, PRESSURE] * used[job, core]
    service_pressure = 0.0
    for core in range(n_cores):
        service_pressure += host_params[SERVICE_PRESSURE] * min(1.0, service_occupancy[core])
    for job in range(n_jobs):
        if running[job] and speed[job] > 0.0:
            speed[job] = _pace(
                job, speed[job], pressure, service_pressure, threads, cores, sibling,
                service_occupancy, job_params, host_params, used, busy, client,
            )  # fmt: skip
    return pressure
