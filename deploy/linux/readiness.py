"""
Which files can be read: like `select`, but for file descriptors of any number.

`select.poll` would do but for its clock, which counts whole milliseconds: a poll of the loop or a
request of the probe would be late by half of one on average. ppoll(2) counts nanoseconds.
"""

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


def await_readable(files: Iterable[int], timeout_s: float) -> list[int]:
    """
    Wait until something can be read, or has ended.

    :param files: file descriptors; none: time passes
    :param timeout_s: the longest wait [s]
    :return: those that can be read without waiting
    :raises OSError: if the kernel refuses
    """
    asked = b"".join([_FILE.pack(file, select.POLLIN, 0) for file in files])
    table = ctypes.create_string_buffer(asked, len(asked))
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, timeout_s)
        limit = _TIME.pack(int(left_s), int(left_s % 1.0 * 1e9))
        found = _PPOLL(table, len(asked) // _FILE.size, limit, None)
        if found == 0:
            return []
        if found > 0:
            return [file for file, _, events in _FILE.iter_unpack(table.raw) if events]
        fault = ctypes.get_errno()
        if fault != errno.EINTR:  # a signal; its handler has run by now
            raise OSError(fault, os.strerror(fault))
        timeout_s = end_s - time.monotonic()
