"""
What the measured runs say about rows of docs/faithfulness.md that miss.

    python -m training.faithfulness_evidence --data DIR

Reads the tables that `training.calibrate` fits to, and prints seven: the same controller on
different days, violations by reaction, the tail of latency in overload, memcached beside a
job of equal weight on one of its vCPUs, what an interval counts after the load has dropped, and
what goes on in the low-load intervals of 2024, which violate now and then.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from env.errors import exit_on_bad_input
from env.inputs.commandline import OneLineParser
from training.calibration.logs.course import (
    DEFAULT_SLO_US,
    JOBS,
    LOAD_LAG_S,
    SERVERS,
    SLO_US,
)
from training.calibration.logs.known_faults import known_faults
from training.calibration.logs.run_logs import read_runs, whole_intervals
from training.calibration.logs.tables import read_table
from training.calibration.logs.traces import RunTrace, between, stretches

GROUP_031, IMAGOODFELLA = "Soufiane-Barrada/CCA", "ImaGoodFella/cca_project"
LOW_QPS = 40e3
"""A load at which memcached on the slower VM type leaves more than half of a vCPU idle."""

BRIEF = 0.02
"""A part of an interval that is too short to move its p95."""


def _by_day(runs: pd.DataFrame) -> pd.DataFrame:
    """Group 031's makespan and violations by day and interval."""
    group = runs[(runs.repo == GROUP_031) & (runs.valid == "yes")]
    day = group.date.str[:10]
    return group.groupby([day, group.interval_s.round()]).agg(
        runs=("run", "size"),
        makespan_s=("makespan_s", "mean"),
        violations=("viol08_active", "mean"),
    )


def reactions(runs: pd.DataFrame, events: pd.DataFrame, intervals: pd.DataFrame) -> pd.DataFrame:
    """
    Group 031's moves of memcached from one vCPU to two in intervals of 5 to 8 s above 120K.

    :param runs: the table `runs`
    :param events: the table `events`
    :param intervals: the table `intervals`
    :return: a row per move: seconds from the interval's computed start, seconds from memcached's
        move to the last job's, p95, and whether the interval violates
    """
    rows = []
    group = runs[(runs.repo == GROUP_031) & (runs.valid == "yes") & (runs.interval_s < 8.5)]
    for run in group.run:
        if run in known_faults().suspicious:
            continue
        own = events[events.run == run]
        moves = own[(own.job == "memcached") & own.cores.notna()].sort_values("t_s")
        widths = moves.cores.astype(str).str.count(";").to_numpy() + 1
        grown = moves.t_s.to_numpy()[1:][np.diff(widths) > 0]
        jobs = own[(own.event == "update_cores") & (own.job != "memcached") & (own.cores == "2;3")]
        batch = own[own.job != "memcached"]
        first_s, last_s = batch.t_s.min(), batch.t_s.max()
        seen = intervals[(intervals.run == run) & intervals.t_start_s.between(first_s, last_s)]
        for one in seen[seen.target_qps > 120e3].itertuples():
            for at_s in grown[(grown >= one.t_start_s) & (grown < one.t_start_s + 2.5)][:1]:
                after = jobs.t_s[(jobs.t_s > at_s) & (jobs.t_s < at_s + 4.0)]
                rows.append(
                    (
                        at_s - one.t_start_s,
                        after.max() - at_s if len(after) else 0.0,
                        one.p95_us,
                        one.p95_us > DEFAULT_SLO_US,
                    )
                )
    return pd.DataFrame(rows, columns=["delay_s", "jobs_s", "p95_us", "violates"])


