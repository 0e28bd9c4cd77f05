"""
What a real VM lets a policy see at one moment. The simulator may show nothing else.

What is made anew at every poll is a named tuple, which takes half the time of a dataclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from env.allocation import Allocation, JobState


class Stages(NamedTuple):
    """
    Where a process's requests spend their time, as the latency tap tells it apart.

    :param wait_us: 95th percentile of the time until the process reads them [µs]
    :param service_us: 95th percentile of the time from there to the answer [µs]; a proxy's is that
        of its members, too
    """

    wait_us: float
    service_us: float


class ServiceTelemetry(NamedTuple):
    """
    memcached, as schedstat and its own `stats` show it.

    :param requests: requests served since the loop started
    :param cpu_s: CPU seconds used since the loop started
    :param run_delay_s: seconds its threads waited for a vCPU since the loop started
    :param qps: request rate over the last polling window [requests/s]
    :param cpu_cores: CPU use over the last polling window [vCPUs]
    :param peak_qps: largest request rate of the last second or more, smoothed [requests/s]
    :param peak_cpu_cores: largest CPU use of the same time, smoothed [vCPUs]
    :param p95_us: 95th percentile of latency over the policy's probe window [µs], where a probe
        runs
    :param cpi: cycles per instruction over the same window, where the machine counts them;
        simulated: relative to memcached alone
    :param wait_us: 95th percentile of the time that requests wait until memcached reads them [µs],
        where the latency tap tells it apart. A long one asks for vCPUs
    :param service_us: 95th percentile of the time from there to the answer [µs], likewise. A long
        one says that somebody disturbs memcached
    :param members: both by member of a group, likewise; None of one that has answered nothing
    """

    requests: float
    cpu_s: float
    run_delay_s: float
    qps: float
    cpu_cores: float
    peak_qps: float = 0.0
    peak_cpu_cores: float = 0.0
    p95_us: float | None = None
    cpi: float | None = None
    wait_us: float | None = None
    service_us: float | None = None
    members: tuple[Stages | None, ...] = ()


class JobTelemetry(NamedTuple):
    """
    One job.

    :param state: where the job stands
    :param cpu_s: CPU seconds that its container has used
    """

    state: JobState
    cpu_s: float


@dataclass(frozen=True)
class Telemetry:
    """
    A snapshot of the machine.

    :param time_s: seconds since the loop started, from a monotonic clock
    :param service: memcached
    :param vcpu_busy_s: busy seconds of each vCPU since the loop started
    :param jobs: the jobs by name
    :param applied: the allocation that was last sent to the actuator
    :param guard_level: the SLO guard's level (`env.guard`), 0 while it lets the policy be
    """

    time_s: float
    service: ServiceTelemetry
    vcpu_busy_s: tuple[float, ...]
    jobs: Mapping[str, JobTelemetry]
    applied: Allocation
    guard_level: int = 0
