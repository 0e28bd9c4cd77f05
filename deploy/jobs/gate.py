"""
The gate: what an attempt was made ahead for. Its wrapper waits there, and the job with it.

The gate is a named pipe in the attempt's folder. The wrapper reads from it and is blocked until the
loop, which calls nobody for that, writes the thread count: some 10 µs. Then the wrapper marks its
proof and starts the job. A count that was written may still be lost, with a loop that dies or a
wrapper that was just woken by one, so it is written until the mark is there; whoever has passed
reads no more, and no job starts twice.
"""

import errno
import os
import time
from pathlib import Path

from deploy.records import proof

MOUNTED_AT = "/proof/gate"
"""Where a container finds its attempt's gate."""

NOBODY_THERE = (errno.ENXIO, errno.EPIPE, errno.EAGAIN)
"""What a write ends in without a reader, or with a frozen one to whom enough was written."""

RETRY_S, PASSAGE_LIMIT_S = 0.001, 10.0


def gate_file(folder: Path) -> Path:
    """
    Where the gate of an attempt is.

    :param folder: the attempt's folder
    """
    return folder / "gate"


def make(folder: Path) -> None:
    """
    Make a closed gate, for an attempt of which nothing runs.

    :param folder: the attempt's folder
    :raises OSError: if the disk has no room for it
    """
    gate_file(folder).unlink(missing_ok=True)
    os.mkfifo(gate_file(folder))
    gate_file(folder).chmod(0o644)  # a container's user may be any; nobody else comes to the folder
    proof.forget(folder)


def let_through(folder: Path, threads: int) -> bool:
    """
    Open the gate; to be called again until that is known to have happened. Blocks nobody.

    :param folder: the attempt's folder
    :param threads: the job's thread count
    :return: whether the wrapper has passed
    :raises OSError: if there is no gate, or it is not known whether the wrapper has passed
    """
    if proof.begun(folder):
        return True
    try:
        gate = os.open(gate_file(folder), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(gate, f"{threads}\n".encode())
        finally:
            os.close(gate)
    except OSError as error:
        if error.errno not in NOBODY_THERE:
            raise
    return False


def await_passage(folder: Path, threads: int) -> None:
    """
    Open the gate, and wait until the job has begun: for whoever has the time.

    :param folder: the attempt's folder
    :param threads: the job's thread count
    :raises TimeoutError: if it has not begun within `PASSAGE_LIMIT_S`
    """
    give_up_s = time.monotonic() + PASSAGE_LIMIT_S
    while not let_through(folder, threads):
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"it does not pass its gate within {PASSAGE_LIMIT_S:g} s")
        time.sleep(RETRY_S)
