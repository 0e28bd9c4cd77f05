"""
Episodes on this machine: the backend of an environment whose decisions are edits.

An episode is a deployment whose policy is outside: the same sensors, regulator and actuator, the
same guardian, and afterwards the machine is as it was found. The load is whatever somebody else
sends to memcached; p95 comes from the probe, interval by interval. An episode whose readings are
stale and stay so is cut off, because nothing can be decided by them.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.assembly import Parts, assembled, steered
from deploy.load.probe import RATE_QPS, Probe
from deploy.load.slo_monitor import PROBE_LIMIT_S, SloMonitor
from deploy.loop.live_machine import LiveMachine
from deploy.requirements import require
from deploy.safety import guardian
from deploy.settings import Settings
from env.action import edit_table, legal_edits
from env.allocation import JobState
from env.codes import TERMINATED, TRUNCATED
from env.control import ControlState
from env.errors import InputError
from env.observation import observe, remember, shift_history
from env.reward import TERMS, churn_term, potential, shaping_term, slo_term, time_term
from env.scenario import Scenario

START_LIMIT_S = 5.0
"""How long the sensors and the probe may take to show something."""

PATIENCE_S = 2.0
"""How long stale readings are waited for."""

LOAD_WINDOW_S = 0.5
"""How long the load is counted before an episode."""

LEAST_LOAD = 0.5
"""Less than this part of the scenario's smallest load is none."""


class LiveBackend:
    """
    This machine, as an environment runs episodes on it; see `env.colocation.Backend`.

    :param scenario: the problem
    :param settings: names memcached's address and the jobs' runtime; each episode has a folder of
        its own in the folder of the report
    :raises InputError: if this machine is not fit for it
    """

    makes_load = False

    def __init__(self, scenario: Scenario, settings: Settings):
        require(scenario, settings)
        self._scenario = scenario
        self._settings = settings
        # Python's own numbers are faster, one by one.
        self._rows = edit_table(scenario).rows.astype(object)
        self._episode: Episode | None = None
        atexit.register(self.close)

    def begin(self, trace_seed: int, rng: np.random.Generator) -> None:
        """
        Start an episode: no job has run yet, memcached has its refuge.

        :param trace_seed: without effect: somebody else makes the load
        :param rng: without effect: nothing here is drawn
        :raises InputError: if memcached, its load or whoever runs the jobs is not there
        """
        self.close()
        self._episode = Episode(self._scenario, self._settings, self._rows)

    def step(self, edit: int, gamma: float) -> tuple[int, dict[str, float]]:
        """
        One decision; whatever goes wrong, the machine is put right first.

        :param edit: index into the scenario's edits
        :param gamma: discount for the shaping term
        :return: 0, `TERMINATED` or `TRUNCATED`, and the reward terms
        :raises InputError: if a job cannot run or the probe has died
        :raises RuntimeError: if no episode is under way
        """
        if self._episode is None or self._episode.closed:
            raise RuntimeError("no episode is under way: reset first")
        try:
            ended, terms = self._episode.step(edit, gamma)
        except BaseException:
            self.close()
            raise
        if ended:
            self.close()
        return ended, terms

    def observe(self, row: npt.NDArray[np.float32]) -> None:
        """
        Write the observation, features first and then the mask of legal edits.

        :param row: float32[n_features + n_edits], written in place
        """
        assert self._episode is not None, "begin comes first"
        control, n_features = self._episode.control, len(row) - len(self._rows)
        observe(control, control.n_vcpus, row[:n_features])
        legal_edits(control, self._rows, row[n_features:])

    def summary(self) -> dict[str, Any]:
        """The episode's figures, as `env.simulator.machine.episode_summary` has them."""
        assert self._episode is not None, "begin comes first"
        return self._episode.summary()

    def close(self) -> None:
        """
        End the episode, if one is under way, and leave the machine as it was found.

        :raises RuntimeError: if something could not be undone
        """
        if self._episode is not None:
            self._episode.close()


