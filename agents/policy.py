"""
The one method every decision maker implements, and what the rule-based ones share.

A rule is a class with a `Parameters` model; its values, with their units and ranges, come from
a YAML file (`agents/parameters`), so that a published controller and a tuned copy of it differ
by a file.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from agents.parameter_files import what_fits
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError
from env.scenario import Scenario, profile_traits
from env.telemetry import Telemetry


class Policy(Protocol):
    """
    Whoever decides, in the simulator or on a machine.

    :param name: what tables call the policy
    :param period_s: seconds until the next decision; read after every decision
    :param wakes: whether a job's end, a move of the load or a step of the SLO guard ends it early
    :param regulated: whether the regulator stands between the policy and the actuator
    :param probe_window_s: seconds that a reading of latency or of cycles per instruction covers at
        least; 0 if the policy reads neither
    :param needs_cpi: whether the policy needs cycles per instruction, which few VMs count
    """

    name: str
    period_s: float
    wakes: bool
    regulated: bool
    probe_window_s: float
    needs_cpi: bool

    def reset(self, scenario: Scenario) -> None:
        """
        Begin a new episode.

        :param scenario: the problem
        :raises InputError: if the policy cannot run in this scenario
        """

    def change_jobs(self, scenario: Scenario) -> None:
        """
        Go on with other jobs, as where a queue is served; what is known of memcached stays known.

        :param scenario: the one of `reset` with other jobs, of which the profile may know nothing
        :raises InputError: if the policy cannot do that
        """

    def decide(self, telemetry: Telemetry) -> Allocation:
        """
        Who holds what from now on; jobs that are left out keep what they have.

        :param telemetry: what the machine shows now
        """


class Parameters(BaseModel):
    """
    What every rule has.

    :param period_s: seconds from one decision to the next
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    period_s: Annotated[float, Field(ge=0.001, le=3600.0)]  # as a scenario's

    @property
    def planned_jobs(self) -> tuple[str, ...]:
        """Names of the jobs in the rule's plan; empty for a rule without one."""
        return ()


Rule = TypeVar("Rule", bound=Parameters)

PUBLISHED_VCPUS = 4
"""The rules' numbers of threads are for machines of this size."""

NOTHING_TO_RUN = (JobState.DONE, JobState.NOT_ARRIVED)


