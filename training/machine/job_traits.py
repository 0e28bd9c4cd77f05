"""
A job's traits by its runs on this machine.

*Work and serial fraction* follow from its times alone by Amdahl's law, which has no word for
threads that hinder each other. What work costs more in the background of memcached, and beside the
load generator, is the job's *interruption*; what it does not get there is what those take. Before a
job is measured it might be any of the scenario family (`env.family.drawing.generic_traits`): so its
traits have a median and a spread from the start, and keep them where nothing was measured.

*How much jobs on different cores slow each other down* follows from pairs of them. The physics says
that job i beside job j takes 1 + sensitivity_i x pressure_j times as long as alone
(`env.physics.jobs`). Only the products show, so the priors of `training.calibration.priors` set
the scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares
from scipy.stats import truncnorm

from env.family.drawing import generic_traits
from env.physics.parameters import REQUIRED_JOB_FIELDS
from env.scenario import Job
from env.simulator.profile import Parameter, Profile
from training.analysis.curves import trusted
from training.analysis.findings import ALONE, PAIRED
from training.calibration.priors import JOB_PRIORS, RUN_SD
from training.measuring.samples import LOADED, SERVED
from training.statistics import significant

FloatArray = npt.NDArray[np.float64]

HERE = "measured here"
GENERIC = "prior (any job of the scenario family)"
NARROWED = 0.8  # of its prior's spread: a parameter known better than that was measured
JOB_SD = 0.03  # of ln(time) of one run of a job
CPU_SD = 0.1  # of ln(CPU time of several threads together over that of one alone)
MET_SD = 0.1  # of what a job cost in company over what it cost alone
TRAIT_SD = 0.3  # of ln(interruption): loads and company differ from what was measured
BUSY = 0.9  # of a vCPU: a job that gets so much alone takes all that it is left
LEAST_SD = 0.02  # of a ratio: what the model of pairs leaves out
FIELDS = ("sensitivity", "pressure")


def job_traits(
    name: str, jobs: pd.DataFrame, base: Profile, company: Mapping[str, float]
) -> dict[str, Parameter]:
    """
    What a profile says of a job, but for what pairs say.

    :param name: its name
    :param jobs: see `training.analysis.findings`, with `beside` also `SERVING` and `LOADED`, and
        with cpu_s, sampled, instructions and overhead_s
    :param base: says what is known of a job that was not measured, if it knows it
    :param company: whom jobs met, `samples.SERVING` and, where the load generator runs on a vCPU of
        the scenario's, `samples.LOADED`, and the share of its vCPU that each took
    """
    own = jobs[jobs["job"] == name]
    alone = trusted(own, ["threads", "beside"])
    alone = alone[alone["beside"] == ALONE].dropna(subset=["real_s"])
    met = {"interruption": _parameter(*_interruption(own, company))}
    if alone.empty and name in base.jobs:
        return met | {field: as_prior(known, base) for field, known in base.jobs[name].items()}
    generic = generic_traits()
    found = {
        field: (*generic[field], "s" if field.endswith("_s") else "1", GENERIC)
        for field in REQUIRED_JOB_FIELDS
    }
    if alone.empty:
        seen_s = float(own["cpu_s"].max()) if len(own) else 0.0
        source = f"{GENERIC}, and {seen_s:.0f} s of CPU time did not end it"
        found["work_s"] = (*_longer_than(seen_s, *generic["work_s"]), "s", source)
    else:
        found |= _fitted(alone, generic["serial_fraction"])
    return {field: _parameter(*told) for field, told in found.items()} | met


def unhindered(job: Job, jobs: pd.DataFrame) -> Job:
    """
    A job without those thread counts with which it took longer alone than with fewer threads.

    :param job: the job
    :param jobs: see `job_traits`
    """
    own = jobs[(jobs["job"] == job.name) & (jobs["beside"] == ALONE)]
    took_s = own.groupby("threads")["real_s"].median()

    def hinders(count: int) -> bool:
        fewer = took_s[took_s.index < count].min()
        return count in took_s.index and bool(took_s[count] > fewer)

    kept = tuple(count for count in job.threads if not hinders(count))
    return job.model_copy(update={"threads": kept})


def _parameter(value: float, width: float, unit: str, source: str) -> Parameter:
    return Parameter(
        value=significant(value),
        spread=significant(min(width, 3.0), 3),
        unit=unit,
        source=source,
    )


def as_prior(parameter: Parameter, base: Profile) -> Parameter:
    """
    A parameter that was not measured here, with a source that says so.

    :param parameter: what is known of it elsewhere
    :param base: the profile that knows it
    """
    said = f"prior (profile {base.name}): "
    return parameter.model_copy(update={"source": said + parameter.source.removeprefix(said)})


def _fitted(
    alone: pd.DataFrame, serial: tuple[float, float]
) -> dict[str, tuple[float, float, str, str]]:
    """
    Work, serial fraction and start of a job: value, spread, unit and source of each.

    :param alone: its runs alone
    :param serial: prior median and spread of the serial fraction
    """
    overhead_s = max(float(alone["overhead_s"].median()), 1e-3)
    threads = alone["threads"].to_numpy(np.float64)
    work = np.log(np.maximum(alone["real_s"].to_numpy(np.float64) - overhead_s, 1e-3))
    limits = JOB_PRIORS["serial_fraction"]
    # Threads that slow each other down do so only while they run at the same time, which among
    # other jobs they seldom do. The law has no word for that: such runs are left out where other
    # counts tell how the job scales, else they count as the slowest that the law can say.
    first = threads == threads.min()
    least_gain = _of_one_thread(limits.high, threads) / _of_one_thread(limits.high, threads.min())
    most = np.median(work[first]) + np.log(least_gain)
    hindered = ~first & (work > most)
    work = np.where(hindered, most, work)
    if (~first & ~hindered).any():
        threads, work = threads[~hindered], work[~hindered]
    # What several threads use together is what one would take, about.
    counted = np.log(np.maximum(alone["cpu_s"].to_numpy(np.float64), 1e-3))
    counted = counted if threads.min() > 1.0 else counted[:0]

    def residuals(x: FloatArray) -> FloatArray:
        share = np.exp(x[1])
        predicted = x[0] + np.log(_of_one_thread(share, threads))
        errors = (predicted - work) / JOB_SD
        off = (x[1] - math.log(serial[0])) / serial[1]
        return np.concatenate([errors, (x[0] - counted) / CPU_SD, [off]])

    start = [float(work[threads == threads.min()].mean()), math.log(serial[0])]
    bounds = ([-7.0, math.log(limits.low)], [12.0, math.log(limits.high)])
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1")
    # A law that does not fit weighs little in the loss: what it misses by says how wrong it is.
    missed = JOB_SD * np.sqrt(np.mean(residuals(found.x)[: len(work)] ** 2))
    spread = np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)))
    # One run says little of the next.
    width = max(missed, RUN_SD / math.sqrt(len(work)), 0.0 if not len(counted) else CPU_SD)
    source = f"{HERE}, with its prior" if len(set(threads)) + len(counted) > 1 else GENERIC
    if hindered.any():
        source = f"{HERE}: more threads hinder each other"
    return {
        "work_s": (math.exp(found.x[0]), width, "s", f"{HERE}, alone"),
        "serial_fraction": (math.exp(found.x[1]), min(spread[1], serial[1]), "1", source),
        "launch_overhead_s": (overhead_s, 0.3, "s", HERE),
    }


def _of_one_thread(share: float, threads: FloatArray) -> FloatArray:
    """Time of so many threads over that of one, by Amdahl's law: `share` of the work is serial."""
    return share + (1.0 - share) / threads


