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
from deploy.jobs import precedence
from deploy.jobs.precedence import (
    CLASS,
    HEAVIEST,
    NICE,
    SLACK_NS,
    SWITCH,
    TIDIES,
    TIMES,
    in_words,
    put_back,
    put_first,
    weighed,
)
from deploy.jobs.runtimes import ProcessRuntime
from deploy.linux.cgroups import DEFAULT_WEIGHT, JobGroup
from deploy.linux.service_process import identify, thread_ids
from deploy.records.state import State, StateFolder, service_record
from deploy.safety.restore import undo
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


@pytest.fixture
def refused(monkeypatch):
    """As on a kernel that lets memcached's group have no real-time class."""
    monkeypatch.setattr(precedence, "by_class", lambda pid: None)


def found_at(pid):
    """How a process stands that has not been put first."""
    return weighed(pid, usable_hierarchy(), {pid})


def tidying(pid):
    """The threads whose work no request waits for, each with its class and its slack [ns]."""
    return {
        thread: (
            os.sched_getscheduler(thread),
            int(Path(f"/proc/{thread}/timerslack_ns").read_text()),
        )
        for thread in thread_ids(pid)
        if Path(f"/proc/{thread}/comm").read_bytes() == TIDIES
    }


def standing(pid, found):
    """What the threads of a process, or its group, have now of what it is put first by."""
    if found.group.startswith("/proc/"):
        working = set(thread_ids(pid)) - set(tidying(pid))
        (one,) = {os.sched_getscheduler(thread) for thread in working}
        return one
    if found.group.startswith("/autogroup"):
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    return int(Path(found.group).read_text())


def lifted(found):
    """The same once it goes before others."""
    if found.group.startswith("/proc/"):
        return CLASS
    if found.group.startswith("/autogroup"):
        return NICE
    return min(TIMES * found.before, HEAVIEST[Path(found.group).name])


def test_who_has_the_class_runs_as_soon_as_it_wakes_and_what_it_starts_has_it_too(spinner):
    """Half of a vCPU's time is wanted in short turns, while somebody else wants all of it."""
    code = """
import sys, threading, time
late, rounds = 0.0, 100
def work():
    global late
    for _ in range(rounds):
        due_s = time.monotonic() + 0.005
        time.sleep(0.005)
        late += time.monotonic() - due_s > 0.002
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass
sys.stdin.readline()
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(late / rounds)
"""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        os.sched_setaffinity(first.pid, CORE)
        found = found_at(first.pid)
        if not found.group.startswith("/proc/"):
            first.kill()
            pytest.skip("this kernel, or this user, may not have the class")
        assert in_words(found) == "by the real-time class of its threads"
        spinner()
        put_first(first.pid, found)
        said, _ = first.communicate("go\n", timeout=20.0 * PATIENCE)
        assert float(said) < 0.1


@pytest.mark.parametrize("by", ["what can be had", "weight"])
def test_the_first_gets_most_of_a_vcpu_that_another_program_wants_and_half_of_it_after(
    spinner, place, by, request
):
    if by == "weight":
        request.getfixturevalue("refused")
    first = spinner()
    place(first.pid)
    other = spinner()
    found = found_at(first.pid)
    assert found.group in in_words(found) or found.group.startswith("/proc/")

    def share():
        (own_s, _), (others_s, _) = over(0.6, first, other)
        return own_s / (own_s + others_s)

    put_first(first.pid, found)
    assert standing(first.pid, found) == lifted(found)
    assert share() > 0.8
    assert put_back(identify(first.pid), found) == ""
    assert standing(first.pid, found) == found.before
    assert found_at(first.pid) == found
    assert 0.3 < share() < 0.7


def test_a_group_that_others_share_is_left_alone(spinner, place, refused):
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
            found_at(first.pid)
        assert weighed(first.pid, hierarchy, {first.pid, stranger})
    finally:
        for pid in (stranger, first.pid):
            os.kill(pid, 9)
        first.wait()


