"""One deployment: prepare, run the loop, leave the machine as it was found."""

import contextlib
import ctypes
import gc
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents.policy import Policy
from deploy.jobs.placement import online_vcpus
from deploy.jobs.runtimes import ProcessRuntime, Runtime, RuntimeUnavailableError
from deploy.linux import service_process
from deploy.linux.cgroups import (
    LEAST_WEIGHT,
    Hierarchy,
    JobGroup,
    find_hierarchy,
    job_groups_beside,
)
from deploy.linux.counters import CpiSensor, why_not_counted
from deploy.linux.sensors import ServiceSensor, VcpuClock
from deploy.loop.actuator import Actuator
from deploy.loop.dry_run import DryActuator
from deploy.loop.live_machine import LiveMachine
from deploy.loop.loop import Loop, Sampler, StopRequest
from deploy.records.lines import LineFile
from deploy.records.recorder import LOAD_FILE, SCHEDULER, Event, Recorder, set_aside
from deploy.records.state import STATE_FILE, State, StateFolder, claim
from deploy.records.terminal import complain, say
from deploy.safety.guardian import Guardian, make_safe
from deploy.safety.restore import undo
from env.allocation import Allocation
from env.errors import InputError
from env.scenario import Scenario
from env.telemetry import Telemetry

if TYPE_CHECKING:
    from deploy.load.probe import IntervalLog

FIND_LIMIT_S = 1.0
"""How long memcached may take to answer at the start."""

VIEW_END_S = 3.0
"""How long the live picture may take to show the end."""

LONGEST_PERIOD_S = 0.2
"""The guardian acts after 0.6 s, and a poll that comes after 0.4 s writes everything anew."""

DOCKER_SOCKET = "unix:///var/run/docker.sock"

EXIT_OK, EXIT_FAILED = 0, 1

M_ARENA_MAX = -8
"""From glibc's malloc.h. A heap of its own for the worker thread takes 3 MiB."""


@dataclass(frozen=True)
class Settings:
    """
    What the command line decides.

    :param host: where memcached listens
    :param port: where memcached listens
    :param runtime: docker or process
    :param docker: the Docker daemon's address; the environment's own if none is given
    :param privileged: whether containers get Docker's default rights
    :param folder: where the state is kept
    :param report: where records go; those of a dry run are thrown away
    :param probe: whether memcached's latency is measured from this machine
    :param metrics_port: where Prometheus may ask, None if nowhere
    :param illustrated: whether the report has pictures and a page
    :param view: whether a live picture takes the place of the printed events
    :param leave_jobs: whether an interrupted deployment leaves its jobs running
    :param resume: whether to go on from what an earlier loop left
    :param dry_run: whether nothing may be touched
    """

    host: str
    port: int
    runtime: str
    docker: str | None
    privileged: bool
    folder: Path
    report: Path
    probe: bool = False
    metrics_port: int | None = None
    illustrated: bool = True
    view: bool = False
    leave_jobs: bool = False
    resume: bool = False
    dry_run: bool = False


