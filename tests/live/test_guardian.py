"""
The guardian as a process of its own, with a state of which no loop is left, or a silent one; and
`--restore` without any state: ours is found by its marks, and what is unknown is said.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import termios
import time
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from deploy.assembly import begin_state, usable_hierarchy
from deploy.jobs.runtimes import ProcessRuntime
from deploy.linux import service_process
from deploy.linux.cgroups import find_groups, is_idle, job_groups_beside
from deploy.linux.helpers import helper_command
from deploy.records.state import STATE_FILE, JobRecord, State, StateFolder, claim, service_record
from deploy.safety import guardian
from deploy.safety.restore import undo
from deploy.settings import Settings
from env.allocation import Weight
from env.errors import InputError
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE, needs_docker, needs_groups

PROMISE_S = 1.0 * PATIENCE


@pytest.fixture
def guard(tmp_path):
    """Starts guardians of a state; its beats and their end are ours."""
    started = []

    def start(state, stderr=subprocess.DEVNULL):
        folder = StateFolder(tmp_path / "state")
        folder.save(state)
        command = helper_command("deploy.safety.guardian")
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr))
        pipe = started[-1].stdin
        os.write(pipe.fileno(), f"{folder.path / STATE_FILE}\0.".encode())
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        if process.stderr is not None:
            process.stderr.close()


def state_of(tmp_path, *jobs, runtime="docker", **more):
    """A deployment whose jobs are paused, in groups of their name that are folders."""
    state = State("guarded", "two", runtime, "", 0.0, background=1, **more)
    for name in jobs:
        (tmp_path / name).mkdir()
        weight, frozen = tmp_path / name / "cpu.weight", tmp_path / name / "cgroup.freeze"
        weight.write_text("100")
        frozen.write_text("1")
        state.jobs[name] = JobRecord(
            1, opened=True, key=name, weight_file=str(weight), freezer_file=str(frozen)
        )
    return state


def wait_until(condition, limit_s):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def pinned(*servers):
    """The records of memcacheds that a loop has moved."""
    records = [service_record(service_process.identify(server.pid)) for server in servers]
    for server in servers:
        service_process.pin(server.pid, (0,))
    return records


def test_a_terminal_that_nobody_reads_does_not_keep_it_from_acting(guard, server, tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    before = set(service_process.affinities(server.pid).values())
    process = guard(state_of(tmp_path, service=pinned(server)), writer)
    process.stdin.close()
    assert process.wait(10.0 * PATIENCE) == 0
    assert set(service_process.affinities(server.pid).values()) == before
    os.close(reader)
    os.close(writer)


def test_every_job_yields_and_runs_at_once(guard, tmp_path):
    jobs = ("a", "b", "c", "d")
    guard(state_of(tmp_path, *jobs)).stdin.close()
    files = [(tmp_path / name / "cpu.weight", tmp_path / name / "cgroup.freeze") for name in jobs]
    wait_until(
        lambda: all((w.read_text(), f.read_text()) == ("1", "0") for w, f in files), PROMISE_S
    )


def test_a_weight_that_cannot_be_written_leaves_no_job_paused(guard, tmp_path):
    state = state_of(tmp_path, "a")
    state.jobs["a"].weight_file = str(tmp_path)
    guard(state).stdin.close()
    wait_until(lambda: (tmp_path / "a" / "cgroup.freeze").read_text() == "0", PROMISE_S)


def test_what_is_refused_is_tried_again(guard, tmp_path):
    state = state_of(tmp_path, "a", "b")
    refusing = tmp_path / "a" / "cgroup.freeze"
    refusing.unlink()
    refusing.mkdir()
    process = guard(state)
    process.stdin.close()
    wait_until(lambda: (tmp_path / "b" / "cgroup.freeze").read_text() == "0", PROMISE_S)
    refusing.rmdir()
    refusing.write_text("1")
    assert process.wait(10.0 * PATIENCE) == 0
    assert refusing.read_text() == "0"


def test_a_loop_that_is_back_is_left_the_rest(guard, tmp_path):
    state = state_of(tmp_path, "a", "b")
    slow = tmp_path / "a" / "cgroup.freeze"
    slow.unlink()
    os.mkfifo(slow)
    process = guard(state)
    assert slow.read_text() == "0"  # it was silent
    os.write(process.stdin.fileno(), b".")
    slow.write_text("0")  # what is read back
    os.write(process.stdin.fileno(), b"q")
    assert process.wait(10.0 * PATIENCE) == 0
    assert (tmp_path / "b" / "cgroup.freeze").read_text() == "1"


def test_another_loop_that_has_taken_over_is_left_the_rest(guard, server, tmp_path):
    service = [replace(record, started=-1) for record in pinned(server)]  # it was restarted since
    process = guard(state_of(tmp_path, "a", service=service))
    with claim():
        process.stdin.close()
        assert process.wait(10.0 * PATIENCE) == 0
    assert (tmp_path / "a" / "cpu.weight").read_text() == "1"


def has_read(process):
    """Whether a guardian has read all that it was told, and the state before that."""
    return not unread_by(process.stdin.fileno())


def unread_by(pipe):
    """How much of what was written to a pipe is still to be read."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


