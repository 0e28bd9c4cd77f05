"""memcached's threads on its vCPUs: its workers each on its own part, all others on all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.engines.memcached import Memcached
from deploy.linux.service_process import affinities, identify, is_pinned, pin, restore, thread_ids

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two vCPUs")

BOTH = tuple(sorted(os.sched_getaffinity(0)))[:2]


def held_by_name(pid: int) -> dict[str, list[tuple[int, ...]]]:
    """The vCPUs of threads, by what memcached calls them."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for thread, cores in sorted(affinities(pid).items()):
        name = Path(f"/proc/{pid}/task/{thread}/comm").read_text(encoding="utf-8").strip()
        found.setdefault(name, []).append(cores)
    return found


def test_workers_get_a_vcpu_each_and_the_other_threads_all(server: Memcached) -> None:
    first, second = BOTH
    pin(server.pid, BOTH)
    found = held_by_name(server.pid)
    assert found.pop("mc-worker") == [(first,), (second,)]
    assert {cores for others in found.values() for cores in others} == {BOTH}
    pin(server.pid, (first,))
    assert set(affinities(server.pid).values()) == {(first,)}


def test_a_worker_that_somebody_moves_is_noticed(server: Memcached) -> None:
    pin(server.pid, BOTH)
    assert is_pinned(server.pid, BOTH) and not is_pinned(server.pid, BOTH[:1])
    for thread in thread_ids(server.pid):
        os.sched_setaffinity(thread, BOTH)  # as a control group does that is written to
    assert not is_pinned(server.pid, BOTH)


def test_what_was_there_before_comes_back(server: Memcached) -> None:
    before = affinities(server.pid)
    pin(server.pid, BOTH)
    restore(identify(server.pid), before)
    assert affinities(server.pid) == before


def test_a_program_whose_threads_have_no_names_has_all_vcpus() -> None:
    threads = "import threading; [threading.Thread(target=input).start() for _ in range(2)]"
    command = [sys.executable, "-c", f"{threads}; print(flush=True)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pin(process.pid, BOTH)
        assert set(affinities(process.pid).values()) == {BOTH}
        process.kill()
