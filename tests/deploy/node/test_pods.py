"""What the API says of a node's pods is read, and refused in one line."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deploy.node.pods import CONFIG_HASH, SERVICE, read_batch, read_service
from deploy.records.proof import CANCELLED
from env.errors import InputError
from env.scenario import load_scenario
from tests.deploy.node.pod_objects import a_pod, a_service

UID = "12345678-9abc-def0-1234-56789abcdef0"
MACHINE = load_scenario("cca-2025").machine


def test_the_service_is_read_once_it_runs() -> None:
    pod = a_service("memcached", UID, "10.0.0.7", slo="0.8ms", port="11212")
    found = read_service([a_pod("one", UID), pod])
    assert found is not None
    assert (found.address, found.port, found.slo_us) == ("10.0.0.7", 11212, 800.0)
    assert read_service([]) is None
    for change in ({"phase": "Pending"}, {"podIP": ""}):
        assert read_service([pod | {"status": pod["status"] | change}]) is None
    going = pod["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert read_service([pod | {"metadata": going}]) is None
    assert read_service([a_service("memcached", UID, "10.0.0.7")]).slo_us is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        ([a_service(name, UID, "10.0.0.7") for name in "ab"], "default/a, default/b: only one"),
        ([a_service("a", UID, "10.0.0.7", slo="fast")], "slo: 'fast' is no time"),
        ([a_service("a", UID, "10.0.0.7", slo="0ms")], "slo: '0ms' is no time"),
        ([a_service("a", UID, "10.0.0.7", port="70000")], "port: '70000' is not from 1 to 65535"),
        ([a_service("a", UID, "10.0.0.7", port="²")], "port: '²' is not from 1 to 65535"),
    ],
)
def test_a_service_that_cannot_be_is_one_line(pods: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        read_service(pods)
    assert "\n" not in str(refused.value)


def test_batch_pods_become_jobs() -> None:
    limits = {"limits": {"cpu": "1500m", "memory": "300Mi"}, "requests": {"cpu": "100m"}}
    pods = [
        a_pod("limited", UID, resources=limits),
        a_pod("said", UID, threads="3"),
        a_pod("waits", UID, phase="Pending"),
        a_pod("done", UID, phase="Succeeded", exit_code=0),
        a_pod("failed", UID, phase="Failed", exit_code=9),
        a_pod("evicted", UID, phase="Failed"),
        a_service("memcached", UID, "10.0.0.7"),
        a_pod("neither", UID, "other"),
    ]
    found, said = read_batch(pods, MACHINE)
    assert said == []
    codes = {pod.name.removeprefix("default/"): pod.exit_code for pod in found}
    assert codes == {"limited": None, "said": None, "done": 0, "failed": 9, "evicted": CANCELLED}
    assert (found[0].job.threads, found[0].job.memory_mib) == ((2,), 300)
    assert found[1].job.threads == (3,)
    assert found[0].job.name == "limited-12345678"


@pytest.mark.parametrize(
    "pod",
    [
        a_pod("a", UID, threads="0"),
        a_pod("a", UID, threads="99"),
        a_pod("a", UID, resources={"limits": {"cpu": "much"}}),
        a_pod("A pod", UID),
    ],
)
def test_a_batch_pod_that_cannot_be_is_left_alone(pod: dict[str, Any]) -> None:
    found, (said,) = read_batch([pod], MACHINE)
    assert found == [] and "left alone" in said and "\n" not in said


def test_a_pod_from_a_file_is_known_by_its_hash() -> None:
    pod = a_service("memcached", UID, "10.0.0.7")
    pod["metadata"]["annotations"][CONFIG_HASH] = "f" * 32
    found = read_service([pod])
    assert found is not None and found.uid == "f" * 32


def test_a_label_of_both_classes_is_impossible() -> None:
    assert read_batch([a_pod("a", UID, SERVICE)], MACHINE) == ([], [])
