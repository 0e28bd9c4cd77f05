"""
Whom the kernel kills first when the machine's memory runs out: a job, and the loop last of all.

The guardian uses this file: it needs the standard library alone.
"""

import contextlib
from pathlib import Path

SPARED, FIRST = -900, 500
"""What the kernel adds to the thousandths of the memory that a process takes."""


def spare() -> None:
    """Protect this process and what it forks; without the right to, nothing changes."""
    with contextlib.suppress(OSError):
        _write("self", SPARED)


def sacrifice(pid: int) -> None:
    """
    Have a job die before those that serve.

    :param pid: its first process, before it has started others
    :raises OSError: if it is gone
    """
    _write(pid, FIRST)


def expose() -> None:
    """Take the protection from this process, which has it from its parent."""
    with contextlib.suppress(OSError):
        if _now() < 0:
            _write("self", 0)


def _now() -> int:
    return int(_file("self").read_text(encoding="utf-8"))


def _file(whose: int | str) -> Path:
    return Path(f"/proc/{whose}/oom_score_adj")


def _write(whose: int | str, adjustment: int) -> None:
    _file(whose).write_text(str(adjustment), encoding="utf-8")
