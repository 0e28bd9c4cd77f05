"""
Lines for whoever watches: a full disk or a stopped terminal may lose them, and not stop the loop.

They are written past Python's buffers, which keep what was refused and fail with it at the end.
"""

import contextlib
import os
import select
import sys

OUT, ERROR = 1, 2


def say(line: str) -> None:
    """
    Print a line.

    :param line: what to say
    """
    write(OUT, line)


def complain(line: str) -> None:
    """
    Print a line on stderr.

    :param line: what is wrong
    """
    write(ERROR, f"coretide: {line}")


def printable(said: str) -> str:
    """
    Words that may come from a job, without any effect on the terminal.

    :param said: the words
    """
    return "".join(one if one.isprintable() else "�" for one in said)


def write(file: int, line: str) -> None:
    """
    Write a line if there is room for it now, without ever waiting; it is cut at 4096 bytes.

    :param file: `OUT` or `ERROR`
    :param line: the words
    """
    if (sys.__stdout__ if file == OUT else sys.__stderr__) is None:
        return  # whoever started us had closed it: another file has its number by now
    text = printable(line).encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n"
    with contextlib.suppress(OSError):
        own = _reopened(file) if os.isatty(file) else os.dup(file)
        try:
            ready = select.poll()
            ready.register(own, select.POLLOUT)
            if ready.poll(0):  # up to `PIPE_BUF` bytes then fit
                os.write(own, text)
        finally:
            os.close(own)


def _reopened(terminal: int) -> int:
    """A terminal takes a part of a line and then waits, unless a file of our own says otherwise."""
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{terminal}", flags)
    except PermissionError:  # that of a user we were before
        return os.dup(terminal)
