"""What there is to plot of one simulated run: intervals, memcached's vCPUs, the jobs' places."""

import math
from dataclasses import dataclass, field

from env.allocation import JobState, cores_of
from env.scenario import Scenario
from env.simulator.machine import SimulatedMachine


@dataclass(frozen=True)
class Interval:
    """One measurement interval: its limits [s], the load [requests/s] and p95 [µs]."""

    start_s: float
    end_s: float
    qps: float
    p95_us: float


@dataclass(frozen=True)
class Span:
    """A stretch of time in which a job's state and vCPUs stayed the same."""

    start_s: float
    end_s: float
    state: JobState
    cores: tuple[int, ...]


@dataclass
class Recording:
    """
    One run.

    :param intervals: measurement intervals that have ended
    :param service: when memcached's vCPUs changed, and to what
    :param jobs: each job's spans, running or paused
    :param end_s: when the last job ended
    """

    intervals: list[Interval] = field(default_factory=list)
    service: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    jobs: dict[str, list[Span]] = field(default_factory=dict)
    end_s: float = 0.0


class Recorder:
    """
    Watches a machine between decisions.

    When a change lands is known from the moment it was sent, so that nothing has to be polled;
    a wait is only cut where more than one interval ends within it.

    :param scenario: the problem
    """

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.recording = Recording()
        # (time it takes effect, state, vCPUs) of each job, in order of time.
        self._landings: dict[str, list[tuple[float, JobState, tuple[int, ...]]]] = {
            name: [] for name in scenario.job_names
        }

    def advance(self, machine: SimulatedMachine, until_s: float, wakes: bool) -> None:
        """
        Let time pass as `SimulatedMachine.advance` does, and write down what happened.

        :param machine: which
        :param until_s: when the policy decides next
        :param wakes: whether events end the wait
        """
        self._note_sent(machine)
        host = machine.host
        decided = host.now_s
        while not machine.over:
            interval, ends_s, qps = host.interval, host.interval_ends_s, host.load_qps
            stop_s = min(until_s, ends_s + 0.5 * host.interval_s)
            machine.advance(stop_s, wakes)
            if host.interval > interval:
                self._note_interval(machine, ends_s, qps)
            if stop_s == until_s or host.now_s < stop_s - 1e-9:
                break
        assert machine.over or host.now_s > decided

    def finish(self, machine: SimulatedMachine) -> None:
        """Write down how the run ended."""
        host, recording = machine.host, self.recording
        if machine.completed:
            self._note_interval(machine, host.interval_ends_s, host.load_qps)
        recording.end_s = float(host.now_s)
        for index, name in enumerate(self.scenario.job_names):
            end_s = min(float(host.end_s[index]), recording.end_s)
            marks = [mark for mark in self._landings[name] if mark[0] < end_s]
            ends = [*(mark[0] for mark in marks), end_s][1:]
            recording.jobs[name] = [
                Span(start_s, until_s, state, cores)
                for (start_s, state, cores), until_s in zip(marks, ends, strict=True)
                if until_s > start_s
            ]

    def _note_interval(self, machine: SimulatedMachine, ends_s: float, qps: float) -> None:
        begins_s = ends_s - machine.host.interval_s
        self.recording.intervals.append(Interval(begins_s, ends_s, qps, machine.interval_p95_us))

    def _note_sent(self, machine: SimulatedMachine) -> None:
        """Write down what was sent to the actuator and when it lands."""
        host = machine.host
        service = self.recording.service
        cores = cores_of(int(host.sent_service))
        if not service or service[-1][1] != cores:
            lands_s = float(host.service_lands_s)
            service.append((lands_s if math.isfinite(lands_s) else float(host.now_s), cores))
        for index, name in enumerate(self.scenario.job_names):
            lands_s = float(host.lands_s[index])
            if math.isfinite(lands_s):
                marks = self._landings[name]
                while marks and marks[-1][0] >= lands_s:
                    marks.pop()
                state = JobState(int(host.sent_state[index]))
                marks.append((lands_s, state, cores_of(int(host.sent_cores[index]))))
