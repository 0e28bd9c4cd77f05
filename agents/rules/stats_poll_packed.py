"""memcached's own request counter, polled fast, and single-threaded jobs packed one a vCPU."""

from pydantic import PositiveFloat, PositiveInt

from agents.policy import Controller, CounterRate, Parameters, unfinished
from env.allocation import Allocation, JobAllocation, JobState
from env.scenario import Scenario
from env.telemetry import Telemetry


class StatsPollPackedParameters(Parameters):
    """
    When memcached grows, and the order of the jobs.

    :param threshold_qps: request rate above which memcached gets its largest set [requests/s]
    :param packed: jobs with one thread, one a vCPU, in order
    :param wide: jobs that run afterwards on all free vCPUs, in order
    :param wide_threads: thread count of those
    :param service_stays: whether memcached keeps its largest set all the time
    """

    threshold_qps: PositiveFloat
    packed: tuple[str, ...]
    wide: tuple[str, ...]
    wide_threads: PositiveInt
    service_stays: bool


class StatsPollPacked(Controller[StatsPollPackedParameters]):
    """
    The controller with the best public figures of 2025 (group ImaGoodFella).

    memcached's `stats` are polled every 0.1 s. Above 110K requests/s vCPU 1 is memcached's,
    else the jobs may have it. First canneal, blackscholes, radix and dedup with 1 thread each,
    one a vCPU; the one on vCPU 1 is paused when memcached needs it, and goes on there or on the
    next vCPU that falls free. Then freqmine, ferret and vips, one after another: 3 threads on
    every vCPU that is free (the order of its logs).

    It set the affinity of memcached's main thread only, so the workers stayed on vCPUs 0 and 1
    throughout and shared vCPU 1 with the jobs: `stats-poll-packed-as-run` does the same.
    """

    schema = StatsPollPackedParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.require_jobs([*self.parameters.packed, *self.parameters.wide])
        self._requests = CounterRate()
        # vCPUs that are never memcached's come first.
        self._order = [*self.others(self.most), *(c for c in self.most if c not in self.least)]

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Fill the vCPUs that memcached does not need."""
        rule = self.parameters
        rate = self._requests.rate(telemetry.time_s, telemetry.service.requests)
        reserved = rate is None or rate > rule.threshold_qps
        free = [core for core in self._order if not (reserved and core in self.most)]
        jobs = self._packed(telemetry, free)
        for job in unfinished(telemetry, rule.wide)[:1]:
            if free:
                jobs[job] = self.running(job, tuple(sorted(free)), rule.wide_threads)
            elif telemetry.applied.jobs[job].state != JobState.PENDING:
                jobs[job] = JobAllocation(
                    JobState.PAUSED,
                    telemetry.applied.jobs[job].cores,
                    threads=self.threads(job, rule.wide_threads),
                )
        service = self.most if reserved or rule.service_stays else self.least
        return Allocation(service, jobs)

    def _packed(self, telemetry: Telemetry, free: list[int]) -> dict[str, JobAllocation]:
        """
        Single-threaded jobs, one a vCPU.

        :param telemetry: what the machine shows
        :param free: vCPUs that jobs may have; those that are taken here are removed
        """
        applied = telemetry.applied.jobs
        left = unfinished(telemetry, self.parameters.packed)
        jobs, waiting, pending = {}, [], []
        for job in left:
            now = applied[job]
            if now.state == JobState.PENDING:
                pending.append(job)
            elif now.state == JobState.RUNNING and len(now.cores) == 1 and now.cores[0] in free:
                free.remove(now.cores[0])
                jobs[job] = self.running(job, now.cores, 1)
            else:
                waiting.append(job)
        for job in waiting + pending:
            if free:
                jobs[job] = self.running(job, (free.pop(0),), 1)
            elif job in waiting:
                jobs[job] = JobAllocation(JobState.PAUSED, applied[job].cores, threads=1)
        return jobs
