"""A vCPU of light jobs that memcached takes over, pausing them, and hands back."""

from pydantic import PositiveFloat, PositiveInt, model_validator

from agents.policy import Controller, CounterRate, Parameters, unfinished
from env.allocation import Allocation, JobAllocation
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

    @property
    def planned_jobs(self) -> tuple[str, ...]:
        """See `Parameters.planned_jobs`."""
        return (*self.heavy, *self.light)

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
    heavy ones are done move to their vCPUs. Of other jobs the longer half is heavy.
    """

    schema = HysteresisPauseParameters
    plans = True

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self._heavy, self._light = dict(self.parameters.heavy), dict(self.parameters.light)
        if not self.has_plan():
            order = self.longest_first(self.job_names)
            half = -(-len(order) // 2)
            self._heavy = dict.fromkeys(order[:half], self.scaled(2))
            self._light = dict.fromkeys(order[half:], 1)
        self._cpu = CounterRate()
        self._lent = tuple(core for core in self.most if core not in self.least)
        self._taken = True

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Move the shared vCPU between memcached and the light jobs."""
        rule = self.parameters
        used = self._cpu.rate(telemetry.time_s, telemetry.service.cpu_s)
        if used is not None:
            self._taken = used > (rule.return_below if self._taken else rule.take_above)
        jobs: dict[str, JobAllocation] = {}
        apart = self.others(self.most) or self._lent
        heavy, light = (
            self.launched_first(unfinished(telemetry, lane), telemetry)[:1]
            for lane in (self._heavy, self._light)
        )
        for job in heavy:
            jobs |= self.spread(telemetry, [job], apart, self._heavy[job])
        for job in light:
            lent = () if self._taken else self._lent
            cores = lent if heavy else apart
            jobs[job] = JobAllocation()  # not yet started, if it finds no vCPU
            jobs |= self.spread(telemetry, [job], cores, self._light[job])
        return Allocation(self.most if self._taken else self.least, jobs)
