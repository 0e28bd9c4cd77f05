"""
A Docker daemon of our own, for machines where none runs: a socket in a folder only we can open.

Its images, containers and containerd are apart from those of any other daemon on the machine. It
weighs little: the start of a container is the work of a dozen processes, which must not hold up
memcached. It does not weigh as little as it could, or it would never answer on a busy machine.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.linux.cgroups import JobGroup, find_hierarchy, members
from deploy.linux.readiness import await_readable
from deploy.linux.signals import held
from env.allocation import Weight
from env.errors import InputError

START_LIMIT_S = 30.0
STOP_LIMIT_S = 20.0
SOCKET_PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux [bytes]."""

WEIGHT = {1: 102, 2: 10}
"""A tenth of what a group weighs that nobody touched (`deploy.linux.cgroups.DEFAULT_WEIGHT`)."""


@dataclass(frozen=True)
class Daemon:
    """A running dockerd: its socket's address for the Docker SDK, its process, its folder."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path


def can_start() -> bool:
    """Whether this user, on this machine, may start one."""
    return os.geteuid() == 0 and shutil.which("dockerd") is not None


def start(folder: Path, live_restore: bool = False) -> Daemon:
    """
    Start dockerd and wait until it says that it is ready.

    :param folder: made with mode 0700; holds socket, log, images and containers, and can be
        given again to a later daemon that is to find them
    :param live_restore: whether containers survive the end of this daemon
    :raises InputError: one line that says why there is no daemon
    """
    program = shutil.which("dockerd")
    if program is None:
        raise InputError("dockerd: not found; install it: apt-get install docker.io")
    if os.geteuid() != 0:
        raise InputError("dockerd: only root can start it; use sudo, or the process runtime")
    folder = _private(folder)
    command = [program, *_options(folder, live_restore)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        # As systemd does it: dockerd sends READY=1 here.
        notify = folder / "ready.sock"
        notify.unlink(missing_ok=True)
        ready.bind(str(notify))
        with (folder / "dockerd.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(notify)},
                start_new_session=True,
            )
        daemon = Daemon(f"unix://{folder}/docker.sock", process, folder)
        try:
            _await_ready(ready, daemon)
            _make_light(daemon)
        except BaseException:
            stop(daemon)
            raise
    return daemon


def stop(daemon: Daemon) -> None:
    """
    End a daemon that `start` started, and its containerd.

    :param daemon: what `start` returned
    """
    daemon.process.terminate()
    try:
        daemon.process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        daemon.process.kill()
        daemon.process.wait()
    _end_containerd(daemon.folder)


def remove(folder: Path) -> None:
    """
    Delete what a stopped daemon left: images, containers, its folder.

    :param folder: what `start` was given
    """
    _end_shims(_namespace(folder))
    with contextlib.suppress(OSError):
        _remove_group(_group(folder))
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    inside = [line.split()[1] for line in mounts]
    for mount in sorted(inside, reverse=True):
        if Path(mount).is_relative_to(folder.resolve()):
            subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(folder)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Daemon]:
    """
    Keep a daemon for the length of a `with` block, and nothing of it afterwards.

    :param folder: see `start`
    """
    with contextlib.ExitStack() as stack:
        with held():  # what is started is known before anything may end this program
            daemon = start(folder)
            stack.callback(remove, folder)
            stack.callback(stop, daemon)
        yield daemon


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InputError(f"{folder}: others can open it; dockerd needs a folder of mode 0700")
    longest = folder / "run/containerd/containerd-debug.sock"
    if len(os.fsencode(longest)) > SOCKET_PATH_LIMIT:
        raise InputError(f"{folder}: too long a path for a socket; give a shorter one")
    return folder


def _options(folder: Path, live_restore: bool) -> list[str]:
    # The machine's own settings are for its own daemon.
    settings = folder / "daemon.json"
    settings.write_text("{}\n", encoding="utf-8")
    options = [
        f"--config-file={settings}",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/run",
        f"--pidfile={folder}/dockerd.pid",
        f"--host=unix://{folder}/docker.sock",
        # A containerd of the machine may be used, but no container of its own daemon seen.
        f"--containerd-namespace={_namespace(folder)}",
        f"--containerd-plugins-namespace={_namespace(folder)}-plugins",
        # Containers have no network, so the machine's is left alone.
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
        # Weights are written to plain cgroups.
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--log-level=warn",
        "--shutdown-timeout=5",
    ]
    return [*options, "--live-restore"] if live_restore else options


def _await_ready(ready: socket.socket, daemon: Daemon) -> None:
    ended = os.pidfd_open(daemon.process.pid)
    give_up_s = time.monotonic() + START_LIMIT_S
    try:
        while (left_s := give_up_s - time.monotonic()) > 0:
            events = await_readable([ready.fileno(), ended], left_s)
            if ended in events:
                raise InputError(f"dockerd: could not start: {_last_line(daemon.folder)}")
            if ready.fileno() in events and b"READY=1" in ready.recv(4096):
                return
        raise InputError(f"dockerd: not ready within {START_LIMIT_S:g} s")
    finally:
        os.close(ended)


def _group(folder: Path) -> JobGroup:
    """The control group of a daemon and all that it starts, but for the containers."""
    hierarchy = find_hierarchy()
    parent = hierarchy.group_of("self").parent
    return JobGroup(hierarchy, parent / f"{_namespace(folder)}-docker", WEIGHT[hierarchy.version])


def _make_light(daemon: Daemon) -> None:
    """Put a daemon and its containerd into a group that yields; without control groups, nothing."""
    with contextlib.suppress(OSError):
        group = _group(daemon.folder)
        group.create()
        group.set_weight(Weight.NORMAL)
        group.join(daemon.process.pid)
        if (containerd := _containerd(daemon.folder)) is not None:
            group.join(containerd)


def _remove_group(group: JobGroup) -> None:
    """Remove a group once the processes that are ending in it have ended."""
    for pid in members(group.hierarchy, group.path):
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            await_readable([ended], STOP_LIMIT_S)
            os.close(ended)
    group.remove()


def _last_line(folder: Path) -> str:
    log = folder / "dockerd.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it said nothing'} (all of it: {log})"


def _namespace(folder: Path) -> str:
    return f"coretide-{folder.stat().st_ino}"


def _end_shims(namespace: str) -> None:
    """A daemon that had to be killed leaves its containers behind, each held by a shim."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            program, *options = entry.read_bytes().split(b"\0")
            if b"containerd-shim" in program and namespace.encode() in options:
                shim = entry.parent
                # With its first process a container ends whole.
                for task in (shim / "task").iterdir():
                    for child in (task / "children").read_text(encoding="utf-8").split():
                        os.kill(int(child), signal.SIGKILL)
                os.kill(int(shim.name), signal.SIGKILL)


def _containerd(folder: Path) -> int | None:
    """The process of a daemon's own containerd, if it has one that runs."""
    pid_file = folder / "run/containerd/containerd.pid"
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text(encoding="utf-8"))
        # The number may have gone to somebody else.
        if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def _end_containerd(folder: Path) -> None:
    """A dockerd that had to be killed leaves its containerd behind."""
    if (pid := _containerd(folder)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
