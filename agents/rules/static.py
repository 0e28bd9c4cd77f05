"""A fixed allocation from a file."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from agents.policy import Controller, Parameters, unfinished
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError
from env.scenario import Scenario
from env.telemetry import Telemetry


class FixedJob(BaseModel):
    """
    What one job has.

    :param cores: its vCPUs
    :param threads: its thread count
    :param background: whether it has background weight
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cores: tuple[NonNegativeInt, ...]
    threads: PositiveInt
    background: bool = False


class StaticParameters(Parameters):
    """
    memcached's vCPUs and each job's place.

    :param service_cores: memcached's vCPUs; its largest set if there are none
    :param jobs: places by job name; a job that is not listed gets the vCPUs that memcached does not
        hold, and as many threads
    """

    service_cores: tuple[NonNegativeInt, ...] = ()
    jobs: dict[str, FixedJob] = Field(default_factory=dict)


class Static(Controller[StaticParameters]):
    """
    A partition that never changes: every job from the start, where the file says.

    The shipped one is what an operator does who sets cpusets once: memcached has the vCPUs that
    its highest load needs, the jobs share the others.
    """

    schema = StaticParameters
    plans = True

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        fixed = self.parameters
        service = fixed.service_cores or self.most
        rest = self.others(service) or self.vcpus
        self._jobs = {job: self.running(job, rest, len(rest)) for job in self.job_names}
        for job, place in fixed.jobs.items():
            weight = Weight.BACKGROUND if place.background else Weight.NORMAL
            self._jobs[job] = JobAllocation(JobState.RUNNING, place.cores, weight, place.threads)
        self._service = service
        try:
            Allocation(service, self._jobs).validate(scenario)
        except ValueError as error:
            raise InputError(f"policy {self.name}: {error}") from error

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Run all jobs that are not done."""
        left = unfinished(telemetry, self.job_names)
        return Allocation(self._service, {job: self._jobs[job] for job in left})
