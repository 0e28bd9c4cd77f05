"""The parts of the live side one by one: sensors, the guard around a policy, the actuator."""

import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import wait
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agents.policy import Controller
from deploy.assembly import group_maker, usable_hierarchy
from deploy.commands import state_folder
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.job_run import GIVEN_UP, RETRIES, JobRun
from deploy.jobs.runtimes import Attempt, JobFailedError, ProcessRuntime, RuntimeUnavailableError
from deploy.linux import service_process
from deploy.linux.cgroups import JobGroup, job_groups_beside
from deploy.linux.sensors import Cpu, Requests, ServiceSensor, StatsConnection, VcpuClock
from deploy.load.probe import Probe
from deploy.loop.actuator import LONGEST_HOLD_S, LONGEST_REST_S, REST, Actuator
from deploy.loop.dry_run import DryActuator
from deploy.loop.live_machine import LiveMachine
from deploy.loop.loop import GuardedPolicy
from deploy.records.proof import prepare
from deploy.records.recorder import Recorder
from deploy.records.state import State, StateFolder
from deploy.safety import restore
from deploy.safety.restore import undo
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import InputError
from env.scenario import load_scenario
from env.telemetry import JobTelemetry, ServiceTelemetry, Telemetry
from tests.live.conftest import PATIENCE, needs_docker, needs_groups

STATS = (
    b"STAT pid 1\r\nSTAT threads 2\r\n"
    b"STAT cmd_get %d\r\nSTAT cmd_set 0\r\nSTAT cmd_touch 0\r\nEND\r\n"
)

LONG = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "100000000"]


def polled(sensor, seconds, until=lambda: False):
    """Ask and receive for a while, a few times a period."""
    end_s = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < end_s and not until():
        sensor.ask(time.monotonic())
        time.sleep(0.004)
        sensor.receive(time.monotonic())


def test_the_sensor_counts_requests_and_cpu_time(server):
    sensor = ServiceSensor(server.host, server.port)
    polled(sensor, 2.0, lambda: sensor.requests is not None)
    with socket.create_connection((server.host, server.port)) as client:
        for _ in range(300):
            client.sendall(b"get nothing\r\n")
            client.recv(100)
    polled(sensor, 2.0, lambda: sensor.requests.count >= 300)
    assert sensor.who == service_process.identify(server.pid)
    assert sensor.requests.count == 300
    assert 0.0 < sensor.cpu.cpu_s < 1.0 * PATIENCE
    assert sensor.age_s(time.monotonic()) < 0.5
    sensor.close()


class Impostor:
    """Listens like memcached and answers as it is told."""

    def __init__(self, *answers):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._answers = list(answers)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                while connection.recv(100):
                    connection.sendall(self._answers.pop(0) if self._answers else b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff garbage",
        b"STAT pid none\r\nSTAT threads 2\r\nSTAT cmd_get x\r\nEND\r\n",
        b"END\r\n",
        STATS % 5,
        b"x" * 100_000,
    ],
)
def test_an_answer_that_makes_no_sense_or_never_comes_is_no_reading(answer):
    """A pid that is no memcached of this port is not believed either."""
    impostor = Impostor(*[answer] * 100)
    sensor = ServiceSensor("127.0.0.1", impostor.port)
    polled(sensor, 0.3)
    assert sensor.who is None
    assert sensor.age_s(time.monotonic()) == float("inf")
    sensor.close()
    impostor.listener.close()


def test_whoever_listens_there_under_a_name_that_is_no_text_is_no_memcached():
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            name.write_bytes(b"\xff")
            assert not service_process.is_memcached(os.getpid(), listener.getsockname()[1])
        finally:
            name.write_bytes(before.strip())


def test_a_counter_that_goes_back_gives_no_rate():
    impostor = Impostor(*[STATS % count for count in (1000, 1500, 20, 70)])
    sensor = ServiceSensor("127.0.0.1", impostor.port)
    counts, rates = [], []
    for _ in range(300):
        sensor.stats.ask(time.monotonic())
        time.sleep(0.004)
        reading = sensor.stats.receive()
        if reading is not None:
            sensor._count(reading)
            counts.append(sensor.requests.count)
            rates.append(sensor.qps)
        if len(counts) == 4:
            break
    assert counts == [0, 500, 500, 550]
    assert min(rates) >= 0.0
    sensor.close()
    impostor.listener.close()


