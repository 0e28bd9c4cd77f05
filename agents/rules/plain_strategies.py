"""One job after another, and all jobs at once."""

from pydantic import PositiveFloat, PositiveInt

from agents.policy import Controller, CpuThreshold, Parameters, unfinished
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class PlainParameters(Parameters):
    """
    When memcached grows, and the jobs' threads.

    :param threshold: memcached's CPU use [vCPUs] above which it gets its largest set
    :param threads: thread count of every job on 4 vCPUs
    """

    threshold: PositiveFloat
    threads: PositiveInt


class Concurrent(Controller[PlainParameters]):
    """
    Every job from the start, all on every vCPU that memcached does not hold.

    The second of the two plain strategies that group 031 set out to beat (report of 2025, part
    4), with 3 threads a job. memcached's vCPUs follow that group's rule (see
    `agents.rules.threshold_groups`): above 60 % of a vCPU in a 1 s window it gets its largest set.
    """

    schema = PlainParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self._service = CpuThreshold(self.parameters.threshold)

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Run all jobs that are not done."""
        service = self._service.choose(telemetry, self.scenario)
        threads = self.scaled(self.parameters.threads)
        left = self._chosen(unfinished(telemetry, self.job_names), telemetry)
        return Allocation(service, self.spread(telemetry, left, self.others(service), threads))

    def _chosen(self, left: list[str], telemetry: Telemetry) -> list[str]:
        """Those of the jobs that are left which may run."""
        return left


class Sequential(Concurrent):
    """
    The jobs in their order, each on every vCPU that memcached does not hold.

    The first of the two plain strategies that group 031 set out to beat, otherwise the same, so
    that the two differ in how jobs are arranged only.
    """

    def _chosen(self, left: list[str], telemetry: Telemetry) -> list[str]:
        return self.launched_first(left, telemetry)[:1]
