"""
`--check`: is this machine fit? Every line says what was checked and what was found.

Nothing is changed that is not put back at once, whatever ends the program meanwhile; what runs is
background work beside memcached for a second, to see that it really yields.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.assembly import (
    begin_state,
    docker_address,
    find_service,
    service_sensor,
    usable_hierarchy,
)
from deploy.deployment import EXIT_FAILED, EXIT_OK
from deploy.jobs import precedence
from deploy.jobs.placement import set_policy
from deploy.jobs.yielding import RunDelay, run_delay
from deploy.linux import service_process, standing
from deploy.linux.cgroups import Hierarchy, JobGroup, job_groups_beside
from deploy.linux.counters import CpiSensor, why_not_counted
from deploy.linux.sensors import VcpuClock
from deploy.linux.service_process import Identity
from deploy.linux.signals import held
from deploy.records.state import (
    STATE_FILE,
    JobRecord,
    ServiceRecord,
    StateFolder,
    claim,
    service_record,
)
from deploy.requirements import (
    FAULT,
    OK,
    WARNING,
    Finding,
    addresses,
    descriptors,
    docker_answers,
    folders,
    groups,
    latency_tap,
    period,
    vcpus,
)
from deploy.safety.guardian import Guardian
from deploy.settings import Settings
from env.allocation import Weight
from env.errors import InputError, os_reason
from env.scenario import Scenario

LATENESS_LIMIT_MS = 5.0


def check(scenario: Scenario, settings: Settings, guardian: Guardian) -> int:
    """
    Check everything that a deployment needs, and print what was found.

    :param scenario: the problem
    :param settings: the deployment's, with the addresses of memcached and Docker
    :param guardian: gives memcached its vCPUs back if this process dies while it tries them
    :return: the exit code: 0 if nothing stands in the way
    """
    hierarchy = usable_hierarchy()
    checks: list[Callable[[], Iterator[Finding]]] = [
        lambda: vcpus(scenario),
        lambda: _memory(scenario),
        lambda: descriptors(scenario),
        lambda: groups(settings),
        lambda: addresses(scenario, settings),
        lambda: _service(scenario, settings, hierarchy, guardian),
        lambda: latency_tap(settings),
        lambda: _docker(scenario, settings),
        lambda: folders(settings),
        lambda: period(scenario),
        _clock,
        _priority,
        lambda: _vcpu_times(scenario, hierarchy),
    ]
    worst = EXIT_OK
    for check_one in checks:
        for finding in check_one():
            print(f"{finding.verdict:>4}  {finding.what}: {finding.found}", flush=True)
            if finding.verdict == FAULT:
                worst = EXIT_FAILED
    return worst


def _memory(scenario: Scenario) -> Iterator[Finding]:
    memory = _memory_mib()
    jobs_mib = sum(job.memory_mib for job in scenario.jobs)
    verdict = (
        OK if memory["MemAvailable"] >= min(jobs_mib, scenario.machine.memory_mib) else WARNING
    )
    yield Finding(
        verdict,
        "memory",
        f"{memory['MemAvailable']} MiB available; all jobs together may use {jobs_mib}, at most "
        f"{scenario.machine.memory_mib} are given out at a time",
    )


def _service(
    scenario: Scenario, settings: Settings, hierarchy: Hierarchy | None, guardian: Guardian
) -> Iterator[Finding]:
    """memcached, and what can be done beside it."""
    if len(settings.addresses) != scenario.service.processes:
        return
    sensor = service_sensor(scenario.service, settings)
    with contextlib.closing(sensor):
        try:
            who = find_service(sensor, time.monotonic())
        except InputError as error:
            where, _, found = str(error).partition(": ")
            yield Finding(FAULT, where, found)
            return
        workers = [one.stats.threads for one in sensor.sensors]
    verdict = OK if sum(workers) == scenario.service.threads else WARNING
    found = ", ".join(
        f"process {one.pid}, {count} worker threads"
        for one, count in zip(who, workers, strict=True)
    )
    yield Finding(
        verdict,
        f"memcached at {', '.join(f'{host}:{port}' for host, port in settings.addresses)}",
        f"{found}; the scenario has {scenario.service.threads}",
    )
    yield _cycles(who)
    try:
        with (
            held(),
            claim(),  # a loop that steers it would be overwritten
            _written_down(scenario, settings, hierarchy, who) as (state_file, records),
        ):
            guardian.watch(state_file)
            tried = [_moves(scenario, who)]
            guardian.stop()
            if hierarchy is not None:
                tried += [_goes_first(hierarchy, record, who) for record in records]
            tried += _background(hierarchy, settings, who)
    except (InputError, OSError) as error:
        tried = [Finding(FAULT, "nothing can be tried", _reason(error))]
    yield from tried


@contextlib.contextmanager
def _written_down(
    scenario: Scenario,
    settings: Settings,
    hierarchy: Hierarchy | None,
    who: tuple[Identity, ...],
) -> Iterator[tuple[Path, list[ServiceRecord]]]:
    """
    Let the guardian and `--restore` know what is tried, should this program be killed meanwhile.

    :return: the file that says it, and what it says of memcached
    :raises InputError: if the state folder holds a deployment, or memcached is in the background
    """
    folder = StateFolder(settings.folder)
    folder.lock()
    try:
        state = begin_state(scenario, replace(settings, runtime="process", resume=False), folder)
        state.scenario = f"a check of {scenario.name}"  # nothing that could be resumed
        state.service = [service_record(one) for one in who]
        if hierarchy is not None:
            own = {one.pid for one in who}
            for record in state.service:
                with contextlib.suppress(InputError, OSError):  # `_goes_first` says why
                    record.weighing = precedence.weighed(record.pid, hierarchy, own)
            group = _trial_group(hierarchy, who)
            state.jobs["check"] = JobRecord(
                group=str(group.path), weight_file=str(group.weight_file)
            )
        folder.begin(state)
        try:
            yield folder.path / STATE_FILE, state.service
        finally:
            if left := folder.clear():
                raise InputError(left)
    finally:
        folder.unlock()


def _moves(scenario: Scenario, who: tuple[Identity, ...]) -> Finding:
    what = "memcached's vCPUs"
    had = {one: service_process.affinities(one.pid) for one in who}
    try:
        for one in who:
            try:
                for cores in scenario.service.sets:
                    service_process.pin(one.pid, cores)
            finally:
                service_process.restore(one, had[one])
    except OSError as error:
        return Finding(FAULT, what, f"cannot be set: {_reason(error)}")
    held = {cores for threads in had.values() for cores in threads.values()}
    return Finding(OK, what, f"can be set; it has {sorted(held)}")


def _goes_first(hierarchy: Hierarchy, record: ServiceRecord, who: tuple[Identity, ...]) -> Finding:
    """Whether memcached can be put before the machine's other programs, tried and undone."""
    what = "memcached before other programs"
    try:
        weighing = record.weighing
        if weighing is None:  # it was not to be written down: say why
            weighing = precedence.weighed(record.pid, hierarchy, {one.pid for one in who})
        try:
            precedence.put_first(record.pid, weighing)
        finally:
            left = precedence.put_back(record.who, weighing)
    except (InputError, OSError) as error:
        return Finding(WARNING, what, f"not put there: {_reason(error)}")
    if left:
        return Finding(FAULT, what, left)
    level = OK if precedence.is_class(weighing) else WARNING
    return Finding(level, what, precedence.in_words(weighing))


