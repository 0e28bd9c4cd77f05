"""
A vCPU each for background jobs that are as many as the vCPUs they share.

Left to the kernel, two jobs sat on one vCPU for seconds while the other was idle between
memcached's requests: work is seldom moved to a vCPU that is idle for microseconds. With a vCPU
each there is always somebody who takes what memcached leaves (docs/decisions.md).
"""

from collections.abc import Mapping
from dataclasses import replace

from env.allocation import Allocation, JobAllocation, JobState, Weight

Cores = tuple[int, ...]


def spread(allocation: Allocation, before: Mapping[str, Cores]) -> Allocation:
    """
    The allocation with a vCPU for each running job, where that leaves none without a job.

    So it does if all have one thread, no quota, the background's weight and the same vCPUs, and are
    as many as these. Any other allocation is returned as it is: what a job that has a vCPU too many
    or a thread too few leaves idle is for the others.

    :param allocation: who holds what
    :param before: vCPUs that jobs have; one that has a vCPU of its own keeps it
    """
    running = {name: job for name, job in allocation.jobs.items() if job.state == JobState.RUNNING}
    if len({job.cores for job in running.values()}) != 1:
        return allocation
    cores = next(iter(running.values())).cores
    if len(running) != len(cores) or not all(map(_can_be_alone, running.values())):
        return allocation
    own: dict[str, Cores] = {}
    for name in running:
        kept = before.get(name, ())
        if len(kept) == 1 and set(kept) <= set(cores) and kept not in own.values():
            own[name] = kept
    free = iter([(core,) for core in cores if (core,) not in own.values()])
    alone = {
        name: replace(job, cores=own[name] if name in own else next(free))
        for name, job in running.items()
    }
    return replace(allocation, jobs={**allocation.jobs, **alone})


def _can_be_alone(job: JobAllocation) -> bool:
    return job.weight == Weight.BACKGROUND and job.threads == 1 and job.quota is None
