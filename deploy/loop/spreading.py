"""
A vCPU each for background jobs that are as many as the vCPUs they share.

The kernel may keep two of them on one vCPU for seconds while another one is idle time and again,
between memcached's requests (docs/decisions.md). With a vCPU each, whatever memcached leaves on
any of them has somebody who takes it.
"""

from collections.abc import Mapping

from env.allocation import JobAllocation, Weight

Cores = tuple[int, ...]


def spread(running: Mapping[str, JobAllocation], before: Mapping[str, Cores]) -> dict[str, Cores]:
    """
    The vCPU that each job has to itself, by its name; empty where that might idle a vCPU.

    All have one if they have one thread, no quota, the background's weight and the same vCPUs, and
    are as many as these.

    :param running: all jobs that run
    :param before: the vCPU that each had to itself last; it keeps that unless another one has it
    """
    sets = {job.cores for job in running.values()}
    cores = next(iter(sets), ())
    if len(sets) != 1 or len(running) != len(cores) or not all(map(_fills_one, running.values())):
        return {}
    free: list[Cores] = [(core,) for core in cores]
    own: dict[str, Cores] = {}
    for name in running:
        if (kept := before.get(name)) in free:
            own[name] = kept
            free.remove(kept)
    return own | {name: free.pop(0) for name in running if name not in own}


def _fills_one(job: JobAllocation) -> bool:
    return job.weight == Weight.BACKGROUND and job.threads == 1 and job.quota is None
