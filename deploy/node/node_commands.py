"""What `deploy.py --node` does: tend this machine's pods, it being a node of a cluster."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from agents.policy import Policy
from deploy import deployment
from deploy.assembly import usable_hierarchy
from deploy.cluster.kube_api import connect
from deploy.linux.cgroups import members
from deploy.node.node_pods import NodePods
from deploy.records.state import STATE_FILE
from deploy.records.terminal import say
from deploy.safety.guardian import Guardian
from deploy.settings import Settings
from env.errors import InputError
from env.scenario import Scenario


def tend_node(
    node: str,
    kubeconfig: Path | None,
    scenario: Scenario,
    policy: Policy,
    settings: Settings,
    guardian: Guardian,
) -> int:
    """
    Tend a node from when its service pod runs until that is gone or another one.

    :param node: its name in the cluster
    :param kubeconfig: how to reach the cluster; None in a pod
    :param scenario: the machine and the service, without jobs
    :param policy: who decides
    :param settings: see there
    :param guardian: makes the machine safe if this process dies
    :return: the exit code: 0 if the machine is as it was found
    :raises InputError: if the cluster cannot be reached, or the machine is not fit for it
    """
    # What a loop that was killed has left: nobody else would put it right.
    if (settings.folder / STATE_FILE).exists() and (code := deployment.restore(settings)):
        return code
    api, hierarchy = connect(kubeconfig), usable_hierarchy()
    if hierarchy is None:
        raise InputError("a node's pods need control groups that this user may write: use sudo")
    pods = NodePods(node, scenario.machine, hierarchy)
    pods.watch(api)
    service, group = pods.await_service(guardian.rest)
    say(f"node {node}: {service.name} at {service.address}:{service.port}")
    if service.slo_us is not None:
        scenario = scenario.with_changes(service={"slo_us": service.slo_us})
    settings = replace(
        settings,
        host=service.address,
        port=service.port,
        runtime="process",
        illustrated=False,
        inside=partial(members, hierarchy, group),
    )
    return deployment.run(scenario, policy, settings, guardian, pods)
