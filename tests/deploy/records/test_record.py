from __future__ import annotations

import csv
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.linux.own_folder import OwnFolder
from deploy.records import terminal
from deploy.records.recorder import (
    EVENTS_FILE,
    MEMCACHED,
    SAMPLES_FILE,
    SCHEDULER,
    Event,
    JobSample,
    Recorder,
    parse_events,
    read_samples,
    set_aside,
    started_at_s,
)
from deploy.records.recorder import read_events as read
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError
from env.scenario import Scenario
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry


@pytest.fixture
def recorder(tmp_path: Path, scenario: Scenario) -> Recorder:
    return Recorder(tmp_path, scenario, time.monotonic())


def lines(folder: Path, name: str = EVENTS_FILE) -> list[str]:
    return (folder / name).read_text().splitlines()


def test_the_event_log_has_the_courses_format(recorder: Recorder, tmp_path: Path) -> None:
    recorder.event("start", MEMCACHED, cores=(0, 1), threads=2)
    recorder.event("start", "vips", cores=(2,), threads=3)
    recorder.event("update_cores", "vips", cores=(2, 3))
    recorder.event("pause", "vips")
    recorder.event("unpause", "vips")
    recorder.event("custom", "vips", detail="weight background")
    recorder.event("end", "vips")
    recorder.close()
    words = [line.split(" ", 1)[1] for line in lines(tmp_path)]
    assert words == [
        "start scheduler",
        "start memcached [0,1] 2",
        "start vips [2] 3",
        "update_cores vips [2,3]",
        "pause vips",
        "unpause vips",
        "custom vips weight+background",
        "end vips",
        "end scheduler",
    ]


def test_an_event_is_on_the_disk_when_the_call_returns(recorder: Recorder, tmp_path: Path) -> None:
    recorder.event("pause", "vips")
    assert lines(tmp_path)[-1].endswith("pause vips")


def test_what_was_written_reads_back(recorder: Recorder, tmp_path: Path) -> None:
    recorder.event("start", "radix", cores=(1,), threads=4)
    recorder.event("custom", "radix", detail="exit 1:\nretry 1 of 2 [sic]")
    _, start, custom = read(tmp_path)
    assert (start.what, start.job, start.cores, start.threads) == ("start", "radix", (1,), 4)
    assert 0.0 < start.time_s < custom.time_s < 1.0
    assert custom.detail == "exit 1:\nretry 1 of 2 [sic]"


@pytest.mark.parametrize("cores", ["-12,3", "0,99999999"])
def test_a_line_whose_vcpus_no_machine_has_is_left_out(cores: str) -> None:
    stamp = "2026-11-23T14:16:12.444521"
    lines = [f"{stamp} start dedup [{cores}] 2", f"{stamp} start radix [0,1] 2"]
    assert [event.job for event in parse_events(lines)] == ["radix"]


def test_a_detail_that_is_no_text_is_written_as_far_as_it_is(
    recorder: Recorder, tmp_path: Path
) -> None:
    recorder.event("custom", SCHEDULER, detail="/tmp/\udcff: full")
    assert read(tmp_path)[-1].detail == "/tmp/?: full"


def test_the_detail_of_another_event_follows_it(recorder: Recorder, tmp_path: Path) -> None:
    recorder.event("end", "dedup", detail="exit 137, out of memory")
    _, end, detail = read(tmp_path)
    assert (end.what, end.detail) == ("end", "")
    assert (detail.what, detail.detail) == ("custom", "exit 137, out of memory")
    assert detail.time_s == end.time_s


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path, scenario: Scenario) -> None:
    started_s = time.monotonic() - 100.0
    Recorder(tmp_path, scenario, started_s).event("pause", "vips")
    # A loop that was killed half way through a line.
    with (tmp_path / EVENTS_FILE).open("a") as log:
        log.write("2026-01-01T00:0")
    Recorder(tmp_path, scenario, started_s).close()
    events = read(tmp_path)
    assert [event.what for event in events] == ["start", "pause", "custom", "end"]
    assert [event.time_s for event in events[1:]] == pytest.approx([100.0] * 3, abs=1.0)
    assert len(lines(tmp_path, SAMPLES_FILE)) == 1


