"""Disks, clocks, sensors and policies that fail in the middle of a run, with the real engine."""

import mmap
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import docker
import numpy as np
import pytest

from deploy.linux import service_process
from deploy.records.recorder import EVENTS_FILE, read_events, read_samples
from deploy.records.run_report import read_report
from tests.live.conftest import assert_as_found, needs_docker, write_checkpoint

pytestmark = [pytest.mark.survival, needs_docker]

CLOCK_STEPS = Path(__file__).with_name("clock_steps.c")


def assert_each_ended_once(run):
    assert [run.count(rf"s  {job} end$") for job in ("dedup", "radix")] == [1, 1], run.lines


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    size = ["-o", "size=256k,mode=0700"]
    subprocess.run(["mount", "-t", "tmpfs", *size, "coretide-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk, log):
    """Leave no room on the disk, nor in the last page of the log."""
    with log.open("ab") as file:
        file.write(b"-" * (-file.tell() % mmap.PAGESIZE - 1) + b"\n")
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"0" * 512)
        except OSError:
            pass


@pytest.mark.parametrize("freed", [True, False])
def test_a_full_disk_for_logs_costs_no_job(
    deploy, server, scenario_file, groups_file, docker_daemon, small_disk, freed
):
    scenario = scenario_file(dedup=["sleep", "3"], radix=["sleep", "4"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
        report=small_disk / "report",
    )
    run.expect(r"radix start \[")
    fill(small_disk, run.report / EVENTS_FILE)
    run.expect("No space left on device; lines wait in memory")
    if freed:
        run.expect("dedup end")
        (small_disk / "filler").unlink()
    assert run.finish() == 0, run.lines
    assert run.count("No space left on device; lines wait") == 1
    assert_each_ended_once(run)
    assert_as_found(server, run)
    if freed:
        ended = [event.job for event in read_events(run.report) if event.what == "end"]
        assert ended == ["dedup", "radix", "scheduler"]
        assert read_report(run.report)["restored"]
    else:
        assert run.count("no report: .*No space left") == 1
        assert run.count("lines could not be written") == 1


def test_a_full_disk_for_logs_and_state_costs_no_job_even_if_the_loop_is_killed(
    server, scenario_file, groups_file, docker_daemon, small_disk
):
    from tests.live.conftest import Deployment

    scenario = scenario_file(dedup=["sleep", "2"], radix=["sleep", "8"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario)]
    options += ["--docker", docker_daemon.url]
    first = Deployment(small_disk, server, *options)
    again = None
    try:
        first.expect(r"radix start \[")
        fill(small_disk, first.report / EVENTS_FILE)
        first.expect("s  dedup end$")
        first.expect("s  scheduler state not written")  # of this end, or of the start before it
        first.kill()
        again = Deployment(small_disk, server, *options, "--resume")
        assert again.finish() == 0, again.lines
        assert again.count(" start ") == 0, again.lines
        assert again.count("s  radix end$") == 1
        assert_as_found(server, first)
    finally:
        for run in filter(None, (first, again)):
            run.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_wall_clock_may_jump(
    deploy, server, scenario_file, groups_file, docker_daemon, tmp_path
):
    """Every call that reads it is told another day than half a second before."""
    library = tmp_path / "clock_steps.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(CLOCK_STEPS)], check=True)
    scenario = scenario_file(dedup=["sleep", "3"], radix=["sleep", "4"])
    begun_s = time.monotonic()
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--probe"]
    options += ["--docker", docker_daemon.url]
    steps = {"LD_PRELOAD": str(library)}
    run = deploy(*options, environment=steps)
    run.expect(r"radix start \[")
    run.kill()
    run = deploy(*options, "--resume", environment=steps)
    assert run.finish() == 0, run.lines
    lasted_s = time.monotonic() - begun_s
    times_s = [event.time_s for event in read_events(run.report)]
    assert times_s == sorted(times_s)
    assert 4.0 < times_s[-1] < lasted_s
    assert_each_ended_once(run)
    assert run.count("away for|fallback decides") <= 1  # between both loops
    assert run.count("silent") == 0
    assert 3.5 < read_report(run.report)["makespan_s"] < lasted_s
    assert_as_found(server, run)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("policy-raises", "ZeroDivisionError: oh"),
        ("policy-takes-5-s", r"PolicyLateError: took more than 0\.25 s"),
        ("policy-is-stuck-in-c", "PolicyLateError"),
    ],
)
def test_a_policy_that_fails_costs_no_job(
    deploy, server, scenario_file, groups_file, docker_daemon, fault, says
):
    scenario = scenario_file(dedup=["sleep", "6"], radix=["sleep", "7"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
        program=("-m", "tests.live.faults", fault),
    )
    run.expect(f"the fallback decides: {says}")
    if fault == "policy-is-stuck-in-c":  # nobody but the guardian can help
        run.expect("guardian: memcached has its vCPUs back")
    assert run.finish() == 0, run.lines
    assert 1 <= run.count("the fallback decides") <= 3
    assert_each_ended_once(run)
    assert_as_found(server, run)


def test_what_a_killed_loop_had_paused_runs_again_and_is_resumed(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sleep", "5"], radix=["sleep", "6"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario)]
    options += ["--docker", docker_daemon.url]
    program = ("-m", "tests.live.faults", "policy-pauses-everything")
    run = deploy(*options, program=program)
    run.expect(r"s  dedup pause$")
    client = docker.DockerClient(base_url=docker_daemon.url)
    container = next(one for one in client.containers.list() if "dedup" in one.name)
    run.kill()
    give_up_s = time.monotonic() + 1.0
    while container.status == "paused":
        assert time.monotonic() < give_up_s, "it is still paused"
        container.reload()
    client.close()
    again = deploy(*options, "--resume")
    assert again.finish() == 0, again.lines
    assert again.count("dedup start ") == 0, again.lines
    assert_each_ended_once(again)
    assert_as_found(server, run)


def test_a_network_that_returns_nan_costs_no_job(
    deploy, server, scenario_file, docker_daemon, tmp_path
):
    scenario = scenario_file(dedup=["sleep", "2"], radix=["sleep", "2"])
    # Weights that are finite, as a reader wants them, and whose products are not.
    checkpoint = write_checkpoint(tmp_path / "nan.zip", scenario, scale=5e37)
    run = deploy(
        *("--checkpoint", str(checkpoint), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    run.expect("the fallback decides: ValueError: the network's output is nan")
    assert run.finish() == 0, run.lines
    assert_each_ended_once(run)
    assert_as_found(server, run)


@pytest.mark.parametrize("fault", ["sensors-return-garbage", "sensors-go-back"])
def test_sensors_that_lie_cost_no_job_and_no_reading_is_made_up(
    deploy, server, scenario_file, groups_file, docker_daemon, fault
):
    scenario = scenario_file(dedup=["sleep", "8"], radix=["sleep", "9"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
        program=("-m", "tests.live.faults", fault),
    )
    assert run.finish() == 0, run.lines
    assert_each_ended_once(run)
    assert_as_found(server, run)
    samples = read_samples(run.report)
    assert all(0.0 <= sample.qps < 1e4 for sample in samples)  # nobody but the loop asks
    assert all(0.0 <= sample.cpu_cores <= 2.0 for sample in samples)
    busy = np.array([sample.busy_s for sample in samples])
    assert (np.diff(busy, axis=0) >= 0.0).all()


def test_a_memcached_that_hangs_is_left_to_the_fallback_until_it_answers(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    scenario = scenario_file(dedup=["sleep", "6"], radix=["sleep", "6"])
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--docker", docker_daemon.url),
    )
    run.expect(r"memcached update_cores \[0\]$")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        run.expect(r"the fallback decides: memcached's readings are 0\.5 s old", 3.0)
        give_up_s = time.monotonic() + 1.0
        while set(service_process.affinities(server.pid).values()) != {(0, 1)}:
            assert time.monotonic() < give_up_s, run.lines
            time.sleep(0.01)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    run.expect("decides again", 5.0)
    assert run.finish() == 0, run.lines
    assert run.count("the fallback decides") == 1
    assert_each_ended_once(run)
    assert_as_found(server, run)
