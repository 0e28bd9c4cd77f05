"""
The safety shell around any policy, the same in the simulator and on the machine.

It keeps five promises: memcached is never without a vCPU; memcached gets vCPUs at once and
gives them back only after a dwell time, and after a second in which it could have done without
them; no job runs with memcached's weight on memcached's vCPUs (nor at any weight where sharing is
forbidden); nothing flaps and no job starts that the memory cannot hold; what the SLO guard
(`env.guard`) asks for is done whatever else was desired. Each stage is a few lines; what it
overruled is counted and kept by reason.

All functions work on a control row (`env.control`), plain Python here, compiled in the kernel.
"""

import math

from env.codes import BACKGROUND, DONE, NORMAL, NOT_ARRIVED, PAUSED, PENDING, RUNNING
from env.guard import PAUSED_ALL, kept_off, least_service

STRANDED, DWELL, SHARING, MEMORY, PAUSE_FLAP, MOVE_FLAP, HICCUP, GUARD = (1 << n for n in range(8))
REASONS = {
    STRANDED: "memcached would have had no vCPU",
    DWELL: "memcached keeps its vCPUs for the dwell time",
    SHARING: "the job would have disturbed memcached on its vCPUs",
    MEMORY: "the machine's memory cannot hold one more job",
    PAUSE_FLAP: "the job was paused only just before",
    MOVE_FLAP: "the job's vCPUs changed only just before",
    HICCUP: "memcached was busier within the last second",
    GUARD: "the SLO guard protects memcached",
}

SMOOTH_S = 0.1  # loads and CPU use count as means over so long: four polls
PEAK_S = 0.5  # length of one of the PEAKS stretches; they cover the last 1 to 1.5 s
PEAK_SLACK = 0.1  # the share of a load that a single poll's reading may be off by
MOST_USE = 0.95  # of the vCPUs that memcached would keep


def overrule(control, reason):
    """
    Count an overruling and note its reason.

    :param control: a control row (`env.control`)
    :param reason: one of `REASONS`
    """
    control.overruled += 1
    control.overruled_reasons |= reason


def note_use(control, qps, cpu_cores, span_s):
    """
    Take in memcached's load and CPU use over a stretch of time, for their peaks.

    :param control: a control row (`env.control`)
    :param qps: its mean load [requests/s]
    :param cpu_cores: its mean CPU use [vCPUs]
    :param span_s: the length of the stretch, which ends now [s]
    """
    weight = -math.expm1(-span_s / SMOOTH_S)
    control.smooth_qps += (qps - control.smooth_qps) * weight
    control.smooth_cpu_cores += (cpu_cores - control.smooth_cpu_cores) * weight
    ended = int((control.now_s - control.peaks_began_s) / PEAK_S)
    control.peaks_began_s += ended * PEAK_S
    last = len(control.peaks_qps) - 1
    for _ in range(min(ended, last + 1)):
        for age in range(last, 0, -1):
            control.peaks_qps[age] = control.peaks_qps[age - 1]
            control.peaks_cpu_cores[age] = control.peaks_cpu_cores[age - 1]
        control.peaks_qps[0] = control.peaks_cpu_cores[0] = 0.0
    control.peaks_qps[0] = max(control.peaks_qps[0], control.smooth_qps)
    control.peaks_cpu_cores[0] = max(control.peaks_cpu_cores[0], control.smooth_cpu_cores)
    control.peak_qps, control.peak_cpu_cores = control.peaks_qps[0], control.peaks_cpu_cores[0]
    for age in range(1, last + 1):
        control.peak_qps = max(control.peak_qps, control.peaks_qps[age])
        control.peak_cpu_cores = max(control.peak_cpu_cores, control.peaks_cpu_cores[age])


def was_busier(control, service):
    """
    Whether memcached needed more than some vCPUs within the last second.

    A load that stalls and catches up is not a lower load, and CPU use may peak without one.

    :param control: a control row (`env.control`)
    :param service: the vCPUs, a bit mask
    """
    kept = 0
    for vcpu in range(control.n_vcpus):
        kept += (service >> vcpu) & 1
    fell_by = control.peak_qps * (1.0 - PEAK_SLACK) - control.qps
    return control.peak_cpu_cores > MOST_USE * kept or fell_by > control.wake_qps


def regulate_service(control):
    """
    Decide memcached's vCPUs: it grows at once, and shrinks only after the dwell time.

    It shrinks after a second without a peak only, and under the guard it has its refuge or more.

    :param control: a control row (`env.control`)
    """
    control.overruled_reasons = 0
    service = control.desired_service & ((1 << control.n_vcpus) - 1)
    if service == 0:
        service = control.service
        overrule(control, STRANDED)
    least = least_service(control)
    if least & ~service != 0:
        service |= least
        overrule(control, GUARD)
    leaving = control.service & ~service
    if leaving != 0 and control.now_s - control.grown_at_s < control.service_dwell_s:
        service |= leaving
        overrule(control, DWELL)
    elif leaving != 0 and was_busier(control, service):
        service |= leaving
        overrule(control, HICCUP)
    if service & ~control.service != 0:
        control.grown_at_s = control.now_s
    control.service = service


