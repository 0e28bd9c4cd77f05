"""The loop and its guardian go before all programs of normal priority, and nobody else does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.engines.memcached import Memcached
from deploy.linux import standing
from deploy.linux.service_process import thread_ids
from deploy.records.state import read_state
from tests.live.conftest import PATIENCE, Deployment, assert_as_found

LONG = ["sleep", "100"]


@pytest.fixture(autouse=True)
def allowed() -> None:
    try:
        standing.go_first()
    except OSError:
        pytest.skip("needs real-time priority")
    standing.step_back()


def await_class(pid: int, wanted: int) -> None:
    give_up_s = time.monotonic() + 5.0 * PATIENCE
    while os.sched_getscheduler(pid) != wanted:
        assert time.monotonic() < give_up_s, os.sched_getscheduler(pid)
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in thread_ids(pid)
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    ]


def test_loop_and_guardian_go_first_and_nobody_else(
    deploy: Callable[..., Deployment],
    server: Memcached,
    scenario_file: Callable[..., Path],
    groups_file: Path,
) -> None:
    scenario = scenario_file(dedup=LONG, radix=LONG)
    run = deploy("--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process")
    run.expect(r"radix start \[")
    loop = run.process.pid
    assert os.sched_getscheduler(loop) == standing.AHEAD
    assert os.sched_getparam(loop).sched_priority == standing.SCHEDULER
    for thread in thread_ids(loop):
        await_class(thread, standing.AHEAD)
    state = read_state(run.state)
    assert state is not None
    jobs = {int(job.key.partition("-")[0]) for job in state.jobs.values()}
    assert len(jobs) == 2
    started = set(children(loop))
    assert jobs <= started
    (guardian,) = started - jobs
    assert os.sched_getscheduler(guardian) == standing.AHEAD
    for pid in jobs:
        assert os.sched_getscheduler(pid) in (os.SCHED_OTHER, os.SCHED_IDLE)
    for thread in thread_ids(server.pid):  # memcached may go before the jobs, not before the loop
        assert os.sched_getparam(thread).sched_priority < standing.SCHEDULER


@pytest.mark.survival
def test_a_loop_that_never_rests_loses_its_priority_until_it_is_back(
    deploy: Callable[..., Deployment],
    server: Memcached,
    scenario_file: Callable[..., Path],
    groups_file: Path,
) -> None:
    run = deploy(
        *("--policy", str(groups_file), "--runtime", "process"),
        *("--scenario", str(scenario_file(dedup=["sleep", "6"], radix=["sleep", "7"]))),
        program=("-m", "tests.live.faults", "policy-is-stuck-in-c"),
    )
    run.expect("guardian: memcached has its vCPUs back")
    await_class(run.process.pid, os.SCHED_OTHER)
    run.expect("away for")
    await_class(run.process.pid, standing.AHEAD)
    assert run.finish() == 0, run.lines
    assert_as_found(server, run)