def tails(runs: pd.DataFrame, intervals: pd.DataFrame) -> pd.DataFrame:
    """
    Share of requests above the SLO in intervals of 2025, by their p95.

    :param runs: the table `runs`
    :param intervals: the table `intervals`
    """
    servers = runs[(runs.server == "n2-highmem-4") & (runs.interval_s >= 4)]
    own = intervals[intervals.run.isin(servers.run)].dropna(subset=["p75_us", "p99_us"])
    ranks = (0.50, 0.75, 0.90, 0.95, 0.99)
    known = np.log(own[[f"p{100 * rank:.0f}_us" for rank in ranks]].to_numpy())
    limit = np.log(DEFAULT_SLO_US)
    slower = [1.0 - np.interp(limit, row, ranks, left=0.5, right=0.995) for row in known]
    steps = pd.cut(own.p95_us, [300, 500, 600, 700, 800, 900, 1100, 1300, 1500, 2000])
    return (
        own.assign(slower=slower)
        .groupby(steps, observed=True)
        .agg(
            intervals=("slower", "size"),
            slower=("slower", "median"),
            p50_us=("p50_us", "median"),
            p90_us=("p90_us", "median"),
        )
    )


def _beside_equal_weight(
    runs: pd.DataFrame, events: pd.DataFrame, intervals: pd.DataFrame
) -> pd.DataFrame:
    """ImaGoodFella's p95 in 2 s intervals, memcached on vCPUs 0-1, a job on vCPU 1 or none."""
    rows = []
    for run in runs[(runs.repo == IMAGOODFELLA) & (runs.interval_s.round() == 2)].itertuples():
        own = events[(events.run == run.run) & ~events.job.isin(("memcached", "scheduler"))]
        seen = intervals[
            (intervals.run == run.run)
            & intervals.t_start_s.between(run.first_start_s, run.last_end_s)
        ]
        for one in seen.itertuples():
            there = on_vcpu_1(own, (one.t_start_s + one.t_end_s) / 2)
            rows.append((one.target_qps, there, one.p95_us, one.p95_us > DEFAULT_SLO_US))
    found = pd.DataFrame(rows, columns=["target_qps", "job_there", "p95_us", "violates"])
    steps = pd.cut(found.target_qps, [80e3, 100e3, 110e3, 120e3, 140e3, 180e3])
    return found.groupby([steps, "job_there"], observed=True).agg(
        intervals=("p95_us", "size"), p95_us=("p95_us", "median"), violations=("violates", "mean")
    )


def after_drops(intervals: pd.DataFrame, lag_s: float) -> pd.DataFrame:
    """
    Intervals of 9 to 11 s whose load is less than a third of the one before.

    :param intervals: of logged runs
    :param lag_s: how long the old load would last if it moved after the interval's beginning [s]
    :return: quartiles of the load served over the target, measured, and as the lag would have it
    """
    own = intervals.sort_values(["run", "i"])
    before = own.groupby("run")["target_qps"].shift()
    length_s = own.t_end_s - own.t_start_s
    dropped = (before > 3 * own.target_qps) & length_s.between(9, 11)
    lagging = 1 + lag_s / length_s * (before / own.target_qps - 1)
    found = pd.DataFrame({"measured": own.achieved_qps / own.target_qps, "with the lag": lagging})
    return found[dropped].describe().loc[["count", "25%", "50%", "75%"]]


def low_load(runs: Sequence[RunTrace], slo_us: float) -> pd.DataFrame:
    """
    Intervals of low load by what goes on in them: how many, their p95, how many violate.

    :param runs: whose memcached moves are logged
    :param slo_us: the latency objective [us]
    """
    rows = []
    for run in runs:
        pieces = stretches(run.service_moves, run.jobs)
        for number in np.flatnonzero(run.in_batch_window & (run.qps < LOW_QPS)):
            bounds_s = (run.interval_start_s[number], run.interval_end_s[number])
            own = list(between(pieces, *(bound_s + LOAD_LAG_S for bound_s in bounds_s)))
            shared_s = sum(
                piece.length_s
                for piece in own
                if any(job.cores & piece.service_cores for job in piece.jobs)
            )
            if shared_s > BRIEF * (bounds_s[1] - bounds_s[0]):
                weight = "background" if run.background else "equal"
                what = f"a job of {weight} weight on memcached's vCPUs"
            elif len({piece.service_cores for piece in own}) > 1:
                what = "memcached moves"
            else:
                what = "a job starts, ends, moves or pauses" if len(own) > 1 else "nothing"
            p95_us = run.p95_us[number]
            rows.append((run.group.split("/")[0], what, p95_us, p95_us > slo_us))
    found = pd.DataFrame(rows, columns=["group", "what", "p95_us", "violates"])
    return found.groupby(["group", "what"]).agg(
        intervals=("p95_us", "size"),
        p95_us=("p95_us", "median"),
        violations=("violates", "sum"),
        share=("violates", "mean"),
    )


