"""
What a run creates when, decided by what the cluster shows.

The API server is played by a list of what was asked; a real one is in `tests/cluster`.
"""

from typing import Any

import pytest

from deploy.cluster import placement_run
from deploy.cluster.attempts import ClusterObjects
from deploy.cluster.cluster_report import job_outcomes
from deploy.cluster.manifests import GIVEN_UP, JOB
from deploy.cluster.placement_run import MOST_ATTEMPTS, PlacementRun
from deploy.records.recorder import Event
from env.cluster.cluster_scenario import load_cluster
from env.cluster.plan import load_plan
from env.errors import InputError

CLUSTER = load_cluster("cca-part3")
PLAN = load_plan("group-031", CLUSTER)
AT_ONCE = ["blackscholes", "ferret", "freqmine", "vips", "canneal"]


class Asked:
    """Takes what a run asks of the API server."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.given_up: list[str] = []
        self.refuses = False

    def create_job(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise InputError("the server is away")
        self.created.append(manifest["metadata"]["labels"][JOB])
        stamp = {"creationTimestamp": "2026-01-01T00:00:00Z"}
        return manifest | {"metadata": manifest["metadata"] | stamp, "status": {}}

    def last_lines(self, namespace: str, pod: str) -> list[str]:
        return ["Killed"]

    def give_up(self, namespace: str, name: str, annotation: str, why: str) -> None:
        self.given_up.append(name)


def a_run() -> tuple[PlacementRun, Asked, list[Event]]:
    asked, events = Asked(), list[Event]()
    api: Any = asked
    run = PlacementRun(PLAN, CLUSTER, api, "coretide", ClusterObjects())
    run.listen(events.append)
    run.step()
    return run, asked, events


def end(run: PlacementRun, job: str, how: str = "Complete") -> None:
    """The job's last attempt ends."""
    name = run.attempts[job][-1].name
    stamp = "2026-01-01T00:01:00Z"
    condition = {"type": how, "status": "True", "lastTransitionTime": stamp}
    status = {"conditions": [condition], "startTime": stamp, "completionTime": stamp}
    run.objects.jobs[name] = run.objects.jobs[name] | {"status": status}


def test_who_waits_for_nobody_starts_at_once_and_nobody_twice() -> None:
    run, asked, _ = a_run()
    run.step()
    assert asked.created == AT_ONCE


def test_who_waits_starts_when_the_other_has_succeeded() -> None:
    run, asked, _ = a_run()
    end(run, "vips")
    run.step()
    assert asked.created == [*AT_ONCE, "dedup"]
    for job in (*AT_ONCE, "dedup"):
        end(run, job)
    run.step()
    assert asked.created[-1] == "radix" and not run.over
    end(run, "radix")
    run.step()
    assert run.over
    assert all(one.exit_code == 0 for one in job_outcomes(run).values())


def test_a_client_that_goes_on_creates_what_is_missing_alone() -> None:
    run, asked, _ = a_run()
    end(run, "vips")
    second = PlacementRun(PLAN, CLUSTER, run.api, "coretide", run.objects)
    second.step()
    assert asked.created == [*AT_ONCE, "dedup"]


def test_a_job_is_tried_a_bounded_number_of_times_and_who_waits_for_it_is_held() -> None:
    run, asked, events = a_run()
    for _ in range(MOST_ATTEMPTS):
        end(run, "vips", "Failed")
        run.step()
    assert asked.created.count("vips") == MOST_ATTEMPTS and "dedup" not in asked.created
    said = [event.detail for event in events if event.job == "vips"]
    assert said[-1] == f"given up after {MOST_ATTEMPTS} attempts"
    assert said[0].startswith("attempt 1 failed: its pod was deleted")
    assert not run.over  # the others run
    for job in (*AT_ONCE, "radix"):
        if job != "vips":
            end(run, job)
            run.step()
    assert run.over and not run.succeeded("vips") and not run.succeeded("dedup")


def test_an_attempt_that_finds_no_node_is_given_up_in_the_end() -> None:
    run, asked, events = a_run()
    name = run.attempts["canneal"][-1].name
    condition = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes"}
    run.objects.pods["p"] = {
        "metadata": {"name": "p", "ownerReferences": [{"name": name}]},
        "status": {"phase": "Pending", "conditions": [condition]},
    }
    run.step()
    run.step()
    assert asked.given_up == [name]
    assert [event.detail for event in events] == ["waits: no node for it: 0/4 nodes"]
    run.objects.jobs[name]["metadata"]["annotations"] = {GIVEN_UP: "no node"}
    run.step()
    assert asked.created.count("canneal") == 2
    assert events[-1].detail == "attempt 1 failed: no node; last lines: Killed"


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_run, "AGAIN_S", 0.0)
    run, asked, events = a_run()
    asked.refuses = True
    end(run, "vips")
    run.step()
    assert events[-1] == Event(events[-1].time_s, "custom", "dedup", detail="the server is away")
    asked.refuses = False
    run.step()
    assert asked.created[-1] == "dedup"
    asked.refuses = True
    monkeypatch.setattr(placement_run, "WAIT_S", -1.0)
    end(run, "blackscholes")
    with pytest.raises(InputError):
        run.step()
        run.step()


def test_a_job_that_somebody_deletes_is_created_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_run, "SETTLE_S", 0.0)
    run, asked, events = a_run()
    for _ in range(MOST_ATTEMPTS):
        del run.objects.jobs[run.attempts["vips"][-1].name]
        run.step()
    assert asked.created.count("vips") == MOST_ATTEMPTS
    assert run.ended("vips") and not run.succeeded("vips")
    assert events[-1].detail == "attempt 3 failed: somebody has deleted its Job"
