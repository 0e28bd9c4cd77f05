"""The course's own client joined to a run: whose clock is where, and what both sides say."""

from __future__ import annotations

import csv
import gzip
import math
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.records import mcperf, run_report
from deploy.records.client_join import join, merged_p95_us, read_client
from deploy.records.clock_shift import MOST_SHIFT_S
from deploy.records.recorder import (
    CLIENT_FILE,
    PROBE_FILE,
    Recorder,
    read_samples,
    set_aside,
    started_at_s,
)
from env.allocation import Allocation, JobAllocation
from env.errors import InputError
from env.scenario import Scenario
from env.simulator.load import dynamic_targets
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry

MEASURED = Path(__file__).parents[4] / "shared/data"
SLO_US = 800.0
PROBE_QPS = 1000.0
JOBS_S = (1.0, 1e4)


class Story:
    """
    A run under a load that jumps, watched for a while, and what its client would print.

    :param targets: of the load's intervals [requests/s]
    :param interval_s: their length
    :param begins_s: when the load begins, since the run's start; the run may begin in its midst
    :param lasts_s: how long the run lasts
    :param serves: the part of its targets that the client gets to the server
    """

    def __init__(
        self,
        targets: list[int],
        interval_s: float,
        begins_s: float,
        lasts_s: float,
        serves: float = 1.0,
        seed: int = 1,
    ):
        self.targets, self.interval_s, self.begins_s = targets, interval_s, begins_s
        self._rng = np.random.default_rng(seed)
        self.times_s = np.cumsum(np.append(0.1, self._rng.uniform(1.0, 1.025, int(lasts_s))))
        edges_s = begins_s + interval_s * np.arange(len(targets) + 1)
        sent = np.append(0.0, np.cumsum(serves * interval_s * np.array(targets)))
        due = np.interp(self.times_s, edges_s, sent) + PROBE_QPS * self.times_s
        self.counts = np.cumsum(self._rng.poisson(np.diff(due, prepend=0.0)))

    def record(self, folder: Path, scenario: Scenario) -> float:
        """Write the run's records; when it started [s of the epoch]."""
        return record(folder, scenario, self.times_s, self.counts)

    def output(
        self, started_s: float, ahead_s: float, drain_s: float = 0.3, cut_s: float = 0.0
    ) -> list[str]:
        """mcperf's lines, by a clock that is ahead; it may be stopped within its last interval."""
        start_s = started_s + self.begins_s + ahead_s
        end_s = start_s + len(self.targets) * self.interval_s + drain_s - cut_s
        gained = [target * self._rng.normal(1.0, 0.002) for target in self.targets]
        return printed(start_s, end_s, gained, self.targets)


def record(
    folder: Path, scenario: Scenario, times_s: Iterable[float], counts: Iterable[float]
) -> float:
    """Write a run's records of memcached's count; when it started [s of the epoch]."""
    recorder = Recorder(folder, scenario, time.monotonic())
    jobs = {name: JobAllocation() for name in scenario.job_names}
    for time_s, count in zip(times_s, counts, strict=True):
        telemetry = Telemetry(
            time_s=float(time_s),
            service=ServiceTelemetry(float(count), 0.2, 0.01, qps=1.0, cpu_cores=0.5),
            vcpu_busy_s=(0.0,) * scenario.machine.vcpus,
            jobs={name: JobTelemetry(job.state, 0.0) for name, job in jobs.items()},
            applied=Allocation((0, 1), jobs),
        )
        recorder.sample(telemetry, telemetry.applied)
    recorder.close()
    return started_at_s(folder)


def printed(start_s: float, end_s: float, gained: list[float], asked: list[int]) -> list[str]:
    """A dynamic run's lines as mcperf prints them; p95 is 400 and 900 µs in turns."""
    return [
        f"Timestamp start: {round(1e3 * start_s)}",
        f"Timestamp end: {round(1e3 * end_s)}",
        "",
        "#type avg std min p5 p10 p50 p67 p75 p80 p85 p90 p95 p99 p999 p9999 QPS target",
        *(
            f"read 250.1 70.2 100 180 190 240 260 270 280 290 300 {400 + i % 2 * 500} 950 990 "
            f"1200 {qps:.1f} {target}"
            for i, (qps, target) in enumerate(zip(gained, asked, strict=True))
        ),
        "",
        f"Total QPS = {np.mean(gained):.1f} (1660000 / 20.0s)",
        "",
    ]


