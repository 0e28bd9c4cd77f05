"""
A run on a real machine, played in the simulator with the decisions that were taken.

The kernel's own functions play it (`training.calibration.replay`), in the two ways of that module:
*open*, for the jobs' times, their CPU time and p95, and *closed*, for the makespan. What the
hypervisor took is taken there, too, and the host is as fast as it was: like the load, neither is
the doing of those who decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.codes import NORMAL, RUNNING
from env.physics.parameters import STALLS_PER_S, STEALS_PER_S
from env.scenario import MAX_JOBS, Scenario
from env.simulator.host import HostFields
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import Profile
from training.calibration.replay import CLOSE, Script, build_script, play
from training.refinement.live_run import LiveRun

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Replayed:
    """
    What the physics makes of a run and its decisions.

    :param run_s: float64[J], seconds that each job runs without pauses, 0 if it never started
    :param cpu_s: float64[J], CPU time that each uses between its measured start and end [s]
    :param p95_us: float64[n_intervals] [µs]
    :param service_cores: mean CPU use of memcached [vCPUs]
    :param busy_cores: float64[C], mean busy share of each vCPU
    :param makespan_s: where jobs start at their predecessors' simulated ends; None if one never
        ends
    """

    run_s: FloatArray
    cpu_s: FloatArray
    p95_us: FloatArray
    service_cores: float
    busy_cores: FloatArray
    makespan_s: float | None


class LiveReplay:
    """
    Plays one run again and again, under different parameters.

    :param run: what is played
    """

    def __init__(self, run: LiveRun):
        self.run = run
        self._open, self._closed = _script(run, closed=False), _script(run, closed=True)

    def play(self, profile: Profile, closed: bool = True) -> Replayed:
        """
        Play it.

        :param profile: the parameters, as they were measured
        :param closed: whether the makespan is asked for, which takes a second replay
        """
        profile = profile.at_speed(self.run.host_speed(profile))
        host, run_s, p95_us = self._play(profile, self._open, False)
        makespan_s, own = None, slice(len(run_s))
        if closed:
            other, _, _ = self._play(profile, self._closed, True)
            first_s, last_s = float(other.start_s[own].min()), float(other.end_s[own].max())
            makespan_s = last_s - first_s if math.isfinite(last_s) else None
        lasted_s = max(1e-3, host.now_s - float(self._open.events["time_s"][0]))
        return Replayed(
            run_s,
            host.job_cpu_s[own].copy(),
            p95_us,
            host.service_cpu_s / lasted_s,
            host.vcpu_busy_s / lasted_s,
            makespan_s,
        )

    def _play(
        self, profile: Profile, script: Script, closed: bool
    ) -> tuple[HostFields, FloatArray, FloatArray]:
        trace = self.run.trace
        hosts, host = _host_before(self.run, profile)
        host.lands_s[: len(trace.jobs)] = script.start_s
        run_s, p95_us = np.zeros(len(trace.jobs)), np.zeros(len(trace.qps))
        play(hosts, script.events, script.predecessor, script.gap_s, closed, run_s, p95_us)
        return host, run_s, p95_us


def room_of(scenario: Scenario) -> tuple[int, int]:
    """
    Room for any number of jobs on a machine, so that one compiled kernel plays all runs there.

    :param scenario: any on this machine
    :return: numbers of jobs and vCPUs
    """
    return MAX_JOBS, scenario.machine.vcpus


def _script(run: LiveRun, closed: bool) -> Script:
    plain = build_script(run.trace, closed, 0.0)
    events = np.concatenate([plain.events, run.placing, run.steals])
    events = events[np.isfinite(events["time_s"])]  # jobs that never started
    events = events[np.lexsort((events["kind"] != CLOSE, events["time_s"]))]
    started = np.isfinite([job.start_s for job in run.trace.jobs])
    return Script(
        events,
        np.where(started, plain.start_s, math.inf),
        np.where(started, plain.predecessor, -1),
        plain.gap_s,
    )


def _host_before(run: LiveRun, profile: Profile) -> tuple[npt.NDArray[np.void], HostFields]:
    """A host before the run: no job has started, and only the player makes things happen."""
    factory = EpisodeFactory(run.scenario, profile, room=room_of(run.scenario))
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    factory.begin(hosts, targets, 0, 1, np.random.default_rng(0))
    host = HostFields(hosts, 0)
    jobs = run.trace.jobs
    host.threads[: len(jobs)] = [job.threads for job in jobs]
    host.sent_state = RUNNING
    host.sent_cores[: len(jobs)] = [job.moves[0][1] for job in jobs]
    host.sent_weight, host.sent_quota = NORMAL, math.inf
    host.true_service = run.trace.service_moves[0][1]
    host.interval_ends_s = host.service_lands_s = host.move_lands_s = math.inf
    host.hiccup, host.hiccup_turns_s = 0, math.inf
    host.host_params[[STALLS_PER_S, STEALS_PER_S]] = 0.0  # those that happened are in the records
    return hosts, host