def _cycles(who: tuple[Identity, ...]) -> Finding:
    what = "memcached's cycles per instruction"
    try:
        CpiSensor(who, time.monotonic()).close()
    except OSError as error:
        return Finding(WARNING, what, f"{why_not_counted(error)}; few policies need them")
    return Finding(OK, what, "are counted")


def _trial_group(hierarchy: Hierarchy, who: tuple[Identity, ...]) -> JobGroup:
    return job_groups_beside(hierarchy, who[0].pid)(f"coretide-check-{os.getpid()}")


def _background(
    hierarchy: Hierarchy | None, settings: Settings, who: tuple[Identity, ...]
) -> Iterator[Finding]:
    """How jobs get out of memcached's way, and whether they do."""
    group = None if hierarchy is None else _trial_group(hierarchy, who)
    if group is None:
        yield _normal_weight()
    try:
        with contextlib.ExitStack() as stack:
            mechanism = "SCHED_IDLE of threads"
            if group is not None:
                stack.callback(group.remove)
                group.create()
                group.set_weight(Weight.BACKGROUND)
                version = group.hierarchy.version
                mechanism = f"{group.background} of control groups, version {version}"
            delay = _run_delay(who, settings, group)
    except OSError as error:
        yield Finding(FAULT, "background", f"cannot be had: {_reason(error)}")
        return
    yield Finding(OK, "background", mechanism)
    if isinstance(delay, Finding):
        yield delay
    else:
        yield Finding(
            OK if delay.small else WARNING,
            "memcached's run delay",
            f"{delay.alone:.2f} s per CPU second alone, {delay.beside:.2f} beside background work"
            + ("" if delay.small else ": it does not yield enough, or others use these vCPUs"),
        )


