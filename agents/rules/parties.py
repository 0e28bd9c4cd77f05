"""One vCPU at a time from one side to the other, with rollback."""

from pydantic import PositiveFloat, model_validator

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import latency_slack
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class PartiesParameters(BestEffortParameters):
    """
    When to move a vCPU.

    :param upsize_slack: slack, a share of the SLO, below which the service gets one more vCPU
    :param downsize_slack: slack, a share of the SLO, above which it gives one away
    :param hold_s: seconds for which a step that was rolled back is not tried again
    """

    upsize_slack: PositiveFloat
    downsize_slack: PositiveFloat
    hold_s: PositiveFloat

    @model_validator(mode="after")
    def _apart(self) -> "PartiesParameters":
        if self.upsize_slack > self.downsize_slack:
            raise ValueError(f"upsize_slack: must be at most {self.downsize_slack}")
        return self


class Parties(BestEffortController[PartiesParameters]):
    """
    PARTIES (Chen et al., ASPLOS 2019) for one service and best-effort work, cores alone.

    Every 500 ms the service's slack = (target - p95) / target is looked at. Below 0.05 it is
    given one more unit of one resource; above 0.20 one unit is taken from it for best-effort
    work, and given back at once if the slack then falls below 0.05. Of the paper's resources
    only cores can be moved here; what is unused belongs to best-effort work. Assumed: the first
    growth after units were taken rolls the last one back, however long that was ago, and a
    step that was rolled back is not tried again for 30 s. It sees p95 and nothing else.
    """

    schema = PartiesParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.probe_window_s = self.parameters.period_s
        self._service = len(self.most)
        self._downsized = False
        self._hold_until_s = 0.0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Move at most one vCPU."""
        rule, now_s = self.parameters, telemetry.time_s
        slack = latency_slack(self.name, telemetry, self.scenario.service.slo_us)
        if slack < rule.upsize_slack:
            if self._downsized:
                self._hold_until_s = now_s + rule.hold_s
            self._service = min(self._service + 1, len(self.vcpus))
            self._downsized = False
        elif slack > rule.downsize_slack and now_s >= self._hold_until_s and self._service > 1:
            self._service -= 1
            self._downsized = True
        service = self.vcpus[: self._service]
        return Allocation(service, self.on_cores(telemetry, self.others(service)))
