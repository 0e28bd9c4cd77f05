"""
An allocation: who holds which vCPUs, as a value that validates itself and lists its changes.

Core sets are tuples of vCPU numbers here and bit masks in the arrays of the kernel.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from env import codes
from env.scenario import Scenario


class JobState(IntEnum):
    """Where a job stands; `RUNNING` includes a container that is still starting."""

    PENDING = codes.PENDING
    RUNNING = codes.RUNNING
    PAUSED = codes.PAUSED
    DONE = codes.DONE
    NOT_ARRIVED = codes.NOT_ARRIVED


IDLE = (JobState.PENDING, JobState.DONE, JobState.NOT_ARRIVED)


class Weight(IntEnum):
    """CPU weight: `BACKGROUND` yields to everything else, `NORMAL` equals memcached's."""

    BACKGROUND = codes.BACKGROUND
    NORMAL = codes.NORMAL


LEAST_QUOTA = 0.01
"""The smallest CPU quota [vCPUs]: 1000 µs of a period of 100 ms, the kernel's own limit."""


@functools.lru_cache(maxsize=4096)
def mask_of(cores: tuple[int, ...]) -> int:
    """
    The bit mask of a core set.

    :param cores: vCPU numbers
    """
    mask = 0
    for core in cores:
        mask |= 1 << core
    return mask


@functools.lru_cache(maxsize=4096)
def cores_of(mask: int) -> tuple[int, ...]:
    """
    The core set of a bit mask, in rising order.

    :param mask: bit n stands for vCPU n
    """
    return tuple(core for core in range(mask.bit_length()) if mask >> core & 1)


@dataclass(frozen=True)
class JobAllocation:
    """
    What one job has.

    :param state: where the job stands
    :param cores: its vCPUs
    :param weight: its CPU weight
    :param threads: thread count, fixed once the job was launched
    :param quota: most CPU time that it gets [vCPUs]; None for no limit
    """

    state: JobState = JobState.PENDING
    cores: tuple[int, ...] = ()
    weight: Weight = Weight.NORMAL
    threads: int = 0
    quota: float | None = None


@dataclass(frozen=True)
class Change:
    """
    One thing to actuate; what the change does not need has its default.

    :param what: one of service-cores, start, cores, weight, quota, pause, resume
    :param job: the job's name; empty for memcached
    :param cores: numbers of the vCPUs
    :param weight: CPU weight
    :param threads: thread count
    :param quota: most CPU time [vCPUs]; None for no limit
    """

    what: str
    job: str = ""
    cores: tuple[int, ...] = ()
    weight: Weight = Weight.NORMAL
    threads: int = 0
    quota: float | None = None


@dataclass(frozen=True)
class Allocation:
    """
    memcached's vCPUs and each job's allocation.

    :param service_cores: memcached's vCPUs
    :param jobs: the jobs' allocations by name
    """

    service_cores: tuple[int, ...]
    jobs: Mapping[str, JobAllocation] = field(default_factory=dict)

    def validate(self, scenario: Scenario) -> "Allocation":
        """
        This allocation, if the scenario's machine could hold it.

        :param scenario: the machine and the jobs
        :raises ValueError: naming the job and the fault
        """
        vcpus = scenario.machine.vcpus
        _check_cores("memcached", self.service_cores, vcpus)
        known = {job.name: job.threads for job in scenario.jobs}
        for name, job in self.jobs.items():
            if name not in known:
                raise ValueError(f"{name}: unknown job; known: {', '.join(known)}")
            if job.state in IDLE:
                continue
            _check_cores(name, job.cores, vcpus)
            if job.threads not in known[name]:
                raise ValueError(f"{name}: {job.threads} threads; allowed are {known[name]}")
            if job.quota is not None and not LEAST_QUOTA <= job.quota <= vcpus:
                raise ValueError(
                    f"{name}: quota {job.quota:g}; allowed are {LEAST_QUOTA:g} to "
                    f"{vcpus} vCPUs, or none"
                )
        return self

    def changes_from(self, current: "Allocation") -> tuple[Change, ...]:
        """
        What to actuate to get from `current` to this allocation.

        :param current: the allocation in force, over the same jobs
        """
        changes: list[Change] = []
        if set(self.service_cores) != set(current.service_cores):
            changes.append(Change("service-cores", cores=self.service_cores))
        for name, desired in self.jobs.items():
            changes.extend(_job_changes(name, current.jobs.get(name, JobAllocation()), desired))
        return tuple(changes)


def _check_cores(name: str, cores: tuple[int, ...], vcpus: int) -> None:
    allowed = range(vcpus)
    if not cores or not all([core in allowed for core in cores]):  # noqa: C419 - half the time
        raise ValueError(f"{name}: cores {cores} are none of {list(range(vcpus))}")


def _job_changes(name: str, now: JobAllocation, desired: JobAllocation) -> list[Change]:
    running, paused = JobState.RUNNING, JobState.PAUSED
    if now.state == JobState.DONE or desired.state not in (running, paused):
        return []
    if now.state == JobState.PENDING:
        if desired.state == paused:
            return []
        return [
            Change("start", name, desired.cores, desired.weight, desired.threads, desired.quota)
        ]
    changes = []
    if set(desired.cores) != set(now.cores):
        changes.append(Change("cores", name, cores=desired.cores))
    if desired.weight != now.weight:
        changes.append(Change("weight", name, weight=desired.weight))
    if desired.quota != now.quota:
        changes.append(Change("quota", name, quota=desired.quota))
    if desired.state != now.state:
        changes.append(Change("pause" if desired.state == paused else "resume", name))
    return changes
