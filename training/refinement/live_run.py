"""A deployment's records as a run that the simulator can play."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.records.mcperf import Row
from deploy.records.recorder import (
    PROBE_FILE,
    RESUMED,
    SCHEDULER,
    Event,
    Sample,
    read_events,
    read_samples,
    scenario_of,
)
from deploy.records.run_report import read_intervals, read_report
from env.allocation import JobState, mask_of
from env.codes import BACKGROUND, NORMAL
from env.errors import InputError
from env.scenario import Scenario
from env.simulator.profile import Profile
from training.calibration.logs.traces import JobTrace, RunTrace
from training.calibration.replay import EVENT, FAIL, QUOTA, STOLEN, WEIGHT
from training.evaluation.live_recording import recording_of
from training.evaluation.timeline import Recording, Span

RUNS = ("running", "paused")
"""States in which a sample's weight and quota are in force."""

LONGEST_STEAL_S = 0.02
"""Samples tell how much was stolen, not in how many pieces; in busy times this was seen."""

LONGEST_GAP_S = 5.0
"""Of two samples that tell of the time in between; there is one a second while a loop runs."""

MOST_STOLEN = 0.95  # of the time between two samples, or the next piece would begin in this one

HOST_SPEEDS = (0.2, 5.0)
"""Relative to when a profile was measured; what records say beyond that is taken to be as much."""


