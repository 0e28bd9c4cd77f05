"""Real-time priority that a control group refuses: what the client then says does help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.linux.cgroups import JobGroup
from deploy.linux.helpers import helper_command
from deploy.linux.realtime import last_cpu
from deploy.records.mcperf import SPOILED

RUNTIME = "cpu.rt_runtime_us"


@pytest.fixture
def server() -> Iterator[memcached.Memcached]:
    if shutil.which("memcached") is None:
        pytest.skip("needs memcached")
    with memcached.running(threads=1) as started:
        yield started


@pytest.fixture
def group() -> Iterator[JobGroup]:
    """A group below the root one, which the kernel gives no real-time."""
    hierarchy = usable_hierarchy()
    parent = hierarchy and hierarchy.group_of("self")
    if not parent or not (hierarchy.folder(parent) / RUNTIME).exists():
        pytest.skip("needs root, cgroup version 1 and a kernel with RT_GROUP_SCHED")
    made = JobGroup(hierarchy, parent / f"coretide-realtime-{os.getpid()}", 0)
    made.create()
    yield made
    made.remove()


def probing(server: memcached.Memcached, group: JobGroup) -> tuple[str, int]:
    """A probe in a group: what it says of its priority, and the class that it runs in."""
    options = ("--raw", "--memcached", f"{server.host}:{server.port}", "--cpu", str(last_cpu()))
    probe = subprocess.Popen(
        helper_command("deploy.load.probe", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: group.join(os.getpid()),
    )
    assert probe.stdout is not None and probe.stderr is not None
    assert probe.stdout.read(16)  # it probes, with whatever priority it got
    found = os.sched_getscheduler(probe.pid)
    probe.kill()
    said = probe.stderr.read().decode()
    probe.communicate()
    return said, found


def test_a_refusal_says_what_to_do_and_that_helps(
    server: memcached.Memcached, group: JobGroup
) -> None:
    said, found = probing(server, group)
    assert found == os.SCHED_OTHER
    assert said.count("\n") == 1
    assert "[Errno" not in said
    assert "intervals that they spoil are marked" in said
    here, root = re.findall(r"echo (\S+) > (/\S+?)(?:,|;|$)", said)
    assert root == ("$$", str(group.hierarchy.mounts["cpu"] / "cgroup.procs"))
    value, file = here
    assert file == str(group.hierarchy.folder(group.path) / RUNTIME)
    Path(file).write_text(value, encoding="utf-8")
    assert probing(server, group) == ("", os.SCHED_FIFO)


def test_the_clients_own_delays_are_in_its_rows_where_priority_is_refused(
    server: memcached.Memcached, group: JobGroup
) -> None:
    options = ("--memcached", f"{server.host}:{server.port}", "--cpu", str(last_cpu()))
    options += ("--trace-seed", "1", "--qps-min", "5000", "--qps-max", "9000")
    others = [
        subprocess.Popen(["taskset", "-c", str(last_cpu()), "sh", "-c", "while :; do :; done"])
        for _ in range(4)
    ]
    for other in others:
        group.join(other.pid)
    try:
        load = subprocess.run(
            helper_command("deploy.load", *options, "--interval", "1", "--duration", "2"),
            capture_output=True,
            text=True,
            timeout=60.0,
            preexec_fn=lambda: group.join(os.getpid()),
            check=True,
        )
    finally:
        for other in others:
            other.kill()
            other.wait()
    rows = [line.split() for line in load.stdout.splitlines() if line.startswith("read")]
    assert len(rows) == 2
    assert [float(row[-1]) > 2.0 * SPOILED for row in rows] == [True, True], rows
    assert "2 of 2 intervals spoiled" in load.stderr
