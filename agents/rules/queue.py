"""A queue of jobs for the vCPUs that memcached leaves."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from agents.policy import Controller, CpuThreshold, Parameters, unfinished
from env.allocation import Allocation, JobAllocation
from env.errors import InputError
from env.scenario import Scenario, profile_work_s
from env.telemetry import Telemetry


class QueueParameters(Parameters):
    """
    Who comes first, and how much one job gets.

    :param threshold: memcached's CPU use [vCPUs] above which it gets its largest set
    :param order: the jobs that came first are first, or those with the least work
    :param width: vCPUs that one of several jobs gets at most, on 4 vCPUs
    """

    threshold: PositiveFloat
    order: Literal["arrival", "work"]
    width: PositiveInt


class Queue(Controller[QueueParameters]):
    """
    First come, first served, or shortest job first, on vCPUs of their own.

    What a batch queue does on the vCPUs that are free: each job in its turn gets as many as it can
    use, up to a width, and the others wait. No job that runs is stopped for another one, but for
    memcached, whose vCPUs follow the rule of `agents.rules.threshold_groups`. Vcpus for which no
    job waits go to those that run. `order: work` needs to know the jobs' work beforehand.
    """

    schema = QueueParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self._service = CpuThreshold(self.parameters.threshold)

    def _see_jobs(self, scenario: Scenario) -> None:
        super()._see_jobs(scenario)
        if self.parameters.order == "work":
            work_s = profile_work_s(scenario.profile)
            for job in self.job_names:
                if job not in work_s:
                    raise InputError(
                        f"policy {self.name}: must know the work of each job; profile "
                        f"{scenario.profile} does not have that of {job}"
                    )
            self.job_names = tuple(sorted(self.job_names, key=lambda job: work_s[job]))

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Deal the vCPUs out."""
        service = self._service.choose(telemetry, self.scenario)
        free = list(self.others(service))
        queue = self.launched_first(unfinished(telemetry, self.job_names), telemetry)
        most = {job: self.threads(job, len(self.vcpus)) for job in queue}
        dealt: dict[str, list[int]] = {job: [] for job in queue}
        for width in (self.scaled(self.parameters.width), len(self.vcpus)):
            for job in queue:
                while free and len(dealt[job]) < min(width, most[job]):
                    dealt[job].append(free.pop())
        jobs: dict[str, JobAllocation] = {}
        for job, cores in dealt.items():
            jobs |= self.spread(telemetry, [job], tuple(sorted(cores)), most[job])
        return Allocation(service, jobs)
