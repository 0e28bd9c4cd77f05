"""
What asks a program to end, and how it does so without leaving anything behind.

The guardian uses this file: what it does not need of the standard library is imported late.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h."""


@contextlib.contextmanager
def held() -> Iterator[None]:
    """
    Hold back what asks this program to end, for a short while that must not be broken off.

    In another thread than the main one nothing is to be held: signals are the main one's to answer.
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


def interrupt_on_stop() -> None:
    """Turn what asks this program to end into a `KeyboardInterrupt(number)` from now on."""
    for number in STOPPING:
        signal.signal(number, _interrupt)


def end_with(starter: int) -> None:
    """
    Have the kernel end this process with the one that started it, even by `kill -9`.

    What changes its user afterwards is no longer ended.

    :param starter: the process that started it
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:  # it was too late for that
        os._exit(1)


def _interrupt(number: int, frame: object) -> None:
    """Only once: a second signal must not keep a program from stopping what it started."""
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)
