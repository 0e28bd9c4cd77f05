"""Groups of jobs beside a memcached that gets a second vCPU when it is busy."""

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from agents.policy import Controller, CpuThreshold, Parameters, unfinished
from env.allocation import Allocation, JobAllocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class GroupMember(BaseModel):
    """
    One job of a group.

    :param job: its name
    :param threads: its thread count
    :param cores: number of batch vCPUs that it may use
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    threads: PositiveInt
    cores: PositiveInt


class ThresholdGroupsParameters(Parameters):
    """
    When memcached grows, and the groups.

    :param threshold: memcached's CPU use [vCPUs] above which it gets its largest set
    :param groups: the groups of jobs, in the order in which they run
    """

    threshold: PositiveFloat
    groups: tuple[tuple[GroupMember, ...], ...]

    @property
    def planned_jobs(self) -> tuple[str, ...]:
        """See `Parameters.planned_jobs`."""
        return tuple(member.job for group in self.groups for member in group)


class ThresholdGroups(Controller[ThresholdGroupsParameters]):
    """
    Group 031's controller (report of 2025, part 4).

    memcached's CPU use is read over a blocking window of 1 s. Above 60 % of a vCPU memcached
    has 2 vCPUs and the jobs the 2 others, else 1 and 3. Jobs run in three groups, the next one
    when the last job of the one before has ended: canneal (3 threads), blackscholes (2) and
    dedup (1); ferret (3), vips (1) and radix (1); freqmine (3). Long jobs use all batch vCPUs,
    blackscholes two, the short ones one and the same. Its logs show all jobs on all batch vCPUs:
    `threshold-groups-as-run` does the same. Where memcached's largest set is the whole machine, the
    jobs pause while it holds that. Other jobs come in groups of a long, a middling and a short one,
    on all batch vCPUs, half of them and one.
    """

    schema = ThresholdGroupsParameters
    plans = True

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        groups = self.parameters.groups
        if not self.has_plan():
            groups = self._own_groups()
        self._groups = [{member.job: member for member in group} for group in groups]
        self._service = CpuThreshold(self.parameters.threshold)

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Run the first group that is not done."""
        service = self._service.choose(telemetry, self.scenario)
        batch = self.others(service)
        for group in self._groups:
            if left := unfinished(telemetry, group):
                members = [group[job] for job in left]
                jobs: dict[str, JobAllocation] = {}
                for m in members:
                    jobs |= self.spread(telemetry, [m.job], batch[-m.cores :], m.threads)
                return Allocation(service, jobs)
        return Allocation(service)

    def _own_groups(self) -> tuple[tuple[GroupMember, ...], ...]:
        """Groups of three for jobs that no published plan names."""
        order = self.longest_first(self.job_names)
        count, batch = -(-len(order) // 3), max(1, len(self.others(self.least)))
        widths = (batch, max(1, batch // 2), 1)
        return tuple(
            tuple(
                GroupMember(job=job, threads=width, cores=width)
                for job, width in zip(order[first::count], widths, strict=False)
            )
            for first in range(count)
        )
