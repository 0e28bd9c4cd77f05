"""What has become of an attempt is read from its Job and its pod."""

from typing import Any

import pytest

from deploy.cluster.attempts import (
    FAILED,
    RUNNING,
    SUCCEEDED,
    WAITING,
    ClusterObjects,
    read_attempt,
)
from deploy.cluster.manifests import ATTEMPT, GIVEN_UP, JOB

STAMP = "2026-01-01T00:00:0{}Z"


def a_job(number: int = 1, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"coretide-vips-{number}",
            "creationTimestamp": STAMP.format(0),
            "labels": {JOB: "vips", ATTEMPT: str(number)},
        },
        "status": status,
    }


def a_pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "coretide-vips-1-xyz",
            "creationTimestamp": STAMP.format(1),
            "ownerReferences": [{"name": "coretide-vips-1"}],
        },
        "spec": {"nodeName": "c"},
        "status": status,
    }


def condition(kind: str, **more: str) -> list[dict[str, str]]:
    return [{"type": kind, "status": "True", **more}]


def ended(**terminated: Any) -> list[dict[str, Any]]:
    times = {"startedAt": STAMP.format(2), "finishedAt": STAMP.format(9)}
    return [{"state": {"terminated": times | terminated}}]


def test_a_job_that_has_succeeded_has_its_containers_times() -> None:
    pod = a_pod(phase="Succeeded", containerStatuses=ended(exitCode=0))
    attempt = read_attempt(a_job(conditions=condition("Complete")), [pod])
    assert (attempt.state, attempt.node, attempt.exit_code) == (SUCCEEDED, "c", 0)
    assert attempt.started_s is not None and attempt.ended_s is not None
    assert attempt.ended_s - attempt.started_s == 7.0
    assert attempt.started_s - attempt.created_s == 2.0


def test_a_pod_that_runs_is_running() -> None:
    state = [{"state": {"running": {"startedAt": STAMP.format(3)}}}]
    attempt = read_attempt(a_job(), [a_pod(phase="Running", containerStatuses=state)])
    assert (attempt.state, attempt.why) == (RUNNING, "")


FAILED_JOB = a_job(conditions=condition("Failed", reason="BackoffLimitExceeded"))


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([a_pod(containerStatuses=ended(exitCode=3))], "exit code 3"),
        (
            [a_pod(containerStatuses=ended(exitCode=137, reason="OOMKilled"))],
            "killed for memory (OOMKilled)",
        ),
        (
            [a_pod(reason="Evicted", message="low on memory")],
            "Evicted: low on memory",
        ),
        (
            [a_pod(conditions=condition("DisruptionTarget", reason="DeletionByPodGC"))],
            "DeletionByPodGC",
        ),
        ([], "its pod was deleted: it was evicted, or its node went away"),
    ],
)
def test_a_failure_says_why(pods: list[dict[str, Any]], why: str) -> None:
    attempt = read_attempt(FAILED_JOB, pods)
    assert (attempt.state, attempt.why) == (FAILED, why)


def test_an_end_counts_once_the_pods_own_is_known() -> None:
    pod = a_pod(phase="Running", containerStatuses=[{"state": {"running": {}}}])
    assert read_attempt(FAILED_JOB, [pod]).state == RUNNING
    pod["metadata"]["deletionTimestamp"] = STAMP.format(5)
    assert read_attempt(FAILED_JOB, [pod]).state == FAILED


def test_an_attempt_that_was_given_up_has_failed_for_the_reason_that_it_carries() -> None:
    job = a_job(conditions=condition("Suspended"))
    job["metadata"]["annotations"] = {GIVEN_UP: "no node"}
    attempt = read_attempt(job, [])
    assert (attempt.state, attempt.why) == (FAILED, "no node")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({}, ""),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes"}]},
            "no node for it: 0/4 nodes",
        ),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ErrImagePull",
        ),
    ],
)
def test_a_pod_that_waits_says_why_where_that_lasts(status: dict[str, Any], why: str) -> None:
    attempt = read_attempt(a_job(), [a_pod(phase="Pending", **status)])
    assert (attempt.state, attempt.why) == (WAITING, why)


def test_the_attempts_of_a_job_are_in_their_order() -> None:
    jobs = {str(number): a_job(number) for number in (3, 1, 2)}
    (tries,) = ClusterObjects(jobs).attempts().values()
    assert [attempt.number for attempt in tries] == [1, 2, 3]