def _interruption(own: pd.DataFrame, company: Mapping[str, float]) -> tuple[float, float, str, str]:
    """
    Value, spread, unit and source of what a job's company costs it.

    The most probable value under a lognormal prior and a normal error of each measured ratio, and
    its spread by the curvature there; the prior's where none was measured.
    """
    prior = JOB_PRIORS["interruption"]
    dearer = {beside: dearer_beside(beside, own) for beside in company}
    dearer = {beside: ratio for beside, ratio in dearer.items() if math.isfinite(ratio)}
    if not dearer:
        return prior.median, prior.sd, "1", f"prior ({prior.source})"
    shares = np.array([company[beside] for beside in dearer])
    more = np.array([*dearer.values()]) - 1.0

    def residuals(x: FloatArray) -> FloatArray:
        off = (x - math.log(prior.median)) / prior.sd
        return np.concatenate([(np.exp(x) * shares - more) / MET_SD, off])

    value = math.exp(least_squares(residuals, [math.log(prior.median)]).x[0])
    known = value * float(np.linalg.norm(shares)) / MET_SD
    width = math.hypot(TRAIT_SD, 1.0 / math.hypot(known, 1.0 / prior.sd))
    told = ", ".join(f"{ratio:.2f} ({who})" for who, ratio in dearer.items())
    source = f"{HERE}: work costs {told} times as much in company as alone"
    return value, min(width, prior.sd), "1", source


class Left(NamedTuple):
    """
    What the load generator and its probe leave of their vCPU to a job that never rests.

    :param vcpu: a median [vCPU]; NaN where none was measured
    :param load: memcached's meanwhile, as a part of what one vCPU serves
    """

    vcpu: float
    load: float


