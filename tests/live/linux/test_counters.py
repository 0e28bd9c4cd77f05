"""
Perf counters, with the kernel's software events in the place of cycles and instructions.

CPU time [ns] over context switches is known from elsewhere, so that the quotient can be checked.
"""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import agents
from deploy import assembly
from deploy.engines import memcached
from deploy.linux import counters, service_process
from deploy.linux.counters import CounterPair, CpiSensor, DescendantCounters, why_not_counted
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.sensors import ServiceSensor, VcpuClock
from deploy.loop.dry_run import DryActuator
from deploy.loop.live_machine import LiveMachine
from deploy.records.recorder import Recorder
from deploy.records.state import State
from env.errors import InputError
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE

SOFTWARE = 1
CPU_NS, SWITCHES = (SOFTWARE, 1), (SOFTWARE, 3)
KNOWN = (CPU_NS, SWITCHES)
NOWHERE = (0xFFFF, 0)
"""An event of a kind that no machine has."""

THREADS = """
import threading, time
def work(length, pause_s):
    while True:
        sum(range(length))
        time.sleep(pause_s)
for length, pause_s in ((400_000, 0.02), (1_000, 0.001)):
    threading.Thread(target=work, args=(length, pause_s)).start()
print(flush=True)
"""
"""One thread switches seldom and works much, one often and little, and the main one rests."""


