"""
The guardian: a small process that makes the machine safe when the loop dies or hangs.

It is forked before anything large is imported and needs the standard library alone. The loop tells
it where the state is and then writes a beat every now and then; where nobody reads the beats, the
loop starts a new guardian. When the beats stop, the guardian gives memcached back the vCPUs it had,
lets the jobs yield to it, and lets paused jobs run: safe, and nothing is lost. A loop that was only
late puts things right when it goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from deploy.linux import machine_lock, standing
from deploy.linux.helpers import helper_command
from deploy.linux.signals import STOPPING
from deploy.records import terminal
from deploy.safety.watchdog import Watchdog

TYPE_CHECKING = False  # `typing` would take another half a MiB of it
if TYPE_CHECKING:
    from typing import Any

BEAT_EVERY_S = 0.2
"""A beat wakes the guardian: ten a second were a tenth of what the loop costs."""

BEAT_LIMIT_S = 0.7
"""Without a beat for so long the guardian acts; the promise is a safe machine within 1 s."""

UNREAD_LIMIT_S = 5.0
"""A guardian that has read no beat for so long is stuck: what it does takes milliseconds."""

REPLACE_EVERY_S = 1.0
END_LIMIT_S, KILL_LIMIT_S = 3.0, 0.1
"""How long a guardian's end is waited for: once it is dismissed, and once it is killed."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
"""Pause before what failed is tried again; it doubles each time."""

TRY_FOR_S = 60.0
"""What is refused now may be allowed by then."""

IDLE_FILE = "cpu.idle"
"""See `deploy.linux.cgroups.IDLE_FILE`; importing it would take too much time and memory."""

STOP, END = b"q", b"\0"
"""Dismisses it; ends the path of the state file."""


class Guardian:
    """
    The loop's side of the guardian. One that dies or does not answer is replaced.

    :param pid: the guardian's process id
    :param pipe: descriptor that the guardian's orders are written to
    """

    def __init__(self, pid: int, pipe: int):
        self.pid = pid
        self._pipe = pipe
        self._beat_s = self._replaced_s = 0.0
        self._unread_beats = 0
        self._orders = b""
        self._watchdog = Watchdog()

    def watch(self, state_file: Path) -> None:
        """
        Begin to expect beats.

        :param state_file: says what the guardian has to make safe
        """
        self._orders = os.fsencode(state_file) + END
        self._write(self._orders)

    def beat(self, now_s: float) -> None:
        """
        Say that the loop is alive; to be called at every poll.

        :param now_s: since the run started [s]
        """
        if now_s - self._beat_s < BEAT_EVERY_S:
            return
        self._beat_s = now_s
        self._watchdog.beat(now_s)
        self._unread_beats = self._unread_beats + 1 if self._has_unread() else 0
        trouble = self._write(b".")
        if self._unread_beats > UNREAD_LIMIT_S / BEAT_EVERY_S:
            trouble = trouble or "does not answer"
        if trouble and now_s - self._replaced_s >= REPLACE_EVERY_S:
            self._replaced_s = now_s
            self._replace(trouble)

    def rest(self, now_s: float) -> None:
        """
        Tell systemd that the loop is alive while there is nothing to watch yet.

        :param now_s: on any clock that never goes back [s]
        """
        self._watchdog.beat(now_s)

    def stop(self) -> None:
        """Dismiss it: the loop has restored everything itself."""
        self._watchdog.stopping()
        self._write(STOP)
        self.close()
        if not _has_ended(self.pid, END_LIMIT_S):
            terminal.complain("the guardian does not end and is killed")
            _kill(self.pid)

    def close(self) -> None:
        """Leave to it what was not restored, if there is anything; a second time does nothing."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            if not self._orders:  # it has nothing to do, and ends at once
                _has_ended(self.pid, END_LIMIT_S)

    def _write(self, message: bytes) -> str:
        """Write to it; what is wrong with it, empty if nothing is known to be."""
        try:
            os.write(self._pipe, message)
        except BrokenPipeError:
            return "has died"
        except BlockingIOError:
            return "does not answer"
        return ""

    def _has_unread(self) -> bool:
        """Whether there is something that it was told and has not read."""
        return any(fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))

    def _replace(self, trouble: str) -> None:
        """Have a new one watch; the loop goes on, and tries again, where none can be started."""
        _kill(self.pid)
        try:
            pid, pipe = _start()
        except OSError as error:
            terminal.complain(f"the guardian {trouble}; none can be started: {error.strerror}")
            return
        self.close()
        self.pid, self._pipe, self._unread_beats = pid, pipe, 0
        self._write(self._orders)
        terminal.complain(f"the guardian {trouble}; a new one watches")


def _has_ended(pid: int, limit_s: float) -> bool:
    """Wait for the end of a child, not longer than a time [s]."""
    give_up_s = time.monotonic() + limit_s
    with contextlib.suppress(ChildProcessError):  # that was seen before
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > give_up_s:
                return False
            time.sleep(0.001)
    return True


def _kill(pid: int) -> None:
    """End a child that does nothing by itself any more, unless that has been seen already."""
    if not _has_ended(pid, 0.0):
        os.kill(pid, signal.SIGKILL)
        _has_ended(pid, KILL_LIMIT_S)


def spawn() -> Guardian:
    """Fork the guardian; call it before threads are started and large modules imported."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reader)
        os.set_blocking(writer, False)
        return Guardian(pid, writer)
    os.close(writer)
    try:
        os.setsid()  # Ctrl-C is for the loop
        _guard(reader)
    finally:
        os._exit(0)


