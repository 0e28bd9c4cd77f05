"""
`--check`: is this machine fit? Every line says what was looked at and what was found.

Nothing is changed that is not put back at once; the one thing that runs is a spinning process in a
group of our own, to see that background weight really yields.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.assembly import LONGEST_PERIOD_S, docker_address, find_service, usable_hierarchy
from deploy.deployment import EXIT_FAILED, EXIT_OK
from deploy.jobs.placement import online_vcpus, set_policy
from deploy.linux import service_process
from deploy.linux.cgroups import Hierarchy, JobGroup, job_groups_beside
from deploy.linux.counters import CpiSensor, why_not_counted
from deploy.linux.sensors import ServiceSensor, VcpuClock
from deploy.records.state import claim
from deploy.settings import Settings
from env.allocation import Weight
from env.errors import InputError
from env.scenario import Scenario

OK, WARNING, FAULT = "ok", "warn", "FAIL"

SPIN_S = 0.3
LATENESS_LIMIT_MS = 5.0
LEAST_DISK_MIB = 200
SPIN = "while True: pass"


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
    :param settings: where memcached and Docker are
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
    where = f"memcached at {settings.host}:{settings.port}"
    sensor = ServiceSensor(settings.host, settings.port)
    with contextlib.closing(sensor):
        try:
            who = find_service(sensor, settings, time.monotonic())
        except InputError as error:
            yield Finding(FAULT, where, str(error))
            yield from _groups(hierarchy, settings, "self")
            return
        workers = sensor.stats.threads
    verdict = OK if workers == scenario.service.threads else WARNING
    yield Finding(
        verdict,
        where,
        f"process {who.pid}, {workers} worker threads; the scenario has {scenario.service.threads}",
    )
    yield _cycles(who)
    yield _moves(scenario, who)
    yield from _groups(hierarchy, settings, who.pid)


def _moves(scenario: Scenario, who: service_process.Identity) -> Finding:
    what = "memcached's vCPUs"
    try:
        with claim(who):  # a loop that steers it would be overwritten
            had = service_process.affinities(who.pid)
            try:
                for cores in scenario.service.sets:
                    service_process.pin(who.pid, cores)
            finally:
                service_process.restore(who, had)
    except (InputError, OSError) as error:
        return Finding(FAULT, what, f"cannot be set: {error}")
    return Finding(OK, what, f"can be set; it has {sorted(set(had.values()))}")


def _cycles(who: service_process.Identity) -> Finding:
    what = "memcached's cycles per instruction"
    try:
        CpiSensor(who, time.monotonic()).close()
    except OSError as error:
        return Finding(WARNING, what, f"{why_not_counted(error)}; few policies need them")
    return Finding(OK, what, "are counted")


def _groups(
    hierarchy: Hierarchy | None, settings: Settings, beside: int | str
) -> Iterator[Finding]:
    if hierarchy is None:
        verdict = FAULT if settings.runtime == "docker" else WARNING
        yield Finding(verdict, "control groups", "cannot be written by this user")
        yield _normal_weight()
        return
    yield Finding(OK, "control groups", f"version {hierarchy.version}, writable")
    make, weights = job_groups_beside(hierarchy, beside), (Weight.BACKGROUND, Weight.NORMAL)
    groups = [make(f"coretide-check-{os.getpid()}-{weight.name.lower()}") for weight in weights]
    try:
        for group, weight in zip(groups, weights, strict=True):
            group.create()
            group.set_weight(weight)
        share = _share_against(*groups)
        yield Finding(
            OK if share > 0.8 else FAULT,
            "background weight",
            f"{groups[0].weight()} against {groups[1].weight()}: a competitor gets "
            f"{share:.0%} of the vCPU",
        )
    except OSError as error:
        yield Finding(FAULT, "background weight", f"cannot be set: {error}")
    finally:
        for group in groups:
            group.remove()


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


def _share_against(background: JobGroup, normal: JobGroup) -> float:
    """How much of a vCPU a spinning process gets beside one in the background group."""
    core = max(os.sched_getaffinity(0))
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(2)]
    try:
        for group, spinner in zip((background, normal), spinners, strict=True):
            group.join(spinner.pid)
            os.sched_setaffinity(spinner.pid, {core})
        time.sleep(0.1)  # both are past their start
        before = [_cpu_ns(spinner.pid) for spinner in spinners]
        time.sleep(SPIN_S)
        yielding, competing = (
            _cpu_ns(spinner.pid) - start for spinner, start in zip(spinners, before, strict=True)
        )
        return competing / max(1, competing + yielding)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _docker(scenario: Scenario, settings: Settings) -> Iterator[Finding]:
    if settings.runtime != "docker":
        return
    import docker

    from deploy.jobs.containers import connect

    try:
        client = connect(docker_address(settings))
        info: dict[str, Any] = client.info()
    except (docker.errors.DockerException, OSError, InputError) as error:
        yield Finding(FAULT, "Docker", f"cannot be reached: {error}")
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
        while not path.exists():
            path = path.parent
        free_mib = shutil.disk_usage(path).free >> 20
        verdict = OK if free_mib >= LEAST_DISK_MIB and os.access(path, os.W_OK) else FAULT
        yield Finding(verdict, f"folder of the {what}", f"{path}: {free_mib} MiB free")


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


def _memory_mib() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) >> 10 for line in lines}


def _cpu_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0])
