"""
The pods of this node as the API and the control groups show them, kept up by a thread of its own.

The loop picks up what was last seen and never waits for it: an API server that does not answer
leaves everything as it is.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from deploy.cluster.kube_api import KubeApi
from deploy.linux.cgroups import Hierarchy, group_weight, is_idle
from deploy.node.pod_groups import PodGroup, find_pods
from deploy.node.pods import CLASS, SERVICE, BatchPod, ServicePod, read_batch, read_service
from env.errors import InputError
from env.scenario import Machine

REST_S = 1.0
"""How often whoever waits for the service says that it is alive [s]."""


@dataclass(frozen=True)
class SeenPods:
    """
    The node's pods at one moment.

    :param service: the service's, while it runs
    :param service_group: the path of its control group
    :param batch: batch pods that have begun, with their control groups; None once that is gone
    :param said: what is wrong with those that are left alone, one line each
    """

    service: ServicePod | None = None
    service_group: PurePosixPath | None = None
    batch: tuple[tuple[BatchPod, PodGroup | None], ...] = ()
    said: tuple[str, ...] = ()


class NodePods:
    """
    The pods of a node.

    :param node: its name in the cluster
    :param machine: what it is
    :param hierarchy: how its control groups are mounted
    """

    def __init__(self, node: str, machine: Machine, hierarchy: Hierarchy):
        self.node = node
        self.machine = machine
        self.hierarchy = hierarchy
        self.seen = SeenPods()
        self._news = threading.Event()
        self._refused = ""
        self._incomplete = True  # whether a control group is still to come

    def watch(self, api: KubeApi) -> None:
        """
        Begin to follow what the API tells.

        :param api: the API server
        :raises InputError: if it cannot be reached, or refuses
        """
        kept: dict[str, Any] = {}
        changes = api.node_pods(self.node, CLASS, kept)
        next(changes)
        threading.Thread(target=self._follow, args=(changes, kept), daemon=True).start()

    def await_service(self, rest: Callable[[float], None]) -> tuple[ServicePod, PurePosixPath]:
        """
        Wait until the service's pod runs.

        :param rest: called with the time [s] every now and then
        :return: the pod, and the path of its control group
        :raises InputError: if its labels or annotations say what cannot be
        """
        while True:
            self._news.clear()
            seen = self.seen
            if self._refused:
                raise InputError(self._refused)
            if seen.service is not None and seen.service_group is not None:
                return seen.service, seen.service_group
            self._news.wait(REST_S)
            rest(time.monotonic())

    def see(self, pods: Mapping[str, Any]) -> None:
        """
        Take in the node's pods.

        :param pods: as the API has them
        :raises OSError: if a control group goes away meanwhile
        """
        batch, said = read_batch(pods.values(), self.machine)
        try:
            service = read_service(pods.values())
        except InputError as error:  # the one that is followed is left as it is
            self._refused, service = str(error), self.seen.service
            said.append(self._refused)
        groups = find_pods(self.hierarchy.mounts["cpu"]) if service is not None else {}
        beside = None if service is None else groups.get(service.uid)
        self._incomplete = service is not None and beside is None
        found: list[tuple[BatchPod, PodGroup | None]] = []
        for pod in batch:
            if beside is None:
                break
            group, why = self._group(groups.get(pod.uid), beside)
            self._incomplete |= group is None and pod.exit_code is None and not why
            if why:
                said.append(f"pod {pod.name}: {why}; it is left alone")
            else:
                found.append((pod, group))
        known = None if beside is None else service
        self.seen = SeenPods(known, beside, tuple(found), tuple(said))
        self._news.set()

    def _follow(self, changes: Iterator[bool], kept: Mapping[str, Any]) -> None:
        for changed in changes:
            if changed or self._incomplete:
                try:
                    self.see(kept)
                except OSError:  # a control group went away meanwhile: looked at again
                    self._incomplete = True

    def _group(
        self, path: PurePosixPath | None, beside: PurePosixPath
    ) -> tuple[PodGroup | None, str]:
        """A batch pod's group beside the service's, and why it cannot be used."""
        if path is None:
            return None, ""
        if path.parent != beside.parent:
            return None, f"its QoS class is not that of the {CLASS}={SERVICE} pod"
        if is_idle(self.hierarchy, beside):
            return None, f"the service's control group {beside} is idle"
        group = PodGroup(self.hierarchy, path, group_weight(self.hierarchy, beside))
        return group, group.missing()
