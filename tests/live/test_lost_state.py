"""`--restore` without the state: ours is found by its marks, and what is unknown is said."""

import contextlib
import os
import shutil
import signal
import socket
from pathlib import Path

import docker
import pytest

from deploy.linux import service_process
from deploy.records.state import STATE_FILE
from tests.live.conftest import needs_docker, needs_groups

LONG = ["sleep", "1000"]


def kill_with_guardian(run):
    """End the loop and its guardian at once, so that nobody makes anything safe."""
    loop = run.process.pid
    children = Path(f"/proc/{loop}/task/{loop}/children").read_text().split()
    command = Path(f"/proc/{loop}/cmdline").read_bytes()
    (guardian,) = (pid for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == command)
    os.kill(loop, signal.SIGSTOP)
    os.kill(int(guardian), signal.SIGKILL)
    run.kill()


def processes_of(run):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{run.state}/attempt-".encode() in path.read_bytes():
                found.append(path)
    return found


def groups_of(run):
    return list(Path("/sys/fs/cgroup").rglob(f"coretide-{run.nonce}-*"))


@pytest.fixture
def killed(deploy, server, scenario_file, groups_file):
    """A deployment that was killed together with its guardian, memcached on vCPU 0."""
    scenario = scenario_file(dedup=LONG, radix=LONG)

    def make(*options):
        run = deploy("--policy", str(groups_file), "--scenario", str(scenario), *options)
        run.expect(r"radix start \[")
        run.expect(r"memcached update_cores \[0\]$")
        kill_with_guardian(run)
        assert groups_of(run)
        return run

    return make


def assert_unknown_is_said(restoring, server):
    assert restoring.finish() == 1, restoring.lines
    restoring.expect("which vCPUs memcached had before is not known")
    restoring.expect(f"process {server.pid} has 0, `taskset")


@needs_groups
@pytest.mark.parametrize("lost", ["gone", "damaged"])
def test_processes_are_found_and_ended(deploy, killed, server, lost):
    run = killed("--runtime", "process")
    assert len(processes_of(run)) == 2
    if lost == "gone":
        shutil.rmtree(run.state)
    else:
        (run.state / STATE_FILE).write_text('{"nonce"')
    restoring = deploy("--restore", "--runtime", "process")
    assert_unknown_is_said(restoring, server)
    restoring.expect("the state is gone" if lost == "gone" else "state.json: damaged")
    restoring.expect(f"jobs of {run.nonce} were ended")
    assert processes_of(run) == [] and groups_of(run) == []
    assert set(service_process.affinities(server.pid).values()) == {(0,)}
    again = deploy("--restore")
    assert again.finish() == 0
    again.expect("nothing to restore")


@needs_groups
def test_jobs_of_another_state_folder_are_left_alone(deploy, killed, tmp_path):
    run = killed("--runtime", "process")
    elsewhere = deploy("--restore", "--state", str(tmp_path / "elsewhere"))
    assert elsewhere.finish() == 0
    elsewhere.expect("nothing to restore")
    assert len(processes_of(run)) == 2


@needs_docker
def test_containers_are_found_and_ended(deploy, killed, server, docker_daemon):
    run = killed("--docker", docker_daemon.url)
    shutil.rmtree(run.state)
    assert_unknown_is_said(deploy("--restore", "--docker", docker_daemon.url), server)
    assert groups_of(run) == []
    client = docker.DockerClient(base_url=docker_daemon.url)
    assert client.containers.list(all=True) == []
    client.close()


def test_a_docker_that_does_not_answer_is_not_taken_for_one_without_containers(deploy, tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "docker.sock"))
        silent.listen()
        restoring = deploy("--restore", "--docker", f"unix://{tmp_path}/docker.sock")
        assert restoring.finish() == 1
        restoring.expect("containers cannot be looked for: Docker")
