"""Replayed runs are scored: errors of jobs, violations by their probability, and what repeats."""

from dataclasses import replace

import numpy as np
import pytest

from env.simulator.profile import Scatter
from training.calibration.logs.known_faults import known_faults
from training.calibration.logs.traces import JobTrace, RunTrace
from training.calibration.scores import (
    RunIntervals,
    Tally,
    auc_if_right,
    missing_shares,
    repetition,
    scatter_around,
    thread_kind,
)


def a_run() -> RunTrace:
    """100 intervals of 10 s, and one job that runs throughout."""
    starts = 10.0 * np.arange(100)
    job = JobTrace("vips", 0.0, 1000.0, 2, ((0.0, 0b1100),), ())
    return RunTrace(
        run="r",
        group="a",
        year=2025,
        day="2025-05-01",
        server="n2-highmem-4",
        interval_start_s=starts,
        interval_end_s=starts + 10.0,
        qps=np.tile([20e3, 90e3], 50),
        p95_us=np.full(100, 400.0),
        service_threads=2,
        service_moves=((-np.inf, 0b0011),),
        jobs=(job,),
        moves_logged=True,
        background=False,
    )


def alike(run: RunTrace, count: int) -> list[RunTrace]:
    """Runs that went like one, on one VM."""
    return [replace(run, run=f"{run.run}-{number}") for number in range(count)]


def compared(group, measured_us, simulated_us, run="r"):
    """Intervals at loads of 50K, 100K, 50K, ... whose VM is known."""
    qps = np.where(np.arange(len(measured_us)) % 2, 100e3, 50e3)
    return RunIntervals(run, group, qps, measured_us, simulated_us, simulated_us[None])


def test_violations_are_told_apart_whatever_the_threshold():
    """Of the four pairs of a violating and another interval, three have the simulated p95 right."""
    tally = Tally(800.0)
    measured_us, simulated_us = [900.0, 900.0, 300.0, 300.0], [700.0, 900.0, 400.0, 810.0]
    told_us = np.array(simulated_us)
    tally.intervals.append(compared("a", np.array(measured_us), told_us))
    told = tally.report("none", {})["violations"]
    assert told["auc"] == 0.75
    assert told["balanced_accuracy_p95"] == told["recall"] == told["precision"] == 0.5
    assert told["balanced_accuracy"] == 0.5  # without a scatter there are no probabilities
    assert told["measured"] == told["simulated"] == 2
    assert told["expected"] is told["log_loss"] is told["brier"] is None


def test_probabilities_are_scored_by_group_and_together():
    """An interval at the median of its scatter violates with even chances: ln 2, and 1/4."""
    tally = Tally(800.0)
    measured_us = np.array([900.0, 300.0, 900.0, 300.0])
    for group, measured, simulated in (
        ("a", measured_us, np.full(4, 400.0)),
        ("b", np.full(2, 300.0), np.full(2, 1e-3)),
    ):
        tally.intervals.append(compared(group, measured, simulated))
    scatters = dict.fromkeys("ab", Scatter(mean=np.log(2.0), spread=1e-3))
    told = tally.report("none", scatters)["violations"]
    a, b = told["groups"]["a"], told["groups"]["b"]
    assert (a["expected"], a["measured"], a["auc"]) == (2.0, 2, 0.5)
    assert told["balanced_accuracy"] == 0.75  # all of a, none of b
    assert told["balanced_accuracy_p95"] == 0.5  # no p95 is simulated above the SLO
    assert (a["log_loss"], a["brier"]) == (round(np.log(2.0), 4), 0.25)
    assert (b["expected"], b["measured"], b["auc"], b["log_loss"]) == (0.0, 0, None, 0.0)
    assert (told["expected"], told["runs_within_90"]) == (2.0, 1.0)
    assert told["brier"] == pytest.approx(0.25 * 4 / 6, abs=1e-4)
    assert [load["intervals"] for load in told["loads"]] == [0, 3, 3, 0]
    assert [load["measured"] for load in told["loads"]] == [0, 2, 0, 0]
    assert sum(point["intervals"] for point in told["curve"]) == 6
    assert sum(point["expected"] for point in told["curve"]) == told["expected"]


def test_suspicious_runs_are_scored_with_the_others_and_left_out():
    tally = Tally(800.0)
    (odd, *_) = known_faults().suspicious
    for run, simulated_us in (("r", [300.0, 900.0]), (odd, [900.0, 300.0])):
        tally.intervals.append(compared("a", np.array([300.0, 900.0]), np.array(simulated_us), run))
    told = tally.report("none", {"a": Scatter(mean=0.0, spread=0.1)})["violations"]
    assert told["auc"] == 0.5 and told["without_suspicious"]["auc"] == 1.0
    assert told["auc_missing"]["suspicious runs"] == {"measured": 1, "share": 0.75}
    assert told["auc_missing"]["a"] == {"measured": 2, "share": 1.0}


