"""
The guardian: a small process that makes the machine safe when the loop dies or hangs.

It is forked before anything large is imported and needs the standard library alone. The loop tells
it where the state is and then writes a beat every now and then. When the beats stop, it gives
memcached back the vCPUs it had, lets the jobs yield to it, and lets paused jobs run: safe, and
nothing is lost. A loop that was only late puts things right when it goes on.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy import terminal
from deploy.watchdog import Watchdog

BEAT_EVERY_S = 0.1
SILENCE_S = 0.6
"""With this silence the guardian acts; the promise is a safe machine within 1 s."""

CALL_LIMIT_S = 2.0
STOP = b"q"


class Guardian:
    """
    The loop's side of the guardian.

    :param pid: of the guardian
    :param pipe: where its orders go
    """

    def __init__(self, pid: int, pipe: int):
        self.pid = pid
        self._pipe = pipe
        self._beat_s = 0.0
        self._stopped = False
        self._watchdog = Watchdog()

    def watch(self, state_file: Path) -> None:
        """
        Begin to expect beats.

        :param state_file: where it finds what to make safe
        """
        self._write(f"{state_file}\n".encode())

    def beat(self, now_s: float) -> None:
        """Say that the loop is alive; to be called at every poll."""
        if now_s - self._beat_s >= BEAT_EVERY_S:
            self._beat_s = now_s
            self._write(b".")
            self._watchdog.beat(now_s)

    def stop(self) -> None:
        """Dismiss it: the loop has restored everything itself; a second time does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._watchdog.stopping()
        self._write(STOP)
        os.close(self._pipe)
        os.waitpid(self.pid, 0)

    def _write(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe, message)


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
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "deploy.guardian"]
    orders = [(os.POSIX_SPAWN_DUP2, reader, 0)]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=orders, setsid=True)
    os.close(reader)
    os.set_blocking(writer, False)
    return Guardian(pid, writer)


def _guard(reader: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state_file = _first_line(reader)
    if state_file is None:
        return
    safe = False
    while True:
        ready, _, _ = select.select([reader], [], [], SILENCE_S)
        message = os.read(reader, 4096) if ready else b""
        if STOP in message:
            return
        if message:
            safe = False
        elif not safe:
            _say("the loop is gone" if ready else "the loop is silent")
            for line in make_safe(state_file):
                _say(line)
            safe = True
        if ready and not message:  # the loop has ended
            return


def _first_line(reader: int) -> Path | None:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(reader, 1)
        if not part or part == STOP:
            return None
        line += part
    return Path(line.decode().rstrip("\n"))


def make_safe(state_file: Path) -> list[str]:
    """
    Give memcached its vCPUs back, let the jobs yield to it, let paused jobs run.

    :param state_file: see `deploy.state`
    :return: what was done or could not be, one line each
    """
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"nothing to make safe: {state_file}: {error}"]
    lines = [_tried("memcached has its vCPUs back", _free_service, state["service"])]
    for name, job in state["jobs"].items():
        if job["key"] and job["exit_code"] is None:
            lines.append(_tried(f"{name} yields and runs", _free_job, state, job))
    return lines


def _tried(what: str, step: Callable[..., None], *arguments: Any) -> str:
    try:
        step(*arguments)
    except (OSError, ValueError, KeyError) as error:
        return f"not done: {what}: {error}"
    return what


def _free_service(service: dict[str, Any] | None) -> None:
    if service is None or _started(service["pid"]) != service["started"]:
        return
    own: list[int] | None = None
    for thread in os.listdir(f"/proc/{service['pid']}/task"):  # noqa: PTH208 - names alone
        own = own or service["affinity"].get(str(service["pid"]))
        cores = service["affinity"].get(thread, own)
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def _free_job(state: dict[str, Any], job: dict[str, Any]) -> None:
    group = Path(job["weight_file"]).parent if job["weight_file"] else None
    if group is not None and group.exists():
        Path(job["weight_file"]).write_text(str(state["background"]), encoding="utf-8")
    if state["runtime"] == "docker":
        _unpause(state["docker"], job["key"])
        return
    pid, _, started = job["key"].partition("-")
    if group is not None:
        pids = [int(one) for one in (group / "cgroup.procs").read_text(encoding="utf-8").split()]
    else:
        pids = [int(pid)] if _started(int(pid)) == int(started) else []
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)


def _unpause(url: str, container: str) -> None:
    """Docker's API without its SDK or an HTTP library, which take too much time and memory."""
    path = url.removeprefix("unix://") if url else "/var/run/docker.sock"
    request = f"POST /containers/{container}/unpause HTTP/1.0\r\nContent-Length: 0\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CALL_LIMIT_S)
        connection.connect(path)
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode(errors="replace")
    status = int(answer.partition(" ")[2][:3])  # "HTTP/1.0 204 No Content"
    if status >= 400 and "not paused" not in answer and status != 404:
        raise OSError(f"Docker: {answer.splitlines()[-1]}")


def _started(pid: int) -> int:
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
