"""A cluster that is not fit for a plan is refused in one line."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cluster.cluster_check import quantity, require_namespace, require_nodes
from deploy.cluster.manifests import MANAGED_BY, US
from env.cluster.cluster_scenario import load_cluster
from env.cluster.plan import load_plan
from env.errors import InputError

CLUSTER = load_cluster("cca-part3")
PLAN = load_plan("group-031", CLUSTER)


def a_node(name: str, **status: Any) -> dict[str, Any]:
    machine = CLUSTER.type_of(name).machine
    return {
        "metadata": {"name": f"{name}-x", "labels": {CLUSTER.label: name}},
        "status": {
            "capacity": {"cpu": str(machine.vcpus)},
            "allocatable": {"memory": f"{machine.memory_mib}Mi"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        | status,
    }


def _says(answer: Any, *_: Any) -> Any:
    return answer


def server(**answers: Any) -> Any:
    """What the API server would answer."""
    return SimpleNamespace(
        host="https://c", **{what: partial(_says, answer) for what, answer in answers.items()}
    )


def test_the_nodes_of_the_course_are_fit() -> None:
    require_nodes(server(nodes=[a_node(name) for name in CLUSTER.node_names]), PLAN, CLUSTER)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            None,
            "https://c: no node has the label cca-project-nodetype=node-d-4core; "
            "the cluster's values of it: node-a-2core, node-b-2core, node-c-4core",
        ),
        ({"capacity": {"cpu": "2"}}, "node node-d-4core-x (node-d-4core) has 2 vCPUs; the plan"),
        ({"allocatable": {"memory": "1Gi"}}, "has 1024 MiB; the plan's jobs need 4500 at once"),
        ({"conditions": []}, "node node-d-4core-x (node-d-4core) is not ready"),
        ({"capacity": {"cpu": "much"}}, "amount 'much': not as Kubernetes writes one"),
    ],
)
def test_a_node_that_the_plan_does_not_fit_is_named(
    changed: dict[str, Any] | None, said: str
) -> None:
    nodes = [a_node(name) for name in CLUSTER.node_names[:3]]
    if changed is not None:
        nodes.append(a_node("node-d-4core", **changed))
    with pytest.raises(InputError) as refused:
        require_nodes(server(nodes=nodes), PLAN, CLUSTER)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_namespace_is_ours_or_not_there() -> None:
    assert not require_namespace(server(namespace=None), "n")
    ours = {"metadata": {"labels": {MANAGED_BY: US}}}
    assert require_namespace(server(namespace=ours), "n")
    with pytest.raises(InputError, match="namespace n is not ours: it has no label"):
        require_namespace(server(namespace={"metadata": {}}), "n")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("4", 4.0), ("1930m", 1.93), ("15Gi", 15 * 2**30), ("1.5", 1.5), ("2k", 2000.0)],
)
def test_an_amount_is_read_as_kubernetes_means_it(text: str, amount: float) -> None:
    assert quantity(text) == pytest.approx(amount)