def run(scenario: Scenario, policy: Policy, settings: Settings, guardian: Guardian) -> int:
    """
    Deploy a policy until all jobs have ended.

    :param scenario: the problem
    :param policy: who decides
    :param settings: see there
    :param guardian: makes the machine safe if this process dies
    :return: the exit code: 0 if every job has succeeded and the machine is as it was
    :raises InputError: if it cannot begin
    """
    policy.reset(scenario)
    if not settings.dry_run:
        require_vcpus(scenario)
    require_period(scenario)
    folder = StateFolder(settings.folder)
    folder.lock()
    state = begin_state(scenario, settings, folder)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        sensor = ServiceSensor(settings.host, settings.port)
        stack.callback(sensor.close)
        who = find_service(sensor, settings, state.started_s)
        records = settings.report
        if settings.dry_run:
            records = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            stack.enter_context(claim(who))
        cpi = None
        if policy.needs_cpi:
            cpi = cpi_sensor(policy.name, who, time.monotonic() - state.started_s)
            stack.callback(cpi.close)
        vcpus = VcpuClock(scenario.machine.vcpus, cpuacct())
        stack.callback(vcpus.close)
        listeners: list[Callable[[Event], None]] = [] if settings.view else [_print_event]
        samplers: list[Sampler] = []
        if not (settings.resume or settings.dry_run):
            set_aside(records)
        view = stack.enter_context(contextlib.ExitStack())  # closed after the last record
        recorder = Recorder(records, scenario, state.started_s, partial(_tell, listeners))
        stack.callback(recorder.close)
        if settings.view:
            view.callback(_await_view, _start_view(records))
        samplers.append(recorder.sample)
        if settings.metrics_port is not None:
            from deploy.records.metrics import Endpoint, RunCollector

            collector = RunCollector()
            endpoint = Endpoint(collector, settings.metrics_port)
            stack.callback(endpoint.close)
            listeners.append(collector.event)
            samplers.append(collector.sample)
        probe = log = None
        if settings.probe:
            from deploy.load.probe import IntervalLog, Probe

            probe = Probe(settings.host, settings.port, scenario.machine.vcpus - 1)
            stack.callback(probe.stop)
            load_file = records / LOAD_FILE
            # Else the load itself tells.
            state.logs_intervals = state.logs_intervals or not load_file.exists()
            if state.logs_intervals:
                rows = LineFile.at(load_file, recorder.disk)
                stack.callback(rows.close)
                log = IntervalLog(probe, rows, scenario.load.interval_s)
                samplers.append(partial(_log_interval, log, state.started_s))
        if settings.dry_run:
            dry = DryActuator(scenario, state)
            machine = LiveMachine(scenario, dry, sensor, vcpus, recorder, probe=probe, cpi=cpi)
            Loop(machine, policy, recorder, stop, samplers).run()
            return EXIT_OK
        hierarchy = usable_hierarchy()
        runtime = make_runtime(state, hierarchy)
        groups = group_maker(state, hierarchy, who.pid)
        actuator = Actuator(scenario, runtime, folder, state, groups, recorder)
        if not settings.resume:
            folder.begin(state)
        guardian.watch(folder.path / STATE_FILE)
        machine = LiveMachine(scenario, actuator, sensor, vcpus, recorder, guardian, probe, cpi)
        _settle_memory()
        loop = Loop(machine, policy, recorder, stop, samplers)
        if settings.resume:
            try:
                machine.take_over()
            except (OSError, RuntimeUnavailableError) as error:
                end(state, folder, runtime, hierarchy, True, recorder)  # for another try
                raise InputError(f"{folder.path}: not taken over: {error}") from error
        try:
            loop.run()
            if log is not None:
                log.finish(time.monotonic(), machine.telemetry().service.requests)
        finally:
            actuator.close()
            leave = settings.leave_jobs and stop.number != 0
            faults = end(state, folder, runtime, hierarchy, leave, recorder)
            if not faults:
                guardian.stop()  # the report takes seconds, without a beat
        from deploy.loop.outcome import write_report  # late: drawing it takes memory

        restored, stopped = not (faults or leave), stop.number != 0
        write_report(records, policy.name, machine, restored, stopped, settings.illustrated)
        return _exit_code(state, stop, faults)


def restore(settings: Settings) -> int:
    """
    Undo what an earlier loop has left.

    :param settings: where its state is
    :return: the exit code: 0 if the machine is as it was
    """
    folder = StateFolder(settings.folder)
    folder.lock()
    state = folder.load()
    if state is None:
        print(f"nothing to restore in {folder.path}")
        return EXIT_OK
    hierarchy = usable_hierarchy()
    faults = undo(state, folder, make_runtime(state, hierarchy), hierarchy)
    for fault in faults:
        complain(fault)
    if faults:
        return EXIT_FAILED
    folder.clear()
    print("memcached has its vCPUs back, no job is left, nothing is paused")
    return EXIT_OK


def require_vcpus(scenario: Scenario) -> None:
    """
    Make sure that this machine has the scenario's vCPUs.

    :raises InputError: if it does not
    """
    wanted, online = scenario.machine.vcpus, online_vcpus()
    if not set(range(wanted)) <= set(online):
        raise InputError(
            f"scenario {scenario.name}: wants {wanted} vCPUs; this machine has {len(online)}"
        )


def require_period(scenario: Scenario) -> None:
    """
    Make sure that the loop says often enough that it lives.

    :raises InputError: if the guardian would take it for dead between two polls
    """
    period_s = scenario.control.period_s
    if period_s > LONGEST_PERIOD_S:
        raise InputError(
            f"scenario {scenario.name}: control.period_s: {period_s:g} s; a deployment polls every "
            f"{LONGEST_PERIOD_S:g} s or more often"
        )


def usable_hierarchy() -> Hierarchy | None:
    """Where control groups are, if this process may make some."""
    try:
        hierarchy = find_hierarchy()
    except OSError:
        return None
    writable = all(os.access(mount, os.W_OK) for mount in set(hierarchy.mounts.values()))
    return hierarchy if writable else None


def make_runtime(state: State, hierarchy: Hierarchy | None) -> Runtime:
    """
    Who runs the jobs.

    :param state: says who, and with which rights
    :param hierarchy: where control groups are, if any
    :raises InputError: if it cannot on this machine
    """
    if state.runtime == "process":
        return ProcessRuntime()
    if hierarchy is None:
        raise InputError("containers need control groups this user may write; use sudo")
    from deploy.jobs.containers import DockerRuntime

    return DockerRuntime(hierarchy, state.nonce, state.docker, state.privileged)


def begin_state(scenario: Scenario, settings: Settings, folder: StateFolder) -> State:
    """
    A new deployment, or the one to resume.

    :raises InputError: if the folder holds one that has not ended, or none to resume, or if Docker
        is where the guardian cannot reach it
    """
    left = folder.load()
    if settings.resume:
        if left is None:
            raise InputError(f"{folder.path}: no deployment to resume")
        if left.scenario != scenario.name:
            raise InputError(
                f"{folder.path}: holds a deployment of {left.scenario}, not of {scenario.name}"
            )
        return left
    if left is not None and not settings.dry_run:
        raise InputError(
            f"{folder.path}: holds an unfinished deployment; use --resume or --restore"
        )
    return State(
        nonce=secrets.token_hex(6),
        scenario=scenario.name,
        runtime=settings.runtime,
        docker=docker_address(settings) if settings.runtime == "docker" else "",
        started_s=time.monotonic(),
        privileged=settings.privileged,
    )


