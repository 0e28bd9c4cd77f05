"""
A profile after what runs on a real machine have shown: a Bayesian update of its parameters.

The logarithm of each parameter has a normal prior, the profile's own value and spread. The records
say how long each job ran, how much CPU time it and memcached took, how busy the vCPUs were, each
interval's p95, and how much of the time was stalled or stolen. The replay
(`training.refinement.live_replay`) predicts all of that; the most probable parameters follow by
Gauss-Newton steps, and new spreads from the curvature there (Laplace's approximation). A parameter
that the records cannot tell keeps its value and its spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from env.simulator.profile import Parameter, Profile, within_limits
from training.refinement.live_replay import LiveReplay, Replayed

FloatArray = npt.NDArray[np.float64]

JOB_SD = 0.05
"""Standard deviation of ln(job's time): what identical runs of a job scatter by within an hour."""

CPU_SD = 0.1
"""The same of CPU time and of busy vCPUs, which samples once a second show."""

P95_SD = 0.3
"""The same of an interval's p95; `training.violations` finds 0.29 and 0.32."""

HICCUP_SD = 0.5
"""The same of the share of time that is stalled or stolen."""

JOB_SPEED_DRIFT = 0.15
"""Standard deviation of ln of how much faster the host does jobs' work in a later run than when a
profile was measured, as what its other guests leave changes. Three hours apart the same policies
took 0.72 to 0.87 of their time on one host (docs/measured.md, 9abe13f and b8d8259), of which the
clock of a short loop showed a fifth."""

LEAST_S = 0.3
"""Jobs that ran or computed for less say nothing."""

STEP = 0.05
"""Of a parameter where the derivative is taken, in its prior's standard deviations."""

FARTHEST = 4.0
"""How many standard deviations of its prior a parameter may move in one update."""

NEWS = 0.98
"""A parameter whose spread stays above this part of it has learned nothing, and stays as it was,"""

MOVED = 0.05
"""unless it has moved by more than this part of its spread."""

HOST_LEARNED = (
    *("service_pressure", "job_speed", "service_sibling", "straggling"),
    *("migration_cost_s", "resume_cost_s", "stalls_per_s", "stall_s", "steals_per_s", "steal_s"),
)
"""The host's parameters that these records can tell something about."""


@dataclass(frozen=True)
class Learned:
    """
    A parameter that may move.

    :param section: of the profile
    :param job: whose it is, empty for other sections
    :param name: of the parameter
    :param value: prior median
    :param spread: prior standard deviation of its logarithm
    """

    section: str
    job: str
    name: str
    value: float
    spread: float


@dataclass(frozen=True)
class Update:
    """
    What became of a profile.

    :param profile: with the parameters and spreads that are most probable now
    :param moved: the parameters that have learned something and how far each has moved, in its
        prior's standard deviations; the farthest first
    """

    profile: Profile
    moved: dict[str, float]


def learnable(profile: Profile, jobs: Sequence[str], drift: float = 0.0) -> list[Learned]:
    """
    The parameters that may move.

    The VM's own speed is drawn around 1 in training, so what a VM differs by goes into memcached's
    capacity, which takes both spreads.

    :param profile: the prior
    :param jobs: those that the runs had
    :param drift: see `update`
    """
    found = []
    for name, known in profile.service.items():
        spread = known.spread
        if name == "core_capacity_qps":
            spread = math.hypot(spread, profile.vm_speed.spread)
        if name != "vm_speed":
            found.append(Learned("service", "", name, known.value, spread))
    found += [Learned("costs", "", name, p.value, p.spread) for name, p in profile.costs.items()]
    for name, known in profile.host.items():
        if name in HOST_LEARNED:
            spread = math.hypot(known.spread, drift) if name == "job_speed" else known.spread
            found.append(Learned("host", "", name, known.value, spread))
    found += [
        Learned("jobs", job, name, known.value, known.spread)
        for job in jobs
        for name, known in profile.jobs[job].items()
    ]
    return [one for one in found if one.spread > 0.0]


def update(profile: Profile, replays: Sequence[LiveReplay], drift: float = 0.0) -> Update:
    """
    Move a profile to where the records are most probable.

    :param profile: the prior
    :param replays: of the runs; all of one machine
    :param drift: `JOB_SPEED_DRIFT` for runs of another hour, 0 for those that follow the measuring
    """
    learned = learnable(profile, replays[0].run.scenario.job_names, drift)

    def data(z: FloatArray) -> FloatArray:
        there = moved_to(profile, learned, z)
        rows = np.concatenate([_misfits(there, one, one.play(there, False)) for one in replays])
        # The root of the soft-L1 loss: a moment that something else spoiled does not decide.
        return np.sign(rows) * np.sqrt(2.0 * (np.sqrt(1.0 + rows**2) - 1.0))

    def residuals(z: FloatArray) -> FloatArray:
        return np.concatenate([data(z), z])

    def derivatives(z: FloatArray) -> FloatArray:
        here = data(z)
        columns = [(data(z + STEP * unit) - here) / STEP for unit in np.eye(len(z))]
        return np.vstack([np.array(columns).T, np.eye(len(z))])

    start = np.zeros(len(learned))
    found = least_squares(
        residuals, start, derivatives, bounds=(-FARTHEST, FARTHEST), max_nfev=12, xtol=1e-3
    )
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    rest = data(found.x)
    # Where the physics cannot explain the records, the parameters are as unsure as it is wrong.
    wrong = max(1.0, math.sqrt(float(np.mean(rest**2))))
    narrowed = np.minimum(1.0, wrong * np.sqrt(np.diag(covariance)))
    return _written(profile, learned, found.x, narrowed, len(replays))


def moved_to(profile: Profile, learned: Sequence[Learned], z: FloatArray) -> Profile:
    """
    A profile with other values.

    :param profile: where they come from
    :param learned: the parameters
    :param z: float64[len(learned)], how far each moves, in its prior's standard deviations
    """
    values = [_within(one, float(far)) for one, far in zip(learned, z, strict=True)]
    return _replaced(profile, learned, [{"value": value} for value in values])


def _within(one: Learned, far: float) -> float:
    return within_limits(one.name, one.value * math.exp(one.spread * far))


def _replaced(
    profile: Profile, learned: Sequence[Learned], fields: Sequence[dict[str, object]]
) -> Profile:
    sections: dict[str, dict[str, Parameter]] = {
        name: dict(getattr(profile, name)) for name in ("service", "costs", "host")
    }
    jobs = {name: dict(job) for name, job in profile.jobs.items()}
    for one, changed in zip(learned, fields, strict=True):
        where = jobs[one.job] if one.job else sections[one.section]
        where[one.name] = where[one.name].model_copy(update=changed)
    return profile.model_copy(update={**sections, "jobs": jobs})


def _written(
    profile: Profile,
    learned: Sequence[Learned],
    z: FloatArray,
    narrowed: FloatArray,
    runs: int,
) -> Update:
    told = [
        (one, float(far), float(narrow))
        for one, far, narrow in zip(learned, z, narrowed, strict=True)
        if narrow < NEWS or abs(math.log(_within(one, far) / one.value)) > MOVED * one.spread
    ]
    seen = "1 run" if runs == 1 else f"{runs} runs"
    fields = [
        {
            "value": float(f"{_within(one, far):.5g}"),
            "spread": float(f"{one.spread * narrow:.3g}"),
            "source": f"refined by {seen} on the machine; its prior was {one.value:g}",
        }
        for one, far, narrow in told
    ]
    changed = _replaced(profile, [one for one, _, _ in told], fields)
    told.sort(key=lambda change: -abs(change[1]))
    moved = {f"{one.job or one.section}.{one.name}": far for one, far, _ in told}
    return Update(changed, moved)


def _misfits(profile: Profile, replay: LiveReplay, played: Replayed) -> FloatArray:
    """Logarithms of predicted over measured, each in its standard deviation."""
    run, rows = replay.run, list[float]()

    def add(predicted: float, measured: float, sd: float) -> None:
        rows.append(math.log(max(predicted, 1e-9) / max(measured, 1e-9)) / sd)

    used = run.samples[-1].jobs
    for number, job in enumerate(run.trace.jobs):
        if run.ended(job.name) and job.run_s > LEAST_S:
            add(float(played.run_s[number]), job.run_s, JOB_SD)
            if used[job.name].cpu_s > LEAST_S:
                add(float(played.cpu_s[number]), used[job.name].cpu_s, JOB_SD)
    for predicted, measured, spoiled in zip(
        played.p95_us, run.trace.p95_us, run.spoiled, strict=True
    ):
        if math.isfinite(measured) and not spoiled:
            add(float(predicted), float(measured), P95_SD)
    service, busy = run.use
    add(played.service_cores, service, CPU_SD)
    for predicted, measured in zip(played.busy_cores, busy, strict=True):
        add(float(predicted), measured, CPU_SD)
    host = profile.host
    for kind, share in (("stall", run.stalled), ("steal", run.stolen)):
        if f"{kind}_s" in host and f"{kind}s_per_s" in host and share is not None:
            expected = host[f"{kind}s_per_s"].value * host[f"{kind}_s"].value
            add(expected, max(share, 1e-5), HICCUP_SD)
    return np.array(rows)
