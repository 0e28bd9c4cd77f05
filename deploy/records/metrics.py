"""
The run's figures for Prometheus, at http://127.0.0.1:PORT/metrics.

Only GET is served, and only to this machine unless another address is asked for. A scrape reads
the latest sample: nothing is measured for it, and the loop never waits for it. Anybody on the
machine may connect, so connections are few and short: the loop needs its descriptors and its CPU.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from deploy.records.recorder import Event
from env.allocation import Allocation, JobState
from env.errors import InputError, fault
from env.telemetry import Stages, Telemetry

HOST = "127.0.0.1"
REQUEST_LIMIT_S = 5.0
"""A connection that lasts longer is ended, however it has kept us busy."""

MOST_CONNECTIONS = 8
REFUSAL_S = 0.05
"""What a connection too many costs whoever makes it, rather than the loop."""


class RunCollector(Collector):
    """The latest readings of a run; the loop hands them in, scrapes read them out."""

    def __init__(self) -> None:
        self._latest: tuple[Telemetry, Allocation] | None = None
        self._events: Counter[tuple[str, str]] = Counter()
        self._guard_level = self._guard_steps = 0

    def sample(self, telemetry: Telemetry, allocation: Allocation) -> None:
        """
        Take the readings of a moment, as the recorder does.

        :param telemetry: the readings
        :param allocation: who holds what
        """
        self._latest = (telemetry, allocation)

    def event(self, event: Event) -> None:
        """
        Count an event.

        :param event: what happened
        """
        self._events[event.what, event.job] += 1
        if (level := event.guard_level) is not None:
            self._guard_steps += max(0, level - self._guard_level)
            self._guard_level = level

    def collect(self) -> Iterator[Metric]:
        """Everything there is to tell, for a scrape."""
        events = CounterMetricFamily("coretide_events", "events", labels=["event", "job"])
        for labels, count in self._events.copy().items():
            events.add_metric(labels, count)
        yield events
        yield GaugeMetricFamily("coretide_guard_level", "of the SLO guard", self._guard_level)
        yield CounterMetricFamily(
            "coretide_guard_steps", "levels that the SLO guard climbed", self._guard_steps
        )
        if self._latest is not None:
            yield from _service(*self._latest)
            yield from _jobs(*self._latest)


def _service(telemetry: Telemetry, allocation: Allocation) -> Iterator[Metric]:
    service = telemetry.service
    yield GaugeMetricFamily("coretide_time_seconds", "since the run started", telemetry.time_s)
    yield GaugeMetricFamily("coretide_memcached_qps", "requests per second", service.qps)
    yield GaugeMetricFamily("coretide_memcached_cpu_vcpus", "CPU use", service.cpu_cores)
    vcpus = len(allocation.service_cores)
    yield GaugeMetricFamily("coretide_memcached_vcpus", "vCPUs it holds", vcpus)
    yield CounterMetricFamily("coretide_memcached_cpu_seconds", "CPU time", service.cpu_s)
    yield CounterMetricFamily(
        "coretide_memcached_run_delay_seconds", "time its threads waited", service.run_delay_s
    )
    if service.p95_us is not None:
        yield GaugeMetricFamily("coretide_memcached_p95_microseconds", "measured", service.p95_us)
    for part, part_us in (("wait", service.wait_us), ("service", service.service_us)):
        if part_us is not None:
            name = f"coretide_memcached_{part}_p95_microseconds"
            yield GaugeMetricFamily(name, "by the latency tap", part_us)
    for place, part in enumerate(Stages._fields if service.members else ()):
        name = f"coretide_member_{part.removesuffix('_us')}_p95_microseconds"
        by_member = GaugeMetricFamily(name, "by the latency tap", labels=["member"])
        for number, stages in enumerate(service.members, 1):
            if stages is not None:
                by_member.add_metric([str(number)], stages[place])
        yield by_member
    busy = CounterMetricFamily("coretide_vcpu_busy_seconds", "busy time", labels=["vcpu"])
    for vcpu, busy_s in enumerate(telemetry.vcpu_busy_s):
        busy.add_metric([str(vcpu)], busy_s)
    yield busy


def _jobs(telemetry: Telemetry, allocation: Allocation) -> Iterator[Metric]:
    states = GaugeMetricFamily("coretide_job_state", "1 in its state", labels=["job", "state"])
    cpu = CounterMetricFamily("coretide_job_cpu_seconds", "CPU time", labels=["job"])
    held = GaugeMetricFamily("coretide_job_vcpus", "vCPUs it may run on", labels=["job"])
    for name, job in telemetry.jobs.items():
        for state in JobState:
            states.add_metric([name, state.name.lower()], float(job.state == state))
        cpu.add_metric([name], job.cpu_s)
        running = job.state == JobState.RUNNING
        held.add_metric([name], len(allocation.jobs[name].cores) if running else 0)
    yield from (states, cpu, held)


class _Server(ThreadingHTTPServer):
    """Serves a few connections at a time, each for a short while."""

    def __init__(self, address: tuple[str, int], handler: Any):
        self._since_s: dict[Any, float] = {}
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a connection too many; it is closed without an answer."""
        if len(self._since_s) < MOST_CONNECTIONS:
            return True
        time.sleep(REFUSAL_S)
        return False

    def process_request(self, request: Any, client_address: Any) -> None:
        """Note since when there is a connection."""
        self._since_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that ends."""
        self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that last too long; called twice a second, and after each new one."""
        late_s = time.monotonic() - REQUEST_LIMIT_S
        for request, since_s in self._since_s.copy().items():
            if since_s < late_s:
                with contextlib.suppress(OSError):  # its own thread closes it
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: who hangs up early is no news."""


class Endpoint:
    """
    A web server for scrapes on this machine, on a thread of its own.

    :param collector: what is served
    :param port: TCP port; 0 takes a free one
    :raises InputError: if it cannot listen there
    """

    def __init__(self, collector: Collector, port: int):
        registry = CollectorRegistry()
        registry.register(collector)
        handler: Any = type(
            "Handler", (MetricsHandler,), {"registry": registry, "timeout": REQUEST_LIMIT_S}
        )
        try:
            self._server = _Server((HOST, port), handler)
            self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            reason = fault(error)
            raise InputError(f"--metrics-port {port}: cannot listen on {HOST}: {reason}") from error
        self.port = int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
