"""
What a deployment needs of the machine, checked without changing anything.

`--check` says all of it; a deployment is refused with the first line that says FAIL.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.assembly import docker_address, usable_hierarchy
from deploy.jobs.docker_socket import ping
from deploy.jobs.placement import online_vcpus
from deploy.linux.own_folder import OwnFolder
from deploy.settings import Settings
from deploy.tap.tracer import TRACEPOINTS, why_not
from env.errors import InputError, os_reason
from env.scenario import Scenario

OK, WARNING, FAULT = "ok", "warn", "FAIL"

LEAST_DISK_MIB = 200

LEAST_DESCRIPTORS, EACH_MORE = 256, 16
"""Two jobs and a memcached of two workers take 44; each job and each thread takes some more. Each
further process of a group takes one for its counters and one a thread, of which it has 7 or more.
"""

LONGEST_PERIOD_S = 0.2
"""The guardian acts after 0.7 s, and a poll that comes after 0.4 s writes everything anew."""


@dataclass(frozen=True)
class Finding:
    """
    What a check of the machine has shown.

    :param verdict: `OK`, `WARNING` or `FAULT`
    :param what: was checked
    :param found: in words
    """

    verdict: str
    what: str
    found: str


def require(scenario: Scenario, settings: Settings) -> None:
    """
    Make sure that nothing stands in the way of a deployment, or of a dry run.

    :param scenario: the problem
    :param settings: see there
    :raises InputError: one line, as `--check` prints it
    """
    checks = [period(scenario), descriptors(scenario), addresses(scenario, settings)]
    if settings.tap:
        checks.append(latency_tap(settings))
    if not settings.dry_run:
        checks += [vcpus(scenario), folders(settings)]
    if not (settings.dry_run or settings.resume):  # who runs resumed jobs is in the state
        checks.append(groups(settings))
        if settings.runtime == "docker":
            checks.append(docker_answers(settings))
    for findings in checks:
        for finding in findings:
            if finding.verdict == FAULT:
                raise InputError(f"{finding.what}: {finding.found}")


def addresses(scenario: Scenario, settings: Settings) -> Iterator[Finding]:
    """
    Whether it is said where each process of the service is.

    :param scenario: says how many there are
    :param settings: say where
    """
    service, given = scenario.service, settings.addresses
    what = "addresses of memcached"
    twice = [address for address in given if given.count(address) > 1]
    if len(given) != service.processes:
        wanted = service.processes - 1
        front = "" if service.proxy is None else "its proxy's is --memcached, "
        found = f"{len(given) - 1} --member given; {scenario.name} has {service.members} members"
        yield Finding(FAULT, what, f"{found}: {front}each other one's --member, {wanted} in all")
    elif twice:
        host, port = twice[0]
        yield Finding(FAULT, what, f"{host}:{port} is given twice; each must be another's")
    else:
        yield Finding(OK, what, f"{len(given)} of {service.processes}")


def vcpus(scenario: Scenario) -> Iterator[Finding]:
    """
    Whether this machine has the scenario's vCPUs, and lets this process use them.

    :param scenario: the problem
    """
    wanted, online = scenario.machine.vcpus, online_vcpus()
    verdict = OK if set(range(wanted)) <= set(online) else FAULT
    yield Finding(verdict, "vCPUs", f"{len(online)} online, the scenario has {wanted}")
    allowed = os.sched_getaffinity(0)
    verdict = OK if set(range(wanted)) <= allowed else FAULT
    found = f"{','.join(map(str, sorted(allowed)))}; the scenario's are 0 to {wanted - 1}"
    yield Finding(verdict, "vCPUs this process may use", found)


def period(scenario: Scenario) -> Iterator[Finding]:
    """
    Whether the loop beats often enough for the guardian, which would take it for dead otherwise.

    :param scenario: the problem
    """
    period_ms, most_ms = 1e3 * scenario.control.period_s, 1e3 * LONGEST_PERIOD_S
    verdict = OK if period_ms <= most_ms else FAULT
    found = f"{period_ms:g} ms, a deployment allows {most_ms:g}"
    yield Finding(verdict, "control.period_s", found)


def descriptors(scenario: Scenario) -> Iterator[Finding]:
    """
    Whether enough files may be open: a loop that has none left could neither start nor see.

    :param scenario: says how many processes serve
    """
    least = LEAST_DESCRIPTORS + EACH_MORE * (scenario.service.processes - 1)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = allowed == resource.RLIM_INFINITY or allowed >= least
    found = f"{allowed} may be open (ulimit -n), {least} are needed"
    yield Finding(OK if enough else FAULT, "file descriptors", found)


def groups(settings: Settings) -> Iterator[Finding]:
    """
    Whether control groups can be written, which containers cannot do without.

    :param settings: say who runs the jobs
    """
    hierarchy = usable_hierarchy()
    if hierarchy is not None:
        yield Finding(OK, "control groups", f"version {hierarchy.version}, writable")
        return
    verdict = FAULT if settings.runtime == "docker" else WARNING
    found = "cannot be written by this user; containers need them: sudo, or --runtime process"
    yield Finding(verdict, "control groups", found)


def docker_answers(settings: Settings) -> Iterator[Finding]:
    """
    Whether Docker answers.

    :param settings: say where it is
    """
    try:
        address = docker_address(settings)
    except InputError as error:
        yield Finding(FAULT, "Docker", str(error))
        return
    try:
        version = ping(address)
    except (OSError, ValueError):
        found = f"at {address} cannot be reached: is it running, and are you root? "
        yield Finding(FAULT, "Docker", f"{found}--runtime process does without it")
        return
    yield Finding(OK, "Docker", f"{version} at {address}")


def latency_tap(settings: Settings) -> Iterator[Finding]:
    """
    Whether the kernel can be asked for the latency of memcached's requests.

    :param settings: say whether a deployment is to measure it so
    """
    what = "latency tap"
    if reason := why_not():
        without = "" if settings.tap else "; --probe measures without it"
        yield Finding(FAULT if settings.tap else WARNING, what, reason + without)
    else:
        yield Finding(OK, what, f"{', '.join(TRACEPOINTS)}, by bpftrace")


def folders(settings: Settings) -> Iterator[Finding]:
    """
    Whether state and report can be written; a disk that is full costs records alone.

    :param settings: say where they are
    """
    looked_at = [("state", settings.folder), ("report", settings.report)]
    if settings.queue is not None:
        looked_at.append(("queue", settings.queue))
    for what, folder in looked_at:
        try:
            path = folder.absolute()
        except FileNotFoundError:
            yield Finding(FAULT, f"folder of the {what}", f"{folder}: the current folder is gone")
            continue
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
            found += f", {LEAST_DISK_MIB} are recommended"
            verdict = WARNING
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
