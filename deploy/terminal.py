"""
Lines for whoever watches. They may be lost to a full disk or a closed pipe; the loop may not.

They are written past Python's buffers, which keep what was refused and fail with it at the end.
"""

import contextlib
import os

OUT, ERROR = 1, 2


def say(line: str) -> None:
    """
    Print a line.

    :param line: what to say
    """
    _write(OUT, line)


def complain(line: str) -> None:
    """
    Print a line on stderr.

    :param line: what is wrong
    """
    _write(ERROR, f"coretide: {line}")


def printable(said: str) -> str:
    """
    Words that may come from a job, without any effect on the terminal.

    :param said: the words
    """
    return "".join(one if one.isprintable() else "�" for one in said)


def _write(file: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(file, f"{printable(line)}\n".encode(errors="replace"))