def targets(count: int, seed: int = 77) -> list[int]:
    return [int(target) for target in dynamic_targets(seed, 5000, 180000, count)]


@pytest.fixture
def story() -> Story:
    """Ninety seconds of a load of two minutes, in intervals of 5 s."""
    return Story(targets(24), 5.0, -12.3, 90.0)


@pytest.fixture
def output(tmp_path: Path) -> Callable[[list[str]], Path]:
    def write(lines: list[str]) -> Path:
        path = tmp_path / "mcperf.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


# --- the clock --------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(1, 2**30),
    interval_s=st.sampled_from([1.0, 2.5, 4.0, 10.0]),
    ahead_s=st.floats(-40.0, 40.0),
    begins_s=st.floats(-10.0, 5.0),
    drain_s=st.floats(0.0, 1.5),
)
def test_any_clock_within_a_minute_is_found_to_a_tenth_of_a_second(
    tmp_path_factory: pytest.TempPathFactory,
    scenario: Scenario,
    seed: int,
    interval_s: float,
    ahead_s: float,
    begins_s: float,
    drain_s: float,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    story = Story(targets(12, seed), interval_s, begins_s, 10.0 * interval_s, seed=seed)
    lines = story.output(story.record(folder, scenario), ahead_s, drain_s)
    path = folder / "mcperf.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    joined = join(folder, path, JOBS_S, SLO_US)
    assert joined.shift_s == pytest.approx(-ahead_s, abs=0.1)
    assert joined.margin_s <= 0.1
    for one in joined.intervals:
        if one.counted_qps is not None:
            assert one.counted_qps == pytest.approx(one.said_qps + PROBE_QPS, rel=0.1, abs=500.0)


def test_a_run_that_ends_within_its_last_interval_keeps_the_length_that_was_asked_for(
    tmp_path: Path, scenario: Scenario, output: Callable[[list[str]], Path]
) -> None:
    story = Story(targets(112), 9.0, -3.0, 300.0)  # 1000 s, as public runs have it
    path = output(story.output(story.record(tmp_path, scenario), 5.0, cut_s=8.0))
    joined = join(tmp_path, path, JOBS_S, SLO_US)
    assert joined.shift_s == pytest.approx(-5.0, abs=0.1)
    assert {round(one.end_s - one.start_s, 6) for one in joined.intervals} == {9.0}


def test_rows_with_times_of_their_own_need_no_end(
    tmp_path: Path, scenario: Scenario, output: Callable[[list[str]], Path], story: Story
) -> None:
    start_s = story.record(tmp_path, scenario) + story.begins_s + 3.0
    rows = [
        mcperf.format_row([300.0], qps, qps, start_s + 5.0 * i, start_s + 5.0 * i + 5.0, 0.0)
        for i, qps in enumerate(story.targets)
    ]
    announced = f"Total number of intervals = {len(rows)} (...)"
    whole = join(tmp_path, output([announced, mcperf.HEADER, *rows]), JOBS_S, SLO_US)
    part = [announced, mcperf.HEADER, *rows[:12], rows[12][:50]]
    cut = join(tmp_path, output(part), JOBS_S, SLO_US)
    assert whole.shift_s == pytest.approx(-3.0, abs=0.1)
    assert cut.shift_s == pytest.approx(-3.0, abs=0.1)
    assert not any("cut off" in finding for finding in whole.findings)
    said = [finding for finding in cut.findings if "cut off" in finding]
    assert said == ["mcperf.txt is cut off: it holds 12 of 24 rows, line 15 is no complete row"]


@pytest.mark.skipif(not MEASURED.exists(), reason="public runs are not here")
def test_a_public_run_of_mcperf_is_found_in_what_its_controller_saw(
    tmp_path: Path, scenario: Scenario, output: Callable[[list[str]], Path]
) -> None:
    run = "KockaAdmiralac_qps-pred-quality-mcperf"
    with gzip.open(MEASURED / "runs.csv.gz", "rt") as file:
        began_s = next(
            float(r["mcperf_start_unix"]) for r in csv.DictReader(file) if r["run"] == run
        )
    with gzip.open(MEASURED / "intervals.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == run]
    with gzip.open(MEASURED / "cpu_qps_estimates_kocka_2024.csv.gz", "rt") as file:
        seen = [
            (datetime.fromisoformat(f"{row['time']}+00:00").timestamp(), float(row["qps"]))
            for row in csv.DictReader(file)
        ]
    times_s, rates = np.array(seen).T
    counts = np.cumsum(np.maximum(rates, 0.0) * np.diff(times_s, prepend=times_s[0] - 1.0))
    started_s = record(tmp_path, scenario, times_s - times_s[0], counts)
    start_s = started_s + began_s - times_s[0]
    end_s = start_s + float(rows[-1]["t_end_s"])
    gained = [float(row["achieved_qps"]) for row in rows]
    asked = [round(float(row["target_qps"])) for row in rows]
    joined = join(tmp_path, output(printed(start_s, end_s, gained, asked)), JOBS_S, SLO_US)
    # In public logs the load changes 0.4 to 0.7 s after mcperf's stamps.
    assert 0.4 < joined.shift_s < 0.7
    assert joined.margin_s <= 0.1 and joined.correlation > 0.99
    assert joined.intervals[0].end_s - joined.intervals[0].start_s == pytest.approx(10.0)


# --- what is refused --------------------------------------------------------------------------


def other_load(story: Story, started_s: float) -> list[str]:
    other = Story(targets(24, seed=78), 5.0, story.begins_s, 90.0)
    return other.output(started_s, 0.0)


def steady_load(story: Story, started_s: float) -> list[str]:
    return Story([50000] * 24, 5.0, story.begins_s, 90.0).output(started_s, 0.0)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (lambda story, at_s: story.output(at_s, 7200.0), "s after the run: it is of another run"),
        (lambda story, at_s: story.output(at_s, -7200.0), "s before the run: it is of another run"),
        (other_load, "its load is not the one of this run"),
        (steady_load, "its load is not the one of this run"),
        (lambda story, at_s: story.output(at_s, 0.0)[2:], "no time stamps"),
        (lambda story, at_s: story.output(at_s, 0.0, cut_s=200.0), "ended before it began"),
        (lambda story, at_s: story.output(at_s, 0.0)[:20], "cut off"),
        (lambda story, at_s: [*story.output(at_s, 0.0)[:9], "read 1 2"], "cut off"),
        (lambda story, at_s: 2 * story.output(at_s, 0.0), "holds 2 runs"),
        (lambda story, at_s: story.output(at_s, 0.0)[:4], "no row of mcperf's"),
        (lambda story, at_s: [], "no row of mcperf's"),
        (lambda story, at_s: [*story.output(at_s, 0.0)[:7], "Total QPS = 1"], "3 of mcperf's rows"),
    ],
)
def test_what_cannot_be_joined_is_one_line_and_costs_nothing(
    tmp_path: Path,
    scenario: Scenario,
    output: Callable[[list[str]], Path],
    story: Story,
    lines: Callable[[Story, float], list[str]],
    says: str,
) -> None:
    started_s = story.record(tmp_path, scenario)
    join(tmp_path, output(story.output(started_s, 0.0)), JOBS_S, SLO_US)
    before = (tmp_path / CLIENT_FILE).read_bytes()
    path = output(lines(story, started_s))
    with pytest.raises(InputError) as refused:
        join(tmp_path, path, JOBS_S, SLO_US)
    assert says in str(refused.value) and str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (tmp_path / CLIENT_FILE).read_bytes() == before


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(1, 2**30))
def test_the_file_of_another_run_is_never_taken(
    tmp_path_factory: pytest.TempPathFactory, scenario: Scenario, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    story = Story(targets(30, 1 + seed), 2.0, -5.0, 40.0, seed=seed)
    other = Story(targets(30, 2**31 - 2 - seed), 2.0, -5.0, 40.0)
    path = folder / "mcperf.txt"
    path.write_text("\n".join(other.output(story.record(folder, scenario), 0.0)), encoding="utf-8")
    with pytest.raises(InputError, match="not the one of this run"):
        join(folder, path, JOBS_S, SLO_US)


@pytest.mark.parametrize("content", ["", "[]", '{"shift_s": 1}', '{"shift_s": NaN}'])
def test_figures_of_others_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    assert read_client(tmp_path) is None
    (tmp_path / CLIENT_FILE).write_text(content)
    with pytest.raises(InputError) as refused:
        read_client(tmp_path)
    assert CLIENT_FILE in str(refused.value) and "\n" not in str(refused.value)


# --- what both sides say ----------------------------------------------------------------------


def test_a_client_that_lagged_is_named(
    tmp_path: Path, scenario: Scenario, output: Callable[[list[str]], Path]
) -> None:
    story = Story(targets(24), 5.0, 0.0, 90.0, serves=0.8)
    path = output(story.output(story.record(tmp_path, scenario), 0.0))
    findings = join(tmp_path, path, JOBS_S, SLO_US).findings
    (late,) = (finding for finding in findings if "lagged" in finding)
    assert "down to 81 %" in late or "down to 80 %" in late


def test_windows_are_merged_as_their_requests_would_be() -> None:
    rng = np.random.default_rng(3)
    parts = [rng.lognormal(5.0, spread, 500) for spread in (0.2, 0.5, 0.3, 0.9)]
    rows = [
        mcperf.format_row(part.tolist(), 1e3, math.nan, 0.5 * i, 0.5 * i + 0.5, 0.0)
        for i, part in enumerate(parts)
    ]
    windows = mcperf.read_rows([mcperf.HEADER, *rows])
    truth = mcperf.percentile(np.sort(np.concatenate(parts)), 95.0)
    assert merged_p95_us(windows, 0.0, 2.0) == pytest.approx(truth, rel=0.05)
    alone = mcperf.percentile(np.sort(parts[3]), 95.0)
    assert merged_p95_us(windows, 1.5, 2.0) == pytest.approx(alone, rel=0.01)
    assert merged_p95_us(windows, 1.6, 4.0) is None  # most of it was not watched
    assert merged_p95_us([], 0.0, 2.0) is None


def test_the_probes_windows_are_set_beside_mcperfs_intervals(
    tmp_path: Path, scenario: Scenario, output: Callable[[list[str]], Path], story: Story
) -> None:
    started_s = story.record(tmp_path, scenario)
    path = output(story.output(started_s, 0.0))
    alone = join(tmp_path, path, JOBS_S, SLO_US)
    assert all(one.probe_p95_us is None for one in alone.intervals)
    assert any("did not watch" in finding for finding in alone.findings)
    # The probe finds 850 µs from 20 s on, where mcperf prints 400 and 900 in turns.
    rows = [
        mcperf.format_row(
            [300.0 if 0.5 * i < 20.0 else 850.0] * 100, 1e3, math.nan, at_s, at_s + 0.5, 0.0
        )
        for i in range(180)
        for at_s in (started_s + 0.5 * i,)
    ]
    (tmp_path / PROBE_FILE).write_text("\n".join([mcperf.HEADER, *rows]))
    joined = join(tmp_path, path, (0.0, 60.0), SLO_US)
    for one in joined.intervals:
        if one.probe_p95_us is not None and not one.start_s < 20.0 < one.end_s:
            assert one.probe_p95_us == pytest.approx(300.0 if one.end_s < 20.0 else 850.0)
    assert joined.findings[1] == "by mcperf 6 of 13 intervals with jobs have p95 above 800 µs"
    assert joined.findings[2].startswith("by the probe 9 of 13; mcperf's p95 is 1.06 times")
    assert joined.findings[3].startswith("they disagree about 7 of them (from ")
    assert read_client(tmp_path) == joined


# --- the command ------------------------------------------------------------------------------


def test_the_command_says_both_and_the_page_keeps_it(
    tmp_path: Path,
    scenario: Scenario,
    output: Callable[[list[str]], Path],
    story: Story,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_report, "_draw", lambda folder: False)
    folder = tmp_path / "report"
    started_s = story.record(folder, scenario)
    done = run_report.Outcome(
        "static",
        90.0,
        {"vips": run_report.JobOutcome(0, 1.0, 1.0, 1.0, 80.0, 0.0, 0)},
        *(5, 0, run_report.LoopCost(25.0, 3, 1.5, 55.0), True),
    )
    run_report.illustrate(folder, scenario, run_report.write(folder, scenario, done, []))
    page = folder / "report.html"
    assert "client's own figures" not in page.read_text()
    path = output(story.output(started_s, 2.0))
    run_report.main([str(folder), "--mcperf", str(path)])
    said = capsys.readouterr().out
    assert "moved 2.00 s before its stamps" in said and "lie in this run" in said
    run_report.main([str(folder)])  # what was joined once stays
    assert "moved 2.00 s before its stamps" in page.read_text()
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    late_s = 90.0 + 2.0 * MOST_SHIFT_S
    for wrong in (story.output(started_s, 2.0)[:9], story.output(started_s, late_s)):
        with pytest.raises(SystemExit) as left:
            run_report.main([str(folder), "--mcperf", str(output(wrong))])
        assert left.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == before
    assert len(read_samples(folder)) == len(story.times_s)
    set_aside(folder)
    assert [one.name for one in folder.iterdir() if not one.is_dir()] == []