def _run_delay(
    who: tuple[Identity, ...], settings: Settings, group: JobGroup | None
) -> RunDelay | Finding:
    """What `run_delay` measures, or why it could not."""
    try:
        return run_delay(who[0], (settings.host, settings.port), group)
    except OSError as error:
        return Finding(WARNING, "memcached's run delay", f"not measured: {_reason(error)}")


def _normal_weight() -> Finding:
    """Without groups background weight is a scheduling class, which not everybody may leave."""
    what = "normal weight after background"
    with subprocess.Popen(["sleep", "10"]) as process:
        try:
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                set_policy(process.pid, policy)
        except OSError as error:
            said = f"{error.strerror}: jobs that were in the background stay there"
            return Finding(WARNING, what, said)
        finally:
            process.kill()
    return Finding(OK, what, "can be set")


def _docker(scenario: Scenario, settings: Settings) -> Iterator[Finding]:
    if settings.runtime != "docker":
        return
    from deploy.jobs.containers import docker_fault, sdk

    answers = list(docker_answers(settings))
    yield from answers
    if answers[0].verdict == FAULT:
        return
    try:
        yield from _daemon(scenario, docker_address(settings))
    except (sdk().errors.DockerException, OSError) as error:
        yield Finding(FAULT, "Docker", docker_fault(error))


def _daemon(scenario: Scenario, address: str) -> Iterator[Finding]:
    from deploy.jobs.containers import connect

    with contextlib.closing(connect(address)) as client:
        info: dict[str, Any] = client.info()
        driver = info.get("CgroupDriver", "?")
        yield Finding(
            OK if driver == "cgroupfs" else WARNING,
            "Docker's cgroup driver",
            driver
            + ("" if driver == "cgroupfs" else ": jobs' groups must be slices, which is untested"),
        )
        lives = bool(info.get("LiveRestoreEnabled"))
        yield Finding(
            OK if lives else WARNING,
            "live-restore",
            "on" if lives else "off: a restart of Docker ends the jobs, which are then retried",
        )
        for image in sorted({job.image for job in scenario.jobs}):
            there = bool(image) and bool(client.images.list(name=image))
            found = "there" if there else "missing: its jobs fail, the others run"
            yield Finding(OK if there else WARNING, f"image {image}", found)


def _clock() -> Iterator[Finding]:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    with contextlib.suppress(OSError):
        yield Finding(OK, "clock", source.read_text(encoding="utf-8").strip())
    late_ms = []
    for _ in range(40):
        before = time.monotonic()
        time.sleep(0.005)
        late_ms.append((time.monotonic() - before - 0.005) * 1e3)
    worst = sorted(late_ms)[-2]
    yield Finding(
        OK if worst < LATENESS_LIMIT_MS else WARNING,
        "timer",
        f"wakes up to {worst:.2f} ms late",
    )


def _priority() -> Iterator[Finding]:
    what = "the loop before other programs"
    try:
        standing.go_first()
        standing.step_back()
    except OSError as error:
        yield Finding(WARNING, what, f"no real-time priority: {_reason(error)}")
    else:
        yield Finding(OK, what, "real-time priority can be had")


def _vcpu_times(scenario: Scenario, hierarchy: Hierarchy | None) -> Iterator[Finding]:
    cpuacct = hierarchy.mounts.get("cpuacct") if hierarchy and hierarchy.version == 1 else None
    clock = VcpuClock(scenario.machine.vcpus, cpuacct)
    clock.close()
    coarse = clock.source == "/proc/stat"
    yield Finding(
        WARNING if coarse else OK,
        "busy time of the vCPUs",
        f"from {clock.source}" + (", to the clock tick only" if coarse else ""),
    )
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    stolen = int(fields[8]) / max(1, sum(map(int, fields[1:9])))
    yield Finding(OK if stolen < 0.02 else WARNING, "steal time since boot", f"{stolen:.1%}")


def _reason(error: InputError | OSError) -> str:
    """Why something cannot be done, without numbers of the system's."""
    return os_reason(error).lower() if isinstance(error, OSError) else str(error)


def _memory_mib() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) >> 10 for line in lines}
