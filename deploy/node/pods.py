"""
What the API says of a node's pods: the service by its label, and batch jobs by theirs.

Labels and annotations come from whoever may make pods in the cluster, so all in them is bounded.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.cluster.cluster_check import quantity
from deploy.records.proof import CANCELLED
from env.errors import InputError
from env.scenario import Job, Machine

CLASS, SERVICE, BATCH = "coretide.io/class", "service", "batch"
"""The label, and its two values."""

SLO, PORT, THREADS = "coretide.io/slo", "coretide.io/port", "coretide.io/threads"
"""The annotations: of the service its p95 SLO and its port, of a batch pod its threads."""

CONFIG_HASH = "kubernetes.io/config.hash"
"""The annotation that holds the uid by which the kubelet knows a pod that it has from a file."""

MEMCACHED_PORT = 11211

DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(us|ms|s)")
UNIT_US = {"us": 1.0, "ms": 1e3, "s": 1e6}

Pod = Mapping[str, Any]


@dataclass(frozen=True)
class ServicePod:
    """
    The pod of the latency-critical service.

    :param uid: as the kubelet knows it
    :param name: with its namespace
    :param address: its IP address
    :param port: memcached's TCP port
    :param slo_us: limit of p95 [µs]; None where the pod does not say
    """

    uid: str
    name: str
    address: str
    port: int
    slo_us: float | None


@dataclass(frozen=True)
class BatchPod:
    """
    A best-effort pod.

    :param uid: as the kubelet knows it
    :param name: with its namespace
    :param job: what the loop knows it as
    :param exit_code: None while it is there; then its containers', or that it was taken away
    """

    uid: str
    name: str
    job: Job
    exit_code: int | None


def read_service(pods: Iterable[Pod]) -> ServicePod | None:
    """
    The service among a node's pods, once it runs.

    :param pods: the node's
    :return: None while there is none
    :raises InputError: if there are several, or one says what cannot be
    """
    found = [pod for pod in pods if _class(pod) == SERVICE and _runs(pod)]
    if len(found) > 1:
        names = ", ".join(sorted(map(_name, found)))
        raise InputError(f"pods {names}: only one of a node may have {CLASS}={SERVICE}")
    if not found or not found[0]["status"].get("podIP"):
        return None
    (pod,) = found
    notes = pod["metadata"].get("annotations") or {}
    slo = notes.get(SLO)
    return ServicePod(
        pod_uid(pod),
        _name(pod),
        str(pod["status"]["podIP"]),
        _whole(pod, PORT, MEMCACHED_PORT, 65535),
        None if slo is None else _microseconds(pod, slo),
    )


def read_batch(pods: Iterable[Pod], machine: Machine) -> tuple[list[BatchPod], list[str]]:
    """
    The batch pods among a node's that have begun.

    :param pods: the node's
    :param machine: which they run on
    :return: they, and what is wrong with those that are left alone, one line each
    """
    found, said = [], []
    for pod in pods:
        if _class(pod) != BATCH or pod["status"].get("phase") == "Pending":
            continue
        try:
            job = _job(pod, machine)
        except (InputError, ValueError) as error:
            said.append(f"{' '.join(str(error).split())}; it is left alone")
            continue
        found.append(BatchPod(pod_uid(pod), _name(pod), job, _exit_code(pod)))
    return found, said


def pod_uid(pod: Pod) -> str:
    """
    The uid by which the kubelet names a pod's control group.

    :param pod: as the API has it
    """
    meta = pod["metadata"]
    return str((meta.get("annotations") or {}).get(CONFIG_HASH) or meta["uid"])


def _name(pod: Pod) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _class(pod: Pod) -> str:
    return str((pod["metadata"].get("labels") or {}).get(CLASS, ""))


def _runs(pod: Pod) -> bool:
    """Whether a pod runs, and is not about to be ended."""
    going = pod["metadata"].get("deletionTimestamp")
    return pod["status"].get("phase") == "Running" and not going


def _exit_code(pod: Pod) -> int | None:
    if _runs(pod):
        return None
    ended = [
        int(((one.get("state") or {}).get("terminated") or {}).get("exitCode", 0))
        for one in pod["status"].get("containerStatuses") or ()
    ]
    if pod["status"].get("phase") == "Succeeded":
        return 0
    return next((code for code in ended if code), CANCELLED)


def _job(pod: Pod, machine: Machine) -> Job:
    """The job that the loop knows a pod as; its name is a pod's that nobody else has."""
    needs = {"cpu": 0.0, "memory": 0.0}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        for what in needs:
            needs[what] += quantity(asked.get(what, 0))
    threads = min(max(1, math.ceil(needs["cpu"])), machine.vcpus)
    memory_mib = min(max(1, math.ceil(needs["memory"] / 2**20)), machine.memory_mib)
    return Job(
        name=f"{pod['metadata']['name'][:50]}-{pod_uid(pod)[:8]}",
        command=("kubelet",),
        threads=(_whole(pod, THREADS, threads, machine.vcpus),),
        memory_mib=memory_mib,
    )


def _whole(pod: Pod, key: str, default: int, most: int) -> int:
    """A whole number from 1 that an annotation has."""
    text = str((pod["metadata"].get("annotations") or {}).get(key, default))
    if not (text.isascii() and text.isdecimal() and len(text) < 8 and 1 <= int(text) <= most):
        raise InputError(f"pod {_name(pod)}: {key}: {text[:20]!r} is not from 1 to {most}")
    return int(text)


def _microseconds(pod: Pod, text: str) -> float:
    found = DURATION.fullmatch(str(text))
    if not found or not float(found[1]):
        said = "is no time such as 800us or 1ms"
        raise InputError(f"pod {_name(pod)}: {SLO}: {str(text)[:20]!r} {said}")
    return float(found[1]) * UNIT_US[found[2]]
