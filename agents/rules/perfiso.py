"""Best-effort work on whatever leaves a buffer of idle vCPUs."""

import math

from pydantic import PositiveFloat

from agents.best_effort import BestEffortController, BestEffortParameters
from agents.policy import CounterRate
from env.allocation import Allocation
from env.scenario import Scenario
from env.telemetry import Telemetry


class PerfIsoParameters(BestEffortParameters):
    """
    The buffer of idle CPU time.

    :param buffer: CPU time that must stay idle [vCPUs]
    """

    buffer: PositiveFloat


class PerfIso(BestEffortController[PerfIsoParameters]):
    """
    CPU blind isolation of PerfIso (Iorgulescu et al., USENIX ATC 2018).

    The service may use every core, best-effort work only a restricted set, and a buffer of
    cores must stay idle for the service's bursts: fewer idle ones shrink the set at once, more
    let it grow. The paper polls a mask of idle cores in a tight loop, with 8 of 48 cores for a
    buffer; here idle time is read from the vCPUs' busy counters every 0.1 s, and the buffer is
    its sixth of the machine. It sees CPU time, and neither latency nor load.
    """

    schema = PerfIsoParameters

    def reset(self, scenario: Scenario) -> None:
        """Begin a new episode."""
        super().reset(scenario)
        self._busy = [CounterRate() for _ in self.vcpus]
        self._batch = 0

    def decide(self, telemetry: Telemetry) -> Allocation:
        """Resize the best-effort set."""
        now_s = telemetry.time_s
        rates = [
            window.rate(now_s, busy_s)
            for window, busy_s in zip(self._busy, telemetry.vcpu_busy_s, strict=True)
        ]
        busy = [rate for rate in rates if rate is not None]
        if len(busy) < len(rates):  # nothing to compare with yet
            return Allocation(self.vcpus, telemetry.applied.jobs)
        # Idle time outside the best-effort set, which has none to spare.
        split = self._split()
        idle = split - math.fsum(busy[:split])
        spare = math.floor(idle - self.parameters.buffer + 1e-9)
        self._batch = min(max(0, self._batch + spare), len(self.vcpus) - 1)
        split = self._split()
        return Allocation(self.vcpus[:split], self.on_cores(telemetry, self.vcpus[split:]))

    def _split(self) -> int:
        return len(self.vcpus) - self._batch
