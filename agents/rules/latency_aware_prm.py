"""CPU budget for best-effort work, a level up while latency is on target."""

from pydantic import PositiveFloat, PositiveInt

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import probed_p95_us
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class LatencyAwarePrmParameters(BestEffortParameters):
    """
    The levels of the CPU budget.

    :param levels: number of levels that the machine's CPU time is divided into
    :param top_level: highest level in use
    :param least_budget: smallest budget [vCPUs]
    """

    levels: PositiveInt
    top_level: PositiveInt
    least_budget: PositiveFloat


class LatencyAwarePrm(BestEffortController[LatencyAwarePrmParameters]):
    """
    Latency-aware PRM (the thesis of 2020 on Intel PRM, section 3.2).

    Every 18.5 s: p95 below the target raises the best-effort quota by one of 50 levels of the
    machine's CPU time, up to level 48; otherwise the quota falls to the minimum of 1000 µs a
    period. Best-effort work has the lowest CPU weight throughout. It sees p95 and nothing else.
    """

    schema = LatencyAwarePrmParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.probe_window_s = self.parameters.period_s
        self._level = 0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """One level up, or all the way down."""
        rule = self.parameters
        on_target = probed_p95_us(self.name, telemetry) < self.scenario.service.slo_us
        self._level = min(self._level + 1, rule.top_level) if on_target else 0
        budget = max(rule.least_budget, self._level * len(self.vcpus) / rule.levels)
        return Allocation(self.most, self.within_budget(telemetry, budget))