@pytest.mark.parametrize("instead", [None, "{", "a folder"])
def test_a_state_that_can_no_longer_be_read_is_remembered(guard, server, tmp_path, instead):
    before = set(service_process.affinities(server.pid).values())
    process = guard(state_of(tmp_path, service=pinned(server)), subprocess.PIPE)
    wait_until(lambda: has_read(process), 10.0 * PATIENCE)
    file = tmp_path / "state" / STATE_FILE
    file.unlink()
    if instead == "a folder":
        file.mkdir()
    elif instead:
        file.write_text(instead)
    process.stdin.close()
    assert process.wait(10.0 * PATIENCE) == 0
    assert set(service_process.affinities(server.pid).values()) == before
    said = process.stderr.read().decode()
    assert f"{STATE_FILE} cannot be read" in said
    assert "memcached has its vCPUs back" in said


def test_a_state_that_was_never_read_is_said_to_be_unknown(guard, tmp_path, monkeypatch):
    state = state_of(tmp_path)
    monkeypatch.setattr(StateFolder, "save", lambda folder, state: None)
    process = guard(state, subprocess.PIPE)
    process.stdin.close()
    said = ""
    while "not known" not in said:
        line = process.stderr.readline().decode()
        assert line
        said += line
    assert f"{STATE_FILE} cannot be read" in said


def test_nothing_that_is_gone_is_said_to_be_restored(guard, server, tmp_path):
    service = [replace(record, started=-1) for record in pinned(server)]
    state = state_of(tmp_path, service=service, runtime="process")
    gone = str(tmp_path / "nowhere" / "cpu.weight")
    state.jobs["a"] = JobRecord(1, opened=True, key="1-0", weight_file=gone)
    process = guard(state, subprocess.PIPE)
    process.stdin.close()
    assert process.wait(10.0 * PATIENCE) == 0
    said = process.stderr.read().decode()
    assert "memcached is gone" in said and "a is gone" in said
    assert "back" not in said and "yields" not in said


def test_a_job_that_waits_at_its_gate_is_left_alone(guard, tmp_path):
    state = state_of(tmp_path, "a", "b", runtime="process")
    state.jobs["a"].opened = False
    process = guard(state, subprocess.PIPE)
    process.stdin.close()
    assert process.wait(10.0 * PATIENCE) == 0
    said = process.stderr.read().decode()
    assert "guardian: b" in said and "guardian: a" not in said
    assert (tmp_path / "a" / "cpu.weight").read_text() == "100"
    assert (tmp_path / "b" / "cpu.weight").read_text() == "1"


@needs_groups
@pytest.mark.parametrize("weight", list(Weight))
def test_a_job_in_a_group_yields_whatever_it_had(guard, server, tmp_path, weight):
    hierarchy = usable_hierarchy()
    group = job_groups_beside(hierarchy, server.pid)(f"coretide-guarded-{os.getpid()}")
    group.create()
    try:
        group.set_weight(weight)
        state = state_of(tmp_path, runtime="process")
        weight_file = str(group.weight_file)
        state.jobs["a"] = JobRecord(1, opened=True, group=str(group.path), weight_file=weight_file)
        process = guard(state)
        process.stdin.close()
        assert process.wait(10.0 * PATIENCE) == 0
        assert is_idle(hierarchy, group.path)
        assert group.weight() == Weight.BACKGROUND
    finally:
        group.remove()


