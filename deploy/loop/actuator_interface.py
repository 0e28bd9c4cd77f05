"""What the machine asks of whoever performs its allocations: the actuator, or a dry run's."""

from collections.abc import Mapping
from typing import Protocol

from deploy.linux.service_process import Identity
from deploy.records.state import State
from env.allocation import Allocation, JobAllocation, JobState


class JobStanding(Protocol):
    """One job as an actuator knows it."""

    @property
    def wanted(self) -> JobAllocation:
        """What it should have; pending if it is to be started (again)."""

    @property
    def state(self) -> JobState:
        """Where it stands."""

    @property
    def busy(self) -> bool:
        """Whether something is under way or left to be cleaned up."""

    @property
    def settled(self) -> bool:
        """Whether it is as wanted, and waits at its gate if it is pending."""

    def cpu_s(self) -> float:
        """CPU seconds it has used."""

    def paused_s(self, now_s: float) -> float:
        """
        How long it has been paused in all [s].

        :param now_s: since the run started [s]
        """


class Actuation(Protocol):
    """Whoever performs allocations; see `deploy.loop.actuator.Actuator`."""

    state: State

    @property
    def jobs(self) -> Mapping[str, JobStanding]:
        """The jobs in the scenario's order."""

    @property
    def changes(self) -> int:
        """How many changes there were."""

    @property
    def stirred(self) -> int:
        """How often a job may have come to stand otherwise: while it is the same, none has."""

    def take_over(self, now_s: float) -> None:
        """
        Find what an earlier loop left running.

        :param now_s: since the run started [s]
        """

    def follow(self, who: tuple[Identity, ...]) -> None:
        """
        Turn to memcached's processes.

        :param who: all of them
        """

    def apply(self, allocation: Allocation) -> None:
        """
        Make the machine hold an allocation.

        :param allocation: the vCPUs, weights and states to hold from now on
        """

    def poll(self, now_s: float, slack: bool = True) -> None:
        """
        Go on with what takes longer.

        :param now_s: since the run started [s]
        :param slack: whether memcached has CPU time to spare; starts wait for it
        """

    def wait(self, timeout_s: float) -> None:
        """
        Sleep, but no longer than until a job ends.

        :param timeout_s: the longest sleep [s]
        """

    def forget_written(self) -> None:
        """Write everything anew."""
