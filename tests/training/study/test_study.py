"""A study of a group: plans are checked, runs are kept, and the report says what they show."""

from __future__ import annotations

import csv
import errno
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from env.errors import InputError
from tests.deploy.group.needs import needs_nutcracker, needs_proxy
from training.study import study_run
from training.study.study_measure import group_of, load_keys, measure
from training.study.study_plan import PLANS, StudyPoint, load_plan
from training.study.study_report import MEASURED, averages
from training.study.study_run import Runs, main

EFFORT = {"warm_s": 0.02, "length_s": 0.06, "fewest": 2, "most": 2, "limit_s": 30.0}
MANY = list(range(1, 12))
CLIENTS = {"members": [2], "writes": [0.5], "clients": [1, 2, 4]}
FACTORS = {"replicas": ["all"], "members": [1, 2], "clients": [1, 4]}


def write(path: Path, *experiments: dict[str, Any]) -> Path:
    content = {
        "name": "tiny",
        "description": "for a test",
        "full": EFFORT,
        "quick": dict(EFFORT),
        "experiments": list(experiments),
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
def test_a_shipped_plan_asks_for_each_point_once_and_fewer_when_quick(name: str) -> None:
    plan = load_plan(name)
    points = plan.points(quick=False)
    assert len(set(points)) == len(points)
    assert set(plan.points(quick=True)) < set(points)
    # Each run has a start of its own of some 50 ms; reports take some 20 s.
    for quick, limit_s in ((True, 4 * 60.0), (False, 25 * 60.0)):
        effort = plan.effort(quick)
        run_s = effort.warm_s + effort.length_s + 0.15
        assert effort.fewest * len(plan.points(quick)) * run_s + 30.0 < limit_s


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"members": [2], "proxy": ["none"]}, "without a proxy there is one member"),
        ({"members": [2], "multi_get": ["whole"]}, "replicas must be all"),
        ({"members": [2], "proxy": ["nutcracker"], "replicas": ["all"]}, "keeps one of each key"),
        ({"members": [99]}, "members.0: must be less than or equal to 16, not 99"),
        ({"replicas": ["two"]}, "must be 'one', 'half' or 'all', not 'two'"),
        ({"writes": [2.0]}, "must be less than or equal to 1, not 2"),
        ({"servers": [2]}, "servers: unknown field"),
        ({"members": MANY, "clients": MANY, "keys": MANY}, "more than 1000 points"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(
    tmp_path: Path, grid: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "plan.yaml", {"name": "one", "title": "One", "grid": grid})
    with pytest.raises(InputError) as refusal:
        load_plan(str(path))
    assert said in str(refusal.value) and str(path) in str(refusal.value)


def test_a_plan_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(InputError, match="shipped: asl-2016, asl-2018"):
        load_plan("asl-2017")


@needs_nutcracker
def test_a_study_may_name_nutcracker(tmp_path: Path) -> None:
    grid = {"members": [2], "proxy": ["nutcracker"], "writes": [0.5], "clients": [4]}
    plan = load_plan(
        str(write(tmp_path / "plan.yaml", {"name": "one", "title": "One", "grid": grid}))
    )
    (point,) = plan.points(quick=False)
    with group_of(point.setup) as group:
        load_keys(group, point)
        row = measure(group, point, plan.full)
    assert float(row["throughput"]) > 0.0 and row["misses"] == 0
    assert all(int(gets) > 0 for gets in str(row["gets_by_member"]).split(";"))


@needs_proxy
def test_a_study_is_measured_reported_and_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_run, "interrupt_on_stop", lambda: None)  # pytest's are its own
    plan = write(
        tmp_path / "plan.yaml",
        {"name": "clients", "title": "Clients", "grid": CLIENTS},
        {"name": "factors", "title": "Factors", "shown": "factors", "grid": FACTORS},
    )
    out = tmp_path / "out"
    main(["--plan", str(plan), "--out", str(out)])
    runs = pd.read_csv(out / "runs.csv")
    assert len(runs) == 2 * (3 + 4)
    assert runs["throughput"].min() > 0.0 and runs["failed"].sum() == 0
    # Clients that do not think: N = X R, but for those who wait when so short a run ends.
    law = runs["throughput"] * runs["mean_us"] * 1e-6 / runs["clients"]
    assert 0.5 < law.median() < 2.0
    assert (runs["get_server_us"] < runs["mean_us"]).mean() > 0.5
    effects = pd.read_csv(out / "effects.csv")
    assert set(effects["effect"]) == {"mean", "members", "clients", "members × clients"}
    said = capsys.readouterr().out
    assert "Clients: all: most" in said and "network of queues" in said
    assert (out / "report.html").stat().st_size > 1000 and (out / "clients.png").exists()

    # What was being written when the machine went down is measured again, nothing else.
    text = (out / "runs.csv").read_text().splitlines()
    (out / "runs.csv").write_text("\n".join([*text[:-1], text[-1][:20]]))
    main(["--plan", str(plan), "--out", str(out)])
    again = pd.read_csv(out / "runs.csv")
    assert len(again) == len(runs)
    assert again["throughput"].iloc[:-1].tolist() == runs["throughput"].iloc[:-1].tolist()

    with pytest.raises(SystemExit) as refusal:
        main(["--plan", "asl-2018", "--out", str(out)])
    assert refusal.value.code == 2
    assert "holds another study" in capsys.readouterr().err


