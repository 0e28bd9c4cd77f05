"""
A node's pods, tended: real processes in control groups as a kubelet lays them out.

memcached is in a process namespace of its own, as in a container, and calls itself number 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.jobs.runtimes import kill_all
from deploy.linux import service_process
from deploy.linux.cgroups import JobGroup, members
from deploy.linux.service_process import number_outside
from deploy.node.pod_groups import PodGroup

pytest.importorskip("kubernetes")

from tests.deploy.cluster.kubeconfig import write_kubeconfig
from tests.deploy.node.pod_objects import a_pod, a_service
from tests.live.conftest import PATIENCE, Deployment, needs_groups
from tests.live.node.pod_api import NODE, PodApi

pytestmark = [
    needs_groups,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

BURST = ["stress-ng", "--quiet", "--cpu", "1"]


def awaited(what: Callable[[], bool], said: str, limit_s: float = 20.0) -> None:
    give_up_s = time.monotonic() + limit_s * PATIENCE
    while not what():
        assert time.monotonic() < give_up_s, said
        time.sleep(0.02)


class Node:
    """
    Pods in control groups of their own, below a root that nobody else has.

    :param driver: who names the groups, cgroupfs or systemd
    """

    def __init__(self, folder: Path, driver: str):
        hierarchy = usable_hierarchy()
        assert hierarchy is not None
        self.hierarchy, self.driver = hierarchy, driver
        self.root = PurePosixPath(f"/ct-test-{secrets.token_hex(4)}")
        self.api = PodApi()
        server = f"http://127.0.0.1:{self.api.server_port}"
        self.kubeconfig = write_kubeconfig(folder / "kubeconfig", server)
        self.pods: dict[str, dict[str, Any]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def make(self, uid: str) -> PodGroup:
        """The groups of a pod and of its container, as the driver names them."""
        name = secrets.token_hex(32)
        if self.driver == "systemd":
            pod_name = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
            path = self.root / "kubepods.slice" / "kubepods-burstable.slice" / pod_name
            container = path / f"cri-containerd-{name}.scope"
        else:
            path = self.root / "kubepods" / "burstable" / f"pod{uid}"
            container = path / name
        for group in reversed((container, *list(container.parents)[:-1])):
            JobGroup(self.hierarchy, group, 1024).create()
        pod = PodGroup(self.hierarchy, path, 0)
        pod.weight_file.write_text("512" if self.hierarchy.version == 1 else "50")
        return pod

    def container_of(self, pod: PodGroup) -> JobGroup:
        (folder,) = {one.name for one in self.hierarchy.folder(pod.path).iterdir() if one.is_dir()}
        return JobGroup(self.hierarchy, pod.path / folder, 0)

    def run(self, name: str, command: list[str]) -> tuple[PodGroup, subprocess.Popen[bytes]]:
        """A batch pod that runs a command."""
        uid = str(uuid.uuid4())
        group = self.make(uid)
        wait = ["sh", "-c", 'read go; exec "$@"', "sh", *command]
        process = subprocess.Popen(wait, stdin=subprocess.PIPE, start_new_session=True)
        self._processes.append(process)
        self.container_of(group).join(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        self.pods[name] = a_pod(name, uid)
        return group, process

    def serve(self, server: memcached.Memcached, **annotations: str) -> tuple[PodGroup, int]:
        """The service's pod around a memcached; its process."""
        uid = str(uuid.uuid4())
        group = self.make(uid)
        pid = number_outside(1, children(server.process))
        assert pid
        self.container_of(group).join(pid)
        notes = {"port": str(server.port), **annotations}
        self.pods["memcached"] = a_service("memcached", uid, server.host, **notes)
        return group, pid

    def tell(self) -> None:
        """Have the API say which pods there are."""
        self.api.tell(self.pods)

    def close(self) -> None:
        """End whatever runs in the pods, the frozen ones too, and remove them."""
        self.api.shutdown()
        self.api.server_close()
        for folder in self.hierarchy.folders(self.root):
            for pattern, thawed in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                for file in folder.rglob(pattern):
                    with contextlib.suppress(OSError):  # the topmost cannot be frozen
                        file.write_text(thawed)
        kill_all(partial(members, self.hierarchy, self.root))
        for process in self._processes:
            process.wait()
        group = JobGroup(self.hierarchy, self.root, 0)
        awaited(lambda: (group.remove(), not group.exists())[1], f"{self.root} is left")


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, getattr(request, "param", "cgroupfs"))
    yield made
    made.close()


@pytest.fixture
def contained() -> Iterator[memcached.Memcached]:
    """A memcached that calls itself number 1."""
    port = memcached.free_port()
    own = ("memcached", "-l", memcached.HOST, "-p", str(port), "-t", "2", "-u", "nobody")
    process = subprocess.Popen(["unshare", "--pid", "--fork", *own])
    try:
        awaited(lambda: answered(port) == 1, "memcached does not answer")
        yield memcached.Memcached(memcached.HOST, port, process)
    finally:
        for pid in children(process):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def children(process: subprocess.Popen[bytes]) -> list[int]:
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return list(map(int, below.read_text().split()))