def test_one_that_is_gone_has_nothing_to_be_put_back(spinner):
    require_sessions()
    first = spinner()
    who, found = identify(first.pid), found_at(first.pid)
    first.kill()
    first.wait()
    assert put_back(who, found) == ""


def test_threads_of_another_class_are_not_made_alike(spinner):
    first = spinner()
    if not found_at(first.pid).group.startswith("/proc/"):
        pytest.skip("this kernel, or this user, may not have the class")
    for policy, priority in ((os.SCHED_RR, 1), (os.SCHED_IDLE, 0)):
        os.sched_setscheduler(first.pid, policy, os.sched_param(priority))
        assert precedence.by_class(first.pid) is None
        assert os.sched_getscheduler(first.pid) == policy


def test_the_thread_that_tidies_keeps_its_class_and_may_wake_later(server):
    found, before = found_at(server.pid), tidying(server.pid)
    if not precedence.is_class(found):
        pytest.skip("this kernel, or this user, may not have the class")
    if not before:
        pytest.skip("this memcached does not name its threads")
    ((thread, (policy, slack_ns)),) = before.items()
    put_first(server.pid, found)
    assert tidying(server.pid) == {thread: (policy, SLACK_NS)}
    assert slack_ns < SLACK_NS
    assert put_back(identify(server.pid), found) == ""
    assert tidying(server.pid) == before


def test_nobody_goes_before_a_loop_that_may_not_go_first(spinner, monkeypatch):
    monkeypatch.setattr(precedence.standing, "may_go_first", lambda: False)
    first = spinner()
    assert precedence.by_class(first.pid) is None
    assert os.sched_getscheduler(first.pid) == os.SCHED_OTHER


@pytest.mark.parametrize("end", ["asked to stop", "restored", "resumed"])
def test_a_deployment_puts_memcached_first_and_back(
    deploy, server, place, scenario_file, groups_file, end
):
    place(server.pid)
    found = found_at(server.pid)
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options)
    run.expect(r"dedup start \[")
    assert standing(server.pid, found) == lifted(found)
    if end != "asked to stop":
        run.kill()
        run = deploy(*options, "--resume") if end == "resumed" else deploy("--restore")
    if end == "resumed":
        run.expect(r"update_cores \[0\]$")
        assert standing(server.pid, found) == lifted(found)
    if end != "restored":
        run.process.terminate()
    run.finish()
    assert standing(server.pid, found) == found.before


def test_it_goes_first_until_all_is_done_that_takes_cpu_time(server, place, tmp_path):
    place(server.pid)
    found = found_at(server.pid)
    record = service_record(identify(server.pid))
    record.weighing = found
    put_first(server.pid, found)
    state = State("0" * 12, "two", "process", "", 0.0, service=[record])
    seen = []
    folder = StateFolder(tmp_path / "state")
    faults = undo(
        *(state, folder, ProcessRuntime(), usable_hierarchy()),
        lambda faults: seen.append((list(faults), standing(server.pid, found))),
    )
    assert faults == []
    assert seen == [([], lifted(found))]
    assert standing(server.pid, found) == found.before


def test_the_report_is_there_before_memcached_is_as_it_was_found(
    deploy, scenario_file, groups_file
):
    scenario = scenario_file(dedup=["true"], radix=["true"])
    run = deploy("--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process")
    run.expect("the machine is as it was found")
    assert (run.report / "report.json").exists()
    assert run.finish() == 0


def test_a_memcached_that_starts_anew_goes_first_too(tmp_path, scenario_file, groups_file):
    require_sessions()
    first = memcached.start(threads=2)
    found = found_at(first.pid)
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
            while standing(second.pid, found) != lifted(found):
                assert time.monotonic() < give_up_s, run.lines
                time.sleep(0.02)
            run.process.terminate()
            run.finish()
            assert standing(second.pid, found) == found.before
        finally:
            memcached.stop(second)
    finally:
        run.close()