def test_a_clock_that_goes_back_or_leaps_is_counted_on_from_the_last_good_reading(
    server, monkeypatch
):
    sensor = ServiceSensor(server.host, server.port)
    polled(sensor, 2.0, lambda: sensor.cpu is not None)
    read, shown, now_s = os.pread, [], time.monotonic()
    for lie in (b"7 7 7", b"%d 7 7" % 10**30, None):
        if lie is None:
            monkeypatch.setattr(os, "pread", read)
        else:
            monkeypatch.setattr(os, "pread", lambda *_, lie=lie: lie)
        for _ in range(3):
            now_s += 0.025  # in windows of microseconds a thread's clock may leap by itself
            sensor.ask(now_s)
            shown.append(sensor.cpu.cpu_s)
    assert shown == sorted(shown)
    assert shown[-1] - shown[0] < 0.5
    assert 0.0 <= sensor.cpu_cores < 2.0
    sensor.close()


def test_reading_waits_no_longer_than_it_is_told(server):
    """memcached that is stopped answers nothing, and what it answers later is not lost."""
    connection = StatsConnection(server.host, server.port)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        worst = 0.0
        for _ in range(50):
            before = time.perf_counter()
            connection.ask(time.monotonic())
            assert connection.receive(0.002) is None
            worst = max(worst, time.perf_counter() - before)
        assert worst < 0.1 * PATIENCE
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert connection.receive(2.0 * PATIENCE) is not None
    connection.close()


def test_a_sensor_works_with_more_files_open_than_select_can_name(server):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    connection = StatsConnection(server.host, server.port)
    try:
        connection.ask(time.monotonic())
        connection.ask(time.monotonic())
        assert connection.receive(2.0 * PATIENCE) is not None
    finally:
        connection.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_busy_time_of_the_vcpus_grows_with_work():
    clock = VcpuClock(1, None)
    before = sum(clock.read())
    end_s = time.monotonic() + 0.2
    while time.monotonic() < end_s:
        pass
    assert sum(clock.read()) >= before
    clock.close()


def test_busy_time_is_read_to_the_last_vcpu_if_the_kernel_gives_a_line_at_a_time(monkeypatch):
    clock, read = VcpuClock(2, None), os.pread

    def line(file, size, offset):
        whole = read(file, 64 << 10, 0)
        return whole[offset : whole.find(b"\n", offset) + 1 or None][:size]

    monkeypatch.setattr(os, "pread", line)
    assert sum(clock.read()) > 0.0
    assert clock.bad_since_s == float("inf")
    clock.close()


@pytest.mark.parametrize("lie", [b"", b"cpu0 1", b"cpu0 " + b"9" * 400, b"cpu0 " + b"0 " * 9])
def test_busy_time_that_makes_no_sense_is_no_reading(monkeypatch, lie):
    clock = VcpuClock(1, None)
    before, read = clock.read(), os.pread
    monkeypatch.setattr(os, "pread", lambda *_: lie)
    assert clock.read() == before
    bad_since_s = clock.bad_since_s
    assert clock.read() == before
    assert clock.bad_since_s == bad_since_s < time.monotonic()
    monkeypatch.setattr(os, "pread", read)
    assert sum(clock.read()) >= sum(before)
    assert clock.bad_since_s == float("inf")
    clock.close()


# --- the machine ---


class Scripted:
    """Readings of memcached as a test wants them: a rate at each poll, None for no new reading."""

    def __init__(self, *rates):
        self.who = self.requests = None
        self.cpu = Cpu(0.0, 0.0, 0.0)
        self.qps = self.cpu_cores = 0.0
        self._rates = list(rates)

    def ask(self, now_s):
        """Nothing is asked."""

    def receive(self, now_s, patience_s):
        rate = self._rates.pop(0)
        if rate is not None:
            self.requests, self.qps = Requests(now_s, 1), rate

    @property
    def polls_left(self):
        return len(self._rates)


