"""Reading what the measured runs say, on a few made-up rows."""

import numpy as np
import pandas as pd
import pytest

from training.calibration.logs.traces import JobTrace, RunTrace
from training.evaluation import measured_evidence as evidence


def log(*events):
    return pd.DataFrame(
        [
            {"run": "a", "t_s": t_s, "event": event, "job": job, "cores": cores}
            for t_s, event, job, cores in events
        ]
    )


def test_who_runs_on_vcpu_1():
    events = log(
        (0.0, "start", "radix", "1"),
        (1.0, "start", "vips", "2;3"),
        (5.0, "pause", "radix", None),
        (9.0, "unpause", "radix", None),
        (12.0, "update_cores", "radix", "3"),
    )
    seen = [evidence.on_vcpu_1(events, at_s) for at_s in (0.5, 6.0, 10.0, 13.0)]
    assert seen == [True, False, True, False]


def test_a_reaction_is_counted_from_the_interval_to_the_last_job_moved():
    runs = pd.DataFrame(
        [{"run": "a", "repo": evidence.GROUP_031, "valid": "yes", "interval_s": 5.0}]
    )
    events = log(
        (0.0, "start", "memcached", "0"),
        (0.5, "start", "vips", "1;2;3"),
        (6.2, "update_cores", "memcached", "0;1"),
        (6.3, "update_cores", "vips", "2;3"),
        (20.0, "end", "vips", None),
    )
    intervals = pd.DataFrame(
        {"run": "a", "t_start_s": [0.9, 5.0], "target_qps": [20e3, 150e3], "p95_us": [300.0, 900.0]}
    )
    (row,) = evidence.reactions(runs, events, intervals).itertuples(index=False)
    assert (row.delay_s, row.jobs_s) == (pytest.approx(1.2), pytest.approx(0.1))
    assert row.violates


def test_what_an_interval_counts_after_a_drop():
    intervals = pd.DataFrame(
        {
            "run": ["a", "a", "a", "b"],
            "i": [0, 1, 2, 0],
            "t_start_s": [0.0, 10.0, 20.0, 0.0],
            "t_end_s": [10.0, 20.0, 30.0, 10.0],
            "target_qps": [100e3, 20e3, 19e3, 1e3],
            "achieved_qps": [100e3, 20.2e3, 19e3, 1e3],
        }
    )
    found = evidence.after_drops(intervals, 0.5)
    assert found["measured"]["count"] == 1  # neither the small step nor another run's first
    assert found["measured"]["50%"] == pytest.approx(1.01)
    assert found["with the lag"]["50%"] == pytest.approx(0.95 + 0.05 * 5)


def test_low_load_intervals_are_told_apart_by_what_goes_on():
    """vips is on memcached's vCPU from 12 s on; the last interval is after all jobs."""
    starts_s = 5.0 * np.arange(6)
    vips = JobTrace("vips", 0.0, 24.0, 1, ((0.0, 0b0100), (12.0, 0b0001)), ())
    run = RunTrace(
        run="r",
        group="g/repo",
        year=2024,
        day="2024-05-01",
        server="n2d-highmem-4",
        interval_start_s=starts_s,
        interval_end_s=starts_s + 5.0,
        qps=np.array([20e3, 20e3, 20e3, 90e3, 20e3, 20e3]),
        p95_us=np.array([500.0, 1200.0, 600.0, 2000.0, 1300.0, 2000.0]),
        service_threads=2,
        service_moves=((-np.inf, 0b0011), (7.0, 0b0001)),
        jobs=(vips,),
        moves_logged=True,
        background=False,
    )
    found = evidence.low_load([run], 1000.0)
    shared = "a job of equal weight on memcached's vCPUs"
    assert found["intervals"].to_dict() == {
        ("g", shared): 2,
        ("g", "memcached moves"): 1,
        ("g", "nothing"): 1,
    }
    assert found["violations"].to_dict()["g", shared] == 1
    assert found["share"].to_dict()["g", "memcached moves"] == 1.0


def test_a_missing_table_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        evidence.main(["--data", str(tmp_path)])
    assert "no table runs.csv" in capsys.readouterr().err
