"""
Does background work yield? An experiment of a second beside a memcached that serves.

Endless processes of ours run in the background on memcached's vCPUs every other eighth of a second,
while we ask it one question after the other. What its threads then wait for a vCPU is compared.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from deploy.jobs.placement import TaskPlacement
from deploy.linux.cgroups import JobGroup
from deploy.linux.sensors import ThreadClock
from deploy.linux.service_process import Identity, affinities
from env.allocation import Weight

PAIRS, SLICE_S = 4, 0.125
SETTLE_S = 0.01
"""Until the processes have noticed that they are to go, or to rest."""

PATIENCE_S = 2.0
CONNECTIONS = 4
"""memcached deals them out among its worker threads."""

SPIN = """
import os, select
ready = select.poll()
ready.register(0, select.POLLIN)
while os.read(0, 1):
    while not ready.poll(0):
        for _ in range(9999):
            pass
    os.read(0, 1)
"""
"""Works from one byte to the next, and ends with whoever holds the pipe, however that ends."""


LARGEST_RATIO, LARGEST_RISE = 1.5, 0.3
"""What background work may make of memcached's run delay, or add to it [s per CPU second]; work of
memcached's own weight adds 0.5 to 1."""


@dataclass(frozen=True)
class RunDelay:
    """memcached's run delay [s per CPU second] alone, and beside background work."""

    alone: float
    beside: float

    @property
    def small(self) -> bool:
        """Whether background work yields: beside it memcached hardly waits longer."""
        return self.beside < max(LARGEST_RATIO * self.alone, self.alone + LARGEST_RISE)


def run_delay(who: Identity, address: tuple[str, int], group: JobGroup | None) -> RunDelay:
    """
    Measure memcached's run delay with and without background work on its vCPUs.

    :param who: memcached
    :param address: its socket's address
    :param group: one in the background, where jobs would live; None: threads are put there instead
    :raises OSError: if nothing can be put into the background, or memcached does not answer
    """
    may = os.sched_getaffinity(0)
    cores = may.intersection(*map(set, affinities(who.pid).values())) or may
    with contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, may - cores or may)  # our questions keep memcached waiting, too
        stack.callback(os.sched_setaffinity, 0, may)
        pipes = [stack.enter_context(_spinner(core, group)) for core in cores]
        clock = ThreadClock(who, time.monotonic())
        stack.callback(clock.close)
        connections = [
            stack.enter_context(socket.create_connection(address, PATIENCE_S))
            for _ in range(CONNECTIONS)
        ]
        delays: list[float] = []
        _ask(clock, connections, SLICE_S)  # the first answers take longest
        for _ in range(2 * PAIRS):
            delays.append(_ask(clock, connections, SLICE_S))
            for pipe in pipes:
                os.write(pipe, b".")
            _ask(clock, connections, SETTLE_S)
    return RunDelay(median(delays[::2]), median(delays[1::2]))


def _ask(clock: ThreadClock, connections: Sequence[socket.socket], length_s: float) -> float:
    """Ask memcached one question after the other; its run delay meanwhile [s per CPU second]."""
    start_s = time.monotonic()
    before = clock.read(start_s)
    while (now_s := time.monotonic()) < start_s + length_s:
        for connection in connections:
            connection.sendall(b"version\r\n")
            if not connection.recv(256):
                raise OSError("memcached hangs up")
    after = clock.read(now_s)
    return (after.run_delay_s - before.run_delay_s) / max(1e-9, after.cpu_s - before.cpu_s)


def spinner_command() -> list[str]:
    """What a spinner runs, isolated from the current folder, which may be anybody's."""
    return [sys.executable, "-I", "-S", "-c", SPIN]


@contextlib.contextmanager
def _spinner(core: int, group: JobGroup | None) -> Iterator[int]:
    """A process in the background, resting at first; yields the pipe that tells it to go on."""
    with subprocess.Popen(
        spinner_command(), stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            if group is not None:
                group.join(process.pid)
            else:
                TaskPlacement(process.pid).set_weight(Weight.BACKGROUND)
            os.sched_setaffinity(process.pid, {core})
            assert process.stdin is not None
            yield process.stdin.fileno()
        finally:
            process.kill()
