"""CPU budget for best-effort work, by memcached's cycles per instruction and CPU use."""

import math

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import CounterRate, Periodic, SensorMissingError
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class IntelPrmParameters(BestEffortParameters):
    """
    The two loops' periods, the model of memcached alone, and the levels.

    :param main_period_s: seconds between two readings of cycles per instruction
    :param learn_s: seconds that memcached runs alone at first
    :param cpi_deviations: number of standard deviations above the mean that count as contention
    :param margin: CPU time that must stay free below memcached's maximum [vCPUs]
    :param quiet_cycles: number of periods without contention before the budget grows
    :param levels: number of levels that memcached's maximum is divided into
    :param least_budget: smallest budget [vCPUs]
    """

    main_period_s: PositiveFloat
    learn_s: PositiveFloat
    cpi_deviations: NonNegativeFloat
    margin: NonNegativeFloat
    quiet_cycles: PositiveInt
    levels: PositiveInt
    least_budget: PositiveFloat


class IntelPrm(BestEffortController[IntelPrmParameters]):
    """
    Intel Platform Resource Manager, as the thesis of 2020 describes it (sections 3.1, 4.1).

    Step one: memcached runs alone, and its cycles per instruction (CPI) and its largest CPU use
    are recorded; CPI above a threshold of a Gaussian mixture means contention. Here the model
    is learned before the first job starts, with one Gaussian: its mean and 3 deviations.

    Step two: a main loop of 18.5 s sets the best-effort quota to the minimum when CPI exceeds
    the threshold. A sub-loop of 2 s does so when memcached's and best-effort CPU use plus half a
    core exceed memcached's recorded maximum; after 7 quiet cycles it raises the quota by one of
    20 levels of that maximum, and at level 20 it leaves the rest to the kernel. Best-effort work
    has the lowest CPU weight throughout. It sees CPI and CPU use, not latency.
    """

    schema = IntelPrmParameters
    needs_cpi = True

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self.probe_window_s = self.parameters.main_period_s
        self._main = Periodic(self.parameters.main_period_s)
        self._service_cpu, self._batch_cpu = CounterRate(), CounterRate()
        self._alone_cpi: list[float] = []
        self._service_peak = 0.0
        self._ends_s = -1.0  # of learning
        self._level = self._quiet = 0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """One turn of the sub-loop, and of the main loop when it is due."""
        rule, now_s = self.parameters, telemetry.time_s
        cpi = telemetry.service.cpi
        if cpi is None:
            raise SensorMissingError(
                f"{self.name} decides by CPI, which this machine does not count"
            )
        service = self._service_cpu.rate(now_s, telemetry.service.cpu_s) or 0.0
        used_s = math.fsum(job.cpu_s for job in telemetry.jobs.values())
        batch = self._batch_cpu.rate(now_s, used_s) or 0.0
        if self._ends_s < 0.0:
            self._ends_s = now_s + rule.learn_s
        if now_s < self._ends_s:
            self._alone_cpi.append(cpi)
            self._service_peak = max(self._service_peak, service)
            return Allocation(self.most)
        self._quiet += 1
        if service + batch + rule.margin > self._service_peak:
            self._level = self._quiet = 0
        elif self._quiet >= rule.quiet_cycles:
            self._level, self._quiet = min(self._level + 1, rule.levels), 0
        if self._main.due(now_s) and cpi > self._threshold():
            self._level = self._quiet = 0
        return Allocation(self.most, self.within_budget(telemetry, self._budget()))

    def _budget(self) -> float:
        rule = self.parameters
        if self._level == rule.levels:
            return math.inf
        return max(rule.least_budget, self._level * self._service_peak / rule.levels)

    def _threshold(self) -> float:
        n = len(self._alone_cpi)
        mean = math.fsum(self._alone_cpi) / n
        variance = math.fsum((cpi - mean) ** 2 for cpi in self._alone_cpi) / n
        return mean + self.parameters.cpi_deviations * math.sqrt(variance)
