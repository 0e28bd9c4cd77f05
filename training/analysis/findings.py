"""
What measured tables say: knees, broken SLOs, who is safe beside memcached, scaling, queueing.

The same functions read this machine's measurements (`training.characterise`) and the public ones
(`training.machine.published`). Two tidy tables, one row a measurement:

* latency: source, threads, cores, beside, rep, target_qps, achieved_qps, avg_us, p50_us, p95_us,
  p99_us, cpu_util_pct (of one core), in_flight (requests at most, where that is known). `beside` is
  what ran next to memcached: `none`, a pressure source, or a batch job;
* jobs: source, job, threads, beside, rep, real_s.

Latencies in microseconds, times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from training.analysis.curves import average, knee_qps, saturation_qps, slo_qps, trusted
from training.analysis.queueing import Comparison, Point, compare, law_error
from training.statistics import mean_and_ci95

ALONE = "none"
PAIRED = "job "
"""Comes before a job's name in `beside` on this machine: jobs may be called as sources are."""

SOURCES = ("cpu", "l1d", "l1i", "l2", "llc", "membw")
CALM, STRAINED = 1.3, 2.0  # normalised times up to which the table is green, then orange
CURVE = ("source", "threads", "cores", "beside")
TYPICAL_IN_FLIGHT = 64.0
"""Of mcperf's requests at saturation (docs/calibration.md: 61 to 70)."""


def curves(latency: pd.DataFrame) -> pd.DataFrame:
    """
    The latency curves: undisturbed repetitions averaged, with confidence intervals.

    :param latency: the table of this module
    """
    point = [*CURVE, "target_qps"]
    return average(trusted(latency, point), point)


def knees(points: pd.DataFrame, slo_us: float) -> pd.DataFrame:
    """
    Calm level, knee, saturation and load within the SLO of each curve.

    :param points: what `curves` made
    :param slo_us: the objective [µs]
    """
    found = ("calm_p95_us", "knee_qps", "saturation_qps", "within_slo_qps")
    rows = []
    for key, curve in points.groupby(list(CURVE), sort=True):
        qps, p95 = curve["achieved_qps"].to_numpy(), curve["p95_us"].to_numpy()
        target = curve["target_qps"].to_numpy()
        if len(curve) < 4:
            continue
        calm = float(np.interp(0.25 * target[-1], target, p95))
        knee, within = knee_qps(target, p95), slo_qps(target, p95, slo_us)
        rows.append((*key, calm, knee, saturation_qps(target, qps), within))
    return pd.DataFrame(rows, columns=[*CURVE, *found])


def breaches(points: pd.DataFrame, loads: Sequence[float], slo_us: float) -> pd.DataFrame:
    """
    Which sources of interference break the SLO at given loads.

    :param points: what `curves` made
    :param loads: targets that were measured [requests/s]
    :param slo_us: the objective [µs]
    :return: per curve and load: p95_us, p95_us_ci, served (whether the load was), breaks
    """
    chosen = points[points["target_qps"].isin(loads)].copy()
    chosen["served"] = chosen["achieved_qps"] >= 0.97 * chosen["target_qps"]
    chosen["breaks"] = (chosen["p95_us"] > slo_us) | ~chosen["served"]
    columns = [*CURVE, "target_qps", "p95_us", "p95_us_ci", "served", "breaks"]
    return chosen[columns].reset_index(drop=True)


def normalised(jobs: pd.DataFrame) -> pd.DataFrame:
    """
    Run time beside each source over the run time alone: medians over sources of data.

    Only runs with the same thread count are compared; sources without a baseline are left out.

    :param jobs: the table of this module
    :return: one row a job, one column a source of interference
    """
    times = jobs.groupby(["source", "job", "threads", "beside"])["real_s"].median().unstack()
    if ALONE not in times.columns:
        return pd.DataFrame()
    ratios = times.div(times[ALONE], axis=0).drop(columns=ALONE).dropna(how="all")
    return ratios.groupby("job").median().dropna(how="all")


def job_times(jobs: pd.DataFrame) -> pd.DataFrame:
    """
    Mean time of each job, and how much longer than alone, with 95 % intervals.

    :param jobs: the table of this module; disturbed runs count only where there is nothing else
    :return: source, job, threads, beside, n, real_s, real_s_ci, margin (of the mean), ratio (to the
        mean time alone; NaN without one) and ratio_ci
    """
    by = ["source", "job", "threads", "beside"]
    rows = []
    for key, group in trusted(jobs, by).dropna(subset=["real_s"]).groupby(by, sort=True):
        mean, half = mean_and_ci95(group["real_s"].tolist())
        half = np.nan if half is None else half
        rows.append((*key, len(group), mean, half, half / mean))
    times = pd.DataFrame(rows, columns=[*by, "n", "real_s", "real_s_ci", "margin"])
    alone = times.loc[times["beside"] == ALONE, [*by[:-1], "real_s", "margin"]]
    both = times.merge(alone, on=by[:-1], how="left", suffixes=("", "_alone"))
    times["ratio"] = both["real_s"] / both["real_s_alone"]
    # Relative errors of numerator and denominator, which are independent.
    times["ratio_ci"] = times["ratio"] * np.hypot(both["margin"], both["margin_alone"])
    times.loc[times["beside"] == ALONE, "ratio_ci"] = np.nan
    return times


