"""Pods as the API has them."""

from __future__ import annotations

from typing import Any

from deploy.node.pods import BATCH, CLASS, SERVICE


def a_pod(
    name: str,
    uid: str,
    kind: str = BATCH,
    phase: str = "Running",
    exit_code: int | None = None,
    resources: dict[str, Any] | None = None,
    **annotations: str,
) -> dict[str, Any]:
    """A pod of one container; annotations by the last part of their key."""
    state = {"running": {}} if exit_code is None else {"terminated": {"exitCode": exit_code}}
    notes = {f"coretide.io/{key}": value for key, value in annotations.items()}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "labels": {CLASS: kind},
            "annotations": notes,
        },
        "spec": {"containers": [{"name": "c", "resources": resources or {}}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "c", "state": state}]},
    }


def a_service(name: str, uid: str, address: str, **annotations: str) -> dict[str, Any]:
    """The service's pod."""
    pod = a_pod(name, uid, SERVICE, **annotations)
    pod["status"]["podIP"] = address
    return pod