def regulate_jobs(control):
    """
    Decide each job's state, vCPUs, weight, threads and quota, once memcached's vCPUs are decided.

    :param control: a control row (`env.control`)
    """
    memory_free = control.memory_mib
    for job in range(len(control.state)):
        if control.job_state[job] == DONE:
            control.state[job] = DONE
        elif control.state[job] != PENDING:
            memory_free -= control.job_memory_mib[job]
    for job in range(len(control.state)):
        if control.state[job] == DONE or control.job_state[job] == NOT_ARRIVED:
            continue
        state = control.desired_state[job]
        if control.state[job] == PENDING:
            if state != RUNNING:
                continue
            if control.guard_level == PAUSED_ALL:
                overrule(control, GUARD)
                continue
            if control.job_memory_mib[job] > memory_free:
                overrule(control, MEMORY)
                continue
            memory_free -= control.job_memory_mib[job]
            control.threads[job] = control.desired_threads[job]
        elif state == PENDING:
            state = control.state[job]
        state = hold_pause(control, job, state)
        if state == RUNNING and control.guard_level == PAUSED_ALL:
            state = PAUSED
            overrule(control, GUARD)
        state = place(control, job, state)
        if state == PAUSED and control.state[job] == RUNNING:
            control.paused_at_s[job] = control.now_s
        control.state[job] = state
        control.quota[job] = control.desired_quota[job]


def hold_pause(control, job, state):
    """
    Refuse to pause a job again before its dwell time has passed.

    :param control: a control row (`env.control`)
    :param job: index of the job
    :param state: the desired state
    :return: the state that the job may have
    """
    if (
        state == PAUSED
        and control.state[job] == RUNNING
        and control.now_s - control.paused_at_s[job] < control.pause_dwell_s
    ):
        overrule(control, PAUSE_FLAP)
        return RUNNING
    return state


def place(control, job, state):
    """
    Keep a job off memcached's vCPUs unless it may share them, and its vCPUs from flapping.

    Those that the guard wants free are closed to it in any case. Where memcached holds every vCPU,
    a job that may share, and is not to pause, runs in the background meanwhile: where it is, if
    memcached holds more than was desired and will soon give it back.

    :param control: a control row (`env.control`)
    :param job: index of the job
    :param state: the state that the job is to have
    :return: the same, or that of a job for which memcached leaves no vCPU
    """
    everything = (1 << control.n_vcpus) - 1
    weight = control.desired_weight[job]
    wanted = control.desired_cores[job] & everything
    if wanted == 0:
        wanted = everything
    cores = wanted
    apart = weight == NORMAL or control.share_service_cores == 0
    closed = kept_off(control) | (control.service if apart else 0)
    if cores & closed != 0:
        overrule(control, SHARING if apart and cores & control.service != 0 else GUARD)
        cores = cores & ~closed
        if cores == 0:
            cores = everything & ~closed
        shares = control.share_service_cores != 0 and kept_off(control) == 0
        if cores == 0 and shares and control.desired_state[job] == RUNNING:
            for_a_while = control.service & ~control.desired_service != 0
            stays = for_a_while and control.state[job] == RUNNING
            cores = control.cores[job] if stays else wanted
            weight, closed = BACKGROUND, 0
        # Where nothing is left for it, a job leaves whatever its dwell time says.
        if cores == 0:
            return PAUSED if control.state[job] != PENDING else PENDING
    if (
        control.state[job] == RUNNING
        and cores != control.cores[job]
        and control.now_s - control.moved_at_s[job] < control.move_dwell_s
        and control.cores[job] & closed == 0
    ):
        overrule(control, MOVE_FLAP)
        cores = control.cores[job]
    if cores != control.cores[job]:
        control.moved_at_s[job] = control.now_s
    control.cores[job] = cores
    control.weight[job] = weight
    return state


def pass_through(control):
    """
    Apply the desired allocation as it stands, to run published controllers as published.

    :param control: a control row (`env.control`)
    """
    control.overruled_reasons = 0
    control.guarded = control.guard_level = 0
    if control.desired_service != 0:
        control.service = control.desired_service
    for job in range(len(control.state)):
        if control.job_state[job] == NOT_ARRIVED:
            continue
        if control.job_state[job] == DONE:
            control.state[job] = DONE
        elif control.desired_state[job] == RUNNING or (
            control.desired_state[job] == PAUSED and control.state[job] != PENDING
        ):
            if control.state[job] == PENDING:
                control.threads[job] = control.desired_threads[job]
            control.state[job] = control.desired_state[job]
            control.cores[job] = control.desired_cores[job]
            control.weight[job] = control.desired_weight[job]
            control.quota[job] = control.desired_quota[job]
