"""A vCPU of light jobs that memcached takes over, pausing them, and hands back."""

from pydantic import PositiveFloat, PositiveInt, model_validator

from agents.policy import Controller, CounterRate, Parameters, unfinished
from env.allocation import Allocation, JobAllocation, JobState
from env.scenario import Scenario
from env.telemetry import Telemetry


class HysteresisPauseParameters(Parameters):
    """
    When the shared vCPU changes hands, and the lanes.

    :param take_above: memcached's CPU use [vCPUs] above which it takes the shared vCPU
    :param return_below: memcached's CPU use [vCPUs] below which it hands it back
    :param heavy: thread counts by job, in order, of the jobs on vCPUs of their own
    :param light: thread counts by job, in order, of the jobs on the shared vCPU
    """

    take_above: PositiveFloat
    return_below: PositiveFloat
    heavy: dict[str, PositiveInt]
    light: dict[str, PositiveInt]

    @model_validator(mode="after")
    def _apart(self) -> "HysteresisPauseParameters":
        if self.return_below > self.take_above:
            raise ValueError(f"return_below: must be at most take_above ({self.take_above})")
        return self


class HysteresisPause(Controller[HysteresisPauseParameters]):
    """
    The controller of the project page "Dynamic Scheduling for Latency-Critical [...]" (2025).

    vCPU 0 is memcached's. vCPU 1 runs light jobs, one after another; when memcached's CPU use
    passes 35 % of a vCPU they are paused and memcached takes vCPU 1, and below 30 % they resume
    there. vCPUs 2 and 3 run the heavy jobs throughout, one after another.

    The page tells neither period nor lanes. Assumed: a 1 s CPU window as in its course's other
    controllers; freqmine, ferret, canneal and vips are heavy; light jobs that are left when the
    heavy ones are done move to their vCPUs.
    """

    schema = HysteresisPauseParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.require_jobs([*self.parameters.heavy, *self.parameters.light])
        self._cpu = CounterRate()
        self._lent = tuple(core for core in self.most if core not in self.least)
        self._taken = True

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Move the shared vCPU between memcached and the light jobs."""
        rule = self.parameters
        used = self._cpu.rate(telemetry.time_s, telemetry.service.cpu_s)
        if used is not None:
            self._taken = used > (rule.return_below if self._taken else rule.take_above)
        jobs = {}
        apart = self.others(self.most)
        heavy = unfinished(telemetry, rule.heavy)[:1]
        light = unfinished(telemetry, rule.light)[:1]
        for job in heavy:
            jobs[job] = self.running(job, apart, rule.heavy[job])
        for job in light:
            jobs[job] = self.running(job, self._lent if heavy else apart, rule.light[job])
            if heavy and self._taken:
                jobs[job] = self._paused(job, telemetry)
        return Allocation(self.most if self._taken else self.least, jobs)

    def _paused(self, job: str, telemetry: Telemetry) -> JobAllocation:
        """A light job while memcached has its vCPU: paused, or not yet started."""
        if telemetry.applied.jobs[job].state == JobState.PENDING:
            return JobAllocation()
        return JobAllocation(JobState.PAUSED, self._lent, threads=self.parameters.light[job])
