"""
The parts of a deployment, put together in order and taken apart in the opposite one.

`assembled` gives what observes and records; with `steered` around the decisions, what they change
is undone. `deploy.deployment` and `deploy.live_episodes` use both.
"""

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents.policy import Policy
from deploy.jobs.runtimes import ProcessRuntime, Runtime, RuntimeUnavailableError
from deploy.linux import realtime, service_process
from deploy.linux.cgroups import (
    LEAST_WEIGHT,
    Hierarchy,
    JobGroup,
    find_hierarchy,
    job_groups_beside,
)
from deploy.linux.counters import CpiSensor, why_not_counted
from deploy.linux.group_sensor import PROXY, GroupSensor
from deploy.linux.sensors import ServiceSensor, VcpuClock
from deploy.loop.actuator import Actuator
from deploy.loop.actuator_interface import Actuation
from deploy.loop.admission import Admission, Arrivals
from deploy.loop.live_machine import LiveMachine
from deploy.queue.spool import Spool
from deploy.records.recorder import SCHEDULER, Event, Recorder, set_aside
from deploy.records.state import STATE_FILE, State, StateFolder, as_json, claim
from deploy.safety.guardian import Guardian, make_safe
from deploy.safety.restore import in_words, is_gone, undo
from deploy.settings import Settings
from env.allocation import Weight
from env.errors import InputError, fault, os_reason
from env.scenario import Scenario, Service

if TYPE_CHECKING:
    from deploy.node.node_pods import NodePods
    from deploy.records.latencies import LatencySensor

FIND_LIMIT_S = 1.0
"""How long memcached may take to answer at the start."""

DOCKER_SOCKET = "unix:///var/run/docker.sock"


@dataclass(frozen=True)
class Parts:
    """
    What a deployment observes with, and where it writes down what it sees and does.

    :param scenario: the problem
    :param folder: the state folder, locked
    :param state: the deployment, new or to be resumed
    :param service: memcached's processes, the one that clients ask first
    :param sensor: reads memcached
    :param vcpus: reads the vCPUs' busy times
    :param recorder: writes the records
    :param cpi: counts memcached's cycles, for a policy that cannot decide without them
    :param latency: measures latency, where that is wanted
    """

    scenario: Scenario
    folder: StateFolder
    state: State
    service: tuple[service_process.Identity, ...]
    sensor: GroupSensor
    vcpus: VcpuClock
    recorder: Recorder
    cpi: CpiSensor | None
    latency: "LatencySensor | None"

    def machine(
        self,
        actuator: Actuation,
        guardian: Guardian | None = None,
        admission: Arrivals | None = None,
    ) -> LiveMachine:
        """
        The machine as a policy sees it.

        :param actuator: performs allocations
        :param guardian: is kept from acting; None for a machine that nothing is done to
        :param admission: brings jobs one by one, where a queue or a cluster's node has them
        """
        return LiveMachine(
            self.scenario,
            actuator,
            self.sensor,
            self.vcpus,
            self.recorder,
            guardian,
            self.latency,
            self.cpi,
            admission,
        )


@contextlib.contextmanager
def assembled(
    scenario: Scenario,
    settings: Settings,
    policy: Policy | None = None,
    listeners: Sequence[Callable[[Event], None]] = (),
) -> Iterator[Parts]:
    """
    Find memcached, claim it and begin to record; nothing is changed yet.

    :param scenario: the problem
    :param settings: see there
    :param policy: who decides, where a policy does; says whether cycles are to be counted
    :param listeners: are told every event; the list may grow
    :raises InputError: if the machine, memcached or the folders are not fit for it
    """
    with contextlib.ExitStack() as stack:
        folder = StateFolder(settings.folder)
        folder.lock()
        stack.callback(folder.unlock)
        state = begin_state(scenario, settings, folder)
        sensor = service_sensor(scenario.service, settings, state)
        stack.callback(sensor.close)
        service = find_service(sensor, state.started_s)
        if not settings.dry_run:
            stack.enter_context(claim())
        cpi = None
        if policy is not None and policy.needs_cpi:
            cpi = cpi_sensor(policy.name, service, time.monotonic() - state.started_s)
            stack.callback(cpi.close)
        vcpus = VcpuClock(scenario.machine.vcpus, cpuacct())
        stack.callback(vcpus.close)
        if not (settings.resume or settings.dry_run):
            set_aside(settings.report)
        recorder = Recorder(settings.report, scenario, state.started_s, partial(_tell, listeners))
        stack.callback(recorder.close)
        latency = latency_sensor(scenario, settings, service)
        if latency is not None:
            stack.callback(latency.stop)
        yield Parts(scenario, folder, state, service, sensor, vcpus, recorder, cpi, latency)


