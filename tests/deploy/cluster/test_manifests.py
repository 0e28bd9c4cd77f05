"""What is created on a cluster says where and with what each job runs, and whose it is."""

import pytest

from deploy.cluster.manifests import (
    ATTEMPT,
    JOB,
    MANAGED_BY,
    PLAN,
    attempt_name,
    cpu_share,
    digest,
    job_manifest,
)
from env.cluster.cluster_scenario import load_cluster
from env.cluster.plan import load_plan

CLUSTER = load_cluster("cca-part3")
PLAN_031 = load_plan("group-031", CLUSTER)


def test_a_job_has_its_node_its_vcpus_and_its_memory() -> None:
    manifest = job_manifest(PLAN_031, CLUSTER, PLAN_031.job("freqmine"), 1, "coretide")
    pod = manifest["spec"]["template"]["spec"]
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "cca-project-nodetype", "operator": "In", "values": ["node-c-4core"]}
    ]
    (container,) = pod["containers"]
    assert container["command"][:3] == ["taskset", "-c", "0,1,2"]
    assert container["command"][-2:] == ["-n", "3"]
    assert container["resources"] == {
        "requests": {"cpu": "2250m", "memory": "2000Mi"},
        "limits": {"memory": "2000Mi"},
    }


def test_kubernetes_itself_retries_nothing() -> None:
    spec = job_manifest(PLAN_031, CLUSTER, PLAN_031.job("vips"), 1, "coretide")["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_job_and_pod_say_whose_they_are() -> None:
    manifest = job_manifest(PLAN_031, CLUSTER, PLAN_031.job("vips"), 2, "coretide")
    labels = manifest["metadata"]["labels"]
    assert labels == manifest["spec"]["template"]["metadata"]["labels"]
    assert labels == {
        MANAGED_BY: "coretide",
        PLAN: digest(PLAN_031),
        JOB: "vips",
        ATTEMPT: "2",
    }


def test_an_attempts_name_follows_from_plan_job_and_number_alone() -> None:
    other = PLAN_031.model_copy(update={"name": "other"})
    names = {
        attempt_name(plan, job, number)
        for plan in (PLAN_031, other)
        for job in ("a.b", "a-b", "x" * 63)
        for number in (1, 2)
    }
    assert len(names) == 12 and all(len(name) <= 63 for name in names)
    assert attempt_name(PLAN_031, "vips", 1) == attempt_name(load_plan("group-031"), "vips", 1)


def test_jobs_that_share_vcpus_request_a_share_of_them() -> None:
    ferret = PLAN_031.job("ferret").model_copy(update={"vcpus": (0, 1, 2, 3)})
    jobs = tuple(ferret if job.name == "ferret" else job for job in PLAN_031.jobs)
    plan = PLAN_031.model_copy(update={"jobs": jobs})
    # Beside blackscholes or radix, one of which waits for the other, on vCPUs 0 and 1.
    assert cpu_share(plan, plan.job("blackscholes")) == pytest.approx(1.0)
    assert cpu_share(plan, plan.job("radix")) == pytest.approx(1.0)
    assert cpu_share(plan, ferret) == pytest.approx(2.0 + 2.0 / 3.0)
