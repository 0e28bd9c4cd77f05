"""
A submitted job's file, read and refused: it says what a job of a scenario says, and ends.

Its text may come from anybody who talked root into handing it in, so everything in it is bounded.
"""

from pydantic import ValidationError

from env.errors import InputError, validation_message
from env.inputs.yaml_files import parse_yaml
from env.scenario import Job, Scenario

MOST_BYTES = 16 << 10
"""Size of a job's file, and of its command once aliases are written out."""

MOST_THREAD_COUNTS = 16
RESERVED = ("memcached", "scheduler")
"""Whom a run's log calls so."""

NOT_HERE = ("endless", "arrival_s")
"""What a job of a scenario may say and one of a queue may not: it ends, and has arrived."""

FIELDS = [name for name in Job.model_fields if name not in NOT_HERE]


def parse_job(content: bytes, origin: str) -> Job:
    """
    The job that a file describes.

    :param content: of the file, at most one byte more than is allowed
    :param origin: the file's name, for messages
    :raises InputError: one line that names the file, the field and what is allowed
    """
    if len(content) > MOST_BYTES:
        raise InputError(f"{origin}: larger than {MOST_BYTES >> 10} KiB")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{origin}: not UTF-8 text") from error
    described = parse_yaml(text, origin)
    allowed = f"; allowed are {', '.join(FIELDS)}"
    for name in NOT_HERE:
        if isinstance(described, dict) and name in described:
            raise InputError(f"{origin}: {name}: unknown field{allowed}")
    try:
        job = Job.model_validate(described)
    except ValidationError as error:
        raise InputError(validation_message(origin, error, allowed)) from error
    if job.name in RESERVED:
        raise InputError(f"{origin}: name: must not be {' or '.join(RESERVED)}")
    if sum(map(len, job.command)) > MOST_BYTES:
        raise InputError(f"{origin}: command: longer than {MOST_BYTES >> 10} KiB")
    if any("\0" in part for part in (*job.command, job.image)):
        raise InputError(f"{origin}: command and image: must not hold a zero byte")
    if len(job.threads) > MOST_THREAD_COUNTS:
        raise InputError(f"{origin}: threads: must have at most {MOST_THREAD_COUNTS} entries")
    return job


def require_fit(job: Job, scenario: Scenario, containers: bool, origin: str) -> None:
    """
    Make sure that the machine can hold a job.

    :param job: as it was submitted
    :param scenario: whose machine is shared
    :param containers: whether the job is to run in a container
    :param origin: the file's name, for messages
    :raises InputError: one line that names the file, the field and what is allowed
    """
    machine = scenario.machine
    if job.memory_mib > machine.memory_mib:
        raise InputError(
            f"{origin}: memory_mib: {job.memory_mib} exceeds the machine's {machine.memory_mib}"
        )
    if job.threads[-1] > machine.vcpus:
        raise InputError(
            f"{origin}: threads: {job.threads[-1]} is more than the machine's {machine.vcpus} vCPUs"
        )
    if containers and not job.image:
        raise InputError(f"{origin}: image: is required, because jobs run in containers")