@needs_groups
@pytest.mark.parametrize("weight", list(Weight))
def test_restoring_ends_a_job_and_its_group_whether_it_is_idle_or_not(server, tmp_path, weight):
    hierarchy, folder = usable_hierarchy(), StateFolder(tmp_path / "state")
    group = job_groups_beside(hierarchy, server.pid)(f"coretide-guarded-{os.getpid()}")
    group.create()
    group.set_weight(weight)
    state = state_of(tmp_path, runtime="process", service=pinned(server))
    state.jobs["a"] = JobRecord(1, group=str(group.path), weight_file=str(group.weight_file))
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as job:
        group.join(job.pid)
        assert undo(state, folder, ProcessRuntime(), hierarchy) == []
        assert job.wait(10.0 * PATIENCE) == -signal.SIGKILL
    assert not group.exists()


def test_without_groups_all_of_a_paused_session_yields_and_runs(guard, tmp_path):
    script = "sleep 100 & echo $!; wait"
    leader = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    pids = [leader.pid, int(leader.stdout.readline())]
    os.killpg(leader.pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: [service_process.stat_fields(pid)[0] for pid in pids] == ["T", "T"], 10.0
        )
        state = state_of(tmp_path, runtime="process")
        key = f"{leader.pid}-{service_process.identify(leader.pid).started}"
        state.jobs["a"] = JobRecord(1, opened=True, key=key)
        process = guard(state)
        process.stdin.close()
        assert process.wait(10.0 * PATIENCE) == 0
        assert "T" not in [service_process.stat_fields(pid)[0] for pid in pids]
        assert {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_IDLE}
        session = Path(f"/proc/{leader.pid}/autogroup")
        assert not session.exists() or session.read_text().endswith("nice 19\n")
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        leader.stdout.close()


def test_it_is_told_of_the_docker_that_the_environment_names(scenario_file, tmp_path, monkeypatch):
    scenario = load_scenario(scenario_file())
    settings = Settings("127.0.0.1", 11211, "docker", None, False, tmp_path, tmp_path)
    folder = StateFolder(tmp_path / "state")
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere/else.sock")
    assert begin_state(scenario, settings, folder).docker == "unix:///somewhere/else.sock"
    monkeypatch.delenv("DOCKER_HOST")
    assert begin_state(scenario, settings, folder).docker == "unix:///var/run/docker.sock"


def test_a_state_that_cannot_be_read_is_refused_with_the_way_out(scenario_file, tmp_path):
    settings = Settings("127.0.0.1", 11211, "process", None, False, tmp_path, tmp_path)
    folder = StateFolder(tmp_path / "state")
    (folder.path / STATE_FILE).write_text('{"nonce"')
    with pytest.raises(InputError, match=r"damaged .*; --restore ends what it has left"):
        begin_state(load_scenario(scenario_file()), settings, folder)


@pytest.fixture
def launched(server, tmp_path):
    """A guardian as a loop has one, which watches a memcached that was moved."""
    folder = StateFolder(tmp_path / "state")
    folder.save(state_of(tmp_path, service=pinned(server)))
    watcher = guardian.launch()
    watcher.watch(folder.path / STATE_FILE)
    yield watcher
    watcher.close()
    guardian._kill(watcher.pid)


