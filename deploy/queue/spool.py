"""
The folder of a queue: where a job stands is the subfolder that its file is in.

| file | state |
|---|---|
| NAME.yaml in the folder itself | handed in, not looked at yet |
| accepted/NAME.yaml | in order; it waits for room |
| running/NAME.yaml | the loop has it; NAME.cancel beside it asks for its end |
| done/, failed/, cancelled/ NAME.yaml | over, and NAME.json says how |
| refused/FILE | no job, and FILE.txt says why in one line |

A file is moved by one rename before what it says is done, and an outcome is written before the file
is moved to it. So whatever ends a loop leaves each job in one place, from which the next one goes
on; `.loop` names the state folder that knows what became of those that ran. Nobody but the folder's
owner may write to it, and no link in it is followed.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from deploy.linux.own_folder import OwnFolder
from deploy.queue.submitted import MOST_BYTES, parse_job, require_fit
from deploy.records.proof import CANCELLED as CANCELLED_CODE
from deploy.records.proof import exit_code
from deploy.records.state import State, StateFolder, read_state
from env.errors import InputError, escaped, fault, os_reason
from env.scenario import Job, Scenario

ACCEPTED, RUNNING, REFUSED = "accepted", "running", "refused"
DONE, FAILED, CANCELLED = OVER = ("done", "failed", "cancelled")
FOLDERS = (ACCEPTED, RUNNING, *OVER, REFUSED)

JOB, OUTCOME, CANCEL, WHY = ".yaml", ".json", ".cancel", ".txt"
"""How files end."""

LOOP = ".loop"
"""Holds the path of the state folder of the loop that served the queue last."""

MOST_WAITING = 1000
"""Accepted jobs; those that come later are looked at once there is room."""

MOST_AT_ONCE = 50
"""Files that one look takes in."""

UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
LONGEST_STEM = 100
"""What a refused file's name is rid of, and how many characters of it are kept."""


@dataclass(frozen=True)
class Ending:
    """
    What became of a job, as its outcome says it.

    :param job: its name
    :param outcome: `DONE`, `FAILED` or `CANCELLED`
    :param exit_code: of its last attempt; None if it never ended by itself, or that was not seen
    :param attempts: how many were begun
    :param accepted: when it was accepted, in local time
    :param started: when its first attempt was let through its gate; None if that is not known
    :param ended: when it was seen to be over
    :param paused_s: how long it was paused [s]
    :param why: the last thing that went wrong, in words; empty if nothing did
    """

    job: str
    outcome: str
    exit_code: int | None
    attempts: int
    accepted: str | None = None
    started: str | None = None
    ended: str | None = None
    paused_s: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Scan:
    """
    What a scan of the folder has brought.

    :param begun: jobs that are to run, and that the loop does not know yet
    :param finished: names of jobs whose outcome is written
    :param cancelled: names of running jobs that somebody wants ended
    :param waiting: how many jobs wait for room
    :param said: what is to be told of files that were taken in, one line each
    """

    begun: tuple[Job, ...]
    finished: tuple[str, ...]
    cancelled: tuple[str, ...]
    waiting: int
    said: tuple[str, ...]


