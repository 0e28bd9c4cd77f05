"""A tracepoint's perf event is no longer sampled, and its BPF program still runs."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.linux.perf_events import file_of, stop_sampling
from deploy.tap import tracer

pytestmark = pytest.mark.skipif(tracer.why_not() != "", reason=f"no tap: {tracer.why_not()}")

PROGRAM = """
tracepoint:sock:sock_send_length { @sent = @sent + 1; }
interval:ms:100 { printf("%d\\n", @sent); }
"""


@pytest.fixture
def tracing() -> Iterator[subprocess.Popen[str]]:
    """A bpftrace that says how much was sent, every 100 ms."""
    command = ["bpftrace", "-q", "-B", "line", "-e", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def sent(tracing: subprocess.Popen[str]) -> int:
    """What it says next."""
    assert tracing.stdout is not None
    return int(tracing.stdout.readline())


def sampled(tracing: subprocess.Popen[str]) -> list[int]:
    """The counters of its perf events, by their files."""
    process, counts = os.pidfd_open(tracing.pid), []
    for path in sorted(Path(f"/proc/{tracing.pid}/fd").iterdir()):
        if str(path.readlink()) == "anon_inode:[perf_event]":
            event = file_of(process, int(path.name))
            counts.append(int.from_bytes(os.read(event, 8), "little"))
            os.close(event)
    os.close(process)
    return counts


def send(count: int) -> None:
    """Send on the vCPU that perf events are of."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    try:
        one, other = socket.socketpair()
        with one, other:
            for _ in range(count):
                one.send(b"x")
                other.recv(1)
    finally:
        os.sched_setaffinity(0, allowed)


def test_programs_run_and_nobody_is_woken(tracing: subprocess.Popen[str]) -> None:
    sent(tracing)
    before = sampled(tracing)
    send(1000)
    grown = [late - early for early, late in zip(before, sampled(tracing), strict=True)]
    # Timers count nanoseconds, and come by every 100 ms.
    (event,) = (place for place, count in enumerate(grown) if 1000 <= count < 1_000_000)

    assert stop_sampling(tracing.pid) == 1
    sent(tracing)
    counted, before = sent(tracing), sampled(tracing)
    send(5000)
    sent(tracing)
    assert sent(tracing) >= counted + 5000
    assert sampled(tracing)[event] == before[event]


def test_a_process_that_is_gone_is_said() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        with pytest.raises(OSError, match="No such process"):
            stop_sampling(process.pid)
