"""
What a loop must know to take over from one that was killed: a small file that only we can read.

The machine itself is the state: containers, proofs and control groups outlive the loop. The file
says which of them are ours. It is written anew, whole, before anything that it speaks of is done.
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from deploy.linux.machine_lock import MachineLock, runtime_folder
from deploy.linux.own_folder import OwnFolder
from deploy.linux.service_process import Identity, Program, affinities, program
from deploy.records.proof import prepare
from env.errors import InputError, fault, os_reason

STATE_FILE, LOST_FILE, LOCK_FILE = "state.json", "state.json.lost", "lock"
NEW_FILE = f"{STATE_FILE}.new"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
AS_WRITTEN = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""A file that says anything else than a loop writes is damaged."""


@dataclass(frozen=True)
class Weighing:
    """
    How memcached stood before it was put first (`deploy.jobs.precedence`).

    :param group: the folder of its threads, its own control group's weight file, or the name of its
        session's autogroup
    :param before: the threads' class, or what the group held: a weight, or a nice value
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    group: str
    before: int


@dataclass
class ServiceRecord:
    """
    A process of memcached's, the vCPUs its threads had before we came, and what runs there.

    :param pid: its process id
    :param started: when it started [clock ticks since boot]
    :param affinity: vCPUs by thread id
    :param program: what whoever answers for it after a restart must run, too
    :param weighing: how it stood before it was put first; None where it was not
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    pid: int
    started: int
    affinity: dict[int, tuple[int, ...]]
    program: Program
    weighing: Weighing | None = None

    @property
    def who(self) -> Identity:
        """The process."""
        return Identity(self.pid, self.started)


def service_record(who: Identity) -> ServiceRecord:
    """
    What must be known of a process of memcached's before it is moved.

    :param who: the process
    :raises OSError: if it is gone, or may not be looked at
    """
    return ServiceRecord(who.pid, who.started, affinities(who.pid), program(who.pid))