def launch() -> Guardian:
    """Start the guardian from a process that is large or has threads, which must not fork."""
    return Guardian(*_start())


def _start() -> tuple[int, int]:
    """
    A guardian that is no fork: its process id, and the pipe that its orders are written to.

    :raises OSError: if the machine does not allow it
    """
    reader, writer = os.pipe()
    command = helper_command("deploy.safety.guardian")
    orders = [(os.POSIX_SPAWN_DUP2, reader, 0)]
    try:
        pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=orders, setsid=True)
    except OSError:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    os.set_blocking(writer, False)
    return pid, writer


class LastState:
    """
    What the state file says, or what it said when it could last be read: its disk may go away.

    :param path: see `deploy.records.state`
    """

    def __init__(self, path: Path):
        self._path = path
        self._version: tuple[int, int] | None = None
        self.content: dict[str, Any] | None = None
        self.trouble = ""

    def read(self) -> None:
        """Read the file if it is another one than before."""
        try:
            found = self._path.stat()
            version = (found.st_ino, found.st_mtime_ns)
            if version != self._version:
                self.content = json.loads(self._path.read_text(encoding="utf-8"))
                self._version = version
            self.trouble = ""
        except (OSError, ValueError) as error:
            self.trouble = f"{self._path} cannot be read: {_reason(error)}"


def _reason(error: Exception) -> str:
    """As `env.errors.fault`, which takes more than the standard library."""
    return getattr(error, "strerror", None) or str(error)


def _guard(reader: int) -> None:
    for number in STOPPING:  # they are for the loop
        signal.signal(number, signal.SIG_IGN)
    standing.spare()
    loop = os.getppid()
    state_file = _orders(reader)
    if state_file is None:
        return
    state = LastState(state_file)
    with contextlib.suppress(OSError):  # it acts a little later
        standing.go_first()

    ready_to_read = select.poll()
    ready_to_read.register(reader, select.POLLIN)

    def beats(wait_s: float) -> bool:
        return bool(ready_to_read.poll(1e3 * wait_s))

    def taken_over(wait_s: float) -> bool:
        time.sleep(wait_s)  # the kernel may still be at closing what the loop had open
        with contextlib.suppress(OSError):
            return wait_s > 0.0 and machine_lock.is_taken()
        return False

    patience_s: float | None = BEAT_LIMIT_S
    while True:
        state.read()
        ready = ready_to_read.poll(None if patience_s is None else 1e3 * patience_s)
        message = os.read(reader, 4096) if ready else b""
        if STOP in message:
            return
        if ready and not message:
            _rescue("the loop is gone", state, taken_over)
            return
        if not ready:
            if os.getppid() == loop:  # no longer does it keep others from a vCPU
                with contextlib.suppress(OSError):
                    standing.step_back(loop)
            _rescue("the loop is silent", state, beats)
        patience_s = BEAT_LIMIT_S if ready else None


def _rescue(why: str, state: LastState, back: Callable[[float], bool]) -> None:
    """
    Make the machine safe, and try for a while what cannot be done at once.

    :param why: said, once all was tried
    :param state: what is to be made safe
    :param back: waits for at most that long [s] and says whether a loop is back
    """
    said: list[str] = []
    pause_s, give_up_s = FIRST_PAUSE_S, time.monotonic() + TRY_FOR_S
    while True:
        state.read()
        lines, faults = [why, state.trouble], ["it is not known what to make safe"]
        if state.content is not None:
            done, faults = make_safe(state.content, lambda: back(0.0))
            lines += done
        for line in filter(None, (*lines, *faults)):
            if line not in said:
                said.append(line)
                _say(line)
        if not faults or time.monotonic() > give_up_s or back(pause_s):
            return
        pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)


