"""
A vCPU each for background jobs that are as many as the vCPUs they share, where one is left idle.

The kernel may keep two of them on one vCPU for seconds while another one is idle time and again,
between memcached's requests (docs/decisions.md). With a vCPU each, whatever memcached leaves on
any of them has somebody who takes it.
"""

from collections.abc import Mapping

from deploy.linux.sensors import VcpuClock
from env.allocation import JobAllocation, Weight

Cores = tuple[int, ...]

LOOK_S = 0.25
"""How often is looked for an idle vCPU [s]."""

IDLE = 0.1
"""Part of the time between two looks in which a vCPU must have been idle. Kept apart, two jobs left
0.004 of one idle; on one vCPU, up to a quarter."""


class Spreading:
    """
    Who has a vCPU to itself, as long as the jobs that run stay as many as their vCPUs.

    :param vcpus: busy time of the vCPUs
    """

    def __init__(self, vcpus: VcpuClock):
        self._vcpus = vcpus
        self._own: dict[str, Cores] = {}
        self._names: list[str] = []  # who ran at the last look
        self._seen_s = 0.0
        self._busy_s: tuple[float, ...] = ()

    def own(self, running: Mapping[str, JobAllocation]) -> dict[str, Cores]:
        """
        The vCPU that each job has to itself, by its name; of no vCPU that it is not allocated.

        :param running: all jobs that run, with the vCPUs they are allocated
        """
        return {
            name: self._own[name]
            for name, job in running.items()
            if set(self._own.get(name, ())) & set(job.cores)
        }

    def look(self, running: Mapping[str, JobAllocation], now_s: float) -> None:
        """
        Have jobs apart that ran at the last look, too, and left a vCPU idle since.

        Another one that comes in the place of one that has ended goes where it likes, until a vCPU
        is idle. Where jobs are no longer as many as their vCPUs, nobody has one to itself.

        :param running: see `own`
        :param now_s: on any clock [s]
        """
        if not _apart(running):
            self._names, self._own = [], {}
            return
        before_s, busy_before_s = self._seen_s, self._busy_s
        self._seen_s, self._busy_s = now_s, self._vcpus.read()
        again, self._names = self._names == [*running], [*running]
        self._own = self.own(running)
        if again:
            most_s = (1.0 - IDLE) * (now_s - before_s)
            cores = next(iter(running.values())).cores
            if any(self._busy_s[core] - busy_before_s[core] < most_s for core in cores):
                self._own = spread(running, self._own)


def spread(running: Mapping[str, JobAllocation], before: Mapping[str, Cores]) -> dict[str, Cores]:
    """
    A vCPU for each job, by its name; empty where that might idle a vCPU.

    All have one if they have one thread, no quota, the background's weight and the same vCPUs, and
    are as many as these.

    :param running: all jobs that run
    :param before: the vCPU that each had to itself last; it keeps that unless another one has it
    """
    if not _apart(running):
        return {}
    free: list[Cores] = [(core,) for core in next(iter(running.values())).cores]
    own: dict[str, Cores] = {}
    for name in running:
        if (kept := before.get(name)) in free:
            own[name] = kept
            free.remove(kept)
    return own | {name: free.pop(0) for name in running if name not in own}


def _apart(running: Mapping[str, JobAllocation]) -> bool:
    """Whether these jobs may have a vCPU each."""
    sets = {job.cores for job in running.values()}
    cores = next(iter(sets), ())
    return len(sets) == 1 and len(running) == len(cores) and all(map(_fills_one, running.values()))


def _fills_one(job: JobAllocation) -> bool:
    return job.weight == Weight.BACKGROUND and job.threads == 1 and job.quota is None
