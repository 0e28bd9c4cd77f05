"""
`--check`: is this machine fit? Every line says what was looked at and what was found.

Nothing is changed that is not put back at once, whatever ends the program meanwhile; what runs is
background work beside memcached for a second, to see that it really yields.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.assembly import LONGEST_PERIOD_S, docker_address, find_service, usable_hierarchy
from deploy.deployment import EXIT_FAILED, EXIT_OK
from deploy.jobs.placement import online_vcpus, set_policy
from deploy.jobs.yielding import RunDelay, run_delay
from deploy.linux import service_process
from deploy.linux.cgroups import Hierarchy, JobGroup, job_groups_beside
from deploy.linux.counters import CpiSensor, why_not_counted
from deploy.linux.own_folder import OwnFolder
from deploy.linux.sensors import ServiceSensor, VcpuClock
from deploy.linux.signals import held
from deploy.records.state import claim
from deploy.settings import Settings
from env.allocation import Weight
from env.errors import InputError, os_reason
from env.scenario import Scenario

OK, WARNING, FAULT = "ok", "warn", "FAIL"

LARGEST_RATIO, LARGEST_RISE = 1.5, 0.3
"""What background work may make of memcached's run delay [s per CPU second], and add to it; work of
memcached's own weight adds 0.5 to 1."""

LATENESS_LIMIT_MS = 5.0
LEAST_DISK_MIB = 200


@dataclass(frozen=True)
class Finding:
    """What one look at the machine has shown."""

    verdict: str
    what: str
    found: str


def check(scenario: Scenario, settings: Settings) -> int:
    """
    Look at everything a deployment needs, and print what was found.

    :param scenario: the problem
    :param settings: the deployment's, with the addresses of memcached and Docker
    :return: the exit code: 0 if nothing stands in the way
    """
    hierarchy = usable_hierarchy()
    looks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _machine(scenario),
        lambda: _service(scenario, settings, hierarchy),
        lambda: _docker(scenario, settings),
        lambda: _folders(settings),
        lambda: _clock(scenario),
        lambda: _vcpu_times(scenario, hierarchy),
    ]
    worst = EXIT_OK
    for look in looks:
        for finding in look():
            print(f"{finding.verdict:>4}  {finding.what}: {finding.found}", flush=True)
            if finding.verdict == FAULT:
                worst = EXIT_FAILED
    return worst


def _machine(scenario: Scenario) -> Iterator[Finding]:
    wanted, online = scenario.machine.vcpus, online_vcpus()
    verdict = OK if set(range(wanted)) <= set(online) else FAULT
    yield Finding(verdict, "vCPUs", f"{len(online)} online, the scenario has {wanted}")
    allowed = os.sched_getaffinity(0)
    verdict = OK if set(range(wanted)) <= allowed else FAULT
    yield Finding(verdict, "vCPUs this process may use", ",".join(map(str, sorted(allowed))))
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
    scenario: Scenario, settings: Settings, hierarchy: Hierarchy | None
) -> Iterator[Finding]:
    """memcached, and the groups that are made beside it."""
    sensor = ServiceSensor(settings.host, settings.port)
    with contextlib.closing(sensor):
        try:
            who = find_service(sensor, settings, time.monotonic())
        except InputError as error:
            yield Finding(FAULT, "memcached", str(error))
            yield from _background(hierarchy, settings, None)
            return
        workers = sensor.stats.threads
    verdict = OK if workers == scenario.service.threads else WARNING
    yield Finding(
        verdict,
        "memcached",
        f"{settings.host}:{settings.port}: process {who.pid}, {workers} worker threads; "
        f"the scenario has {scenario.service.threads}",
    )
    yield _cycles(who)
    yield _moves(scenario, who)
    yield from _background(hierarchy, settings, who)


def _moves(scenario: Scenario, who: service_process.Identity) -> Finding:
    what = "memcached's vCPUs"
    try:
        with held(), claim():  # a loop that steers it would be overwritten
            had = service_process.affinities(who.pid)
            try:
                for cores in scenario.service.sets:
                    service_process.pin(who.pid, cores)
            finally:
                service_process.restore(who, had)
    except (InputError, OSError) as error:
        return Finding(FAULT, what, f"cannot be set: {_reason(error)}")
    return Finding(OK, what, f"can be set; it has {sorted(set(had.values()))}")


def _cycles(who: service_process.Identity) -> Finding:
    what = "memcached's cycles per instruction"
    try:
        CpiSensor(who, time.monotonic()).close()
    except OSError as error:
        return Finding(WARNING, what, f"{why_not_counted(error)}; few policies need them")
    return Finding(OK, what, "are counted")


