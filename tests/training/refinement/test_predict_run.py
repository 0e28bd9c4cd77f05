"""A recorded run of this project's own, played again: `run` was made on a VM with two vCPUs."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.registry import CPUDispatcher

import agents
from deploy.records.predicted import (
    PolicySource,
    Prediction,
    note_policy,
    predict,
    read_prediction,
)
from env.allocation import Allocation, JobState
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.simulator.profile import load_profile, save_profile
from tests.training.refinement.recorded import RUN, in_the_present_form
from training.evaluation.episodes import EpisodeStart, run_episode
from training.evaluation.timeline import Interval, Recording, Span
from training.refinement import predict_run
from training.refinement.kernels import compile_kernels
from training.refinement.live_replay import LiveReplay, room_of
from training.refinement.live_run import HOST_SPEEDS, LiveRun, read_live_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return in_the_present_form(tmp_path)


@pytest.fixture(scope="module")
def run() -> LiveRun:
    return read_live_run(RUN)


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "report.json"
    report = json.loads(path.read_text())
    edit(report)
    path.write_text(json.dumps(report))


def log(folder: Path, line: str, before: str) -> None:
    """Put a line into the log, at the time of the first that has some words."""
    lines = (folder / "events.log").read_text().splitlines()
    at = next(i for i, one in enumerate(lines) if before in one)
    lines.insert(at, f"{lines[at].split(' ')[0]} {line}")
    (folder / "events.log").write_text("\n".join(lines) + "\n")


def predicted(folder: Path) -> Prediction:
    predict_run.main([str(folder)])
    found = read_prediction(folder)
    assert found is not None
    return found


def test_no_prediction_waits_for_a_kernel_once_they_are_compiled(run: LiveRun) -> None:
    compile_kernels(load_scenario("local"))
    kernels = {one for one in gc.get_objects() if type(one) is CPUDispatcher}

    def compiled_for() -> dict[str, int]:
        return {repr(one): len(one.overloads) for one in kernels}

    before = compiled_for()
    # Of some of the jobs, as in a rehearsal, and of all.
    some = run.scenario.with_jobs(run.scenario.jobs[:2])
    profile = load_profile(run.scenario.profile)
    for scenario in (some, run.scenario):
        machine = SimulatedMachine(EpisodeFactory(scenario, profile, room=room_of(scenario)))
        assert run_episode(machine, agents.make("static"), EpisodeStart(1, 1)).completed
    predict_run.prediction_of(run, profile, PolicySource(source="static", digest=""))
    assert compiled_for() == before


def test_a_run_reads_as_it_was_recorded(run: LiveRun) -> None:
    assert run.window_s == pytest.approx((6.0, 48.24), abs=0.05)
    jobs = {job.name: job for job in run.trace.jobs}
    assert (jobs["cpu"].threads, jobs["tree"].threads) == (2, 1)
    paused_s = sum(after - before for before, after in jobs["cpu"].pauses)
    assert paused_s == pytest.approx(run.report["jobs"]["cpu"]["paused_s"], abs=0.05)
    assert jobs["matrix"].moves[0][1] == 0b11 and jobs["matrix"].moves[1][1] == 0b10
    first = run.placing[run.placing["job"] == 0][0]
    assert first["time_s"] < jobs["cpu"].start_s and first["value"] == 0.0  # in the background
    assert len(run.trace.qps) == 22 == len(run.report["p95_us"])


def test_the_replay_is_the_kernels_own_and_follows_the_decisions(run: LiveRun) -> None:
    profile = load_profile("local")
    replay = LiveReplay(run)
    played = replay.play(profile)
    assert np.isfinite(played.p95_us).all() and (played.p95_us > 0.0).all()
    # A job's CPU time is bounded by the time it was not paused, on two vCPUs.
    ran_s = np.array([job.run_s for job in run.trace.jobs])
    assert (played.cpu_s > 0.0).all() and (played.cpu_s <= 2.0 * ran_s).all()
    fast = dict(profile.host)
    fast["job_speed"] = fast["job_speed"].model_copy(update={"value": 2.0})
    again = replay.play(profile.model_copy(update={"host": fast}))
    assert (again.run_s < played.run_s).all()


def test_both_predictions_stand_beside_what_was_measured(folder: Path) -> None:
    note_policy(folder, "checkpoints/local.zip")
    found = predicted(folder)
    assert found.profile == "local" and not found.remarks
    assert found.measured is not None and found.measured.makespan_s == pytest.approx(42.23, abs=0.1)
    assert found.measured.changes_per_min == pytest.approx(85 / 42.24 * 60, rel=0.01)
    for one in (found.replayed, found.free):
        assert one is not None
        assert one.makespan_s and 20.0 < one.makespan_s < 100.0
        assert set(one.jobs) == set(found.measured.jobs)
        assert all(value and value > 1.0 for value in one.jobs.values())
        assert one.p95_median_us and one.p95_high_us and one.p95_median_us <= one.p95_high_us


def test_the_cost_of_sharing_is_told_by_the_intervals_in_which_jobs_share(run: LiveRun) -> None:
    """A job is on memcached's vCPU for most of the second interval, for less of the third."""
    began_s, _ = run.window_s

    def span(start_s: float, end_s: float, state: JobState, *cores: int) -> Span:
        return Span(began_s + start_s, began_s + end_s, state, cores)

    spans = [
        span(0.0, 2.3, JobState.RUNNING, 1),
        span(2.3, 4.5, JobState.RUNNING, 0, 1),
        span(4.5, 8.0, JobState.PAUSED, 0),
    ]
    intervals = [
        Interval(began_s + 2.0 * n, began_s + 2.0 * n + 2.0, 1000.0, p95_us)
        for n, p95_us in enumerate((100.0, 400.0, 200.0, 300.0))
    ]
    recording = Recording(intervals, [(0.0, (0,))], {"cpu": spans}, began_s + 8.0)
    measured = predict_run.measured_figures(replace(run, recording=recording))
    assert (measured.shared_p95_us, measured.apart_p95_us) == (400.0, 200.0)
    elsewhere = replace(recording, service=[(0.0, (0,)), (began_s + 2.0, (2,))])
    measured = predict_run.measured_figures(replace(run, recording=elsewhere))
    assert (measured.shared_p95_us, measured.apart_p95_us) == (None, 250.0)


