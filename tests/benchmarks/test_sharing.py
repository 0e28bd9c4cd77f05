"""The benchmark of sharing: what follows what, what is made of it, and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import sharing
from deploy.deployment import usable_hierarchy
from deploy.linux.cgroups import find_groups

ROOT = Path(__file__).resolve().parents[2]
GROUPS = Path("/sys/fs/cgroup")

needs_groups = pytest.mark.skipif(
    usable_hierarchy() is None or os.geteuid() != 0, reason="control groups cannot be written here"
)


def figures(p95_us: float, run_delay: float = 0.5) -> sharing.Figures:
    fixed = {"p50_us": 10.0, "p99_us": 100.0, "max_qps": 1000.0}
    fixed |= {"job_vcpus": 0.4, "left_vcpus": 0.4}
    return fixed | {"p95_us": p95_us, "run_delay": run_delay}


@pytest.mark.parametrize("turn", range(4))
def test_each_way_to_yield_is_paired_with_none(turn: int) -> None:
    measured = [mode for mode in sharing.order(turn, sharing.MODES) if mode != sharing.REST]
    pairs = [measured[first : first + 2] for first in range(0, len(measured), 2)]
    assert [next(mode for mode in pair if mode != "none") for pair in pairs] == [
        *("weight", "idle", "equal")
    ]
    assert all(pair[turn % 2] == "none" for pair in pairs)


def test_the_load_catches_up_after_equal_work() -> None:
    for turn in range(2):
        sequence = sharing.order(turn, sharing.MODES)
        assert sequence[sequence.index("equal") + 1] == sharing.REST
        assert sequence.count(sharing.REST) == 1


@pytest.mark.parametrize(
    ("vcpus", "expected"),
    [
        ((0, 1), [((0,), 1), ((0,), 4)]),
        ((0, 1, 2), [((0, 1), 1), ((0, 1), 4), ((0,), 1), ((0,), 4)]),
        ((2, 4, 6, 8), [((2, 4), 1), ((2, 4), 4), ((2,), 1), ((2,), 4)]),
    ],
)
def test_the_loads_vcpu_is_no_part_of_what_is_shared(
    vcpus: tuple[int, ...], expected: list[tuple[tuple[int, ...], int]]
) -> None:
    found = sharing.arrangements(vcpus)
    assert [(what.cores, len(what.jobs)) for what in found] == expected


def test_ratios_are_those_of_the_pairs_and_the_rest_medians() -> None:
    sequence, rows = [], []
    for turn, (none, idle) in enumerate([(100.0, 110.0), (200.0, 240.0), (50.0, 50.0)]):
        pair = [("none", none), ("idle", idle)]
        for mode, p95_us in pair[:: -1 if turn % 2 else 1]:
            sequence.append(mode)
            rows.append(figures(p95_us))
    found = sharing.summary(sequence, rows, turns=3)
    assert found["ratios"]["idle"]["p95_us"] == pytest.approx(1.1)
    assert {mode: of["p95_us"] for mode, of in found["modes"].items()} == {
        "none": 100.0,
        "idle": 110.0,
    }
    assert [turn["idle"]["p95_us"] for turn in found["turns"]] == [110.0, 240.0, 50.0]


def test_a_figure_of_zero_has_no_ratio() -> None:
    found = sharing.summary(["none", "idle"], [figures(1.0, 0.0), figures(1.0)], turns=1)
    assert found["ratios"]["idle"]["run_delay"] is None
    assert found["ratios"]["idle"]["p95_us"] == 1.0


def test_a_figure_of_zero_leaves_the_other_pairs_their_ratios() -> None:
    rows = [figures(1.0, 0.0), figures(1.0), figures(1.0, 1.5), figures(1.0, 0.5)]
    found = sharing.summary(["none", "idle", "idle", "none"], rows, turns=2)
    assert found["ratios"]["idle"]["run_delay"] == 3.0


def test_what_it_writes_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sharing.summary(["none", "idle"], [figures(1.0, 0.0), figures(1.0)], turns=1)
    monkeypatch.setattr(sharing, "run", lambda plan: found)
    monkeypatch.setattr(sharing, "interrupt_on_stop", lambda: None)
    sharing.main(["--json", str(tmp_path / "sharing.json")])
    written = (tmp_path / "sharing.json").read_text()
    assert "NaN" not in written
    assert json.loads(written) == found


def test_the_table_fits_a_terminal_and_has_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    sequence = [mode for turn in range(2) for mode in sharing.order(turn, sharing.MODES)]
    sequence = [mode for mode in sequence if mode != sharing.REST]
    rows = [figures(31_676.0 if mode == "equal" else 93.0, 13.27) for mode in sequence]
    measured = {"load_qps": 204_321} | sharing.summary(sequence, rows, turns=2)
    what = sharing.arrangements((0, 1))[0]
    Console(width=80).print(sharing.table(what, measured))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "31,676 (341)" in shown
    assert shown.count("turn 2") == len(sharing.MODES)


def test_without_rights_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(group: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("deploy.linux.cgroups.JobGroup.create", refuse)
    monkeypatch.setattr(sharing, "interrupt_on_stop", lambda: None)
    with pytest.raises(SystemExit) as ended:
        sharing.main(["--quick"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.sharing", "--quick", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def left_of(pid: int) -> list[Path]:
    return find_groups(GROUPS, f"coretide-characterise-{pid}")


@needs_groups
@pytest.mark.survival
def test_it_measures_all_ways_to_yield_and_leaves_nothing(tmp_path: Path) -> None:
    process = start("--json", str(tmp_path / "sharing.json"))
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    found = json.loads((tmp_path / "sharing.json").read_text())
    assert set(found["modes"]) == set(sharing.MODES)
    asked = {"p50_us", "p95_us", "p99_us", "run_delay", "job_vcpus"}
    assert all(asked <= set(of) for of in found["modes"].values())
    assert found["precedence"] in ("SCHED_RR", "cpu.shares", "cpu.weight")
    assert found["modes"]["none"]["job_vcpus"] < 0.05 < found["modes"]["equal"]["job_vcpus"]
    assert left_of(process.pid) == []


@needs_groups
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.survival), signal.SIGTERM]
)
def test_it_can_be_stopped(number: signal.Signals) -> None:
    process = start()
    give_up_s = time.monotonic() + 30.0
    while not [path for group in left_of(process.pid) for path in group.glob("beside-*")]:
        assert process.poll() is None and time.monotonic() < give_up_s
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert left_of(process.pid) == []
