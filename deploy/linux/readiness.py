"""
Which files can be read: like `select`, but for file descriptors of any number.

`select.poll` would do but for its clock, which counts whole milliseconds: a poll of the loop or a
request of the probe would be late by half of one on average. ppoll(2) counts nanoseconds.
"""

import contextlib
import ctypes
import errno
import os
import select
import struct
import time
from collections.abc import Iterable

_FILE, _TIME = struct.Struct("@ihh"), struct.Struct("@ll")
"""The kernel's `struct pollfd` (file, events, found events) and `struct timespec`."""

_PPOLL = ctypes.CDLL(None, use_errno=True).ppoll
_PPOLL.argtypes = [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_void_p]


class Awaited:
    """
    Files that are awaited again and again: a wait costs the same for any number of them.

    :raises OSError: if there is no file descriptor left
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._files: list[int] = []
        self._table = _asked([self._epoll.fileno()])

    def replace(self, files: Iterable[int]) -> None:
        """
        Await these from now on, and no others.

        :param files: file descriptors; one that had been awaited may be another file's number now
        :raises OSError: if the kernel refuses
        """
        for file in self._files:
            with contextlib.suppress(OSError):  # it may be closed
                self._epoll.unregister(file)
        self._files = list(files)
        for file in self._files:
            self._epoll.register(file, select.EPOLLIN)

    def wait(self, timeout_s: float) -> list[int]:
        """
        Wait until something can be read, or has ended.

        :param timeout_s: the longest wait [s]
        :return: those that can be read without waiting
        :raises OSError: if the kernel refuses
        """
        if not _wait(self._table, 1, timeout_s):
            return []
        return [file for file, _ in self._epoll.poll(0.0)]

    def close(self) -> None:
        """Give the own file descriptor back."""
        self._epoll.close()


def await_readable(files: Iterable[int], timeout_s: float) -> list[int]:
    """
    Wait until something can be read, or has ended.

    :param files: file descriptors; none: time passes
    :param timeout_s: the longest wait [s]
    :return: those that can be read without waiting
    :raises OSError: if the kernel refuses
    """
    asked = list(files)
    table = _asked(asked)
    if not _wait(table, len(asked), timeout_s):
        return []
    return [file for file, _, events in _FILE.iter_unpack(table.raw) if events]


def _asked(files: Iterable[int]) -> ctypes.Array[ctypes.c_char]:
    """The table that ppoll(2) takes."""
    asked = b"".join([_FILE.pack(file, select.POLLIN, 0) for file in files])
    return ctypes.create_string_buffer(asked, len(asked))


def _wait(table: ctypes.Array[ctypes.c_char], count: int, timeout_s: float) -> bool:
    """Wait until one of a table's files can be read; whether one can."""
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, timeout_s)
        found: int = _PPOLL(table, count, _TIME.pack(int(left_s), int(left_s % 1.0 * 1e9)), None)
        if found >= 0:
            return found > 0
        fault = ctypes.get_errno()
        if fault != errno.EINTR:  # a signal; its handler has run by now
            raise OSError(fault, os.strerror(fault))
        timeout_s = end_s - time.monotonic()