class Spool:
    """
    A queue's folder, and the moves of its jobs.

    :param path: made if need be, with its subfolders
    :raises InputError: if it or a subfolder is not ours, is a link, or others may write to it
    """

    def __init__(self, path: Path):
        self.path = path
        self._seen: dict[str, tuple[int, ...]] = {}
        # What the disk has refused, and of which that was said: files of the top, and jobs.
        self._stuck_files: set[str] = set()
        self._stuck_jobs: set[str] = set()
        with contextlib.ExitStack() as stack:
            where = path
            try:
                self._top = stack.enter_context(OwnFolder(path))
                self._in: dict[str, OwnFolder] = {}
                for name in FOLDERS:
                    where = path / name
                    self._in[name] = stack.enter_context(self._top.subfolder(name))
            except OSError as error:
                raise InputError(f"{where}: cannot hold a queue: {os_reason(error)}") from error
            self._open = stack.pop_all()

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def lock(self, state_folder: Path) -> None:
        """
        Keep a second loop off the queue, and whoever knows less of its jobs than an earlier loop.

        :param state_folder: of the loop that is to serve it
        :raises InputError: if there is a loop, if one has left jobs that another state folder
            speaks of, or if the disk refuses it
        """
        try:
            self._top.lock()
        except OSError as error:
            raise InputError(f"{self.path}: another loop serves this queue") from error
        try:
            here, earlier = state_folder.resolve(), self._loop()
            if earlier is not None and earlier != here and self._is_known_to(earlier):
                raise InputError(
                    f"{self.path}: was served with --state {earlier}, which knows what became of "
                    "its jobs; use --resume or --restore with that"
                )
            self._top.replace(LOOP, os.fsencode(here), lasting=True)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be claimed: {fault(error)}") from error

    # --- what the loop's side does, one call at a time ---

    def scan(
        self,
        scenario: Scenario,
        containers: bool,
        known: Sequence[str],
        room: int,
        over: Sequence[Ending],
    ) -> Scan:
        """
        Write down what has ended, take in what was handed in, let begin what there is room for.

        :param scenario: whose machine the jobs must fit
        :param containers: whether jobs run in containers
        :param known: names of the jobs that the loop has
        :param room: how many more it takes
        :param over: how jobs have ended whose outcome is not known to be written
        :raises OSError: if the disk refuses something; the next call goes on from there
        """
        said: list[str] = []
        finished = []
        for ending in over:
            with self._apart(ending.job, self._stuck_jobs, said):
                self.finish(ending)
                finished.append(ending.job)
        self._take_in(scenario, containers, said)
        waiting = sorted(self.names(ACCEPTED), key=self._stuck_jobs.__contains__)
        for name in waiting[: max(0, room)]:
            with self._apart(name, self._stuck_jobs, said):
                self._in[RUNNING].remove(name + CANCEL)  # of an earlier job of that name
                with contextlib.suppress(FileNotFoundError):  # it was cancelled this moment
                    self._in[ACCEPTED].move(name + JOB, self._in[RUNNING])
        if waiting and room > 0:
            self._sync(RUNNING, ACCEPTED)
        begun, running = [], self.names(RUNNING)
        for name in running:
            if name not in known:
                with self._apart(name, self._stuck_jobs, said):
                    try:
                        begun.append(self.read_running(name, scenario, containers))
                    except InputError as error:
                        said.append(self._refuse(RUNNING, name + JOB, str(error)))
        self._stuck_jobs &= {*waiting, *running, *(ending.job for ending in over)}
        left = max(0, len(waiting) - max(0, room))
        return Scan(tuple(begun), tuple(finished), self._cancelled(), left, tuple(said))

    def finish(self, ending: Ending) -> None:
        """
        Write a running job's outcome, and move the job to it.

        :param ending: what became of it
        :raises OSError: if the disk refuses it
        """
        job = ending.job
        found = self._in[RUNNING].stat(job + JOB)
        accepted = None if found is None else local_time(found.st_mtime)
        self._write_outcome(replace(ending, accepted=accepted))
        self._leave_running(job, ending.outcome)

    def recover(self, job: str) -> bool:
        """
        Finish the move of a running job, if its outcome is written.

        :param job: its name
        :return: whether it is over
        :raises OSError: if the disk refuses it
        """
        for outcome in OVER:
            if self._in[outcome].stat(job + OUTCOME) is not None:
                self._leave_running(job, outcome)
                return True
        return False

    def put_back(self, job: str) -> None:
        """
        Have a running job wait again, in its old place; one that is to be cancelled is.

        :param job: its name; nothing of it runs
        :raises OSError: if the disk refuses it
        """
        if job in self._cancelled():
            self.finish(Ending(job, CANCELLED, None, 0, ended=local_time()))
            return
        self._in[RUNNING].move(job + JOB, self._in[ACCEPTED])
        self._sync(ACCEPTED, RUNNING)

    def read_running(self, job: str, scenario: Scenario, containers: bool) -> Job:
        """
        A job that runs, or is about to.

        :param job: its name
        :param scenario: whose machine it must fit
        :param containers: whether jobs run in containers
        :raises InputError: if its file does not say what it said when it was accepted
        """
        try:
            found = self._read(RUNNING, job + JOB)
        except OSError as error:
            raise InputError(f"{self.path}/{RUNNING}/{job}{JOB}: {os_reason(error)}") from error
        require_fit(found, scenario, containers, job + JOB)
        if found.name != job:
            raise InputError(f"{job}{JOB}: name: has become {found.name}")
        return found

    # --- what there is ---

    def is_over(self, job: str) -> bool:
        """
        Whether the outcome of a job is written.

        :param job: its name
        """
        return any(self._in[state].stat(job + OUTCOME) is not None for state in OVER)

    def names(self, state: str) -> list[str]:
        """
        Names of the jobs in a state, the one that was accepted first in front.

        :param state: one of `FOLDERS`
        """
        came = {}
        for name in self._in[state].names():
            if name.endswith(JOB) and (found := self._in[state].stat(name)) is not None:
                came[name.removesuffix(JOB)] = found.st_mtime_ns
        return sorted(came, key=lambda name: came[name])

    def lines(self) -> Iterator[str]:
        """
        Every job and refused file: name, state, and what there is to say, one a line.

        A file may have any name: what cannot be shown becomes an escape sequence.
        """
        return map(escaped, self._lines())

    def _lines(self) -> Iterator[str]:
        for name in sorted(filter(self._is_handed_in, self._top.names())):
            yield f"{name:<32} handed in"
        for name in self.names(ACCEPTED):
            yield f"{name:<32} {ACCEPTED}"
        cancelled = self._cancelled()
        for name in self.names(RUNNING):
            yield f"{name:<32} {RUNNING}{', is being cancelled' if name in cancelled else ''}"
        for state in OVER:
            for name in self.names(state):
                yield f"{name:<32} {state:<10} {self._outcome_in_words(state, name)}".rstrip()
        for name in sorted(self._in[REFUSED].names()):
            if name.endswith(WHY):
                why = self._content(self._in[REFUSED], name).decode(errors="replace").strip()
                yield f"{name.removesuffix(WHY):<32} {REFUSED:<10} {why}"

    # --- what a user asks for, while a loop runs or not ---

    def submit(self, content: bytes, origin: str) -> str:
        """
        Hand a job in.

        :param content: of its file
        :param origin: the file's name, for messages
        :return: the job's name
        :raises InputError: if it is no job, or its name is taken
        :raises OSError: if the disk refuses it
        """
        job = parse_job(content, origin)
        self._require_new(job.name, origin)
        try:
            self._top.add(job.name + JOB, content)
        except FileExistsError as error:
            raise InputError(f"{origin}: name: {job.name} is handed in already") from error
        return job.name

    def cancel(self, job: str) -> str:
        """
        Have a job ended, or not begun.

        :param job: its name
        :return: what becomes of it, in words
        :raises InputError: if there is none of that name that is not over
        :raises OSError: if the disk refuses it
        """
        if f"{job}{JOB}" != UNSAFE.sub("_", f"{job}{JOB}"):
            raise InputError(f"{job}: no job's name")
        running = self._in[RUNNING]
        if running.stat(job + JOB) is not None:
            running.replace(job + CANCEL, b"", lasting=True)
            if running.stat(job + JOB) is not None:
                return f"{job} runs; the loop ends it"
            running.remove(job + CANCEL)  # it was over first: a later one of its name is not meant
        for folder in (self._in[ACCEPTED], self._top):
            if folder.own_file(job + JOB) is None:
                continue
            if folder is self._top:
                self._require_new(job, job)
            # One rename: should the loop be taking it now, one of the two finds it gone.
            with contextlib.suppress(FileNotFoundError):
                folder.move(job + JOB, self._in[CANCELLED])
                self._write_outcome(Ending(job, CANCELLED, None, 0, ended=local_time()))
                return f"{job} is cancelled; it had not begun"
        raise InputError(f"{job}: no such job waits or runs; --list shows all")

    # --- inside ---

    def _take_in(self, scenario: Scenario, containers: bool, said: list[str]) -> None:
        """Accept or refuse what was handed in and lies still since the last scan."""
        before, self._seen = self._seen, {}
        for name in filter(self._is_handed_in, self._top.names()):
            if (found := self._top.stat(name)) is not None:
                # When it was put there comes first: that is the order in which files are taken.
                mark = (found.st_ctime_ns, found.st_ino, found.st_size, found.st_mtime_ns)
                self._seen[name] = mark
        stuck = self._stuck_files
        stuck.intersection_update(self._seen)
        still = [name for name, mark in self._seen.items() if before.get(name) == mark]
        # Jobs that were put back may be more than may wait.
        room = max(0, min(MOST_AT_ONCE, MOST_WAITING - len(self.names(ACCEPTED)))) if still else 0
        for name in sorted(still, key=lambda name: (name in stuck, self._seen[name]))[:room]:
            with self._apart(name, stuck, said), contextlib.suppress(FileNotFoundError):
                said.append(self._take(name, scenario, containers))
        if said:
            self._sync(ACCEPTED, REFUSED, "")

    def _take(self, name: str, scenario: Scenario, containers: bool) -> str:
        """
        Accept or refuse a file; what is to be said of it.

        :raises FileNotFoundError: if somebody has taken it back
        :raises OSError: if the disk refuses to move it
        """
        try:
            job = self._read("", name)
            require_fit(job, scenario, containers, escaped(name))
            self._require_new(job.name, escaped(name))
        except FileNotFoundError:
            raise
        except OSError as error:
            return self._refuse("", name, f"{escaped(name)}: {os_reason(error)}")
        except InputError as error:
            return self._refuse("", name, str(error))
        self._top.touch(name)  # when it was accepted: that is its place in the queue
        self._top.move(name, self._in[ACCEPTED], job.name + JOB)
        return f"{job.name} is accepted"

    @staticmethod
    @contextlib.contextmanager
    def _apart(name: str, stuck: set[str], said: list[str]) -> Iterator[None]:
        """Have what the disk refuses for one file keep no other from its turn; it is said once."""
        try:
            yield
        except OSError as error:
            if name not in stuck:
                said.append(f"{escaped(name)}: {os_reason(error).lower()}; tried again")
            stuck.add(name)
        else:
            stuck.discard(name)

    def _is_handed_in(self, name: str) -> bool:
        """Whether a file of the top is somebody's; one that begins with a dot is being written."""
        return name not in FOLDERS and not name.startswith(".")

    def _read(self, state: str, name: str) -> Job:
        """
        The job in a file.

        :raises OSError: if it is no plain file of ours
        :raises InputError: if it is no job
        """
        if not name.endswith(JOB):
            raise InputError(f"{escaped(name)}: must be a file that ends in {JOB}")
        return parse_job(self._content(self._in.get(state, self._top), name), escaped(name))

    @staticmethod
    def _content(folder: OwnFolder, name: str) -> bytes:
        with os.fdopen(folder.open(name, os.O_RDONLY), "rb") as file:
            return file.read(MOST_BYTES + 1)

    def _require_new(self, job: str, origin: str) -> None:
        for state in (ACCEPTED, RUNNING, *OVER):
            folder = self._in[state]
            if folder.stat(job + JOB) is not None or folder.stat(job + OUTCOME) is not None:
                raise InputError(f"{origin}: name: {job} is taken, by a job that is {state}")

    def _refuse(self, state: str, name: str, why: str) -> str:
        """Put a file aside, whatever it is, beside one line that says why."""
        refused = self._in[REFUSED]
        stem = UNSAFE.sub("_", name)[:LONGEST_STEM]
        free, number = stem, 1
        while refused.stat(free) is not None:
            number += 1
            free = f"{stem}.{number}"
        refused.replace(free + WHY, f"{escaped(why)}\n".encode(), lasting=True)
        self._in.get(state, self._top).move(name, refused, free)
        return f"refused: {escaped(why)}"

    def _loop(self) -> Path | None:
        """The state folder of the loop that served the queue last."""
        with contextlib.suppress(FileNotFoundError):
            return Path(os.fsdecode(self._content(self._top, LOOP)))
        return None

    def _is_known_to(self, state_folder: Path) -> bool:
        """Whether a state folder still speaks of jobs of this queue, or cannot be read."""
        try:
            state = read_state(state_folder, any_boot=True)
        except InputError:
            return True
        return state is not None and state.queue == str(self.path.resolve())

    def _cancelled(self) -> tuple[str, ...]:
        files = self._in[RUNNING].names()
        return tuple(name.removesuffix(CANCEL) for name in files if name.endswith(CANCEL))

    def _write_outcome(self, ending: Ending) -> None:
        content = json.dumps(asdict(ending), indent=2) + "\n"
        self._in[ending.outcome].replace(ending.job + OUTCOME, content.encode(), lasting=True)

    def _leave_running(self, job: str, outcome: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._in[RUNNING].move(job + JOB, self._in[outcome])
        self._in[RUNNING].remove(job + CANCEL)
        self._sync(outcome, RUNNING)

    def _sync(self, *states: str) -> None:
        for state in states:
            self._in.get(state, self._top).sync()

    def _outcome_in_words(self, state: str, job: str) -> str:
        try:
            outcome = json.loads(self._content(self._in[state], job + OUTCOME))
            return f"{outcome['ended'] or ''}  {outcome['why']}".strip()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "its outcome cannot be read"


def settle(spool: Spool, state: State | None, folder: StateFolder) -> list[str]:
    """
    Find out what became of jobs that ran when a loop ended, and of which nothing runs any more.

    Those that are proved to be over are; the others wait again.

    :param spool: the queue
    :param state: what the loop has left, be it from before the machine was started; None if that is
        lost
    :param folder: the state folder, with the proofs
    :return: what could not be done, one line each
    """
    faults = []
    try:
        jobs = spool.names(RUNNING)
    except OSError as error:
        return [f"{spool.path}: jobs are left in {RUNNING}: {fault(error)}"]
    for job in jobs:
        try:
            _settle_job(spool, job, state, folder)
        except OSError as error:  # it keeps no other job from its place
            faults.append(f"{spool.path}: {job} is left in {RUNNING}: {fault(error)}")
    return faults


def _settle_job(spool: Spool, job: str, state: State | None, folder: StateFolder) -> None:
    """
    Find out what became of one job; see `settle`.

    :raises OSError: if the disk refuses to move it
    """
    if spool.recover(job):
        return
    record = None if state is None else state.jobs.get(job)
    code = None if record is None else record.exit_code
    if state is not None and record is not None and code is None:
        proved = exit_code(folder.attempt_path(state.nonce, job, record.attempts))
        code = 0 if proved == 0 else None
    if record is None or code is None:
        spool.put_back(job)
        return
    shown = code if code >= 0 else None
    spool.finish(Ending(job, outcome_of(code), shown, record.attempts, ended=local_time()))


def outcome_of(code: int) -> str:
    """
    What became of a job.

    :param code: its exit code, or `CANCELLED_CODE`
    """
    return DONE if code == 0 else CANCELLED if code == CANCELLED_CODE else FAILED


def local_time(moment_s: float | None = None) -> str:
    """
    A moment as an outcome says it.

    :param moment_s: seconds of the epoch; now if none are given
    """
    moment = datetime.now() if moment_s is None else datetime.fromtimestamp(moment_s)
    return moment.isoformat(timespec="seconds")