def beat_until_replaced(watcher):
    first, now_s = watcher.pid, 1.0
    end_s = time.monotonic() + 10.0 * PATIENCE
    while watcher.pid == first:
        assert time.monotonic() < end_s
        now_s += guardian.BEAT_EVERY_S
        watcher.beat(now_s)
        time.sleep(0.001)
    return first


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guardian_that_dies_or_is_stuck_is_replaced(launched, server, number, capfd):
    everywhere = {tuple(sorted(os.sched_getaffinity(0)))}
    os.kill(launched.pid, number)
    os.waitid(os.P_PID, launched.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    first = beat_until_replaced(launched)
    assert not Path(f"/proc/{first}").exists()
    launched.close()  # as the loop's death does
    wait_until(
        lambda: set(service_process.affinities(server.pid).values()) == everywhere, 5.0 * PATIENCE
    )
    # What it still says while the output is read would be written over what was said before.
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG
    wait_until(lambda: os.waitid(os.P_PID, launched.pid, ended), 5.0 * PATIENCE)
    why = "has died" if number == signal.SIGKILL else "does not answer"
    assert capfd.readouterr().err.count(f"the guardian {why}; a new one watches") == 1


def test_a_guardian_that_cannot_be_replaced_is_tried_again(launched, monkeypatch, capfd):
    os.kill(launched.pid, signal.SIGKILL)
    os.waitid(os.P_PID, launched.pid, os.WEXITED | os.WNOWAIT)
    first = launched.pid
    with monkeypatch.context() as full:
        full.setattr(os, "posix_spawn", lambda *_, **__: os.open("/nowhere", os.O_RDONLY))
        for now_s in range(1, 5):
            launched.beat(float(now_s))
    assert launched.pid == first
    beat_until_replaced(launched)
    assert "the guardian has died; none can be started: No such file" in capfd.readouterr().err


def test_the_end_of_a_stuck_guardian_is_not_waited_for_long(launched, monkeypatch):
    monkeypatch.setattr(guardian, "END_LIMIT_S", 0.1)
    os.kill(launched.pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    launched.stop()
    assert time.monotonic() - begun_s < 2.0 * PATIENCE
    assert not Path(f"/proc/{launched.pid}").exists()


def test_a_guardian_that_reads_is_left_alone(launched):
    first = launched.pid
    for beats in range(200):
        launched.beat(1.0 + beats * guardian.BEAT_EVERY_S)
        wait_until(lambda: not unread_by(launched._pipe), 10.0 * PATIENCE)
    assert launched.pid == first
    launched.stop()


# --- restoring without a state ---


def guardian_of(run):
    """The process id of a deployment's guardian: a fork of the loop."""
    loop = run.process.pid
    children = Path(f"/proc/{loop}/task/{loop}/children").read_text().split()
    command = Path(f"/proc/{loop}/cmdline").read_bytes()
    (found,) = (pid for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == command)
    return int(found)


def kill_with_guardian(run):
    """End the loop and its guardian at once, so that nobody makes anything safe."""
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(guardian_of(run), signal.SIGKILL)
    run.kill()


def test_a_loop_that_outlives_its_guardian_has_a_new_one(
    deploy, server, scenario_file, groups_file
):
    jobs = {"dedup": ["sleep", "1000"], "radix": ["sleep", "1000"]}
    options = ["--policy", str(groups_file), "--scenario", str(scenario_file(**jobs))]
    run = deploy(*options, "--runtime", "process")
    run.expect(r"memcached update_cores \[0\]$")
    os.kill(guardian_of(run), signal.SIGKILL)
    run.expect("the guardian has died; a new one watches")
    run.kill()
    everywhere = {tuple(sorted(os.sched_getaffinity(0)))}
    wait_until(
        lambda: set(service_process.affinities(server.pid).values()) == everywhere, 5.0 * PATIENCE
    )


def processes_of(run):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{run.state}/attempt-".encode() in path.read_bytes():
                found.append(path)
    return found


def groups_of(run):
    return find_groups(Path("/sys/fs/cgroup"), f"coretide-{run.nonce}-")


@pytest.fixture
def killed(deploy, server, scenario_file, groups_file):
    """A deployment that was killed together with its guardian, memcached on vCPU 0."""
    scenario = scenario_file(dedup=["sleep", "1000"], radix=["sleep", "1000"])

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
    assert len(processes_of(run)) >= 2
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
    assert len(processes_of(run)) >= 2


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
        restoring = deploy(
            *("--restore", "--docker", f"unix://{tmp_path}/docker.sock"),
            program=("-m", "tests.live.faults", "docker-hangs"),
        )
        assert restoring.finish() == 1
        restoring.expect("containers cannot be looked for: Docker")
