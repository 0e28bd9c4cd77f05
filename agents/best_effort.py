"""All jobs as one best-effort workload with a CPU budget, as the peers' rules see them."""

import math
from abc import ABC
from dataclasses import replace
from typing import TypeVar

from pydantic import PositiveInt

from agents.policy import Controller, Parameters, unfinished
from env.allocation import LEAST_QUOTA, JobAllocation, JobState, Weight
from env.telemetry import Telemetry


class BestEffortParameters(Parameters):
    """
    What every rule for best-effort work has.

    :param threads: thread count of every job on 4 vCPUs
    """

    threads: PositiveInt


Rule = TypeVar("Rule", bound=BestEffortParameters)


class BestEffortController(Controller[Rule], ABC):
    """
    A rule that sizes one best-effort workload, whatever jobs it consists of.

    The sources run one endless program; here all jobs run at once within what it would get.
    """

    def within_budget(self, telemetry: Telemetry, budget: float) -> dict[str, JobAllocation]:
        """
        The jobs that are left, on all vCPUs at background weight, within a budget of CPU time.

        The quota of each job is an equal part of the budget, but at least `LEAST_QUOTA`; without a
        budget the jobs are paused.

        :param telemetry: what the machine shows
        :param budget: CPU time of all jobs together [vCPUs]; infinite sets no quota
        :return: allocations by job name
        """
        if budget <= 0.0:
            return self.on_cores(telemetry, ())
        left = len(unfinished(telemetry, self.job_names))
        quota = None if math.isinf(budget) else max(LEAST_QUOTA, budget / max(left, 1))
        return self.on_cores(telemetry, self.vcpus, Weight.BACKGROUND, quota)

    def on_cores(
        self,
        telemetry: Telemetry,
        cores: tuple[int, ...],
        weight: Weight = Weight.NORMAL,
        quota: float | None = None,
    ) -> dict[str, JobAllocation]:
        """
        The jobs that are left, on given vCPUs; without vCPUs they are paused, or not started.

        :param telemetry: what the machine shows
        :param cores: the jobs' vCPUs
        :param weight: the jobs' CPU weight against memcached, where they share a vCPU
        :param quota: most CPU time of each job [vCPUs]; None for no limit
        :return: allocations by job name
        """
        jobs = {}
        for job in unfinished(telemetry, self.job_names):
            now = telemetry.applied.jobs[job]
            if cores:
                jobs[job] = self.running(
                    job, cores, self.scaled(self.parameters.threads), weight, quota
                )
            elif now.state != JobState.PENDING:
                jobs[job] = replace(now, state=JobState.PAUSED)
        return jobs
