"""The machine as a policy sees it: jobs made ahead, moves of the load, slack, a dying probe."""

import contextlib
import math
import os
import select
import signal
import statistics
import time
from collections import deque

import agents
from deploy.linux.sensors import Cpu, VcpuClock
from deploy.linux.stats_connection import Requests
from deploy.load.probe import Probe
from deploy.loop.dry_run import DryActuator
from deploy.loop.live_machine import CALM_S, LiveMachine
from deploy.loop.loop import Loop, StopRequest
from deploy.records.recorder import Recorder
from deploy.records.state import State
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.guard import ALONE
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE

ONE_OF_TWO = {"core_choices": [[0]], "overflow_cores": [0, 1]}
"""memcached's refuge is one vCPU, and it overflows to both."""


class Scripted:
    """Readings of memcached as a test wants them: a rate at each poll, None for no new reading."""

    def __init__(self, *rates):
        self.who = self.requests = None
        self.news = deque()
        self.cpu = Cpu(0.0, 0.0, 0.0)
        self.qps = self.cpu_cores = 0.0
        self._rates = list(rates)

    def ask(self, now_s):
        """Nothing is asked."""

    def receive(self, now_s, patience_s):
        rate = self._rates.pop(0)
        if rate is not None:
            self.requests, self.qps = Requests(now_s, 1), rate

    def age_s(self, now_s):
        return 0.0 if self.requests is not None else math.inf

    @property
    def polls_left(self):
        return len(self._rates)


class Delayed(Scripted):
    """memcached uses 0.8 vCPUs, and its threads wait `delay` s a CPU second for them."""

    delay = 0.06

    def receive(self, now_s, patience_s):
        super().receive(now_s, patience_s)
        used_s = 0.8 * (now_s - self.cpu.time_s)
        waited_s = self.cpu.run_delay_s + used_s * self.delay
        self.cpu = Cpu(now_s, self.cpu.cpu_s + used_s, waited_s)


class Hypervisor:
    """Says how much was stolen of each vCPU, shares of the time since the machine is watched."""

    def __init__(self, *shares):
        self._shares, self._began_s = shares, time.monotonic()

    def read(self):
        return tuple(share * (time.monotonic() - self._began_s) for share in self._shares)

    def close(self):
        """Nothing is open."""


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