def left_by_load(jobs: pd.DataFrame, capacity_qps: float) -> Left:
    """
    What jobs got beside load generator and probe.

    :param jobs: their runs, with load_qps where that was written down; those of jobs that hardly
        wait when they are alone tell
    :param capacity_qps: of one vCPU [requests/s]
    """
    runs = jobs.assign(got=jobs["cpu_s"] / (jobs["real_s"] - jobs["overhead_s"]))
    fewest = runs["threads"] == runs.groupby("job")["threads"].transform("min")
    alone = runs[fewest & (runs["beside"] == ALONE)].groupby("job")["got"].median()
    told = runs[runs["job"].isin(alone.index[alone > BUSY]) & (runs["beside"] == LOADED)]
    load_qps = told["load_qps"].median() if "load_qps" in told else math.nan
    # The loads of older records were chosen by scans that the fit does not have.
    load = load_qps / capacity_qps if load_qps > 0.0 else SERVED
    return Left(float(told["got"].clip(0.0, 1.0).median()), float(load))


def dearer_beside(beside: str, own: pd.DataFrame) -> float:
    """
    What a job's work costs in the background under load, over what it costs alone.

    By the CPU time of an instruction where the machine counts them, else by CPU time, which takes
    runs that ended. Cycles of the job's own would not do: interrupts of the load's packets are
    charged to whomever they meet.

    :param beside: `SERVING` or `LOADED`, whom it met
    :param own: the job's runs
    :return: NaN where that was not measured
    """
    costs = {}
    for company in (ALONE, beside):
        runs = own[own["beside"] == company]
        counted = runs["cpu_s"] * runs["sampled"] / runs["instructions"]
        costs[company] = runs.assign(
            counted=counted, cpu=runs["cpu_s"].where(runs["real_s"].notna())
        )
    fewest = costs[beside]["threads"].min()
    for how in ("counted", "cpu"):
        alone, there = (
            costs[company].loc[costs[company]["threads"] == fewest, how].median()
            for company in (ALONE, beside)
        )
        if math.isfinite(there / alone):
            return float(there / alone)
    return math.nan


def _longer_than(seen: float, median: float, spread: float) -> tuple[float, float]:
    """
    Median and spread of a lognormal quantity once it is known to exceed what was seen.

    Moments of the truncated normal distribution of its logarithm (Johnson, Kotz, Balakrishnan,
    "Continuous Univariate Distributions", volume 1, 1994, section 13.10.1).
    """
    if seen <= 0.0:
        return median, spread
    left = truncnorm((math.log(seen) - math.log(median)) / spread, math.inf)
    return median * math.exp(spread * float(left.mean())), spread * float(left.std())


def fit_pairs(profile: Profile, times: pd.DataFrame) -> Profile:
    """
    The profile with the sensitivity and pressure of those jobs that pairs say enough about.

    :param profile: of the machine
    :param times: what `training.analysis.findings.job_times` made; without pairs nothing changes
    """
    names = sorted(profile.jobs)
    pairs = times[times["beside"].str.startswith(PAIRED) & times["job"].isin(names)].dropna(
        subset=["ratio", "ratio_ci"]
    )
    if pairs.empty:
        return profile
    place = {name: k for k, name in enumerate(names)}
    slowed = pairs["job"].map(place).to_numpy()
    pressing = pairs["beside"].str.removeprefix(PAIRED).map(place).to_numpy()
    ratio = pairs["ratio"].to_numpy(np.float64)
    # Half the width of a 95 % interval is about two standard deviations.
    sd = np.hypot(pairs["ratio_ci"].to_numpy(np.float64) / 2.0, LEAST_SD)
    median = np.log(np.repeat([JOB_PRIORS[field].median for field in FIELDS], len(names)))
    width = np.repeat([JOB_PRIORS[field].sd for field in FIELDS], len(names))

    def residuals(x: FloatArray) -> FloatArray:
        sensitivity, pressure = np.exp(x).reshape(2, -1)
        errors = (1.0 + sensitivity[slowed] * pressure[pressing] - ratio) / sd
        return np.concatenate([errors, (x - median) / width])

    bounds = tuple(
        np.log(np.repeat([getattr(JOB_PRIORS[field], end) for field in FIELDS], len(names)))
        for end in ("low", "high")
    )
    found = least_squares(residuals, median, bounds=bounds)
    spread = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    values, spreads = np.exp(found.x).reshape(2, -1), spread.reshape(2, -1)
    jobs = {}
    for name in names:
        fields = dict(profile.jobs[name])
        for field, value, wide in zip(
            FIELDS, values[:, place[name]], spreads[:, place[name]], strict=True
        ):
            if wide < NARROWED * JOB_PRIORS[field].sd:
                fields[field] = Parameter(
                    value=significant(value),
                    spread=significant(wide, 3),
                    unit="1",
                    source=f"{HERE}, in pairs, with its prior",
                )
        jobs[name] = fields
    return profile.model_copy(update={"jobs": jobs})
