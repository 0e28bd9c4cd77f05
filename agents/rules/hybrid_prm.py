"""CPU budget for best-effort work, by latency slack and load."""

from pydantic import PositiveFloat, PositiveInt, model_validator

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import Periodic, probed_p95_us
from env.allocation import Allocation, Weight
from env.scenario import Scenario
from env.telemetry import Telemetry


class HybridPrmParameters(BestEffortParameters):
    """
    The top-level loop, and the step of the sub-controller.

    :param top_period_s: between looks at latency and load
    :param suspend_load: share of the peak load above which best-effort work is suspended
    :param enable_load: share of the peak load below which it may run again
    :param hold_slack: latency slack below which it gets no more
    :param cool_down_s: how long it stays suspended after a miss
    :param levels: the sub-controller adds one of so many parts of the machine's CPU time each
        period; a whole vCPU without
    """

    top_period_s: PositiveFloat
    suspend_load: PositiveFloat
    enable_load: PositiveFloat
    hold_slack: PositiveFloat
    cool_down_s: PositiveFloat
    levels: PositiveInt | None = None

    @model_validator(mode="after")
    def _apart(self) -> "HybridPrmParameters":
        if self.enable_load > self.suspend_load:
            raise ValueError(f"enable_load: must be at most suspend_load ({self.suspend_load})")
        return self


class HybridPrm(BestEffortController[HybridPrmParameters]):
    """
    Hybrid PRM and its tuned variant (the thesis of 2020 on Intel PRM, section 3.3).

    Heracles' top-level rule for CPU time alone. Every 15 s, slack = (target - p95) / target:
    below 0 best-effort work is suspended and cools down for 5 min; load above 85 % of the peak
    suspends it, below 80 % enables it; slack below 0.10 holds what it has; otherwise a
    sub-controller adds one core every 2 s. Tuned: 95 % and 90 %, 3 min, and 50 levels of the
    machine's CPU time in place of whole cores. It sees p95 and load.

    Its Fetcher keeps the client's latest latency report; here that covers one period of the
    sub-controller.

    The thesis' listing chains its conditions with `elif`, which at its word would never look at
    slack while the load is low; here slack always decides about growth, as its text says.
    """

    schema = HybridPrmParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.probe_window_s = self.parameters.period_s
        self._top = Periodic(self.parameters.top_period_s)
        self._enabled = self._growing = False
        self._cooled_at_s = 0.0
        self._budget = 0.0
        levels = self.parameters.levels
        self._step = len(self.vcpus) / levels if levels else 1.0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """One turn of the sub-controller, and of the top-level loop when it is due."""
        if self._top.due(telemetry.time_s):
            self._observe(telemetry)
        if not self._enabled:
            self._budget = 0.0
        elif self._growing:
            self._budget = min(self._budget + self._step, float(len(self.vcpus)))
        return Allocation(self.most, self.within(telemetry, self._budget, Weight.BACKGROUND))

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
