"""Waiting for files, whatever their numbers."""

from __future__ import annotations

import ast
import os
import resource
import signal
import time

import pytest

from deploy.linux.helpers import INSTALLATION
from deploy.linux.readiness import Awaited, await_readable


def test_what_can_be_read_or_has_ended_is_named() -> None:
    (silent, kept), (full, other), (ended, gone) = os.pipe(), os.pipe(), os.pipe()
    os.write(other, b".")
    os.close(gone)
    assert await_readable([silent, full, ended], 10.0) == [full, ended]
    for file in (silent, kept, full, other, ended):
        os.close(file)


@pytest.mark.parametrize("files", [0, 1])
def test_a_wait_is_as_long_as_it_should_be_also_below_a_millisecond(files: int) -> None:
    pipe = os.pipe()
    took_s = []
    for _ in range(50):
        before_s = time.monotonic()
        assert await_readable(pipe[:files], 0.0002) == []
        took_s.append(time.monotonic() - before_s)
    assert 0.0002 <= min(took_s) < 0.001
    assert await_readable(pipe[:files], -1.0) == []
    for file in pipe:
        os.close(file)


def test_what_is_awaited_again_and_again_may_be_replaced_also_by_files_of_the_same_numbers() -> (
    None
):
    awaited, (full, other) = Awaited(), os.pipe()
    os.write(other, b".")
    awaited.replace([full])
    assert awaited.wait(10.0) == awaited.wait(10.0) == [full]
    os.close(full)
    silent, kept = os.pipe()  # the lowest numbers that are free
    assert silent == full
    awaited.replace([silent])
    assert awaited.wait(0.001) == []
    os.write(kept, b".")
    assert awaited.wait(10.0) == [silent]
    awaited.replace([])
    assert awaited.wait(0.001) == []
    awaited.close()
    for file in (silent, kept, other):
        os.close(file)


def test_a_signal_does_not_end_the_wait() -> None:
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        begun_s = time.monotonic()
        assert await_readable([], 0.1) == []
        assert seen and time.monotonic() - begun_s >= 0.1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_files_may_have_numbers_that_select_cannot_name() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    pipe = os.pipe()
    high = 1500
    try:
        os.dup2(pipe[0], high)
        os.write(pipe[1], b".")
        assert await_readable([high], 10.0) == [high]
    finally:
        for file in (*pipe, high):
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("package", ["deploy", "training", "benchmarks"])
def test_nothing_that_runs_beside_others_uses_select(package: str) -> None:
    for path in (INSTALLATION / package).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls = {ast.unparse(node) for node in ast.walk(ast.parse(text))}
        assert not calls & {"select.select", "from select import select"}, path