def test_samples_have_a_column_for_every_reading(
    recorder: Recorder, tmp_path: Path, scenario: Scenario
) -> None:
    jobs = {name: JobAllocation() for name in scenario.job_names}
    jobs["vips"] = JobAllocation(JobState.RUNNING, (2, 3), Weight.BACKGROUND, 4)
    telemetry = Telemetry(
        time_s=1.5,
        service=ServiceTelemetry(
            3e4, 0.2, 0.01, qps=2e4, cpu_cores=0.25, p95_us=310.0, wait_us=250.5
        ),
        vcpu_busy_s=(0.1, 0.2, 0.3, 0.4),
        jobs={name: JobTelemetry(job.state, 2.0) for name, job in jobs.items()},
        applied=Allocation((0, 1), jobs),
    )
    recorder.sample(telemetry, telemetry.applied)
    with (tmp_path / SAMPLES_FILE).open() as file:
        (row,) = csv.DictReader(file)
    assert None not in row.values() and None not in row
    assert (row["time_s"], row["qps"], row["p95_us"]) == ("1.5000", "20000", "310.0")
    assert row["requests"] == "30000"
    assert (row["service_cores"], row["busy_s_3"]) == ("0;1", "0.4000")
    assert (row["job_vips_state"], row["job_vips_cores"], row["job_vips_weight"]) == (
        "running",
        "2;3",
        "background",
    )
    assert row["job_radix_state"] == "pending"
    (sample,) = read_samples(tmp_path)
    assert (sample.time_s, sample.requests, sample.qps) == (1.5, 3e4, 2e4)
    assert (sample.p95_us, sample.wait_us, sample.service_us) == (310.0, 250.5, None)
    assert (sample.service_cores, sample.busy_s) == ((0, 1), (0.1, 0.2, 0.3, 0.4))
    assert sample.jobs["vips"] == JobSample("running", 2.0, (2, 3), "background", None)
    assert tuple(sample.jobs) == scenario.job_names


