"""What the SLO guard did is seen in the report, the live view, the metrics and the pictures."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from deploy.records import live_view, mcperf, run_report
from deploy.records.metrics import RunCollector
from deploy.records.recorder import SCHEDULER, Event, Recorder, guard_levels, read_events
from env.guard import LEVELS
from env.scenario import Scenario, load_scenario
from training.evaluation.live_recording import recording_of
from training.evaluation.plots import draw_guard

STORY = [
    (1.0, "guard up to level 1: memcached has its refuge (80 % late just now)"),
    (1.1, "guard up to level 3: no job runs on memcached's vCPUs or their siblings (80 % late)"),
    (3.1, "guard down to level 1: memcached has its refuge (0 % late just now)"),
    (5.0, "guard down to level 0: memcached's vCPUs are the policy's choice (0 % late just now)"),
    (6.0, "guard up to level 1: memcached has its refuge (50 % late just now)"),
    (7.0, "resumed"),
]


def told(time_s: float, detail: str) -> Event:
    return Event(time_s, "custom", SCHEDULER, detail=detail)


@pytest.fixture
def scenario() -> Scenario:
    return load_scenario("local")


@pytest.fixture
def run(tmp_path: Path, scenario: Scenario) -> Iterator[Path]:
    """The records of a run in which the guard steps and a loop is resumed."""
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    for moment in STORY:
        recorder._write(told(*moment))
    recorder._write(Event(10.0, "end", "zlib"))
    yield tmp_path
    recorder.close()


def test_the_levels_are_those_of_the_log_and_begin_anew_after_a_resume(run: Path) -> None:
    levels = [
        (pytest.approx(time_s, abs=1e-3), level) for time_s, level in guard_levels(read_events(run))
    ]
    assert levels == [(0.0, 0), (1.0, 1), (1.1, 3), (3.1, 1), (5.0, 0), (6.0, 1), (7.0, 0)]


@pytest.mark.parametrize(
    "event",
    [
        Event(1.0, "custom", "zlib", detail="guard up to level 4: so a job says"),
        Event(1.0, "custom", SCHEDULER, detail="overruled: guard up to level 4"),
        Event(1.0, "end", SCHEDULER),
    ],
)
def test_nobody_else_speaks_for_the_guard(event: Event) -> None:
    assert guard_levels([event]) == [(0.0, 0)]


def test_the_report_counts_steps_and_time(run: Path, scenario: Scenario) -> None:
    cost = run_report.LoopCost(25.0, 0, 1.5, 55.0)
    jobs = {"zlib": run_report.JobOutcome(0, 0.0, 0.0, 0.0, 10.0, 0.0, 0)}
    outcome = run_report.Outcome("random", 10.0, jobs, 4, 2, cost, True)
    row = mcperf.Row(300.0, 9e3, 9e3, 0.0, 10.0, 0.0, 0.0)
    run_report.write(run, scenario, outcome, [row])
    report = run_report.read_report(run)
    # Up by one, two and one; above level 0 from 1 to 5 s and from 6 to 7 s.
    assert report["guard"]["steps"] == 4
    assert report["guard"]["share_of_time"] == pytest.approx(0.5, abs=1e-3)
    run_report.write_page(run, scenario, report, "")
    assert "4, 50.0 %" in (run / "report.html").read_text(encoding="utf-8")


def test_a_run_without_steps_says_so(scenario: Scenario) -> None:
    cost = run_report.LoopCost(25.0, 0, 1.5, 55.0)
    outcome = run_report.Outcome("random", 0.0, {}, 0, 0, cost, True)
    found = run_report.content(outcome, [], [], scenario.service.slo_us)
    assert found["guard"] == {"steps": 0, "share_of_time": 0.0}


def test_metrics_have_the_level_and_count_the_steps() -> None:
    collector = RunCollector()
    registry = CollectorRegistry()
    registry.register(collector)
    for number, (level, steps) in enumerate([(1, 1), (3, 3), (1, 3), (0, 3), (1, 4), (0, 4)]):
        collector.event(told(*STORY[number]))
        text = generate_latest(registry).decode()
        assert f"coretide_guard_level {level}.0" in text
        assert f"coretide_guard_steps_total {steps}.0" in text


def test_the_live_view_shows_the_level_also_when_the_step_is_no_longer_in_its_log(
    tmp_path: Path, scenario: Scenario
) -> None:
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    recorder._write(told(*STORY[1]))
    reader = live_view.Reader(tmp_path)
    reader.update()
    for number in range(2 * live_view.SHOWN_EVENTS):
        recorder._write(told(2.0, f"something else {number}"))
    reader.update()
    assert reader.picture.guard_level == 3
    (tmp_path / "samples.csv").write_text(
        "time_s,requests,qps,cpu_cores,p95_us,service_cores,stolen_s\n3.0,2e4,9e3,0.5,,0,0.0\n"
    )
    again = live_view.Reader(tmp_path)
    again.update()
    console = Console(file=io.StringIO(), width=120)
    console.print(live_view.draw(again.picture))
    assert isinstance(console.file, io.StringIO)
    assert f"level 3: {LEVELS[3]}" in console.file.getvalue()
    recorder.close()


def test_the_picture_has_a_band_for_each_stretch_above_level_0(
    run: Path, scenario: Scenario
) -> None:
    from matplotlib.figure import Figure

    (run / "intervals.csv").write_text(",".join(run_report.INTERVAL_COLUMNS) + "\n")
    axes = Figure().subplots()
    draw_guard(axes, recording_of(run))
    bands = sorted((patch.get_x(), patch.get_width(), patch.get_alpha()) for patch in axes.patches)
    found = [(round(start, 2), round(width, 2), round(dark / 0.06)) for start, width, dark in bands]
    assert found == [(1.0, 0.1, 1), (1.1, 2.0, 3), (3.1, 1.9, 1), (6.0, 1.0, 1)]
