"""
A closed loop of a minute on a machine that was just measured, and what it says of its profile.

A simple rule runs some of the scenario's jobs, under its load, through the deployment that users
have, guard included. What the profile predicts of that run stands beside what was measured; a
prediction is *good enough* where both are as near to each other as `LIMITS` says, and where
everything it rests on is known well enough. Then the profile learns from the run: of memcached
beside containers, a loop and other processes, sweeps of memcached alone know nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from deploy.demo import END_S, run_under_load
from deploy.engines.images import docker_daemon
from deploy.records.predicted import Figures, Prediction, read_policy, write_prediction
from env.errors import InputError, os_reason
from env.scenario import Job, Scenario
from env.simulator.profile import Profile, save_profile
from training.refinement.live_replay import LiveReplay
from training.refinement.live_run import LiveRun, read_live_run
from training.refinement.predict_run import foreign_vcpus, prediction_of
from training.refinement.profile_update import update

FOLDER, VERDICT_FILE = "rehearsal", "verdict.json"

LIMIT_S = 50.0 + END_S
"""How long a rehearsal may take; after 50 s it is told to stop."""

RUN_S = 26.0
"""How long its jobs are meant to run."""

DONE_PER_VCPU = 0.25
"""What a vCPU gets done beside memcached and its load [s of work / s]; 0.2 to 0.5 were seen."""

LONGEST_INTERVAL_S = 2.0
"""Longer intervals are cut to this, or there would be too few to count violations in."""

LEAST_INTERVALS = 8
"""Fewer say nothing of a share."""

FOREIGN_LIMIT = 0.15
"""Part of the machine that others may use meanwhile: background work gets what they leave."""

LIMITS = {"makespan": 0.15, "violations": 0.05, "p95": 0.25, "job times": 0.25}
"""
How far predicted may be from measured: relative to it, and violations in parts of all intervals.