def _orders(reader: int) -> Path | None:
    path = b""
    while not path.endswith(END):
        part = os.read(reader, 1)
        if not part or path + part == STOP:  # a path begins with a slash, and may hold it
            return None
        path += part
    return Path(os.fsdecode(path.removesuffix(END)))


def make_safe(
    state: dict[str, Any], back: Callable[[], bool] = lambda: False
) -> tuple[list[str], list[str]]:
    """
    Give memcached its vCPUs back, let the jobs yield to it, let paused jobs run.

    :param state: what the state file holds, see `deploy.records.state`
    :param back: asked before each step; a loop that is back is left the rest to
    :return: what was done, or was found to be gone, and what could not be done, one line each
    """
    done: list[str] = []
    faults: list[str] = []
    for whose, what, step in _steps(state):
        if back():
            break
        try:
            done.append(f"{whose} {what}" if step() else f"{whose} is gone")
        except (OSError, ValueError, KeyError) as error:
            faults.append(f"not done: {whose} {what}: {_reason(error)}")
    return done, faults


def _steps(state: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], bool]]]:
    """Who is to do what, and what says whether that was read back: False if who it is is gone."""
    services = state["service"]
    for service in services:
        name = "memcached" if len(services) == 1 else f"memcached {service['pid']}"
        yield name, "has its vCPUs back", partial(_free_service, service)
    # Whoever only waits at a gate needs nothing; a pod that was there before us is held by us.
    jobs = [(name, job) for name, job in state["jobs"].items() if job["opened"] or job["had"]]
    for name, job in jobs:
        yield name, "yields", partial(_yield, state, job)
    for name, job in jobs:
        yield name, "runs", partial(_resume, job)


def _free_service(service: dict[str, Any]) -> bool:
    pid, had = service["pid"], service["affinity"]
    if _started(pid) != service["started"]:
        return False
    common: list[int] = had.get(str(pid)) or next(iter(had.values()), [])
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, had.get(str(thread), common))
    for thread in _threads(pid):
        with contextlib.suppress(ProcessLookupError):
            now, wanted = os.sched_getaffinity(thread), set(had.get(str(thread), common))
            if now != wanted:
                raise OSError(f"thread {thread} has {sorted(now)}, not {sorted(wanted)}")
    return True


def _yield(state: dict[str, Any], job: dict[str, Any]) -> bool:
    if job["weight_file"]:
        weight = Path(job["weight_file"])
        idle = weight.with_name(IDLE_FILE)
        file, value = (idle, 1) if idle.exists() else (weight, state["background"])
        try:
            file.write_text(str(value), encoding="utf-8")
            now = int(file.read_text(encoding="utf-8"))
        except FileNotFoundError:  # its group is gone
            return False
        if now != value:
            raise OSError(f"{file} holds {now}, not {value}")
        return True
    pids = _processes(job)
    for pid in pids:
        _set_session_nice(pid)
        for thread in _threads(pid):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    return bool(pids)


def _set_session_nice(pid: int) -> None:
    """See `deploy.jobs.placement.SESSION_NICE`; :raises BlockingIOError: where it came too soon."""
    try:
        Path(f"/proc/{pid}/autogroup").write_text("19", encoding="utf-8")
    except BlockingIOError:
        raise
    except OSError:  # the kernel makes no such groups, or the process is gone
        pass


def _resume(job: dict[str, Any]) -> bool:
    if job["freezer_file"]:
        file = Path(job["freezer_file"])
        thawed = "THAWED" if file.name == "freezer.state" else "0"
        try:
            file.write_text(thawed, encoding="utf-8")
            now = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:  # its group is gone
            return False
        if now != thawed:
            raise OSError(f"{file} holds {now}, not {thawed}")
        return True
    pids = _processes(job)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return bool(pids)


def _processes(job: dict[str, Any]) -> list[int]:
    """Those of the session of a job without a group, while the first one lives."""
    found: list[int] = []
    leader, _, started = job["key"].partition("-")
    if str(_started(leader)) == started:
        for pid in _listed("/proc"):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == int(leader):
                    found.append(pid)
    return found


def _listed(folder: str) -> list[int]:
    """The processes or threads that a folder of /proc lists."""
    return [int(path.name) for path in Path(folder).iterdir() if path.name.isdigit()]


def _threads(pid: int) -> list[int]:
    """The threads of a process; none if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _listed(f"/proc/{pid}/task")
    return []


def _started(pid: int | str) -> int:
    """When a process started [clock ticks since boot]; -1 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])


def _say(line: str) -> None:
    terminal.write(terminal.ERROR, f"{time.strftime('%H:%M:%S')} guardian: {line}")


if __name__ == "__main__":
    _guard(sys.stdin.fileno())
