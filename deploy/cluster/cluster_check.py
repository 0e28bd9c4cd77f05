"""Whether a cluster is fit for a plan, before anything is created."""

import re
from typing import Any

from deploy.cluster.kube_api import KubeApi
from deploy.cluster.manifests import MANAGED_BY, US
from env.cluster.cluster_scenario import ClusterScenario
from env.cluster.plan import ClusterPlan, most_memory, predecessors
from env.errors import InputError

UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", start=1)
}
QUANTITY = re.compile(r"([0-9.]+)([A-Za-z]*)")


def require_images(plan: ClusterPlan, cluster: ClusterScenario) -> None:
    """
    Make sure that every job has an image.

    :param plan: the plan
    :param cluster: its scenario
    :raises InputError: naming the first job without one
    """
    for place in plan.jobs:
        if not cluster.job(place.name).image:
            raise InputError(f"scenario {cluster.name}: jobs.{place.name}.image: is required")


def require_namespace(api: KubeApi, name: str) -> bool:
    """
    Make sure that a namespace is ours, if it is there.

    :param api: the API server
    :param name: its name
    :return: whether it is there
    :raises InputError: if it is somebody else's
    """
    found = api.namespace(name)
    if found is None:
        return False
    if (found["metadata"].get("labels") or {}).get(MANAGED_BY) != US:
        raise InputError(
            f"{api.host}: namespace {name} is not ours: it has no label {MANAGED_BY}={US}"
        )
    return True


def require_nodes(api: KubeApi, plan: ClusterPlan, cluster: ClusterScenario) -> None:
    """
    Make sure that every node of the plan is there, ready and large enough.

    :param api: the API server
    :param plan: the plan
    :param cluster: its scenario
    :raises InputError: naming what is missing
    """
    nodes = api.nodes()
    values = sorted({one for node in nodes if (one := _label(node, cluster.label))})
    before = predecessors(plan.jobs)
    for name in dict.fromkeys(place.node for place in plan.jobs):
        known = [node for node in nodes if _label(node, cluster.label) == name]
        if not known:
            raise InputError(
                f"{api.host}: no node has the label {cluster.label}={name}; "
                f"the cluster's values of it: {', '.join(values) or 'none'}"
            )
        ready = [node for node in known if is_ready(node)]
        if not ready:
            raise InputError(f"{api.host}: node {_named(known[0])} ({name}) is not ready")
        has = ready[0]["status"]["allocatable"]
        wanted = cluster.type_of(name).machine.vcpus
        vcpus = quantity(ready[0]["status"]["capacity"]["cpu"])
        if vcpus < wanted:
            raise InputError(
                f"{api.host}: node {_named(ready[0])} ({name}) has {vcpus:g} vCPUs; "
                f"the plan needs {wanted}"
            )
        memory_mib = quantity(has["memory"]) / 2**20
        needed = most_memory(plan.on(name), before, cluster)
        if memory_mib < needed:
            raise InputError(
                f"{api.host}: node {_named(ready[0])} ({name}) has {memory_mib:.0f} MiB; "
                f"the plan's jobs need {needed} at once"
            )


def quantity(text: Any) -> float:
    """
    An amount as Kubernetes writes it.

    :param text: such as 1930m, 4 or 15Gi
    """
    found = QUANTITY.fullmatch(str(text))
    if not found or found[2] not in UNITS:
        raise InputError(f"amount {text!r}: not as Kubernetes writes one")
    return float(found[1]) * UNITS[found[2]]


def _label(node: dict[str, Any], key: str) -> str:
    return str((node["metadata"].get("labels") or {}).get(key, ""))


def _named(node: dict[str, Any]) -> str:
    return str(node["metadata"]["name"])


def is_ready(node: dict[str, Any]) -> bool:
    """
    Whether a node's kubelet says that it is ready.

    :param node: as the API has it
    """
    conditions = node.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