def test_a_move_of_the_load_is_confirmed_by_a_reading_of_its_own(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    state = State("move", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    sensor = Scripted(0.0, 50e3, None, None, 50e3, 50e3)
    vcpus = VcpuClock(2, None)
    machine = LiveMachine(scenario, DryActuator(scenario, state), sensor, vcpus, recorder)
    machine.poll()
    machine.apply(machine.applied)
    machine.advance(machine.polled_s + 60.0, wake=True)
    assert sensor.polls_left == 1
    vcpus.close()
    recorder.close()


class Told(DryActuator):
    """It also remembers whether memcached was said to have time to spare."""

    def poll(self, now_s, slack=True):
        self.slack = slack


def test_memcached_has_time_to_spare_below_seven_tenths_of_its_vcpus(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    state = State("slack", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    sensor, vcpus, told = Scripted(*[0.0] * 9), VcpuClock(2, None), Told(scenario, state)
    machine = LiveMachine(scenario, told, sensor, vcpus, recorder)
    machine.apply(Allocation((0,), {}), regulator_on=False)
    seen = []
    # A reading is judged by once it covers half a second: 0.6, 1.1 and 0.63 of a vCPU.
    for time_s, cpu_s in ((0.0, 7.0), (0.3, 7.3), (0.6, 7.36), (1.0, 8.0), (1.2, 8.02), (1.8, 8.4)):
        sensor.cpu = Cpu(time_s, cpu_s, 0.0)
        machine.poll()
        seen.append(told.slack)
    assert seen == [True, True, True, True, False, True]
    machine.apply(Allocation((0, 1), {}), regulator_on=False)
    sensor.cpu = Cpu(2.8, 9.5, 0.0)  # a whole vCPU is half of two
    machine.poll()
    assert told.slack
    vcpus.close()
    recorder.close()


def test_a_probe_that_has_died_is_said_once_and_shows_nothing(server, scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    state = State("probe", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    vcpus, probe = VcpuClock(2, None), Probe(server.host, server.port, 1)
    sensor, dry = Scripted(0.0, 0.0, 0.0), DryActuator(scenario, state)
    machine = LiveMachine(scenario, dry, sensor, vcpus, recorder, probe=probe)
    assert select.select([probe.file], [], [], 20.0 * PATIENCE)[0]
    machine.poll()
    probe.process.kill()
    probe.process.wait()
    for _ in range(2):
        machine.poll()
    assert machine.telemetry().service.p95_us is None
    assert [event.detail for event in recorder.recent].count("the latency probe has ended") == 1
    probe.stop()
    vcpus.close()
    recorder.close()


# --- the guard ---


class Misbehaving(Controller):
    """A policy that does what a test tells it to."""

    def __init__(self, behaviour):
        self.name, self.period_s, self.probe_window_s = "misbehaving", 0.1, 0.0
        self._behaviour = behaviour

    def decide(self, telemetry):
        return self._behaviour(telemetry)


def looking_like(scenario, time_s=1.0):
    applied = Allocation((0, 1), {name: JobAllocation(threads=1) for name in scenario.job_names})
    jobs = {name: JobTelemetry(JobState.PENDING, 0.0) for name in scenario.job_names}
    return Telemetry(time_s, ServiceTelemetry(0, 0, 0, 0, 0), (0.0, 0.0), jobs, applied)


def raises(telemetry):
    raise ZeroDivisionError("oh")


def late(telemetry):
    time.sleep(5.0)


def spins(telemetry):
    while True:
        pass


def illegal(telemetry):
    return Allocation(())


def not_a_number(telemetry):
    return Allocation((0,), {"dedup": JobAllocation(JobState.RUNNING, (float("nan"),), threads=1)})


def nothing(telemetry):
    return None


@pytest.mark.parametrize("behaviour", [raises, late, spins, illegal, not_a_number, nothing])
def test_whatever_a_policy_does_wrong_the_fallback_decides_at_once(
    scenario_file, tmp_path, behaviour
):
    scenario = load_scenario(scenario_file())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    guarded = GuardedPolicy(Misbehaving(behaviour), scenario, recorder)
    before = time.monotonic()
    allocation = guarded.decide(looking_like(scenario), "")
    assert time.monotonic() - before < 2.0 * PATIENCE
    assert allocation.validate(scenario).service_cores == (0, 1)
    assert guarded.regulated
    said = [event.detail for event in recorder.recent if "the fallback decides" in event.detail]
    assert len(said) == 1
    recorder.close()


def test_a_policy_gets_three_chances(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    asked = []

    def count(telemetry):
        asked.append(telemetry.time_s)
        raise ValueError("no")

    guarded = GuardedPolicy(Misbehaving(count), scenario, recorder)
    for second in range(60):
        guarded.decide(looking_like(scenario, float(second)), "")
    assert len(asked) == 3
    recorder.close()


def test_stale_telemetry_is_for_the_fallback_and_only_while_it_lasts(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    recorder = Recorder(tmp_path, scenario, time.monotonic())
    guarded = GuardedPolicy(Misbehaving(lambda telemetry: Allocation((0,))), scenario, recorder)
    assert guarded.decide(looking_like(scenario), "too old").service_cores == (0, 1)
    assert guarded.decide(looking_like(scenario), "").service_cores == (0,)
    recorder.close()


# --- the actuator ---


@pytest.fixture(
    params=["process", pytest.param("docker", marks=[pytest.mark.survival, needs_docker])]
)
def actuators(server, scenario_file, tmp_path, request):
    """
    Makes actuators of two long jobs beside memcached, under either runtime; undone at the end.

    Each goes on from the state that the one before it has left.
    """
    scenario = load_scenario(scenario_file(dedup=LONG, radix=LONG))
    folder = StateFolder(tmp_path / "state")
    state = State("parts", scenario.name, request.param, "", time.monotonic())
    folder.begin(state)
    recorder = Recorder(tmp_path / "report", scenario, state.started_s)
    hierarchy, runtime = usable_hierarchy(), ProcessRuntime()
    if request.param == "docker":
        url = request.getfixturevalue("docker_daemon").url
        runtime = DockerRuntime(hierarchy, state.nonce, url)
    groups = group_maker(state, hierarchy, server.pid)
    made = []

    def make():
        for earlier in made[-1:]:
            earlier.close()
        made.append(Actuator(scenario, runtime, folder, folder.load(), groups, recorder))
        return made[-1]

    yield make
    made[-1].close()
    assert undo(made[-1].state, folder, runtime, hierarchy) == []
    recorder.close()


def test_a_state_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no link"):
        StateFolder(tmp_path / "state")


def test_the_state_is_not_kept_in_a_folder_that_somebody_else_may_have_made(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert state_folder() == Path("/tmp/coretide-1234")  # what is checked, and nothing above it
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert state_folder() == Path("/run/user/1234/coretide")


@needs_groups
def test_jobs_that_cannot_be_ended_are_named_and_keep_nothing_else_from_being_undone(
    actuator, monkeypatch
):
    class Forbidden(ProcessRuntime):
        def sweep(self, folders, groups):
            raise PermissionError("no")

    monkeypatch.setattr(restore, "PAUSE_S", 0.01)
    state, folder = actuator.state, actuator._context.folder
    state.jobs["dedup"].attempts = 1
    run = actuator.jobs["dedup"]
    run.make_group()
    faults = undo(state, folder, Forbidden(), usable_hierarchy())
    assert faults == ["jobs may be left: no"]
    assert not run._group.exists()


@pytest.fixture
def actuator(actuators):
    """The only one."""
    return actuators()


def now_s(actuator):
    return time.monotonic() - actuator.state.started_s


def poll_until(actuator, condition):
    """Poll once at least, and until something is so."""
    end_s = time.monotonic() + 20.0 * PATIENCE
    actuator.poll(now_s(actuator))
    while not condition():
        assert time.monotonic() < end_s
        actuator.wait(0.005)
        actuator.poll(now_s(actuator))


def settle(actuator, *names):
    """Poll until jobs are as wanted."""
    poll_until(actuator, lambda: all(actuator.jobs[name].settled for name in names))


def bring(actuator, **wanted):
    """Have dedup as wanted."""
    job = JobAllocation(**{"state": JobState.RUNNING, "cores": (1,), "threads": 1, **wanted})
    actuator.apply(Allocation((0,), {"dedup": job}))
    settle(actuator, "dedup")


def test_once_all_is_as_wanted_the_jobs_are_left_alone_until_something_happens(
    actuator, monkeypatch
):
    looked = []
    advance = JobRun.advance
    monkeypatch.setattr(
        JobRun, "advance", lambda run, now_s: (looked.append(run.job.name), advance(run, now_s))
    )
    bring(actuator)
    actuator.poll(now_s(actuator))
    looked.clear()
    actuator.poll(now_s(actuator))
    assert not looked
    bring(actuator, cores=(0,))
    assert looked
    actuator.poll(now_s(actuator))
    looked.clear()
    actuator.forget_written()
    actuator.poll(now_s(actuator))
    assert looked
    settle(actuator, "dedup")
    os.kill(actuator.jobs["dedup"].instance.pid, signal.SIGKILL)
    poll_until(actuator, lambda: actuator.jobs["dedup"].record.failures == 1)


def test_a_start_waits_for_memcached_to_have_time_to_spare_but_not_for_ever(actuator):
    job, at_s = JobAllocation(JobState.RUNNING, (1,), threads=1), now_s(actuator)
    dedup, radix = actuator.jobs["dedup"], actuator.jobs["radix"]
    actuator.apply(Allocation((0,), {"dedup": job}))
    for wait_s in (0.0, 5.0, LONGEST_HOLD_S - 0.1):
        actuator.poll(at_s + wait_s, slack=False)
        assert not dedup.busy
    actuator.poll(at_s + LONGEST_HOLD_S + 0.1, slack=False)
    assert dedup.busy
    settle(actuator, "dedup")
    at_s += 100.0  # nobody has waited meanwhile
    actuator.apply(Allocation((0,), {"dedup": job, "radix": job}))
    for wait_s in (0.0, LONGEST_HOLD_S - 0.1):
        actuator.poll(at_s + wait_s, slack=False)
        assert not radix.busy
    actuator.poll(at_s + LONGEST_HOLD_S - 0.05, slack=True)
    assert radix.busy
    settle(actuator, "radix")


def test_a_start_that_nobody_has_picked_up_gives_its_descriptor_back(actuator):
    job = JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), {"dedup": job}))
    actuator.poll(now_s(actuator))
    run = actuator.jobs["dedup"]
    assert run.busy
    wait([run._call.future], timeout=20.0 * PATIENCE)
    instance, _ = run._call.future.result()
    actuator.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(instance.ended)


@needs_groups
def test_a_thousand_random_changes_end_in_what_was_wanted(actuator, server):
    actuator.follow(service_process.identify(server.pid))
    rng = random.Random(11)
    cores = [(0,), (1,), (0, 1)]
    for _ in range(1000):
        jobs = {
            name: JobAllocation(
                JobState(rng.choice([JobState.RUNNING, JobState.PAUSED])),
                rng.choice(cores),
                rng.choice(list(Weight)),
                1,
                rng.choice([None, 0.5]),
            )
            for name in actuator.jobs
        }
        wanted = Allocation(rng.choice(cores), jobs)
        actuator.apply(wanted)
        actuator.poll(now_s(actuator))
    settle(actuator, *actuator.jobs)
    assert actuator.in_force() == wanted


def test_who_has_the_number_of_a_memcached_that_is_gone_is_not_moved(actuator):
    somebody = subprocess.Popen(["sleep", "100"])
    try:
        now = service_process.identify(somebody.pid)
        before = service_process.affinities(somebody.pid)
        actuator.follow(service_process.Identity(now.pid, now.started - 1))
        actuator.apply(Allocation((0,), {}))
        actuator.poll(now_s(actuator))
        assert service_process.affinities(somebody.pid) == before
    finally:
        somebody.kill()
        somebody.wait()


@needs_groups
def test_one_start_at_a_time_in_the_order_of_asking_and_a_rest_after_each(actuator):
    jobs = {}
    for name in ("radix", "dedup"):  # not the scenario's order
        jobs[name] = JobAllocation(JobState.RUNNING, (1,), threads=1)
        actuator.apply(Allocation((0,), dict(jobs)))
        actuator.poll(now_s(actuator))
    begun_s, ended_s = {}, {}
    while len(ended_s) < len(jobs):
        at_s = now_s(actuator)
        in_turn = [name for name in jobs if actuator.jobs[name].in_turn]
        assert len(in_turn) <= 1
        for name in in_turn:
            begun_s.setdefault(name, at_s)
        for name in begun_s:
            if name not in in_turn:
                ended_s.setdefault(name, at_s)
        assert at_s < 20.0 * PATIENCE
        time.sleep(0.001)
        actuator.poll(now_s(actuator))
    assert list(begun_s) == ["radix", "dedup"]
    took_s = ended_s["radix"] - begun_s["radix"]
    # What is seen from here of a start is up to two of our turns shorter than it was.
    assert begun_s["dedup"] - ended_s["radix"] > min(REST * took_s, LONGEST_REST_S) - 0.01


@needs_groups
def test_a_job_that_the_guardian_resumed_is_paused_again(actuator):
    run, runtime = actuator.jobs["dedup"], actuator._context.runtime

    bring(actuator)
    bring(actuator, state=JobState.PAUSED)
    runtime.resume(run.instance)  # as the guardian does
    actuator.forget_written()
    settle(actuator, "dedup")
    assert runtime.paused(run.instance)
    actuator.forget_written()  # nobody did anything this time
    bring(actuator)
    assert not runtime.paused(run.instance)


@needs_groups
def test_a_weight_that_the_guardian_changed_is_written_again(actuator):
    run = actuator.jobs["dedup"]
    bring(actuator)
    run.instance.placement.set_weight(Weight.BACKGROUND)  # as the guardian does
    actuator.forget_written()
    settle(actuator, "dedup")
    assert run.instance.placement.weight() == Weight.NORMAL


@needs_groups
def test_a_quota_ends_with_the_loop_that_wanted_it(actuators):
    first = actuators()
    bring(first, quota=0.5)
    again = actuators()
    again.take_over(now_s(again))
    bring(again)
    group = again.jobs["dedup"].instance.attempt.group
    folder = group.hierarchy.folder(group.path)
    limit = folder / ("cpu.cfs_quota_us" if group.hierarchy.version == 1 else "cpu.max")
    assert limit.read_text().split()[0] in ("-1", "max")


@needs_groups
def test_a_runtime_that_falls_silent_during_a_start_is_waited_for(actuator, monkeypatch):
    """It has started the job all the same, and says so when it is back."""
    monkeypatch.setattr("deploy.jobs.job_run.UNAVAILABLE_LIMIT_S", 0.3)
    runtime, run = actuator._context.runtime, actuator.jobs["dedup"]
    find, start, silence = runtime.find, runtime.start, threading.Event()
    attempts, unanswered = [], []

    def begin(attempt, *place):
        attempts.append(attempt.number)
        start(attempt, *place)
        silence.set()
        raise RuntimeUnavailableError("no answer")

    def look(attempt):
        if silence.is_set():
            unanswered.append(attempt.number)
            raise RuntimeUnavailableError("no answer")
        return find(attempt)

    monkeypatch.setattr(runtime, "start", begin)
    monkeypatch.setattr(runtime, "find", look)
    wanted = JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), {"dedup": wanted}))
    poll_until(actuator, lambda: len(unanswered) > 3 or run.record.failures)
    silence.clear()
    settle(actuator, "dedup")
    assert attempts == [1]
    assert (run.record.attempts, run.record.failures) == (1, 0)


@needs_groups
def test_a_start_that_never_succeeds_fails_once_nothing_of_it_runs(actuator, monkeypatch):
    monkeypatch.setattr("deploy.jobs.job_run.UNAVAILABLE_LIMIT_S", 0.3)
    runtime, run = actuator._context.runtime, actuator.jobs["dedup"]

    def refuse(*_):
        raise RuntimeUnavailableError("not now")

    monkeypatch.setattr(runtime, "start", refuse)

    def given_up():
        wanted = JobAllocation(JobState.RUNNING, (1,), threads=1)
        actuator.apply(Allocation((0,), {"dedup": wanted}))
        return run.state == JobState.DONE

    poll_until(actuator, given_up)
    assert (run.record.attempts, run.record.exit_code) == (RETRIES + 1, GIVEN_UP)


@needs_groups
def test_an_attempt_that_never_ran_is_begun_again_by_the_next_loop(actuators, monkeypatch):
    refused = []

    def refuse(attempt, *_):
        refused.append(attempt.number)
        raise RuntimeUnavailableError("not now")

    first = actuators()
    with monkeypatch.context() as patched:
        patched.setattr(first._context.runtime, "start", refuse)
        first.apply(Allocation((0,), {"dedup": JobAllocation(JobState.RUNNING, (1,), threads=1)}))
        poll_until(first, lambda: refused)
    again = actuators()
    again.take_over(now_s(again))
    bring(again)
    assert refused == [again.jobs["dedup"].instance.attempt.number]


@needs_groups
def test_an_attempt_fails_once_however_often_it_is_taken_over(actuators):
    first = actuators()
    run = first.jobs["dedup"]
    bring(first)
    os.kill(run.instance.pid, signal.SIGKILL)
    poll_until(first, lambda: run.record.failures)  # its remains are not removed before a rest
    for _ in range(2):
        again = actuators()
        run = again.jobs["dedup"]
        again.take_over(now_s(again))
        poll_until(again, lambda run=run: not run.busy)
        assert (run.record.attempts, run.record.failures) == (1, 1)
        assert run.state == JobState.PENDING
    bring(again)
    assert (run.record.attempts, run.record.failures) == (2, 1)


@needs_groups
def test_a_control_group_that_is_not_made_at_once_is_made_later_and_known_before(
    actuator, monkeypatch
):
    create, faults = JobGroup.create, [OSError("not now"), OSError("nor now")]
    known = []

    def try_to(group):
        record = actuator._context.folder.load().jobs["dedup"]
        known.append((record.group, record.weight_file))
        if faults:
            raise faults.pop()
        create(group)

    monkeypatch.setattr(JobGroup, "create", try_to)
    bring(actuator)
    group = actuator.jobs["dedup"].instance.attempt.group
    assert known == [(str(group.path), str(group.weight_file))] * 3
    assert group.exists()


@pytest.mark.parametrize(
    ("status", "error"), [(400, JobFailedError), (500, RuntimeUnavailableError)]
)
@needs_groups
def test_what_docker_cannot_do_is_not_the_jobs_fault(
    server, scenario_file, tmp_path, status, error
):
    class Daemon(BaseHTTPRequestHandler):
        def do_GET(self):
            version = self.path == "/version"
            self.answer(200 if version else 404, ApiVersion="1.44", message="no such container")

        def do_POST(self):
            self.answer(status, message="no container today")

        def answer(self, code, **content):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    hierarchy = usable_hierarchy()
    group = job_groups_beside(hierarchy, server.pid)(f"coretide-test-{os.getpid()}")
    group.create()
    daemon = HTTPServer(("127.0.0.1", 0), Daemon)
    threading.Thread(target=daemon.serve_forever, daemon=True).start()
    runtime = DockerRuntime(hierarchy, "parts", f"http://127.0.0.1:{daemon.server_port}")
    job = load_scenario(scenario_file()).jobs[0]
    try:
        with pytest.raises(error, match="no container today"):
            runtime.start(Attempt(job, 1, 1, tmp_path, group), (0,), Weight.NORMAL)
    finally:
        daemon.shutdown()
        daemon.server_close()
        group.remove()


@pytest.mark.parametrize(("code", "tail"), [(0, ""), (3, "no luck")])
def test_what_a_job_has_written_may_be_larger_than_memory(scenario_file, tmp_path, code, tail):
    command = ["sh", "-c", f"truncate -s 1T log; echo >> log; echo no luck >> log; exit {code}"]
    job = load_scenario(scenario_file(dedup=command)).jobs[0]
    prepare(tmp_path)
    runtime = ProcessRuntime()
    instance = runtime.start(Attempt(job, 1, 1, tmp_path, None), (0,), Weight.NORMAL)
    assert select.select([instance.ended], [], [], 10.0 * PATIENCE)[0]
    os.close(instance.ended)
    found, output = runtime.outcome(instance)
    assert (found, output.rpartition("\n")[2]) == (code, tail)


@needs_groups
def test_an_actuator_that_is_closed_has_no_file_open(actuator):
    def kept():
        files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        return sum("pidfd" in file or "coretide-parts" in file for file in files)

    before, wanted = kept(), JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), dict.fromkeys(actuator.jobs, wanted)))
    settle(actuator, *actuator.jobs)
    for run in actuator.jobs.values():
        run.cpu_s()
    assert kept() == before + 2 * len(actuator.jobs)
    actuator.close()
    assert kept() == before


@needs_groups
def test_a_job_that_ends_while_it_is_taken_over_has_ended(actuators, monkeypatch):
    first = actuators()
    if isinstance(first._context.runtime, ProcessRuntime):
        first._context.group_for = None  # a group of ours outlives its last process
    bring(first)
    again = actuators()
    again._context.group_for = first._context.group_for
    runtime, run = again._context.runtime, again.jobs["dedup"]
    paused = runtime.paused

    def last_seen(instance):
        found = paused(instance)
        runtime.remove(instance)
        return found

    monkeypatch.setattr(runtime, "paused", last_seen)
    again.take_over(now_s(again))
    poll_until(again, lambda: run.record.failures)
    assert run.state == JobState.PENDING
