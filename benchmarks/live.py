"""
What the live loop costs and how fast it is, on this machine, with the real engines.

    python -m benchmarks.live --json live.json

Needs two vCPUs, memcached and stress-ng, and root and dockerd for what concerns Docker. Each
figure is printed beside what was asked for; a machine that is busy with other things shows in them.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import agents
from agents.checkpoint import FORMAT, METADATA_ENTRY, WEIGHTS_ENTRY
from deploy.assembly import group_maker, make_runtime, usable_hierarchy
from deploy.engines import daemon, images, memcached
from deploy.linux import realtime
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.readiness import await_readable
from deploy.linux.sensors import ServiceSensor, VcpuClock
from deploy.linux.service_process import identify
from deploy.linux.signals import interrupt_on_stop
from deploy.load.dynamic_load import Client
from deploy.load.keys import load_records
from deploy.loop.actuator import Actuator
from deploy.loop.dry_run import DryActuator
from deploy.loop.live_machine import LiveMachine
from deploy.loop.loop import GuardedPolicy, Loop, StopRequest
from deploy.records.recorder import MEMCACHED, Event, Recorder
from deploy.records.state import State, StateFolder
from deploy.safety.restore import undo
from env.action import edit_table
from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.errors import exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, write_json
from env.observation import VERSION, feature_count
from env.scenario import Scenario, load_scenario
from env.simulator.load import LoadTrace
from env.telemetry import Telemetry
from training.calibration.logs.course import JOBS

ROOT = Path(__file__).resolve().parents[1]

ASKED = {
    "decision_us_p50": 60.0,
    "decision_us_p99": 200.0,
    "loop_cpu_pct": 2.0,
    "loop_cpu_probed_pct": 3.0,
    "agent_rss_mib": 70.0,
    "start_ms": 500.0,
    "reaction_ms_p50": 30.0,
    "reaction_ms_p99": 60.0,
    "actuate_fast_ms_p50": 1.0,
    "actuate_pause_ms_p50": 1.0,
}

LOW_QPS, HIGH_QPS = 8_000, 60_000
JUMP_EVERY_S = 1.313
"""No multiple of the polling period, so that jumps fall anywhere between two polls."""


def lasting(path: Path) -> Path:
    """
    The local scenario with jobs that do not end while a loop is watched.

    :param path: the scenario file to write
    """
    scenario = load_scenario("local")
    endless = [  # what stress-ng is to do comes last
        job.model_copy(update={"command": job.command[:-2]}) for job in scenario.jobs
    ]
    path.write_text(scenario.with_jobs(endless).model_dump_json(), encoding="utf-8")
    return path


class GrowWithLoad:
    """memcached gets its largest set while the load is high: what a reaction is measured with."""

    name = "grow-with-load"
    period_s = 1.0
    wakes = True
    regulated = False  # the SLO guard would come before the load on a machine that is busy
    probe_window_s = 0.0
    needs_cpi = False

    def reset(self, scenario: Scenario) -> None:
        """
        Begin.

        :param scenario: the problem
        """
        self._choices = scenario.service.core_choices
        self.change_jobs(scenario)

    def change_jobs(self, scenario: Scenario) -> None:
        """
        Run another scenario's first job.

        :param scenario: the problem
        """
        self._first = scenario.job_names[0]

    def decide(self, telemetry: Telemetry) -> Allocation:
        """
        The load alone decides; one job runs beside memcached, and yields.

        :param telemetry: what the machine shows
        """
        high = telemetry.service.qps > (LOW_QPS + HIGH_QPS) / 2
        job = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
        return Allocation(self._choices[-1 if high else 0], {self._first: job})


def two_vcpus(path: Path, command: Sequence[str]) -> Scenario:
    """
    A problem for two vCPUs with seven jobs.

    :param path: the scenario file to write
    :param command: command of each job
    """
    jobs = [
        {
            "name": name,
            "image": images.STRESS_IMAGE,
            "command": list(command),
            "threads": [1, 2],
            "memory_mib": 128,
        }
        for name in JOBS
    ]
    content = {
        "name": "two-vcpus",
        "description": "seven jobs that do not end beside memcached on two vCPUs",
        "profile": "cca-2025",
        "machine": {"vcpus": 2, "memory_mib": 2048},
        "service": {"threads": 2, "slo_us": 1000, "core_choices": [[0], [0, 1]]},
        "jobs": jobs,
        "load": {"qps_min": 5000, "qps_max": 60000, "interval_s": 5, "duration_s": 600},
        "control": {"period_s": 0.025, "hold_s": 1.0, "wake_qps": 8000},
        "regulation": {"service_dwell_s": 0.5},
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load_scenario(path)


def write_untrained(path: Path, scenario: Scenario) -> Path:
    """
    A checkpoint as training exports it, of a network that has learned nothing.

    :param path: the checkpoint to write
    :param scenario: the problem whose observations and actions the network has
    """
    table, width = edit_table(scenario), feature_count(scenario)
    metadata = {
        "format": FORMAT,
        "observation_version": VERSION,
        "scenario": scenario.name,
        "features": width,
        "actions": [table.describe(edit) for edit in range(len(table))],
        "job_work_s": dict.fromkeys(scenario.job_names, 10.0),
    }
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {}
    sizes = [width, 64, 64, len(table)]
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        arrays[f"weight_{layer}"] = rng.normal(size=(outputs, inputs)).astype(np.float32)
        arrays[f"bias_{layer}"] = np.zeros(outputs, np.float32)
    buffer = BytesIO()
    np.savez(buffer, **arrays)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(METADATA_ENTRY, json.dumps(metadata))
        archive.writestr(WEIGHTS_ENTRY, buffer.getvalue())
    return path


# --- one figure after the other -----------------------------------------------------------------


def decisions(server: memcached.Memcached, folder: Path, count: int) -> dict[str, float]:
    """
    The shipped policy on the course's scenario, with this machine's readings; nothing is done.

    Decisions come a period apart, as in a run, after which caches hold what others needed
    meanwhile; `decision_hot_us` is the same without a pause.

    :param server: memcached
    :param folder: for the records
    :param count: number of decisions of each kind
    """
    scenario = load_scenario("cca-2025")
    policy = agents.make("best.zip")
    policy.reset(scenario)
    state = State("0", scenario.name, "process", "", time.monotonic())
    decided: list[float] = []
    sensed: list[float] = []
    with contextlib.ExitStack() as stack:
        sensor = GroupSensor([ServiceSensor(server.host, server.port)])
        stack.callback(sensor.close)
        vcpus = VcpuClock(scenario.machine.vcpus, None)
        stack.callback(vcpus.close)
        recorder = Recorder(folder, scenario, state.started_s)
        stack.callback(recorder.close)
        stack.enter_context(contextlib.redirect_stdout(None))
        machine = LiveMachine(scenario, DryActuator(scenario, state), sensor, vcpus, recorder)
        guarded = GuardedPolicy(policy, scenario, recorder)
        for turn in range(2 * count):
            if turn < count:
                machine.advance(machine.now_s)
            before = time.perf_counter()
            machine.poll()
            telemetry, stale = machine.telemetry(), machine.stale
            between = time.perf_counter()
            machine.apply(guarded.decide(telemetry, stale), guarded.regulated)
            decided.append(time.perf_counter() - between)
            sensed.append(between - before)
    decided_us = [1e6 * one for one in decided]
    sensed_us = [1e6 * one for one in sensed]
    return (
        percentiles("decision_us", decided_us[count // 10 : count])
        | percentiles("decision_hot_us", decided_us[count:])
        | percentiles("sensing_us", sensed_us[count // 10 : count])
    )


def reactions(server: memcached.Memcached, folder: Path, jumps: int) -> dict[str, float]:
    """
    From the moment the load jumps at memcached to all its threads on more vCPUs.

    :param server: memcached
    :param folder: for state and records
    :param jumps: number of load jumps
    """
    scenario = two_vcpus(folder / "two.yaml", ["stress-ng", "--cpu", "{threads}"])
    moved_s: list[float] = []

    def listen(event: Event) -> None:
        if event.job == MEMCACHED and event.what == "update_cores" and len(event.cores) > 1:
            moved_s.append(time.monotonic())

    with _machine(server, scenario, folder, "process", None, listen) as (machine, recorder):
        trace = LoadTrace((LOW_QPS, HIGH_QPS) * jumps, JUMP_EVERY_S)
        client = Client(server.host, server.port, trace, realtime.last_cpu())
        try:
            stop = StopRequest()
            policy = GrowWithLoad()
            policy.reset(scenario)
            loop = Loop(machine, policy, recorder, stop)
            until_s = client.start_s + JUMP_EVERY_S * len(trace.targets)
            while time.monotonic() < until_s:
                loop.step()
        finally:
            client.stop()
    jumped_s = [client.start_s + (2 * jump + 1) * JUMP_EVERY_S for jump in range(jumps)]
    taken = [
        next(
            (moved - jump for moved in moved_s if 0.0 <= moved - jump < JUMP_EVERY_S), JUMP_EVERY_S
        )
        for jump in jumped_s
    ]
    return percentiles("reaction_ms", [1e3 * one for one in taken])


def actuations(
    server: memcached.Memcached, folder: Path, url: str | None, count: int
) -> dict[str, float]:
    """
    How long a move and a pause take.

    :param server: memcached
    :param folder: for state and records
    :param url: a Docker daemon; jobs are plain processes if there is none
    :param count: how many of each
    """
    scenario = two_vcpus(folder / "two.yaml", ["sleep", "600"])
    runtime = "docker" if url else "process"
    moves, pauses = [], []
    with _machine(server, scenario, folder, runtime, url, None) as (machine, _):
        actuator = machine.actuator
        assert isinstance(actuator, Actuator)
        job = JobAllocation(JobState.RUNNING, (1,), Weight.NORMAL, 1)
        actuator.apply(Allocation((0,), {JOBS[0]: job}))
        run = actuator.jobs[JOBS[0]]
        while not run.settled:
            machine.advance(machine.now_s)
        assert run.instance is not None
        for turn in range(count):
            cores, weight = ((0, 1), Weight.BACKGROUND) if turn % 2 else ((1,), Weight.NORMAL)
            moved = JobAllocation(JobState.RUNNING, cores, weight, 1)
            before = time.perf_counter()
            actuator.apply(Allocation((0, 1) if turn % 2 else (0,), {JOBS[0]: moved}))
            moves.append(1e3 * (time.perf_counter() - before))
            time.sleep(0.005)
        place = run.instance.placement
        assert place is not None
        # A job that yields must be let run to be frozen.
        actuator.apply(Allocation((0,), {JOBS[0]: job}))
        for turn in range(count // 5):
            before = time.perf_counter()
            place.set_paused(turn % 2 == 0)
            pauses.append(1e3 * (time.perf_counter() - before))
    return percentiles("actuate_fast_ms", moves) | percentiles("actuate_pause_ms", pauses)


def whole_process(
    server: memcached.Memcached, folder: Path, url: str | None, seconds: float
) -> dict[str, float]:
    """
    `deploy.py` with the shipped local policy: start to first change, CPU time, memory.

    The guardian is counted; jobs, probe and live view are not. `loop_cpu_probed_pct` is the CPU
    time with a probe, and `loop_cpu_busy_pct` that under a network that has learned nothing and
    changes something at nearly every poll.

    :param server: memcached
    :param folder: for state and records
    :param url: a Docker daemon; jobs are plain processes if there is none
    :param seconds: how long its CPU time is watched [s]
    """
    local = lasting(folder / "local.yaml")
    shipped = ["--checkpoint", "local.zip", "--scenario", str(local)]
    scenario = two_vcpus(folder / "two.yaml", ["sleep", "600"])
    untrained = ["--checkpoint", str(write_untrained(folder / "new.zip", scenario))]
    untrained += ["--scenario", str(folder / "two.yaml")]
    busy = _deployed(server, folder, url, seconds, untrained)
    probed = _deployed(server, folder, url, seconds, [*shipped, "--probe"])
    figures = _deployed(server, folder, url, seconds, shipped)
    others = {"probed": probed, "busy": busy}
    return figures | {f"loop_cpu_{name}_pct": one["loop_cpu_pct"] for name, one in others.items()}


def _deployed(
    server: memcached.Memcached, folder: Path, url: str | None, seconds: float, what: list[str]
) -> dict[str, float]:
    options = [*what, "--report", str(folder / "report"), "--state", str(folder / "state")]
    options += ["--memcached", f"{server.host}:{server.port}"]
    options += ["--docker", url] if url else ["--runtime", "process"]
    before_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "deploy.py"), *options], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        _await_line(process, b"update_cores")
        started_s = time.monotonic()
        trace = LoadTrace((20_000,) * 600, 1.0)
        client = Client(server.host, server.port, trace, realtime.last_cpu())
        try:
            _await_line(process, b" start [", 60.0)  # until then the worker makes the jobs
            time.sleep(2.0)
            ours = [process.pid, *_forks_of(process.pid)]
            used_s, began_s = sum(map(_cpu_s, ours)), time.monotonic()
            time.sleep(seconds)
            used_s, took_s = sum(map(_cpu_s, ours)) - used_s, time.monotonic() - began_s
            resident = sum(map(_rss_mib, ours))
        finally:
            client.stop()
    finally:
        process.terminate()
        process.communicate()
    return {
        "start_ms": 1e3 * (started_s - before_s),
        "loop_cpu_pct": 100.0 * used_s / took_s,
        "agent_rss_mib": resident,
    }


# --- helpers ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _machine(
    server: memcached.Memcached,
    scenario: Scenario,
    folder: Path,
    runtime: str,
    url: str | None,
    listener: Any,
) -> Iterator[tuple[LiveMachine, Recorder]]:
    """A machine of our own making, undone afterwards."""
    states = StateFolder(folder / "state")
    state = State("bench", scenario.name, runtime, url or "", time.monotonic())
    sensor = GroupSensor([ServiceSensor(server.host, server.port)])
    vcpus = VcpuClock(scenario.machine.vcpus, None)
    recorder = Recorder(folder / "records", scenario, state.started_s, listener)
    hierarchy = usable_hierarchy()
    jobs = make_runtime(state, hierarchy)
    groups = group_maker(state, hierarchy, [server.pid])
    actuator = Actuator(scenario, jobs, states, state, groups, recorder, vcpus)
    actuator.follow((identify(server.pid),))
    try:
        yield LiveMachine(scenario, actuator, sensor, vcpus, recorder), recorder
    finally:
        actuator.close()
        faults = undo(state, states, jobs, hierarchy)
        recorder.close()
        sensor.close()
        vcpus.close()
        states.clear()
        if faults:
            raise RuntimeError("; ".join(faults))


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """
    Median and 99th percentile.

    :param name: what the two keys begin with
    :param values: at least one, in any unit
    """
    p50, p99 = np.percentile(values, [50, 99])
    return {f"{name}_p50": float(p50), f"{name}_p99": float(p99)}


def _await_line(process: subprocess.Popen[bytes], text: bytes, limit_s: float = 30.0) -> None:
    assert process.stdout is not None
    seen, give_up_s = b"", time.monotonic() + limit_s
    while text not in seen and time.monotonic() < give_up_s:
        if await_readable([process.stdout.fileno()], 0.5):
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                raise RuntimeError(f"deploy.py ended early: {seen.decode(errors='replace')}")
            seen += part


def _forks_of(parent: int) -> list[int]:
    """A process' children that run the same program; jobs run programs of their own."""
    line = Path(f"/proc/{parent}/cmdline").read_bytes()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes() == line]


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads, to the nanosecond."""
    used = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        used += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return used * 1e-9


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def measure(scale: float) -> dict[str, float]:
    """
    Everything, on a memcached and a Docker daemon of our own.

    :param scale: share of the repetitions
    :return: what was measured, by its name
    """
    figures: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp")))
        url = None
        if daemon.can_start():
            import docker

            running = stack.enter_context(daemon.running(base / "d"))
            url = running.url
            client = docker.DockerClient(base_url=url)
            images.ensure_stress_image(client)
            client.close()
        server = stack.enter_context(memcached.running(threads=2))
        load_records(server.host, server.port)
        steps = [
            lambda folder: decisions(server, folder, int(400 * scale)),
            lambda folder: whole_process(server, folder, url, 15.0 * max(scale, 0.3)),
            lambda folder: actuations(server, folder, url, int(200 * scale)),
            lambda folder: reactions(server, folder, int(40 * scale)),
        ]
        for number, step in enumerate(steps):
            folder = base / str(number)
            folder.mkdir(mode=0o700)
            found = step(folder)
            figures |= found
            for name, value in found.items():
                asked = f"   asked: at most {ASKED[name]:g}" if name in ASKED else ""
                print(f"{name:24} {value:10.3f}{asked}", flush=True)
    return figures


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.live", description=__doc__.splitlines()[1])
    line.add_argument("--json", type=Path, help="write the figures there")
    line.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure everything.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    interrupt_on_stop()
    with exit_on_bad_input("stopped; nothing is left running"):
        require_writable(arguments.json)
        figures = measure(0.1 if arguments.quick else 1.0)
        if arguments.json:
            write_json(figures, arguments.json)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} vCPUs")


if __name__ == "__main__":
    main()
