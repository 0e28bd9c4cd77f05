"""Which pods are tended: those whose control groups stand beside the service's."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from deploy.linux.cgroups import Hierarchy
from deploy.node.node_pods import NodePods
from env.errors import InputError
from env.scenario import load_scenario
from tests.deploy.node.pod_objects import a_pod, a_service

FILES = {
    "cpu.idle": "0\n",
    "cpu.weight": "50\n",
    "cpu.max": "max 100000\n",
    "cpuset.cpus": "\n",
    "cgroup.freeze": "0\n",
}
SERVICE, BATCH = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))


def make_group(mount: Path, quality: str, uid: str) -> Path:
    """A pod's group as the systemd driver names it, on version 2."""
    parent = mount / "kubepods.slice" / f"kubepods-{quality}.slice"
    group = parent / f"kubepods-{quality}-pod{uid.replace('-', '_')}.slice"
    group.mkdir(parents=True)
    for name, text in FILES.items():
        (group / name).write_text(text)
    return group


@pytest.fixture
def pods(tmp_path: Path) -> NodePods:
    hierarchy = Hierarchy(2, dict.fromkeys(("cpu", "cpuset"), tmp_path))
    return NodePods("here", load_scenario("cca-2025").machine, hierarchy)


def test_a_pod_is_tended_once_its_group_is_there(pods: NodePods, tmp_path: Path) -> None:
    told = {"s": a_service("s", SERVICE, "10.0.0.7"), "b": a_pod("b", BATCH)}
    pods.see(told)
    assert pods.seen.service is None, "it has no group yet"
    make_group(tmp_path, "burstable", SERVICE)
    pods.see(told)
    service, beside = pods.await_service(lambda now_s: None)
    assert service.uid == SERVICE
    assert [group for _, group in pods.seen.batch] == [None]
    group = make_group(tmp_path, "burstable", BATCH)
    (group.parent / beside.name / "cpu.weight").write_text("79\n")
    pods.see(told)
    ((pod, found),) = pods.seen.batch
    assert pod.uid == BATCH and found is not None
    assert found.hierarchy.folder(found.path) == group and found.normal_weight == 79
    del told["s"]
    pods.see(told)
    assert (pods.seen.service, pods.seen.batch) == (None, ())


def test_a_pod_of_another_class_of_service_is_left_alone(pods: NodePods, tmp_path: Path) -> None:
    make_group(tmp_path, "burstable", SERVICE)
    make_group(tmp_path, "besteffort", BATCH)
    pods.see({"s": a_service("s", SERVICE, "10.0.0.7"), "b": a_pod("b", BATCH)})
    assert pods.seen.batch == ()
    (said,) = pods.seen.said
    assert "default/b: its QoS class" in said and "left alone" in said


def test_a_group_that_cannot_be_used_is_said(pods: NodePods, tmp_path: Path) -> None:
    make_group(tmp_path, "burstable", SERVICE)
    (make_group(tmp_path, "burstable", BATCH) / "cgroup.freeze").unlink()
    pods.see({"s": a_service("s", SERVICE, "10.0.0.7"), "b": a_pod("b", BATCH)})
    (said,) = pods.seen.said
    assert "cgroup.freeze is not there; it is left alone" in said


def test_who_waits_for_a_service_that_cannot_be_is_told(pods: NodePods) -> None:
    pods.see({"s": a_service("s", SERVICE, "10.0.0.7", slo="fast")})
    with pytest.raises(InputError, match="slo"):
        pods.await_service(lambda now_s: None)
