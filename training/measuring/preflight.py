"""What is checked before anything is started: programs, vCPUs, and what the scenario asks for."""

from __future__ import annotations

import os
import shutil

from env.errors import InputError
from env.scenario import Job, Scenario

PACKAGES = {"memcached": "memcached", "stress-ng": "stress-ng"}
"""Programs that are always needed, and the packages of Debian and Ubuntu that have them."""


def require_machine() -> None:
    """
    Refuse a machine on which nothing can be measured.

    :raises InputError: one line: a program is missing, or there is one vCPU
    """
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise InputError(f"{program}: not found; install it: apt-get install {package}")
    if len(os.sched_getaffinity(0)) < 2:
        raise InputError("this machine has one vCPU; it takes 2: one for the load, one to measure")


def require(scenario: Scenario) -> None:
    """
    Refuse a machine on which the measurements cannot be made.

    :param scenario: what it is measured for
    :raises InputError: one line: a program is missing, or vCPUs are, or it is not one memcached
    """
    require_machine()
    if scenario.service.processes > 1:
        raise InputError(f"scenario {scenario.name}: its service is a group; one is measured alone")
    usable = os.sched_getaffinity(0)
    # Jobs and pressure are put on the first vCPUs.
    missing = ({0, 1} | set(scenario.service.candidates[-1])) - usable
    if missing:
        raise InputError(
            f"scenario {scenario.name}: wants vCPU {min(missing)}; this machine lets "
            f"{', '.join(map(str, sorted(usable)))} be used"
        )
    for job in scenario.jobs:
        if needs_docker(job) and not job.image:
            raise InputError(f"job {job.name}: {job.command[0]}: not found; install it")


def needs_docker(job: Job) -> bool:
    """
    Whether a job's program is not on this machine, so that at most its image has it.

    :param job: the job to start
    """
    return shutil.which(job.command[0]) is None
