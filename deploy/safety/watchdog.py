"""What systemd wants to hear from a service: that it is ready, and then that it lives."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False  # the guardian has this file and no use for half a MiB of `socket`
if TYPE_CHECKING:
    import socket


class Watchdog:
    """
    Talks to systemd where it listens (`Type=notify`, `WatchdogSec`), and to nobody elsewhere.

    The address is taken out of the environment, so that programs we start do not answer for us.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        # Half the time systemd waits, in its own unit.
        self._every_s = int(os.environ.pop("WATCHDOG_USEC", "0")) / 2e6
        self._due_s = 0.0
        self._socket: socket.socket | None = None
        if address:
            import socket

            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            with contextlib.suppress(OSError):
                self._socket.connect(address.replace("@", "\0", 1))
            self._say(b"READY=1")

    def beat(self, now_s: float) -> None:
        """
        Say that the loop is alive; to be called at every poll.

        :param now_s: on any clock that never goes back [s]
        """
        if self._socket is not None and self._every_s and now_s >= self._due_s:
            self._due_s = now_s + self._every_s
            self._say(b"WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the service is ending: from now on nobody waits for a beat."""
        if self._socket is not None:
            self._say(b"STOPPING=1")

    def _say(self, message: bytes) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.send(message)
