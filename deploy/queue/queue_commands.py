"""What `deploy.py` does to a queue without being its loop: hand a job in, show all, cancel one."""

from pathlib import Path

from deploy.queue.spool import Spool
from deploy.records.terminal import say
from env.errors import InputError, fault
from env.inputs.text_files import read_bytes
from env.inputs.yaml_files import MOST_BYTES


def submit(queue: Path, job_file: Path) -> None:
    """
    Hand a job in, and say its name.

    :param queue: folder of the queue
    :param job_file: what describes the job
    :raises InputError: if it is no job, its name is taken, or the folder is not ours
    """
    content = read_bytes(job_file, "a job", MOST_BYTES)
    with Spool(queue) as spool:
        try:
            job = spool.submit(content, str(job_file))
        except OSError as error:
            raise InputError(f"{queue}: cannot be written to: {fault(error)}") from error
    say(f"{job} is handed in")


def show(queue: Path) -> None:
    """
    Print every job of a queue and every refused file, one a line.

    :param queue: its folder
    :raises InputError: if the folder is not ours
    """
    with _existing(queue) as spool:
        try:
            lines = list(spool.lines())
        except OSError as error:
            raise InputError(f"{queue}: cannot be read: {fault(error)}") from error
    for line in lines:
        print(line)


def cancel(queue: Path, job: str) -> None:
    """
    Have a job ended, or not begun.

    :param queue: its folder
    :param job: the job's name
    :raises InputError: if there is none of that name that is not over, or the folder is not ours
    """
    with _existing(queue) as spool:
        try:
            becomes = spool.cancel(job)
        except OSError as error:
            raise InputError(f"{queue}: cannot be written to: {fault(error)}") from error
    say(becomes)


def _existing(queue: Path) -> Spool:
    if not queue.is_dir():
        raise InputError(f"{queue}: no queue's folder; --submit makes one, and so does a loop")
    return Spool(queue)