@pytest.fixture
def busy():
    """A process of three threads."""
    with subprocess.Popen([sys.executable, "-c", THREADS], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def used(pid):
    """CPU time [ns] and context switches of all threads, as /proc has them."""
    cpu_ns = switches = 0
    for thread in service_process.thread_ids(pid):
        folder = Path(f"/proc/{pid}/task/{thread}")
        cpu_ns += int((folder / "schedstat").read_text().split()[0])
        lines = (folder / "status").read_text().splitlines()
        switches += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return cpu_ns, switches


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_all_threads_are_counted(busy):
    sensor = CpiSensor((service_process.identify(busy.pid),), 0.0, KNOWN)
    before = used(busy.pid)
    time.sleep(1.0)
    after = used(busy.pid)
    sensor.poll((service_process.identify(busy.pid),), 1.0, 10.0)
    cpu_ns, switches = (late - early for late, early in zip(after, before, strict=True))
    assert sensor.cpi == pytest.approx(cpu_ns / switches, rel=0.15)
    sensor.close()


def test_a_reading_stands_until_the_next_window_is_over(busy):
    who = service_process.identify(busy.pid)
    sensor = CpiSensor((who,), 0.0, KNOWN)
    readings = []
    for now_s in (0.5, 1.0, 2.5, 3.0, 4.0, 5.0):
        time.sleep(0.1)
        sensor.poll((who,), now_s, 2.0)
        readings.append(sensor.cpi)
    early, growing, whole, same, still, later = readings
    assert None not in readings
    assert early != growing != whole
    assert whole == same == still != later
    sensor.close()


def test_a_process_that_ends_is_counted_to_its_end_and_then_no_more(busy):
    who = service_process.identify(busy.pid)
    sensor = CpiSensor((who,), 0.0, KNOWN)
    time.sleep(0.2)
    busy.kill()
    busy.wait()
    sensor.poll((who,), 1.0, 1.0)
    assert sensor.cpi > 0.0
    sensor.poll((who,), 2.0, 1.0)
    assert sensor.cpi is None
    sensor.close()
    with pytest.raises(ProcessLookupError):
        CpiSensor((who,), 0.0, KNOWN)


def test_all_file_descriptors_are_given_back(busy):
    who, before = service_process.identify(busy.pid), open_files()
    sensor = CpiSensor((who,), 0.0, KNOWN)
    assert open_files() == before + 2 * 3
    for now_s in range(1, 5):
        sensor.poll((who,), now_s, 1.0)
    assert open_files() == before + 2 * 3
    sensor.close()
    with pytest.raises(FileNotFoundError):
        CpiSensor((who,), 0.0, (CPU_NS, NOWHERE))
    assert open_files() == before


def test_a_machine_without_the_counters_is_named_as_such():
    with pytest.raises(FileNotFoundError) as missing:
        CpiSensor((service_process.identify(os.getpid()),), 0.0, (NOWHERE, NOWHERE))
    assert why_not_counted(missing.value).startswith("this machine does not count them")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_without_the_right_is_told_so(busy):
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            CpiSensor((service_process.identify(busy.pid),), 0.0, KNOWN)
        except OSError as error:
            os._exit(int(why_not_counted(error).startswith("this user may not count them")))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_counts_are_scaled_up_for_the_time_in_which_others_had_the_counters(monkeypatch):
    pair = CounterPair(os.getpid(), KNOWN)
    for running_ns, expected in ((100, (50.0, 20.0)), (25, (200.0, 80.0)), (0, (0.0, 0.0))):
        reading = counters.READING.pack(2, 100, running_ns, 50, 20)
        monkeypatch.setattr(os, "read", lambda *_, reading=reading: reading)
        assert pair.read() == expected
    monkeypatch.undo()
    pair.close()


@pytest.mark.parametrize("what", [b"", OSError()])
def test_a_reading_that_fails_is_none(monkeypatch, what):
    def fail(*_):
        if isinstance(what, OSError):
            raise what
        return what

    who = service_process.identify(os.getpid())
    sensor = CpiSensor((who,), 0.0, KNOWN)
    monkeypatch.setattr(os, "read", fail)
    sensor.poll((who,), 1.0, 2.0)
    monkeypatch.undo()
    assert sensor.cpi is None
    sensor.close()


# --- in the loop ---


@pytest.fixture
def watched(server, scenario_file, tmp_path):
    """The machine as a policy that needs cycles sees it."""
    scenario = load_scenario(scenario_file())
    state = State("counts", scenario.name, "process", "", time.monotonic())
    sensor, vcpus = GroupSensor([ServiceSensor(server.host, server.port)]), VcpuClock(2, None)
    recorder = Recorder(tmp_path / "report", scenario, state.started_s)
    cpi = CpiSensor((service_process.identify(server.pid),), 0.0, KNOWN)
    yield LiveMachine(scenario, DryActuator(scenario, state), sensor, vcpus, recorder, cpi=cpi)
    for one in (cpi, sensor, vcpus, recorder):
        one.close()


def advance_until(machine, condition):
    """Poll until something is so."""
    end_s = time.monotonic() + 5.0 * PATIENCE
    while not condition():
        assert time.monotonic() < end_s
        machine.advance(machine.now_s)


def test_a_policy_is_shown_the_reading_and_a_memcached_that_restarts_is_followed(watched, server):
    watched.watch(0.2)
    assert watched.telemetry().service.cpi is None
    advance_until(watched, lambda: not watched.stale)
    assert watched.telemetry().service.cpi > 0.0
    memcached.stop(server)
    advance_until(watched, lambda: watched.telemetry().service.cpi is None)
    assert watched.stale
    again = memcached.start(threads=2, port=server.port)
    try:
        advance_until(watched, lambda: not watched.stale)
        assert watched.sensor.who == (service_process.identify(again.pid),)
        assert watched.telemetry().service.cpi > 0.0
    finally:
        memcached.stop(again)


def test_readings_without_cycles_are_not_decided_by(watched, monkeypatch):
    advance_until(watched, lambda: not watched.stale)
    monkeypatch.setattr(watched._cpi, "cpi", None)
    assert watched.stale == "memcached's cycles per instruction are not counted"


def test_a_policy_that_cannot_have_cycles_is_refused(monkeypatch):
    policy, who = agents.make("intel-prm"), (service_process.identify(os.getpid()),)
    assert policy.needs_cpi and not agents.make("parties").needs_cpi
    without = partial(CpiSensor, events=(NOWHERE, NOWHERE))
    monkeypatch.setattr(assembly, "CpiSensor", without)
    says = "policy intel-prm: decides by cycles per instruction: this machine does not count them"
    with pytest.raises(InputError, match=says):
        assembly.cpi_sensor(policy.name, who, 0.0)


def machine_counts():
    try:
        CpiSensor((service_process.identify(os.getpid()),), 0.0).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(machine_counts(), reason="this machine counts cycles")
def test_the_refusal_is_one_line_and_nothing_is_touched(deploy, scenario_file, tmp_path):
    options = ("--policy", "intel-prm", "--runtime", "process")
    run = deploy(*options, "--scenario", str(scenario_file()))
    assert run.finish() == 2
    assert len(run.lines) == 1
    assert "coretide: policy intel-prm: decides by cycles per instruction" in run.lines[0]
    assert not (tmp_path / "report").exists()


def test_what_a_process_starts_is_counted_until_its_end():
    code = "import time; sum(range(8_000_000)); print(time.process_time())"
    work = f"{sys.executable} -c '{code}'"
    script = f"read go; {work} & {work}; wait"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", script], **pipes) as family:
        family_counters = DescendantCounters(family.pid, (CPU_NS, SWITCHES))
        said, _ = family.communicate(b"go\n")
    cpu_ns, switches = family_counters.read()
    family_counters.close()
    took_s = [float(line) for line in said.split()]
    assert len(took_s) == 2 and switches > 0
    # To end takes time, too.
    assert sum(took_s) <= 1e-9 * cpu_ns < 1.5 * sum(took_s) + 0.1
    with pytest.raises(OSError):
        DescendantCounters(os.getpid(), (CPU_NS, NOWHERE))