def test_a_policy_that_changes_its_mind_at_every_poll_does_not_fill_the_log(
    scenario_file, tmp_path
):
    scenario = load_scenario(scenario_file())
    state = State("minds", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    vcpus, dry = VcpuClock(2, None), DryActuator(scenario, state)
    machine = LiveMachine(scenario, dry, Scripted(*[0.0] * 20), vcpus, recorder)
    job = scenario.jobs[0].name
    there = JobAllocation(JobState.RUNNING, (1,), Weight.NORMAL, 1)
    nowhere = JobAllocation(JobState.RUNNING, (), Weight.NORMAL, 1)
    for turn in range(20):
        machine.poll()
        machine.apply(Allocation((0,), {job: nowhere if turn % 2 else there}))
    assert machine.overruled >= 5
    vcpus.close()
    recorder.close()
    lines = (tmp_path / "events.log").read_text().splitlines()
    assert 1 <= sum("overruled" in line for line in lines) <= 2


@contextlib.contextmanager
def unmade(scenario_file, tmp_path, polls, server=None, **changes):
    """A machine whose first job is still being made, and its actuator, sensor and recorder."""
    scenario = load_scenario(scenario_file()).with_changes(**changes)
    state = State("made", scenario.name, "process", "", time.monotonic())
    with contextlib.ExitStack() as stack:
        recorder = Recorder(tmp_path, scenario, state.started_s)
        stack.callback(recorder.close)
        sensor, vcpus = Scripted(*[0.0] * polls), VcpuClock(2, None)
        stack.callback(vcpus.close)
        dry, probe = DryActuator(scenario, state), None
        if server is not None:
            probe = Probe(server.host, server.port, 1)
            stack.callback(probe.stop)
            assert select.select([probe.file], [], [], 20.0 * PATIENCE)[0]
        dry.jobs["dedup"].settled = False
        machine = LiveMachine(scenario, dry, sensor, vcpus, recorder, latency=probe)
        yield machine, dry, sensor, recorder


def test_preparing_goes_on_until_the_jobs_are_made(scenario_file, tmp_path):
    with unmade(scenario_file, tmp_path, 3) as (machine, dry, sensor, _):
        steps = machine.prepare()
        next(steps)
        next(steps)
        dry.jobs["dedup"].settled = True
        assert list(steps) == []
        assert sensor.polls_left == 1


def test_memcached_overflows_its_refuge_only_while_the_jobs_are_made(scenario_file, tmp_path):
    with unmade(scenario_file, tmp_path, 4000, service=ONE_OF_TWO) as (machine, dry, _, _):
        steps = machine.prepare()
        while machine.polled_s < 1.2:  # the regulator shrinks nothing for a second
            next(steps)
            assert machine.applied.service_cores == (0, 1)
        dry.jobs["dedup"].settled = True
        assert list(steps) == []
        assert machine.applied.service_cores == (0,)


def test_the_first_decision_waits_until_requests_are_in_time(server, scenario_file, tmp_path):
    """memcached is stopped while the last job is made."""
    with unmade(scenario_file, tmp_path, 4000, server) as (machine, dry, _, _):
        steps = machine.prepare()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            stopped_s = machine.polled_s
            while machine.polled_s < stopped_s + 0.5:
                next(steps)
            dry.jobs["dedup"].settled = True
            next(steps)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        resumed_s = machine.now_s
        assert list(steps)
        assert machine.polled_s - resumed_s > CALM_S - 2.0 * machine.scenario.control.period_s
        assert machine.guard_steps == 0


def test_a_run_that_goes_on_is_decided_about_at_once(scenario_file, tmp_path):
    with unmade(scenario_file, tmp_path, 1) as (machine, dry, sensor, _):
        running = next(job for name, job in dry.jobs.items() if name != "dedup")
        running.wanted = JobAllocation(JobState.RUNNING, (1,), Weight.BACKGROUND, 1)
        assert list(machine.prepare()) == []
        assert sensor.polls_left == 1


def test_readings_are_kept_while_jobs_are_made_and_a_stop_ends_that(scenario_file, tmp_path):
    with unmade(scenario_file, tmp_path, 99) as (machine, _, sensor, recorder):
        stop, seen = StopRequest(), []
        policy = agents.make("sequential")
        policy.reset(machine.scenario)

        def sample(telemetry, allocation):
            burnt_until_s = time.process_time() + 0.1
            while time.process_time() < burnt_until_s:
                pass
            seen.append(telemetry.time_s)
            stop.number = 15

        loop = Loop(machine, policy, recorder, stop, [sample])
        loop.run()
        assert len(seen) == 2  # the first poll, and the end
        assert loop.cpu_pct == 0.0  # it has decided nothing
        assert sensor.polls_left == 97


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


def test_the_guard_is_told_what_is_stolen_of_memcacheds_vcpus(scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    state = State("stolen", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    vcpus, sensor = VcpuClock(2, None), Scripted(*[0.0] * 200)
    vcpus.stolen.close()
    vcpus.stolen = Hypervisor(0.3, 0.9)
    machine = LiveMachine(scenario, DryActuator(scenario, state), sensor, vcpus, recorder)
    machine.poll()
    machine.apply(Allocation((0,), {}))
    stolen = []
    for _ in range(10):  # one of them may be preempted
        machine.advance(machine.polled_s + 0.2)
        stolen.append(machine.sense().stolen_lately)
    assert 0.2 < statistics.median(stolen[3:]) < 0.4
    vcpus.close()
    recorder.close()


def test_without_a_probe_the_guard_climbs_by_memcacheds_run_delay(scenario_file, tmp_path):
    """And what disturbed it is not taken for its calm: the second time it climbs as well."""
    scenario = load_scenario(scenario_file()).with_changes(load={"interval_s": 2.0})
    state = State("delay", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    sensor, vcpus = Delayed(*[None] * 4000), VcpuClock(2, None)
    vcpus.stolen.close()
    vcpus.stolen = Hypervisor(0.0, 0.0)
    machine = LiveMachine(scenario, DryActuator(scenario, state), sensor, vcpus, recorder)
    machine.poll()
    shared = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
    machine.apply(Allocation((0,), {"dedup": shared}))
    for _ in range(2):
        sensor.delay = 0.06
        machine.advance(machine.polled_s + 0.5)
        assert machine.guard_level == 0
        reached, give_up_s = 0, machine.polled_s + 20.0
        while machine.guard_level or reached < ALONE:
            sensor.delay = 1.0 if reached < ALONE else 0.06
            machine.advance(machine.polled_s)
            reached = max(reached, machine.guard_level)
            assert machine.polled_s < give_up_s
    vcpus.close()
    recorder.close()


def test_the_calm_of_the_refuge_is_not_learned_where_memcached_overflows_it(
    scenario_file, tmp_path
):
    """On more vCPUs its threads wait less for one another."""
    scenario = load_scenario(scenario_file()).with_changes(service=ONE_OF_TWO)
    state = State("delay", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    sensor, vcpus = Delayed(*[None] * 4000), VcpuClock(2, None)
    machine = LiveMachine(scenario, DryActuator(scenario, state), sensor, vcpus, recorder)
    machine.poll()
    for cores, delay in (((0, 1), 0.06), ((0,), 0.4)):
        machine.apply(Allocation(cores, {}))
        sensor.delay = delay
        machine.advance(machine.polled_s + 1.0)
    assert machine.guard_steps == 0
    vcpus.close()
    recorder.close()


def test_a_probe_that_has_died_is_said_once_and_shows_nothing(server, scenario_file, tmp_path):
    scenario = load_scenario(scenario_file())
    state = State("probe", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    vcpus, probe = VcpuClock(2, None), Probe(server.host, server.port, 1)
    sensor, dry = Scripted(0.0, 0.0, 0.0), DryActuator(scenario, state)
    machine = LiveMachine(scenario, dry, sensor, vcpus, recorder, latency=probe)
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


def test_a_burst_of_late_probes_takes_jobs_off_memcacheds_vcpus_within_two_polls(
    server, scenario_file, tmp_path
):
    """memcached is stopped; nobody decides meanwhile, and no answer has come yet."""
    scenario = load_scenario(scenario_file())
    choices = {"core_choices": [[0]]}
    scenario = scenario.with_changes(service=choices, load={"interval_s": 2.0})
    state = State("guard", scenario.name, "process", "", time.monotonic())
    recorder = Recorder(tmp_path, scenario, state.started_s)
    vcpus, probe = VcpuClock(2, None), Probe(server.host, server.port, 1)
    vcpus.stolen.close()
    vcpus.stolen = Hypervisor(0.0, 0.0)  # whatever happens to this machine meanwhile
    sensor, dry = Scripted(*[None] * 4000), DryActuator(scenario, state)
    machine = LiveMachine(scenario, dry, sensor, vcpus, recorder, latency=probe)
    assert select.select([probe.file], [], [], 20.0 * PATIENCE)[0]
    shared = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
    machine.poll()
    machine.apply(Allocation((0,), {"dedup": shared}))
    machine.advance(machine.polled_s + 1.5)  # the load's first records may have been late
    while machine.guard_level:
        machine.advance(machine.polled_s)
    assert machine.applied.jobs["dedup"].cores == (0, 1)
    period_s = scenario.control.period_s
    os.kill(server.pid, signal.SIGSTOP)
    try:
        # Of a budget of 0.1 s two fifths are 40 ms; a request is late after 10 ms more.
        machine.advance(machine.polled_s + 2 * period_s)
        machine.advance(machine.polled_s + 2 * period_s)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert machine.guard_level >= ALONE
    assert 0 not in machine.applied.jobs["dedup"].cores
    assert machine.guard_steps >= 2
    assert any("guard up to level 2" in event.detail for event in recorder.recent)
    machine.advance(machine.polled_s + 0.2)
    assert machine.guard_s > 0.0
    assert machine.guard_level > 0
    machine.apply(machine.applied, regulator_on=False)
    assert recorder.recent[-1].guard_level == machine.guard_level == 0
    probe.stop()
    vcpus.close()
    recorder.close()