def _tell(listeners: Sequence[Callable[[Event], None]], event: Event) -> None:
    for listener in listeners:
        listener(event)


@dataclass
class Steering:
    """
    A machine that decisions change, and after the end what became of it.

    :param machine: performs allocations
    :param left: whether the jobs were left running
    :param gone: whether memcached has ended, so that nothing could be given back to it
    :param faults: what could not be undone, one line each
    :param conclude: called once all but memcached's precedence is undone, which keeps memcached
        from waiting for what the call takes of the vCPUs
    """

    machine: LiveMachine
    left: bool = False
    gone: bool = False
    faults: list[str] = field(default_factory=list)
    conclude: Callable[[], None] = lambda: None

    @property
    def restored(self) -> bool:
        """Whether the machine is as it was found; to be asked when concluding, or after the end."""
        return not (self.left or self.gone or self.faults)


@contextlib.contextmanager
def steered(
    parts: Parts,
    settings: Settings,
    guardian: Guardian,
    leave_jobs: Callable[[], bool] = lambda: False,
    spool: Spool | None = None,
    pods: "NodePods | None" = None,
) -> Iterator[Steering]:
    """
    Take hold of the machine, and leave it as it was found.

    :param parts: see `assembled`
    :param settings: see there
    :param guardian: makes the machine safe if this process dies; dismissed when concluding
    :param leave_jobs: asked at the end: whether the jobs are to be left running
    :param spool: the queue that brings the jobs, where one does
    :param pods: of the cluster's node whose batch pods are the jobs
    :raises InputError: if the jobs cannot be run here, or an earlier deployment not be taken over
    """
    folder, state, recorder = parts.folder, parts.state, parts.recorder
    hierarchy = usable_hierarchy()
    runtime = make_runtime(state, hierarchy, apart_from_service(parts.scenario))
    groups = None
    if pods is None:
        groups = group_maker(state, hierarchy, [who.pid for who in parts.service])
    try:
        lifts = hierarchy if pods is None else None  # a pod's weight is its kubelet's
        actuator = Actuator(
            parts.scenario, runtime, folder, state, groups, recorder, parts.vcpus, lifts
        )
    except (OSError, RuntimeError) as error:  # it needs a thread, and descriptors in reserve
        reason = os_reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"jobs cannot be run: {reason.lower()}") from error
    if not settings.resume:
        folder.begin(state)
        try:
            _require_groups(actuator, groups)
        except OSError as error:
            end(state, folder, runtime, hierarchy, False, recorder)
            raise InputError(f"background: cannot be had: {os_reason(error).lower()}") from error
    guardian.watch(folder.path / STATE_FILE)
    admission: Arrivals | None = None
    if spool is not None:
        admission = Admission(spool, parts.scenario, actuator, recorder)
    elif pods is not None:
        from deploy.node.pod_admission import PodAdmission  # late: few need it

        state.background = LEAST_WEIGHT[pods.hierarchy.version]
        admission = PodAdmission(pods, actuator, recorder)
    steering = Steering(parts.machine(actuator, guardian, admission))
    if settings.resume:
        try:
            steering.machine.take_over()
        except (OSError, RuntimeUnavailableError) as error:
            end(state, folder, runtime, hierarchy, True, recorder)  # for another try
            raise InputError(f"{folder.path}: not taken over: {fault(error)}") from error

    def conclude(faults: list[str]) -> None:
        steering.faults = faults
        if not faults:
            guardian.stop()  # the report takes seconds, without a beat
        steering.conclude()

    try:
        yield steering
    finally:
        actuator.close()
        steering.left = leave_jobs()
        steering.gone = is_gone(state)
        steering.faults = end(
            state, folder, runtime, hierarchy, steering.left, recorder, admission, conclude
        )
        if admission is not None:
            admission.close()  # also where jobs are left running: its folder is closed now


def end(
    state: State,
    folder: StateFolder,
    runtime: Runtime,
    hierarchy: Hierarchy | None,
    leave: bool,
    recorder: Recorder,
    admission: Arrivals | None = None,
    conclude: Callable[[list[str]], None] = lambda faults: None,
) -> list[str]:
    """
    Leave the machine as it was found, or safe with the jobs running where that was asked for.

    :param state: what the deployment did
    :param folder: the state folder
    :param runtime: runs the jobs
    :param hierarchy: how control groups are mounted, if they are
    :param leave: whether the jobs are left running
    :param recorder: is told how it went
    :param admission: what brought the jobs one by one, if anything did
    :param conclude: called once, with what could not be undone until then: see `Steering.conclude`
    :return: what could not be undone, one line each
    """
    if leave:
        _, faults = make_safe(as_json(state))
        try:
            folder.save(state)
        except OSError as error:
            faults.append(f"the state is not written, --resume has an older one: {fault(error)}")
        recorder.event("custom", SCHEDULER, detail="jobs are left running; --resume goes on")
        conclude(faults)
        return faults

    def before_last(faults: list[str]) -> None:
        if admission is not None and not faults:
            faults += admission.settle(state, folder)
        conclude(faults)

    faults = undo(state, folder, runtime, hierarchy, before_last)
    if not faults and (left := folder.clear()):
        faults = [left]
    for each in faults or [in_words(state)]:
        recorder.event("custom", SCHEDULER, detail=each)
    return faults


