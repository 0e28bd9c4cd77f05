"""Whole vCPUs for best-effort work, by latency slack and load."""

from pydantic import NonNegativeInt, PositiveFloat

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import Periodic, probed_p95_us
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class HeraclesParameters(BestEffortParameters):
    """
    The top-level loop of the paper's algorithm 1.

    :param top_period_s: between looks at latency and load
    :param suspend_load: share of the peak load above which best-effort work is suspended
    :param enable_load: share of the peak load below which it may run again
    :param hold_slack: latency slack below which it may not grow
    :param shrink_slack: latency slack below which it falls to `kept_cores`
    :param cool_down_s: how long it stays suspended after a miss
    """

    top_period_s: PositiveFloat
    suspend_load: PositiveFloat
    enable_load: PositiveFloat
    hold_slack: PositiveFloat
    shrink_slack: PositiveFloat
    kept_cores: NonNegativeInt
    cool_down_s: PositiveFloat


class Heracles(BestEffortController[HeraclesParameters]):
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
        self._top = Periodic(self.parameters.top_period_s)
        self._enabled = self._growing = False
        self._cooled_at_s = 0.0
        self._cores = 0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """One turn of the core controller, and of the top-level loop when it is due."""
        if self._top.due(telemetry.time_s):
            self._observe(telemetry)
        if not self._enabled:
            self._cores = 0
        elif self._growing or self._cores == 0:
            self._cores = min(self._cores + 1, len(self.vcpus) - 1)
        split = len(self.vcpus) - self._cores
        return Allocation(self.vcpus[:split], self.on(telemetry, self.vcpus[split:]))

    def _observe(self, telemetry: Telemetry) -> None:
        rule, now_s = self.parameters, telemetry.time_s
        target_us = self.scenario.service.slo_us
        slack = (target_us - probed_p95_us(self.name, telemetry)) / target_us
        load = telemetry.service.qps / self.scenario.load.qps_max
        if slack < 0.0:
            self._enabled = False
            self._cooled_at_s = now_s + rule.cool_down_s
        elif load > rule.suspend_load:
            self._enabled = False
        elif load < rule.enable_load and now_s >= self._cooled_at_s:
            self._enabled = True
        self._growing = slack >= rule.hold_slack
        if slack < rule.shrink_slack:
            self._cores = min(self._cores, rule.kept_cores)
