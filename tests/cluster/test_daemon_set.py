"""
The shipped DaemonSet beside a real kubelet (`make cluster-test`): memcached and batch pods tended.

Its image needs a registry's base, so here the same command runs from this machine's own files.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes")

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.linux import service_process
from deploy.linux.cgroups import is_idle, members
from deploy.node.pod_groups import PodGroup, find_pods
from tests.cluster.control_plane import ControlPlane, control_plane
from tests.cluster.real_node import IMAGE, NAME, missing, real_node

MISSING = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

ROOT = Path(__file__).resolve().parents[2]
PODS = "/api/v1/namespaces/default/pods"
OURS = "/api/v1/namespaces/coretide/pods"
LIMIT_S = 120.0


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    # A short path, for sockets.
    with tempfile.TemporaryDirectory(prefix="ctk-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "plane").mkdir()
        with (
            control_plane(folder / "plane", {}) as plane,
            real_node(folder, plane, "coretide.io/node=tended"),
        ):
            yield plane


def awaited(what: Callable[[], Any], said: str) -> Any:
    end_s = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < end_s, said
        time.sleep(0.1)
    return found


def make_pod(plane: ControlPlane, name: str, kind: str, *command: str, **notes: str) -> None:
    container = {
        "name": "c",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "resources": {"requests": {"cpu": "100m"}},
    }
    meta = {
        "name": name,
        "labels": {"coretide.io/class": kind},
        "annotations": {f"coretide.io/{key}": value for key, value in notes.items()},
    }
    spec = {
        "nodeName": NAME,
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    content = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    plane.request("POST", PODS, content)


def group_of(plane: ControlPlane, name: str) -> PodGroup:
    """The control group that the kubelet has made of a pod, once it runs."""
    pod = awaited(
        lambda: (
            (found := plane.request("GET", f"{PODS}/{name}"))["status"]["phase"] == "Running"
            and found
        ),
        f"{name} does not run",
    )
    hierarchy = usable_hierarchy()
    assert hierarchy is not None
    return PodGroup(hierarchy, find_pods(hierarchy.mounts["cpu"])[pod["metadata"]["uid"]], 0)


def background(group: PodGroup) -> bool:
    """Whether a pod is in the idle class."""
    return is_idle(group.hierarchy, group.path)


def memcached_in(group: PodGroup, port: int) -> int:
    """The memcached of a pod, as it is called here; 0 while there is none."""
    inside = members(group.hierarchy, group.path)
    return next((one for one in inside if service_process.serves(one, port)), 0)


def apply(plane: ControlPlane, folder: Path) -> None:
    """The shipped account, rights and DaemonSet; its image is made of this machine's files."""
    paths = {
        "Namespace": "/api/v1/namespaces",
        "ServiceAccount": "/api/v1/namespaces/coretide/serviceaccounts",
        "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    }
    for one in yaml.safe_load_all((ROOT / "deploy/node/rights.yaml").read_text()):
        plane.request("POST", paths[one["kind"]], one)
    account = paths["ServiceAccount"] + "/coretide-node/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = plane.request("POST", account, request)["status"]["token"]
    folder.mkdir()
    (folder / "token").write_text(token)
    (folder / "ca.crt").write_bytes((plane.folder / "certs/apiserver.crt").read_bytes())
    made = yaml.safe_load((ROOT / "deploy/node/daemonset.yaml").read_text())
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container |= {
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [sys.executable, str(ROOT / "deploy.py")],
    }
    container["args"][container["args"].index("cca-2025")] = "local"
    port = plane.address.rpartition(":")[2]
    container["env"] += [
        {"name": "KUBERNETES_SERVICE_HOST", "value": "127.0.0.1"},
        {"name": "KUBERNETES_SERVICE_PORT", "value": port},
    ]
    where = {"/var/run/secrets/kubernetes.io/serviceaccount": str(folder)}
    python = Path(sys.executable).resolve().parents[1]
    own = ("/usr", "/lib", "/lib64", ROOT, Path(sys.prefix).resolve(), python)
    where |= {str(one): str(one) for one in own}
    for number, (inside, outside) in enumerate(where.items()):
        pod["volumes"].append({"name": f"own{number}", "hostPath": {"path": outside}})
        mount = {"name": f"own{number}", "mountPath": inside, "readOnly": True}
        container["volumeMounts"].append(mount)
    plane.request("POST", "/apis/apps/v1/namespaces/coretide/daemonsets", made)


def test_a_real_nodes_pods_are_tended_and_left_as_they_were(
    plane: ControlPlane, tmp_path: Path
) -> None:
    port = memcached.free_port()
    serve = ("memcached", "-p", str(port), "-t", "2", "-u", "nobody")
    make_pod(plane, "memcached", "service", *serve, port=str(port), slo="10ms")
    for name in ("first", "second"):
        make_pod(plane, name, "batch", "stress-ng", "--quiet", "--cpu", "1")
    service, *batch = (group_of(plane, name) for name in ("memcached", "first", "second"))
    pid = awaited(lambda: memcached_in(service, port), "no memcached in its pod")
    everywhere = service_process.affinities(pid)
    before = [group.held() for group in (service, *batch)]
    apply(plane, tmp_path / "account")
    awaited(lambda: service_process.affinities(pid) != everywhere, "memcached is not moved")
    awaited(lambda: any(one.frozen() and background(one) for one in batch), "no pod is held")
    awaited(
        lambda: any(not one.frozen() and not background(one) for one in batch), "no pod goes on"
    )
    for group, then in zip(batch, before[1:], strict=True):
        assert group.held() != then
    plane.request("DELETE", "/apis/apps/v1/namespaces/coretide/daemonsets/coretide-node")
    awaited(lambda: not plane.request("GET", OURS)["items"], "its pod does not go")
    assert [group.held() for group in (service, *batch)] == before
    assert service_process.affinities(pid) == everywhere
