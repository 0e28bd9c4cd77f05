"""
What a loop must know to take over from one that was killed: a small file that only we can read.

The machine itself is the state: containers, proofs and control groups outlive the loop. The file
says which of them are ours. It is written anew, whole, before anything that it speaks of is done.
"""

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.linux.machine_lock import MachineLock, runtime_folder
from deploy.linux.own_folder import OwnFolder
from deploy.linux.service_process import Program
from deploy.records.proof import prepare
from env.errors import InputError, os_reason

STATE_FILE, LOST_FILE, LOCK_FILE = "state.json", "state.json.lost", "lock"
NEW_FILE = f"{STATE_FILE}.new"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class ServiceRecord:
    """
    memcached: its process, the vCPUs its threads had before we came, and what runs there.

    :param pid: its process id
    :param started: when it started [clock ticks since boot]
    :param affinity: vCPUs by thread id
    :param program: what whoever answers for it after a restart must run, too
    """

    pid: int
    started: int
    affinity: dict[int, tuple[int, ...]]
    program: Program


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
    """

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
    """

    nonce: str
    scenario: str
    runtime: str
    docker: str
    started_s: float
    privileged: bool = False
    background: int = 0
    logs_intervals: bool = False
    boot: str = field(default_factory=lambda: BOOT_ID.read_text(encoding="utf-8").strip())
    service: ServiceRecord | None = None
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
            raise InputError(f"{path}: cannot hold the state: {error.strerror}") from error
        self.path = path.resolve()
        self._lock = -1

    def lock(self) -> None:
        """
        Keep a second loop away, until `unlock` or the end of this process.

        :raises InputError: if there is one already
        """
        self._lock = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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

    def clear(self) -> None:
        """Forget a deployment that has ended; its proofs go too, and what processes have left."""
        self._remove_attempts()  # before the state: nothing is left that none speaks of
        (self.path / NEW_FILE).unlink(missing_ok=True)  # of a loop that was killed as it wrote
        (self.path / STATE_FILE).unlink(missing_ok=True)

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
        folder = self.path / f"attempt-{nonce}-{job}-{number}"
        folder.mkdir(exist_ok=True)
        prepare(folder)
        return folder

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


def read_state(folder: Path) -> State | None:
    """
    What a state file says.

    :param folder: see `StateFolder`
    :return: None if there is none, or it is from before the machine was started
    :raises InputError: if the file is damaged
    """
    path = folder / STATE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        state = _from_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {os_reason(error).lower()}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: damaged (no state that a loop writes)") from error
    return state if state.boot == BOOT_ID.read_text(encoding="utf-8").strip() else None


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


def _from_json(content: dict[str, Any]) -> State:
    service = content.pop("service")
    jobs = content.pop("jobs")
    state = State(**content)
    if service is not None:
        affinity = {int(key): tuple(cores) for key, cores in service["affinity"].items()}
        runs = Program(tuple(map(int, service["program"]["users"])), service["program"]["path"])
        state.service = ServiceRecord(service["pid"], service["started"], affinity, runs)
    state.jobs = {name: JobRecord(**record) for name, record in jobs.items()}
    return state
