"""A Docker daemon that hangs in one of its calls: a socket between us and a real one."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

CALLS = {
    "create": rb"POST /v[\d.]+/containers/create",
    "start": rb"POST /v[\d.]+/containers/[^/]+/start",
    "inspect": rb"GET /v[\d.]+/containers/[^/]+/json",
    "wait": rb"POST /v[\d.]+/containers/[^/]+/wait",
    "logs": rb"GET /v[\d.]+/containers/[^/]+/logs",
    "remove": rb"DELETE /v[\d.]+/containers/",
    "list": rb"GET /v[\d.]+/containers/json",
}


class HangingDocker:
    """
    Forwards everything, but keeps the requests of a call until `release`; they are then done late.

    :param path: of the socket to listen at
    :param daemon: the real daemon's
    :param call: of `CALLS`
    """

    def __init__(self, path: Path, daemon: Path, call: str):
        self.url = f"unix://{path}"
        self.hung = threading.Event()
        self._released = threading.Event()
        self._wanted = re.compile(CALLS[call])
        self._daemon = daemon
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def release(self) -> None:
        """Go on, with what was kept first."""
        self._released.set()

    def close(self) -> None:
        """Answer nobody any more."""
        self.release()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._daemon))
            other = {client: server, server: client}
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    part = ready.recv(65536)
                    if ready is client and self._wanted.match(part):
                        self.hung.set()
                        self._released.wait()
                    if not part:
                        return
                    other[ready].sendall(part)


@contextlib.contextmanager
def hanging(folder: Path, url: str, call: str) -> Iterator[HangingDocker]:
    """
    A daemon that hangs, for the length of a `with` block.

    :param folder: of the socket; its path must be short
    :param url: the real daemon's address
    :param call: of `CALLS`
    """
    proxy = HangingDocker(folder / f"{call}.sock", Path(url.removeprefix("unix://")), call)
    try:
        yield proxy
    finally:
        proxy.close()
