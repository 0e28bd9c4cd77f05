"""A cluster scenario says which nodes there are, and refuses what cannot be."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from env.cluster.cluster_scenario import load_cluster
from env.errors import InputError
from env.scenario import CLUSTER_SCENARIOS, SCENARIO_FOLDER, scenario_names


def shipped() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((SCENARIO_FOLDER / "cca-part3.yaml").read_text())
    return content


def test_the_shipped_one_has_the_four_nodes_of_the_course() -> None:
    cluster = load_cluster("cca-part3")
    assert cluster.label == "cca-project-nodetype"
    vcpus = [cluster.type_of(node).machine.vcpus for node in cluster.node_names]
    assert vcpus == [2, 2, 4, 4]


def test_it_is_no_scenario_of_one_machine() -> None:
    assert not set(CLUSTER_SCENARIOS) & set(scenario_names())


def test_nodes_of_a_type_with_several_are_numbered(tmp_path: Path) -> None:
    content = shipped()
    content["nodes"][0]["count"] = 2
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    cluster = load_cluster(tmp_path / "c.yaml")
    assert cluster.node_names[:3] == ("node-a-2core.0", "node-a-2core.1", "node-b-2core")
    assert cluster.type_of("node-a-2core.1").name == "node-a-2core"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": "no label"}, "label: must match the pattern"),
        ({"nodes": []}, "nodes: must have at least 1 entries"),
        ({"nodes": [*shipped()["nodes"], shipped()["nodes"][0]]}, "node-a-2core is listed twice"),
        ({"service": {**shipped()["service"], "node": "x"}}, "service.node: no node 'x'; known"),
        ({"jobs": [{**shipped()["jobs"][0], "name": "x"}]}, "jobs: unknown job x"),
        (
            {"jobs": [{**shipped()["jobs"][0], "memory_mib": 99999}]},
            "jobs.blackscholes.memory_mib: 99999 exceeds every node's memory, 15600 at most",
        ),
        ({"jobs": [{**shipped()["jobs"][0], "endless": True}]}, "is there at the start, and ends"),
        ({"speed": 1}, "speed: unknown field; allowed are name, description"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(shipped() | change))
    with pytest.raises(InputError) as refused:
        load_cluster(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