class Controller(ABC, Generic[Rule]):
    """
    A rule of thumb, which decides once a period, whatever happens meanwhile.

    :param name: what tables call it
    :param parameters: thresholds, periods and job orders
    """

    schema: ClassVar[type[Parameters]]
    plans: ClassVar[bool] = False
    """Whether `reset` arranges all jobs beforehand, so that none may come later."""
    wakes = False
    regulated = True
    needs_cpi = False

    def __init__(self, name: str, parameters: Rule):
        self.name = name
        self.parameters = parameters
        self.period_s = parameters.period_s
        self.probe_window_s = 0.0

    def reset(self, scenario: Scenario) -> None:
        """See `Policy.reset`; begins a new episode."""
        self.vcpus = tuple(range(scenario.machine.vcpus))
        self.least, self.most = scenario.service.core_choices[0], scenario.service.core_choices[-1]
        self._see_jobs(scenario)

    def change_jobs(self, scenario: Scenario) -> None:
        """See `Policy.change_jobs`."""
        if self.plans:
            raise InputError(f"policy {self.name}: arranges its jobs beforehand")
        self._see_jobs(scenario)

    def _see_jobs(self, scenario: Scenario) -> None:
        """Take a scenario's jobs in: those that come first are first."""
        self.scenario = scenario
        arrival_s = {job.name: job.arrival_s for job in scenario.jobs}
        self.job_names = tuple(sorted(scenario.job_names, key=lambda job: arrival_s[job]))
        self.thread_choices = {job.name: job.threads for job in scenario.jobs}
        self._made: dict[tuple[object, ...], JobAllocation] = {}

    @abstractmethod
    def decide(self, telemetry: Telemetry) -> Allocation:
        """See `Policy.decide`; who holds what from now on."""

    def others(self, service: Iterable[int]) -> tuple[int, ...]:
        """
        The vCPUs that memcached does not hold.

        :param service: the vCPUs that memcached holds
        """
        return tuple(core for core in self.vcpus if core not in service)

    def threads(self, job: str, wanted: int) -> int:
        """
        The largest thread count up to `wanted` that a job allows, or else its smallest.

        :param job: the job's name
        :param wanted: number of threads
        """
        fitting = [count for count in self.thread_choices[job] if count <= wanted]
        return fitting[-1] if fitting else self.thread_choices[job][0]

    def running(
        self,
        job: str,
        cores: tuple[int, ...],
        wanted: int,
        weight: Weight = Weight.NORMAL,
        quota: float | None = None,
    ) -> JobAllocation:
        """
        The allocation of a job that runs.

        :param job: the job's name
        :param cores: its vCPUs
        :param wanted: number of threads to launch it with; see `threads`
        :param weight: its CPU weight against memcached, where they share a vCPU
        :param quota: most CPU time that it gets [vCPUs]; None for no limit
        """
        key = (job, cores, wanted, weight, quota)
        made = self._made.get(key)
        if made is None:  # a rule repeats a few allocations, and making one takes time
            threads = self.threads(job, wanted)
            made = JobAllocation(JobState.RUNNING, cores, weight, threads, quota)
            self._made[key] = made
        return made

    def scaled(self, count: int) -> int:
        """
        A number of threads or vCPUs that was chosen for 4 vCPUs, for this machine.

        :param count: the number for 4 vCPUs, on which nearly all rules were published
        """
        return -(-count * len(self.vcpus) // PUBLISHED_VCPUS)

    def spread(
        self, telemetry: Telemetry, jobs: Iterable[str], cores: tuple[int, ...], wanted: int
    ) -> dict[str, JobAllocation]:
        """
        Jobs that all run on the same vCPUs; without vCPUs they are paused, or not started.

        :param telemetry: what the machine shows
        :param jobs: names of the jobs
        :param cores: their vCPUs
        :param wanted: number of threads to launch each with; see `threads`
        """
        if cores:
            return {job: self.running(job, cores, wanted) for job in jobs}
        applied = telemetry.applied.jobs
        launched = [job for job in jobs if applied[job].state != JobState.PENDING]
        return {job: replace(applied[job], state=JobState.PAUSED) for job in launched}

    def launched_first(self, jobs: Iterable[str], telemetry: Telemetry) -> list[str]:
        """
        Those of the jobs that have been launched, then the others.

        :param jobs: names of the jobs, in an order that is kept among both
        :param telemetry: what the machine shows
        """
        applied = telemetry.applied.jobs
        return sorted(jobs, key=lambda job: applied[job].state == JobState.PENDING)

    def longest_first(self, jobs: Iterable[str]) -> list[str]:
        """
        Jobs by their work alone on one vCPU, as the profile knows it.

        :param jobs: names of the jobs
        """
        traits = profile_traits(self.scenario.profile)
        return sorted(jobs, key=lambda job: -traits[job]["work_s"])

    def has_plan(self) -> bool:
        """
        Whether the published plan is for this scenario's jobs; for others a rule makes its own.

        :raises InputError: if the plan names some of the scenario's jobs, but not each once
        """
        planned = self.parameters.planned_jobs
        if not set(planned) & set(self.job_names):
            return False
        for job in planned:
            if job not in self.job_names:
                raise InputError(
                    f"policy {self.name}: its plan names the job {job}; scenario "
                    f"{self.scenario.name} has {', '.join(self.job_names)}; "
                    f"{what_fits(self.name, self.scenario)}"
                )
        for job in self.job_names:
            if planned.count(job) != 1:
                raise InputError(
                    f"policy {self.name}: its plan must name each job of scenario "
                    f"{self.scenario.name} once; {job} comes {planned.count(job)} times; "
                    f"{what_fits(self.name, self.scenario)}"
                )
        return True


def unfinished(telemetry: Telemetry, jobs: Iterable[str]) -> list[str]:
    """
    The jobs that have arrived and are not done.

    :param telemetry: what the machine shows
    :param jobs: names of the jobs to look at, in the order of the answer
    """
    seen = telemetry.jobs
    return [job for job in jobs if seen[job].state not in NOTHING_TO_RUN]


class SensorMissingError(RuntimeError):
    """The machine does not show what a rule decides by."""


def probed_p95_us(policy: str, telemetry: Telemetry) -> float:
    """
    The probed 95th percentile of memcached's latency [µs].

    :param policy: name of the policy that asks
    :param telemetry: what the machine shows
    :raises SensorMissingError: if no probe runs
    """
    p95_us = telemetry.service.p95_us
    if p95_us is None:
        raise SensorMissingError(f"{policy} decides by latency, and no probe runs on this machine")
    return p95_us


def latency_slack(policy: str, telemetry: Telemetry, slo_us: float) -> float:
    """
    How far the probed p95 is below the SLO, as a share of the SLO; negative above it.

    :param policy: name of the policy that asks
    :param telemetry: what the machine shows
    :param slo_us: limit of the 95th percentile [µs]
    :raises SensorMissingError: if no probe runs
    """
    return (slo_us - probed_p95_us(policy, telemetry)) / slo_us


class Periodic:
    """
    A loop inside a policy that turns at a slower period than the policy decides.

    :param period_s: seconds between turns; the first comes at once
    """

    def __init__(self, period_s: float):
        self.period_s = period_s
        self.next_s = 0.0

    def due(self, time_s: float) -> bool:
        """
        Whether it is this loop's turn; if so, its next turn is a period away.

        :param time_s: now [s]
        """
        if time_s < self.next_s - 1e-6:
            return False
        self.next_s = time_s + self.period_s
        return True


class CpuThreshold:
    """
    memcached's vCPUs by its CPU use over the last period: its largest set above a threshold.

    :param threshold: CPU use [vCPUs] above which memcached gets its largest set
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._cpu = CounterRate()

    def choose(self, telemetry: Telemetry, scenario: Scenario) -> tuple[int, ...]:
        """
        The vCPUs that memcached should have; the largest set until there is a reading.

        :param telemetry: what the machine shows
        :param scenario: gives the choice
        """
        choices = scenario.service.core_choices
        used = self._cpu.rate(telemetry.time_s, telemetry.service.cpu_s)
        return choices[0] if used is not None and used <= self._threshold else choices[-1]


class CounterRate:
    """A cumulative counter's rate since its last reading, as `psutil` and `stats` users see it."""

    def __init__(self) -> None:
        self._time_s = self._count = -1.0

    def rate(self, time_s: float, count: float) -> float | None:
        """
        Units per second since the last call; None at the first call.

        :param time_s: now [s]
        :param count: the counter's value now
        """
        elapsed, counted = time_s - self._time_s, count - self._count
        first = self._time_s < 0.0
        self._time_s, self._count = time_s, count
        return None if first or elapsed <= 0.0 else counted / elapsed
