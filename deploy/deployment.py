"""One deployment: prepare, run the loop, leave the machine as it was found."""

import contextlib
import ctypes
import gc
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents.policy import Policy
from deploy.assembly import (
    Parts,
    Steering,
    assembled,
    docker_address,
    find_service,
    make_runtime,
    steered,
    usable_hierarchy,
)
from deploy.jobs.precedence import CLASS
from deploy.linux import service_process, standing
from deploy.linux.cgroups import Hierarchy
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.helpers import helper_command
from deploy.linux.sensors import ServiceSensor
from deploy.loop.dry_run import DryActuator, ending
from deploy.loop.loop import Loop, Sampler, StopRequest
from deploy.queue.spool import RUNNING, Spool, settle
from deploy.records.lines import LineFile
from deploy.records.predicted import note_policy
from deploy.records.recorder import LOAD_FILE, PROBE_FILE, PROBE_LOG_S, Event
from deploy.records.state import JobRecord, State, StateFolder, claim, read_state
from deploy.records.terminal import complain, say
from deploy.requirements import require
from deploy.safety.guardian import Guardian
from deploy.safety.restore import forget, in_words, undo
from deploy.settings import Settings
from env.allocation import Allocation
from env.errors import InputError, fault
from env.scenario import Job, Scenario
from env.telemetry import Telemetry

if TYPE_CHECKING:
    from deploy.node.node_pods import NodePods
    from deploy.records.latencies import IntervalLog
    from deploy.records.metrics import RunCollector

VIEW_END_S = 3.0
"""How long the live picture may take to show the end."""

EXIT_OK, EXIT_FAILED = 0, 1

M_ARENA_MAX = -8
"""From glibc's malloc.h. A heap of its own for another thread takes 3 MiB."""


def run(
    scenario: Scenario,
    policy: Policy,
    settings: Settings,
    guardian: Guardian,
    pods: "NodePods | None" = None,
) -> int:
    """
    Deploy a policy until all jobs have ended.

    :param scenario: the problem
    :param policy: who decides
    :param settings: see there
    :param guardian: makes the machine safe if this process dies
    :param pods: of the cluster's node whose batch pods are the jobs, where that is what is tended
    :return: the exit code: 0 if every job has succeeded and the machine is as it was
    :raises InputError: if it cannot begin
    """
    open_end = settings.queue is not None or pods is not None
    if open_end:
        _require_open_end(policy, scenario)
    policy.reset(scenario)
    require(scenario, settings)
    standing.spare()
    listeners: list[Callable[[Event], None]] = [] if settings.view else [_print_event]
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        if settings.dry_run:
            records = stack.enter_context(tempfile.TemporaryDirectory())
            settings = replace(settings, report=Path(records))
        # Before any folder is made: its port may be taken.
        collector = stack.enter_context(_metrics(settings.metrics_port))
        spool = None
        if settings.queue is not None:
            spool = stack.enter_context(_claimed(settings.queue, settings.folder))
        view = stack.enter_context(contextlib.ExitStack())  # closed after the last record
        parts = stack.enter_context(assembled(scenario, settings, policy, listeners))
        if spool is not None:
            jobs = _left_running(spool, parts) if settings.resume else _all_waiting(spool, parts)
            parts = replace(parts, scenario=scenario.with_jobs(jobs))
            if jobs:
                policy.change_jobs(parts.scenario)
        if settings.view:
            view.callback(_await_view, _start_view(settings.report))
        samplers: list[Sampler] = [parts.recorder.sample]
        if collector is not None:
            listeners.append(collector.event)
            samplers.append(collector.sample)
        logs = stack.enter_context(_interval_logs(parts, settings.report))
        samplers += [partial(_log_interval, log, parts.state.started_s) for log in logs]
        if settings.dry_run:
            samplers.append(ending(stop))
            machine = parts.machine(DryActuator(scenario, parts.state))
            Loop(machine, policy, parts.recorder, stop, samplers).run()
            return EXIT_OK

        # A report can do without what was predicted; a path that is no text cannot be noted.
        with contextlib.suppress(OSError, ValueError):
            note_policy(settings.report, settings.policy)

        def leave_jobs() -> bool:
            return settings.leave_jobs and stop.number != 0

        _settle_memory()
        with steered(parts, settings, guardian, leave_jobs, spool, pods) as steering:
            machine = steering.machine
            loop = Loop(machine, policy, parts.recorder, stop, samplers)
            loop.run()
            for log in logs:
                log.finish(time.monotonic(), machine.telemetry().service.requests)
            steering.conclude = partial(
                _report, settings, policy.name, loop.cpu_pct, steering, stop, open_end
            )
        # What a pod ends in is its owner's matter.
        ended = parts.state.jobs.values() if pods is None else ()
        return _exit_code(ended, stop, steering.faults)


