"""What is seen of a run: live view, metrics, report."""

from __future__ import annotations

import csv
import http.client
import io
import json
import math
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deploy.jobs.job_run import JobRun
from deploy.loop.outcome import write_report
from deploy.records import live_view, mcperf, metrics, run_report
from deploy.records.latencies import IntervalLog
from deploy.records.lines import Disk, LineFile
from deploy.records.metrics import MOST_CONNECTIONS, Endpoint, RunCollector
from deploy.records.recorder import (
    EVENTS_FILE,
    LOAD_FILE,
    MEMCACHED,
    Event,
    Recorder,
    failed_attempt,
    read_samples,
    scenario_of,
    started_at_s,
)
from deploy.records.state import JobRecord
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError
from env.scenario import Scenario
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from training.evaluation import live_pictures
from training.evaluation.live_recording import recording_of

HOSTILE = "<script>alert(1)</script> \x1b[31m[bold]{{ 7 * 7 }}"


def moment(
    scenario: Scenario, time_s: float, state: JobState, p95_us: float | None = None
) -> Telemetry:
    """Readings in which vips is in a state, on vCPUs 2 and 3."""
    jobs = {name: JobAllocation() for name in scenario.job_names}
    jobs["vips"] = JobAllocation(state, (2, 3), Weight.BACKGROUND, 4)
    return Telemetry(
        time_s=time_s,
        service=ServiceTelemetry(3e4, 0.2, 0.01, qps=9e4, cpu_cores=0.75, p95_us=p95_us)._replace(
            **({} if p95_us is None else {"wait_us": 300.0, "service_us": 150.0})
        ),
        vcpu_busy_s=(0.5 * time_s, 0.0, time_s, time_s),
        jobs={name: JobTelemetry(job.state, 2.0) for name, job in jobs.items()},
        applied=Allocation((0, 1), jobs),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> Path:
    """The records of a run in which vips alone ran, for 20 s, was paused and said bad words."""
    folder = tmp_path_factory.mktemp("run")
    recorder = Recorder(folder, scenario, time.monotonic() - 30.0)
    recorder.sample(first := moment(scenario, 0.1, JobState.RUNNING), first.applied)
    story = [
        Event(1.0, "start", "vips", (2, 3), 4),
        Event(6.0, "pause", "vips"),
        Event(8.0, "unpause", "vips"),
        Event(9.0, "update_cores", MEMCACHED, (0,)),
        Event(10.0, "update_cores", "vips", (1, 2, 3)),
        Event(11.0, "custom", "vips", detail=HOSTILE),
        Event(21.0, "end", "vips"),
    ]
    for event in story:
        recorder._write(event)
    recorder.sample(last := moment(scenario, 21.1, JobState.DONE, 950.0), last.applied)
    recorder.close()
    return folder


@pytest.fixture(scope="module")
def reported(run: Path, scenario: Scenario) -> Path:
    """The same with its report."""
    run_report.illustrate(run, scenario, run_report.write(run, scenario, outcome(), INTERVALS))
    return run


def outcome() -> run_report.Outcome:
    return run_report.Outcome(
        policy="threshold-groups",
        lasted_s=30.0,
        jobs={"vips": run_report.JobOutcome(0, 0.99, 1.0, 1.01, 21.0, 2.0, 1)},
        actuations=5,
        overruled=2,
        loop=run_report.LoopCost(25.0, 3, 1.5, 55.0),
        restored=True,
    )


INTERVALS = [
    mcperf.Row(p95_us, 9e4, 9.1e4, 10.0 * i - 10.0, 10.0 * i, 0.02 * (i == 4), 0.03 * (i == 2))
    for i, p95_us in enumerate((300.0, 400.0, 900.0, 500.0, 2000.0))
]


# --- the report -------------------------------------------------------------------------------


def test_the_report_has_the_agreed_keys(reported: Path) -> None:
    written = json.loads((reported / "report.json").read_text())
    assert " ".join(written) == (
        "policy makespan_s jobs violation_ratio p95_us spoiled actuations overruled guard "
        "predicted reaction_ms start_delay_ms stages loop restored"
    )
    assert list(written["jobs"]["vips"]) == [
        "exit_code", "decided_s", "start_s", "begun_s", "end_s", "paused_s", "retries",
    ]  # fmt: skip
    assert list(written["reaction_ms"]) == ["p50", "p99"]
    assert written["start_delay_ms"] == {"p50": pytest.approx(20.0), "max": pytest.approx(20.0)}
    assert list(written["loop"]) == ["period_ms", "overruns", "cpu_pct", "rss_mib"]
    assert written["makespan_s"] == 20.0


def test_intervals_count_while_jobs_run(scenario: Scenario) -> None:
    # vips runs from 1 s to 21 s: the interval before and the one after do not count.
    content = run_report.content(outcome(), INTERVALS, [], scenario.service.slo_us)
    assert content["p95_us"] == [400.0, 900.0, 500.0]
    assert content["violation_ratio"] == pytest.approx(1 / 3)


def test_a_job_that_never_ended_is_shown_as_such_and_counts_to_the_runs_end(
    reported: Path, tmp_path: Path, scenario: Scenario
) -> None:
    jobs = {"vips": run_report.JobOutcome(None, 0.99, 1.0, 1.01, None, 2.0, 0)}
    stopped = replace(outcome(), jobs=jobs, lasted_s=35.0)
    content = run_report.content(stopped, INTERVALS, [], scenario.service.slo_us)
    assert content["makespan_s"] is None
    assert content["jobs"]["vips"]["exit_code"] is None
    assert content["p95_us"] == [400.0, 900.0, 500.0, 2000.0]
    folder = shutil.copytree(reported, tmp_path / "run")
    run_report.illustrate(folder, scenario, content)
    assert "stopped before the jobs were done" in (folder / "report.html").read_text()


def test_a_reaction_counts_from_the_rise_of_the_load() -> None:
    moves = [(0.5, (0, 1)), (3.0, (0,)), (10.03, (0, 1)), (12.0, (0,)), (25.0, (0, 1))]
    events = [Event(time_s, "update_cores", MEMCACHED, cores) for time_s, cores in moves]
    loads = [(0.0, 9e3), (10.0, 9e4), (20.0, 5e4), (30.0, 9e4)]
    intervals = [mcperf.Row(300.0, qps, qps, start_s, start_s + 10.0) for start_s, qps in loads]
    # At 20 s the load fell, at 30 s memcached had its vCPUs already.
    assert run_report.reactions_ms(events, intervals) == [pytest.approx(30.0)]


class SteadyProbe:
    """Stands in for a probe of a memcached that answers a thousand times a second in 100 µs."""

    keep_s = 1.0
    known_until_s = 0.0

    def between(self, start_s: float, end_s: float) -> list[float]:
        return [1e-4] * round(1000.0 * (end_s - start_s))

    def own_late(self, start_s: float, end_s: float) -> float:
        return 0.0


def interval_log(folder: Path, probe: SteadyProbe) -> IntervalLog:
    """What `--probe` writes into a run's folder, in intervals of 10 s."""
    lines = LineFile.at(folder / LOAD_FILE, Disk("here"))
    return IntervalLog(probe, lines, 10.0)


def test_rows_that_do_not_know_when_the_load_moved_give_no_reaction_times(
    tmp_path: Path, scenario: Scenario
) -> None:
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    recorder._write(Event(20.0, "end", "vips"))
    recorder.close()
    probe = SteadyProbe()
    start_s = time.monotonic()
    log = interval_log(tmp_path, probe)
    for time_s, requests in ((0.0, 0.0), (10.0, 1e5), (20.0, 1e6)):
        probe.known_until_s = start_s + time_s + 1.0
        log.poll(start_s + time_s + 1.0, requests)
    # The load rises at 14 s; memcached is given a vCPU for it 30 ms later.
    moves = [(1.0, (0,)), (14.03, (0, 1))]
    events = [Event(time_s, "update_cores", MEMCACHED, cores) for time_s, cores in moves]
    intervals = run_report.load_intervals(tmp_path)
    assert intervals[1].qps > 5.0 * intervals[0].qps
    assert run_report.reactions_ms(events, intervals) == []
    report = run_report.write(tmp_path, scenario, outcome(), intervals)
    run_report.illustrate(tmp_path, scenario, report)
    assert all(math.isnan(row.target_qps) for row in run_report.read_intervals(tmp_path))
    assert "nan" not in (tmp_path / "report.html").read_text().split("<h2>Records")[1]
    # What was asked for is not known; the picture shows what was served.
    assert [one.qps for one in recording_of(tmp_path).intervals] == [row.qps for row in intervals]


def test_the_interval_in_which_a_run_ends_is_written_as_far_as_it_came(
    tmp_path: Path, scenario: Scenario
) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    probe = SteadyProbe()
    log = interval_log(tmp_path, probe)
    start_s = time.monotonic()

    def requests(time_s: float) -> float:
        """9000 a second, and twice as many from 10 s on."""
        return 1e6 + 9e3 * (time_s + max(0.0, time_s - 10.0))

    for time_s in (0.0, 9.7, 10.9, 11.8, 12.5):
        probe.known_until_s = start_s + time_s - 0.1
        log.poll(start_s + time_s, requests(time_s))
    log.finish(start_s + 12.6, requests(12.6))
    before_s = time.monotonic()
    rows = run_report.load_intervals(tmp_path, until_s=100.0)  # no more will come
    assert time.monotonic() - before_s < 1.0
    assert [row.end_s - row.start_s for row in rows] == pytest.approx([10.0, 2.6], abs=0.01)
    assert [row.qps for row in rows] == pytest.approx([9e3, 18e3], rel=0.05)
    assert [row.p95_us for row in rows] == [100.0, 100.0]


def test_the_interval_in_which_the_last_job_ended_is_waited_for(
    tmp_path: Path, scenario: Scenario
) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    started_s = started_at_s(tmp_path)
    rows = [
        mcperf.format_row([100.0], 9e3, 9000, started_s + start_s, started_s + start_s + 0.5, 0.0)
        for start_s in (0.0, 0.5)
    ]
    path = tmp_path / LOAD_FILE
    assert run_report.load_intervals(tmp_path, until_s=1.0) == []
    path.write_text(f"{mcperf.HEADER}\n{rows[0]}\n")
    late = threading.Timer(0.2, lambda: path.write_text("\n".join([mcperf.HEADER, *rows])))
    late.start()
    assert len(run_report.load_intervals(tmp_path, until_s=0.8)) == 2
    # A load that has ended keeps nobody waiting.
    before_s = time.monotonic()
    assert len(run_report.load_intervals(tmp_path, until_s=100.0)) == 2
    assert time.monotonic() - before_s < 10.0
    late.join()


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ("read nan", 4),
        ("read " + " ".join(["nan"] * len(mcperf.COLUMNS)), 4),
        ("read " + " ".join(["inf"] * len(mcperf.COLUMNS)), 4),
        ("read " + " ".join(["-1"] * len(mcperf.COLUMNS)), 4),
        ("Timestamp start: never", 4),
    ],
)
def test_malformed_output_of_the_load_is_said_in_one_line_and_the_rest_is_written(
    tmp_path: Path, scenario: Scenario, capfd: pytest.CaptureFixture[str], bad: str, line: int
) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    start_s = started_at_s(tmp_path)
    rows = [
        mcperf.format_row([100.0], 9e3, 9000, start_s + i * 0.01, start_s + (i + 1) * 0.01, 0.0)
        for i in (0, 1)
    ]
    (tmp_path / LOAD_FILE).write_text("\n".join([mcperf.HEADER, *rows, bad, ""]))
    machine = ended_machine(scenario, 0.02, {}, {})
    write_report(tmp_path, "threshold-groups", machine, True, True, False, 1.5)
    written = run_report.read_report(tmp_path)
    assert [row.p95_us for row in run_report.read_intervals(tmp_path)] == [100.0, 100.0]
    assert written["policy"] == "threshold-groups"
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "load.txt" in said[0] and f"line {line} " in said[0]