def a_run(point: StudyPoint, **other: object) -> dict[str, Any]:
    counts = ";".join(["7"] * point.members)
    figures = dict.fromkeys(MEASURED, 5.0)
    return {**point.fields, **figures, "disturbed": 0, "gets_by_member": counts, **other}


def test_a_folder_whose_first_run_was_not_written_whole_is_begun_anew(tmp_path: Path) -> None:
    points = load_plan("asl-2018").points(quick=True)
    (tmp_path / "runs.csv").write_text("members,repl")
    runs = Runs(tmp_path, {"plan": "mine"}, points)
    assert runs.rows == []
    runs.add(a_run(points[0]))
    assert Runs(tmp_path, {"plan": "mine"}, points).rows == runs.rows
    runs.add(a_run(points[0]))
    with runs.path.open("a") as file:
        file.write(",".join(map(str, a_run(points[1]).values()))[:-1])  # it is one without its end
    again = Runs(tmp_path, {"plan": "mine"}, points)
    assert again.rows == runs.rows
    assert again.table().to_dict("records") == [a_run(points[0])] * 2


@pytest.mark.parametrize("number", ["1_0", "\uff11\uff10", " 10"])
def test_a_number_of_a_run_is_one_however_it_is_written(tmp_path: Path, number: str) -> None:
    points = load_plan("asl-2018").points(quick=True)
    Runs(tmp_path, {"plan": "mine"}, points).add(a_run(points[0], throughput=number))
    runs = Runs(tmp_path, {"plan": "mine"}, points)
    assert averages(runs.table())["throughput"].tolist() == [10.0]


@pytest.mark.parametrize(
    "other",
    [
        *({"throughput": "fast"}, {"p95_us": 1e300}, {"disturbed": 2}, {"gets_by_member": "7;x"}),
        *({"members": 15}, {"writes": "0.123"}, {"mean_us": None}, {"more": 1, "most": "a\nb"}),
    ],
)
def test_a_run_that_is_none_is_refused_and_nothing_is_touched(
    tmp_path: Path, other: dict[str, object]
) -> None:
    points = load_plan("asl-2018").points(quick=True)
    runs = Runs(tmp_path, {"plan": "mine"}, points)
    runs.add(a_run(points[0]))
    with runs.path.open("a", newline="") as file:
        csv.writer(file).writerow(a_run(points[0], **other).values())
    before = runs.path.read_bytes()
    with pytest.raises(InputError, match=f"^{runs.path}: row 2 is no run of this study; remove it"):
        Runs(tmp_path, {"plan": "mine"}, points)
    assert runs.path.read_bytes() == before


@pytest.mark.parametrize("content", ["[" * 100_000, "NaN", "{"])
def test_a_plan_beside_the_runs_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(InputError, match=r"plan\.json: cannot be read as a study's plan"):
        Runs(tmp_path, {"plan": "mine"}, [])


def test_a_folder_that_others_may_write_to_holds_no_study(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="must be a folder of yours"):
        Runs(tmp_path, {"plan": "mine"}, [])
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_results_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, instead in (("measure_all", refuse), ("interrupt_on_stop", lambda: None)):
        monkeypatch.setattr(study_run, name, instead)
    for name in ("programs_of", "require_vcpus"):
        monkeypatch.setattr(study_run, name, lambda *given: None)
    with pytest.raises(SystemExit) as refusal:
        main(["--plan", "asl-2018", "--out", str(tmp_path)])
    assert refusal.value.code == 2
    assert f"coretide: {tmp_path}: cannot be written to: " in capsys.readouterr().err
