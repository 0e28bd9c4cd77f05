"""
Who holds what: an immutable value that validates itself and yields its changes from another.

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


IDLE = (JobState.PENDING, JobState.DONE)


class Weight(IntEnum):
    """CPU weight: `BACKGROUND` yields to everything else, `NORMAL` equals memcached's."""

    BACKGROUND = codes.BACKGROUND
    NORMAL = codes.NORMAL


LEAST_QUOTA = 0.01
"""The smallest CPU quota [vCPUs]: 1000 µs of a period of 100 ms, the kernel's own limit."""


@functools.lru_cache(maxsize=4096)
def mask_of(cores: tuple[int, ...]) -> int:
    """The bit mask of a core set."""
    mask = 0
    for core in cores:
        mask |= 1 << core
    return mask


@functools.lru_cache(maxsize=4096)
def cores_of(mask: int) -> tuple[int, ...]:
    """The core set of a bit mask, in rising order."""
    return tuple(core for core in range(mask.bit_length()) if mask >> core & 1)


@dataclass(frozen=True)
class JobAllocation:
    """
    What one job has.

    :param threads: fixed once it was launched
    :param quota: most CPU time it gets [vCPUs]; None is no limit
    """

    state: JobState = JobState.PENDING
    cores: tuple[int, ...] = ()
    weight: Weight = Weight.NORMAL
    threads: int = 0
    quota: float | None = None


@dataclass(frozen=True)
class Change:
    """
    One thing to actuate.

    `what` is one of service-cores, start, cores, weight, quota, pause, resume.
    """

    what: str
    job: str = ""
    cores: tuple[int, ...] = ()
    weight: Weight = Weight.NORMAL
    threads: int = 0
    quota: float | None = None


@dataclass(frozen=True)
class Allocation:
    """memcached's vCPUs and each job's allocation."""

    service_cores: tuple[int, ...]
    jobs: Mapping[str, JobAllocation] = field(default_factory=dict)

    def validate(self, scenario: Scenario) -> "Allocation":
        """
        This allocation, if the scenario's machine could hold it.

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
        What to actuate to get from `current` to this; nothing that is already true.

        :param current: the allocation in force, over the same jobs
        """
        changes: list[Change] = []
        if set(self.service_cores) != set(current.service_cores):
            changes.append(Change("service-cores", cores=self.service_cores))
        for name, wanted in self.jobs.items():
            changes.extend(_job_changes(name, current.jobs.get(name, JobAllocation()), wanted))
        return tuple(changes)


def _check_cores(name: str, cores: tuple[int, ...], vcpus: int) -> None:
    allowed = range(vcpus)
    if not cores or not all([core in allowed for core in cores]):  # noqa: C419 - half the time
        raise ValueError(f"{name}: cores {cores} are none of {list(range(vcpus))}")


def _job_changes(name: str, now: JobAllocation, wanted: JobAllocation) -> list[Change]:
    running, paused = JobState.RUNNING, JobState.PAUSED
    if now.state == JobState.DONE or wanted.state not in (running, paused):
        return []
    if now.state == JobState.PENDING:
        if wanted.state == paused:
            return []
        return [Change("start", name, wanted.cores, wanted.weight, wanted.threads, wanted.quota)]
    changes = []
    if set(wanted.cores) != set(now.cores):
        changes.append(Change("cores", name, cores=wanted.cores))
    if wanted.weight != now.weight:
        changes.append(Change("weight", name, weight=wanted.weight))
    if wanted.quota != now.quota:
        changes.append(Change("quota", name, quota=wanted.quota))
    if wanted.state != now.state:
        changes.append(Change("pause" if wanted.state == paused else "resume", name))
    return changes
