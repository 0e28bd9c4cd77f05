"""Policies on drawn scenarios: against whom they are compared, and what the report says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from env.family.arrivals import read_trace
from env.family.drawing import draw
from env.scenario import load_scenario
from training.evaluation import comparison, ranking
from training.evaluation.episodes import Run
from training.evaluation.family_comparison import (
    SIZES,
    FamilyCell,
    best_safe,
    geometric_mean,
    scenario_of_cell,
    search_ratio,
    size_cells,
)

PODS = Path(__file__).parents[4] / "shared/data/pods-openb-2023.csv.gz"


def run(makespan_s: float, violation_ratio: float, completed: bool = True) -> Run:
    return Run(
        1,
        {"makespan_s": makespan_s, "violation_ratio": violation_ratio, "completed": completed},
    )


def makespan_s(runs: list[Run]) -> float:
    return runs[0].makespan_s


def test_the_best_rule_is_the_fastest_of_those_that_are_done_and_as_safe() -> None:
    rules = [[run(50.0, 0.1)], [run(60.0, 0.0, completed=False)], [run(80.0, 0.0)]]
    assert best_safe([run(70.0, 0.0)], rules, makespan_s) == 80.0
    assert best_safe([run(70.0, 0.1)], rules, makespan_s) == 50.0
    assert best_safe([run(70.0, 0.0)], rules[:2], makespan_s) is None


def test_the_mean_of_ratios_is_geometric() -> None:
    mean = geometric_mean([0.5, 2.0])
    assert mean["geomean"] == pytest.approx(1.0)
    low, high = mean["ci95"]
    assert low * high == pytest.approx(1.0)
    assert geometric_mean([])["geomean"] is None
    assert geometric_mean([0.9])["ci95"] is None


def test_makespans_and_completion_times_are_told_apart_beside_a_search() -> None:
    jobs = {"a": {"arrival_s": 5.0, "end_s": 15.0}, "b": {"arrival_s": 10.0, "end_s": 40.0}}
    arriving = Run(1, {"duration_s": 99.0, "jobs": jobs})
    own = [[run(20.0, 0.0), run(40.0, 0.0)], [arriving]]
    found = search_ratio(own, [[10.0, math.inf], [10.0]], [False, True])
    assert found["makespan"] == {"geomean": pytest.approx(2.0), "ci95": None, "traces": 1}
    assert found["jct"] == {"geomean": pytest.approx(2.0), "ci95": None, "traces": 1}
    assert found["traces"] == 2
    alone = search_ratio(own[:1], [[10.0, 20.0]], [False])
    assert alone["jct"] == {"geomean": None, "ci95": None, "traces": 0}


def test_a_report_on_drawn_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "family.json"
    line = f"--family 2 --seed 0 --episodes 1 --policy first-come --bound 5 --json {path}"
    comparison.main(line.split())
    content = json.loads(path.read_text())
    assert (content["family"], content["with_arrivals"]) == (2, 1)
    (entry,) = content["policies"]
    assert entry["name"] == "first-come"
    assert entry["completed"] == 2
    assert entry["ratio_to_best_safe_rule"]["geomean"] >= 1.0
    assert entry["jct_ratio"] >= 1.0
    found = entry["ratio_to_search"]
    assert found["makespan"]["traces"] + found["jct"]["traces"] == found["traces"] <= 2
    assert [one["scenario"] for one in entry["runs"]] == ["family-report-0-0", "family-report-0-1"]
    assert all(one["p95_jct_s"] >= one["mean_jct_s"] > 0.0 for one in entry["runs"])
    for one in entry["scenarios"]:
        drawn = load_scenario(one["scenario"])
        assert (one["vcpus"], one["jobs"]) == (drawn.machine.vcpus, len(drawn.jobs))
    of_size = dict(zip([title for title, _ in SIZES], size_cells(entry), strict=True))
    told = {one["vcpus"]: one["ratio"] for one in entry["scenarios"]}
    assert of_size["16 C"] == (f"{told[16]:.3f}" if told.get(16) else "-")
    assert of_size["13-20 J*"] == "-" or any(one["jobs"] > 12 for one in entry["scenarios"])


def test_jobs_follow_a_trace_scaled_to_the_scenario(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times_s = [1000.0 * n**2 for n in range(40)]
    trace.write_text("creation_time\n" + "\n".join(map(str, times_s)) + "\n")
    scenario = scenario_of_cell(FamilyCell("family-report-0-3", (), 0, 1, str(trace)))
    arrival_s = [job.arrival_s for job in scenario.jobs]
    gaps = [after - before for before, after in pairwise(arrival_s)]
    assert arrival_s[0] == 0.0
    assert gaps == sorted(gaps)  # as in the trace, each gap is longer than the one before
    assert gaps[-1] / gaps[0] < math.inf
    assert scenario.load.duration_s > arrival_s[-1]


@pytest.mark.skipif(not PODS.exists(), reason="the recorded pods lie beside the project")
def test_jobs_follow_the_pods_of_a_recorded_cluster() -> None:
    recorded_s = read_trace(PODS)
    assert len(recorded_s) > 8000
    rng = np.random.default_rng(0)
    longest, by_chance = [], []
    for index in range(20):
        cell = FamilyCell(f"family-report-0-{index}", (), 0, 1, str(PODS))
        arrival_s = [job.arrival_s for job in scenario_of_cell(cell).jobs]
        span_s = draw(cell.scenario).span_s
        assert arrival_s[0] == 0.0 and arrival_s == sorted(arrival_s)
        assert arrival_s[-1] in (0.0, pytest.approx(span_s, abs=1e-3))
        if arrival_s[-1] == 0.0:  # all at once, or there is one
            continue
        gaps = np.diff(arrival_s)
        longest.append(gaps.max() / gaps.mean())
        by_chance.append(max(one := rng.exponential(size=len(gaps))) / one.mean())
    # Pods come in bursts: one gap is most of the time more often than by chance.
    assert np.mean(longest) > 1.2 * np.mean(by_chance)


@pytest.mark.parametrize(
    ("main", "line", "said"),
    [
        (
            comparison.main,
            "--family 1 --scenario cca-2024",
            "--scenario: does not go with",
        ),
        (comparison.main, "--arrivals x.csv", "--arrivals: goes with --family only"),
        (comparison.main, "--family 1 --arrivals none.csv", "none.csv: cannot be read"),
        (comparison.main, "--family 1 --policy nope", "unknown policy nope"),
        (ranking.main, "--out x.md --family 1 --interval 5", "--interval: does not go with"),
    ],
)
def test_what_does_not_go_together_is_refused(
    main: Callable[[list[str]], None], line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err