def _report(
    settings: Settings,
    policy: str,
    cpu_pct: float,
    steering: Steering,
    stop: StopRequest,
    open_end: bool,
) -> None:
    from deploy.loop.outcome import write_report  # late: drawing it takes memory

    machine, restored, stopped = steering.machine, steering.restored, stop.number != 0
    write_report(
        settings.report,
        policy,
        machine,
        restored,
        stopped,
        settings.illustrated,
        cpu_pct,
        open_end,
    )


def _require_open_end(policy: Policy, scenario: Scenario) -> None:
    """
    Make sure that a policy can run jobs that it learns of one by one, and knows nothing of.

    :raises InputError: if it cannot
    """
    stranger = Job(name="job-of-a-queue", command=("true",), threads=(1,), memory_mib=1)
    try:
        policy.reset(scenario)
        policy.change_jobs(scenario.with_jobs([stranger]))
    except InputError as error:
        raise InputError(
            f"{error}; it cannot serve a queue or a node: --policy first-come can"
        ) from error


def _claimed(queue: Path, state_folder: Path) -> Spool:
    spool = Spool(queue)
    spool.lock(state_folder)
    return spool


def _left_running(spool: Spool, parts: Parts) -> list[Job]:
    """
    The jobs that the loop to be resumed has begun; what it has left of those over is removed.

    :raises InputError: if one of them cannot be read, or what is left not be removed
    """
    running = [name for name in spool.names(RUNNING) if not spool.recover(name)]
    containers = parts.state.runtime == "docker"
    over = [name for name in parts.state.jobs if name not in running]
    for name in over:
        if not spool.is_over(name):
            raise InputError(f"{spool.path}/{RUNNING}: lacks {name}, which may run; use --restore")
    if trouble := forget(over, parts.state, parts.folder, usable_hierarchy()):
        raise InputError(f"{trouble}; use --restore")
    known = [name for name in running if name in parts.state.jobs]
    return [spool.read_running(name, parts.scenario, containers) for name in known]


def _all_waiting(spool: Spool, parts: Parts) -> list[Job]:
    """
    Begin with no job: those that an earlier loop has begun are over by proof, or wait again.

    :raises InputError: if the disk refuses that
    """
    left = None
    with contextlib.suppress(InputError):  # a state that cannot be read proves nothing
        left = read_state(parts.folder.path, any_boot=True)
    if faults := settle(spool, left, parts.folder):
        raise InputError(faults[0])
    return []


def restore(settings: Settings) -> int:
    """
    Undo what an earlier loop has left.

    :param settings: names its state folder
    :return: the exit code: 0 if the machine is as it was
    """
    folder = StateFolder(settings.folder)
    folder.lock()
    try:
        with claim():
            return _restore(settings, folder)
    finally:
        folder.unlock()


def _restore(settings: Settings, folder: StateFolder) -> int:
    hierarchy = usable_hierarchy()
    try:
        state = folder.load()
    except InputError as error:
        return _restore_lost(settings, folder, hierarchy, str(error))
    if state is None:
        before_boot = read_state(folder.path, any_boot=True)
        if before_boot is not None and (faults := _settle_queue(before_boot, folder)):
            raise InputError(faults[0])
        return _restore_lost(settings, folder, hierarchy, "")
    faults = undo(state, folder, make_runtime(state, hierarchy), hierarchy)
    if not faults:
        faults = _settle_queue(state, folder)
    for left in faults:
        complain(left)
    if faults:
        complain(
            "put that right and use --restore again; where that cannot be, end by hand what "
            f"has {state.nonce} in its label or control group, and remove {folder.path}"
        )
        return EXIT_FAILED
    if left := folder.clear():
        raise InputError(left)
    say(f"{in_words(state)}: no job is left, nothing is paused")
    return EXIT_OK


def _settle_queue(state: State, folder: StateFolder) -> list[str]:
    """Leave the queue of a loop that is gone to the next one, if it served any; what failed."""
    if not state.queue:
        return []
    with Spool(Path(state.queue)) as spool:
        return settle(spool, state, folder)


