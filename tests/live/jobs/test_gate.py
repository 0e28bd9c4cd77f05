"""Jobs that are made ahead wait at their gates, cost nothing there, and begin when told to."""

import contextlib
import errno
import json
import os
import select
import signal
import statistics
import subprocess
import time
from pathlib import Path

import docker
import pytest
import yaml

from deploy.assembly import group_maker, usable_hierarchy
from deploy.jobs import gate
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.job_run import SPARES
from deploy.jobs.runtimes import ProcessRuntime
from deploy.linux.cgroups import members
from deploy.linux.sensors import VcpuClock
from deploy.loop.actuator import Actuator
from deploy.records import proof
from deploy.records.recorder import Recorder
from deploy.records.state import State, StateFolder
from deploy.safety.restore import undo
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE, needs_docker, needs_groups

ARGUMENTS = ["a b", "", "*", "it's", '"$(id)"', "{threads}", "\\n", "-n", "`id`;", "t={threads}!"]
SHELLS = [
    pytest.param(["sh"], id="sh"),
    pytest.param(["bash", "--posix"], id="bash"),
    pytest.param(["busybox", "sh"], id="busybox"),
]


def wait_until(condition, limit_s=20.0):
    """Poll until something is so."""
    end_s = time.monotonic() + limit_s * PATIENCE
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def is_waited_at(folder):
    """Whether a wrapper has come to its gate."""
    try:
        os.close(os.open(gate.gate_file(folder), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


# --- the gate itself --------------------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path):
    """Starts wrappers that print their arguments, in any shell; they end with the test."""
    proof.prepare(tmp_path)
    gate.make(tmp_path)
    command = ["printf", "%s\\0", *ARGUMENTS]
    commands = {
        count: [part.replace("{threads}", str(count)) for part in command] for count in (1, 2, 12)
    }
    files = [proof.proof_file(tmp_path), os.devnull, gate.gate_file(tmp_path)]
    with contextlib.ExitStack() as stack:

        def start(shell):
            _, *arguments = proof.wrapped(commands, *map(str, files))
            try:
                process = subprocess.Popen([*shell, *arguments], stdout=subprocess.PIPE)
            except FileNotFoundError:
                pytest.skip(f"no {shell[0]} here")
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("threads", [1, 2, 12])
def test_the_job_gets_the_threads_and_its_arguments_as_they_are(waiting, tmp_path, shell, threads):
    process = waiting(shell)
    assert not proof.begun(tmp_path)
    gate.await_passage(tmp_path, threads)
    said, _ = process.communicate(timeout=10.0 * PATIENCE)
    assert said.decode().split("\0")[:-1] == [
        part.replace("{threads}", str(threads)) for part in ARGUMENTS
    ]
    assert proof.exit_code(tmp_path) == process.returncode == 0


def has_said(folder, said):
    """Whether a writer got rid of it: the wrapper may just be opening the gate anew."""
    try:
        with gate.gate_file(folder).open("wb") as file:
            file.write(said)
    except BrokenPipeError:
        return False
    return True


@pytest.mark.parametrize("shell", SHELLS)
def test_whoever_opens_the_gate_and_says_nothing_lets_nobody_through(waiting, tmp_path, shell):
    """As a loop that dies between the two."""
    process = waiting(shell)
    for said in (b"", b"", b"1"):  # a line that is cut is none
        wait_until(lambda said=said: has_said(tmp_path, said))
    time.sleep(0.05)
    assert process.poll() is None and not proof.begun(tmp_path)
    gate.await_passage(tmp_path, 2)
    assert process.communicate(timeout=10.0 * PATIENCE)[0].endswith(b"t=2!\0")


def test_opening_it_again_and_again_starts_one_job(waiting, tmp_path):
    process = waiting(["sh"])
    wait_until(lambda: is_waited_at(tmp_path))
    os.kill(process.pid, signal.SIGSTOP)  # it does not read what is written
    for _ in range(20_000):  # more than the pipe holds, and nobody is blocked
        gate.let_through(tmp_path, 1)
    os.kill(process.pid, signal.SIGCONT)
    gate.await_passage(tmp_path, 1)
    said, _ = process.communicate(timeout=10.0 * PATIENCE)
    assert said.count(b"a b\0") == 1
    assert gate.let_through(tmp_path, 1)


def test_a_gate_that_is_gone_is_said_and_its_wrapper_ends(waiting, tmp_path):
    process = waiting(["sh"])
    opened = gate.gate_file(tmp_path).open("wb")  # it waits there
    gate.gate_file(tmp_path).unlink()
    opened.close()
    process.communicate(timeout=10.0 * PATIENCE)
    assert not proof.begun(tmp_path)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        gate.let_through(tmp_path, 1)


# --- under an actuator ------------------------------------------------------------------------

RUNTIMES = ["process", pytest.param("docker", marks=[pytest.mark.survival, needs_docker])]
SLEEP = ["sleep", "100{threads}"]


@pytest.fixture(params=RUNTIMES)
def actuators(server, scenario_file, tmp_path, request):
    """Makes actuators of two jobs, each of which takes over from the one before it."""
    scenario = load_scenario(scenario_file(dedup=SLEEP, radix=SLEEP))
    folder = StateFolder(tmp_path / "state")
    state = State("gates", scenario.name, request.param, "", time.monotonic())
    folder.begin(state)
    recorder = Recorder(tmp_path / "report", scenario, state.started_s)
    hierarchy, runtime = usable_hierarchy(), ProcessRuntime()
    if request.param == "docker":
        url = request.getfixturevalue("docker_daemon").url
        runtime = DockerRuntime(hierarchy, state.nonce, url)
    groups = group_maker(state, hierarchy, [server.pid])
    vcpus, made = VcpuClock(scenario.machine.vcpus, None), []

    def make(crashed=False):
        """A loop that is killed closes nothing and writes nothing more."""
        for earlier in made[-1:]:
            for one in earlier._workers:
                one.shutdown(wait=True)
            if not crashed:
                earlier.close()
        made.append(Actuator(scenario, runtime, folder, folder.load(), groups, recorder, vcpus))
        made[-1].take_over(now_s(made[-1]))
        return made[-1]

    yield make
    made[-1].close()
    assert undo(made[-1].state, folder, runtime, hierarchy) == []
    assert not alive(made[-1])
    vcpus.close()
    recorder.close()


def alive(actuator):
    """The processes of all jobs."""
    groups = [run._group for run in actuator.jobs.values() if run._group is not None]
    return [pid for group in groups for pid in members(group.hierarchy, group.path)]


def now_s(actuator):
    return time.monotonic() - actuator.state.started_s


def poll_until(actuator, condition):
    actuator.poll(now_s(actuator))
    end_s = time.monotonic() + 30.0 * PATIENCE
    while not condition():
        assert time.monotonic() < end_s
        actuator.wait(0.005)
        actuator.poll(now_s(actuator))


def want(actuator, *names, state=JobState.RUNNING, **more):
    """Decide the starts of some jobs; of none, everything is made ahead."""
    job = JobAllocation(state, (1,), **{"threads": 2, **more})
    actuator.apply(Allocation((0,), dict.fromkeys(names, job)))


def waits(run):
    return run.instance is not None and not run.record.opened


def made_ahead(actuators):
    """An actuator whose jobs all wait."""
    actuator = actuators()
    want(actuator)
    poll_until(actuator, lambda: all(waits(run) for run in actuator.jobs.values()))
    for run in actuator.jobs.values():
        at_its_gate(run)
    return actuator


def at_its_gate(run):
    """Wait until the wrapper has come there, which takes it a millisecond."""
    wait_until(lambda: is_waited_at(run.instance.attempt.folder))


def sleeps(run):
    """How long each process that the job consists of sleeps: the thread count is a part of it."""
    found = []
    for pid in members(run._group.hierarchy, run._group.path):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            found += line[1:2] if line[0] == "sleep" else []
    return found


@needs_groups
def test_a_decided_start_opens_the_gate_at_once(actuators):
    delays_s, opened_s = [], []
    actuator = made_ahead(actuators)
    for name, run in actuator.jobs.items():
        begun_s = time.monotonic()
        want(actuator, name)
        opened_s.append(time.monotonic() - begun_s)
        wait_until(lambda run=run: proof.begun(run.instance.attempt.folder))
        delays_s.append(time.monotonic() - begun_s)
    assert statistics.median(delays_s) < 0.05 * PATIENCE
    assert min(opened_s) < 0.005 * PATIENCE
    poll_until(actuator, lambda: all(run.settled for run in actuator.jobs.values()))
    for run in actuator.jobs.values():
        assert run.record.decided_s <= run.record.start_s <= run.record.begun_s
        assert run.record.threads == 2
        wait_until(lambda run=run: sleeps(run) == ["1002"])


@needs_groups
def test_before_its_gate_is_opened_a_job_counts_as_not_started_and_holds_nothing(actuators):
    actuator = made_ahead(actuators)
    assert all(run.settled for run in actuator.jobs.values())
    for run in actuator.jobs.values():
        assert run.state == JobState.PENDING
        assert (run.record.start_s, run.cpu_s(), run.changes) == (None, 0.0, 0)
        assert sleeps(run) == []
    files = [Path(f"/proc/{pid}/smaps_rollup") for pid in alive(actuator)]
    held = [line.split()[1] for file in files for line in file.read_text().splitlines()[1:3]]
    assert sum(map(int, held[1::2])) < 4 << 10  # KiB of both jobs' own


@needs_groups
def test_nothing_is_made_ahead_before_the_first_decision_or_while_memcached_is_busy(actuators):
    actuator = actuators()
    actuator.poll(now_s(actuator))
    assert not any(run.busy for run in actuator.jobs.values())
    want(actuator)
    for at_s in (0.0, 100.0):
        actuator.poll(now_s(actuator) + at_s, slack=False)
        assert not any(run.busy for run in actuator.jobs.values())
    actuator.poll(now_s(actuator))
    assert actuator.jobs["dedup"].busy


@needs_groups
@pytest.mark.parametrize(
    ("service", "cores", "weight"),
    [((0,), (1,), Weight.NORMAL), ((0, 1), (0, 1), Weight.BACKGROUND)],
)
def test_what_is_made_ahead_stays_apart_from_memcached_or_yields_to_it(
    actuators, service, cores, weight
):
    actuator = actuators()
    actuator.apply(Allocation(service, {}))
    run = actuator.jobs["dedup"]
    poll_until(actuator, lambda: waits(run))
    place = run.instance.placement
    assert (place.cores(), place.weight()) == (cores, weight)


@needs_groups
def test_a_start_that_is_decided_while_it_is_made_follows_at_once(actuators):
    actuator = actuators()
    want(actuator)
    actuator.poll(now_s(actuator))
    run = actuator.jobs["dedup"]
    assert run.in_turn
    want(actuator, "dedup")
    assert run.state == JobState.RUNNING
    poll_until(actuator, lambda: run.settled)
    assert (run.record.attempts, run.record.opened) == (1, True)


@needs_groups
def test_a_decided_start_comes_before_what_is_made_ahead(actuators):
    actuator = actuators()
    want(actuator, "radix")
    actuator.poll(now_s(actuator))
    assert actuator.jobs["radix"].in_turn and not actuator.jobs["dedup"].busy


@needs_groups
def test_one_that_dies_at_its_gate_is_made_anew_and_has_not_failed(actuators):
    actuator = made_ahead(actuators)
    run = actuator.jobs["dedup"]
    for _ in range(SPARES - 1):
        pid = run.instance.pid
        os.kill(pid, signal.SIGKILL)
        poll_until(actuator, lambda pid=pid: waits(run) and run.instance.pid != pid)
        assert (run.record.attempts, run.record.failures) == (1, 0)
        assert run.state == JobState.PENDING
    at_its_gate(run)
    want(actuator, "dedup")
    poll_until(actuator, lambda: run.settled)
    assert (run.record.attempts, run.record.failures) == (1, 0)


@needs_groups
def test_one_that_always_dies_there_is_left_until_its_start_is_decided(actuators):
    actuator = made_ahead(actuators)
    run = actuator.jobs["dedup"]
    for _ in range(SPARES):
        poll_until(actuator, lambda: waits(run))
        os.kill(run.instance.pid, signal.SIGKILL)
        poll_until(actuator, lambda: run.instance is None)
    poll_until(actuator, lambda: run.settled)
    assert (run.record.attempts, run.record.failures, run.state) == (0, 0, JobState.PENDING)
    want(actuator, "dedup")
    poll_until(actuator, lambda: run.settled)
    assert (run.record.attempts, run.record.failures) == (1, 0)


@needs_groups
def test_one_that_dies_as_its_gate_is_opened_is_made_and_opened_anew(actuators):
    actuator = made_ahead(actuators)
    run = actuator.jobs["dedup"]
    os.kill(run.instance.pid, signal.SIGKILL)
    select.select([run.instance.ended], [], [], 10.0 * PATIENCE)
    want(actuator, "dedup")
    assert run.state == JobState.RUNNING
    poll_until(actuator, lambda: run.settled and run.record.begun_s is not None)
    assert (run.record.attempts, run.record.failures) == (1, 0)


# --- taken over after a crash, on each side of the record -------------------------------------


@needs_groups
def test_what_waits_when_a_loop_is_killed_waits_for_the_next_one(actuators):
    first = made_ahead(actuators)
    pids = {name: run.instance.pid for name, run in first.jobs.items()}
    again = actuators(crashed=True)
    assert {name: run.instance.pid for name, run in again.jobs.items()} == pids
    assert {run.state for run in again.jobs.values()} == {JobState.PENDING}
    want(again, "dedup")
    run = again.jobs["dedup"]
    poll_until(again, lambda: run.settled)
    assert (run.instance.pid, run.record.attempts) == (pids["dedup"], 1)
    assert waits(again.jobs["radix"])


@needs_groups
def test_a_gate_that_was_written_down_and_not_opened_is_opened_by_the_next_loop(
    actuators, monkeypatch
):
    first = made_ahead(actuators)
    with monkeypatch.context() as killed:
        killed.setattr(gate, "let_through", lambda folder, threads: False)
        want(first, "dedup", threads=1)
    assert json.loads((first._context.folder.path / "state.json").read_text())["jobs"]["dedup"][
        "opened"
    ]
    again = actuators(crashed=True)
    run = again.jobs["dedup"]
    assert run.state == JobState.RUNNING
    want(again)
    poll_until(again, lambda: run.settled)
    assert (run.record.threads, run.record.attempts) == (1, 1)
    assert proof.begun(run.instance.attempt.folder)


@needs_groups
def test_a_gate_that_is_not_written_down_is_not_opened(actuators, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    first = made_ahead(actuators)
    with monkeypatch.context() as full:
        full.setattr(StateFolder, "save", refuse)
        want(first, "dedup")
        first.poll(now_s(first))
        assert waits(first.jobs["dedup"])
        assert not proof.begun(first.jobs["dedup"].instance.attempt.folder)
    again = actuators(crashed=True)
    assert again.jobs["dedup"].state == JobState.PENDING
    want(again, "dedup")
    poll_until(again, lambda: again.jobs["dedup"].settled)


@needs_groups
def test_a_job_whose_gate_was_opened_runs_once_under_the_next_loop(actuators):
    first = made_ahead(actuators)
    want(first, "dedup")  # and is killed in the same moment
    again = actuators(crashed=True)
    run = again.jobs["dedup"]
    assert run.state == JobState.RUNNING
    want(again)
    poll_until(again, lambda: run.settled)
    wait_until(lambda: sleeps(run))
    assert sleeps(run) == ["1002"]
    assert (run.record.attempts, run.record.failures) == (1, 0)


@needs_groups
def test_one_that_died_while_no_loop_ran_is_made_anew(actuators):
    first = made_ahead(actuators)
    again_pid = first.jobs["dedup"].instance.pid
    os.kill(again_pid, signal.SIGKILL)
    again = actuators(crashed=True)
    want(again, "dedup")
    run = again.jobs["dedup"]
    poll_until(again, lambda: run.settled and run._passed)
    assert (run.record.attempts, run.record.failures) == (1, 0)


# --- whole deployments ------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_deployment_reports_how_long_its_starts_took(
    deploy, scenario_file, groups_file, runtime, request
):
    scenario = scenario_file(dedup=["sleep", "1"], radix=["sleep", "1"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", runtime]
    if runtime == "docker":
        options += ["--docker", request.getfixturevalue("docker_daemon").url]
    run = deploy(*options)
    assert run.finish() == 0, run.lines
    report = json.loads((run.report / "report.json").read_text())
    delays_ms = [1e3 * (job["begun_s"] - job["decided_s"]) for job in report["jobs"].values()]
    assert report["start_delay_ms"]["max"] == pytest.approx(max(delays_ms))
    assert all(
        job["decided_s"] <= job["start_s"] <= job["begun_s"] for job in report["jobs"].values()
    )


@needs_docker
@pytest.mark.survival
def test_restore_removes_what_waits(deploy, scenario_file, groups_file, docker_daemon):
    """radix is to begin once dedup has ended, and waits meanwhile."""
    scenario = scenario_file(dedup=["sleep", "60"], radix=["sleep", "60"])
    rule = yaml.safe_load(groups_file.read_text())
    rule["groups"] = [[job] for job in rule["groups"][0]]
    groups_file.write_text(yaml.safe_dump(rule))
    options = ["--policy", str(groups_file), "--scenario", str(scenario)]
    run = deploy(*options, "--docker", docker_daemon.url)
    run.expect(r"dedup start \[")
    client = docker.DockerClient(base_url=docker_daemon.url)
    try:
        wait_until(lambda: any("radix" in one.name for one in client.containers.list()), 60.0)
        run.kill()
        undone = deploy("--restore")
        assert undone.finish() == 0, undone.lines
        assert not [one for one in client.containers.list(all=True) if run.nonce in one.name]
    finally:
        client.close()
