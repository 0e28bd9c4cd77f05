"""What there is to show of one simulated run: intervals, memcached's vCPUs, the jobs' places."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias, TypeVar

from env.allocation import JobState, cores_of
from env.scenario import Scenario
from env.simulator.machine import SimulatedMachine

T = TypeVar("T")
Marks: TypeAlias = list[tuple[float, T]]
"""When something changes [s], and to what."""

AT_ONCE_S = 1e-6
"""How long a wait is cut to where a change lands in the moment it is sent in."""


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
    :param end_s: end of the last job [s]
    :param guard: when the SLO guard's level changed, and to which; empty where not recorded
    """

    intervals: list[Interval] = field(default_factory=list)
    service: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    jobs: dict[str, list[Span]] = field(default_factory=dict)
    end_s: float = 0.0
    guard: list[tuple[float, int]] = field(default_factory=list)


class IntervalRecorder:
    """
    Records the measurement intervals that end between decisions.

    A wait is cut where more than one of them would end within it.
    """

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._interval_began_s = 0.0

    def advance(self, machine: SimulatedMachine, until_s: float, wakes: bool) -> None:
        """
        Let time pass as `SimulatedMachine.advance` does, and write down what happened.

        :param machine: the machine to advance and record
        :param until_s: time of the policy's next decision [s]
        :param wakes: whether events end the wait
        """
        host = machine.host
        decided, host.woken_s = host.now_s, math.inf
        while not machine.over:
            cut_s = self._begin(machine)
            interval, ends_s, qps = host.interval, host.interval_ends_s, host.due_qps
            stop_s = min(until_s, ends_s + 0.5 * host.interval_s, cut_s)
            machine.pass_time(stop_s, wakes)
            until_s = min(until_s, host.woken_s)
            if host.interval > interval:
                self._note_interval(machine, ends_s, qps)
            if host.now_s >= until_s - 1e-9:
                break
        machine.sense()
        assert machine.over or host.now_s > decided

    def finish(self, machine: SimulatedMachine) -> None:
        """
        Write down how the run ended.

        :param machine: the machine whose episode is over
        """
        host = machine.host
        ended_s = float(host.now_s)
        if machine.completed:
            self._note_interval(machine, host.interval_ends_s, host.due_qps)
        elif machine.over and self._interval_began_s < ended_s - 1e-9:  # the time cap
            self._note_interval(machine, ended_s, host.due_qps)

    def _begin(self, machine: SimulatedMachine) -> float:
        """Note what there is to note before time passes; returns when to stop the next time [s]."""
        return math.inf

    def _note_interval(self, machine: SimulatedMachine, ends_s: float, qps: float) -> None:
        begun_s, self._interval_began_s = self._interval_began_s, ends_s
        self.intervals.append(Interval(begun_s, ends_s, qps, machine.interval_p95_us))


class TimelineRecorder(IntervalRecorder):
    """
    Records everything that happens on a machine between decisions.

    A change is recorded when it is sent, because the machine knows already when it will land. A
    wait is cut where a change lands, too: the next one may be sent then; and where the SLO guard
    sends one.

    :param scenario: the problem
    """

    def __init__(self, scenario: Scenario):
        super().__init__()
        self.scenario = scenario
        self.recording = Recording(self.intervals)
        # When each job's state and vCPUs change, and to what, in order of time.
        self._states: dict[str, Marks[JobState]] = {name: [] for name in scenario.job_names}
        self._places: dict[str, Marks[tuple[int, ...]]] = {name: [] for name in scenario.job_names}

    def finish(self, machine: SimulatedMachine) -> None:
        """
        Write down how the run ended.

        :param machine: the machine whose episode is over
        """
        super().finish(machine)
        host, recording = machine.host, self.recording
        recording.end_s = float(host.now_s)
        for index, name in enumerate(self.scenario.job_names):
            end_s = min(float(host.end_s[index]), recording.end_s)
            states, places = self._states[name], self._places[name]
            began_s = states[0][0] if states else math.inf
            times = {at_s for at_s, _ in (*states, *places) if began_s <= at_s < end_s}
            recording.jobs[name] = [
                Span(start_s, until_s, _value_at(states, start_s), _value_at(places, start_s))
                for start_s, until_s in pairwise([*sorted(times), end_s])
            ]

    def _begin(self, machine: SimulatedMachine) -> float:
        self._note_sent(machine)
        host = machine.host
        host.recorded = 1
        lands_s = float(min(host.lands_s.min(), host.move_lands_s.min()))
        return max(lands_s, host.now_s + AT_ONCE_S)

    def _note_sent(self, machine: SimulatedMachine) -> None:
        """Write down what was sent to the actuator and when it lands."""
        host, service = machine.host, self.recording.service
        now_s = float(host.now_s)
        if not service:
            service.append((now_s, cores_of(int(host.true_service))))
        mark(service, now_s, float(host.service_lands_s), cores_of(int(host.sent_service)))
        for index, name in enumerate(self.scenario.job_names):
            lands_s, moves_s = float(host.lands_s[index]), float(host.move_lands_s[index])
            mark(self._states[name], now_s, lands_s, JobState(int(host.sent_state[index])))
            # A container that is still starting has its vCPUs when it has started.
            pending = host.true_state[index] == JobState.PENDING
            cores = cores_of(int(host.sent_cores[index]))
            mark(self._places[name], now_s, lands_s if pending else moves_s, cores)


def mark(marks: Marks[T], now_s: float, lands_s: float, value: T) -> None:
    """
    Append a change that is under way, in place of an earlier one that has not landed yet.

    :param marks: changes so far, in order of time
    :param now_s: now [s]
    :param lands_s: when it takes effect [s], infinite if none is under way
    :param value: what holds from then on
    """
    if not math.isfinite(lands_s):
        return
    while marks and marks[-1][0] > now_s + 1e-9:
        marks.pop()
    marks.append((lands_s, value))


def _value_at(marks: Marks[T], time_s: float) -> T:
    """The value at a time that is not before the first change."""
    return marks[bisect_right(marks, time_s, key=lambda change: change[0]) - 1][1]