def test_a_policy_that_starts_nothing_violates_in_no_known_part(
    run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = agents.make("static")
    monkeypatch.setattr(waiting, "decide", lambda seen: Allocation(seen.applied.service_cores, {}))
    monkeypatch.setattr(predict_run, "policy_of", lambda source: waiting)
    found = predict_run.free_figures(run, load_profile("local"), None)
    assert found.violation_ratio is None and found.intervals == 0
    assert found.makespan_s is None and set(found.jobs.values()) == {None}


def test_a_policy_that_is_gone_leaves_the_other_half(folder: Path) -> None:
    """By a process of its own, as a report has it predicted."""
    (folder / "mine.yaml").write_text("rule: static")
    note_policy(folder, str(folder / "mine.yaml"))
    (folder / "mine.yaml").unlink()
    found = predict(folder)
    assert found.free is None and found.replayed is not None
    (remark,) = found.remarks
    assert "mine.yaml is gone, or another than it was" in remark


def test_a_run_that_was_stopped_and_one_that_was_resumed_say_so(folder: Path) -> None:
    def stopped(report: dict[str, Any]) -> None:
        report["makespan_s"] = None
        report["jobs"]["zlib"] |= {"end_s": None, "exit_code": None}

    change(folder, stopped)
    log(folder, "custom scheduler resumed", "end cpu")
    found = predicted(folder)
    assert found.measured is not None and found.measured.jobs["zlib"] is None
    assert found.replayed is not None and found.replayed.jobs["zlib"]
    ended, resumed, unknown = found.remarks
    assert "ended before its jobs" in ended and "was resumed" in resumed
    assert "not recorded who decided" in unknown


def test_attempts_begin_anew(folder: Path) -> None:
    before = predicted(folder).replayed
    log(folder, "start tree [0,1] 1", "end tree")
    log(folder, "custom tree attempt+1+failed%3A+exit+code+1", "start tree [0,1] 1")
    change(folder, lambda report: report["jobs"]["tree"].update(retries=1))
    after = predicted(folder).replayed
    assert before is not None and after is not None
    assert read_live_run(folder).placing["kind"].max() == 8
    assert before.jobs["cpu"] == after.jobs["cpu"]


def test_without_the_loads_output_the_load_is_memcacheds_count(folder: Path) -> None:
    header = (folder / "intervals.csv").read_text().splitlines()[0]
    (folder / "intervals.csv").write_text(header + "\n")
    change(folder, lambda report: report.update(violation_ratio=None, p95_us=[], spoiled=[]))
    found = predicted(folder)
    assert found.measured is not None and found.measured.p95_median_us is None
    assert found.replayed is not None and found.replayed.p95_median_us
    assert any("memcached's own count" in remark for remark in found.remarks)


@pytest.mark.parametrize("file", ["scenario.json", "events.log", "samples.csv", "report.json"])
def test_a_run_without_its_records_is_one_line(
    folder: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / file).unlink()
    with pytest.raises(SystemExit) as stop:
        predict_run.main([str(folder)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and str(folder) in said


def change_column(folder: Path, name: str, edit: Callable[[float, float], float]) -> None:
    """Edit a column of the samples, given each one's time [s] and value."""
    lines = (folder / "samples.csv").read_text().splitlines()
    column = lines[0].split(",").index(name)
    rows = [line.split(",") for line in lines[1:]]
    for row in rows:
        row[column] = f"{edit(float(row[0]), float(row[column])):.4f}"
    (folder / "samples.csv").write_text("\n".join([lines[0], *map(",".join, rows)]) + "\n")


def test_what_others_used_is_told_from_memcached_and_the_jobs(folder: Path) -> None:
    profile, found = load_profile("local"), []
    for _ in range(2):  # half a vCPU more each time
        change_column(folder, "busy_s_1", lambda time_s, busy_s: busy_s + 0.5 * time_s)
        found.append(predict_run.foreign_vcpus(read_live_run(folder), profile))
    assert 0.0 < found[0] <= 0.5 and found[1] == pytest.approx(found[0] + 0.5, abs=1e-3)
    assert any("other processes used" in remark for remark in predicted(folder).remarks)
    for vcpu in range(2):
        change_column(folder, f"busy_s_{vcpu}", lambda time_s, busy_s: 0.0)
    assert predict_run.foreign_vcpus(read_live_run(folder), profile) == 0.0


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("stolen_s", lambda time_s, _: 1e308 if time_s > 10.0 else -1e308),
        ("stolen_s", lambda time_s, _: -1e308 if time_s > 10.0 else 1e308),
        ("time_s", lambda time_s, _: 1e308 if time_s > 40.0 else time_s),
    ],
)
def test_samples_that_no_run_has_written_are_no_endless_steals(
    folder: Path, run: LiveRun, column: str, value: Callable[[float, float], float]
) -> None:
    change_column(folder, "stolen_s", lambda time_s, _: time_s)
    change_column(folder, column, value)
    assert len(read_live_run(folder).trace.jobs) == len(run.trace.jobs)


def test_what_was_stolen_is_stolen_in_both_predictions(folder: Path, run: LiveRun) -> None:
    note_policy(folder, "checkpoints/local.zip")  # it starts jobs
    before = predicted(folder)
    # The hypervisor takes a fifth of both vCPUs.
    change_column(folder, "stolen_s", lambda time_s, _: 2.0 * 0.2 * time_s)
    after = predicted(folder)
    assert any("hypervisor took 20% of the vCPUs' time" in remark for remark in after.remarks)
    for calm, stolen in ((before.replayed, after.replayed), (before.free, after.free)):
        assert calm is not None and stolen is not None
        assert calm.p95_median_us and stolen.p95_median_us
        assert stolen.p95_median_us > calm.p95_median_us
    profile = load_profile("local")
    ran_s, slower_s = (
        LiveReplay(one).play(profile, closed=False).run_s for one in (run, read_live_run(folder))
    )
    # A fifth less time, and what memcached then catches up with.
    assert (slower_s > ran_s).all() and 1.1 < slower_s.sum() / ran_s.sum() < 2.0


def add_yardstick(folder: Path, profile: Path, measured_us: list[float], then_us: float) -> None:
    """Have samples say in turn what a piece of work took, and the profile what it took before."""
    path = folder / "samples.csv"
    heading, *rows = path.read_text().splitlines()
    in_turn = itertools.cycle(measured_us)
    told = [f"{heading},yardstick_us", *(f"{row},{next(in_turn):.1f}" for row in rows)]
    path.write_text("\n".join(told) + "\n")
    save_profile(
        load_profile("local").model_copy(update={"yardstick_us": then_us, "hash": ""}), profile
    )
    path = folder / "scenario.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"profile": str(profile)}))


def test_a_host_that_was_slower_is_slower_in_both_predictions(
    folder: Path, tmp_path: Path, run: LiveRun
) -> None:
    note_policy(folder, "stats-poll-packed")  # a checkpoint is for the profile that it knows
    before = predicted(folder)
    add_yardstick(folder, tmp_path / "profile.yaml", [125.0], 100.0)
    after = predicted(folder)
    assert any("the host was 0.80 times as fast" in remark for remark in after.remarks)
    for calm, slow in ((before.replayed, after.replayed), (before.free, after.free)):
        assert calm is not None and slow is not None
        assert calm.makespan_s and slow.makespan_s and slow.makespan_s > 1.05 * calm.makespan_s
    change_column(folder, "busy_s_1", lambda time_s, busy_s: busy_s + 0.5 * time_s)
    slower, profile = read_live_run(folder), load_profile(tmp_path / "profile.yaml")
    assert slower.host_speed(profile) == pytest.approx(0.8)
    plain = load_profile("local").model_copy(update={"yardstick_us": None})
    told, meant = LiveReplay(slower).play(profile), LiveReplay(run).play(plain.at_speed(0.8))
    assert told.makespan_s == pytest.approx(meant.makespan_s, rel=1e-6)
    assert slower.host_speed(profile.at_speed(0.8)) == pytest.approx(1.0)  # never twice
    # Its load generator took more of it, so others took less.
    foreign = [predict_run.foreign_vcpus(slower, one) for one in (profile, plain)]
    assert 0.0 < foreign[0] < foreign[1]


def test_a_hosts_speed_is_the_mean_of_its_speeds(folder: Path, tmp_path: Path) -> None:
    # Of two states that it is in as often, a median would tell one.
    add_yardstick(folder, tmp_path / "profile.yaml", [100.0, 200.0], 100.0)
    speed = read_live_run(folder).host_speed(load_profile(tmp_path / "profile.yaml"))
    assert speed == pytest.approx(0.75, abs=0.01)


def test_where_nobody_has_measured_it_a_host_is_as_fast_as_before(
    folder: Path, tmp_path: Path, run: LiveRun
) -> None:
    told = load_profile("local").model_copy(update={"yardstick_us": 100.0})
    assert run.host_speed(told) == 1.0
    add_yardstick(folder, tmp_path / "profile.yaml", [1e5], 100.0)
    other = read_live_run(folder)
    assert other.host_speed(told.model_copy(update={"yardstick_us": None})) == 1.0
    assert other.host_speed(told) == pytest.approx(HOST_SPEEDS[0])  # no host is 1000 times slower


@pytest.mark.parametrize("us", ["5e-324", "-5e-324", "-1.0", "1e308", "0.0"])
def test_a_reading_that_no_loop_can_have_decides_nothing(
    folder: Path, tmp_path: Path, us: str
) -> None:
    add_yardstick(folder, tmp_path / "profile.yaml", [100.0], 100.0)
    lines = (folder / "samples.csv").read_text().splitlines()
    lines[20] = f"{lines[20].rpartition(',')[0]},{us}"
    (folder / "samples.csv").write_text("\n".join(lines) + "\n")
    speed = read_live_run(folder).host_speed(load_profile(tmp_path / "profile.yaml"))
    assert speed == pytest.approx(1.0, abs=0.25)