class Episode:
    """
    One run of the jobs, decided about from outside.

    :param scenario: the problem
    :param settings: see `LiveBackend`
    :param rows: int[n_edits, 7], see `env.action.EditTable`
    :raises InputError: if it cannot begin
    """

    def __init__(self, scenario: Scenario, settings: Settings, rows: Any):
        self._scenario, self._rows = scenario, rows
        self.closed = False
        self._changes = self._edits = self._decisions = 0
        self._sums = dict.fromkeys(TERMS, 0.0)
        with contextlib.ExitStack() as stack:
            self._take_hold(settings, stack)
            self._await_load(settings)
            for _ in self.machine.prepare():
                pass
            self.control: ControlState = self.machine.sense()
            self.control.settled_qps = self.control.qps
            self._began_s = self.machine.polled_s
            self._slo_monitor = SloMonitor(self._probe, scenario, time.monotonic())
            self._undo = stack.pop_all()

    def step(self, edit: int, gamma: float) -> tuple[int, dict[str, float]]:
        """
        The simulator's `env.simulator.kernel.step` on a real machine; see `LiveBackend.step`.

        :param edit: index into the scenario's edits
        :param gamma: discount for the shaping term
        """
        machine, control, loop = self.machine, self.control, self._scenario.control
        before_s, before, applied = machine.polled_s, self._potential(), machine.applied
        machine.edit(self._rows, edit)
        changes = len(machine.applied.changes_from(applied))
        shift_history(control)
        machine.advance(before_s + (loop.hold_s if control.kept else loop.period_s), wake=True)
        # A trainer that was away for an update has asked for no readings meanwhile.
        self._poll_while(lambda: bool(machine.stale), PATIENCE_S)
        machine.sense()
        remember(control)
        ended = self._end_code()
        violated_s, over_slo_s = self._slo_monitor.poll(self._first_start_s())
        if ended:
            end_s = time.monotonic()
            self._poll_while(lambda: self._probe.known_until_s < end_s, PROBE_LIMIT_S)
            more_violated_s, more_over_s = self._slo_monitor.finish(end_s, self._first_start_s())
            violated_s, over_slo_s = violated_s + more_violated_s, over_slo_s + more_over_s
        after = 0.0 if ended == TERMINATED else self._potential()
        edited = 1 - control.kept
        terms = {
            "time": time_term(machine.polled_s - before_s),
            "slo": slo_term(violated_s, over_slo_s),
            "churn": churn_term(edited + changes),
            "shaping": shaping_term(gamma, before, after),
            "jct": 0.0,  # all jobs are there from the start
        }
        self._decisions += 1
        self._edits += edited
        self._changes += changes
        for name, value in terms.items():
            self._sums[name] += value
        return ended, terms

    def summary(self) -> dict[str, Any]:
        """The figures of the episode so far; one that was cut off counts its length."""
        records = self._state.jobs
        completed = all(record.exit_code == 0 for record in records.values())
        makespan_s = self.machine.polled_s - self._began_s
        if completed:
            started = min(record.start_s or 0.0 for record in records.values())
            makespan_s = max(record.end_s or 0.0 for record in records.values()) - started
        return {
            "makespan_s": makespan_s,
            "completed": completed,
            "violation_ratio": self._slo_monitor.violations / max(1, self._slo_monitor.intervals),
            "violations": self._slo_monitor.violations,
            "intervals": self._slo_monitor.intervals,
            "interval_s": self._scenario.load.interval_s,
            "edits": self._edits,
            "actuations": self._changes,
            "overruled": self.machine.overruled,
            "guard_steps": self.machine.guard_steps,
            "guard_s": self.machine.guard_s,
            "illegal_edits": self.control.illegal_edits,
            "decisions": self._decisions,
            "reward_terms": dict(self._sums),
            "jobs": {
                name: {
                    "start_s": record.start_s,
                    "end_s": record.end_s,
                    "paused_s": record.paused_s,
                    "threads": record.threads,
                }
                for name, record in records.items()
            },
        }

    def close(self) -> None:
        """See `LiveBackend.close`."""
        self.closed = True
        self._undo.close()

    def _take_hold(self, settings: Settings, stack: contextlib.ExitStack) -> None:
        """Take hold of the machine; what is on the stack lets go of it again."""
        self.log = _new_folder(settings.report)
        settings = replace(settings, report=self.log, probe=True, tap=False)
        parts = stack.enter_context(assembled(self._scenario, settings))
        assert isinstance(parts.latency, Probe), "it was asked for"
        self._state, self._probe = parts.state, parts.latency
        self.machine = stack.enter_context(_steered(parts, settings))

    def _await_load(self, settings: Settings) -> None:
        """Wait for the sensors' and the probe's first readings, and see that there is a load."""
        machine = self.machine
        machine.poll()
        self._poll_while(
            lambda: bool(machine.stale) or not self._probe.known_until_s, START_LIMIT_S
        )
        before_s, before = machine.polled_s, machine.sensor.requests
        machine.advance(before_s + LOAD_WINDOW_S)
        after = machine.sensor.requests
        where = f"{settings.host}:{settings.port}"
        if before is None or after is None or after.time_s <= before.time_s:
            raise InputError(f"{where}: memcached does not answer")
        qps = (after.count - before.count) / (after.time_s - before.time_s) - RATE_QPS
        load = self._scenario.load
        if qps < LEAST_LOAD * load.qps_min:
            raise InputError(
                f"{where}: memcached has no load ({max(0.0, qps):.0f} requests/s); scenario "
                f"{self._scenario.name} wants {load.qps_min} to {load.qps_max}"
            )

    def _poll_while(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Go on polling while a condition holds, for at most `limit_s` seconds."""
        machine = self.machine
        give_up_s = machine.now_s + limit_s
        while condition() and machine.now_s < give_up_s:
            machine.advance(machine.polled_s + self._scenario.control.period_s)

    def _potential(self) -> float:
        """Phi by what can be measured: the CPU time that is left of the profile's work."""
        row = self.control
        left_s = sum(
            max(0.0, work_s - used_s)
            for work_s, used_s, state in zip(
                row.job_work_s, row.job_cpu_s, row.job_state, strict=True
            )
            if state != JobState.DONE
        )
        return potential(left_s, row.n_vcpus)

    def _end_code(self) -> int:
        """How the episode stands: 0 while it goes on, else `TERMINATED` or `TRUNCATED`."""
        for name, record in self._state.jobs.items():
            if record.exit_code:
                raise InputError(
                    f"job {name}: given up, exit code {record.exit_code}; {self.log} has its log"
                )
        if self.machine.over:
            return TERMINATED
        late = self.machine.polled_s - self._began_s >= self._scenario.load.duration_s
        return TRUNCATED if late or self.machine.stale else 0

    def _first_start_s(self) -> float:
        """When the first job started, on the monotonic clock; infinite before."""
        started = [one.start_s for one in self._state.jobs.values() if one.start_s is not None]
        return self._state.started_s + min(started) if started else math.inf


@contextlib.contextmanager
def _steered(parts: Parts, settings: Settings) -> Iterator[LiveMachine]:
    """
    Keep hold of the machine under the eyes of a guardian of its own.

    :raises RuntimeError: at the end, if something could not be undone
    """
    with contextlib.closing(guardian.launch()) as watcher, contextlib.ExitStack() as stack:
        steering = stack.enter_context(steered(parts, settings, watcher))
        try:
            yield steering.machine
        finally:
            stack.close()
            if steering.faults:
                raise RuntimeError("; ".join(steering.faults))


def _new_folder(folder: Path) -> Path:
    """The next free numbered folder."""
    number = 1
    while (path := folder / f"{number:04d}").exists():
        number += 1
    return path
