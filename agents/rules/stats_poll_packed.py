"""memcached's own request counter, polled fast, and single-threaded jobs packed one a vCPU."""

from pydantic import PositiveFloat, PositiveInt

from agents.policy import Controller, CounterRate, Parameters, unfinished
from env.allocation import Allocation, JobAllocation, JobState
from env.scenario import Scenario, profile_traits
from env.telemetry import Telemetry

# The load for which the threshold was published, and the vCPUs of memcached's largest set there.
PUBLISHED_MOST_QPS, PUBLISHED_REFUGE = 180_000, 2


class StatsPollPackedParameters(Parameters):
    """
    When memcached grows, and the order of the published jobs.

    :param threshold_qps: request rate above which memcached gets its largest set [requests/s]
    :param packed: jobs with one thread, one a vCPU, in order
    :param wide: jobs that run afterwards on all free vCPUs, in order
    :param wide_threads: thread count of those on 4 vCPUs
    :param service_stays: whether memcached keeps its largest set all the time
    """

    threshold_qps: PositiveFloat
    packed: tuple[str, ...]
    wide: tuple[str, ...]
    wide_threads: PositiveInt
    service_stays: bool

    @property
    def planned_jobs(self) -> tuple[str, ...]:
        """See `Parameters.planned_jobs`."""
        return self.packed + self.wide


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

    Of other jobs the half that gains least from threads is packed, the longest first, which are
    the published ones in the published order; the threshold is then the same share of the load.
    """

    schema = StatsPollPackedParameters
    plans = True

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        rule = self.parameters
        self._packed_jobs, self._wide_jobs = rule.packed, rule.wide
        self._threshold_qps = rule.threshold_qps
        if not self.has_plan():
            self._plan(scenario)
        self._requests = CounterRate()
        # vCPUs that are never memcached's come first.
        self._order = [*self.others(self.most), *(c for c in self.most if c not in self.least)]

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Fill the vCPUs that memcached does not need."""
        rule = self.parameters
        rate = self._requests.rate(telemetry.time_s, telemetry.service.requests)
        reserved = rate is None or rate > self._threshold_qps
        free = [core for core in self._order if not (reserved and core in self.most)]
        jobs = self._packed(telemetry, free)
        wide = self.launched_first(unfinished(telemetry, self._wide_jobs), telemetry)[:1]
        jobs |= self.spread(telemetry, wide, tuple(sorted(free)), self.scaled(rule.wide_threads))
        service = self.most if reserved or rule.service_stays else self.least
        return Allocation(service, jobs)

    def _plan(self, scenario: Scenario) -> None:
        """Pack the jobs that gain least, and reserve vCPUs from the published share of the load."""
        traits = profile_traits(scenario.profile)
        by_gain = sorted(self.job_names, key=lambda job: -traits[job]["serial_fraction"])
        packed = by_gain[: -(-len(by_gain) // 2)]
        self._packed_jobs = tuple(self.longest_first(packed))
        self._wide_jobs = tuple(self.longest_first(set(by_gain) - set(packed)))
        part = self.parameters.threshold_qps / PUBLISHED_MOST_QPS * PUBLISHED_REFUGE
        self._threshold_qps = part * scenario.load.qps_max * len(self.least) / len(self.most)

    def _packed(self, telemetry: Telemetry, free: list[int]) -> dict[str, JobAllocation]:
        """
        Single-threaded jobs, one a vCPU.

        :param telemetry: what the machine shows
        :param free: vCPUs that jobs may have; those that are taken here are removed
        """
        applied = telemetry.applied.jobs
        left = unfinished(telemetry, self._packed_jobs)
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