def docker_address(settings: Settings) -> str:
    """
    The Docker daemon's address, which the guardian must know, too.

    :raises InputError: if it is no Unix socket: the guardian talks to nothing else
    """
    address = settings.docker or os.environ.get("DOCKER_HOST") or DOCKER_SOCKET
    if not address.startswith("unix:///"):
        raise InputError(f"Docker at {address}: must be at unix:///PATH, on this machine")
    return address


def _settle_memory() -> None:
    """What is there now stays: collections leave it alone, and threads share the main heap."""
    gc.freeze()
    gc.enable()
    with contextlib.suppress(AttributeError):  # it is glibc's
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def find_service(
    sensor: ServiceSensor, settings: Settings, started_s: float
) -> service_process.Identity:
    """
    Wait until memcached has answered.

    :param sensor: looks for it
    :param settings: where it listens
    :param started_s: when the sensor's clock was 0, on the monotonic clock
    :raises InputError: if it does not, or it is none of this machine
    """
    give_up_s = time.monotonic() - started_s + FIND_LIMIT_S
    while sensor.who is None:
        now_s = time.monotonic() - started_s
        if now_s > give_up_s:
            raise InputError(
                f"{settings.host}:{settings.port}: no memcached of this machine answers there"
            )
        sensor.ask(now_s)
        time.sleep(0.001)
        sensor.receive(now_s)
    return sensor.who


def cpi_sensor(policy: str, who: service_process.Identity, now_s: float) -> CpiSensor:
    """
    What counts memcached's cycles, for a policy that cannot decide without them.

    :param policy: its name
    :param who: memcached
    :param now_s: the time now, on the loop's clock
    :raises InputError: if this machine does not count them, or not for this user
    """
    try:
        return CpiSensor(who, now_s)
    except OSError as error:
        raise InputError(
            f"policy {policy}: decides by cycles per instruction: {why_not_counted(error)}"
        ) from error


def group_maker(
    state: State, hierarchy: Hierarchy | None, service_pid: int
) -> Callable[[str], JobGroup] | None:
    """
    What makes the jobs' control groups.

    :param state: marks them
    :param hierarchy: where groups are, if any
    :param service_pid: memcached, beside which they are made
    """
    if hierarchy is None:
        return None
    state.background = LEAST_WEIGHT[hierarchy.version]
    beside = job_groups_beside(hierarchy, service_pid)
    return lambda job: beside(f"coretide-{state.nonce}-{job}")


def cpuacct() -> Path | None:
    """Where version 1 keeps the vCPUs' busy times, if anywhere."""
    try:
        hierarchy = find_hierarchy()
    except OSError:
        return None
    return hierarchy.mounts.get("cpuacct") if hierarchy.version == 1 else None


def end(
    state: State,
    folder: StateFolder,
    runtime: Runtime,
    hierarchy: Hierarchy | None,
    leave: bool,
    recorder: Recorder,
) -> list[str]:
    """
    Leave the machine as it was found, or the jobs running where that was asked for.

    :return: what could not be undone, one line each
    """
    if leave:
        _, faults = make_safe(folder.path / STATE_FILE)
        recorder.event("custom", SCHEDULER, detail="jobs are left running; --resume goes on")
        return faults
    faults = undo(state, folder, runtime, hierarchy)
    for fault in faults:
        recorder.event("custom", SCHEDULER, detail=fault)
    if not faults:
        recorder.event("custom", SCHEDULER, detail="the machine is as it was found")
        folder.clear()
    return faults


def _exit_code(state: State, stop: StopRequest, faults: list[str]) -> int:
    if stop.number:
        return 128 + stop.number
    failed = any(record.exit_code != 0 for record in state.jobs.values())
    return EXIT_FAILED if failed or faults else EXIT_OK


def _log_interval(
    log: "IntervalLog", started_s: float, telemetry: Telemetry, allocation: Allocation
) -> None:
    log.poll(started_s + telemetry.time_s, telemetry.service.requests)


def _tell(listeners: list[Callable[[Event], None]], event: Event) -> None:
    for listener in listeners:
        listener(event)


def _start_view(folder: Path) -> subprocess.Popen[bytes]:
    """A process of its own, which Ctrl-C does not reach: it shows the run to its end."""
    command = [sys.executable, "-m", "deploy.view", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _await_view(view: subprocess.Popen[bytes]) -> None:
    try:
        view.wait(VIEW_END_S)
    except subprocess.TimeoutExpired:
        view.terminate()
        view.wait()


def _print_event(event: Event) -> None:
    words = [f"{event.time_s:8.3f} s ", event.job]
    words += [event.what, event.arguments()] if event.what != "custom" else []
    say(" ".join(filter(None, (*words, event.detail))))
