"""
One loop a machine: a lock in a folder that nobody else may open, held until the loop's end.

It depends neither on the folder of the state nor on memcached's process, which may be another one
tomorrow. The guardian uses this file: it needs the standard library alone.
"""

import fcntl
import os
import time
from pathlib import Path

from deploy.linux.own_folder import OwnFolder

LOCK_FILE = "machine"

WAIT_S, PAUSE_S = 0.3, 0.01
"""The kernel may still be at closing what a killed loop had open, and a guardian may be looking."""


class MachineLock:
    """
    Takes the machine, until `close` or the end of this process.

    :raises BlockingIOError: if another loop has it
    :raises OSError: if the lock cannot be opened
    """

    def __init__(self) -> None:
        self._file = _open()
        give_up_s = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    self.close()
                    raise
            time.sleep(PAUSE_S)

    def __enter__(self) -> "MachineLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another loop have the machine."""
        os.close(self._file)


def is_taken() -> bool:
    """
    Whether a loop of this user has the machine.

    :raises OSError: if the lock cannot be opened
    """
    file = _open()
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def runtime_folder() -> Path:
    """A folder that a reboot empties: nothing of a deployment outlives it."""
    if os.geteuid() == 0:
        return Path("/run/coretide")
    own = os.environ.get("XDG_RUNTIME_DIR")
    return Path(own) / "coretide" if own else Path(f"/tmp/coretide-{os.geteuid()}")


def _open() -> int:
    with OwnFolder(runtime_folder(), closed=True) as folder:
        return folder.open(LOCK_FILE, os.O_RDWR | os.O_CREAT)