@dataclass
class JobRecord:
    """
    A job's attempts so far.

    :param attempts: how many were begun
    :param failures: how many of them failed
    :param threads: threads of the last attempt
    :param opened: whether the last attempt's gate may have been opened; before that it only waits
    :param key: what the runtime calls the last attempt, once it was opened
    :param group: path of the job's control group, empty where there is none
    :param weight_file: the file that carries the group's weight, empty where there is no group
    :param freezer_file: the file that freezes the group, empty where there is none
    :param exit_code: of the job; None until it is done or given up
    :param decided_s: when the first attempt's start was decided [s since the run started]
    :param start_s: when its gate was opened [s since the run started]
    :param begun_s: when its wrapper had passed the gate [s since the run started]
    :param end_s: when the job was done or given up [s since the run started]
    :param paused_s: how long it was paused [s]
    :param had: of a job that was there before us, a pod: what the files of its control groups held
        that we write to, by path, in the order in which that is put back
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    attempts: int = 0
    failures: int = 0
    threads: int = 0
    opened: bool = False
    key: str = ""
    group: str = ""
    weight_file: str = ""
    freezer_file: str = ""
    exit_code: int | None = None
    decided_s: float | None = None
    start_s: float | None = None
    begun_s: float | None = None
    end_s: float | None = None
    paused_s: float = 0.0
    had: dict[str, str] = field(default_factory=dict)


@dataclass
class State:
    """
    One deployment.

    :param nonce: marks what is ours
    :param scenario: its name
    :param runtime: docker or process
    :param docker: address of the Docker daemon, empty where there is none
    :param started_s: when it began, on the monotonic clock of this boot [s]
    :param privileged: whether containers get Docker's default rights
    :param background: what is written to a job's weight file to make it yield, where its group
        cannot be idle (`deploy.linux.cgroups.IDLE_FILE`)
    :param logs_intervals: whether we write down the latency of each interval
    :param queue: folder of the queue that is served, empty where the scenario has the jobs
    :param service: memcached's processes, each before it is moved, the one that clients ask first
    """

    __pydantic_config__: ClassVar = AS_WRITTEN

    nonce: str
    scenario: str
    runtime: str
    docker: str
    started_s: float
    privileged: bool = False
    background: int = 0
    logs_intervals: bool = False
    queue: str = ""
    boot: str = field(default_factory=lambda: BOOT_ID.read_text(encoding="utf-8").strip())
    service: list[ServiceRecord] = field(default_factory=list)
    jobs: dict[str, JobRecord] = field(default_factory=dict)


class StateFolder:
    """
    The folder that a deployment keeps its state and its jobs' proofs in.

    :param path: made with mode 0700
    :raises InputError: if it cannot be made, others can open it, or it is a link
    """

    def __init__(self, path: Path):
        try:
            OwnFolder(path, closed=True).close()
        except OSError as error:
            raise InputError(f"{path}: cannot hold the state: {os_reason(error)}") from error
        self.path = path.resolve()
        self._lock = -1

    def lock(self) -> None:
        """
        Keep a second loop away, until `unlock` or the end of this process.

        :raises InputError: if there is one already, or the disk refuses it
        """
        try:
            with OwnFolder(self.path, closed=True) as folder:
                self._lock = folder.open(LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be locked: {os_reason(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.unlock()
            raise InputError(f"{self.path}: another loop is running with this state") from error

    def unlock(self) -> None:
        """Let another loop have the folder."""
        os.close(self._lock)

    def load(self) -> State | None:
        """
        What an earlier loop left, if it left anything on this boot.

        :raises InputError: if the file is damaged
        """
        return read_state(self.path)

    def begin(self, state: State) -> None:
        """
        Write a new deployment's first state; proofs whose state is lost are removed.

        :param state: the deployment
        :raises InputError: if that is not possible
        """
        self._remove_attempts()
        try:
            self.save(state)
        except OSError as error:
            raise InputError(f"{self.path}: cannot hold the state: {error.strerror}") from error

    def save(self, state: State) -> None:
        """
        Write the state.

        :param state: the deployment
        :raises OSError: if the disk refuses it
        """
        new = self.path / NEW_FILE
        new.write_text(json.dumps(as_json(state)), encoding="utf-8")
        new.replace(self.path / STATE_FILE)

    def clear(self) -> str:
        """
        Forget a deployment that has ended; its proofs go too, and what processes have left.

        :return: what the disk refuses to forget, in one line; empty if nothing is left
        """
        self._remove_attempts()  # before the state: nothing is left that none speaks of
        try:
            (self.path / NEW_FILE).unlink(missing_ok=True)  # of a loop that was killed as it wrote
            (self.path / STATE_FILE).unlink(missing_ok=True)
        except OSError as error:
            return f"all is undone, but the state cannot be removed: {fault(error)}"
        return ""

    def set_aside(self) -> None:
        """Keep a state that cannot be read for whoever wants to look at it, and forget it."""
        with contextlib.suppress(OSError):
            (self.path / STATE_FILE).replace(self.path / LOST_FILE)
        self._remove_attempts()

    def attempt_folder(self, nonce: str, job: str, number: int) -> Path:
        """
        Where an attempt leaves its proof, which proves nothing to another deployment.

        :param nonce: of the deployment
        :param job: its name
        :param number: which of its attempts
        :return: made if need be
        :raises OSError: if the disk has no room for it
        """
        folder = self.attempt_path(nonce, job, number)
        folder.mkdir(exist_ok=True)
        prepare(folder)
        return folder

    def attempt_path(self, nonce: str, job: str, number: int) -> Path:
        """
        The same, be it there or not.

        :param nonce: of the deployment
        :param job: its name
        :param number: which of its attempts
        """
        return self.path / f"attempt-{nonce}-{job}-{number}"

    def forget_job(self, nonce: str, job: str) -> None:
        """
        Remove the proofs of one job.

        :param nonce: of the deployment
        :param job: its name, which may begin another one's
        """
        own = f"attempt-{nonce}-{job}-"
        for folder in self.attempt_folders():
            if folder.name.startswith(own) and folder.name.removeprefix(own).isdecimal():
                shutil.rmtree(folder, ignore_errors=True)

    def attempt_folders(self) -> list[Path]:
        """Where attempts have left their proofs."""
        return sorted(self.path.glob("attempt-*"))

    def _remove_attempts(self) -> None:
        for folder in self.attempt_folders():
            shutil.rmtree(folder, ignore_errors=True)


def as_json(state: State) -> dict[str, Any]:
    """
    What the state file holds.

    :param state: the deployment
    """
    content: dict[str, Any] = json.loads(json.dumps(asdict(state)))  # keys become text
    return content


def read_state(folder: Path, any_boot: bool = False) -> State | None:
    """
    What a state file says.

    :param folder: see `StateFolder`
    :param any_boot: whether one from before the machine was started is wanted, too
    :return: None if there is none
    :raises InputError: if the file is damaged
    """
    path = folder / STATE_FILE
    try:
        content = path.read_bytes()
        state = _reader().validate_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {os_reason(error).lower()}") from error
    except ValueError as error:
        raise InputError(f"{path}: damaged (no state that a loop writes)") from error
    this_boot = state.boot == BOOT_ID.read_text(encoding="utf-8").strip()
    return state if this_boot or any_boot else None


def claim() -> MachineLock:
    """
    Keep two loops off this machine, whatever their state folders and memcached's process.

    :return: close it: the claim ends with it
    :raises InputError: if another loop has it, or the lock's folder is not ours
    """
    try:
        return MachineLock()
    except BlockingIOError as error:
        raise InputError("another loop steers this machine already") from error
    except OSError as error:
        where = runtime_folder()
        raise InputError(f"{where}: cannot hold the machine's lock: {error.strerror}") from error


@functools.cache
def _reader() -> TypeAdapter[State]:
    """Made when there is something to read: most loops find nothing."""
    return TypeAdapter(State)