def test_the_scatter_is_what_draws_leave_unexplained():
    """Measured p95 belong to one of two draws, and scatter around it."""
    rng = np.random.default_rng(3)
    drawn_us = 800.0 * np.exp(rng.normal(0.0, 0.3, (2, 4000)))
    true_us = np.where(rng.random(4000) < 0.5, drawn_us[0], drawn_us[1])
    spread = 0.05 * (np.minimum(true_us, 800.0) / (0.6 * 800.0)) ** 1.5
    measured_us = true_us * np.exp(-0.1 + spread * rng.standard_t(3.0, 4000))
    qps = np.full(4000, 5e4)
    run = RunIntervals("r", "a", qps, measured_us, drawn_us[0], drawn_us)
    scatter = scatter_around([run], 800.0)
    assert scatter.mean == pytest.approx(-0.1, abs=0.01)
    assert scatter.spread == pytest.approx(0.05, abs=0.01)
    assert scatter_around([], 800.0) is None


def test_an_auc_is_expected_of_probabilities_that_are_right():
    """Against drawing what violates; 0.75 where one half always does and the other evenly may."""
    assert auc_if_right(np.array([1.0, 1.0, 0.0])) == 1.0
    assert auc_if_right(np.full(5, 0.3)) == 0.5
    assert auc_if_right(np.zeros(3)) is auc_if_right(np.ones(3)) is None
    probability = np.tile([0.02, 0.1, 0.7], 100)
    drawn = np.random.default_rng(0).random((50, 300)) < probability
    aucs = [
        (probability[hit][:, None] > probability[~hit]).mean()
        + 0.5 * (probability[hit][:, None] == probability[~hit]).mean()
        for hit in drawn
    ]
    assert auc_if_right(probability) == pytest.approx(np.mean(aucs), abs=0.005)


def test_what_an_auc_lacks_is_borne_by_violations_held_for_unlikely():
    """The first violation is below one of two others, the second equal to one: 1 and 1/2."""
    probability, violated = np.array([0.3, 0.5, 0.5, 0.1]), np.array([True, True, False, False])
    parts = {"first": np.arange(4) == 0, "all": np.ones(4, np.bool_)}
    assert missing_shares(probability, violated, parts) == {
        "first": {"measured": 1, "share": 0.6667},
        "all": {"measured": 2, "share": 1.0},
    }
    assert missing_shares(np.array([0.9, 0.1]), np.array([True, False]), {}) is None


def test_repetitions_bound_what_a_model_of_means_can_tell():
    """Half of the intervals scatter around the SLO: knowing their means tells them no further."""
    run = a_run()
    rng = np.random.default_rng(1)
    middle_us = np.where(np.arange(100) % 2, 800.0, 300.0)
    runs = [
        replace(one, p95_us=middle_us * np.exp(rng.normal(0.0, 0.1, 100))) for one in alike(run, 4)
    ]
    told = repetition(runs, 800.0)["violations"]
    assert 0.7 < told["auc_of_means"] < 0.9 and 0.7 < told["auc"] < 0.9
    assert told["groups"] == {run.group: {k: v for k, v in told.items() if k != "groups"}}
    exact = [replace(one, p95_us=middle_us * 1.1) for one in alike(run, 2)]
    assert repetition(exact, 800.0)["violations"]["auc_of_means"] == 1.0


@pytest.mark.parametrize(
    ("threads", "cores", "kind"),
    [
        (3, 0b0010, "several threads on one vCPU"),
        (4, 0b1110, "more threads than vCPUs"),
        (1, 0b1110, "fewer threads than vCPUs"),
        (2, 0b1100, "a thread for each vCPU"),
    ],
)
def test_a_job_is_of_the_kind_that_it_was_for_most_of_its_time(threads, cores, kind):
    moves = ((10.0, 0b1111), (12.0, cores), (90.0, 0b0001))
    assert thread_kind(JobTrace("vips", 10.0, 95.0, threads, moves, ())) == kind


def test_runs_of_one_setting_foretell_each_other():
    run = a_run()
    slow = replace(run, p95_us=np.where(run.qps > 80e3, 900.0, 400.0))
    told = repetition([*alike(slow, 2), replace(run, run="other day", day="x")], 800.0)
    assert told["runs"] == 2 and told["violations"]["auc"] == 1.0
    assert told["job_duration"]["p90_abs_rel_error"] == 0.0
    assert told["makespan"]["median_abs_rel_error"] == 0.0
    assert repetition([run], 800.0)["makespan"]["median_abs_rel_error"] is None


def test_repetitions_bound_what_is_known_of_durations():
    """Runs scatter by 10 %: three others miss that by sqrt(4/3), their true mean by itself."""
    run = a_run()
    rng = np.random.default_rng(2)
    runs = []
    for day in range(100):
        for number in range(4):
            end_s = 1000.0 * float(np.exp(rng.normal(0.0, 0.1)))
            job = replace(run.jobs[0], end_s=end_s)
            runs.append(replace(run, run=f"{day}-{number}", day=str(day), jobs=(job,)))
    told = repetition(runs, 800.0)
    median = 0.0674  # of the absolute value of a normal variable
    for what in ("job_duration", "makespan"):
        assert told[what]["median_if_mean_known"] == pytest.approx(median, rel=0.15)
        assert told[what]["median_abs_rel_error"] == pytest.approx(
            median * (4 / 3) ** 0.5, rel=0.15
        )
    assert told["job_duration_of_other_days"]["median_if_mean_known"] == pytest.approx(
        median, rel=0.15
    )
    assert repetition(runs[:4], 800.0)["job_duration_of_other_days"]["p90_if_mean_known"] is None
