"""
What the scenario's profile makes of a run on a real machine, beside what was measured.

    python -m training.refinement.predict_run report

Twice under the load, without the time of the vCPUs that was stolen, and on a host as fast as it
really was: with the decisions that were really taken (`training.refinement.live_replay`), and with
the policy free. A process of its own, because the live agent goes without the simulator's compiler;
`deploy.records.predicted` starts it and shows what it finds.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import agents
from agents.policy import Policy
from deploy.records.predicted import (
    CANNOT,
    Figures,
    PolicySource,
    Prediction,
    read_policy,
    write_prediction,
)
from deploy.records.recorder import POLICY_FILE
from env.allocation import JobState
from env.errors import InputError, exit_on_bad_input, os_reason
from env.inputs.commandline import OneLineParser
from env.physics.compiled import compiled
from env.physics.parameters import STEALS_PER_S
from env.scenario import Scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.simulator.profile import Profile, load_profile
from env.simulator.rates import SOON_S, refresh
from training.calibration.replay import begin_steal
from training.evaluation.episodes import EpisodeStart, Run, run_episode
from training.evaluation.timeline import Interval, Recording, TimelineRecorder
from training.refinement.live_replay import LiveReplay, Replayed, room_of
from training.refinement.live_run import LiveRun, read_live_run

DRAWS = 5
"""How often the policy is let free; hiccups, delays and the phase of its decisions differ."""

MOSTLY = 0.5
"""Part of an interval in which a job runs on memcached's vCPUs for the interval to be shared."""

SAMPLES = 20
"""How many moments of an interval tell."""

DRIFTED = 0.05
"""How much faster or slower a host must be for a word; its mean in a run is known to about that."""

NOTICED = 0.02
"""Share of all vCPUs' time that others take and that is worth a word."""


def prediction_of(run: LiveRun, profile: Profile, source: PolicySource | None) -> Prediction:
    """
    Play a run twice.

    :param run: the run
    :param profile: the parameters
    :param source: who decided; None where that is not known
    """
    remarks = []
    if run.report["makespan_s"] is None:
        remarks.append("the run ended before its jobs: it has no makespan")
    if run.resumed_s is not None:
        remarks.append(
            "the run was resumed: what held while no loop ran is not recorded, and changes are "
            "counted from then on"
        )
    if run.stolen > NOTICED:
        remarks.append(
            f"the hypervisor took {run.stolen:.0%} of the vCPUs' time, in what is predicted, too"
        )
    if abs((speed := run.host_speed(profile)) - 1.0) > DRIFTED:
        remarks.append(
            f"the host was {speed:.2f} times as fast as when the profile was measured, in what is "
            "predicted, too"
        )
    if (used := foreign_vcpus(run, profile)) > NOTICED * run.scenario.machine.vcpus:
        remarks.append(
            f"other processes used {used:.2f} vCPUs while jobs ran: what is predicted has none"
        )
    if not run.measured:
        remarks.append("nothing has measured latency; the load is memcached's own count")
    free = None
    try:
        free = free_figures(run, profile, source)
        if free.makespan_s is None:
            limit_s = run.scenario.load.duration_s
            remarks.append(f"with the policy free the jobs are not done within {limit_s:g} s")
    except InputError as error:
        remarks.append(f"nothing is predicted with the policy free: {error}")
    return Prediction(
        profile=profile.name,
        measured=measured_figures(run),
        replayed=replayed_figures(run, LiveReplay(run).play(profile)),
        free=free,
        remarks=remarks,
    )


def policy_of(source: PolicySource | None) -> Policy:
    """
    The policy that decided.

    :param source: who that was; None where that is not known
    :raises InputError: if it is not known, or is not there as it was
    """
    if source is None:
        raise InputError("it is not recorded who decided")
    if not source.unchanged:
        raise InputError(f"{source.source} is gone, or another than it was")
    return agents.make(source.source)


def measured_figures(run: LiveRun) -> Figures:
    """
    What was measured.

    :param run: the run
    """
    report = run.report
    first_s, last_s = run.window_s
    minutes = max(1e-3, last_s - max(first_s, run.resumed_s or 0.0)) / 60.0
    jobs = {
        name: None if None in (job["end_s"], job["start_s"]) else job["end_s"] - job["start_s"]
        for name, job in report["jobs"].items()
    }
    found = _figures(run.recording, run.window_s, run.scenario.service.slo_us)
    return found.model_copy(
        update={
            "makespan_s": report["makespan_s"],
            "violation_ratio": report["violation_ratio"],
            "changes_per_min": report["actuations"] / minutes,
            "guard_steps": report["guard"]["steps"],
            "jobs": jobs,
        }
    )


