"""Whether memcached keeps its SLO while the jobs run, by the latencies that the probe measures."""

import time

from deploy.load.probe import LIMIT_S, Probe
from deploy.records.mcperf import percentile
from env.errors import InputError
from env.scenario import Scenario

PROBE_LIMIT_S = 4.0 * LIMIT_S
"""The probe knows about every request within `LIMIT_S`; one that is silent for longer is dead."""


class SloMonitor:
    """
    What the probe shows of the SLO, interval by interval.

    :param probe: a running one; its records of a whole interval are kept from now on
    :param scenario: gives SLO and intervals
    :param start_s: when the first interval starts, on the monotonic clock [s]
    """

    def __init__(self, probe: Probe, scenario: Scenario, start_s: float):
        self.intervals = self.violations = 0
        self._probe = probe
        self._slo_s = 1e-6 * scenario.service.slo_us
        self._interval_s = scenario.load.interval_s
        self._start_s = self._counted_s = start_s
        probe.keep_s = max(probe.keep_s, self._interval_s + PROBE_LIMIT_S)

    def poll(self, batch_from_s: float) -> tuple[float, float]:
        """
        Count what has become known since the last call.

        :param batch_from_s: when the first job started, on the monotonic clock [s]; intervals that
            ended before do not count
        :return: length of the intervals that broke the SLO, and the integral over time of the
            fraction of requests over it [s]
        :raises InputError: if the probe has died
        """
        known_s = self._probe.known_until_s
        if known_s < time.monotonic() - PROBE_LIMIT_S and self._probe.process.poll() is not None:
            raise InputError("the latency probe has ended; its message is above")
        over_s = self._over_slo(known_s)
        violated_s = 0.0
        while (end_s := self._start_s + self._interval_s) <= known_s:
            violated_s += self._close(end_s, batch_from_s)
        return violated_s, over_s

    def finish(self, end_s: float, batch_from_s: float) -> tuple[float, float]:
        """
        Count the rest, the interval under way as far as it came; see `poll`.

        :param end_s: when the episode ended, on the monotonic clock [s]
        :param batch_from_s: when the first job started, on the monotonic clock [s]
        """
        violated_s, over_s = self.poll(batch_from_s)
        return violated_s + self._close(end_s, batch_from_s), over_s

    def _over_slo(self, until_s: float) -> float:
        if until_s <= self._counted_s:
            return 0.0
        late = [one > self._slo_s for one in self._probe.between(self._counted_s, until_s)]
        window_s, self._counted_s = until_s - self._counted_s, until_s
        return window_s * sum(late) / max(1, len(late))

    def _close(self, end_s: float, batch_from_s: float) -> float:
        """Count the interval that ends; its length if it broke the SLO."""
        ordered = sorted(self._probe.between(self._start_s, end_s))
        self._start_s = end_s
        if not ordered or batch_from_s > end_s:
            return 0.0
        self.intervals += 1
        if percentile(ordered, 95.0) <= self._slo_s:
            return 0.0
        self.violations += 1
        return self._interval_s
