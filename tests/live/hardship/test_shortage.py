"""Jobs and clients that take all there is: processes, memory, memcached's connections."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.jobs.runtimes import PIDS_LIMIT
from deploy.linux import standing
from deploy.linux.cgroups import JobGroup, find_groups
from tests.live.conftest import (
    PATIENCE,
    ROOT,
    Deployment,
    assert_as_found,
    needs_docker,
    needs_groups,
    started_as,
)

FORKS = 4 * PIDS_LIMIT
WIDE = f"i=0; while [ $i -lt {FORKS} ]; do sleep 9 & i=$((i+1)); done; sleep 9"
"""Forks far beyond what is allowed, and waits."""

HOARD = (
    "i=0; while [ $i -lt 150 ]; do (head -c 8000000 /dev/zero; sleep 9) | tail -c 8000000 "
    "> /dev/null & i=$((i+1)); done; wait"
)
"""150 processes of 8 MB: each is smaller than the loop."""


def score_adjustment(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def children(pid: int) -> list[int]:
    """All that descends from a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.survival
@pytest.mark.parametrize("runtime", ["process", pytest.param("docker", marks=needs_docker)])
@needs_groups
def test_a_wide_fork_bomb_is_limited_and_ended(
    deploy, server, scenario_file, groups_file, request, runtime
):
    scenario = scenario_file(dedup=["sh", "-c", WIDE], radix=["sleep", "2"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", runtime]
    if runtime == "docker":
        options += ["--docker", request.getfixturevalue("docker_daemon").url]
    run = deploy(*options)
    run.expect(r"dedup start \[", 40.0)
    most, give_up_s = 0, time.monotonic() + 60.0 * PATIENCE
    groups = Path("/sys/fs/cgroup")
    while run.count("radix end") == 0 or most <= PIDS_LIMIT // 2:  # a busy machine forks slowly
        assert time.monotonic() < give_up_s, (most, run.lines)
        for group in find_groups(groups, f"coretide-{run.nonce}-dedup"):
            for folder in (group, *find_groups(group, "")):
                with contextlib.suppress(OSError):  # not every hierarchy counts processes
                    most = max(most, int((folder / "pids.current").read_text()))
        if run._next(0.05) is None and run.process.poll() is not None:
            break
    assert PIDS_LIMIT // 2 < most <= PIDS_LIMIT, (most, run.lines)
    run.process.terminate()
    run.finish(40.0)
    assert_as_found(server, run)
    assert run.count("the loop is silent") == 0, "\n".join(run.lines)


def may_spare() -> bool:
    """Whether this user may; root may not everywhere."""
    program = "from deploy.linux import standing; standing.spare(); print(standing._now())"
    said = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    return int(said) == standing.SPARED


def test_the_kernel_takes_a_job_before_what_serves(deploy, server, scenario_file, groups_file):
    scenario = scenario_file(dedup=["sleep", "9"], radix=["sleep", "9"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--probe"]
    run = deploy(*options, "--runtime", "process")
    run.expect(r"radix start \[")
    adjusted = {pid: score_adjustment(pid) for pid in (run.process.pid, *children(run.process.pid))}
    serves = {pid for pid in adjusted if "deploy.py" in name_of(pid) or "--raw" in name_of(pid)}
    assert len(serves) == 3  # the loop, its guardian, the probe
    assert {adjusted[pid] for pid in serves} == {standing.SPARED if may_spare() else 0}
    jobs = adjusted.keys() - serves
    assert len(jobs) >= 4
    assert {adjusted[pid] for pid in jobs} == {standing.KILLED_FIRST}
    assert score_adjustment(os.getpid()) == 0


@needs_groups
@pytest.mark.survival
def test_memory_that_runs_out_costs_the_job_that_took_it_and_not_the_loop(
    deploy, server, scenario_file, groups_file
):
    hierarchy = usable_hierarchy()
    if hierarchy.version != 1 or "memory" not in hierarchy.mounts:
        pytest.skip("jobs are in groups apart from the loop's there")
    group = JobGroup(hierarchy, PurePosixPath(f"/coretide-test-memory-{os.getpid()}"), 0)
    folder = hierarchy.folder(group.path, "memory")
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text("400M")
        scenario = scenario_file(dedup=["sh", "-c", HOARD], radix=["sleep", "4"])
        options = ["--policy", str(groups_file), "--scenario", str(scenario)]
        run = deploy(*options, "--runtime", "process")
        (folder / "cgroup.procs").write_text(str(run.process.pid))
        run.expect("s  radix end", 40.0)
        run.process.terminate()
        run.finish(40.0)
        killed = (folder / "memory.oom_control").read_text().split("oom_kill ")[1]
        assert int(killed) > 0
        assert_as_found(server, run)
    finally:
        run.close()
        give_up_s = time.monotonic() + 10.0 * PATIENCE
        while group.exists() and time.monotonic() < give_up_s:
            group.remove()
            time.sleep(0.05)


def fill(server: memcached.Memcached, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    return [socket.create_connection((server.host, server.port), 1.0) for _ in range(count)]


@pytest.mark.survival
@pytest.mark.parametrize("count", [200, 3000])
def test_clients_that_take_all_of_memcacheds_connections_cost_no_job(
    tmp_path, scenario_file, groups_file, count
):
    few = ("-u", "nobody", "-c", "100")
    with started_as(last=few) as server, contextlib.ExitStack() as stack:
        scenario = scenario_file(dedup=["sleep", "2"], radix=["sleep", "2"])
        options = ["--policy", str(groups_file), "--scenario", str(scenario), "--probe"]
        run = Deployment(tmp_path, server, *options, "--runtime", "process")
        stack.callback(run.close)
        run.expect(r"dedup start \[")
        for client in fill(server, count):
            stack.callback(client.close)
        assert run.finish() == 0, run.lines
        assert run.count("fallback decides") == 0, run.lines
        for client in fill(server, 30):  # the places of the loop and its probe, too
            stack.callback(client.close)
        late = Deployment(tmp_path, server, *options, "--runtime", "process")
        stack.callback(late.close)
        assert late.finish() == 2
        assert len(late.lines) == 1, late.lines
        assert "no memcached of this machine answers there" in late.lines[0]
        assert_as_found(server, run)