def replayed_figures(run: LiveRun, replayed: Replayed) -> Figures:
    """
    What the profile makes of the decisions that were taken; changes are those that were made.

    :param run: the run
    :param replayed: see `LiveReplay.play`
    """
    trace = run.trace
    times = (trace.interval_start_s, trace.interval_end_s, trace.qps, replayed.p95_us)
    intervals = [Interval(*map(float, one)) for one in zip(*times, strict=True)]
    recording = Recording(intervals, run.recording.service, run.recording.jobs)
    jobs = {
        job.name: float(run_s + sum(after - before for before, after in job.pauses))
        if run_s > 0.0
        else None
        for job, run_s in zip(trace.jobs, replayed.run_s, strict=True)
    }
    found = _figures(recording, run.window_s, run.scenario.service.slo_us)
    return found.model_copy(update={"makespan_s": replayed.makespan_s, "jobs": jobs})


def foreign_vcpus(run: LiveRun, profile: Profile) -> float:
    """
    What was used while jobs ran by others than memcached, the jobs, and the load by the profile.

    The loop and its probe count as others where the profile does not know what they take.

    :param run: the run
    :param profile: knows what the load generator takes of a vCPU of this machine
    :return: [vCPUs]
    """
    first_s, last_s = run.window_s
    inside = [one for one in run.samples if first_s <= one.time_s <= last_s]
    lasted_s = inside[-1].time_s - inside[0].time_s if inside else 0.0
    if lasted_s <= 0.0:
        return 0.0
    service, busy = run.use
    jobs_s = sum(used.cpu_s - inside[0].jobs[name].cpu_s for name, used in inside[-1].jobs.items())
    profile = profile.at_speed(run.host_speed(profile))
    costs = profile.costs
    load = run.trace.qps / math.prod(
        profile.service[name].value for name in ("core_capacity_qps", "vm_speed")
    )
    client = 0.0
    if "client_cpu" in costs:
        client = float(np.mean(costs["client_cpu"].value * load ** costs["client_exponent"].value))
    if "agent_cpu" in costs:
        client += costs["agent_cpu"].value
    return max(0.0, sum(busy) - service - jobs_s / lasted_s - client)


def free_figures(run: LiveRun, profile: Profile, source: PolicySource | None) -> Figures:
    """
    Let the policy decide under the load of a run, from the first start's decision on.

    :param run: the run
    :param profile: the parameters
    :param source: who decided; None where that is not known
    :return: means over `DRAWS` episodes
    :raises InputError: if the policy is not there as it was, does not fit or fails
    """
    policy = policy_of(source)
    policy.reset(run.scenario)
    machine = _UnderLoad(run, profile.at_speed(run.host_speed(profile)))
    found = []
    for draw in range(DRAWS):
        recorder = TimelineRecorder(run.scenario)
        start = EpisodeStart(trace_seed=1, entropy=draw)  # the load is the run's, whatever the seed
        episode = run_episode(machine, policy, start, recorder=recorder, probed=run.probed)
        if episode.error:
            raise InputError(f"the policy fails {episode.error}")
        found.append(_free_figures(episode, recorder.recording, run.scenario))
    return _mean(found)


class _UnderLoad(SimulatedMachine):
    """A machine that is as the real one was from the first start's decision on, steals included."""

    def __init__(self, run: LiveRun, profile: Profile):
        super().__init__(EpisodeFactory(run.scenario, profile, room=room_of(run.scenario)))
        decided = [job["decided_s"] for job in run.report["jobs"].values() if job["decided_s"]]
        begins_s, trace = min(decided, default=run.trace.first_start_s), run.trace
        first = int(np.searchsorted(trace.interval_end_s, begins_s, "right"))
        first = min(first, len(trace.qps) - 1)
        # What would have come later is not recorded: the load begins anew.
        self._loads = np.resize(trace.qps[first:], self.factory.trace_length)
        self._first_ends_s = max(1e-3, trace.interval_end_s[first] - begins_s)
        self._interval_s = float(np.median(trace.interval_end_s - trace.interval_start_s))
        later = run.steals[run.steals["time_s"] >= begins_s]
        self._lasts_s = max(1e-3, run.samples[-1].time_s - begins_s)
        self._steals = [(float(one["time_s"] - begins_s), float(one["value"])) for one in later]
        self._due: Iterator[tuple[float, float]] = iter(())

    def begin(self, trace_seed: int, rng: np.random.Generator) -> None:
        super().begin(trace_seed, rng)
        host = self.host
        host.interval_s, host.interval_ends_s = self._interval_s, self._first_ends_s
        host.host_params[STEALS_PER_S] = 0.0  # those that happened are recorded
        self.follow(self._loads)
        host.ready_s = 0.0  # the jobs were made before the first decision
        self._due = self._again_and_again()
        self._next = next(self._due, None)

    def _again_and_again(self) -> Iterator[tuple[float, float]]:
        """What was stolen: when and for how long [s]; after the records' end once more."""
        if self._steals:
            for turn in itertools.count():
                yield from ((turn * self._lasts_s + at_s, for_s) for at_s, for_s in self._steals)

    def pass_time(self, until_s: float, wake: bool = False) -> None:
        host = self.host
        while self._next is not None and self._next[0] < until_s:
            at_s, for_s = self._next
            if at_s > host.now_s:
                super().pass_time(at_s, wake)
                if host.now_s < at_s - SOON_S:  # woken, or over
                    return
            begin_steal_at(self._hosts, 0, for_s)
            self._next = next(self._due)
        super().pass_time(until_s, wake)


