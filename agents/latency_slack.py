"""Heracles' top-level loop: latency slack and load say whether best-effort work runs and grows."""

from abc import ABC
from typing import TypeVar

from pydantic import PositiveFloat, model_validator

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import Periodic, latency_slack
from env.scenario import Scenario
from env.telemetry import Telemetry


class LatencySlackParameters(BestEffortParameters):
    """
    The top-level loop; slack is (SLO - p95) / SLO.

    :param top_period_s: seconds between two readings of latency and load
    :param suspend_load: share of the peak load above which best-effort work is suspended
    :param enable_load: share of the peak load below which it may run again
    :param hold_slack: slack below which it may not grow
    :param cool_down_s: seconds for which it stays suspended after the SLO was broken
    """

    top_period_s: PositiveFloat
    suspend_load: PositiveFloat
    enable_load: PositiveFloat
    hold_slack: PositiveFloat
    cool_down_s: PositiveFloat

    @model_validator(mode="after")
    def _apart(self) -> "LatencySlackParameters":
        if self.enable_load > self.suspend_load:
            raise ValueError(f"enable_load: must be at most suspend_load ({self.suspend_load})")
        return self


Rule = TypeVar("Rule", bound=LatencySlackParameters)


class LatencySlackController(BestEffortController[Rule], ABC):
    """
    A rule whose top-level loop enables best-effort work and lets it grow.

    A subclass reads `enabled` and `growing` and decides how much best-effort work gets.
    """

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.enabled = self.growing = False
        self._top = Periodic(self.parameters.top_period_s)
        self._cooled_at_s = 0.0

    def observe(self, telemetry: Telemetry) -> float | None:
        """
        Take the top-level loop's turn if it is due.

        :param telemetry: what the machine shows
        :return: latency slack, a share of the SLO; None between two turns
        """
        if not self._top.due(telemetry.time_s):
            return None
        rule, now_s = self.parameters, telemetry.time_s
        slack = latency_slack(self.name, telemetry, self.scenario.service.slo_us)
        load = telemetry.service.qps / self.scenario.load.qps_max
        if slack < 0.0:
            self.enabled = False
            self._cooled_at_s = now_s + rule.cool_down_s
        elif load > rule.suspend_load:
            self.enabled = False
        elif load < rule.enable_load and now_s >= self._cooled_at_s:
            self.enabled = True
        self.growing = slack >= rule.hold_slack
        return slack
