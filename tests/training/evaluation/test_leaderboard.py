import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from training.evaluation import published_controllers, ranking

ROOT = Path(__file__).resolve().parents[3]


def board(tmp_path, *line):
    page, figures = tmp_path / "board.md", tmp_path / "board.json"
    ranking.main(["--out", str(page), "--json", str(figures), "--no-bound", *line])
    return page.read_text(), json.loads(figures.read_text())


def test_a_small_leaderboard(tmp_path):
    line = "--policy static --policy shared-background --episodes 2 --interval 10 --interval 5"
    page, content = board(tmp_path, *line.split(), "--scenario", "cca-2025", "--workers", "1")
    assert [table["interval_s"] for table in content["boards"]] == [10.0, 5.0]
    for table in content["boards"]:
        means = [entry["makespan_s"]["mean"] for entry in table["policies"]]
        assert means == sorted(means)
        assert {entry["name"] for entry in table["policies"]} == {"static", "shared-background"}
        assert table["profile"]["hash"][:16] in page
    assert "simulated" in page
    assert content["command"] in page
    assert str(content["trace_seeds"][0]) in page
    assert (tmp_path / "board.png").read_bytes().startswith(b"\x89PNG")


def test_a_leaderboard_of_drawn_scenarios(tmp_path: Path) -> None:
    page, figures = tmp_path / "board.md", tmp_path / "board.json"
    line = "--family 2 --policy first-come --policy shared-background --workers 1"
    ranking.main(["--out", str(page), "--json", str(figures), *line.split()])
    content, written = json.loads(figures.read_text()), page.read_text()
    assert content["family"] == 2
    assert {entry["name"] for entry in content["policies"]} == {"first-come", "shared-background"}
    rows = [row for row in written.splitlines() if row.startswith("| ")]
    for name in ("first-come", "shared-background"):
        assert any(name in row for row in rows)
    assert "simulated" in written.lower() and "--family 2" in written


def test_workers_change_nothing(tmp_path):
    line = "--policy static --policy sequential --episodes 2 --interval 10 --scenario cca-2025"
    _, one = board(tmp_path, *line.split(), "--workers", "1")
    _, two = board(tmp_path, *line.split(), "--workers", "2")
    assert one["boards"] == two["boards"]


def test_everyone_takes_part_but_what_was_run_by_mistake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the shipped checkpoints are found from anywhere
    names = ranking.ranked_policies("cca-2024")
    assert "threshold-groups" in names
    assert "stats-poll-packed-as-run" not in names
    assert "checkpoints/cca-2024.zip" in names
    assert "checkpoints/cca-2024.zip" not in ranking.ranked_policies("cca-2025")


def test_those_who_did_not_finish_come_last():
    def entry(makespan_s, completed):
        return {"makespan_s": {"mean": makespan_s}, "completed": completed, "runs": [0, 0]}

    entries = [entry(500.0, 1), entry(900.0, 2), entry(700.0, 2)]
    assert sorted(entries, key=ranking._rank) == [entries[2], entries[1], entries[0]]


def test_the_gap_to_the_bound_and_to_the_best_schedule_found():
    search = {"mean": 600.0, "found": 2, "tried": 2}
    bound = {"lower_s": {"mean": 500.0}, "search_s": search}
    entry = {
        "name": "one",
        "makespan_s": {"mean": 660.0, "ci95": None},
        "violation_ratio": {"mean": 0.0, "max": 0.0},
        "completed": 3,
        # The search looked at the first two alone.
        "runs": [{"makespan_s": seconds} for seconds in (640.0, 650.0, 690.0)],
        "actuations_per_min": 1.0,
    }
    assert "| 32.0 / 7.5 |" in ranking._row(entry, bound)
    bound["search_s"] = {"mean": None, "found": 0, "tried": 2}
    assert ranking._gaps(entry, bound) == "32.0 / -"
    assert "No schedule beats 500.0 s" in ranking._bound_line(bound)


def test_faithfulness_writes_every_case(tmp_path, monkeypatch):
    hysteresis = next(
        case for case in published_controllers.CASES if case.policy == "hysteresis-pause"
    )
    background = next(
        case for case in published_controllers.CASES if case.policy == "shared-background"
    )
    monkeypatch.setattr(published_controllers, "CASES", (hysteresis, background))
    monkeypatch.setattr(published_controllers, "PRM_CASES", published_controllers.PRM_CASES[:2])
    page, figures = tmp_path / "faith.md", tmp_path / "faith.json"
    published_controllers.main(["--out", str(page), "--json", str(figures), "--episodes", "2"])
    rows = json.loads(figures.read_text())
    assert [row["policy"] for row in rows] == [
        "hysteresis-pause",
        "shared-background",
        "intel-prm",
        "hybrid-prm",
    ]
    assert "hysteresis-pause (cca-2025)" in page.read_text()
    assert "By throughput the simulated order is the same as the measured one." in page.read_text()
    for row in rows[:2]:
        low, high = row["simulated"]["makespan_range_s"]
        assert low <= high
        assert row["simulated"]["completed"] == 2


def test_a_case_runs_on_its_own_vms():
    """A VM as slow as Bruol's breaks what ImaGoodFella's fast one holds."""

    def violated(*vms):
        case = published_controllers.Case(
            "stats-poll-packed", "cca-2025", 10, 700.0, 0.0, 0.0, "-", vms
        )
        return published_controllers.simulate(case, 1, 0)["simulated"]["violation_ratio"]

    fast = "ImaGoodFella/cca_project 2025-05-12"
    slow = "Bruol/cloud-computing-architecture-project slow"
    assert violated(fast) < 0.05 < violated(slow)
    assert violated(fast, slow) == pytest.approx((violated(fast) + violated(slow)) / 2)


@pytest.mark.parametrize("module", [ranking, published_controllers])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "required: --out"),
        ("--out x.txt", "--out wants a .md file"),
        ("--out /proc/no/x.md", "cannot be written"),
        ("--out x.md --episodes 0", "argument --episodes: must be a whole number"),
    ],
)
def test_bad_input_is_one_line(module, line, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        module.main(line.split())
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_ctrl_c_ends_it_and_its_processes_with_one_line(tmp_path):
    """As a terminal sends it: to all of its processes."""
    line = ["-m", "training.leaderboard", "--out", str(tmp_path / "board.md"), "--no-bound"]
    process = subprocess.Popen(
        [sys.executable, *line, "--policy", "static"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    give_up_s = time.monotonic() + 60.0
    while not (workers := psutil.Process(process.pid).children()):
        assert process.poll() is None and time.monotonic() < give_up_s
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30.0)  # it ends once all who could write have ended
    assert (process.returncode, said) == (130, "coretide: stopped\n")
    assert not any(worker.is_running() for worker in workers)
