"""CPU budget for best-effort work, by latency slack and load."""

from pydantic import PositiveInt

from agents.latency_slack import LatencySlackController, LatencySlackParameters
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class HybridPrmParameters(LatencySlackParameters):
    """
    The top-level loop, and the step of the sub-controller.

    :param levels: the sub-controller's step is the machine's CPU time by this number; one vCPU
        without it
    """

    levels: PositiveInt | None = None


class HybridPrm(LatencySlackController[HybridPrmParameters]):
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
        self._budget = 0.0
        levels = self.parameters.levels
        self._step = len(self.vcpus) / levels if levels else 1.0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """One turn of the sub-controller, and of the top-level loop when it is due."""
        self.observe(telemetry)
        if not self.enabled:
            self._budget = 0.0
        elif self.growing:
            self._budget = min(self._budget + self._step, float(len(self.vcpus)))
        return Allocation(self.most, self.within_budget(telemetry, self._budget))
