from __future__ import annotations

import io
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import demo
from deploy.engines import memcached
from deploy.records.mcperf import read_rows
from deploy.records.predicted import Figures, Prediction, write_prediction
from env.errors import InputError
from env.scenario import load_scenario
from training.refinement import refining


def report(policy: str, **changes: Any) -> dict[str, Any]:
    job = {"exit_code": 0, "start_s": 1.0, "end_s": 9.5, "paused_s": 0.0, "retries": 0}
    names = load_scenario("local").job_names
    return {
        "policy": policy,
        "makespan_s": 91.25,
        "jobs": {name: dict(job) for name in names},
        "violation_ratio": 0.125,
        "p95_us": [100.0, 200.0, 300.0, 900.0],
        "spoiled": [False, True, False, True],
        "actuations": 17,
        "guard": {"steps": 3, "share_of_time": 0.025},
        "loop": {"period_ms": 25.0, "overruns": 1, "cpu_pct": 1.5, "rss_mib": 50.0},
        **changes,
    }


def printed(*reports: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(demo.side_by_side(list(reports), load_scenario("local")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--hepl", 2)])
def test_an_option_runs_no_demonstration(
    option: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main([option])
    assert end.value.code == code
    said = capsys.readouterr()
    assert "deploy.demo" in said.out if option == "--help" else said.err.count("\n") == 1


def test_both_runs_stand_side_by_side() -> None:
    slow = report("threshold-groups", makespan_s=120.0, violation_ratio=None, p95_us=[])
    slow["jobs"]["zlib"] |= {"end_s": None, "exit_code": None}
    slow["jobs"]["tree"] |= {"exit_code": 137}
    text = printed(report("local.zip"), slow)
    rows = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert "MEASURED" in text
    assert "local.zip" in text and "threshold-groups" in text
    assert "91.2" in rows["makespan, s"] and "120.0" in rows["makespan, s"]
    slo = f"intervals above {load_scenario('local').service.slo_us:g} µs"
    assert "12.5 % of 4" in rows[slo] and "not measured" in rows[slo]
    assert "250" in rows["median p95, µs"]
    assert "not done" in rows["zlib, s"] and "1.0 to 9.5" in rows["zlib, s"]
    assert "(exit 137)" in rows["tree, s"]


def test_each_run_stands_beside_what_was_predicted_of_it(tmp_path: Path) -> None:
    scenario = load_scenario("local")
    assert demo.foretold(tmp_path, scenario) == []
    measured = Figures(
        makespan_s=20.5,
        violation_ratio=0.0,
        intervals=10.0,
        p95_median_us=300.0,
        p95_high_us=400.0,
        shared_p95_us=None,
        apart_p95_us=300.0,
        changes_per_min=6.0,
        guard_steps=0.0,
        jobs={"cpu": 12.5},
    )
    free = measured.model_copy(update={"makespan_s": 19.0})
    found = Prediction(
        profile="here", measured=measured, replayed=None, free=free, remarks=["nothing was stolen"]
    )
    write_prediction(tmp_path, found)
    first, heading, makespan, *_, last = demo.foretold(tmp_path, scenario)
    assert "profile here" in first and "measured" in heading and last == "nothing was stolen"
    assert makespan.split() == ["makespan,", "s", "20.5", "-", "19.0"]


@pytest.mark.parametrize("program", ["true", "false"])
def test_the_first_run_corrects_the_profile(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def helper_command(*words: str) -> list[str]:
        asked.append(words)
        return [program]

    monkeypatch.setattr(demo, "helper_command", helper_command)
    console = Console(file=io.StringIO(), width=120)
    problem = str(tmp_path / "scenario.yaml")
    demo.refine(demo.Budget(console), problem, tmp_path / "general")
    ((module, *words),) = asked
    given = refining.parser().parse_args(words)
    assert module == "training.refine" and given.report == [tmp_path / "general"]
    assert given.profile == str(tmp_path / "profile.yaml")
    assert given.out == tmp_path / "refined.yaml"
    assert given.checkpoint is None
    assert isinstance(console.file, io.StringIO)
    assert ("Nothing was corrected" in console.file.getvalue()) == (program == "false")


def test_a_step_says_its_budget_and_what_it_took() -> None:
    console = Console(file=io.StringIO(), width=120)
    with demo.Budget(console).step("starting Docker", 15.0):
        pass
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split("\n")[:2] == [
        "starting Docker (up to 15 s) ...",
        "    took 0 s",
    ]


def test_what_cannot_be_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"memcached, docker\.io, stress-ng, busybox-static"):
        demo.install_missing(demo.Budget(Console(file=io.StringIO())))


def test_the_budgets_keep_the_promise() -> None:
    # 8 minutes after the installation, and 3 for the first run to correct the model.
    assert demo.MEASURE_S + demo.PREPARE_S + sum(demo.RUN_S) <= 8 * 60
    assert demo.MEASURE_S <= 180.0 and demo.REFINE_S <= 180.0


def test_a_load_that_cannot_start_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nobody = memcached.Memcached("127.0.0.1", port, subprocess.Popen(["true"]))
    nobody.process.wait()
    with (
        pytest.raises(InputError, match="the load could not start"),
        demo.loaded(nobody, load_scenario("local"), tmp_path / "load.txt"),
    ):
        pass


def test_the_load_lasts_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    scenario = load_scenario("local").with_changes(load={"interval_s": 0.5, "qps_max": 9000})
    with memcached.running(threads=1) as server:
        with demo.loaded(server, scenario, tmp_path / "load.txt"):
            text = (tmp_path / "load.txt").read_text()
            assert text.startswith("Total number of intervals = 600 (")
            assert read_rows(text.splitlines()) == []
        assert memcached.answering_pid(server.host, server.port) == server.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_nothing_of_roots_is_left_in_somebodys_checkout(tmp_path: Path) -> None:
    checkout, outside = tmp_path / "checkout", tmp_path / "outside"
    (checkout / "demo" / "perfiso").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("")
    (checkout / "demo" / "report.json").write_text("")
    (checkout / "link").symlink_to(outside)
    os.link(outside / "secret", checkout / "linked")
    os.chown(checkout, 1234, 1234)
    (checkout / "other").write_text("")
    os.chown(checkout / "other", 4321, 4321)
    demo.hand_over(checkout)
    owners = {path.name: path.lstat().st_uid for path in checkout.rglob("*")}
    assert owners == {
        "demo": 1234, "perfiso": 1234, "report.json": 1234, "link": 1234, "other": 4321,
        "linked": 0,
    }  # fmt: skip
    assert {path.stat().st_uid for path in (outside, outside / "secret")} == {0}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_checkout_of_roots_stays_roots(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("")
    os.chown(tmp_path / "theirs", 1234, 1234)
    demo.hand_over(tmp_path)
    assert (tmp_path / "theirs").stat().st_uid == 1234
