"""
Plans on a real control plane (`make cluster-test`), whose pods take what is simulated, scaled.

Published plans and a planned one run to their ends in their orders, whatever happens meanwhile.
"""

import json
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from deploy.cluster import cluster_commands, placement_run
from deploy.cluster.cluster_commands import run_on_cluster
from deploy.cluster.manifests import JOB
from deploy.commands import parser
from env.cluster.cluster_scenario import load_cluster
from env.cluster.plan import ClusterPlan, load_plan
from tests.cluster.control_plane import ControlPlane, control_plane
from training.placement.plan_simulation import ClusterSimulator

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = load_cluster("cca-part3")
PLANNED = str(ROOT / "tests" / "training" / "placement" / "planned.yaml")
PLANS = ("group-031", "project-page", PLANNED)
SCALE = 30.0
"""How much faster than simulated pods run."""

CALLS_PER_S = 5.0
"""What a run may ask of the API server, even though all goes so much faster."""


def simulated_s() -> dict[str, float]:
    """How long each job runs by group 031's plan, scaled."""
    runs = ClusterSimulator(CLUSTER).run(load_plan("group-031", CLUSTER))
    seconds = (runs.end_s - runs.start_s)[0] / SCALE
    return dict(zip(CLUSTER.job_names, seconds.tolist(), strict=True))


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane"), simulated_s()) as running:
        running.add_nodes(CLUSTER)
        yield running


@pytest.fixture
def namespace() -> str:
    return f"coretide-{uuid.uuid4().hex[:8]}"


def given(plane: ControlPlane, plan: str, namespace: str, report: Path, *more: str) -> list[str]:
    return [
        *("--cluster", plan, "--kubeconfig", str(plane.kubeconfig)),
        *("--namespace", namespace, "--report", str(report), *more),
    ]


def run_here(plane: ControlPlane, plan: str, namespace: str, report: Path, *more: str) -> int:
    return run_on_cluster(parser().parse_args(given(plane, plan, namespace, report, *more)))


