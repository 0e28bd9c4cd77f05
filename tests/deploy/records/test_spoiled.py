"""Intervals whose latency is not memcached's doing alone are marked, wherever they are shown."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.linux.sensors import StolenClock
from deploy.records import mcperf, run_report
from deploy.records.recorder import Recorder, Sample, read_samples
from env.allocation import Allocation, JobAllocation, JobState
from env.scenario import Scenario, load_scenario
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry


@pytest.fixture
def scenario() -> Scenario:
    return load_scenario("local")


def sample(time_s: float, stolen_s: float) -> Sample:
    return Sample(time_s, 1e4 * time_s, 1e4, 0.5, None, (0,), stolen_s, (time_s, time_s), {})


@pytest.mark.parametrize(
    ("client_late", "stolen", "spoiled"),
    [
        (0.0, 0.0, False),
        (mcperf.SPOILED, mcperf.SPOILED, False),
        (0.011, math.nan, True),
        (math.nan, 0.011, True),
        (math.nan, math.nan, False),  # nobody has measured it: a foreign load, no samples
    ],
)
def test_an_interval_is_spoiled_by_more_than_one_in_a_hundred(
    client_late: float, stolen: float, spoiled: bool
) -> None:
    row = mcperf.Row(300.0, 9e3, 9e3, 0.0, 1.0, client_late, stolen)
    assert row.spoiled is spoiled


def test_stolen_time_is_told_of_the_interval_that_it_was_stolen_in() -> None:
    rows = [mcperf.Row(300.0, 9e3, 9e3, start_s, start_s + 4.0) for start_s in (0.0, 4.0, 8.0)]
    samples = [sample(float(second), 0.4 * (second >= 6)) for second in range(13)]
    shares = [row.stolen for row in run_report.with_stolen(rows, samples)]
    assert shares == pytest.approx([0.0, 0.4 / 8.0, 0.0])  # of two vCPUs' four seconds
    assert math.isnan(run_report.with_stolen(rows, [])[0].stolen)


def test_a_run_of_days_is_gone_through_once() -> None:
    """systemd waits half a minute for a queue's loop, report included."""
    rows = [mcperf.Row(300.0, 9e3, 9e3, float(start), start + 1.0) for start in range(20_000)]
    samples = (sample(float(second), 0.02 * second) for second in range(20_000))
    began_s = time.process_time()
    shares = [row.stolen for row in run_report.with_stolen(rows, samples)]
    assert time.process_time() - began_s < 3.0
    assert shares[:-1] == pytest.approx([0.01] * 19_999)


def test_what_was_stolen_and_the_hosts_speed_are_sampled(
    tmp_path: Path, scenario: Scenario
) -> None:
    clock = StolenClock(scenario.machine.vcpus)
    before_s = sum(clock.read())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    service = ServiceTelemetry(0.0, 0.0, 0.0, 9e3, 0.5, None)
    names = scenario.job_names
    held = Allocation((0,), {name: JobAllocation() for name in names})
    jobs = {name: JobTelemetry(JobState.PENDING, 0.0) for name in names}
    recorder.sample(Telemetry(1.0, service, (0.0, 0.0), jobs, held), held)
    recorder.close()
    (found,) = read_samples(tmp_path)
    assert before_s - 0.01 <= found.stolen_s <= sum(clock.read()) + 0.01
    assert found.yardstick_us is not None and found.yardstick_us > 0.0
    clock.close()


def test_stolen_time_never_falls_and_is_kept_where_a_reading_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, tick_s = StolenClock(2), 1.0 / os.sysconf("SC_CLK_TCK")
    far = 10**12  # more than this machine has
    for ticks, seen in (((5, 7), (5, 7)), ((5, 7), (5, 7)), ((9, 6), (9, 7)), ((9,), (9, 7))):
        lines = [f"cpu{vcpu} 1 2 3 4 5 6 7 {far + now} 0 0" for vcpu, now in enumerate(ticks)]
        text = "\n".join(["cpu  0 0 0 0 0 0 0 0 0 0", *lines, "intr 1"]).encode()
        monkeypatch.setattr(os, "pread", lambda *_, text=text: text)
        assert clock.read() == pytest.approx([(far + one) * tick_s for one in seen], rel=1e-15)
    clock.close()


def test_rows_of_our_load_say_what_its_client_was_late_with_and_mcperfs_do_not() -> None:
    ours = [mcperf.HEADER, mcperf.format_row([100.0], 9e3, 9e3, 1.0, 2.0, 0.25)]
    assert mcperf.read_rows(ours)[0].client_late == 0.25
    theirs = [line.rpartition(" ")[0] for line in ours]
    assert math.isnan(mcperf.read_rows(theirs)[0].client_late)


def test_the_report_marks_spoiled_intervals_and_counts_them_all_the_same(
    tmp_path: Path, scenario: Scenario
) -> None:
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    recorder.close()
    slow = mcperf.Row(2.0 * scenario.service.slo_us, 9e3, 9e3, 0.0, 4.0, 0.0, 0.0)
    rows = [
        slow,
        replace(slow, start_s=4.0, end_s=8.0, client_late=0.4),
        replace(slow, start_s=8.0, end_s=12.0, stolen=0.025),
    ]
    outcome = run_report.Outcome(
        policy="static",
        lasted_s=12.0,
        jobs={"zlib": run_report.JobOutcome(0, 0.0, 0.0, 0.0, 12.0, 0.0, 0)},
        actuations=0,
        overruled=0,
        loop=run_report.LoopCost(25.0, 0, 1.5, 55.0),
        restored=True,
    )
    run_report.write(tmp_path, scenario, outcome, rows)
    report = run_report.read_report(tmp_path)
    assert report["spoiled"] == [False, True, True]
    assert report["violation_ratio"] == 1.0
    run_report.write_page(tmp_path, scenario, report, "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<td class="n bad">40.0</td>' in page
    assert '<td class="n bad">2.5</td>' in page
    assert page.count('<td class="n ">0.0</td>') == 4
