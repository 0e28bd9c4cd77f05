"""A run in which no job has started measures nothing, whatever the load was at meanwhile."""

import time
from pathlib import Path

from deploy.records import mcperf, run_report
from deploy.records.recorder import Recorder
from env.scenario import load_scenario


def test_no_interval_counts_where_no_job_has_started(tmp_path: Path) -> None:
    scenario = load_scenario("local")
    Recorder(tmp_path, scenario, time.monotonic()).close()
    # The load runs before the loop does, and one of its intervals goes on when the loop begins.
    rows = [mcperf.Row(300.0, 9e3, 9e3, start_s, start_s + 4.0) for start_s in (-2.0, 2.0, 6.0)]
    outcome = run_report.Outcome(
        policy="perfiso",
        lasted_s=10.0,
        jobs={"zlib": run_report.JobOutcome(None, None, None, None, None, 0.0, 0)},
        actuations=0,
        overruled=0,
        loop=run_report.LoopCost(25.0, 0, 1.5, 55.0),
        restored=True,
    )
    run_report.write(tmp_path, scenario, outcome, rows)
    report = run_report.read_report(tmp_path)
    assert report["p95_us"] == report["spoiled"] == []
    assert report["violation_ratio"] is None and report["makespan_s"] is None
    run_report.write_page(tmp_path, scenario, report, "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<td class="n">not measured</td>' in page
