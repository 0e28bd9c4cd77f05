"""The command line of a run on a cluster: manifests without one, bad input in one line."""

import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from env.cluster.plan import PLAN_FOLDER
from env.scenario import SCENARIO_FOLDER
from tests.deploy.cluster.kubeconfig import write_kubeconfig

ROOT = Path(__file__).resolve().parents[3]


def deploy(*given: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "deploy.py", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_dry_run_prints_a_namespace_and_a_job_for_each_of_the_plan() -> None:
    done = deploy("--cluster", "group-031", "--dry-run")
    assert done.returncode == 0 and done.stderr == ""
    manifests = list(yaml.safe_load_all(done.stdout))
    assert [one["kind"] for one in manifests] == ["Namespace", *["Job"] * 7]
    assert "&id" not in done.stdout


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """Of a server that nobody is: its port is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return write_kubeconfig(tmp_path / "kubeconfig", f"http://127.0.0.1:{port}")


@pytest.fixture
def refusing_server(tmp_path: Path) -> Iterator[int]:
    """The port of a server with a certificate of its own that refuses whatever is asked."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


class Refusal(BaseHTTPRequestHandler):
    """No one may do anything."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *given: object) -> None:
        """Nothing is written."""


def one_line(done: "subprocess.CompletedProcess[str]", *said: str) -> None:
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("coretide: ")
    for words in said:
        assert words in done.stderr


def test_a_server_that_does_not_answer_is_one_line(kubeconfig: Path) -> None:
    pytest.importorskip("kubernetes")
    done = deploy("--cluster", "group-031", "--kubeconfig", str(kubeconfig))
    one_line(done, "http://127.0.0.1:", "namespace coretide: no answer (connection refused)")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_refusal_is_one_line_where_certificates_are_not_checked(
    refusing_server: int, tmp_path: Path
) -> None:
    pytest.importorskip("kubernetes")
    server = f"https://127.0.0.1:{refusing_server}"
    path = write_kubeconfig(tmp_path / "kubeconfig", server, checked=False)
    one_line(deploy("--cluster", "group-031", "--kubeconfig", str(path)), server, "refused (403)")


@pytest.mark.parametrize("content", [None, "{"])
def test_what_is_no_kubeconfig_is_one_line(content: str | None, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    one_line(deploy("--cluster", "group-031", "--kubeconfig", str(path)), str(path))


def test_a_plan_that_does_not_fit_its_nodes_is_one_line(tmp_path: Path) -> None:
    plan = yaml.safe_load((PLAN_FOLDER / "group-031.yaml").read_text())
    plan["jobs"][0]["vcpus"] = [9]
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    one_line(deploy("--cluster", str(path)), "node-d-4core has no vCPU 9; allowed are 0 to 3")


def test_a_job_without_an_image_is_one_line(tmp_path: Path) -> None:
    cluster = yaml.safe_load((SCENARIO_FOLDER / "cca-part3.yaml").read_text())
    del cluster["jobs"][1]["image"]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    done = deploy("--cluster", "group-031", "--cluster-scenario", str(path))
    one_line(done, "jobs.canneal.image: is required")
