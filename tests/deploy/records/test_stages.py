"""A group's run shows by member where requests spent their time: samples, view, metrics, report."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from deploy.records import run_report
from deploy.records.live_view import Reader, draw
from deploy.records.metrics import RunCollector
from deploy.records.recorder import Recorder, read_samples
from env.allocation import Allocation, JobAllocation
from env.scenario import load_scenario
from env.telemetry import JobTelemetry, ServiceTelemetry, Stages, Telemetry

SCENARIO = load_scenario("local-group")
SHOWN = [
    (None, None),  # nobody has measured yet
    (Stages(100.0, 900.0), (Stages(10.0, 30.0), None)),
    (Stages(120.0, 700.0), (Stages(12.0, 40.0), Stages(5.0, 50.0))),
    (Stages(110.0, 800.0), (Stages(11.0, 50.0), Stages(7.0, 70.0))),
]


def moment(proxy: Stages | None, members: tuple[Stages | None, ...] | None) -> Telemetry:
    """Readings of a group that the tap watches."""
    jobs = {name: JobAllocation() for name in SCENARIO.job_names}
    service = ServiceTelemetry(3e4, 0.2, 0.01, qps=2e4, cpu_cores=0.25)
    if proxy is not None:
        service = service._replace(p95_us=950.0, **proxy._asdict(), members=members or ())
    telemetry = {name: JobTelemetry(job.state, 0.0) for name, job in jobs.items()}
    return Telemetry(1.0, service, (0.1, 0.2), telemetry, Allocation((0, 1), jobs))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recorder = Recorder(tmp_path, SCENARIO, time.monotonic() - 1.0)
    for shown in SHOWN:
        recorder.sample(telemetry := moment(*shown), telemetry.applied)
    recorder.close()
    return tmp_path


def test_samples_keep_the_stages_of_each_member(run: Path) -> None:
    assert [one.members for one in read_samples(run)] == [
        *((None, None), SHOWN[1][1], SHOWN[2][1], SHOWN[3][1])
    ]


def test_the_report_has_the_median_of_each_process(run: Path) -> None:
    cost = run_report.LoopCost(25.0, 0, 1.5, 55.0)
    outcome = run_report.Outcome("perfiso", 1.0, {}, 0, 0, cost, restored=True)
    report = run_report.write(run, SCENARIO, outcome, [])
    run_report.write_page(run, SCENARIO, report, picture="")
    page = " ".join((run / "report.html").read_text(encoding="utf-8").split())
    assert '<tr><td>member 2</td><td class="n">6</td> <td class="n">60</td></tr>' in page
    assert run_report.read_report(run)["stages"] == {
        "proxy": {"wait_us": 110.0, "service_us": 800.0},
        "member 1": {"wait_us": 11.0, "service_us": 40.0},
        "member 2": {"wait_us": 6.0, "service_us": 60.0},
    }


def test_the_view_has_a_line_of_each_member(run: Path) -> None:
    reader = Reader(run)
    reader.update()
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(draw(reader.picture))
    text = console.export_text()
    assert "waiting 110 µs, being served 800 µs" in text
    assert "member 2  waiting 7 µs, being served 70 µs" in text


def test_metrics_are_labelled_by_member() -> None:
    collector = RunCollector()
    collector.sample(telemetry := moment(*SHOWN[1]), telemetry.applied)
    found = {
        metric.name: [(one.labels["member"], one.value) for one in metric.samples]
        for metric in collector.collect()
        if metric.name.startswith("coretide_member")
    }
    assert found == {
        "coretide_member_wait_p95_microseconds": [("1", 10.0)],
        "coretide_member_service_p95_microseconds": [("1", 30.0)],
    }
