"""The actuator of `--dry-run`: it says what would be changed, and changes nothing."""

import signal
import time
from dataclasses import dataclass, field

from deploy.linux.service_process import Identity
from deploy.loop.loop import Sampler, StopRequest
from deploy.records.state import State
from env.allocation import Allocation, Change, JobAllocation, JobState, Weight, cores_of
from env.scenario import Scenario
from env.telemetry import Telemetry

LASTS_S = 10.0
"""Enough for a policy to have read the load and said what it begins with."""


@dataclass
class DryJob:
    """A job that never runs, and so never ends."""

    wanted: JobAllocation = field(default_factory=JobAllocation)
    busy: bool = False
    settled: bool = True

    @property
    def state(self) -> JobState:
        """Where the job would stand."""
        return self.wanted.state

    def cpu_s(self) -> float:
        """It uses no CPU time."""
        return 0.0

    def paused_s(self, now_s: float) -> float:
        """See `JobStanding.paused_s`; it is never paused."""
        return 0.0


class DryActuator:
    """
    Prints the changes that an actuator would make; see `deploy.loop.actuator_interface.Actuation`.

    :param scenario: the problem
    :param state: says when the run started
    """

    def __init__(self, scenario: Scenario, state: State):
        self.state = state
        self.jobs = {job.name: DryJob() for job in scenario.jobs}
        self.changes = self.stirred = 0
        everything = cores_of((1 << scenario.machine.vcpus) - 1)
        self._now = Allocation(everything)

    def follow(self, who: tuple[Identity, ...]) -> None:
        """See `Actuation.follow`; nothing is done to memcached."""

    def apply(self, allocation: Allocation) -> None:
        """See `Actuation.apply`; what would be changed is printed."""
        for change in allocation.changes_from(self._now):
            self.changes += 1
            time_s = time.monotonic() - self.state.started_s
            print(f"{time_s:8.3f} s  would {in_words(change)}", flush=True)
        self.stirred += 1
        for name, wanted in allocation.jobs.items():
            self.jobs[name].wanted = wanted
        self._now = allocation

    def poll(self, now_s: float, slack: bool = True) -> None:
        """See `Actuation.poll`; there is nothing to pick up."""

    def wait(self, timeout_s: float) -> None:
        """See `Actuation.wait`; no job ends."""
        time.sleep(max(0.0, timeout_s))

    def forget_written(self) -> None:
        """Nothing was written."""

    def take_over(self, now_s: float) -> None:
        """See `Actuation.take_over`; there is nothing to take over."""


def ending(stop: StopRequest) -> Sampler:
    """
    What ends a dry run: jobs that never run would never end it.

    :param stop: is made after `LASTS_S`
    """

    def sample(telemetry: Telemetry, allocation: Allocation) -> None:
        if telemetry.time_s >= LASTS_S and not stop.number:
            stop.number = signal.SIGALRM
            print(f"{LASTS_S:g} s are over; nothing was touched", flush=True)

    return sample


def in_words(change: Change) -> str:
    """
    A change as a sentence without its subject.

    :param change: one change of an allocation
    """
    cores = ",".join(map(str, change.cores))
    weight = Weight(change.weight).name.lower()
    return {
        "service-cores": f"give memcached vCPUs {cores}",
        "start": f"start {change.job} with {change.threads} threads on {cores}, {weight} weight",
        "cores": f"move {change.job} to {cores}",
        "weight": f"give {change.job} {weight} weight",
        "quota": f"limit {change.job} to {change.quota} vCPUs",
    }.get(change.what, f"{change.what} {change.job}")