def _background(
    hierarchy: Hierarchy | None, settings: Settings, who: service_process.Identity | None
) -> Iterator[Finding]:
    """How jobs get out of memcached's way, and whether they do."""
    group = None
    if hierarchy is None:
        verdict = FAULT if settings.runtime == "docker" else WARNING
        yield Finding(verdict, "control groups", "cannot be written by this user")
        if verdict == FAULT:
            return
        yield _normal_weight()
    else:
        yield Finding(OK, "control groups", f"version {hierarchy.version}, writable")
        try:
            make = job_groups_beside(hierarchy, who.pid if who else "self")
            group = make(f"coretide-check-{os.getpid()}")
        except (InputError, OSError) as error:
            yield Finding(FAULT, "background", str(error))
            return
    try:
        with held(), contextlib.ExitStack() as stack:
            mechanism = "SCHED_IDLE of threads"
            if group is not None:
                stack.callback(group.remove)
                group.create()
                group.set_weight(Weight.BACKGROUND)
                version = group.hierarchy.version
                mechanism = f"{group.background} of control groups, version {version}"
            delay = _run_delay(who, settings, group) if who else None
    except OSError as error:
        yield Finding(FAULT, "background", f"cannot be had: {_reason(error)}")
        return
    yield Finding(OK, "background", mechanism)
    if isinstance(delay, Finding):
        yield delay
    elif delay is not None:
        yields = delay.beside < LARGEST_RATIO * delay.alone + LARGEST_RISE
        yield Finding(
            OK if yields else WARNING,
            "memcached's run delay",
            f"{delay.alone:.2f} s per CPU second alone, {delay.beside:.2f} beside background work"
            + ("" if yields else ": it does not yield enough, or others use these vCPUs"),
        )


def _run_delay(
    who: service_process.Identity, settings: Settings, group: JobGroup | None
) -> RunDelay | Finding:
    """What `run_delay` measures, or why it could not."""
    try:
        return run_delay(who, (settings.host, settings.port), group)
    except OSError as error:
        return Finding(WARNING, "memcached's run delay", f"not measured: {_reason(error)}")


def _normal_weight() -> Finding:
    """Without groups background weight is a scheduling class, which not everybody may leave."""
    what = "normal weight after background"
    with held(), subprocess.Popen(["sleep", "10"]) as process:
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
    import docker

    from deploy.jobs.containers import connect

    try:
        client = connect(docker_address(settings))
        info: dict[str, Any] = client.info()
    except (docker.errors.DockerException, OSError, InputError) as error:
        said = str(error) if isinstance(error, InputError) else "is it running, and are you root?"
        yield Finding(FAULT, "Docker", f"cannot be reached: {said}")
        return
    with contextlib.closing(client):
        driver = info.get("CgroupDriver", "?")
        yield Finding(
            OK if driver == "cgroupfs" else WARNING,
            "Docker",
            f"{info.get('ServerVersion')}, cgroup driver {driver}"
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
            yield Finding(OK if there else FAULT, f"image {image}", "there" if there else "missing")


def _folders(settings: Settings) -> Iterator[Finding]:
    for what, folder in (("state", settings.folder), ("report", settings.report)):
        path = folder.absolute()
        while not os.path.exists(path):  # noqa: PTH110 - pathlib's raises where it may not look
            path = path.parent
        free_mib = shutil.disk_usage(path).free >> 20
        found, verdict = f"{path}: {free_mib} MiB free", FAULT
        if not path.is_dir():
            found = f"{path}: is no folder"
        elif not os.access(path, os.W_OK | os.X_OK):
            found = f"{path}: may not be written by this user"
        elif path == folder.absolute() and (reason := _refusal(path, what == "state")):
            found = f"{path}: {reason}"
        elif free_mib < LEAST_DISK_MIB:
            found += f", {LEAST_DISK_MIB} are needed"
        else:
            verdict = OK
        yield Finding(verdict, f"folder of the {what}", found)


def _refusal(folder: Path, closed: bool) -> str:
    """Why a deployment would refuse a folder that exists; empty if it would take it."""
    try:
        OwnFolder(folder, closed).close()
    except OSError as error:
        return os_reason(error)
    return ""


def _clock(scenario: Scenario) -> Iterator[Finding]:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    with contextlib.suppress(OSError):
        yield Finding(OK, "clock", source.read_text(encoding="utf-8").strip())
    period_ms, most_ms = 1e3 * scenario.control.period_s, 1e3 * LONGEST_PERIOD_S
    verdict = OK if period_ms <= most_ms else FAULT
    yield Finding(verdict, "period", f"{period_ms:g} ms, a deployment allows {most_ms:g}")
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
    """Why something cannot be done, without the system's error numbers."""
    return os_reason(error).lower() if isinstance(error, OSError) else str(error)


def _memory_mib() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) >> 10 for line in lines}