def test_a_full_disk_costs_no_line_once_there_is_room(
    recorder: Recorder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    size = (tmp_path / EVENTS_FILE).stat().st_size
    # The kernel refuses what exceeds the limit as it refuses what exceeds the disk: part of
    # the first line is written, then nothing.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        for job in ("vips", "radix", "dedup"):
            recorder.event("pause", job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(capfd.readouterr().err.splitlines()) == 1
    recorder.event("unpause", "vips")
    written = [event.job for event in read(tmp_path)]
    assert written == [SCHEDULER, "vips", "radix", "dedup", "vips"]


def test_a_disk_without_room_never_stops_the_loop(
    tmp_path: Path,
    scenario: Scenario,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = OwnFolder.open

    def full(folder: OwnFolder, name: str, flags: int) -> int:
        return os.open("/dev/full", flags) if name == EVENTS_FILE else usual(folder, name, flags)

    monkeypatch.setattr(OwnFolder, "open", full)
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    for _ in range(3):
        recorder.event("pause", "vips")
    recorder.close()
    assert [event.what for event in recorder.recent] == ["pause"] * 3 + ["end"]
    refused, lost = capfd.readouterr().err.splitlines()
    assert "No space left" in refused
    assert "5 lines could not be written" in lost


def test_a_killed_loop_loses_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from deploy.records.recorder import Recorder\n"
        "from env.scenario import load_scenario\n"
        "r = Recorder(Path(sys.argv[1]), load_scenario('cca-2025'), time.monotonic())\n"
        "for i in range(10**9):\n"
        "    r.event('custom', 'vips', detail=str(i)); print(i, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "100\n":
            os.kill(process.pid, signal.SIGKILL)
            break
    told = [int(line) for line in process.stdout]
    process.wait()
    process.stdout.close()
    written = [int(event.detail) for event in read(tmp_path)[1:]]
    assert written[: max([100, *told]) + 1] == list(range(max([100, *told]) + 1))


def test_the_clock_may_be_set_during_a_run(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    recorder.event("pause", "vips")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    recorder.event("unpause", "vips")
    _, pause, unpause = read(tmp_path)
    assert 0.0 <= unpause.time_s - pause.time_s < 1.0


def test_the_start_is_told_to_the_clock_on_the_wall(tmp_path: Path, scenario: Scenario) -> None:
    Recorder(tmp_path, scenario, time.monotonic() - 50.0)
    assert started_at_s(tmp_path) == pytest.approx(time.time() - 50.0, abs=1.0)


def test_a_listener_is_told_every_event(tmp_path: Path, scenario: Scenario) -> None:
    told: list[Event] = []
    recorder = Recorder(tmp_path, scenario, time.monotonic(), told.append)
    recorder.event("pause", "vips")
    assert told == list(recorder.recent)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, scenario: Scenario) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="taken"):
        Recorder(tmp_path / "taken", scenario, time.monotonic())


def test_a_run_resumed_after_the_clock_was_set_stays_in_order(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_s = time.monotonic()
    Recorder(tmp_path, scenario, started_s).event("pause", "vips")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    Recorder(tmp_path, scenario, started_s).event("unpause", "vips")
    times_s = [event.time_s for event in read(tmp_path)]
    assert times_s == sorted(times_s)
    assert times_s[-1] < 1.0


def test_a_new_run_does_not_go_on_in_the_files_of_an_earlier_one(
    tmp_path: Path, scenario: Scenario
) -> None:
    Recorder(tmp_path, scenario, time.monotonic() - 100.0).close()
    (tmp_path / "load.txt").write_text("of the earlier run")
    os.utime(tmp_path / "load.txt", (0, 0))
    set_aside(tmp_path)
    Recorder(tmp_path, scenario, time.monotonic()).close()
    assert [event.what for event in read(tmp_path)] == ["start", "end"]
    (earlier,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert len(read(earlier)) == 2
    assert (earlier / "load.txt").read_text() == "of the earlier run"


def test_what_is_no_records_stays_where_it_is(tmp_path: Path, scenario: Scenario) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    drawn = {"report.json", "run.png", "events.out.tfevents.1.host.2.0"}
    ours = {path.name for path in tmp_path.iterdir()} | drawn
    for name in (*drawn, "Makefile", "notes.csv"):
        (tmp_path / name).touch()
    set_aside(tmp_path)
    (earlier,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {path.name for path in earlier.iterdir()} == ours
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "notes.csv", earlier.name}


def test_a_load_that_runs_already_belongs_to_the_new_run(
    tmp_path: Path, scenario: Scenario
) -> None:
    Recorder(tmp_path, scenario, time.monotonic()).close()
    (tmp_path / "load.txt").write_text("of now")
    soon_s = time.time() + 1.0
    os.utime(tmp_path / "load.txt", (soon_s, soon_s))
    set_aside(tmp_path)
    assert (tmp_path / "load.txt").exists()
    assert not (tmp_path / EVENTS_FILE).exists()


def test_what_is_said_may_be_lost_and_has_no_effect_on_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    terminal.say("dedup \x1b[2J said \x07")
    assert capfd.readouterr().out == "dedup �[2J said �\n"
    for target in ("/dev/full", None):  # a full disk, and a pipe that nobody reads
        program = "from deploy.records.terminal import say\nfor _ in range(9): say('x')"
        reader, writer = os.pipe()
        os.close(reader)
        out = os.open(target, os.O_WRONLY) if target else os.dup(writer)
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
        os.close(out)
        os.close(writer)


@pytest.mark.parametrize("stalled", [os.pipe, os.openpty])
def test_a_pipe_or_terminal_that_nobody_reads_holds_nobody_up(
    stalled: Callable[[], tuple[int, int]],
) -> None:
    reader, writer = stalled()
    program = "from deploy.records.terminal import say\nfor _ in range(3000): say(60 * 'x')"
    subprocess.run([sys.executable, "-c", program], stdout=writer, check=True, timeout=20.0)
    assert os.read(reader, 61).startswith(60 * b"x")
    os.close(reader)
    os.close(writer)
