"""
The load, the SLO and the refuge that suit a machine.

memcached's refuge is its smallest vCPU set, unless a larger one serves loads that are larger by
`ADDS` of what its vCPUs are more, up to the knee of p95, alone and beside background work: where a
load generator holds the second vCPU for most of the time, two serve worse than one. The largest of
the sets that are no longer usual then is for overflowing.

The scenario gets a maximum load of `LOAD_OVER_KNEE` times the knee on one vCPU, but no more than
the refuge's knee leaves room for on a host that is `ROOM` times slower, from which memcached also
recovers: once it has fallen behind it serves less than before. The SLO is the geometric mean of its
p95 there alone and beside batch work of its own weight. Where a disturbed sweep shows no knee, the
largest throughput stands for it. A shared host's speed changes within a minute, and the scans for
the largest throughput are from other minutes than the sweeps: where they show an earlier knee, that
one counts, the refuge's is earlier in proportion if that leaves less room, and p95 alone is as much
higher as theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from env.errors import InputError
from env.scenario import Service
from training.analysis.curves import knee_qps, saturation_qps, trusted
from training.analysis.findings import ALONE, curves
from training.measuring.pressure import BACKGROUND, EQUAL

LOAD_OVER_KNEE = 1.15
ADDS = 1 / 3  # of a proportional gain: free vCPUs add more, one that a client holds adds less
ROOM = 1.6  # knees of one shared VM, within an hour: 179K and 115K requests/s (docs/measured.md)
LEAST_SCANNED = 5  # loads that have a calm scan, for a knee to be told from them
APART = 1.25  # p95 beside equal-weight work over p95 alone, under which the SLO tells nothing
BACKGROUND_WORK = f"cpu ({BACKGROUND})"
"""What memcached is measured beside in its background, as `beside` has it."""


class Suited(NamedTuple):
    """
    What suits a machine, by the rule of this module.

    :param most_qps: the largest load [1/s]
    :param slo_us: the SLO [us]
    :param refuge: vCPUs of memcached's refuge
    :param text: a sentence on all of them
    """

    most_qps: float
    slo_us: float
    refuge: int
    text: str


def local_load(latency: pd.DataFrame, scans: pd.DataFrame, service: Service) -> Suited:
    """
    The largest load, the SLO and the refuge that suit this machine.

    :param latency: see `training.analysis.findings`
    :param scans: the same of the scans for one vCPU's largest throughput
    :param service: gives memcached's threads, and the sets that may be its refuge
    :raises InputError: if one vCPU has no knee and was not saturated
    """
    own = latency[latency["threads"] == service.threads]
    one = _medians(own[(own["beside"] == ALONE) & (own["cores"] == 1)])
    knee, caution = _knee(one), ""
    if math.isnan(knee):
        knee = _largest_throughput(own)
        caution = "; CAUTION: p95 shows no knee, the largest throughput stands for it"
    seen = f"knee on one vCPU {knee:,.0f}/s"
    sizes = [len(cores) for cores in service.candidates]
    refuge, refuge_qps = _refuge(own, sizes, knee)
    scanned = scans[scans["disturbed"] == 0.0].groupby("target_qps")["p95_us"].median()
    earlier = _knee(scanned) if len(scanned) >= LEAST_SCANNED else math.nan
    slowed = earlier < knee
    room = 1.0 / ROOM
    if slowed:
        if not caution:  # else there is no knee that the scans' could be compared with
            room = min(room, earlier / knee)
        knee = earlier
        seen += f", {knee:,.0f}/s in the scans for its largest throughput"
    most, chosen = LOAD_OVER_KNEE * knee, f"{LOAD_OVER_KNEE:g} times the knee on one vCPU"
    if most > room * refuge_qps:
        most = room * refuge_qps
        chosen = f"{room:.2f} of the refuge's knee at {refuge_qps:,.0f}/s, for slower minutes"
    fast = min(_p95_us(curve, most) for _, curve in own[own["beside"] == ALONE].groupby("cores"))
    if slowed:
        there = float(np.interp(most, scanned.index, scanned))
        fast *= max(1.0, there / float(np.interp(most, one.index, one)))
    slow = _p95_us(own[own["beside"].str.endswith(f"({EQUAL})") & (own["cores"] == 1)], most)
    slo_us = math.sqrt(slow * fast)
    text = (
        f"{seen}; vCPUs of memcached's refuge: {refuge}; largest load {most:,.0f}/s, {chosen}; "
        f"p95 there {fast:,.0f} us alone and {slow:,.0f} us beside work of memcached's weight; "
        f"SLO = their geometric mean = {slo_us:,.0f} us{caution}"
    )
    if slow < APART * fast:
        text += f"; CAUTION: less than {APART:g} times apart, so the SLO hardly tells them apart"
    return Suited(most, slo_us, refuge, text)


def _refuge(own: pd.DataFrame, sizes: Sequence[int], one_vcpu_qps: float) -> tuple[int, float]:
    """
    How many vCPUs memcached's refuge has, and its knee there [1/s]; inf where none was seen.

    :param own: all points with its threads
    :param sizes: how many vCPUs the refuge may have, in rising order
    :param one_vcpu_qps: the knee on one vCPU
    """
    refuge, its_qps = sizes[0], math.inf
    for vcpus in sizes:
        there = own[own["cores"] == vcpus]
        knees = [_knee_if_told(there[there["beside"] == b]) for b in (ALONE, BACKGROUND_WORK)]
        if vcpus == 1:
            knees[0] = one_vcpu_qps  # for which a throughput may stand
        if vcpus == sizes[0]:
            its_qps = min((knee for knee in knees if not math.isnan(knee)), default=math.inf)
        # A NaN among the knees makes this false: what is not told makes no refuge.
        elif np.min(knees) > its_qps * (1.0 + ADDS * (vcpus / refuge - 1.0)):
            refuge, its_qps = vcpus, min(knees)
    return refuge, its_qps


def _knee_if_told(points: pd.DataFrame) -> float:
    """
    The knee of a sweep [1/s]: inf where every load was served without one, NaN if it is not told.

    :param points: of one vCPU set beside one kind of work; there may be none
    """
    if points.empty:
        return math.nan
    knee = _knee(_medians(points))
    served = points.groupby("target_qps")["achieved_qps"].median()
    asked = served.index.to_numpy(np.float64)
    all_served = math.isnan(saturation_qps(asked, served.to_numpy()))
    return math.inf if math.isnan(knee) and all_served else knee


def _knee(p95_us: pd.Series) -> float:
    """The knee of a curve of p95 by load [1/s]; NaN if it shows none."""
    return knee_qps(p95_us.index.to_numpy(np.float64), p95_us.to_numpy())


def _largest_throughput(own: pd.DataFrame) -> float:
    """
    What memcached alone serves at most on one vCPU [1/s].

    :raises InputError: if it served all that was asked for
    """
    points = curves(own.assign(source="here"))
    points = points[(points["beside"] == ALONE) & (points["cores"] == 1)]
    points = points.sort_values("target_qps")
    asked, given = points["target_qps"].to_numpy(), points["achieved_qps"].to_numpy()
    found = saturation_qps(asked, given)
    if math.isnan(found):
        raise InputError(
            f"memcached on one vCPU has no knee and served {given.max():,.0f}/s where at most "
            f"{asked.max():,.0f}/s were asked for: the load generator was the limit, or the "
            "machine was too busy; measure again on a quiet machine"
        )
    return found


def _medians(curve: pd.DataFrame) -> pd.Series:
    """p95 [us] by load where one is known: medians, because one lost moment doubles a mean."""
    return trusted(curve, ["target_qps"]).groupby("target_qps")["p95_us"].median().dropna()


def _p95_us(curve: pd.DataFrame, qps: float) -> float:
    medians = _medians(curve)
    return float(np.interp(qps, medians.index, medians))