A rehearsal has some of the jobs only. So the makespan's limit holds for how well the profile knows
the work of all of them, too, by its own spreads.
"""


@dataclass(frozen=True)
class Verdict:
    """
    Whether a profile is good enough for a prediction.

    :param prediction: of what, a key of `LIMITS`
    :param figures: predicted and measured, in words
    :param error: how far apart they are, or how unsure what they rest on is; None where that is not
        known
    """

    prediction: str
    figures: str
    error: float | None

    @property
    def good(self) -> bool:
        """Whether it is good enough."""
        return self.error is not None and self.error <= LIMITS[self.prediction]

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.prediction}: not known ({self.figures})"
        said = "good enough" if self.good else "NOT good enough"
        limit = LIMITS[self.prediction]
        return f"{self.prediction}: {said} ({self.figures}; off by {self.error:.0%} of {limit:.0%})"


def rehearse(scenario: Scenario, profile: Profile, out: Path) -> tuple[list[Verdict], Profile]:
    """
    Run the rehearsal, and write down what follows from it: verdicts, and a corrected profile.

    :param scenario: as a characterisation wrote it
    :param profile: the one that it names
    :param out: the characterisation's folder
    :return: verdicts on the profile as it was, and what it is now; nothing is known of a rehearsal
        that failed, its verdicts say why
    :raises InputError: if the folder cannot be written
    """
    try:
        try:
            _run(scenario, rehearsed(scenario, profile), out)
            run = read_live_run(out / FOLDER)
            found = prediction_of(run, profile, read_policy(out / FOLDER))
            write_prediction(out / FOLDER, found)
            first_s, last_s = run.window_s
            foreign = foreign_vcpus(run, profile) / scenario.machine.vcpus
            verdicts = judge(found, last_s - first_s, foreign, scenario, profile)
            profile = corrected(profile, run, foreign)
            save_profile(profile, out / "profile.yaml")
        except InputError as error:
            verdicts = [Verdict(name, str(error), None) for name in LIMITS]
        text = json.dumps([asdict(one) | {"good": one.good} for one in verdicts], indent=1)
        (out / VERDICT_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{out}: rehearsal: {os_reason(error)}") from error
    return verdicts, profile


def corrected(profile: Profile, run: LiveRun, foreign: float) -> Profile:
    """
    What a rehearsal leaves of a profile.

    :param profile: what predicted
    :param run: the rehearsal
    :param foreign: share of the vCPUs' time that other processes used; too much teaches nothing
    """
    return profile if foreign > FOREIGN_LIMIT else update(profile, [LiveReplay(run)]).profile


def _run(scenario: Scenario, jobs: Sequence[Job], out: Path) -> None:
    """Run some of a scenario's jobs; the records are in `FOLDER`."""
    content = scenario.with_jobs(jobs).model_dump(mode="json", exclude_defaults=True)
    content["load"]["interval_s"] = min(scenario.load.interval_s, LONGEST_INTERVAL_S)
    problem, rule = out / f"{FOLDER}.yaml", out / f"{FOLDER}-rule.yaml"
    problem.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    rule.write_text(yaml.safe_dump(_rule(jobs)), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        runtime = ["--runtime", "process"]
        if all(job.image for job in jobs):
            runtime = ["--docker", stack.enter_context(docker_daemon())]
        run_under_load(str(rule), str(problem), runtime, out / FOLDER, LIMIT_S)


def rehearsed(scenario: Scenario, profile: Profile) -> tuple[Job, ...]:
    """
    The jobs of a rehearsal: the shortest, as many as should be done in `RUN_S`, and one at least.

    :param scenario: has the jobs
    :param profile: knows their work
    """
    left_s = RUN_S * DONE_PER_VCPU * scenario.machine.vcpus
    chosen: list[Job] = []
    for job in sorted(scenario.jobs, key=lambda job: profile.jobs[job.name]["work_s"].value):
        left_s -= profile.jobs[job.name]["work_s"].value
        if left_s >= 0.0 or not chosen:
            chosen.append(job)
    return tuple(chosen)


def _rule(jobs: Sequence[Job]) -> dict[str, object]:
    """
    Two lanes in the background of memcached, which the shipped policies do, too.

    A job has a thread a vCPU, or as many as it may have: what several threads get done together on
    vCPUs that others use, too, no run of a job alone has shown.
    """
    names = [job.name for job in jobs]
    lanes = {"alone": [], "beside": names[::2], "apart": names[1::2]}
    threads = {"alone_threads": 4, "paired_threads": 4}  # on 4 vCPUs
    return {"rule": "shared-background", "period_s": 0.1, **lanes, **threads}


def judge(
    found: Prediction, lasted_s: float, foreign: float, scenario: Scenario, profile: Profile
) -> list[Verdict]:
    """
    What a rehearsal says of a profile.

    :param found: its prediction, with the policy free
    :param lasted_s: from its first job's start to the last one's end, or to the run's [s]
    :param foreign: share of the vCPUs' time that other processes used
    :param scenario: with all jobs
    :param profile: what predicted
    """
    free, measured = found.free, found.measured
    if free is None or measured is None:
        return [Verdict(name, "; ".join(found.remarks), None) for name in LIMITS]
    if foreign > FOREIGN_LIMIT:
        busy = f"other processes used {foreign:.0%} of the machine meanwhile; rehearse it alone"
        return [Verdict(name, busy, None) for name in LIMITS]
    p95_us = _both(free.p95_median_us, measured.p95_median_us, "us", ".0f")
    return [
        _makespan(free.makespan_s, measured.makespan_s, lasted_s, _unsure(scenario, profile)),
        _violations(free, measured),
        Verdict("p95", *p95_us),
        _job_times(free, measured),
    ]


def _makespan(
    predicted: float | None, measured: float | None, lasted_s: float, unsure: float
) -> Verdict:
    """By the run, and by how unsure the work of all jobs is, over the work itself."""
    if measured is None and predicted is not None and predicted < lasted_s:
        figures = f"predicted {predicted:.1f} s, measured more than {lasted_s:.1f} s"
        error: float | None = 1.0 - predicted / lasted_s
    else:
        figures, error = _both(predicted, measured, "s", ".1f")
    figures += f", the work of all jobs known to {unsure:.0%}"
    return Verdict("makespan", figures, None if error is None else max(error, unsure))


def _both(
    predicted: float | None, measured: float | None, unit: str, form: str
) -> tuple[str, float | None]:
    """Both in words, and the relative error of the first."""
    said = ["none" if one is None else f"{one:{form}} {unit}" for one in (predicted, measured)]
    text = f"predicted {said[0]}, measured {said[1]}"
    if predicted is None or not measured:
        return text, None
    return text, _known(abs(predicted / measured - 1.0))


def _known(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _violations(free: Figures, measured: Figures) -> Verdict:
    predicted, seen = free.violation_ratio, measured.violation_ratio
    if predicted is None or seen is None:
        return Verdict("violations", "latency was not measured", None)
    figures = f"predicted {predicted:.1%}, measured {seen:.1%} of the intervals"
    if measured.intervals < LEAST_INTERVALS:
        few = f"{figures}; {measured.intervals:.0f} intervals are too few"
        return Verdict("violations", few, None)
    return Verdict("violations", figures, _known(abs(predicted - seen)))


def _job_times(free: Figures, measured: Figures) -> Verdict:
    """By the job that is farthest off; not good enough where one has ended in only one of both."""
    known, unknown = [], []
    for name, seen_s in measured.jobs.items():
        predicted_s = free.jobs.get(name)
        figures, error = _both(predicted_s, seen_s, "s", ".1f")
        if error is not None:
            known.append((error, f"{name} the farthest off: {figures}"))
        elif (predicted_s is None) != (seen_s is None):
            unknown.append(f"{name} has ended in only one of the two: {figures}")
    error, figures = max(known, default=(None, "no job has ended"))
    farthest = Verdict("job times", figures, error)
    if unknown and (farthest.good or not known):
        return Verdict("job times", unknown[0], None)
    return farthest


def _unsure(scenario: Scenario, profile: Profile) -> float:
    """Standard deviation of the work of all jobs together, over the work itself."""
    work = [profile.jobs[name]["work_s"] for name in scenario.job_names]
    apart_s = math.hypot(*(one.value * one.spread for one in work))
    return apart_s / math.fsum(one.value for one in work)