def start(plane: ControlPlane, plan: str, namespace: str, report: Path, *more: str) -> Any:
    command = [sys.executable, "deploy.py", *given(plane, plan, namespace, report, *more)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def jobs_of(plane: ControlPlane, namespace: str) -> list[Any]:
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    return list(plane.request("GET", path)["items"])


def pods_of(plane: ControlPlane, namespace: str) -> list[Any]:
    return list(plane.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"])


def running_pod(plane: ControlPlane, namespace: str, job: str, limit_s: float = 60.0) -> Any:
    """The pod of a job, once it runs."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        for pod in pods_of(plane, namespace):
            if pod["metadata"]["labels"][JOB] == job and pod["status"]["phase"] == "Running":
                return pod
        time.sleep(0.1)
    raise AssertionError(f"{job} does not run")


def check_report(report: Path, plan: ClusterPlan, retried: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every job has succeeded, and started after those that it waits for; the cluster's clock."""
    content: dict[str, Any] = json.loads((report / "report.json").read_text())
    assert content["restored"]
    for place in plan.jobs:
        job = content["jobs"][place.name]
        assert job["exit_code"] == 0, place.name
        assert (job["retries"] > 0) == (place.name in retried), place.name
        for name in place.after:
            assert job["decided_s"] >= content["jobs"][name]["end_s"] - 1.0
    return content


def made_pods_of(plane: ControlPlane, namespace: str) -> list[str]:
    """The Kubernetes Jobs that pods were ever made of, one for each pod."""
    events = plane.request("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
    return sorted(
        one["involvedObject"]["name"] for one in events if one["reason"] == "SuccessfulCreate"
    )


def check_started_once(plane: ControlPlane, namespace: str) -> None:
    """Of each job of a plan exactly one pod was made."""
    made = made_pods_of(plane, namespace)
    assert len(made) == len(set(made)) == len(CLUSTER.jobs), made


def beside(action: Callable[[], None]) -> threading.Thread:
    """Run something while the plan runs."""
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_runs_to_its_end_in_its_order(
    plan: str,
    plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = plane.api()
    monkeypatch.setattr(cluster_commands, "connect", lambda _: api)
    began_s = time.monotonic()
    assert run_here(plane, plan, namespace, tmp_path) == 0
    lasted_s = time.monotonic() - began_s
    check_report(tmp_path, load_plan(plan, CLUSTER))
    check_started_once(plane, namespace)
    assert jobs_of(plane, namespace) == []
    assert api.calls <= CALLS_PER_S * lasted_s


@pytest.mark.parametrize("seed", range(5))
def test_a_client_that_is_killed_is_gone_on_from(
    seed: int, plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    client = start(plane, "group-031", namespace, tmp_path)
    running_pod(plane, namespace, "canneal")
    # While the longest job runs all others start and end.
    time.sleep(random.Random(seed).uniform(0.0, 0.8 * max(simulated_s().values())))
    client.kill()
    client.wait()
    assert jobs_of(plane, namespace)
    assert run_here(plane, "group-031", namespace, tmp_path, "--resume") == 0
    check_report(tmp_path, load_plan("group-031", CLUSTER))
    check_started_once(plane, namespace)


def test_an_evicted_pod_is_started_again(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    def evict() -> None:
        pod = running_pod(plane, namespace, "freqmine")["metadata"]
        content = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod["name"], "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod['name']}/eviction"
        plane.request("POST", path, content)

    thread = beside(evict)
    assert run_here(plane, "group-031", namespace, tmp_path) == 0
    thread.join()
    check_report(tmp_path, load_plan("group-031", CLUSTER), retried=("freqmine",))


def test_a_full_node_is_waited_for_and_said(
    plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_run, "WAIT_S", 3.0)
    blocker = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "blocker"},
        "spec": {
            "nodeName": "node-a-2core-abcd",
            "containers": [
                {"name": "x", "image": "x", "resources": {"requests": {"cpu": "1900m"}}}
            ],
        },
    }
    plane.request("POST", "/api/v1/namespaces/default/pods", blocker)
    try:
        assert run_here(plane, "group-031", namespace, tmp_path) == 1
    finally:
        plane.request("DELETE", "/api/v1/namespaces/default/pods/blocker")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["jobs"]["canneal"]["exit_code"] is None
    assert content["jobs"]["radix"]["exit_code"] == 0
    events = (tmp_path / "events.log").read_text()
    assert "no+node+for+it" in events and "given+up+after+3+attempts" in events


def test_a_node_that_goes_away_costs_an_attempt(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    def lose() -> None:
        running_pod(plane, namespace, "canneal")
        plane.request("DELETE", "/api/v1/nodes/node-a-2core-abcd")
        plane.add_node(CLUSTER, "node-a-2core")

    thread = beside(lose)
    assert run_here(plane, "group-031", namespace, tmp_path) == 0
    thread.join()
    content = json.loads((tmp_path / "report.json").read_text())
    assert all(job["exit_code"] == 0 for job in content["jobs"].values())


def test_what_is_refused_creates_nothing(
    plane: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from env.errors import InputError

    for arguments, said in (
        (("group-031", "default"), "namespace default is not ours"),
        (("group-031", namespace, "--resume"), "nothing to resume"),
    ):
        plan, where, *more = arguments
        with pytest.raises(InputError, match=said):
            run_here(plane, plan, where, tmp_path, *more)
    assert jobs_of(plane, "default") == []
    names = [one["metadata"]["name"] for one in plane.request("GET", "/api/v1/namespaces")["items"]]
    assert namespace not in names


def test_restoring_deletes_ours_and_nothing_else(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    client = start(plane, "group-031", namespace, tmp_path)
    running_pod(plane, namespace, "canneal")
    client.kill()
    client.wait()
    foreign = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "foreign"},
        "spec": {
            "template": {
                "spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x"}]}
            }
        },
    }
    plane.request("POST", f"/apis/batch/v1/namespaces/{namespace}/jobs", foreign)
    assert run_here(plane, "group-031", namespace, tmp_path, "--restore") == 0
    assert [job["metadata"]["name"] for job in jobs_of(plane, namespace)] == ["foreign"]
