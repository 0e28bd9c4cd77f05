"""
The safety shell around any policy, the same in the simulator and on the machine.

It keeps four promises: memcached is never without a vCPU; memcached gets vCPUs at once and
gives them back only after a dwell time; no job runs with memcached's weight on memcached's
vCPUs (nor at any weight where sharing is forbidden); nothing flaps and no job starts that the
memory cannot hold. Each stage is a few lines; what it overruled is counted and kept by reason.

All functions work on a control row (`env.control`), plain Python here, compiled in the kernel.
"""

from env.codes import DONE, NORMAL, PAUSED, PENDING, RUNNING

STRANDED, DWELL, SHARING, MEMORY, PAUSE_FLAP, MOVE_FLAP = 1, 2, 4, 8, 16, 32
REASONS = {
    STRANDED: "memcached would have had no vCPU",
    DWELL: "memcached keeps its vCPUs for the dwell time",
    SHARING: "the job would have disturbed memcached on its vCPUs",
    MEMORY: "the machine's memory cannot hold one more job",
    PAUSE_FLAP: "the job was paused only just before",
    MOVE_FLAP: "the job's vCPUs changed only just before",
}


def overrule(control, reason):
    """
    Count an overruling and note its reason.

    :param control: a control row (`env.control`)
    :param reason: one of `REASONS`
    """
    control.overruled += 1
    control.overruled_reasons |= reason


def regulate_service(control):
    """
    Decide memcached's vCPUs: it grows at once, and shrinks only after the dwell time.

    :param control: a control row (`env.control`)
    """
    control.overruled_reasons = 0
    service = control.desired_service & ((1 << control.n_vcpus) - 1)
    if service == 0:
        service = control.service
        overrule(control, STRANDED)
    leaving = control.service & ~service
    if leaving != 0 and control.now_s - control.grown_at_s < control.service_dwell_s:
        service |= leaving
        overrule(control, DWELL)
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
        if control.state[job] == DONE:
            continue
        state = control.desired_state[job]
        if control.state[job] == PENDING:
            if state != RUNNING:
                continue
            if control.job_memory_mib[job] > memory_free:
                overrule(control, MEMORY)
                continue
            memory_free -= control.job_memory_mib[job]
            control.threads[job] = control.desired_threads[job]
        elif state == PENDING:
            state = control.state[job]
        state = hold_pause(control, job, state)
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

    :param control: a control row (`env.control`)
    :param job: index of the job
    :param state: the state that the job is to have
    :return: the same, or that of a job for which memcached leaves no vCPU
    """
    everything = (1 << control.n_vcpus) - 1
    weight = control.desired_weight[job]
    cores = control.desired_cores[job] & everything
    if cores == 0:
        cores = everything
    apart = weight == NORMAL or control.share_service_cores == 0
    if apart and cores & control.service != 0:
        cores = cores & ~control.service
        if cores == 0:
            cores = everything & ~control.service
        overrule(control, SHARING)
        # Where memcached holds the whole machine, a job leaves whatever its dwell time says.
        if cores == 0:
            return PAUSED if control.state[job] != PENDING else PENDING
    if (
        control.state[job] == RUNNING
        and cores != control.cores[job]
        and control.now_s - control.moved_at_s[job] < control.move_dwell_s
        and not (apart and control.cores[job] & control.service != 0)
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
    if control.desired_service != 0:
        control.service = control.desired_service
    for job in range(len(control.state)):
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