def _by_low_load(runs: pd.DataFrame, intervals: pd.DataFrame) -> pd.DataFrame:
    """Percentiles of latency by load, in intervals of 2024 within the batch window."""
    own = runs[(runs.server == SERVERS[2024]) & runs.date.str.startswith("2024")]
    seen = intervals.merge(own[["run", "first_start_s", "last_end_s"]], on="run")
    seen = seen[seen.t_start_s.between(seen.first_start_s, seen.last_end_s)]
    steps = pd.cut(seen.target_qps, [0, 7e3, 10e3, 15e3, 20e3, 30e3, LOW_QPS])
    return seen.groupby(steps, observed=True)[["p50_us", "p95_us", "p99_us"]].median()


def on_vcpu_1(events: pd.DataFrame, at_s: float) -> bool:
    """
    Whether a job runs on vCPU 1 at a moment, as the log has it.

    :param events: one run's rows of the table `events`
    :param at_s: moment, on the clock of the events [s]
    """
    running: dict[str, bool] = {}
    cores: dict[str, str] = {}
    for event in events[events.t_s <= at_s].sort_values("t_s").itertuples():
        if isinstance(event.cores, str):
            cores[event.job] = event.cores
        if event.event in ("start", "unpause"):
            running[event.job] = True
        elif event.event in ("pause", "end"):
            running[event.job] = False
    return any(on and "1" in cores.get(job, "").split(";") for job, on in running.items())


def main(argv: Sequence[str] | None = None) -> None:
    """
    Print the tables.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m training.faithfulness_evidence", description=__doc__)
    line.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    arguments = line.parse_args(argv)
    with exit_on_bad_input():
        runs, events, intervals = (
            read_table(arguments.data, name) for name in ("runs", "events", "intervals")
        )
        intervals = intervals.groupby("run", group_keys=False)[list(intervals.columns)].apply(
            whole_intervals
        )
        print("Group 031 by day and interval\n", _by_day(runs).round(3).to_string(), sep="")
        moves = reactions(runs, events, intervals)
        late = pd.cut(moves.delay_s, [0, 1.0, 1.25, 1.5, 2.5])
        slow = pd.cut(moves.jobs_s, [-0.01, 0.06, 0.5, 4.0])
        shown = moves.groupby([late, slow], observed=True).agg(
            moves=("p95_us", "size"), p95_us=("p95_us", "median"), violates=("violates", "mean")
        )
        print("\nGroup 031, 5-8 s intervals above 120K, memcached from one vCPU to two:")
        print("by delay from the computed boundary and time until the last job had moved [s]")
        print(shown.round(2).to_string())
        print(
            f"\nShare of requests above {DEFAULT_SLO_US:g} us, intervals of 2025 by their p95 [us]"
        )
        print(tails(runs, intervals).round(3).to_string())
        print("\nImaGoodFella, 2 s intervals, memcached on vCPUs 0-1, a job on vCPU 1 or none")
        print(_beside_equal_weight(runs, events, intervals).round(2).to_string())
        print(f"\nServed over target after a drop, and if the load moved {LOAD_LAG_S} s late")
        print(after_drops(intervals, LOAD_LAG_S).round(3).to_string())
        traces = read_runs(arguments.data, JOBS, (2024,), SERVERS[2024]).runs
        print(f"\nIntervals of 2024 under {LOW_QPS:g} requests/s, by what goes on in them")
        shown = low_load([run for run in traces if run.moves_logged], SLO_US[2024])
        print(shown.round(4).to_string())
        print("\nThe same runs, median latency [us] by load")
        print(_by_low_load(runs, intervals).round(0).to_string())


if __name__ == "__main__":
    main(sys.argv[1:])
