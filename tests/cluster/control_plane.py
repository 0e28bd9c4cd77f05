"""
A Kubernetes control plane of real programs, whose nodes are kwok's.

etcd, kube-apiserver, kube-scheduler and kube-controller-manager are what a cluster runs; kwok plays
the kubelets: a pod runs for as long as a stage says, and ends.
"""

import contextlib
import csv
import json
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.cluster.cluster_check import is_ready
from deploy.cluster.kube_api import KubeApi, connect
from deploy.cluster.manifests import JOB
from env.cluster.cluster_scenario import ClusterScenario
from tests.cluster.control_plane_build import build
from tests.deploy.cluster.kubeconfig import write_kubeconfig

TOKEN = "only-for-this-test"
READY_S = 90.0
CONTROLLERS = "job-controller,pod-garbage-collector-controller,node-lifecycle-controller,"
CONTROLLERS += "taint-eviction-controller,garbage-collector-controller,namespace-controller,"
CONTROLLERS += "daemonset-controller"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class ControlPlane:
    """
    A running control plane.

    :param folder: of its files
    :param kubeconfig: how to reach it
    """

    def __init__(self, folder: Path, kubeconfig: Path):
        self.folder, self.kubeconfig = folder, kubeconfig

    def api(self) -> KubeApi:
        """A connection of its own."""
        return connect(self.kubeconfig)

    @property
    def address(self) -> str:
        """Of the API server."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        return str(config["clusters"][0]["cluster"]["server"])

    def add_nodes(self, cluster: ClusterScenario) -> None:
        """
        Add the nodes of a scenario.

        :param cluster: the scenario
        """
        for name in cluster.node_names:
            self.add_node(cluster, name)

    def add_node(self, cluster: ClusterScenario, name: str) -> None:
        """
        Add one node, and wait until kwok has made it ready.

        :param cluster: the scenario
        :param name: the node's
        """
        machine = cluster.type_of(name).machine
        resources = {
            "cpu": str(machine.vcpus),
            "memory": f"{machine.memory_mib + 700}Mi",
            "pods": "110",
        }
        self.request(
            "POST",
            "/api/v1/nodes",
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": f"{name}-abcd",
                    "labels": {cluster.label: name},
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                },
                "status": {"capacity": resources, "allocatable": resources, "phase": "Running"},
            },
        )
        self.await_node(f"{name}-abcd")

    def await_node(self, name: str) -> None:
        """
        Wait until a node is ready.

        :param name: its name
        :raises RuntimeError: if it does not get ready
        """
        end_s = time.monotonic() + READY_S
        while not any(
            one["metadata"]["name"] == name and is_ready(one)
            for one in self.request("GET", "/api/v1/nodes")["items"]
        ):
            if time.monotonic() > end_s:
                raise RuntimeError(f"node {name} does not get ready")
            time.sleep(0.1)

    def request(self, method: str, path: str, content: Any = None, kind: str = "json") -> Any:
        """
        What the API server answers to a request of the test's own.

        :param method: GET, POST, ...
        :param path: from the server's root
        :param content: what is sent, if anything
        :param kind: of content: json, or merge-patch+json
        """
        asked = urllib.request.Request(
            self.address + path,
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": f"application/{kind}"},
        )
        unchecked = ssl._create_unverified_context()
        with urllib.request.urlopen(asked, context=unchecked, timeout=10) as answer:
            return json.load(answer)


def write_stages(durations_s: Mapping[str, float], path: Path) -> None:
    """
    Say what kwok does with nodes and pods: a pod runs at once, and ends when its time is over.

    One that is no job's runs for an hour.

    :param durations_s: seconds that each job runs
    :param path: the file to write
    """
    of_job = json.dumps({name: f"{seconds:.3f}s" for name, seconds in durations_s.items()})
    duration = f'{of_job}[.metadata.labels["{JOB}"] // ""] // "1h"'
    template = Path(__file__).with_name("stages.yaml").read_text(encoding="utf-8")
    path.write_text(template.replace("JOB_DURATION", duration.replace("'", "''")))


@contextlib.contextmanager
def control_plane(folder: Path, durations_s: Mapping[str, float]) -> Iterator[ControlPlane]:
    """
    A control plane that runs until the block ends.

    :param folder: of its files
    :param durations_s: seconds that each job's pod runs
    :raises RuntimeError: in one line, if its programs cannot be built
    """
    programs = build()
    etcd, peer, port = free_port(), free_port(), free_port()
    server = f"https://127.0.0.1:{port}"
    kubeconfig = write_kubeconfig(folder / "kubeconfig", server, TOKEN, checked=False)
    with (folder / "tokens.csv").open("w") as tokens:
        csv.writer(tokens).writerow([TOKEN, "admin", "1", "system:masters"])
    key = folder / "key.pem"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    write_stages(durations_s, folder / "stages.yaml")
    etcd_url, peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
    client = (f"--kubeconfig={kubeconfig}", f"--cert-dir={folder}/certs", "--leader-elect=false")
    with contextlib.ExitStack() as stack:

        def start(name: str, *flags: str) -> None:
            stack.enter_context(running([str(programs / name), *flags], folder / f"{name}.log"))

        start(
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers={etcd_url}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder}/certs",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://test",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={folder}/tokens.csv",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        plane = ControlPlane(folder, kubeconfig)
        _await_ready(plane)
        start(
            "kube-controller-manager",
            *client,
            f"--secure-port={free_port()}",
            f"--controllers={CONTROLLERS}",
        )
        start("kube-scheduler", *client, f"--secure-port={free_port()}")
        start(
            "kwok",
            f"--kubeconfig={kubeconfig}",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--config={folder}/stages.yaml",
            "--node-lease-duration-seconds=40",
            f"--server-address=127.0.0.1:{free_port()}",
        )
        yield plane


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[None]:
    """
    Run a program until the block ends.

    :param command: the program and its arguments
    :param log: where what it says goes
    """
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as program:
        try:
            yield
        finally:
            program.kill()


def _await_ready(plane: ControlPlane) -> None:
    """Wait for the API server, which has no event for it but its answer."""
    end_s = time.monotonic() + READY_S
    while True:
        try:
            plane.request("GET", "/api/v1/namespaces/default")
            return
        except (OSError, ValueError):
            if time.monotonic() > end_s:
                log = (plane.folder / "kube-apiserver.log").read_text(errors="replace")
                raise RuntimeError(f"kube-apiserver does not answer: {log[-500:]}") from None
            time.sleep(0.2)