def begin_state(scenario: Scenario, settings: Settings, folder: StateFolder) -> State:
    """
    A new deployment, or the one to resume.

    :param scenario: the problem
    :param settings: say whether to resume, and who runs the jobs
    :param folder: the state folder, locked
    :raises InputError: if the folder holds one that has not ended or cannot be read, or none to
        resume, or if Docker is where the guardian cannot reach it
    """
    try:
        left = folder.load()
    except InputError as error:
        raise InputError(f"{error}; --restore ends what it has left") from error
    queue = "" if settings.queue is None else str(settings.queue.resolve())
    if settings.resume:
        if left is None:
            raise InputError(f"{folder.path}: no deployment to resume")
        if left.queue != queue:
            raise InputError(
                f"{folder.path}: holds a deployment {_whose_jobs(left.queue)}, "
                f"not {_whose_jobs(queue)}"
            )
        if left.scenario != scenario.name:
            raise InputError(
                f"{folder.path}: holds a deployment of {left.scenario}, not of {scenario.name}"
            )
        if len(left.service) not in (0, scenario.service.processes):
            raise InputError(
                f"{folder.path}: holds a deployment of {len(left.service)} memcached processes, "
                f"not of {scenario.service.processes}"
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
        queue=queue,
    )


def _whose_jobs(queue: str) -> str:
    return f"that serves the queue {queue}" if queue else "of the scenario's own jobs"


def docker_address(settings: Settings) -> str:
    """
    The Docker daemon's address, which the guardian must know, too.

    :param settings: the command line's, which may name it
    :return: `unix:///PATH`
    :raises InputError: if it is no Unix socket: the guardian talks to nothing else
    """
    address = settings.docker or os.environ.get("DOCKER_HOST") or DOCKER_SOCKET
    if not address.startswith("unix:///"):
        raise InputError(f"Docker at {address}: must be at unix:///PATH, on this machine")
    return address


def service_sensor(
    service: Service, settings: Settings, resumed: State | None = None
) -> GroupSensor:
    """
    What reads memcached's processes.

    :param service: of the scenario
    :param settings: name their addresses, as many as the service has processes
    :param resumed: a deployment that knows what must run there
    """
    known: Iterable[service_process.Program | None] = itertools.repeat(None)
    if resumed is not None and resumed.service:
        known = [record.program for record in resumed.service]
    sensors = [
        ServiceSensor(host, port, program, settings.inside)
        for (host, port), program in zip(settings.addresses, known, strict=False)
    ]
    return GroupSensor(sensors, service.proxy, service.replicas)


def find_service(sensor: GroupSensor, started_s: float) -> tuple[service_process.Identity, ...]:
    """
    Wait until memcached has answered, each process of it.

    :param sensor: looks for memcached
    :param started_s: when the sensor's clock was 0, on the monotonic clock [s]
    :return: its processes, the one that clients ask first
    :raises InputError: if not all of them are this machine's, and answer
    """
    give_up_s = time.monotonic() - started_s + FIND_LIMIT_S
    while not sensor.who:
        now_s = time.monotonic() - started_s
        if now_s > give_up_s:
            raise InputError(_why_not_found(sensor))
        sensor.ask(now_s)
        time.sleep(0.001)
        sensor.receive(now_s)
    return sensor.who


def _why_not_found(group: GroupSensor) -> str:
    """Who does not answer, and why, as far as that is known."""
    name, sensor = next(
        (name, one) for name, one in zip(group.names, group.sensors, strict=True) if one.who is None
    )
    where = f"{sensor.stats.host}:{sensor.stats.port}"
    process = Path(f"/proc/{sensor.stats.pid}")
    if sensor.stats.pid and process.exists() and not os.access(process / "fd", os.R_OK):
        return f"{where}: {process.name} is another user's process: run as root"
    if trouble := sensor.stats.complaint or "; ".join(group.news):
        return f"{where}: no memcached is followed: {trouble}"
    if name == PROXY:
        from deploy.engines import nutcracker, proxy_build  # late: few need them

        if group.proxy == "nutcracker":
            return f"{where}: no nutcracker of this machine answers there; {nutcracker.HOW}"
        return f"{where}: no proxy of memcached's answers there; {proxy_build.HOW}"
    whose = f", the scenario's {name}" if name else ""
    return f"{where}: no memcached of this machine answers there{whose}"


