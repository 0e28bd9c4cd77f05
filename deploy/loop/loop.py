"""
The loop: read, decide, regulate, actuate; and who decides when the policy fails.

It is the simulator's loop (`training.evaluation.episodes`) on a real machine, with a guard around
the policy.
"""

import gc
import math
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from agents.policy import Policy
from deploy.linux import standing
from deploy.linux.signals import STOPPING
from deploy.loop.live_machine import LiveMachine
from deploy.records.recorder import SCHEDULER, Recorder
from deploy.safety.fallback import Fallback
from env.allocation import Allocation
from env.errors import os_reason
from env.scenario import Scenario
from env.telemetry import Telemetry

LATE_S = 0.25
"""A policy that takes longer is interrupted; decisions take some 0.1 ms."""

CHANCES = 3
"""A policy that has failed so often is not asked again."""

COOL_OFF_S = 2.0
"""How long the fallback decides after a failure."""

PRIORITY_EVERY_S = 1.0
"""How often real-time priority is asked for again."""

NO_PRIORITY = "no real-time priority: polls may come late where memcached never rests"

SAMPLE_EVERY_S = 1.0
"""How often the readings are written down, besides at every change."""


Sampler = Callable[[Telemetry, Allocation], None]
"""Takes the readings of a moment and who holds what from then on."""


class PolicyLateError(RuntimeError):
    """The policy took too long."""


class TimeLimit:
    """
    Interrupts what takes too long, in the main thread: a `with` block that may raise.

    :param seconds: how long a block may take [s]
    :raises PolicyLateError: in a block that takes longer
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        signal.signal(signal.SIGALRM, self._ring)

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        raise PolicyLateError(f"took more than {self._seconds:g} s")


class GuardedPolicy:
    """
    A policy whose failures do no harm: the fallback decides instead, and the log says why.

    :param policy: decides; reset for the scenario
    :param scenario: the problem
    :param recorder: is told of failures
    """

    def __init__(self, policy: Policy, scenario: Scenario, recorder: Recorder):
        self.policy = policy
        self.failures = 0
        self.period_s = scenario.control.period_s
        self.wakes = self.regulated = True
        self._scenario = scenario
        self._recorder = recorder
        self._fallback = Fallback(scenario)
        self._limit = TimeLimit(LATE_S)
        self._jobs = scenario.jobs
        self._valid: Allocation | None = None
        self._trusted_from_s = -math.inf
        self._trouble = ""

    def decide(self, telemetry: Telemetry, stale: str) -> Allocation:
        """
        Who holds what from now on.

        :param telemetry: what the machine shows
        :param stale: why the telemetry cannot be decided by, empty if it can
        """
        if stale:
            return self._fall_back(telemetry, stale)
        if telemetry.time_s < self._trusted_from_s:
            return self._fall_back(telemetry, self._trouble)
        try:
            with self._limit:
                if self._jobs is not self._scenario.jobs:
                    self.policy.change_jobs(self._scenario)
                    self._jobs = self._scenario.jobs
                allocation = self.policy.decide(telemetry)
                if allocation is None or allocation is not self._valid:
                    self._valid = allocation.validate(self._scenario)
                period_s = float(self.policy.period_s)
            if not (math.isfinite(period_s) and period_s > 0.0):
                raise ValueError(f"its period is {period_s} s")
        except Exception as fault:
            self.failures += 1
            cool_off_s = COOL_OFF_S if self.failures < CHANCES else math.inf
            self._trusted_from_s = telemetry.time_s + cool_off_s
            return self._fall_back(telemetry, f"{type(fault).__name__}: {fault}")
        if self._trouble:
            self._trouble = ""
            self._note(f"{self.policy.name} decides again")
        self.period_s = period_s
        self.wakes, self.regulated = self.policy.wakes, self.policy.regulated
        return allocation

    def see_jobs(self, scenario: Scenario) -> None:
        """
        Go on with other jobs, which the policy is told of before it decides the next time.

        :param scenario: the same with those jobs
        """
        self._scenario, self._valid = scenario, None
        self._fallback = Fallback(scenario)

    def _fall_back(self, telemetry: Telemetry, why: str) -> Allocation:
        if not self._trouble:
            forever = ", for the rest of the run" if self._trusted_from_s == math.inf else ""
            self._note(f"the fallback decides{forever}: {' '.join(why.split())}")
        self._trouble = why or "the policy has failed"
        self.period_s = 4.0 * self._scenario.control.period_s
        self.wakes = self.regulated = True
        return self._fallback.decide(telemetry)

    def _note(self, detail: str) -> None:
        self._recorder.event("custom", SCHEDULER, detail=detail)


class StopRequest:
    """Notes the signals of `STOPPING` instead of obeying at once: everything ends in good order."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the terminal's end is not the run's
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number


