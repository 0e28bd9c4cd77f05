"""
What has become of each attempt, read from the cluster's own objects.

Nothing else is remembered: a client that was killed finds everything here again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from deploy.cluster.manifests import ATTEMPT, GIVEN_UP, JOB

WAITING, RUNNING, SUCCEEDED, FAILED = "waiting", "running", "succeeded", "failed"


@dataclass(frozen=True)
class JobAttempt:
    """
    One attempt of a job.

    :param job: the job
    :param number: which of its attempts, from 1
    :param name: of its Kubernetes Job
    :param state: `WAITING`, `RUNNING`, `SUCCEEDED` or `FAILED`
    :param created_s: when it was created [s of the epoch]
    :param why: why it waits or has failed
    :param pod: its pod's name, once there is one
    :param node: the node that the pod is bound to
    :param started_s: when its container started [s of the epoch]
    :param ended_s: when it ended [s of the epoch]
    :param exit_code: of its container
    """

    job: str
    number: int
    name: str
    state: str
    created_s: float
    why: str = ""
    pod: str = ""
    node: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None


@dataclass
class ClusterObjects:
    """
    The Jobs and pods of ours as last seen, by name.

    :param jobs: the Kubernetes Jobs
    :param pods: the pods
    """

    jobs: dict[str, Any] = field(default_factory=dict)
    pods: dict[str, Any] = field(default_factory=dict)

    def attempts(self) -> dict[str, list[JobAttempt]]:
        """The attempts of each job that has any, the first one first."""
        found: dict[str, list[JobAttempt]] = {}
        for job in self.jobs.values():
            attempt = read_attempt(job, self.pods.values())
            found.setdefault(attempt.job, []).append(attempt)
        for attempts in found.values():
            attempts.sort(key=lambda one: one.number)
        return found


def read_attempt(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> JobAttempt:
    """
    Read an attempt.

    :param job: its Kubernetes Job
    :param pods: all pods of ours
    """
    meta = job["metadata"]
    labels = meta["labels"]
    own = [pod for pod in pods if _owner(pod) == meta["name"]]
    pod = max(own, key=lambda one: str(one["metadata"].get("creationTimestamp")), default=None)
    status = pod.get("status", {}) if pod else {}
    container: Mapping[str, Any] = next(iter(status.get("containerStatuses", ())), {})
    terminated = container.get("state", {}).get("terminated") or {}
    running = container.get("state", {}).get("running") or {}
    done = _condition(job, "Complete")
    given_up = meta.get("annotations", {}).get(GIVEN_UP, "")
    failed = _condition(job, "Failed")
    started_s = epoch_s(terminated.get("startedAt") or running.get("startedAt"))
    ended_s = epoch_s(terminated.get("finishedAt"))
    why = ""
    # Two watches tell of Job and pod: a pod's end may be told after what its Job makes of it.
    untold = (
        pod is not None
        and status.get("phase") in ("Pending", "Running")
        and not pod["metadata"].get("deletionTimestamp")
        and not _condition(pod, "DisruptionTarget")
    )
    if (done or failed) and untold:
        state = RUNNING
    elif done:
        state = SUCCEEDED
        ended_s = ended_s or epoch_s(job["status"].get("completionTime"))
        started_s = started_s or epoch_s(job["status"].get("startTime"))
    elif given_up or failed:
        state, why = FAILED, given_up or _why_failed(pod, status, terminated, failed)
        ended_s = ended_s or epoch_s((failed or {}).get("lastTransitionTime"))
    elif running or status.get("phase") == "Running":
        state = RUNNING
        started_s = started_s or epoch_s(status.get("startTime"))
    else:
        state, why = WAITING, _why_waiting(pod, container)
    return JobAttempt(
        labels[JOB],
        int(labels[ATTEMPT]),
        meta["name"],
        state,
        epoch_s(meta.get("creationTimestamp")) or 0.0,
        why,
        pod["metadata"]["name"] if pod else "",
        pod.get("spec", {}).get("nodeName", "") if pod else "",
        started_s,
        ended_s,
        terminated.get("exitCode", 0 if done else None),
    )


def epoch_s(stamp: Any) -> float | None:
    """
    A moment of the cluster's [s of the epoch].

    :param stamp: as its objects have it, or nothing
    """
    return datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).timestamp() if stamp else None


def _owner(pod: Mapping[str, Any]) -> str:
    return next((one["name"] for one in pod["metadata"].get("ownerReferences", ())), "")


def _condition(one: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """A condition that is true of an object."""
    conditions = one.get("status", {}).get("conditions") or ()
    found = (each for each in conditions if each["type"] == kind and each["status"] == "True")
    return next(found, None)


def _why_failed(
    pod: Mapping[str, Any] | None,
    status: Mapping[str, Any],
    terminated: Mapping[str, Any],
    failed: Mapping[str, Any] | None,
) -> str:
    disrupted = _condition(pod, "DisruptionTarget") if pod else None
    if terminated.get("reason") == "OOMKilled":
        return "killed for memory (OOMKilled)"
    if status.get("reason"):  # Evicted, NodeLost, ...
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    if disrupted:
        return f"{disrupted.get('reason', '')}: {disrupted.get('message', '')}".rstrip(": ")
    if terminated:
        return f"exit code {terminated.get('exitCode')}"
    if pod is None or pod["metadata"].get("deletionTimestamp"):
        return "its pod was deleted: it was evicted, or its node went away"
    return str((failed or {}).get("message") or (failed or {}).get("reason") or "it failed")


def _why_waiting(pod: Mapping[str, Any] | None, container: Mapping[str, Any]) -> str:
    """Why a pod does not run yet, where that is not just a matter of moments."""
    if pod is None:
        return ""
    waiting = container.get("state", {}).get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"no node for it: {condition.get('message', '')}".rstrip(": ")
    return ""