@compiled
def begin_steal_at(hosts: Any, b: int, length_s: float) -> None:
    """See `begin_steal`; on host b."""
    begin_steal(hosts[b], length_s)
    refresh(hosts[b])


def _free_figures(run: Run, recording: Recording, scenario: Scenario) -> Figures:
    summary = run.summary
    jobs = {
        name: None if None in (job["end_s"], job["start_s"]) else job["end_s"] - job["start_s"]
        for name, job in summary["jobs"].items()
    }
    starts = [job["start_s"] for job in summary["jobs"].values() if job["start_s"] is not None]
    window_s = min(starts, default=math.inf), recording.end_s
    return _figures(recording, window_s, scenario.service.slo_us).model_copy(
        update={
            "makespan_s": run.makespan_s if run.completed else None,
            # Without a start no interval counts, which the simulator calls 0.
            "violation_ratio": run.violation_ratio if starts else None,
            "changes_per_min": run.actuations_per_min,
            "guard_steps": summary["guard_steps"],
            "jobs": jobs,
        }
    )


def _figures(recording: Recording, window_s: tuple[float, float], slo_us: float) -> Figures:
    """What a recording shows by itself: p95 of the intervals, and what sharing costs."""
    counted = [
        one
        for one in recording.intervals
        if one.end_s > window_s[0] and one.start_s < window_s[1] and math.isfinite(one.p95_us)
    ]
    p95_us = [one.p95_us for one in counted]
    shared = [_shared(recording, one) > MOSTLY for one in counted]
    apart = [p95 for p95, is_shared in zip(p95_us, shared, strict=True) if not is_shared]
    return Figures(
        makespan_s=None,
        violation_ratio=float(np.mean(np.array(p95_us) > slo_us)) if p95_us else None,
        intervals=len(p95_us),
        p95_median_us=_quantile(p95_us, 0.5),
        p95_high_us=_quantile(p95_us, 0.95),
        shared_p95_us=_quantile(list(np.array(p95_us)[np.array(shared, bool)]), 0.5),
        apart_p95_us=_quantile(apart, 0.5),
        changes_per_min=None,
        guard_steps=None,
        jobs={},
    )


def _shared(recording: Recording, interval: Interval) -> float:
    """The part of an interval in which some job runs on memcached's vCPUs, by `SAMPLES` moments."""
    length_s = interval.end_s - interval.start_s
    times_s = [interval.start_s + (k + 0.5) / SAMPLES * length_s for k in range(SAMPLES)]
    spans = [span for of_job in recording.jobs.values() for span in of_job]
    running = [span for span in spans if span.state == JobState.RUNNING]

    def shared_at(time_s: float) -> bool:
        moves = [cores for moved_s, cores in recording.service if moved_s <= time_s]
        own = set(moves[-1]) if moves else set()
        return any(a.start_s <= time_s < a.end_s and own & set(a.cores) for a in running)

    return sum(map(shared_at, times_s)) / SAMPLES


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


def _mean(figures: Sequence[Figures]) -> Figures:
    """Each figure's mean; None where it is not known of every one."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if len(known) == len(values) else None

    names = [name for name in Figures.model_fields if name != "jobs"]
    means = {name: mean([getattr(one, name) for one in figures]) for name in names}
    jobs = {name: mean([one.jobs[name] for one in figures]) for name in figures[0].jobs}
    return Figures(**means, jobs=jobs)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Predict from the command line.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m training.refinement.predict_run", description=__doc__)
    line.formatter_class = argparse.RawDescriptionHelpFormatter
    line.add_argument("folder", type=Path, help="the run's report folder")
    folder = line.parse_args(argv).folder
    with exit_on_bad_input():
        try:
            run = read_live_run(folder)
            profile = load_profile(run.scenario.profile)
            source = read_policy(folder) if (folder / POLICY_FILE).exists() else None
            write_prediction(folder, prediction_of(run, profile, source))
        except OSError as error:
            raise InputError(f"{folder}: cannot be written to ({os_reason(error)})") from error
        except (ValueError, KeyError, IndexError) as error:
            raise InputError(f"{folder}: {CANNOT} from what its files say ({error})") from error


if __name__ == "__main__":
    main()
