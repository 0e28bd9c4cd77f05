"""
Who runs the jobs: plain processes here, containers in `deploy.jobs.containers`.

An attempt is one try at a job. All calls may block and are made by the actuator's two threads,
never by the loop; a job's place on the machine is changed through its `Placement` instead.
"""

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from deploy.jobs import gate
from deploy.jobs.placement import GroupPlacement, Placement, TaskPlacement, session_members
from deploy.linux import standing
from deploy.linux.cgroups import JobGroup, members
from deploy.linux.service_process import identify, stat_fields
from deploy.records import proof
from env.allocation import Weight
from env.errors import fault
from env.scenario import Job

KILL_LIMIT_S = 5.0
LOG_LINES, LOG_BYTES = 5, 4096
"""How much of the end of a job's output is shown, at most."""

LOG_LIMIT_KIB, LOG_WAIT_S = 64, 1.0
"""How much of the end of a job's output is kept, and how long to wait for it at the job's end."""

CUT = f"only the last {LOG_LIMIT_KIB} KiB of its output are kept"
HELD = "not known: what it has left running holds it open"

PIDS_LIMIT = 1024
"""Processes and threads of a job: none comes near it, and one that forks without end must not take
the numbers that memcached, the loop and Docker need."""

PID_FILE, LOG_FILE = "pid", "log"
OUTPUT_FILE = "output"
"""The pipe through which a job's output passes; it is gone once the log is written."""

AWAIT_LINES = f"""
read -r go || exit
{{ tail -c {(LOG_LIMIT_KIB << 10) + 1} < {OUTPUT_FILE} > {LOG_FILE}; rm -f {OUTPUT_FILE}; }} &
exec "$@" > {OUTPUT_FILE} 2>&1
"""
"""Keeps a process from its gate until it is where it belongs, and at all if we die before; keeps
the end of its output, in memory until it has ended. One byte too many tells that more was cut."""


class RuntimeUnavailableError(RuntimeError):
    """Whoever runs the jobs cannot be reached now; the job is not to blame."""


class JobFailedError(RuntimeError):
    """An attempt could not be started: one line that says why."""


@dataclass(frozen=True)
class Attempt:
    """
    One try at a job, not yet running.

    :param job: what the scenario says about it
    :param number: counts from 1
    :param folder: the folder of its proof and gate
    :param group: its parent control group, where groups can be written
    """

    job: Job
    number: int
    folder: Path
    group: JobGroup | None

    def wrapped(self, file: str, events: str, gate: str) -> list[str]:
        """
        The command line that waits at the gate.

        :param file: path of the proof, as the job sees it
        :param events: the file in which the kernel counts OOM kills, as the job sees it
        :param gate: the pipe that the thread count comes from, as the job sees it
        """
        commands = {threads: self.job.launch_command(threads) for threads in self.job.threads}
        return proof.wrapped(commands, file, events, gate)


@dataclass(frozen=True)
class Instance:
    """
    An attempt that was made, and waits at its gate or has passed it.

    :param attempt: the attempt
    :param key: what the runtime calls it
    :param pid: its first process, 0 if that has ended
    :param ended: pidfd that becomes readable when that process ends, or -1
    :param placement: writes its vCPUs and weight; None if it has ended
    """

    attempt: Attempt
    key: str
    pid: int
    ended: int
    placement: Placement | None


class Runtime(Protocol):
    """
    Starts and ends jobs. Every method may raise `RuntimeUnavailableError`.

    `ends_whole` says whether all of an attempt ends with its first process.
    """

    name: str
    ends_whole: bool

    def start(self, attempt: Attempt, cores: tuple[int, ...], weight: Weight) -> Instance:
        """
        Have an attempt wait at its gate.

        :param attempt: the attempt, whose folder has a gate
        :param cores: its vCPUs until they are written
        :param weight: its weight until it is written
        :raises JobFailedError: if it cannot run
        """

    def move(self, instance: Instance, cores: tuple[int, ...]) -> None:
        """
        Change an attempt's vCPUs where its placement may not be written.

        :param instance: the attempt
        :param cores: the vCPUs that it may use from now on, at least one
        """

    def outcome(self, instance: Instance) -> tuple[int, str]:
        """
        The exit code of an attempt that has ended, and what there is to say about its output.

        That is what was cut off, if anything, and if the attempt failed its output's last lines.

        :param instance: the attempt
        """

    def remove(self, instance: Instance) -> None:
        """
        End an attempt if it still runs, and leave nothing of it but its proof.

        :param instance: the attempt
        """

    def find(self, attempt: Attempt) -> Instance | None:
        """
        What an earlier loop started, running or ended; None if it started nothing.

        :param attempt: the attempt
        """

    def sweep(self, folders: list[Path], groups: list[JobGroup]) -> None:
        """
        End everything of a deployment, whatever its state.

        :param folders: those of all attempts
        :param groups: the jobs' control groups
        """


