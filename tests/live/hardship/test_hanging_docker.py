"""Docker hangs in any of its calls: memcached is served, no job runs twice, the end is honest."""

import contextlib
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from deploy.jobs.containers import LABEL
from deploy.linux import service_process
from tests.live.conftest import PATIENCE, Deployment, assert_as_found, needs_docker
from tests.live.hardship.docker_proxy import CALLS, HangingDocker, hanging

pytestmark = [pytest.mark.survival, needs_docker]

END_LIMIT_S = 60.0
"""With Docker's time limit at 3 s."""


@pytest.fixture
def proxied(docker_daemon, call) -> Iterator[HangingDocker]:
    """The daemon of the other tests, that hangs in a call."""
    with (
        tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as folder,
        hanging(Path(folder), docker_daemon.url, call) as proxy,
    ):
        yield proxy


@pytest.fixture
def begun(proxied, deploy, scenario_file, groups_file, call):
    """A deployment that has met the hang; its second job fails, so that Docker is asked why."""
    scenario = scenario_file(dedup=["sleep", "2"], radix=["sh", "-c", "sleep 1; exit 3"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario), "--docker", proxied.url),
        program=("-m", "tests.live.faults", "docker-hangs"),
    )
    try:
        if call != "list":  # which the end asks for
            assert proxied.hung.wait(20.0 * PATIENCE), run.lines
        else:
            run.expect(r"s  dedup start \[")
        yield run
    finally:
        proxied.release()


def everywhere(server) -> bool:
    return set(service_process.affinities(server.pid).values()) == {(0, 1)}


def assert_no_container(url: str, run: Deployment) -> None:
    """What a late daemon makes may be removed a moment later."""
    ours = {"label": f"{LABEL}={run.nonce}"}
    give_up_s = time.monotonic() + 5.0 * PATIENCE
    with contextlib.closing(docker.DockerClient(base_url=url)) as client:
        while left := client.api.containers(all=True, filters=ours):
            assert time.monotonic() < give_up_s, left
            time.sleep(0.05)


@pytest.mark.parametrize("call", CALLS)
def test_the_end_says_what_is_left_and_restore_ends_it(
    begun, server, deploy, docker_daemon, proxied
):
    time.sleep(1.0)  # the loop goes on meanwhile
    begun.process.send_signal(signal.SIGTERM)
    code = begun.finish(END_LIMIT_S)
    assert everywhere(server), begun.lines
    assert begun.count("the loop is silent") <= 1, begun.lines
    if begun.count("jobs may be left") == 0:
        assert begun.count("the machine is as it was found") == 1, begun.lines
    else:
        assert begun.count(r"jobs may be left: Docker") == 1, begun.lines
    assert code == 128 + signal.SIGTERM
    proxied.release()
    undo = deploy("--restore", "--docker", docker_daemon.url)
    assert undo.finish() == 0, undo.lines
    assert_no_container(docker_daemon.url, begun)
    assert_as_found(server, begun)


@pytest.mark.parametrize("call", ["create", "start", "inspect", "wait", "logs", "remove"])
def test_a_hang_that_passes_costs_no_job_and_runs_none_twice(begun, server, docker_daemon, proxied):
    time.sleep(4.0)
    proxied.release()
    assert begun.finish() == 1, begun.lines
    assert begun.count(r"s  dedup end\b") == begun.count(r"s  radix end\b") == 1
    assert begun.count(r"s  dedup start \[") == 1, begun.lines
    assert begun.count(r"radix attempt \d failed: exit code 3") == 3, begun.lines
    assert_as_found(server, begun)
    assert_no_container(docker_daemon.url, begun)
