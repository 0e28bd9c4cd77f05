"""
A node whose pods are real: a kubelet of the control plane's version, with Debian's containerd.

Its images are made of this machine's files and its pods are in the machine's network, so neither a
registry nor a network plugin is needed.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

import docker
import psutil
import yaml

from deploy.assembly import usable_hierarchy
from deploy.engines import daemon, images
from deploy.jobs.runtimes import kill_all
from deploy.linux.cgroups import JobGroup, find_hierarchy, members
from tests.cluster.control_plane import ControlPlane, free_port, running
from tests.cluster.control_plane_build import build

NAME = "real"
IMAGE = "coretide-test-pods:1"
ROOT_GROUP = PurePosixPath("/ct-test-kubelet")
START_S = 60.0


def missing() -> str:
    """What this machine lacks for such a node, in words; empty if it lacks nothing."""
    if os.geteuid() != 0:
        return "a kubelet needs root"
    if usable_hierarchy() is None or find_hierarchy().version != 1:
        return "the node of this test needs control groups of version 1 that can be written"
    programs = ("containerd", "ctr", "runc", "dockerd", "memcached", "stress-ng", "busybox")
    lacks = [name for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(lacks)}" if lacks else ""


@contextlib.contextmanager
def real_node(folder: Path, plane: ControlPlane, labels: str) -> Iterator[None]:
    """
    A node named `NAME` that is ready until the block ends.

    :param folder: of its files; a short path, for its sockets
    :param plane: the cluster that it joins
    :param labels: the node's, as `kubelet --node-labels` takes them
    """
    programs = build(("kubelet",))
    archive = folder / "image.tar"
    _save_image(folder, archive)
    socket = folder / "containerd.sock"
    _write_settings(folder, socket)
    hierarchy = find_hierarchy()
    group = JobGroup(hierarchy, ROOT_GROUP, 1024)
    mounts = [one for one in Path("/sys/fs/cgroup").iterdir() if not one.is_symlink()]
    with contextlib.ExitStack() as stack:
        group.create()
        for mount in mounts:  # the kubelet wants its root in every hierarchy
            (mount / ROOT_GROUP.name).mkdir(exist_ok=True)
        stack.callback(_remove_groups, mounts)
        command = ["containerd", "--config", str(folder / "containerd.toml")]
        stack.enter_context(running(command, folder / "containerd.log"))
        stack.callback(_end_pods, folder, socket)
        ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
        _until(lambda: subprocess.run([*ctr, "version"], capture_output=True).returncode == 0)
        given = [*ctr, "images", "import", "--snapshotter", "native", str(archive)]
        subprocess.run(given, check=True, capture_output=True)
        command = [
            str(programs / "kubelet"),
            f"--config={folder}/kubelet.yaml",
            f"--kubeconfig={plane.kubeconfig}",
            f"--hostname-override={NAME}",
            f"--node-labels={labels}",
            f"--root-dir={folder}/kubelet",
            f"--cert-dir={folder}/kubelet/pki",
        ]
        stack.enter_context(running(command, folder / "kubelet.log"))
        plane.await_node(NAME)
        yield


def _save_image(folder: Path, archive: Path) -> None:
    """One image for all: what pods run, and what holds a pod's place."""
    files = images.image_files({**images.PROGRAMS, "memcached": "memcached"})
    files |= {name: Path("/", name) for name in ("etc/passwd", "etc/group")}
    images.write_archive(files, folder / "files.tar")
    repository, tag = IMAGE.split(":")
    forever = 'ENTRYPOINT ["/usr/bin/busybox", "sleep", "1000000"]'
    with daemon.running(folder / "docker") as own:
        client = docker.DockerClient(base_url=own.url)
        client.api.import_image_from_file(
            str(folder / "files.tar"),
            repository=repository,
            tag=tag,
            changes=["ENV PATH=/usr/bin:/bin", forever],
        )
        with archive.open("wb") as file:
            file.writelines(client.images.get(IMAGE).save(named=True))
        client.close()


def _write_settings(folder: Path, socket: Path) -> None:
    plugins = folder / "cni"
    plugins.mkdir()
    alone = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}
    (plugins / "10-none.conflist").write_text(json.dumps(alone))
    (folder / "containerd.toml").write_text(f'''version = 2
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/{IMAGE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{plugins}"
''')
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": str(ROOT_GROUP),
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "1Mi"},
        "imageGCHighThresholdPercent": 100,
        "containerRuntimeEndpoint": f"unix://{socket}",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": "127.0.0.1",
        "port": free_port(),
        "healthzPort": 0,
        "podLogsDir": f"{folder}/logs",
        "resolvConf": "",
    }
    (folder / "kubelet.yaml").write_text(yaml.safe_dump(settings))


def _end_pods(folder: Path, socket: Path) -> None:
    """End what the kubelet has left running, and whoever looks after it; nothing stays mounted."""
    hierarchy = find_hierarchy()
    for each in hierarchy.folders(ROOT_GROUP):
        for file in each.rglob("freezer.state"):
            with contextlib.suppress(OSError):  # the topmost cannot be frozen
                file.write_text("THAWED")
    kill_all(lambda: members(hierarchy, ROOT_GROUP))
    for process in psutil.process_iter(["name", "cmdline"]):
        command = process.info["cmdline"] or []
        if process.info["name"].startswith("containerd-shim") and str(socket) in command:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for mount in sorted((line.split()[1] for line in lines), reverse=True):
        if Path(mount).is_relative_to(folder):
            # What is gone already went with its container.
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


def _remove_groups(mounts: list[Path]) -> None:
    for mount in mounts:
        for folder, *_ in os.walk(mount / ROOT_GROUP.name, topdown=False):
            _until(partial(_removed, Path(folder)))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # its processes are still at ending
        group.rmdir()
    return not group.exists()


def _until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > end_s:
            raise RuntimeError(f"not so within {START_S:g} s")
        time.sleep(0.1)
