"""
What is created on a cluster: one Kubernetes Job for each attempt of a job of the plan.

An attempt's name follows from the plan and the job alone, so that nobody can start it twice, and
its labels say all that a client needs to go on where another one was killed.
"""

import hashlib
import json
import re
from typing import Any

from env.cluster.cluster_scenario import ClusterScenario
from env.cluster.plan import ClusterPlan, JobPlace, predecessors

Manifest = dict[str, Any]

MANAGED_BY, US = "app.kubernetes.io/managed-by", "coretide"
PLAN, JOB, ATTEMPT = "coretide.io/plan", "coretide.io/job", "coretide.io/attempt"
OURS = f"{MANAGED_BY}={US}"
"""The selector of everything that we create."""

GIVEN_UP = "coretide.io/given-up"
"""The annotation of an attempt that we have ended, and why."""

CPU_PART = 0.75
"""
What a job requests of its share of its vCPUs; the rest is for what Kubernetes itself runs.

The plan decides who runs where. A request is there so that the scheduler, and whoever else uses
the cluster, knows that the vCPUs are taken.
"""

LOST_NODE_S = 30
"""How long a pod stays bound to a node that does not answer [s]."""

NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def digest(plan: ClusterPlan) -> str:
    """
    What tells a plan from another one, of whatever name.

    :param plan: the plan
    """
    content = json.dumps(plan.model_dump(mode="json", exclude={"reported"}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:10]


def labels_of(plan: ClusterPlan) -> dict[str, str]:
    """
    The labels of everything that a plan's run creates.

    :param plan: the plan
    """
    return {MANAGED_BY: US, PLAN: digest(plan)}


def attempt_name(plan: ClusterPlan, job: str, attempt: int) -> str:
    """
    The name of an attempt's Kubernetes Job, at most 63 characters of what such names may have.

    :param plan: the plan
    :param job: the job
    :param attempt: its number, from 1
    """
    own = hashlib.sha256(f"{digest(plan)} {job}".encode()).hexdigest()[:8]
    readable = re.sub("[^a-z0-9]+", "-", job)[:40].strip("-")
    return f"coretide-{readable}-{own}-{attempt}"


def namespace_manifest(namespace: str) -> Manifest:
    """
    The namespace that everything is in.

    :param namespace: its name
    """
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": namespace, "labels": {MANAGED_BY: US}},
    }


def job_manifest(
    plan: ClusterPlan, cluster: ClusterScenario, place: JobPlace, attempt: int, namespace: str
) -> Manifest:
    """
    One attempt of one job.

    Kubernetes itself never retries it: a second pod of the same Job would hide what happened to the
    first.

    :param plan: the plan
    :param cluster: its scenario
    :param place: the job's place
    :param attempt: its number, from 1
    :param namespace: where it is created
    """
    job = cluster.job(place.name)
    labels = labels_of(plan) | {JOB: place.name, ATTEMPT: str(attempt)}
    vcpus = ",".join(map(str, sorted(place.vcpus)))
    memory = f"{job.memory_mib}Mi"
    cpu = f"{max(1, round(1000 * CPU_PART * cpu_share(plan, place)))}m"
    container = {
        "name": "job",
        "image": job.image,
        "command": ["taskset", "-c", vcpus, *job.launch_command(place.threads)],
        "resources": {
            "requests": {"cpu": cpu, "memory": memory},
            "limits": {"memory": memory},
        },
    }
    tolerations = [
        {
            "key": taint,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": LOST_NODE_S,
        }
        for taint in NODE_TAINTS
    ]
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [
                {
                    "key": cluster.label,
                    "operator": "In",
                    "values": [place.node],
                }
            ]}]
        }}},
        "tolerations": tolerations,
        "containers": [container],
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": attempt_name(plan, place.name, attempt),
            "namespace": namespace,
            "labels": labels,
        },
        "spec": {
            "backoffLimit": 0,
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


def cpu_share(plan: ClusterPlan, place: JobPlace) -> float:
    """
    The vCPUs' worth that a job has of its vCPUs, beside those that may run there with it [vCPUs].

    :param plan: the plan
    :param place: the job's place
    """
    before = predecessors(plan.jobs)
    beside = [
        other
        for other in plan.on(place.node)
        if other.name == place.name
        or (other.name not in before[place.name] and place.name not in before[other.name])
    ]
    return sum(1.0 / sum(vcpu in other.vcpus for other in beside) for vcpu in place.vcpus)
