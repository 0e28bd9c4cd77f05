"""
A memcached of our own: as nobody, on loopback, gone when it is no longer needed.

    with running(threads=2) as server:
        ...  # server.pid, server.host, server.port
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.linux.readiness import await_readable
from deploy.linux.signals import held
from env.errors import InputError

HOST = "127.0.0.1"
START_LIMIT_S = 10.0


@dataclass(frozen=True)
class Memcached:
    """A running memcached: where it listens, and its process."""

    host: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid


def find_memcached() -> Path:
    """
    The machine's own.

    :raises InputError: if it is not installed
    """
    program = shutil.which("memcached")
    if program is None:
        raise InputError("memcached: not found; install it: apt-get install memcached")
    return Path(program)


def start(threads: int, port: int = 0, memory_mib: int = 64) -> Memcached:
    """
    Start memcached and wait until it answers.

    :param threads: number of worker threads (`-t`)
    :param port: TCP port on loopback; 0 takes a free one
    :param memory_mib: size of the cache [MiB]
    :raises InputError: if it is not installed, or does not come up (a port that is in use)
    """
    program = find_memcached()
    port = port or free_port()
    command = [str(program), "-l", HOST, "-p", str(port), "-t", str(threads), "-m", str(memory_mib)]
    # In a session of its own: Ctrl-C in our terminal is for us alone.
    process = subprocess.Popen(
        [*command, "-u", "nobody"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        await_answer(process, port)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return Memcached(HOST, port, process)


def stop(server: Memcached) -> None:
    """
    End a memcached that `start` started.

    :param server: what `start` returned
    """
    # A cache has nothing to save, and when asked to end it takes a second.
    server.process.kill()
    server.process.wait()
    if server.process.stderr is not None:
        server.process.stderr.close()


@contextlib.contextmanager
def running(threads: int, port: int = 0) -> Iterator[Memcached]:
    """
    Keep a memcached for the length of a `with` block; see `start`.

    :param threads: number of worker threads
    :param port: TCP port on loopback; 0 takes a free one
    """
    with contextlib.ExitStack() as stack:
        with held():  # what is started is known before anything may end this program
            server = start(threads, port)
            stack.callback(stop, server)
        yield server


def answering_pid(host: str, port: int, limit_s: float = 1.0) -> int:
    """
    The process that serves an address, as memcached itself says.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param limit_s: how long it may take to answer [s]
    :raises OSError: if nobody answers, or not as memcached does
    """
    with socket.create_connection((host, port), limit_s) as connection:
        connection.sendall(b"stats\r\n")
        answer = b""
        while not answer.endswith(b"END\r\n"):
            part = connection.recv(65536)
            if not part or len(answer) > 65536:
                raise OSError(f"{host}:{port} does not answer as memcached does")
            answer += part
    for line in answer.splitlines():
        if line.startswith(b"STAT pid "):
            return int(line.split()[2])
    raise OSError(f"{host}:{port} does not answer as memcached does")


def free_port() -> int:
    """A TCP port on loopback that nobody holds at this moment."""
    with socket.create_server((HOST, 0)) as taken:
        return int(taken.getsockname()[1])


def await_answer(process: subprocess.Popen[bytes], port: int) -> None:
    """
    Connect until our own process answers; another one may hold the port.

    :param process: a memcached or its proxy, with a pipe for what it has to say
    :param port: TCP port on loopback that it was told to listen on
    :raises InputError: if it ends, or does not answer within `START_LIMIT_S`
    """
    await_server(process, port, "memcached", lambda: answering_pid(HOST, port) == process.pid)


def await_server(
    process: subprocess.Popen[bytes], port: int, name: str, serves: Callable[[], bool]
) -> None:
    """
    Wait until a process serves.

    :param process: just started, with a pipe for what it has to say
    :param port: TCP port on loopback that it was told to listen on
    :param name: what it is called in messages
    :param serves: whether it does; an `OSError` says that it does not yet
    :raises InputError: if it ends, or does not serve within `START_LIMIT_S`
    """
    ended = os.pidfd_open(process.pid)
    try:
        give_up_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(OSError):
                if serves():
                    return
            if await_readable([ended], 0.005):
                assert process.stderr is not None
                said = process.stderr.read().decode(errors="replace").split("\n")
                reason = next((line for line in said if "failed" in line), said[0])
                raise InputError(f"{name}: did not start on {HOST}:{port}: {reason}")
        raise InputError(f"{name}: no answer on {HOST}:{port} within {START_LIMIT_S:g} s")
    finally:
        os.close(ended)