class Loop:
    """
    One deployment, from the making of its jobs to the last one's end.

    :param machine: what it reads and changes
    :param policy: decides; reset for the scenario
    :param recorder: is told what happens
    :param stop: says when to stop early
    :param samplers: are shown the readings at every change, once a second and at the end
    """

    def __init__(
        self,
        machine: LiveMachine,
        policy: Policy,
        recorder: Recorder,
        stop: StopRequest,
        samplers: Sequence[Sampler] = (),
    ):
        self.machine = machine
        self.guarded = GuardedPolicy(policy, machine.scenario, recorder)
        self._recorder = recorder
        self._stop = stop
        self._prioritised_s = -math.inf
        self._refused = ""
        self._samplers = samplers
        self._sampled_s = -math.inf
        self._scenario = machine.scenario
        self.cpu_pct = 0.0
        """CPU use of this process while it has decided [% of one vCPU]; 0 if it never has."""
        machine.watch(policy.probe_window_s)

    def run(self) -> None:
        """Have the jobs made, then decide until all have ended; or until asked to stop."""
        self._go_first()
        try:
            self._await_readings()
            for _ in self.machine.prepare():
                self._go_first()
                if self._sample_is_due:
                    self._sample(self.machine.telemetry())
                if self._stop.number:
                    break
            gc.freeze()  # collections keep off all that was made so far
            gc.enable()
            used_s, began_s = time.process_time(), time.monotonic()
            while not (self.machine.over or self._stop.number):
                self.step()
                took_s = time.monotonic() - began_s
                self.cpu_pct = 100.0 * (time.process_time() - used_s) / took_s
            self._sample(self.machine.telemetry())
        finally:
            standing.step_back()

    def step(self) -> None:
        """One decision and the wait for the next."""
        machine, guarded = self.machine, self.guarded
        if machine.scenario is not self._scenario:
            self._scenario = machine.scenario
            guarded.see_jobs(self._scenario)
        self._go_first()
        telemetry, stale = machine.telemetry(), machine.stale
        changes = machine.actuator.changes
        allocation = guarded.decide(telemetry, stale)
        machine.apply(allocation, guarded.regulated)
        if self._sample_is_due or machine.actuator.changes != changes:
            self._sample(telemetry)
        machine.advance(telemetry.time_s + guarded.period_s, guarded.wakes)

    def _go_first(self) -> None:
        """Every second: threads come, and the guardian has a loop that is silent step back."""
        if self.machine.polled_s - self._prioritised_s < PRIORITY_EVERY_S:
            return
        self._prioritised_s = self.machine.polled_s
        try:
            standing.go_first()
        except OSError as error:
            if not self._refused:
                self._refused = f"{NO_PRIORITY} ({os_reason(error)})"
                self._recorder.event("custom", SCHEDULER, detail=self._refused)

    @property
    def _sample_is_due(self) -> bool:
        return self.machine.polled_s - self._sampled_s >= SAMPLE_EVERY_S

    def _sample(self, telemetry: Telemetry) -> None:
        self._sampled_s = telemetry.time_s
        for sampler in self._samplers:
            sampler(telemetry, self.machine.applied)

    def _await_readings(self) -> None:
        """Memcached answers within milliseconds; without it the fallback begins."""
        self.machine.poll()
        give_up_s = self.machine.now_s + 4.0 * self.machine.scenario.control.period_s
        while self.machine.stale and self.machine.now_s < give_up_s:
            self.machine.advance(self.machine.now_s)
