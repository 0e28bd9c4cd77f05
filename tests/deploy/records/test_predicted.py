"""What a report says of predictions, whether there are any or not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deploy.records import predicted, run_report
from deploy.records.predicted import (
    Figures,
    PolicySource,
    Prediction,
    note_policy,
    read_policy,
)
from env.errors import InputError
from env.scenario import Scenario

KNOWN = Figures(
    makespan_s=20.0,
    violation_ratio=0.25,
    intervals=9.0,
    p95_median_us=300.0,
    p95_high_us=None,
    shared_p95_us=400.0,
    apart_p95_us=250.0,
    changes_per_min=6.0,
    guard_steps=2.0,
    jobs={"vips": 12.5, "radix": None},
)


def a_report(folder: Path, scenario: Scenario) -> None:
    """The records that the page and the figures are made of."""
    (folder / "events.log").write_text("2026-11-23T04:00:00.000000 start scheduler\n")
    cost = run_report.LoopCost(25.0, 0, 1.5, 55.0)
    jobs = {"vips": run_report.JobOutcome(0, 0.0, 0.0, 0.0, 10.0, 0.0, 0)}
    outcome = run_report.Outcome("random", 10.0, jobs, 4, 2, cost, True)
    run_report.write(folder, scenario, outcome, [])


def test_who_decided_is_known_until_the_file_changes(tmp_path: Path) -> None:
    rule = tmp_path / "mine.yaml"
    rule.write_text("rule: static")
    note_policy(tmp_path, str(rule))
    source = read_policy(tmp_path)
    assert source.source == str(rule) and source.unchanged
    rule.write_text("rule: random")
    assert not source.unchanged
    rule.unlink()
    assert not source.unchanged


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse"])
def test_what_can_be_no_policys_file_is_not_read_to_its_end(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "policy.zip"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    assert not PolicySource(source=str(path), digest="0" * 64).unchanged


def test_a_shipped_rule_goes_by_its_name(tmp_path: Path) -> None:
    note_policy(tmp_path, "perfiso")
    assert read_policy(tmp_path).source == "perfiso"
    assert read_policy(tmp_path).unchanged


def test_what_was_predicted_goes_where_it_was_asked_for(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_report(tmp_path, scenario)
    there = Prediction(profile="mine", measured=KNOWN, replayed=KNOWN, free=KNOWN, remarks=["so"])
    predicted.write_prediction(tmp_path, there)
    monkeypatch.setattr(run_report, "predict", predicted.read_prediction)
    monkeypatch.setattr(run_report, "_draw", lambda folder: False)
    run_report.illustrate(tmp_path, scenario, run_report.read_report(tmp_path))
    assert json.loads((tmp_path / "report.json").read_text())["predicted"] == {
        "makespan_s": 20.0,
        "violation_ratio": 0.25,
        "changes_per_min": 6.0,
        "jobs": {"vips": 12.5, "radix": None},
    }
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    table = page.rpartition("<h2>")[2]
    assert table.startswith("Predicted against measured")
    assert "By profile mine" in table and table.count("25.0") == 3 and "<p>so</p>" in table


def test_a_table_for_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    found = Prediction(profile="mine", measured=KNOWN, replayed=None, free=KNOWN, remarks=["so"])
    title, heading, makespan, *_, radix, remark = predicted.lines_of(found, 800.0)
    assert title == "predicted by profile mine against measured:"
    assert heading.split() == ["measured", "same", "decisions", "policy", "free"]
    assert makespan.split() == ["makespan,", "s", "20.0", "-", "20.0"]
    assert radix.split() == ["radix,", "s", "-", "-", "-"]
    assert remark == "so"


def test_a_report_does_without_where_nothing_can_be_predicted(
    tmp_path: Path,
    scenario: Scenario,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    a_report(tmp_path, scenario)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run_report.illustrate(tmp_path, scenario, run_report.read_report(tmp_path))
    assert run_report.read_report(tmp_path)["predicted"] is None
    said = "nothing is predicted: what training needs is not installed"
    assert capfd.readouterr().out.splitlines() == [said]
    assert said in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_simulator_that_fails_or_hangs_is_one_line(
    tmp_path: Path, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_report(tmp_path, scenario)
    for program, why in (
        ("import sys; sys.exit('coretide: the reason')", "the reason"),
        ("import time; time.sleep(60)", "took more than 0.2 s"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with exit code -9"),
        ("", "/nowhere: No such file or directory"),
    ):
        monkeypatch.setattr(predicted, "PREDICT_LIMIT_S", 0.2 if "sleep" in program else 20.0)
        command = ["python3", "-c", program] if program else ["/nowhere"]
        monkeypatch.setattr(predicted, "helper_command", lambda *words, c=command: c)
        found = predicted.predict(tmp_path)
        assert found.free is None and found.replayed is None
        (remark,) = found.remarks
        assert remark.startswith("nothing is predicted: ") and remark.endswith(why)
        assert predicted.read_prediction(tmp_path) == found


@pytest.mark.parametrize("content", ["{", "[]", '{"profile": 1}', '{"remarks": []}'])
def test_a_prediction_of_others_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "prediction.json").write_text(content)
    with pytest.raises(InputError, match=r"prediction\.json") as refused:
        predicted.read_prediction(tmp_path)
    assert len(str(refused.value).splitlines()) == 1