def safe_jobs(table: pd.DataFrame, breaking: Sequence[str]) -> list[tuple[str, float]]:
    """
    Jobs ranked by how little they use what memcached cannot spare.

    A job that hardly slows down when a resource is under pressure hardly uses it, and then does
    not press on it either (the reference report's argument). What it uses of the resources whose
    pressure breaks memcached's SLO is what counts.

    :param table: what `normalised` made
    :param breaking: the sources that break the SLO
    :return: jobs with their worst normalised time under those sources, safest first
    """
    present = [name for name in breaking if name in table.columns]
    if not present:
        return []
    worst = table[present].max(axis=1).dropna().sort_values()
    return [(str(job), float(value)) for job, value in worst.items()]


def speedups(jobs: pd.DataFrame) -> pd.DataFrame:
    """
    Time with one thread over time with n, of jobs alone: mean and 95 % half-width over sources.

    :param jobs: the table of this module
    :return: job, threads, speedup, speedup_ci, n
    """
    alone = jobs[jobs["beside"] == ALONE]
    times = alone.groupby(["source", "job", "threads"])["real_s"].median().unstack()
    if 1 not in times.columns:
        return pd.DataFrame()
    rows = []
    for job, group in times.rdiv(times[1], axis=0).groupby("job"):
        for threads in group.columns:
            values = group[threads].dropna().tolist()
            if values:
                mean, half = mean_and_ci95(values)
                rows.append(
                    (job, int(threads), mean, np.nan if half is None else half, len(values))
                )
    return pd.DataFrame(rows, columns=["job", "threads", "speedup", "speedup_ci", "n"])


@dataclass(frozen=True)
class Queueing:
    """
    The queueing analysis of one curve.

    :param name: name of the curve
    :param servers: how many memcached could use: the fewer of threads and cores
    :param comparisons: the models beside the measurements
    :param law: the interactive law on points where the load generator was the limit
    :param utilisation: highest measured utilisation of memcached's servers, NaN if not measured
    """

    name: str
    servers: int
    comparisons: tuple[Comparison, ...]
    law: str
    utilisation: float

    def rows(self) -> pd.DataFrame:
        """Predicted and measured values side by side, one row a model and point."""
        return pd.DataFrame(
            {
                "curve": self.name,
                "model": comparison.model.name,
                "offered_qps": point.offered,
                "measured_qps": point.throughput,
                "predicted_qps": np.nan if state is None else state.throughput,
                "measured_us": 1e6 * point.response_s,
                "predicted_us": np.nan if state is None else 1e6 * state.response_s,
                "measured_utilisation": point.utilisation,
                "predicted_utilisation": np.nan if state is None else state.utilisation,
            }
            for comparison in self.comparisons
            for point, state in zip(comparison.points, comparison.states, strict=True)
        )


def queueing(points: pd.DataFrame) -> list[Queueing]:
    """
    Fit the queueing models to every curve of memcached alone that has enough points.

    :param points: what `curves` made
    """
    result = []
    for key, curve in points[points["beside"] == ALONE].groupby(list(CURVE), sort=True):
        source, threads, cores, _ = key
        servers = int(min(threads, cores))
        use = curve.get("cpu_util_pct", pd.Series(np.nan, curve.index)) / 100.0 / servers
        measured = [
            Point(target, achieved, 1e-6 * mean_us, np.nan, busy)
            for target, achieved, mean_us, busy in zip(
                curve["target_qps"], curve["achieved_qps"], curve["avg_us"], use, strict=True
            )
        ]
        # As many requests as the ones that were timed had to wait for.
        full = [p.throughput * p.response_s for p in measured if p.saturated]
        in_flight = float(np.median(full)) if full else TYPICAL_IN_FLIGHT
        bounded = [replace(p, in_flight=in_flight) for p in measured]
        try:
            comparisons = compare(bounded, servers)
        except ValueError:
            continue
        result.append(
            Queueing(
                f"{source} T{threads}C{cores}",
                servers,
                tuple(comparisons),
                _law(bounded, float(curve.get("in_flight", pd.Series([np.nan])).iloc[0])),
                float(use.max()),
            )
        )
    return result


def _law(points: Sequence[Point], allowed: float) -> str:
    full = [point for point in points if point.saturated]
    if not full:
        return "no point past saturation: the interactive law has nothing to check"
    errors = [law_error(point) for point in full]
    worst = max(errors, key=abs)
    seen = full[0].in_flight
    text = f"{len(full)} points past saturation hold N = X R with N = {seen:.0f} within "
    text += f"{abs(worst):.0%}"
    if np.isfinite(allowed):
        # The probe's own connection gets its turn before all that wait on the others.
        text += (
            f"; the load has {allowed:.0f} in flight, so the timed requests wait for "
            f"{seen / allowed:.0%} of them"
        )
    return text
