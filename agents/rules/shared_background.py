"""No control at all: every job in the background of memcached."""

from pydantic import PositiveInt

from agents.policy import Controller, Parameters, unfinished
from env.allocation import Allocation, JobAllocation, Weight
from env.scenario import Scenario
from env.telemetry import Telemetry


class SharedBackgroundParameters(Parameters):
    """
    The lanes of the published jobs, and their thread counts on 4 vCPUs.

    :param alone: jobs that run first, one after another
    :param alone_threads: thread count of those
    :param beside: jobs on memcached's vCPUs, one after another
    :param apart: jobs on the other vCPUs, one after another
    :param paired_threads: thread count of the jobs in both lanes
    """

    alone: tuple[str, ...]
    alone_threads: PositiveInt
    beside: tuple[str, ...]
    apart: tuple[str, ...]
    paired_threads: PositiveInt

    @property
    def planned_jobs(self) -> tuple[str, ...]:
        """See `Parameters.planned_jobs`."""
        return self.alone + self.beside + self.apart


class SharedBackground(Controller[SharedBackgroundParameters]):
    """
    The fastest public schedule of 2024 (group frikai).

    memcached is on vCPUs 0 and 1, every job at cpu_shares 2. freqmine first, with 4 threads on
    all vCPUs. Then pairs with 2 threads each: ferret on memcached's vCPUs beside canneal,
    blackscholes, dedup, radix and vips, one after another, on the two others. The lane that is
    left alone gets all vCPUs. There is nothing to control: the period is how often it looks
    whether a job has ended. Of other jobs the longest runs alone, and the second longest beside
    memcached.
    """

    schema = SharedBackgroundParameters
    plans = True

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        rule = self.parameters
        self._lanes = rule.alone, rule.beside, rule.apart
        if not self.has_plan():
            order = tuple(self.longest_first(self.job_names))
            self._lanes = order[:1], order[1:2], order[2:]

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Run the next job of each lane."""
        rule = self.parameters
        alone, beside, apart = (
            self.launched_first(unfinished(telemetry, lane), telemetry)[:1] for lane in self._lanes
        )
        if alone:
            return Allocation(
                self.most, {job: self._shared(job, self.vcpus, rule.alone_threads) for job in alone}
            )
        jobs = {}
        for lane, other, cores in (
            (beside, apart, self.most),
            (apart, beside, self.others(self.most)),
        ):
            for job in lane:
                alone_on = cores if other and cores else self.vcpus
                jobs[job] = self._shared(job, alone_on, rule.paired_threads)
        return Allocation(self.most, jobs)

    def _shared(self, job: str, cores: tuple[int, ...], threads: int) -> JobAllocation:
        return self.running(job, cores, self.scaled(threads), Weight.BACKGROUND)
