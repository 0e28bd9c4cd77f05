"""The comparison on the local scenario: what counts as reached, and what bad input says."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import local


def report(makespan_s: float | None, ratio: float | None) -> dict[str, Any]:
    measured = {
        "p95_us": [1.0] * 20,
        "spoiled": 3 * [True] + 17 * [False],
        "actuations": 6,
        "guard": {"steps": 2},
        "stages": {},
        "start_delay_ms": {"max": None if makespan_s is None else 41.6},
    }
    return {"policy": "p", "makespan_s": makespan_s, "violation_ratio": ratio, **measured}


@pytest.mark.parametrize(
    ("policy", "rule", "reached"),
    [
        ((90.0, 0.1), (100.0, 0.1), True),
        ((91.0, 0.0), (100.0, 0.1), False),
        ((50.0, 0.2), (100.0, 0.1), False),
        ((None, 0.0), (None, 0.5), False),
        ((50.0, None), (100.0, 0.1), False),
        ((103.0, 0.0), (None, 0.0), True),  # the rule's time is 115 s
        ((104.0, 0.0), (None, 0.0), False),
    ],
)
def test_a_turn_is_reached_when_it_is_faster_and_no_less_calm(
    policy: tuple[float | None, float | None],
    rule: tuple[float | None, float | None],
    reached: bool,
) -> None:
    assert local.reached(report(*policy), [report(*rule)]) is reached
    assert not local.reached(report(*policy), [report(*rule), report(1.0, 0.0)])


def test_runs_are_said_in_a_line() -> None:
    assert local.line(report(12.0, 0.05)) == (
        "p: 12.0 s, violated 5.0% of 20, 3 spoiled, 30 changes a minute, guard 2 steps, "
        "starts within 42 ms"
    )
    assert local.line(report(None, None)) == (
        "p: not done, violated not measured, 3 spoiled, 3 changes a minute, guard 2 steps"
    )


def test_a_neighbour_disturbs_as_long_as_it_is_asked_to() -> None:
    with local.disturbed() as neighbour:
        spent = Path(f"/proc/{neighbour.pid}/schedstat")
        deadline_s = time.monotonic() + 20.0
        while int(spent.read_text().split()[0]) < 3e8:  # ns, more than its start takes
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert neighbour.returncode is not None


@pytest.mark.parametrize(
    "options",
    [
        ["--scenario", "nowhere"],
        ["--policy", "nobody"],
        ["--policy", "random", "--policy", "checkpoints/nowhere.zip"],
    ],
)
def test_what_is_unknown_is_one_line_before_anything_starts(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(local, "docker_daemon")
    with pytest.raises(SystemExit) as ended:
        local.main(options)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert options[-1] in shown and shown.count("\n") == 1
