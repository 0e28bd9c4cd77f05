"""A queue of processes: what was handed in is done once, whatever ends the loop."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from functools import partial
from pathlib import Path, PurePosixPath

import docker
import pytest

from deploy.assembly import usable_hierarchy
from deploy.engines import images
from deploy.jobs.placement import session_members
from deploy.jobs.runtimes import kill_all
from deploy.linux.cgroups import find_groups, remove_group
from deploy.queue.spool import Ending, Spool
from deploy.records.run_report import read_report
from tests.live.conftest import assert_as_found, needs_docker, needs_groups
from tests.live.queue.conftest import Queue


@pytest.fixture
def serve(deploy, queue, scenario_file):
    """Starts a loop that serves the queue."""

    def start(*options, policy="first-come"):
        return deploy(
            *("--policy", policy, "--scenario", str(scenario_file(sharing=False))),
            *("--runtime", "process", "--queue", str(queue.path), *options),
        )

    return start


def test_jobs_are_run_proved_refused_and_given_up_until_it_is_stopped(
    serve, queue, server, tmp_path
):
    queue.drop("before", 0.2)
    run = serve("--probe")
    run.expect("before end")
    file = tmp_path / "later.yaml"
    file.write_text(queue.describe("later", ["sleep", "0.3"]))
    assert queue.ask("--submit", str(file)).stdout == "later is handed in\n"
    queue.drop("fails", 0.0, code=3)
    queue.drop_text("bad", "name: [")
    queue.expect("done", "before", "later")
    queue.expect("failed", "fails")
    outcome = queue.outcome("failed", "fails")
    assert (outcome["exit_code"], outcome["attempts"]) == (3, 4)
    assert "exit code 3" in outcome["why"]
    outcome = queue.outcome("done", "later")
    assert (outcome["exit_code"], outcome["attempts"]) == (0, 1)
    assert outcome["accepted"] <= outcome["started"] <= outcome["ended"]
    assert "not valid YAML" in (queue.path / "refused" / "bad.yaml.txt").read_text()
    shown = queue.ask("--list").stdout
    assert [len(shown.split(state)) for state in (" done ", " failed ", " refused ")] == [3, 2, 2]
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.lines
    assert_as_found(server, run)
    report = read_report(run.report)
    assert report["restored"] and report["makespan_s"] is None
    assert report["violation_ratio"] is not None and report["p95_us"]
    assert run.count("fallback decides") == 0, run.lines


def test_a_stopped_loop_puts_its_jobs_back_and_the_next_one_runs_them(serve, queue, server):
    queue.drop_held("long")
    run = serve()
    queue.expect_line("begin long")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM
    assert_as_found(server, run)
    assert (queue.names("accepted"), queue.names("running")) == (["long"], [])
    queue.let_go("long")
    again = serve()
    queue.expect("done", "long")
    assert (queue.count("begin long"), queue.count("end long")) == (2, 1)
    again.close()


@pytest.mark.survival
def test_jobs_are_cancelled_while_they_run_and_before(serve, queue, server):
    queue.drop("endless", 1000.0)
    run = serve()
    queue.expect_line("begin endless")
    assert queue.ask("--cancel", "endless").stdout == "endless runs; the loop ends it\n"
    queue.expect("cancelled", "endless")
    assert queue.outcome("cancelled", "endless")["exit_code"] is None
    queue.drop("after", 0.1)
    queue.expect("done", "after")
    refused = queue.ask("--cancel", "after")
    assert refused.returncode == 2 and "no such job waits or runs" in refused.stderr
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM
    assert_as_found(server, run)
    assert queue.count("end endless") == 0


@pytest.mark.survival
@needs_groups
def test_a_group_that_cannot_be_removed_is_said_once_and_holds_nobody_up(serve, queue):
    """A stranger below one controller keeps it; the others have its processes ended."""
    queue.drop("kept", 3.0)
    run = serve()
    queue.expect_line("begin kept")
    hierarchy = usable_hierarchy()
    group = PurePosixPath(
        json.loads((run.state / "state.json").read_text())["jobs"]["kept"]["group"]
    )
    own = hierarchy.folder(group)
    others = [one for one in hierarchy.folders(group) if one != own and one.exists()]
    if not others:
        pytest.skip("this kernel has one hierarchy, in which the stranger is a process of the job")
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        (others[0] / "cgroup.procs").write_text(str(stranger.pid))
        queue.expect("done", "kept")
        run.expect("kept .*is not forgotten yet: its control group .* tried again")
        for name in ("next", "last"):
            queue.drop(name, 0.1)
            queue.expect("done", name)
    finally:
        stranger.kill()
        stranger.wait()
    give_up_s = time.monotonic() + 30.0
    while "kept" in json.loads((run.state / "state.json").read_text())["jobs"]:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    assert not others[0].exists()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM
    assert run.count("is not forgotten yet") == 1, run.lines


@pytest.mark.survival
def test_jobs_that_are_left_running_stay_with_their_loop(serve, queue, server, tmp_path):
    queue.drop("long", 6.0)
    run = serve("--leave-jobs")
    queue.expect_line("begin long")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM
    run.expect("jobs are left running; --resume goes on")
    assert (queue.names("running"), queue.names("accepted")) == (["long"], [])
    stranger = serve("--state", str(tmp_path / "another"))
    assert stranger.finish() == 2
    stranger.expect(f"was served with --state {run.state}, which knows what became of its jobs")
    again = serve("--resume")
    queue.expect("done", "long")
    assert (queue.count("begin long"), queue.count("end long")) == (1, 1)
    again.process.send_signal(signal.SIGTERM)
    assert again.finish() == 128 + signal.SIGTERM
    assert_as_found(server, again)


@needs_docker
def test_jobs_run_in_containers_and_leave_none(
    deploy, server, scenario_file, docker_daemon, tmp_path
):
    queue = Queue(tmp_path, images.STRESS_IMAGE)
    queue.drop("quick", 0.1)
    queue.drop("endless", 1000.0)
    run = deploy(
        *("--policy", "concurrent", "--scenario", str(scenario_file(sharing=False))),
        *("--docker", docker_daemon.url, "--queue", str(queue.path)),
    )
    queue.expect("done", "quick", limit_s=60)
    run.expect("endless start", 60)
    assert queue.ask("--cancel", "endless").returncode == 0
    queue.expect("cancelled", "endless")
    client = docker.DockerClient(base_url=docker_daemon.url)
    # An outcome is written before what is left is removed.
    give_up_s = time.monotonic() + 30.0
    while client.containers.list(all=True) or find_groups(
        Path("/sys/fs/cgroup"), f"coretide-{run.nonce}-endless"
    ):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    client.close()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM
    assert_as_found(server, run)


def test_a_killed_loop_is_resumed_and_what_ended_meanwhile_is_done_once(serve, queue, server):
    queue.drop_held("quick")
    queue.drop_held("slow")
    run = serve(policy="concurrent")
    queue.expect_line("begin quick")
    queue.expect_line("begin slow")
    run.kill()
    queue.let_go("quick")
    queue.expect_line("end quick")
    queue.drop("late", 0.1)
    refused = serve(policy="concurrent")
    assert refused.finish() == 2 and refused.expect("use --resume or --restore")
    again = serve("--resume", policy="concurrent")
    queue.expect("done", "late", "quick")
    queue.let_go("slow")
    queue.expect("done", "slow")
    again.process.send_signal(signal.SIGTERM)
    assert again.finish() == 128 + signal.SIGTERM
    assert_as_found(server, again)
    for name in ("late", "quick", "slow"):
        assert (queue.count(f"begin {name}"), queue.count(f"end {name}")) == (1, 1), name
        assert queue.outcome("done", name)["attempts"] == 1


def test_a_resumed_loop_starts_what_waited_at_its_gate(serve, queue):
    queue.drop("endless", 1000.0)
    run = serve(policy="sequential")
    queue.expect_line("begin endless")
    queue.drop("waits", 0.1)
    queue.expect_attempt(run, "waits")
    run.kill()
    assert queue.count("begin waits") == 0
    serve("--resume", policy="concurrent")
    queue.expect("done", "waits")
    assert (queue.count("begin endless"), queue.count("end endless")) == (1, 0)


def test_what_a_killed_loop_left_of_jobs_that_are_over_is_removed_and_their_names_are_free(
    serve, queue
):
    """It was killed after it had written an outcome, and before it had forgotten the job."""
    queue.drop_held("quick")
    run = serve()
    queue.expect_line("begin quick")
    run.kill()
    queue.let_go("quick")
    queue.expect_proof(run, "quick")
    state = run.state / "state.json"
    content = json.loads(state.read_text())
    content["jobs"]["quick"] |= {"exit_code": 0, "end_s": content["jobs"]["quick"]["start_s"]}
    state.write_text(json.dumps(content))
    with Spool(queue.path) as spool:
        spool.finish(Ending("quick", "done", 0, 1))
    again = serve("--resume")
    again.expect("update_cores")
    assert list(run.state.glob("attempt-*-quick-*")) == []
    assert find_groups(Path("/sys/fs/cgroup"), f"coretide-{content['nonce']}-quick") == []
    for left in queue.path.glob("done/quick.*"):
        left.unlink()
    queue.drop("quick", 0.1)
    queue.expect("done", "quick")
    assert queue.count("begin quick") == 2


def reboot(run):
    """Leave of a killed loop what a reboot leaves: files that speak of another boot."""
    state = run.state / "state.json"
    content = json.loads(state.read_text())
    for file in run.state.glob("attempt-*/pid"):
        assert kill_all(partial(session_members, int(file.read_text()))) == []
    for folder in find_groups(Path("/sys/fs/cgroup"), f"coretide-{content['nonce']}-"):
        remove_group(folder)
    state.write_text(json.dumps(content | {"boot": "another"}))


@pytest.mark.parametrize(
    "how",
    ["restored", pytest.param("rebooted", marks=pytest.mark.survival), "rebooted and restored"],
)
def test_after_a_restore_or_a_reboot_proved_jobs_are_done_and_others_run_again(
    serve, queue, deploy, how
):
    queue.drop_held("proved")
    queue.drop("broken", 1000.0)
    run = serve(policy="concurrent")
    queue.expect_line("begin proved")
    queue.expect_line("begin broken")
    run.kill()
    queue.let_go("proved")
    queue.expect_proof(run, "proved")
    if "rebooted" in how:
        reboot(run)
    if "restored" in how:
        undo = deploy("--restore")
        assert undo.finish() == 0, undo.lines
        assert (queue.names("done"), queue.names("accepted")) == (["proved"], ["broken"])
    again = serve(policy="concurrent")
    queue.expect("done", "proved")
    again.expect("broken start")
    assert queue.count("begin proved") == 1


def test_who_names_no_policy_has_the_one_for_any_jobs(deploy, queue, scenario_file):
    scenario = str(scenario_file())
    run = deploy("--scenario", scenario, "--runtime", "process", "--queue", str(queue.path))
    run.expect("memcached update_cores")
    for name in ("one", "after-none-was-left"):
        queue.drop(name, 0.1)
        queue.expect("done", name)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM
    # On a busy machine readings or decisions may be late; it must not fail otherwise.
    faults = r"no shipped policy|fallback decides.*\b(?!PolicyLate)\w+Error"
    assert run.count(faults) == 0, "\n".join(run.lines)


def test_a_queue_is_refused_in_one_line(serve, queue, tmp_path, deploy, scenario_file):
    scenario = str(scenario_file())
    options = ["--scenario", scenario, "--queue", str(queue.path), "--runtime", "process"]
    planned = deploy("--policy", "threshold-groups", *options)
    assert planned.finish() == 2
    planned.expect("arranges its jobs beforehand; it cannot serve a queue")
    knowing = deploy("--policy", "shortest-first", *options)
    assert knowing.finish() == 2
    knowing.expect("must know the work of each job")
    queue.path.mkdir()
    queue.path.chmod(0o777)
    open_to_all = serve()
    assert open_to_all.finish() == 2
    open_to_all.expect("queue: .* writable by you alone")
    for words in (["--list"], ["--dry-run", "--queue", str(tmp_path)]):
        wrong = deploy(*words)
        assert wrong.finish() == 2 and len(wrong.lines) == 1, wrong.lines
