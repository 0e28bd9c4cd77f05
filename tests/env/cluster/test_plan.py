"""A plan places every job once, where there is room, and waits in no circle."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from env.cluster.cluster_scenario import load_cluster
from env.cluster.plan import (
    PLAN_FOLDER,
    load_plan,
    most_memory,
    plan_names,
    predecessors,
    save_plan,
)
from env.errors import InputError

CLUSTER = load_cluster("cca-part3")


def published() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((PLAN_FOLDER / "group-031.yaml").read_text())
    return content


def changed(job: str, **fields: Any) -> dict[str, Any]:
    content = published()
    next(place for place in content["jobs"] if place["name"] == job).update(fields)
    return content


@pytest.mark.parametrize("name", plan_names())
def test_a_shipped_plan_fits_and_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    plan = load_plan(name, CLUSTER)
    save_plan(plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml", CLUSTER) == plan


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (published() | {"scenario": "other"}, "scenario: is 'other', not 'cca-part3'"),
        (published() | {"jobs": published()["jobs"][1:]}, "jobs: blackscholes missing"),
        (
            published() | {"jobs": [*published()["jobs"], published()["jobs"][0]]},
            "jobs: blackscholes is listed twice",
        ),
        (changed("ferret", name="x264"), "jobs: unknown job x264; the scenario has blackscholes"),
        (changed("ferret", node="node-x"), "jobs.ferret.node: unknown node 'node-x'"),
        (changed("ferret", vcpus=[4]), "node-d-4core has no vCPU 4; allowed are 0 to 3"),
        (changed("ferret", vcpus=[1, 1]), "jobs.ferret.vcpus: lists one twice"),
        (changed("radix", threads=3), "jobs.radix.threads: 3; allowed are 1, 2, 4"),
        (
            changed("dedup", node="node-b-2core", vcpus=[1], after=[]),
            "jobs.dedup.vcpus: 1 of node-b-2core is memcached's",
        ),
        (changed("dedup", after=["x264"]), "jobs.dedup.after: unknown job x264"),
        (changed("vips", after=["dedup"]), "after: it would wait for itself"),
        (published() | {"order": []}, "order: unknown field; allowed are name"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(
    content: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError) as refused:
        load_plan(path, CLUSTER)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_jobs_that_may_run_at_once_need_memory_together(tmp_path: Path) -> None:
    content = changed("dedup", node="node-b-2core", vcpus=[1], after=[])
    content["service"] = {"node": "node-b-2core", "vcpus": [0], "threads": 1}
    vips = next(place for place in content["jobs"] if place["name"] == "vips")
    vips.update(node="node-b-2core", vcpus=[1])
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="node-b-2core: jobs that may run at once need 2000 MiB"):
        load_plan(path, CLUSTER)
    vips["after"] = ["dedup"]
    path.write_text(yaml.safe_dump(content))
    load_plan(path, CLUSTER)


def test_who_waits_needs_no_memory_beside_whom_it_waits_for() -> None:
    plan = load_plan("group-031", CLUSTER)
    before = predecessors(plan.jobs)
    # freqmine beside vips; dedup comes after vips and needs no more.
    assert most_memory(plan.on("node-c-4core"), before, CLUSTER) == 2000 + 1000