def cpi_sensor(policy: str, who: tuple[service_process.Identity, ...], now_s: float) -> CpiSensor:
    """
    What counts memcached's cycles, for a policy that cannot decide without them.

    :param policy: the policy's name
    :param who: memcached's processes
    :param now_s: the present time on the loop's clock [s]
    :raises InputError: if this machine does not count cycles, or not for this user
    """
    try:
        return CpiSensor(who, now_s)
    except OSError as error:
        raise InputError(
            f"policy {policy}: decides by cycles per instruction: {why_not_counted(error)}"
        ) from error


def latency_sensor(
    scenario: Scenario, settings: Settings, who: tuple[service_process.Identity, ...]
) -> "LatencySensor | None":
    """
    What measures memcached's latency, started; None where that is not wanted.

    :param scenario: says what is late
    :param settings: say who measures, and where memcached is
    :param who: memcached's processes
    :raises InputError: if the tap cannot be had here
    """
    # Late: only who measures latency needs them.
    if settings.tap:
        from deploy.tap.latency_tap import Tap

        service = scenario.service
        ports, pids = [port for _, port in settings.addresses], [one.pid for one in who]
        return Tap(ports, pids, 1e-6 * service.slo_us, service.proxy is not None)
    if settings.probe:
        from deploy.load.probe import Probe

        return Probe(settings.host, settings.port, realtime.last_cpu())
    return None


def usable_hierarchy() -> Hierarchy | None:
    """Where control groups are, if this process may make some."""
    try:
        hierarchy = find_hierarchy()
    except OSError:
        return None
    writable = all(os.access(mount, os.W_OK) for mount in set(hierarchy.mounts.values()))
    return hierarchy if writable else None


def apart_from_service(scenario: Scenario) -> tuple[int, ...]:
    """
    The vCPUs that memcached does not have even on the largest of its usual sets that leaves some.

    :param scenario: names the sets
    """
    vcpus = set(range(scenario.machine.vcpus))
    left = [vcpus - set(cores) for cores in scenario.service.core_choices]
    return tuple(sorted(min((some for some in left if some), key=len, default=())))


def make_runtime(state: State, hierarchy: Hierarchy | None, apart: Sequence[int] = ()) -> Runtime:
    """
    The runtime of a deployment's jobs.

    :param state: names the runtime and its rights
    :param hierarchy: how control groups are mounted, if they are
    :param apart: see `DockerRuntime`
    :raises InputError: if jobs cannot be run that way on this machine
    """
    if state.runtime == "process":
        return ProcessRuntime()
    if hierarchy is None:
        raise InputError("containers need control groups this user may write; use sudo")
    from deploy.jobs.containers import DockerRuntime

    return DockerRuntime(hierarchy, state.nonce, state.docker, state.privileged, apart)


def group_maker(
    state: State, hierarchy: Hierarchy | None, service_pids: Sequence[int]
) -> Callable[[str], JobGroup] | None:
    """
    What makes the jobs' control groups; None where there are no groups.

    :param state: its nonce marks the groups
    :param hierarchy: how control groups are mounted, if they are
    :param service_pids: process ids of memcached, beside whose groups the jobs' groups are made
    :raises InputError: if they are not in one place, or one is in the background
    """
    if hierarchy is None:
        return None
    places = {hierarchy.group_of(pid).parent for pid in service_pids}
    if len(places) > 1:
        apart = ", ".join(sorted(map(str, places)))
        raise InputError(f"memcached's control groups are below {apart}; it must be one place")
    state.background = LEAST_WEIGHT[hierarchy.version]
    # A loop before this one may have put memcached first.
    weighings = [record.weighing for record in state.service]
    found = {one.group: one.before for one in weighings if one is not None}
    # All are asked, as each may refuse; being in one place, they make the same groups.
    makers = [job_groups_beside(hierarchy, pid, found) for pid in service_pids]
    return lambda job: makers[0](f"coretide-{state.nonce}-{job}")


def _require_groups(actuator: Actuator, groups: Callable[[str], JobGroup] | None) -> None:
    """
    Make the first job's group: where it cannot be had, no job's can.

    :raises OSError: if the machine does not allow it
    """
    if groups is not None and actuator.jobs:
        first = next(iter(actuator.jobs.values()))
        first.make_group()
        groups(first.job.name).set_weight(Weight.BACKGROUND)


def cpuacct() -> Path | None:
    """Where version 1 keeps the vCPUs' busy times, if anywhere."""
    try:
        hierarchy = find_hierarchy()
    except OSError:
        return None
    return hierarchy.mounts.get("cpuacct") if hierarchy.version == 1 else None