def test_a_log_without_a_start_costs_the_latency_not_the_report(
    tmp_path: Path, scenario: Scenario, capfd: pytest.CaptureFixture[str]
) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    (tmp_path / LOAD_FILE).write_text(mcperf.HEADER + "\n")
    (tmp_path / EVENTS_FILE).write_text("when start scheduler\n")
    write_report(tmp_path, "static", ended_machine(scenario, 0.02, {}, {}), True, True, False, 1.5)
    assert run_report.read_report(tmp_path)["policy"] == "static"
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "[" * 100_000, '{"policy": NaN}', '{"policy": "static"}']
)
def test_a_report_of_others_is_read_or_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError) as refused:
        run_report.read_report(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_without_latency_claims_none(scenario: Scenario) -> None:
    assert run_report.content(outcome(), [], [], scenario.service.slo_us)["violation_ratio"] is None


def ended_machine(scenario: Scenario, now_s: float, jobs: dict, records: dict) -> SimpleNamespace:
    """What a report is written from, in place of a machine that has run jobs."""
    state = SimpleNamespace(jobs=records, queue="")
    actuator = SimpleNamespace(jobs=jobs, changes=5, state=state)
    return SimpleNamespace(
        scenario=scenario, actuator=actuator, now_s=now_s, overruns=0, overruled=0
    )


def test_retries_follow_the_first_attempt_and_a_pause_under_way_counts(
    tmp_path: Path, scenario: Scenario
) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    given_up = JobRecord(attempts=4, failures=4, exit_code=3, start_s=1.0, end_s=9.0)
    paused = JobRecord(attempts=1, start_s=1.0, paused_s=2.0)
    records = {"dedup": given_up, "vips": paused, "radix": JobRecord()}
    by_name = {job.name: job for job in scenario.jobs}
    jobs = {name: JobRun(by_name[name], record, None) for name, record in records.items()}
    jobs["vips"]._paused_at_s = 25.0
    machine = ended_machine(scenario, 30.0, jobs, records)
    write_report(tmp_path, "threshold-groups", machine, True, True, False, 1.5)
    written = run_report.read_report(tmp_path)["jobs"]
    assert [written[name]["retries"] for name in records] == [3, 0, 0]
    assert [written[name]["paused_s"] for name in records] == [0.0, 7.0, 0.0]


def test_the_page_holds_everything_and_runs_nothing(reported: Path) -> None:
    page = (reported / "report.html").read_text()
    assert "threshold-groups on cca-2025" in page
    assert "data:image/png;base64," in page
    assert "<script" not in page and "{{" not in page.replace("{{ 7 * 7 }}", "")
    assert "&lt;script&gt;" in page and "{{ 7 * 7 }}" in page
    assert "http" not in page.replace("http-equiv", "")
    with (reported / "intervals.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["p95_us"] for row in rows] == ["300.0", "400.0", "900.0", "500.0", "2000.0"]
    assert run_report.read_intervals(reported) == INTERVALS


def test_the_pictures_show_what_the_log_says(reported: Path) -> None:
    recording = recording_of(reported)
    spans = [(span.start_s, span.end_s, span.state, span.cores) for span in recording.jobs["vips"]]
    assert spans == [
        (pytest.approx(1.0), pytest.approx(6.0), JobState.RUNNING, (2, 3)),
        (pytest.approx(6.0), pytest.approx(8.0), JobState.PAUSED, (2, 3)),
        (pytest.approx(8.0), pytest.approx(10.0), JobState.RUNNING, (2, 3)),
        (pytest.approx(10.0), pytest.approx(21.0), JobState.RUNNING, (1, 2, 3)),
    ]
    assert [cores for _, cores in recording.service] == [(0, 1), (0,)]
    assert (reported / "run.png").stat().st_size > 10_000
    assert len(list(reported.glob("events.out.tfevents.*"))) == 1


def test_a_failed_attempt_is_over_in_the_pictures(reported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reported, tmp_path / "run")
    story = [
        Event(1.0, "start", "vips", (2, 3), 4),
        Event(4.0, "custom", "vips", detail="cannot be placed: attempt 1 failed: so it says"),
        Event(5.0, "custom", "vips", detail=failed_attempt(1, "exit code 3")),
        Event(25.0, "start", "vips", (1,), 4),
        Event(30.0, "end", "vips"),
    ]
    (folder / EVENTS_FILE).unlink()
    recorder = Recorder(folder, scenario_of(folder), time.monotonic())
    for event in story:
        recorder._write(event)
    recorder.close()
    spans = [(span.start_s, span.end_s, span.cores) for span in recording_of(folder).jobs["vips"]]
    assert spans == [
        (pytest.approx(1.0), pytest.approx(5.0), (2, 3)),
        (pytest.approx(25.0), pytest.approx(30.0), (1,)),
    ]


def test_tensorboard_reads_the_scalars(reported: Path) -> None:
    board = EventAccumulator(str(reported)).Reload()
    assert {"live/qps", "live/p95_us", "live/jobs_running"} <= set(board.Tags()["scalars"])
    assert [(one.step, one.value) for one in board.Scalars("live/jobs_running")] == [
        (100, 1.0),
        (21100, 0.0),
    ]


def test_the_page_is_written_anew_from_the_files_and_without_pictures_if_need_be(
    reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (reported / "report.html").read_text()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run_report.main([str(reported)])
    after = (reported / "report.html").read_text()
    assert "data:image" not in after
    assert after.split("<h2>")[:2] == before.split("<h2>")[:2]


def test_a_folder_without_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (run_report.main, live_view.main, live_pictures.main):
        with pytest.raises(SystemExit) as stop:
            command([str(tmp_path)])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert str(tmp_path) in said and len(said.splitlines()) == 1
        if command != run_report.main:
            assert "no run's report folder" in said


# --- the live view ----------------------------------------------------------------------------


def shown(reader: live_view.Reader) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=True, color_system=None)
    console.print(live_view.draw(reader.picture))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_view_follows_a_run(tmp_path: Path, scenario: Scenario) -> None:
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    reader = live_view.Reader(tmp_path)
    reader.update()
    assert "no reading yet" in shown(reader)
    recorder.event("start", "vips", cores=(2, 3), threads=4)
    for time_s in (1.0, 2.0):
        recorder.sample(now := moment(scenario, time_s, JobState.RUNNING, 450.0), now.applied)
    reader.update()
    text = shown(reader)
    for words in (
        "90,000 requests/s",
        "450 µs, SLO 800 µs",
        "waiting 300 µs, being served 150 µs",
        "start [2,3] 4",
    ):
        assert words in text
    rows = [line for line in text.splitlines() if "vCPU " in line]
    assert "memcached" in rows[0] and "50 %" in rows[0]
    assert "vips (background)" in rows[2] and "100 %" in rows[2]
    assert not live_view.over(reader.picture)
    recorder.close()
    reader.update()
    assert live_view.over(reader.picture)


def test_a_job_may_be_called_like_a_reading_of_memcacheds(
    tmp_path: Path, scenario: Scenario
) -> None:
    jobs = (scenario.jobs[0].model_copy(update={"name": "cpu"}),)
    alone = scenario.model_copy(update={"jobs": jobs})
    recorder = Recorder(tmp_path, alone, time.monotonic())
    applied = Allocation((0, 1), {"cpu": JobAllocation(JobState.RUNNING, (2, 3))})
    readings = {"cpu": JobTelemetry(JobState.RUNNING, 3.0)}
    now = replace(moment(scenario, 1.0, JobState.RUNNING), jobs=readings, applied=applied)
    recorder.sample(now, applied)
    recorder.close()
    sample = read_samples(tmp_path)[0]
    assert sample.cpu_cores == 0.75
    assert (sample.jobs["cpu"].cpu_s, sample.jobs["cpu"].cores) == (3.0, (2, 3))


def test_the_view_takes_p95_from_the_load_where_there_is_no_probe(
    tmp_path: Path, scenario: Scenario
) -> None:
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    recorder.sample(now := moment(scenario, 1.0, JobState.RUNNING), now.applied)
    reader = live_view.Reader(tmp_path)
    row = mcperf.format_row([900.0], 9e4, 90000, 1.0, 2.0, 0.0)
    with (tmp_path / LOAD_FILE).open("a") as load:
        load.write(mcperf.HEADER + "\n" + row[:20])
        load.flush()
        reader.update()
        assert "not measured" in shown(reader)
        load.write(row[20:] + "\n")
    reader.update()
    assert "900 µs" in shown(reader)
    assert "1 of 1 above the SLO" in shown(reader)


def test_what_a_job_says_has_no_effect_on_the_terminal(run: Path) -> None:
    reader = live_view.Reader(run)
    reader.update()
    text = shown(reader)
    assert "[bold]{{ 7 * 7 }}" in text
    assert "\x1b[31m" not in text


def test_a_line_that_comes_in_parts_is_read_once(tmp_path: Path) -> None:
    tail = live_view.Tail(tmp_path / "log")
    assert tail.lines() == []
    with (tmp_path / "log").open("a") as log:
        for part, wanted in (("one\ntw", ["one"]), ("o\nthree\n", ["two", "three"]), ("", [])):
            log.write(part)
            log.flush()
            assert tail.lines() == wanted


# --- metrics ----------------------------------------------------------------------------------


def ask(endpoint: Endpoint, method: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=5.0)
    connection.request(method, "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_prometheus_reads_the_latest_sample(scenario: Scenario) -> None:
    collector = RunCollector()
    endpoint = Endpoint(collector, port=0)
    try:
        assert ask(endpoint, "GET")[0] == 200
        collector.event(Event(1.0, "start", "vips", (2, 3), 4))
        for time_s in (1.0, 2.0):
            collector.sample(now := moment(scenario, time_s, JobState.RUNNING, 450.0), now.applied)
        status, text = ask(endpoint, "GET")
        assert status == 200
        for line in (
            "coretide_time_seconds 2.0",
            "coretide_memcached_qps 90000.0",
            "coretide_memcached_p95_microseconds 450.0",
            'coretide_vcpu_busy_seconds_total{vcpu="0"} 1.0',
            'coretide_job_state{job="vips",state="running"} 1.0',
            'coretide_job_vcpus{job="vips"} 2.0',
            'coretide_events_total{event="start",job="vips"} 1.0',
        ):
            assert line in text.splitlines()
        assert "python_gc" not in text
    finally:
        endpoint.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_endpoint_answers_nothing_but_get(method: str) -> None:
    endpoint = Endpoint(RunCollector(), port=0)
    try:
        assert ask(endpoint, method)[0] == 501
    finally:
        endpoint.close()


def test_the_endpoint_is_for_this_machine_alone() -> None:
    endpoint = Endpoint(RunCollector(), port=0)
    try:
        assert endpoint._server.server_address[0] == "127.0.0.1"
        with pytest.raises(InputError, match=f"--metrics-port {endpoint.port}"):
            Endpoint(RunCollector(), port=endpoint.port)
    finally:
        endpoint.close()


def test_slow_connections_are_few_and_end(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sends a byte now and then, which no time limit on a single read would end."""
    monkeypatch.setattr(metrics, "REQUEST_LIMIT_S", 0.5)
    endpoint, slow = Endpoint(RunCollector(), port=0), []
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    address = ("127.0.0.1", endpoint.port)
    try:
        slow = [socket.create_connection(address, 5.0) for _ in range(3 * MOST_CONNECTIONS)]
        most = before + len(slow) + MOST_CONNECTIONS + 1  # one that is being refused
        give_up_s = time.monotonic() + 20.0
        while slow:
            assert time.monotonic() < give_up_s
            assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= most
            for one in list(slow):
                try:
                    one.send(b"G")
                    one.settimeout(0.01)
                    ended = not one.recv(100)
                except TimeoutError:
                    ended = False
                except OSError:
                    ended = True
                if ended:
                    one.close()
                    slow.remove(one)
        assert ask(endpoint, "GET")[0] == 200
    finally:
        for one in slow:
            one.close()
        endpoint.close()