def _restore_lost(
    settings: Settings, folder: StateFolder, hierarchy: Hierarchy | None, trouble: str
) -> int:
    """Undo what can be found without the state, and say what cannot be known; never success."""
    from deploy.safety import leftovers  # late: few need it

    docker = ""
    with contextlib.suppress(InputError):  # no deployment can have run with such an address
        docker = docker_address(settings)
    found = leftovers.find(folder, hierarchy, docker)
    if not (trouble or found.nonces or found.unknown):
        if left := folder.clear():
            raise InputError(left)
        say(f"nothing to restore in {folder.path}")
        return EXIT_OK
    complain(trouble or f"{folder.path}: the state is gone")
    faults = [*found.unknown, *leftovers.end(found, folder, hierarchy, docker)]
    for left in faults:
        complain(left)
    if found.nonces and not faults:
        complain(f"jobs of {', '.join(found.nonces)} were ended, their control groups removed")
    complain(f"which vCPUs memcached had before is not known; {_where_memcached_is(settings)}")
    if not faults:
        folder.set_aside()
    return EXIT_FAILED


def _where_memcached_is(settings: Settings) -> str:
    sensors = [ServiceSensor(host, port) for host, port in settings.addresses]
    with contextlib.closing(GroupSensor(sensors)) as sensor:
        try:
            found = [who.pid for who in find_service(sensor, time.monotonic())]
            held = [set().union(*service_process.affinities(pid).values()) for pid in found]
            first = [pid for pid in found if os.sched_getscheduler(pid) == CLASS]
        except (InputError, OSError) as error:
            return fault(error)
    listed = (f"process {pid} has {_listed(cores)}" for pid, cores in zip(found, held, strict=True))
    classes = (f"; `chrt -a -o -p 0 {pid}` gives it its usual class back" for pid in first)
    return f"{', '.join(listed)}, `taskset -acp` changes that{''.join(classes)}"


def _listed(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def _settle_memory() -> None:
    """
    Give back to the machine what the start needed, and have threads share the main heap.

    The collection comes before the loop takes its real-time priority, at which memcached would have
    to wait for 0.1 s.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # they are glibc's
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 1)
        libc.malloc_trim(0)


def _exit_code(jobs: Iterable[JobRecord], stop: StopRequest, faults: list[str]) -> int:
    if stop.number:
        return 128 + stop.number
    failed = any(record.exit_code != 0 for record in jobs)
    return EXIT_FAILED if failed or faults else EXIT_OK


@contextlib.contextmanager
def _metrics(port: int | None) -> Iterator["RunCollector | None"]:
    """What Prometheus is served from; None where it is not served."""
    if port is None:
        yield None
        return
    from deploy.records.metrics import Endpoint, RunCollector  # late: they take memory

    collector = RunCollector()
    with contextlib.closing(Endpoint(collector, port)):
        yield collector


@contextlib.contextmanager
def _interval_logs(parts: Parts, folder: Path) -> Iterator[list["IntervalLog"]]:
    """Logs of latency: of short windows, and of intervals unless the load writes them itself."""
    state, sensor = parts.state, parts.latency
    if sensor is None:
        yield []
        return
    from deploy.records.latencies import IntervalLog

    lengths_s = {PROBE_FILE: PROBE_LOG_S}
    state.logs_intervals = state.logs_intervals or not (folder / LOAD_FILE).exists()
    if state.logs_intervals:
        lengths_s[LOAD_FILE] = parts.scenario.load.interval_s
    with contextlib.ExitStack() as files:
        logs = []
        for name, length_s in lengths_s.items():
            try:
                lines = LineFile.at(folder / name, parts.recorder.disk)
            except OSError as error:
                reason = f"cannot be written to: {error.strerror}"
                raise InputError(f"{folder / name}: {reason}") from error
            files.callback(lines.close)
            logs.append(IntervalLog(sensor, lines, length_s))
        yield logs


def _log_interval(
    log: "IntervalLog", started_s: float, telemetry: Telemetry, allocation: Allocation
) -> None:
    log.poll(started_s + telemetry.time_s, telemetry.service.requests)


def _start_view(folder: Path) -> subprocess.Popen[bytes]:
    """Show the run to its end from a process of its own, which Ctrl-C does not reach."""
    command = helper_command("deploy.view", str(folder.resolve()))
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