class ProcessRuntime:
    """Jobs as plain processes of this user, each in a session of its own."""

    name, ends_whole = "process", False

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, attempt: Attempt, cores: tuple[int, ...], weight: Weight) -> Instance:
        """See `Runtime.start`."""
        arguments = [proof.SHELL, "-c", AWAIT_LINES, "coretide"]
        proof_path, gate_path = proof.proof_file(attempt.folder), gate.gate_file(attempt.folder)
        arguments += attempt.wrapped(str(proof_path), os.devnull, str(gate_path))
        (attempt.folder / LOG_FILE).write_bytes(b"")  # the disk has a place for it
        (attempt.folder / OUTPUT_FILE).unlink(missing_ok=True)
        os.mkfifo(attempt.folder / OUTPUT_FILE)
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=attempt.folder,
            start_new_session=True,
        )
        self._children[process.pid] = process
        placement = self._placement(attempt, process.pid)
        assert process.stdin is not None
        try:
            if attempt.group is not None:
                attempt.group.limit_processes(PIDS_LIMIT)
                attempt.group.join(process.pid)
            standing.sacrifice(process.pid)
            placement.set_weight(weight)
            placement.set_cores(cores)
            # Before it works: a loop that takes over must find it.
            (attempt.folder / PID_FILE).write_text(str(process.pid), encoding="utf-8")
            process.stdin.write(b"go\n")
            process.stdin.close()
        except OSError as error:
            process.kill()
            if error.errno == errno.ENOSPC:
                raise RuntimeUnavailableError(fault(error)) from error
            raise JobFailedError(f"cannot be started: {fault(error)}") from error
        key = f"{process.pid}-{identify(process.pid).started}"
        return Instance(attempt, key, process.pid, os.pidfd_open(process.pid), placement)

    def move(self, instance: Instance, cores: tuple[int, ...]) -> None:
        """See `Runtime.move`: there is no other way than the placement."""
        raise RuntimeUnavailableError("the machine does not let its vCPUs be changed")

    def outcome(self, instance: Instance) -> tuple[int, str]:
        """See `Runtime.outcome`."""
        child = self._children.pop(instance.pid, None)
        if child is not None:
            child.wait()
        folder = instance.attempt.folder
        code = proof.exit_code(folder)
        give_up_s = time.monotonic() + LOG_WAIT_S
        while (held := (folder / OUTPUT_FILE).exists()) and time.monotonic() < give_up_s:
            time.sleep(0.002)
        size, output = 0, b""
        with contextlib.suppress(OSError), (folder / LOG_FILE).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_BYTES))
            output = log.read(LOG_BYTES)
        lines = [CUT] if size == (LOG_LIMIT_KIB << 10) + 1 else []
        if code != 0 and held:
            lines.append(HELD)
        elif code != 0:
            lines += output.decode(errors="replace").splitlines()[-LOG_LINES:]
        return proof.NO_PROOF if code is None else code, "\n".join(lines)

    def remove(self, instance: Instance) -> None:
        """See `Runtime.remove`."""
        if instance.attempt.group is not None:
            _forbid_forks(instance.attempt.group)
        kill_all(lambda: self._members(instance))
        child = self._children.pop(instance.pid, None)
        if child is not None:
            child.wait()

    def find(self, attempt: Attempt) -> Instance | None:
        """See `Runtime.find`."""
        if not (attempt.folder / PID_FILE).exists():
            return None
        pid = _recorded_pid(attempt.folder)
        with contextlib.suppress(OSError):
            if pid:
                key = f"{pid}-{identify(pid).started}"
                placement = self._placement(attempt, pid)
                return Instance(attempt, key, pid, os.pidfd_open(pid), placement)
        return Instance(attempt, "ended", 0, -1, None)

    def sweep(self, folders: list[Path], groups: list[JobGroup]) -> None:
        """See `Runtime.sweep`."""
        left: list[int] = []
        for pid in {pid for folder in folders if (pid := _recorded_pid(folder))}:
            left += kill_all(partial(session_members, pid))
        for group in groups:
            _forbid_forks(group)
            left += kill_all(partial(members, group.hierarchy, group.path))
        if left:
            raise RuntimeUnavailableError(f"processes that cannot be killed: {left}")
        for child in self._children.values():
            child.wait()
        self._children.clear()

    @staticmethod
    def _placement(attempt: Attempt, pid: int) -> Placement:
        if attempt.group is None:
            return TaskPlacement(pid)
        group = attempt.group
        controller = "cpuset" if group.hierarchy.version == 1 else "cpu"
        return GroupPlacement(group, group.hierarchy.folder(group.path, controller))

    @staticmethod
    def _members(instance: Instance) -> list[int]:
        group = instance.attempt.group
        if group is not None:
            return members(group.hierarchy, group.path)
        return session_members(instance.pid) if instance.pid else []


def _forbid_forks(group: JobGroup) -> None:
    """Nobody can be killed faster than some programs start others."""
    with contextlib.suppress(OSError):  # it may be gone
        group.limit_processes(0)


def _recorded_pid(folder: Path) -> int:
    """The process that an attempt's wrapper is, 0 if it has ended."""
    try:
        pid = int((folder / PID_FILE).read_text(encoding="utf-8"))
        # The number may have gone to somebody else.
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ours = os.fsencode(proof.proof_file(folder)) in arguments
    except (OSError, ValueError):
        return 0
    return pid if ours else 0


def kill_all(find: Callable[[], list[int]]) -> list[int]:
    """
    Kill processes until there are none, or until it is clear that they cannot be killed.

    :param find: lists them
    :return: those that are left
    """
    give_up_s = time.monotonic() + KILL_LIMIT_S
    while (pids := [pid for pid in find() if not _is_zombie(pid)]) and time.monotonic() < give_up_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return pids


def _is_zombie(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] in "ZX"
    except OSError:
        return True
