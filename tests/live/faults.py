"""
`deploy.py` on a machine where something is broken: `python -m tests.live.faults FAULT options`.

Everything is real but for the one thing that the fault's name says.
"""

from __future__ import annotations

import errno
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import agents
from agents.policy import Policy
from deploy import assembly
from deploy.jobs import containers
from deploy.linux import stats_connection
from deploy.linux.cgroups import JobGroup
from deploy.loop import dry_run
from env.allocation import JobState

SCRIPT = Path(__file__).resolve().parents[2] / "deploy.py"
SEED = 5
BEGUN_S = time.monotonic()
WELL, ILL = 3.0, 0.3
"""Seconds of a spell of good readings, and of one of bad readings; it begins well."""


def broken(policy: Policy, happens: Callable[[], None]) -> Policy:
    """A policy to which something happens at its third decision and from then on."""
    sound, asked = policy.decide, iter(range(10**9))

    def do(telemetry: Any) -> Any:
        if next(asked) >= 2:
            happens()
        return sound(telemetry)

    policy.decide = do  # type: ignore[method-assign]
    return policy


def policy_fault(happens: Callable[[], None]) -> None:
    make = agents.make
    agents.make = lambda name: broken(make(name), happens)


def raises() -> None:
    raise ZeroDivisionError("oh")


def takes_5_s() -> None:
    time.sleep(5.0)


def is_stuck_in_c() -> None:
    """As code that never looks for signals, nor leaves its vCPU."""
    start_s, some = time.monotonic(), 1_000_000
    sum(repeat(0, some))
    sum(repeat(0, int(some * 3.0 / (time.monotonic() - start_s))))


def policy_pauses_everything() -> None:
    """It wants every job paused as soon as it runs, which is its right."""
    make = agents.make

    def pausing(name: Any) -> Policy:
        policy = make(name)
        sound = policy.decide

        def do(telemetry: Any) -> Any:
            wanted = sound(telemetry)
            jobs = {
                one: replace(job, state=JobState.PAUSED) if telemetry.jobs[one].cpu_s > 0.0 else job
                for one, job in wanted.jobs.items()
            }
            return replace(wanted, jobs=jobs)

        policy.decide = do  # type: ignore[method-assign]
        return policy

    agents.make = pausing


def unwell() -> bool:
    return (time.monotonic() - BEGUN_S) % (WELL + ILL) > WELL


def sensors_return_garbage() -> None:
    """Kernel and memcached answer now and then with anything, with nothing, or with the past."""
    rng = random.Random(SEED)
    read, past = os.pread, {}
    rubbish = [b"", b"-1 -1 -1", b"x y z", b"\xff" * 200, b"9" * 400, b"18446744073709551615 0 0"]

    def pread(file: int, size: int, offset: int) -> bytes:
        text = read(file, size, offset)
        first = past.setdefault(file, text)
        return rng.choice([*rubbish, first, text])[:size] if unwell() else text

    class Connection(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            text = super().recv(size, flags)
            words = [b"STAT pid 1\r\n", b"STAT cmd_get " + b"9" * 400 + b"\r\nEND\r\n", b"END\r\n"]
            return rng.choice([*words, b"\x00", text[:40], text]) if unwell() else text

    os.pread = pread
    stats_connection.socket.socket = Connection  # type: ignore[misc]


def sensors_go_back() -> None:
    """memcached's clocks and counters jump back once, and go on from there."""
    read, begun_s = os.pread, time.monotonic()
    number = stats_connection.number_in

    def pread(file: int, size: int, offset: int) -> bytes:
        text = read(file, size, offset)
        words = text.split()
        if len(words) == 3 and size == 80 and time.monotonic() - begun_s > 1.5:  # a schedstat
            return b"%d %d %s" % (int(words[0]) // 2, int(words[1]) // 2, words[2])
        return text

    def halved(answer: bytes, name: bytes) -> int:
        late = name.startswith(b"STAT cmd") and time.monotonic() - begun_s > 1.5
        return number(answer, name) // (2 if late else 1)

    os.pread = pread
    stats_connection.number_in = halved


def restoring_raises() -> None:
    def undo(*arguments: Any) -> list[str]:
        raise PermissionError("no")

    assembly.undo = undo


def groups_cannot_be_made() -> None:
    def create(group: JobGroup) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    JobGroup.create = create  # type: ignore[method-assign]


def docker_is_given_three_seconds() -> None:
    containers.CALL_LIMIT_S = 3


def dry_run_is_short() -> None:
    dry_run.LASTS_S = 2.0


FAULTS: dict[str, Callable[[], None]] = {
    "policy-raises": lambda: policy_fault(raises),
    "policy-takes-5-s": lambda: policy_fault(takes_5_s),
    "policy-is-stuck-in-c": lambda: policy_fault(is_stuck_in_c),
    "policy-pauses-everything": policy_pauses_everything,
    "sensors-return-garbage": sensors_return_garbage,
    "sensors-go-back": sensors_go_back,
    "restoring-raises": restoring_raises,
    "docker-hangs": docker_is_given_three_seconds,
    "dry-run-is-short": dry_run_is_short,
    "groups-cannot-be-made": groups_cannot_be_made,
}


def main() -> None:
    fault, *sys.argv[1:] = sys.argv[1:]
    FAULTS[fault]()
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
