"""All jobs as one best-effort workload with a CPU budget, as the peers' rules see them."""

from abc import ABC
from typing import TypeVar

from pydantic import PositiveInt

from agents.policy import Controller, Parameters, unfinished
from env.allocation import JobAllocation, JobState, Weight
from env.telemetry import Telemetry


class BestEffortParameters(Parameters):
    """Every job's thread count."""

    threads: PositiveInt


Rule = TypeVar("Rule", bound=BestEffortParameters)


class BestEffortController(Controller[Rule], ABC):
    """
    A rule that sizes one best-effort workload, whatever jobs it consists of.

    The sources run one endless program; here all jobs run at once within what it would get.
    """

    def within(
        self, telemetry: Telemetry, budget: float, weight: Weight
    ) -> dict[str, JobAllocation]:
        """
        The jobs that are left, within a budget of CPU time.

        Allocations have no CPU quota yet, so that the budget is rounded down to whole vCPUs,
        those first that memcached never holds; without any the jobs are paused.

        :param telemetry: what the machine shows
        :param budget: [vCPUs]
        :param weight: against memcached, where they share a vCPU
        """
        order = [*reversed(self.most), *reversed(self.others(self.most))]
        cores = tuple(sorted(order[max(0, len(order) - int(budget + 1e-9)) :]))
        return self.on(telemetry, cores, weight)

    def on(
        self, telemetry: Telemetry, cores: tuple[int, ...], weight: Weight = Weight.NORMAL
    ) -> dict[str, JobAllocation]:
        """
        The jobs that are left, on given vCPUs; paused, or not started, if there are none.

        :param telemetry: what the machine shows
        :param cores: their vCPUs
        :param weight: against memcached, where they share a vCPU
        """
        jobs = {}
        for job in unfinished(telemetry, self.job_names):
            now = telemetry.applied.jobs[job]
            threads = self.threads(job, self.parameters.threads)
            if cores:
                jobs[job] = JobAllocation(JobState.RUNNING, cores, weight, threads)
            elif now.state != JobState.PENDING:
                jobs[job] = JobAllocation(JobState.PAUSED, now.cores, now.weight, threads)
        return jobs
