"""The search for a plan, and the command around it."""

import json
from pathlib import Path

import pytest

from env.cluster.cluster_scenario import load_cluster
from env.cluster.plan import check_plan, load_plan
from training.placement import placing
from training.placement.plan_search import PlanSearch, as_plan, in_turn

CLUSTER = load_cluster("cca-part3")


def test_a_search_ends_with_a_plan_that_fits_and_takes_less() -> None:
    search = PlanSearch(CLUSTER, 0)
    begin = in_turn(CLUSTER, "node-a-2core")
    cost, found = search.anneal(begin, 150)
    assert cost < 0.8 * search.cost(begin)
    check_plan(as_plan(found, CLUSTER), CLUSTER)


def test_the_command_writes_plan_figures_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placing, "EVALUATIONS", 60)
    monkeypatch.setattr(placing, "RUNS", 2)
    out, figures, picture = (tmp_path / name for name in ("plan.yaml", "place.json", "plan.png"))
    placing.main(["--out", str(out), "--json", str(figures), "--picture", str(picture)])
    plan = load_plan(out, CLUSTER)
    content = json.loads(figures.read_text())
    assert list(content) == ["plans", "bound_s", "seconds"]
    assert set(content["plans"]) == {plan.name, "group-031", "project-page"}
    for one in content["plans"].values():
        assert set(one) == {"makespan_s", "p90_s", "violation_ratio"}
        assert content["bound_s"] < one["makespan_s"] < one["p90_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "project-page" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--scenario", "cca-part4", "--out", "p.yaml"], "give a YAML file or one of: cca-part3"),
        (["--out", "/proc/p.yaml"], "/proc/p.yaml: cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        placing.main(given)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1