def answered(port: int) -> int:
    """What memcached says its number is; 0 while there is none."""
    with contextlib.suppress(OSError):
        return memcached.answering_pid(memcached.HOST, port)
    return 0


@pytest.fixture
def tend(
    tmp_path: Path, contained: memcached.Memcached, node: Node, scenario_file: Callable[..., Path]
) -> Iterator[Callable[..., Deployment]]:
    started: list[Deployment] = []
    scenario = scenario_file()

    def start(name: str = NODE) -> Deployment:
        options = ["--policy", "first-come", "--scenario", str(scenario)]
        options += ["--node", name, "--kubeconfig", str(node.kubeconfig)]
        started.append(Deployment(tmp_path, contained, *options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def runs(group: PodGroup) -> bool:
    """Whether what is in a pod uses CPU time."""
    before = group.cpu_s()
    time.sleep(0.2)
    return group.cpu_s() > before + 0.01


@pytest.mark.parametrize("node", ["cgroupfs", "systemd"], indirect=True)
def test_pods_are_held_started_and_left_as_they_were(
    node: Node, contained: memcached.Memcached, tend: Callable[..., Deployment]
) -> None:
    service, pid = node.serve(contained, slo="10ms")
    everywhere = service_process.affinities(pid)
    first, _ = node.run("first", BURST)
    second, process = node.run("second", BURST)
    before = [group.held() for group in (service, first, second)]
    node.tell()
    run = tend()
    run.expect("start")
    awaited(lambda: service_process.affinities(pid) != everywhere, "memcached is not moved")
    awaited(lambda: runs(first) or runs(second), "no pod goes on")
    # Somebody writes what is theirs to write: ours comes again, and theirs is put back.
    started = first if not first.frozen() else second
    (cpuset, *_) = started.cpuset_files()
    ours = cpuset.read_text()
    theirs = "0\n" if ours.strip() != "0" else "1\n"
    cpuset.write_text(theirs)
    run.expect("was written over")
    awaited(lambda: cpuset.read_text() != theirs or ours == theirs, "ours does not come again")
    process.kill()
    node.pods["second"]["status"] = a_pod("x", "y", phase="Failed", exit_code=9)["status"]
    node.tell()
    run.expect("second-.* end .*exit code 9")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.lines
    assert service_process.affinities(pid) == everywhere
    after = [group.held() for group in (service, first, second)]
    for then, now, group in zip(before, after, (service, first, second), strict=True):
        expected = then | ({str(cpuset): theirs} if group is started else {})
        assert now == expected
    assert not (run.state / "state.json").exists()


@pytest.mark.survival
def test_a_loop_that_is_killed_leaves_pods_running_and_the_next_one_begins_anew(
    node: Node, contained: memcached.Memcached, tend: Callable[..., Deployment]
) -> None:
    _, pid = node.serve(contained)
    everywhere = service_process.affinities(pid)
    groups = [node.run(name, BURST)[0] for name in ("first", "second", "third")]
    before = [group.held() for group in groups]
    node.tell()
    run = tend()
    run.expect("start")
    run.kill()
    awaited(lambda: not any(group.frozen() for group in groups), "a pod stays frozen")
    awaited(lambda: service_process.affinities(pid) == everywhere, "memcached is held")
    again = tend()
    again.expect("as it was found")
    again.expect("start")
    again.process.send_signal(signal.SIGTERM)
    again.finish()
    assert [group.held() for group in groups] == before


@pytest.mark.survival
def test_without_label_or_service_pods_are_left_alone(
    node: Node, contained: memcached.Memcached, tend: Callable[..., Deployment]
) -> None:
    _, pid = node.serve(contained)
    everywhere = service_process.affinities(pid)
    group, _ = node.run("first", BURST)
    before = group.held()
    node.tell()
    run = tend()
    run.expect("start")
    pod = node.pods.pop("first")
    node.tell()
    awaited(lambda: group.held() == before, "what is no batch pod any more is not left alone")
    node.pods["first"] = pod
    node.tell()
    awaited(lambda: group.held() != before, "what is one again is not held")
    del node.pods["memcached"]
    node.tell()
    assert run.finish() == 0, run.lines
    report = json.loads((run.report / "report.json").read_text())
    assert report["restored"] and report["policy"] == "first-come"
    assert group.held() == before
    assert service_process.affinities(pid) == everywhere


def test_a_server_that_refuses_is_one_line(node: Node, tend: Callable[..., Deployment]) -> None:
    run = tend("elsewhere")
    assert run.finish() == 2
    (line,) = run.lines
    assert "pods: refused (403)" in line
    assert not run.state.exists()
