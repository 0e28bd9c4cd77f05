"""
What a latency curve says: means with confidence, saturation, knee, the load within an SLO.

A curve is p95 against load. Rules, each in one place:

* **saturation** is the largest throughput, the median of the three best, of a sweep that asked for
  more than was served;
* the **knee** is the load at which p95 has gone half-way, in logarithms, from its calm level (at a
  quarter of the largest load) to its plateau (the median of the last four points);
* the **load within an SLO** is where the curve first crosses it.

Latencies in microseconds, loads in requests per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from training.analysis.queueing import SATURATED
from training.statistics import mean_and_ci95

FloatArray = npt.NDArray[np.float64]

CLEAR_KNEE = 1.6  # a plateau this much over the calm level; two fast vCPUs stay under it
QUANTITIES = (
    "achieved_qps",
    "avg_us",
    "p50_us",
    "p95_us",
    "p99_us",
    "cpu_util_pct",
    "beside_cores",
    "in_flight",
)


def average(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """
    Means of repetitions with half the width of their 95 % confidence intervals.

    :param table: one row a repetition, with some of `QUANTITIES`
    :param by: columns that tell one point from another
    :return: one row a point: `by`, `n`, and for each quantity its mean and `<quantity>_ci` (NaN
        for a single repetition)
    """
    present = [name for name in QUANTITIES if name in table.columns]
    rows = []
    for key, group in table.groupby(list(by), sort=True, dropna=False):
        row = dict(zip(by, key, strict=True)) | {"n": len(group)}
        for name in present:
            values = group[name].dropna().to_numpy(np.float64)
            mean, half = mean_and_ci95(values.tolist()) if len(values) else (np.nan, None)
            row[name] = mean
            row[f"{name}_ci"] = np.nan if half is None else half
        rows.append(row)
    known = [column for name in present for column in (name, f"{name}_ci")]
    return pd.DataFrame(rows, columns=[*by, "n", *known])


def trusted(table: pd.DataFrame, by: Sequence[str], least: int = 1) -> pd.DataFrame:
    """
    Of each point the rows that were disturbed least.

    :param table: one row a repetition; `disturbed` grades them, without it all are kept
    :param by: columns that tell one point from another
    :param least: how many of each are needed; more disturbed ones make up the number
    """
    if "disturbed" not in table.columns:
        return table
    grades = table.groupby(list(by))["disturbed"]
    worst = grades.transform(lambda own: own.nsmallest(least).iloc[-1])
    return table[table["disturbed"] <= worst]


def saturation_qps(target_qps: FloatArray, achieved_qps: FloatArray) -> float:
    """
    Largest throughput of a sweep, NaN where everything asked for was served.

    :param target_qps: loads asked for [requests/s]
    :param achieved_qps: loads served, in the same order [requests/s]
    """
    if achieved_qps.max() >= SATURATED * target_qps.max():
        return float("nan")
    return float(np.median(np.sort(achieved_qps)[-3:]))


def knee_qps(qps: FloatArray, p95_us: FloatArray) -> float:
    """
    Load at which p95 is half-way, in logarithms, from its calm level to its plateau.

    :param qps: loads in rising order [requests/s]
    :param p95_us: p95 at each [µs]
    :return: the load, NaN where the curve has no clear knee
    """
    calm = float(np.interp(0.25 * qps[-1], qps, p95_us))
    plateau = float(np.median(p95_us[-4:]))
    if plateau < CLEAR_KNEE * calm:
        return float("nan")
    level = (calm * plateau) ** 0.5
    above = p95_us >= level
    stays = np.flatnonzero(above[1:] & np.append(above[2:], True) & ~above[:-1])
    if not len(stays):
        return float("nan")
    k = int(stays[0])
    part = (level - p95_us[k]) / (p95_us[k + 1] - p95_us[k])
    return float(qps[k] + part * (qps[k + 1] - qps[k]))


def slo_qps(qps: FloatArray, p95_us: FloatArray, slo_us: float) -> float:
    """
    Largest load before p95 first passes an SLO, between points by interpolation.

    :param qps: loads in rising order [requests/s]
    :param p95_us: p95 at each [µs]
    :param slo_us: the objective [µs]
    :return: the load; the largest measured one if p95 never passes, NaN if it always does
    """
    if p95_us[0] > slo_us:
        return float("nan")
    for (q0, p0), (q1, p1) in pairwise(zip(qps.tolist(), p95_us.tolist(), strict=True)):
        if p1 > slo_us:
            return q0 + (slo_us - p0) / (p1 - p0) * (q1 - q0)
    return float(qps[-1])
