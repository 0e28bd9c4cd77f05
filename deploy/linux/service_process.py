"""
memcached's process: who it is, and on which vCPUs its threads run.

All threads are moved, not the main one alone: its workers are where the work is.
"""

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MEMCACHED, NUTCRACKER = b"memcached\n", b"nutcracker\n"
"""What the kernel calls the programs that serve."""

ROUNDS = 5
"""How often the threads are listed again until no new one appears."""

MOST_THREADS = 128
"""How many threads of a process are followed: each takes descriptors. memcached itself advises
against more than 64 workers, and has some ten threads besides."""

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""This process or the machine has no file descriptor left: nothing is known about anybody else."""


@dataclass(frozen=True)
class Identity:
    """
    A process, told apart from a later one with the same number.

    :param pid: the process's number
    :param started: when the process started [clock ticks since boot]
    """

    pid: int
    started: int


@dataclass(frozen=True)
class Program:
    """
    What a process must have in common with the one before it to be its successor.

    The user is what keeps others out: who runs as memcached's user can do to memcached what they
    like. The program is told by its path and not by its file, which an upgrade replaces.

    :param users: real, effective, saved and file system user
    :param path: executable file, as the process sees it
    """

    users: tuple[int, ...]
    path: str


def program(pid: int) -> Program:
    """
    The program that a process runs, and for whom.

    :param pid: the process
    :raises OSError: if there is none, or it may not be looked at
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    users = next(line for line in status.splitlines() if line.startswith("Uid:"))
    # The kernel says so once the file was replaced, as by an upgrade.
    path = str(Path(f"/proc/{pid}/exe").readlink()).removesuffix(" (deleted)")
    return Program(tuple(map(int, users.split()[1:])), path)


def identify(pid: int) -> Identity:
    """
    The process that has a number now.

    :param pid: the number
    :raises OSError: if there is none
    """
    return Identity(pid, int(stat_fields(pid)[19]))


def is_alive(who: Identity) -> bool:
    """
    Whether a process is still there, and is no zombie.

    :param who: the process; it counts as alive while there is no descriptor to look at it with
    """
    try:
        fields = stat_fields(who.pid)
    except OSError as error:
        return error.errno in OUT_OF_FILES
    return int(fields[19]) == who.started and fields[0] not in "ZX"


def serves(pid: int, port: int, name: bytes = MEMCACHED) -> bool:
    """
    Whether a process is of a program and listens on a port: its own word is not enough.

    :param pid: what something that answered on the port said its number was
    :param port: TCP port
    :param name: what the kernel calls the program
    :raises OSError: if there is no file descriptor left to look with
    """
    try:
        if Path(f"/proc/{pid}/comm").read_bytes() != name:
            return False
        listening = _listening_sockets(pid, port)
        return any(str(file.readlink()) in listening for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return False


def number_outside(called: int, pids: Iterable[int]) -> int:
    """
    The number here of a process that has another one in a container.

    :param called: what it calls itself there
    :param pids: those that it may be, as they are called here
    :return: 0 if none of them calls itself so
    """
    for pid in pids:
        with contextlib.suppress(OSError):  # it may have ended
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            innermost = status.partition("\nNSpid:")[2].partition("\n")[0].split()[-1:]
            if innermost == [str(called)] and Path(f"/proc/{pid}/comm").read_bytes() == MEMCACHED:
                return pid
    return 0


def who_serves(port: int, name: bytes) -> int:
    """
    The process that listens on a port, for a program that does not say its number.

    :param port: TCP port
    :param name: what the kernel calls the program
    :return: its number; 0 if there is none, or it may not be looked at
    :raises OSError: if there is no file descriptor left to look with
    """
    entries = os.listdir("/proc")  # noqa: PTH208 - names alone
    pids = (int(entry) for entry in entries if entry.isdigit())
    return next((pid for pid in pids if serves(pid, port, name)), 0)


def thread_ids(pid: int) -> list[int]:
    """
    The threads of a process.

    :param pid: the process
    :raises OSError: if there is no such process
    """
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208 - names alone


def affinities(pid: int) -> dict[int, tuple[int, ...]]:
    """
    The vCPUs that each thread of a process may run on.

    :param pid: the process
    :return: by thread id
    :raises OSError: if there is no such process
    """
    found = {}
    for thread in thread_ids(pid):
        with contextlib.suppress(ProcessLookupError):  # a thread may end
            found[thread] = tuple(sorted(os.sched_getaffinity(thread)))
    return found


def pin(pid: int, cores: Iterable[int]) -> None:
    """
    Move all threads of a process, and read back that they have moved.

    :param pid: the process
    :param cores: the vCPUs of all its threads from now on
    :raises OSError: if there is no such process, or the machine does not let it have them
    """
    wanted = set(cores)
    moved: set[int] = set()
    for _ in range(ROUNDS):
        new = [thread for thread in thread_ids(pid) if thread not in moved]
        if not new:
            return
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, wanted)
                if os.sched_getaffinity(thread) != wanted:
                    raise OSError(f"thread {thread} of {pid} may not run on {sorted(wanted)}")
            moved.add(thread)
    raise OSError(f"process {pid} starts threads faster than they can be moved")


def restore(who: Identity, original: dict[int, tuple[int, ...]]) -> None:
    """
    Give every thread the vCPUs that it had; threads that came since get the process' own.

    :param who: the process; nothing is done if it is gone
    :param original: what `affinities` said at first
    """
    if not is_alive(who) or not original:
        return
    common = original.get(who.pid) or next(iter(original.values()))
    for thread in thread_ids(who.pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, original.get(thread, common))


def stat_fields(pid: int) -> list[str]:
    """
    What follows the name in `/proc/PID/stat`: the state first, the start time at 19.

    :param pid: a process or thread
    :raises OSError: if there is none
    """
    return kernel_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def kernel_text(path: str) -> str:
    """
    What a file of the kernel's says now; `Path.read_text` costs several times as much.

    :param path: of the file
    :raises OSError: if it cannot be read
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while part := os.read(file, 64 << 10):  # the kernel gives a page at a time of some
            text += part
    finally:
        os.close(file)
    return text.decode("utf-8", "replace")


def _listening_sockets(pid: int, port: int) -> set[str]:
    """What the file descriptors of sockets that listen on a port look like."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8")
            for line in text.splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
