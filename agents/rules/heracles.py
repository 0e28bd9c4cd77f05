"""Whole vCPUs for best-effort work, by latency slack and load."""

from pydantic import NonNegativeInt, PositiveFloat

from agents.latency_slack import LatencySlackController, LatencySlackParameters
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class HeraclesParameters(LatencySlackParameters):
    """
    The top-level loop of the paper's algorithm 1, and how it shrinks best-effort work.

    :param shrink_slack: slack, a share of the SLO, below which best-effort work is shrunk
    :param kept_cores: number of vCPUs that it then keeps at most
    """

    shrink_slack: PositiveFloat
    kept_cores: NonNegativeInt


class Heracles(LatencySlackController[HeraclesParameters]):
    """
    Heracles (Lo et al., ISCA 2015), the parts that act on cores.

    Each vCPU belongs either to the latency-critical service or to best-effort work. Every 15 s,
    slack = (target - latency) / target: below 0 best-effort work is disabled and cools down for
    5 min; load above 85 % of the peak disables it, below 80 % enables it; slack below 0.10
    forbids growth, and below 0.05 takes all but two cores away. Otherwise the core controller
    gives it one more core every 2 s; it begins with one. The cache, memory-bandwidth, power and
    network controllers have nothing to act on here. It sees p95 and load.
    """

    schema = HeraclesParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.probe_window_s = self.parameters.top_period_s
        self._cores = 0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """One turn of the core controller, and of the top-level loop when it is due."""
        slack = self.observe(telemetry)
        if slack is not None and slack < self.parameters.shrink_slack:
            self._cores = min(self._cores, self.parameters.kept_cores)
        if not self.enabled:
            self._cores = 0
        elif self.growing or self._cores == 0:
            self._cores = min(self._cores + 1, len(self.vcpus) - 1)
        split = len(self.vcpus) - self._cores
        return Allocation(self.vcpus[:split], self.on_cores(telemetry, self.vcpus[split:]))
