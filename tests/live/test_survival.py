"""What the live side must survive, with the real engine: bounded, but minutes long."""

import os
import random
import time

import docker
import pytest

from deploy.engines import daemon, images
from deploy.linux import service_process
from deploy.records.proof import begun
from deploy.records.recorder import read_events
from tests.live.conftest import JOBS, PATIENCE, assert_as_found, needs_docker

pytestmark = [pytest.mark.survival, needs_docker]


def jobs_ended(deployment):
    events = read_events(deployment.report)
    return sorted(event.job for event in events if event.what == "end" and event.job in JOBS)


def await_work(deployment, job):
    """Wait until a job works: its start is said a moment earlier."""
    deployment.expect(rf"{job} start \[")
    folder = deployment.state / f"attempt-{deployment.nonce}-{job}-1"
    give_up_s = time.monotonic() + 10.0 * PATIENCE
    while not begun(folder):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_killed_again_and_again_no_job_is_lost_or_run_twice(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sleep", "8"], radix=["sleep", "9"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario)]
    options += ["--docker", docker_daemon.url]
    rng = random.Random(7)
    run = deploy(*options)
    for _ in range(5):
        time.sleep(rng.uniform(0.3, 1.5))
        run.kill()
        run = deploy(*options, *(["--resume"] if (run.state / "state.json").exists() else []))
    assert run.finish(90) == 0, run.lines
    assert jobs_ended(run) == ["dedup", "radix"]
    assert_as_found(server, run)


def test_a_resume_without_docker_costs_no_job(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sleep", "6"], radix=["sleep", "6"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario)]
    run = deploy(*options, "--docker", docker_daemon.url)
    run.expect(r"radix start \[")
    run.kill()
    state = run.state / "state.json"
    content = state.read_text()
    state.write_text(content.replace(docker_daemon.url, "unix:///nobody"))
    refused = deploy(*options, "--resume")
    assert refused.finish() == 2, refused.lines
    refused.expect("not taken over: Docker: ")
    state.write_text(content)
    again = deploy(*options, "--resume")
    assert again.finish() == 0, again.lines
    assert jobs_ended(again) == ["dedup", "radix"]
    assert again.count(" start ") == 0, again.lines
    assert_as_found(server, run)


def test_a_resumed_deployment_keeps_the_rights_it_began_with(
    deploy, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sh", "-c", "sleep 4; touch /written"], radix=["sleep", "1"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario)]
    options += ["--docker", docker_daemon.url]
    run = deploy(*options, "--allow-privileged")
    await_work(run, "dedup")
    run.kill()
    client = docker.DockerClient(base_url=docker_daemon.url)
    next(one for one in client.containers.list() if "dedup" in one.name).kill()
    client.close()
    again = deploy(*options, "--resume")
    assert again.finish() == 0, again.lines
    assert again.count("dedup start") == 1


def test_a_container_killed_from_outside_is_run_again(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sleep", "3"], radix=["sleep", "1"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    await_work(run, "dedup")
    client = docker.DockerClient(base_url=docker_daemon.url)
    next(one for one in client.containers.list() if "dedup" in one.name).kill()
    client.close()
    run.expect("dedup attempt 1 failed: exit code 137")
    assert run.finish() == 0, run.lines
    assert run.count("dedup start") == 2
    assert jobs_ended(run) == ["dedup", "radix"]
    assert_as_found(server, run)


def test_a_container_that_exits_with_1_is_retried_reported_and_given_up(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sh", "-c", "echo no luck; exit 1"], radix=["sleep", "3"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    assert run.finish() == 1, run.lines
    assert run.count(r"dedup attempt \d failed: exit code 1; last output: no luck") == 3
    assert run.count("dedup end given up after 4 attempts: exit code 1") == 1
    assert run.count("radix end") == 1
    assert_as_found(server, run)


def test_a_container_can_write_to_nothing_but_its_own_memory_and_a_little_proof(
    deploy, scenario_file, groups_file, docker_daemon
):
    fill = "dd if=/dev/zero of=/proof/exit bs=1M count=1000; echo dd exit $?; touch /proof/more"
    scenario = scenario_file(dedup=["sh", "-c", f"{fill}; sleep 5"], radix=["sleep", "1"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    run.expect(r"dedup start \[")
    proof = run.state / f"attempt-{run.nonce}-dedup-1" / "exit"
    client = docker.DockerClient(base_url=docker_daemon.url)
    container = next(one for one in client.containers.list() if "dedup" in one.name)
    said, give_up_s = "", time.monotonic() + 20.0
    while "Read-only" not in said and time.monotonic() < give_up_s:
        said = container.logs().decode()
        time.sleep(0.05)
    client.close()
    assert proof.stat().st_size <= 64 << 20
    assert "dd exit 0" not in said
    assert "touch: /proof/more: Read-only file system" in said
    assert run.finish(60) == 0, run.lines
    assert run.count("dedup [0-9]+ bytes behind its proof are cut off") == 1, run.lines


def test_a_container_told_to_stop_is_not_taken_for_done(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    """stress-ng exits with 0 then."""
    scenario = scenario_file(
        dedup=["stress-ng", "--cpu", "1", "--cpu-ops", "4000"], radix=["sleep", "1"]
    )
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    await_work(run, "dedup")
    client = docker.DockerClient(base_url=docker_daemon.url)
    next(one for one in client.containers.list() if "dedup" in one.name).stop()
    client.close()
    run.expect("dedup attempt 1 failed: exit code 143")
    assert run.finish(60) == 0, run.lines
    assert jobs_ended(run) == ["dedup", "radix"]


def test_a_job_killed_for_memory_is_not_taken_for_done(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    """stress-ng exits with 0 when the kernel kills its workers."""
    hungry = ["stress-ng", "--vm", "1", "--vm-bytes", "600m", "--vm-ops", "100", "--oomable"]
    scenario = scenario_file(dedup=hungry, radix=["sleep", "1"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    run.expect("dedup attempt 1 failed: exit code 137", 60)
    assert run.finish(60) == 1, run.lines
    assert_as_found(server, run)


@pytest.mark.parametrize("live_restore", [True, False])
def test_docker_is_restarted(
    deploy, server, scenario_file, groups_file, tmp_path_factory, live_restore
):
    folder = tmp_path_factory.mktemp("d")
    first = daemon.start(folder, live_restore)
    try:
        client = docker.DockerClient(base_url=first.url)
        images.ensure_stress_image(client)
        client.close()
        scenario = scenario_file(dedup=["sleep", "20"], radix=["sleep", "20"])
        run = deploy(
            *("--policy", str(groups_file), "--scenario", str(scenario), "--docker", first.url)
        )
        run.expect(r"radix start \[", 60)
        daemon.stop(first)
        first = daemon.start(folder, live_restore)
        assert run.finish(120) == 0, run.lines
        assert jobs_ended(run) == ["dedup", "radix"]
        assert run.count("attempt 1 failed") == (0 if live_restore else 2)
        assert_as_found(server, run)
    finally:
        daemon.stop(first)
        daemon.remove(folder)


def test_a_missing_image_fails_its_job_only(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    path = scenario_file(dedup=["sleep", "1"], radix=["sleep", "1"])
    path.write_text(path.read_text().replace(images.STRESS_IMAGE, "no/such:image", 1))
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(path)),
        *("--docker", docker_daemon.url),
    )
    assert run.finish() == 1
    run.expect("dedup attempt 1 failed: image no/such:image is not there")
    assert run.count("radix end") == 1
    assert_as_found(server, run)


def test_a_stopped_loop_is_made_safe_and_goes_on(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sleep", "5"], radix=["sleep", "5"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    run.expect(r"update_cores \[0\]$")
    os.kill(run.process.pid, 19)
    give_up_s = time.monotonic() + 1.2 * PATIENCE
    while set(service_process.affinities(server.pid).values()) != {(0, 1)}:
        assert time.monotonic() < give_up_s, "memcached is still held"
        time.sleep(0.02)
    os.kill(run.process.pid, 18)
    run.expect("away for")
    assert run.finish() == 0, run.lines
    assert jobs_ended(run) == ["dedup", "radix"]
    assert_as_found(server, run)