@dataclass(frozen=True)
class LiveRun:
    """
    One run on a real machine. Times count from its start [s].

    :param scenario: the problem
    :param report: what `report.json` holds
    :param recording: intervals, memcached's vCPUs and the jobs' places
    :param trace: the same as a logged run; a job that never started does so at infinity, one that
        never ended does so at the run's end
    :param placing: `EVENT`[n], weights, quotas and failed attempts, which logs of the course lack
    :param steals: `EVENT`[n], when all vCPUs were stolen and for how long [s]
    :param samples: the telemetry
    :param spoiled: bool[n_intervals], whose latency is not memcached's doing alone
    :param stalled: share of what clients were to send that they sent late; None if not measured
    :param probed: whether the policy and the guard had a probe
    :param measured: whether latency was measured
    :param resumed_s: when the run last went on after its loop had been killed; None if it never did
    """

    scenario: Scenario
    report: dict[str, Any]
    recording: Recording
    trace: RunTrace
    placing: Any
    steals: Any
    samples: list[Sample]
    spoiled: npt.NDArray[np.bool_]
    stalled: float | None
    probed: bool
    measured: bool
    resumed_s: float | None

    @property
    def window_s(self) -> tuple[float, float]:
        """From the first job's start to the last job's end, or the run's if one never ended."""
        ends = [job.end_s for job in self.trace.jobs if math.isfinite(job.end_s)]
        return self.trace.first_start_s, max(ends)

    @property
    def use(self) -> tuple[float, list[float]]:
        """Mean CPU use of memcached, and busy share of each vCPU, while jobs ran [vCPUs]."""
        inside = self._inside
        times_s = np.array([one.time_s for one in inside])
        lasted_s = max(1e-3, times_s[-1] - times_s[0])
        cpu = np.array([one.cpu_cores for one in inside])
        pairs = zip(inside[-1].busy_s, inside[0].busy_s, strict=True)
        # A sample tells of its last poll only.
        service = float(cpu[1:] @ np.diff(times_s)) / lasted_s
        return service, [(after - before) / lasted_s for after, before in pairs]

    @property
    def stolen(self) -> float:
        """Share of the vCPUs' time that the hypervisor gave to others."""
        first, last = self.samples[0], self.samples[-1]
        length_s = max(1e-3, last.time_s - first.time_s)
        return (last.stolen_s - first.stolen_s) / (length_s * self.scenario.machine.vcpus)

    def host_speed(self, profile: Profile) -> float:
        """
        How fast the host was while jobs ran, relative to when the profile was measured.

        What is done in a run goes with the mean of the speeds, not with that of the times.

        :param profile: of this machine
        :return: 1 where the records or the profile do not tell
        """
        took_us, for_s = self._yardsticks
        if profile.yardstick_us is None or not len(took_us):
            return 1.0
        low, high = HOST_SPEEDS
        known_us = np.clip(took_us, profile.yardstick_us / high, profile.yardstick_us / low)
        return float(np.average(profile.yardstick_us / known_us, weights=for_s))

    @functools.cached_property
    def _yardsticks(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """What samples say that a fixed piece of work took [µs], and for how long it did [s]."""
        told = [
            (one.time_s, one.yardstick_us)
            for one in self._inside
            if one.yardstick_us is not None and one.yardstick_us > 0.0
        ]
        times_s, took_us = np.array(told).reshape(-1, 2).T
        for_s = np.clip(np.diff(times_s, prepend=times_s[:1] - 1.0), 1e-3, LONGEST_GAP_S)
        return took_us, for_s

    @functools.cached_property
    def _inside(self) -> list[Sample]:
        """The samples while jobs ran, two at least."""
        first_s, last_s = self.window_s
        inside = [one for one in self.samples if first_s <= one.time_s <= last_s]
        if len(inside) < 2:
            inside = self.samples[-2:] if len(self.samples) > 1 else self.samples * 2
        return inside

    def ended(self, name: str) -> bool:
        """
        Whether a job has done its work, and in its first attempt.

        :param name: of the job
        """
        job = self.report["jobs"][name]
        return job["end_s"] is not None and job["exit_code"] == 0 and job["retries"] == 0


def read_live_run(folder: Path) -> LiveRun:
    """
    Read a run.

    :param folder: its report folder
    :raises InputError: if it is none, no job ever started, or nothing is known of the load
    """
    scenario, report = scenario_of(folder), read_report(folder)
    if set(report["jobs"]) != set(scenario.job_names):
        raise InputError(f"{folder}: its report is not about the jobs of its scenario")
    events, samples, recording = read_events(folder), read_samples(folder), recording_of(folder)
    if not samples or not any(recording.jobs.get(name) for name in scenario.job_names):
        raise InputError(f"{folder}: no job has run")
    over_s = max(samples[-1].time_s, recording.end_s)
    begins_s = min(spans[0].start_s for spans in recording.jobs.values() if spans)
    rows = read_intervals(folder) or _counted(samples)
    rows = [row for row in rows if row.end_s > begins_s and row.start_s < over_s]
    loads = [(row.start_s, row.end_s, row.qps, row.p95_us) for row in rows]
    late = [row.client_late for row in rows if math.isfinite(row.client_late)]
    threads = {one.job: one.threads for one in events if one.what == "start" and one.threads}
    trace = _trace(scenario, report, recording, threads, loads, over_s)
    resumed = [one.time_s for one in events if (one.job, one.detail) == (SCHEDULER, RESUMED)]
    return LiveRun(
        scenario,
        report,
        recording,
        trace,
        _placing(scenario, events, samples),
        _steals(samples, scenario.machine.vcpus),
        samples,
        spoiled=np.array([row.spoiled for row in rows]),
        stalled=float(np.mean(late)) if late else None,
        probed=(folder / PROBE_FILE).exists(),
        measured=bool(np.isfinite(trace.p95_us).any()),
        resumed_s=max(resumed, default=None),
    )


def _counted(samples: Sequence[Sample]) -> list[Row]:
    """The load by memcached's own count, where nobody else has written it down."""
    return [
        Row(
            math.nan,
            (b.requests - a.requests) / (b.time_s - a.time_s),
            math.nan,
            a.time_s,
            b.time_s,
        )
        for a, b in pairwise(samples)
        if b.requests >= a.requests and b.time_s > a.time_s
    ]


def _trace(
    scenario: Scenario,
    report: dict[str, Any],
    recording: Recording,
    threads: dict[str, int],
    loads: list[tuple[float, float, float, float]],
    over_s: float,
) -> RunTrace:
    if not loads:
        raise InputError("nothing is recorded of the load")
    start_s, end_s, qps, p95_us = np.array(loads).T
    everything = (1 << scenario.machine.vcpus) - 1
    jobs = []
    for name in scenario.job_names:
        ended_s, spans = report["jobs"][name]["end_s"], recording.jobs.get(name, [])
        last_s = over_s if ended_s is None else ended_s
        jobs.append(_job(name, spans, threads.get(name, 1), last_s, everything))
    return RunTrace(
        run="",
        group="",
        year=0,
        day="",
        server="",
        interval_start_s=start_s,
        interval_end_s=end_s,
        qps=qps,
        p95_us=p95_us,
        service_threads=scenario.service.threads,
        service_moves=tuple((time_s, mask_of(cores)) for time_s, cores in recording.service),
        jobs=tuple(jobs),
        moves_logged=True,
        background=False,
    )


def _job(name: str, spans: Sequence[Span], threads: int, end_s: float, everything: int) -> JobTrace:
    if not spans:
        return JobTrace(name, math.inf, math.inf, threads, ((math.inf, everything),), ())
    moves = [(span.start_s, mask_of(span.cores) or everything) for span in spans]
    kept = [moves[0], *(now for before, now in pairwise(moves) if now[1] != before[1])]
    pauses = [(one.start_s, one.end_s) for one in spans if one.state == JobState.PAUSED]
    last_s = max(end_s, spans[-1].end_s)
    return JobTrace(name, spans[0].start_s, last_s, threads, tuple(kept), tuple(pauses))


def _placing(scenario: Scenario, events: Sequence[Event], samples: Sequence[Sample]) -> Any:
    """Weights and quotas by the samples, failed attempts by the log."""
    found: list[tuple[float, int, int, float]] = []
    for number, name in enumerate(scenario.job_names):
        before = (NORMAL, math.inf)
        for sample in samples:
            job = sample.jobs.get(name)
            if job is None or job.state not in RUNS:
                continue
            weight = BACKGROUND if job.weight == "background" else NORMAL
            now = (weight, math.inf if job.quota is None else job.quota)
            if now != before:
                found.append((sample.time_s, WEIGHT, number, float(weight)))
                found.append((sample.time_s, QUOTA, number, now[1]))
            before = now
        own = [event for event in events if event.job == name]
        for index, event in enumerate(own):
            if event.fails:
                starts = (one.time_s for one in own[index:] if one.what == "start")
                found.append((event.time_s, FAIL, number, next(starts, math.inf)))
    return np.array(found, EVENT)


def _steals(samples: Sequence[Sample], vcpus: int) -> Any:
    """What samples count as stolen, in even pieces; the vCPUs' mean stands for all of them."""
    found: list[tuple[float, int, int, float]] = []
    for before, after in pairwise(samples):
        length_s = after.time_s - before.time_s
        if not 0.0 < length_s <= LONGEST_GAP_S:
            continue
        stolen_s = max((after.stolen_s - before.stolen_s) / vcpus, 0.0)
        stolen_s = min(stolen_s, MOST_STOLEN * length_s)
        pieces = math.ceil(stolen_s / LONGEST_STEAL_S)
        found += [
            (before.time_s + length_s * piece / pieces, STOLEN, -1, stolen_s / pieces)
            for piece in range(pieces)
        ]
    return np.array(found, EVENT)
