"""memcached goes before other programs while a deployment lasts, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.jobs.precedence import HEAVIEST, NICE, SWITCH, TIMES, put_back, put_first, weighed
from deploy.linux.cgroups import DEFAULT_WEIGHT, JobGroup
from deploy.linux.service_process import identify
from env.errors import InputError
from tests.live.conftest import PATIENCE, Deployment, needs_groups
from tests.live.test_weights import over

ENDLESS = [sys.executable, "-S", "-c", "while True: pass"]
LONG = ["sleep", "60"]
CORE = {max(os.sched_getaffinity(0))}

pytestmark = needs_groups


def require_sessions():
    if not SWITCH.exists() or SWITCH.read_text().strip() != "1":
        pytest.skip("the kernel does not tell sessions apart here")


@pytest.fixture(params=["session", "control group"])
def place(request):
    """Takes a process, and puts it into a control group of its own where that is asked for."""
    groups = []

    def put(pid):
        if request.param == "session":
            require_sessions()
            return
        hierarchy = usable_hierarchy()
        weight = DEFAULT_WEIGHT[hierarchy.version]
        group = JobGroup(hierarchy, PurePosixPath(f"/coretide-test-{os.getpid()}"), weight)
        groups.append(group)
        group.create()
        group.weight_file.write_text(str(weight))
        group.join(pid)

    yield put
    for group in groups:
        group.remove()


@pytest.fixture
def spinner():
    """Starts processes that want a vCPU for ever, the same for all, each in its own session."""
    started = []

    def start():
        started.append(subprocess.Popen(ENDLESS, start_new_session=True))
        os.sched_setaffinity(started[-1].pid, CORE)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def now(pid):
    """What a process' own group weighs."""
    return weighed(pid, usable_hierarchy(), {pid})


def lifted(found):
    """What it weighs once it goes before others."""
    if found.group.startswith("/autogroup"):
        return NICE
    return min(TIMES * found.before, HEAVIEST[Path(found.group).name])


def test_the_first_gets_most_of_a_vcpu_that_another_program_wants_and_half_of_it_after(
    spinner, place
):
    first = spinner()
    place(first.pid)
    other = spinner()
    found = now(first.pid)

    def share():
        (own_s, _), (others_s, _) = over(0.6, first, other)
        return own_s / (own_s + others_s)

    put_first(first.pid, found)
    assert now(first.pid).before == lifted(found)
    assert share() > 0.8
    assert put_back(identify(first.pid), found) == ""
    assert now(first.pid) == found
    assert 0.3 < share() < 0.7


def test_a_group_that_others_share_is_left_alone(spinner, place):
    first = spinner()
    place(first.pid)
    hierarchy = usable_hierarchy()
    if hierarchy.group_of(first.pid) == PurePosixPath("/"):
        code = "import subprocess, sys; subprocess.Popen(['sleep', '60']).wait()"
        first = subprocess.Popen(
            [sys.executable, "-S", "-c", code], start_new_session=True, stdout=subprocess.DEVNULL
        )
        while not (children := Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text()):
            assert first.poll() is None
        stranger = int(children)
    else:
        stranger = spinner().pid
        JobGroup(hierarchy, hierarchy.group_of(first.pid), 0).join(stranger)
    try:
        with pytest.raises(InputError, match=f"holds other programs, too: process {stranger}"):
            now(first.pid)
        assert weighed(first.pid, hierarchy, {first.pid, stranger})
    finally:
        for pid in (stranger, first.pid):
            os.kill(pid, 9)
        first.wait()


def test_one_that_is_gone_has_nothing_to_be_put_back(spinner):
    require_sessions()
    first = spinner()
    who, found = identify(first.pid), now(first.pid)
    first.kill()
    first.wait()
    assert put_back(who, found) == ""


@pytest.mark.parametrize("end", ["asked to stop", "restored", "resumed"])
def test_a_deployment_puts_memcached_first_and_back(
    deploy, server, place, scenario_file, groups_file, end
):
    place(server.pid)
    found = now(server.pid)
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options)
    run.expect(r"dedup start \[")
    assert now(server.pid).before == lifted(found)
    if end != "asked to stop":
        run.kill()
        run = deploy(*options, "--resume") if end == "resumed" else deploy("--restore")
    if end == "resumed":
        run.expect(r"update_cores \[0\]$")
        assert now(server.pid).before == lifted(found)
    if end != "restored":
        run.process.terminate()
    run.finish()
    assert now(server.pid) == found


def test_a_memcached_that_starts_anew_goes_first_too(tmp_path, scenario_file, groups_file):
    require_sessions()
    first = memcached.start(threads=2)
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = Deployment(tmp_path, first, *options)
    try:
        run.expect(r"update_cores \[0\]$")
        memcached.stop(first)
        run.expect("the fallback decides")
        second = memcached.start(threads=2, port=first.port)
        try:
            run.expect("decides again")
            give_up_s = time.monotonic() + 5.0 * PATIENCE
            while now(second.pid).before != NICE:
                assert time.monotonic() < give_up_s, run.lines
                time.sleep(0.02)
            run.process.terminate()
            run.finish()
            assert now(second.pid).before == 0
        finally:
            memcached.stop(second)
    finally:
        run.close()
