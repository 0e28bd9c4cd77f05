"""The actuator with real memcached and real jobs: what is wanted comes about, once."""

import os
import random
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.assembly import usable_hierarchy
from deploy.jobs.job_run import GIVEN_UP, RETRIES, JobRun
from deploy.jobs.runtimes import ProcessRuntime, RuntimeUnavailableError
from deploy.linux import service_process
from deploy.linux.cgroups import QUOTA_PERIOD_US, JobGroup
from deploy.loop.actuator import LONGEST_HOLD_S, LONGEST_KEPT_S, LONGEST_REST_S, REST
from deploy.records.proof import CANCELLED
from deploy.records.state import ServiceRecord, StateFolder
from deploy.safety import restore
from deploy.safety.restore import undo
from env.allocation import Allocation, JobAllocation, JobState, Weight
from tests.live.conftest import PATIENCE, needs_groups


@needs_groups
def test_jobs_that_cannot_be_ended_are_named_and_keep_nothing_else_from_being_undone(
    actuator, monkeypatch
):
    class Forbidden(ProcessRuntime):
        def sweep(self, folders, groups):
            raise PermissionError("no")

    monkeypatch.setattr(restore, "PAUSE_S", 0.01)
    state, folder = actuator.state, actuator._context.folder
    state.jobs["dedup"].attempts = 1
    run = actuator.jobs["dedup"]
    run.make_group()
    faults = undo(state, folder, Forbidden(), usable_hierarchy())
    assert faults == ["jobs may be left: no"]
    assert not run._group.exists()


def test_what_is_left_of_an_attempt_that_does_not_count_is_ended(actuator):
    ended = []

    class Seen(ProcessRuntime):
        def sweep(self, folders, groups):
            ended.extend(folders)

    state, folder = actuator.state, actuator._context.folder
    made = actuator.jobs["dedup"].attempt(1).folder
    assert state.jobs["dedup"].attempts == 0
    assert undo(state, folder, Seen(), usable_hierarchy()) == []
    assert ended == [made]


def refuse(*arguments):
    raise OSError(28, "No space left on device")


def test_a_memcached_that_is_not_written_down_is_not_moved(actuator, server, monkeypatch):
    before = service_process.affinities(server.pid)
    with monkeypatch.context() as full:
        full.setattr(StateFolder, "save", refuse)
        actuator.apply(Allocation((0,), {}))
        actuator.follow((service_process.identify(server.pid),))
        actuator.poll(now_s(actuator))
        assert service_process.affinities(server.pid) == before
    poll_until(actuator, lambda: set(service_process.affinities(server.pid).values()) == {(0,)})
    assert actuator._context.folder.load().service[0].affinity == before


@needs_groups
def test_a_group_that_is_not_written_down_is_not_made(actuator, monkeypatch):
    monkeypatch.setattr(StateFolder, "save", refuse)
    dedup = actuator.jobs["dedup"]
    with pytest.raises(OSError, match="the state cannot be written"):
        dedup.make_group()
    assert not actuator._context.group_for("dedup").exists()
    assert dedup.record.group == ""


def test_a_memcached_that_is_gone_is_not_said_to_have_its_vcpus_back(actuator):
    state = actuator.state
    runs = service_process.Program((0, 0, 0, 0), "/usr/bin/memcached")
    state.service = [ServiceRecord(os.getpid(), -1, {}, runs)]
    assert (
        restore.in_words(state) == f"memcached {os.getpid()} is gone; all else is as it was found"
    )
    state.service = []


@needs_groups
def test_groups_that_cannot_be_reached_are_not_said_to_be_gone(actuator):
    actuator.jobs["dedup"].make_group()
    folder, state = actuator._context.folder, actuator.state
    (fault,) = undo(state, folder, ProcessRuntime(), None)
    assert "control groups cannot be reached" in fault


def now_s(actuator):
    return time.monotonic() - actuator.state.started_s


def poll_until(actuator, condition, slack=True):
    """Poll once at least, and until something is so."""
    end_s = time.monotonic() + 20.0 * PATIENCE
    actuator.poll(now_s(actuator), slack)
    while not condition():
        assert time.monotonic() < end_s
        actuator.wait(0.005)
        actuator.poll(now_s(actuator), slack)


def settle(actuator, *names, slack=True):
    """Poll until jobs are as wanted."""
    poll_until(actuator, lambda: all(actuator.jobs[name].settled for name in names), slack)


def bring(actuator, **wanted):
    """Have dedup as wanted."""
    job = JobAllocation(**{"state": JobState.RUNNING, "cores": (1,), "threads": 1, **wanted})
    actuator.apply(Allocation((0,), {"dedup": job}))
    settle(actuator, "dedup")


def test_once_all_is_as_wanted_the_jobs_are_left_alone_until_something_happens(
    actuator, monkeypatch
):
    looked = []
    advance = JobRun.advance
    monkeypatch.setattr(
        JobRun, "advance", lambda run, now_s: (looked.append(run.job.name), advance(run, now_s))
    )
    bring(actuator)
    settle(actuator, "radix")  # which waits at its gate
    actuator.poll(now_s(actuator))
    looked.clear()
    actuator.poll(now_s(actuator))
    assert not looked
    bring(actuator, cores=(0,))
    assert looked
    actuator.poll(now_s(actuator))
    looked.clear()
    actuator.forget_written()
    actuator.poll(now_s(actuator))
    assert looked
    settle(actuator, "dedup")
    os.kill(actuator.jobs["dedup"].instance.pid, signal.SIGKILL)
    poll_until(actuator, lambda: actuator.jobs["dedup"].record.failures == 1)


def test_a_start_waits_for_memcached_to_have_time_to_spare_but_not_for_ever(actuator):
    job, at_s = JobAllocation(JobState.RUNNING, (1,), threads=1), now_s(actuator)
    dedup, radix = actuator.jobs["dedup"], actuator.jobs["radix"]
    actuator.apply(Allocation((0,), {"dedup": job}))
    for wait_s in (0.0, 5.0, LONGEST_HOLD_S - 0.1):
        actuator.poll(at_s + wait_s, slack=False)
        assert not dedup.busy
    actuator.poll(at_s + LONGEST_HOLD_S + 0.1, slack=False)
    assert dedup.busy
    settle(actuator, "dedup", slack=False)
    at_s += 100.0  # nobody has waited meanwhile
    actuator.apply(Allocation((0,), {"dedup": job, "radix": job}))
    for wait_s in (0.0, LONGEST_HOLD_S - 0.1):
        actuator.poll(at_s + wait_s, slack=False)
        assert not radix.busy
    actuator.poll(at_s + LONGEST_HOLD_S - 0.05, slack=True)
    assert radix.busy
    settle(actuator, "radix")


def test_a_start_that_nobody_has_picked_up_gives_its_descriptor_back(actuator):
    job = JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), {"dedup": job}))
    actuator.poll(now_s(actuator))
    run = actuator.jobs["dedup"]
    assert run.busy
    wait([run._call.future], timeout=20.0 * PATIENCE)
    instance, _ = run._call.future.result()
    actuator.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(instance.ended)


def held(actuator, run):
    """What a running or paused job really has, read back from the machine."""
    group, place = run._group, run.instance.placement
    state = JobState.PAUSED if place.paused() else JobState.RUNNING
    folder = group.hierarchy.folder(group.path)
    file = "cpu.cfs_quota_us" if group.hierarchy.version == 1 else "cpu.max"
    quota_us = (folder / file).read_text().split()[0]
    quota = None if quota_us in ("-1", "max") else int(quota_us) / QUOTA_PERIOD_US
    return JobAllocation(state, place.cores(), place.weight(), run.record.threads, quota)


@needs_groups
def test_a_thousand_random_changes_end_in_what_was_wanted(actuator, server):
    actuator.follow((service_process.identify(server.pid),))
    rng = random.Random(11)
    cores = [(0,), (1,), (0, 1)]
    for _ in range(1000):
        jobs = {
            name: JobAllocation(
                JobState(rng.choice([JobState.RUNNING, JobState.PAUSED])),
                rng.choice(cores),
                rng.choice(list(Weight)),
                1,
                rng.choice([None, 0.5]),
            )
            for name in actuator.jobs
        }
        wanted = Allocation(rng.choice(cores), jobs)
        actuator.apply(wanted)
        actuator.poll(now_s(actuator))
    settle(actuator, *actuator.jobs)
    assert set(service_process.affinities(server.pid).values()) == {wanted.service_cores}
    assert {name: held(actuator, run) for name, run in actuator.jobs.items()} == wanted.jobs


def test_there_are_file_descriptors_to_undo_everything_with(actuator):
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    bring(actuator)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 16, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        actuator.close()
        runtime = actuator._context.runtime
        assert undo(actuator.state, actuator._context.folder, runtime, usable_hierarchy()) == []
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_who_has_the_number_of_a_memcached_that_is_gone_is_not_moved(actuator):
    somebody = subprocess.Popen(["sleep", "100"])
    try:
        now = service_process.identify(somebody.pid)
        before = service_process.affinities(somebody.pid)
        actuator.follow((service_process.Identity(now.pid, now.started - 1),))
        actuator.apply(Allocation((0,), {}))
        actuator.poll(now_s(actuator))
        assert service_process.affinities(somebody.pid) == before
    finally:
        somebody.kill()
        somebody.wait()


@needs_groups
def test_one_start_at_a_time_in_the_order_of_asking_and_a_rest_after_each(actuator):
    jobs = {}
    for name in ("radix", "dedup"):  # not the scenario's order
        jobs[name] = JobAllocation(JobState.RUNNING, (1,), threads=1)
        actuator.apply(Allocation((0,), dict(jobs)))
        actuator.poll(now_s(actuator))
    begun_s, ended_s = {}, {}
    at_s, longest_turn_s = now_s(actuator), 0.0
    while len(ended_s) < len(jobs):
        last_s, at_s = at_s, now_s(actuator)
        longest_turn_s = max(longest_turn_s, at_s - last_s)
        in_turn = [name for name in jobs if actuator.jobs[name].in_turn]
        assert len(in_turn) <= 1
        for name in in_turn:
            begun_s.setdefault(name, at_s)
        for name in begun_s:
            if name not in in_turn:
                ended_s.setdefault(name, at_s)
        assert at_s < 20.0 * PATIENCE
        time.sleep(0.001)
        actuator.poll(now_s(actuator))
    assert list(begun_s) == ["radix", "dedup"]
    took_s = ended_s["radix"] - begun_s["radix"]
    # Each moment is seen from here up to a turn late.
    rested_s = begun_s["dedup"] - ended_s["radix"] + (1.0 + REST) * longest_turn_s
    assert rested_s > min(REST * took_s, LONGEST_REST_S)


@needs_groups
def test_a_job_that_the_guardian_resumed_is_paused_again(actuator):
    run = actuator.jobs["dedup"]
    bring(actuator)
    place = run.instance.placement
    bring(actuator, state=JobState.PAUSED)
    place.set_paused(False)  # as the guardian does
    actuator.forget_written()
    settle(actuator, "dedup")
    assert place.paused()
    actuator.forget_written()  # nobody did anything this time
    bring(actuator)
    assert not place.paused()


@needs_groups
def test_a_weight_that_the_guardian_changed_is_written_again(actuator):
    run = actuator.jobs["dedup"]
    bring(actuator)
    run.instance.placement.set_weight(Weight.BACKGROUND)  # as the guardian does
    actuator.forget_written()
    settle(actuator, "dedup")
    assert run.instance.placement.weight() == Weight.NORMAL


@needs_groups
def test_a_job_that_pins_itself_is_let_go_within_a_second_or_so(actuator):
    bring(actuator, cores=(0, 1))
    pid = actuator.jobs["dedup"].instance.pid
    os.sched_setaffinity(pid, {1})  # as its program may do
    poll_until(actuator, lambda: os.sched_getaffinity(pid) == {0, 1})


def vcpus(actuator):
    return [run.instance.placement.cores() for run in actuator.jobs.values()]


@needs_groups
def test_background_jobs_that_leave_a_vcpu_idle_have_one_each(actuator):
    job = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
    both = Allocation((0,), dict.fromkeys(actuator.jobs, job))
    actuator.apply(both)
    poll_until(actuator, lambda: all(run.settled for run in actuator.jobs.values()))
    assert vcpus(actuator) == [(0, 1), (0, 1)]
    waits, left = (run.instance.placement for run in actuator.jobs.values())

    def part():
        """A job that waits, as for a disk, idles a vCPU."""
        waits.set_paused(True)
        poll_until(actuator, lambda: vcpus(actuator) == [(0,), (1,)])
        waits.set_paused(False)

    part()
    changes = actuator.changes
    actuator.apply(both)
    assert (vcpus(actuator), actuator.changes) == ([(0,), (1,)], changes)
    actuator.apply(Allocation((0,), {"dedup": replace(job, state=JobState.PAUSED), "radix": job}))
    poll_until(actuator, lambda: left.cores() == (0, 1))
    actuator.apply(both)
    part()
    os.kill(actuator.jobs["dedup"].instance.pid, signal.SIGKILL)
    poll_until(actuator, lambda: left.cores() == (0, 1))


@needs_groups
def test_who_runs_has_all_its_vcpus_until_the_others_have_begun(actuator):
    job = JobAllocation(JobState.RUNNING, (0, 1), Weight.BACKGROUND, 1)
    actuator.apply(Allocation((0,), {"dedup": job}))
    settle(actuator, "dedup")
    actuator.jobs["radix"].take_turn = lambda now_s: None  # its attempt is not made
    actuator.apply(Allocation((0,), dict.fromkeys(actuator.jobs, job)))
    actuator.poll(now_s(actuator))
    assert actuator.jobs["dedup"].instance.placement.cores() == (0, 1)


@needs_groups
def test_a_quota_ends_with_the_loop_that_wanted_it(actuators):
    first = actuators()
    bring(first, quota=0.5)
    again = actuators()
    again.take_over(now_s(again))
    bring(again)
    group = again.jobs["dedup"].instance.attempt.group
    folder = group.hierarchy.folder(group.path)
    limit = folder / ("cpu.cfs_quota_us" if group.hierarchy.version == 1 else "cpu.max")
    assert limit.read_text().split()[0] in ("-1", "max")


@needs_groups
def test_a_runtime_that_falls_silent_during_a_start_is_waited_for(actuator, monkeypatch):
    """It has started the job all the same, and says so when it is back."""
    monkeypatch.setattr("deploy.jobs.job_run.UNAVAILABLE_LIMIT_S", 0.3)
    runtime, run = actuator._context.runtime, actuator.jobs["dedup"]
    find, start, unreachable = runtime.find, runtime.start, threading.Event()
    attempts, unanswered = [], []

    def start_and_fall_silent(attempt, *place):
        if attempt.job.name != "dedup":
            return start(attempt, *place)
        attempts.append(attempt.number)
        start(attempt, *place)
        unreachable.set()
        raise RuntimeUnavailableError("no answer")

    def find_unless_silent(attempt):
        if unreachable.is_set():
            unanswered.append(attempt.number)
            raise RuntimeUnavailableError("no answer")
        return find(attempt)

    monkeypatch.setattr(runtime, "start", start_and_fall_silent)
    monkeypatch.setattr(runtime, "find", find_unless_silent)
    wanted = JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), {"dedup": wanted}))
    poll_until(actuator, lambda: len(unanswered) > 3 or run.record.failures)
    unreachable.clear()
    settle(actuator, "dedup")
    assert attempts == [1]
    assert (run.record.attempts, run.record.failures) == (1, 0)


@needs_groups
def test_a_start_that_never_succeeds_fails_once_nothing_of_it_runs(actuator, monkeypatch):
    monkeypatch.setattr("deploy.jobs.job_run.UNAVAILABLE_LIMIT_S", 0.3)
    runtime, run = actuator._context.runtime, actuator.jobs["dedup"]

    def refuse(*_):
        raise RuntimeUnavailableError("not now")

    monkeypatch.setattr(runtime, "start", refuse)

    def given_up():
        wanted = JobAllocation(JobState.RUNNING, (1,), threads=1)
        actuator.apply(Allocation((0,), {"dedup": wanted}))
        return run.state == JobState.DONE

    poll_until(actuator, given_up)
    assert (run.record.attempts, run.record.exit_code) == (RETRIES + 1, GIVEN_UP)


@needs_groups
def test_an_attempt_that_never_ran_is_begun_again_by_the_next_loop(actuators, monkeypatch):
    refused = []

    def refuse(attempt, *_):
        refused.append(attempt.number)
        raise RuntimeUnavailableError("not now")

    first = actuators()
    with monkeypatch.context() as patched:
        patched.setattr(first._context.runtime, "start", refuse)
        first.apply(Allocation((0,), {"dedup": JobAllocation(JobState.RUNNING, (1,), threads=1)}))
        poll_until(first, lambda: refused)
    again = actuators()
    again.take_over(now_s(again))
    bring(again)
    assert refused == [again.jobs["dedup"].instance.attempt.number]


@needs_groups
def test_an_attempt_fails_once_however_often_it_is_taken_over(actuators):
    first = actuators()
    run = first.jobs["dedup"]
    bring(first)
    os.kill(run.instance.pid, signal.SIGKILL)
    poll_until(first, lambda: run.record.failures)  # its remains are not removed before a rest
    for _ in range(2):
        again = actuators()
        run = again.jobs["dedup"]
        again.take_over(now_s(again))
        poll_until(again, lambda run=run: not run.busy)
        assert (run.record.attempts, run.record.failures) == (1, 1)
        assert run.state == JobState.PENDING
    bring(again)
    assert (run.record.attempts, run.record.failures) == (2, 1)


@needs_groups
def test_a_control_group_that_is_not_made_at_once_is_made_later_and_known_before(
    actuator, monkeypatch
):
    create, faults = JobGroup.create, [OSError("not now"), OSError("nor now")]
    known = []

    def try_to(group):
        record = actuator._context.folder.load().jobs["dedup"]
        known.append((record.group, record.weight_file))
        if faults:
            raise faults.pop()
        create(group)

    monkeypatch.setattr(JobGroup, "create", try_to)
    bring(actuator)
    group = actuator.jobs["dedup"].instance.attempt.group
    assert known == [(str(group.path), str(group.weight_file))] * 3
    assert group.exists()


@needs_groups
def test_an_actuator_that_is_closed_has_no_file_open(actuator):
    def kept():
        files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.exists()]
        return sum("pidfd" in file or "coretide-parts" in file for file in files)

    before, wanted = kept(), JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), dict.fromkeys(actuator.jobs, wanted)))
    settle(actuator, *actuator.jobs)
    for run in actuator.jobs.values():
        run.cpu_s()
    assert kept() == before + 2 * len(actuator.jobs)
    actuator.close()
    assert kept() == before


@needs_groups
def test_a_job_that_ends_while_it_is_taken_over_has_ended(actuators, monkeypatch):
    first = actuators()
    if isinstance(first._context.runtime, ProcessRuntime):
        first._context.group_for = None  # a group of ours outlives its last process
    bring(first)
    again = actuators()
    again._context.group_for = first._context.group_for
    runtime, run = again._context.runtime, again.jobs["dedup"]
    find = runtime.find

    def last_seen(attempt):
        found = find(attempt)
        runtime.remove(found)
        return found

    monkeypatch.setattr(runtime, "find", last_seen)
    again.take_over(now_s(again))
    poll_until(again, lambda: run.record.failures)
    assert run.state == JobState.PENDING


def start_both(actuator):
    job = JobAllocation(JobState.RUNNING, (1,), threads=1)
    actuator.apply(Allocation((0,), {"dedup": job, "radix": job}))
    settle(actuator, "dedup", "radix")
    return actuator.jobs["dedup"], actuator.jobs["radix"]


def test_an_end_is_known_while_the_runtime_removes_another_attempt(actuator, monkeypatch):
    runtime, goes_on = actuator.context.runtime, threading.Event()
    remove = runtime.remove

    def slowly(instance):
        assert goes_on.wait(60.0 * PATIENCE)
        remove(instance)

    monkeypatch.setattr(runtime, "remove", slowly)
    dedup, radix = start_both(actuator)
    try:
        os.kill(dedup.instance.pid, signal.SIGKILL)
        poll_until(actuator, lambda: dedup.record.failures == 1 and dedup.in_turn)
        os.kill(radix.instance.pid, signal.SIGKILL)
        poll_until(actuator, lambda: radix.record.failures == 1)
        assert dedup.in_turn
    finally:
        goes_on.set()


def test_what_is_left_of_a_container_waits_for_time_to_spare_or_until_nobody_runs(actuator):
    dedup, radix = start_both(actuator)
    dedup.record.failures = RETRIES
    os.kill(dedup.instance.pid, signal.SIGKILL)
    poll_until(actuator, lambda: dedup.record.exit_code is not None, slack=False)
    if actuator.state.runtime == "docker":
        assert not dedup.may_still_run
        for later_s in (LONGEST_HOLD_S, LONGEST_KEPT_S - 0.1):
            actuator.poll(dedup.kept_from_s + later_s, slack=False)
            assert dedup.removes_next and not dedup.in_turn
        actuator.poll(dedup.kept_from_s + LONGEST_KEPT_S + 0.1, slack=False)
        assert dedup.in_turn
    # What a process has started may run on.
    poll_until(actuator, lambda: not dedup.busy, slack=False)
    assert radix.state == JobState.RUNNING
    actuator.cancel("radix")
    poll_until(actuator, lambda: not radix.busy and radix.record.exit_code, slack=False)


def test_a_cancelled_job_and_one_to_be_tried_again_wait_for_nobody(actuator):
    dedup, radix = start_both(actuator)
    pid = dedup.instance.pid
    actuator.cancel("dedup")
    poll_until(actuator, lambda: dedup.record.exit_code == CANCELLED, slack=False)
    assert dedup.may_still_run
    poll_until(actuator, lambda: not dedup.busy, slack=False)
    assert not Path(f"/proc/{pid}").exists() and not dedup.may_still_run
    os.kill(radix.instance.pid, signal.SIGKILL)
    poll_until(actuator, lambda: radix.record.failures == 1 and not radix.busy, slack=False)


def test_a_supervisor_that_may_not_be_moved_leaves_its_container_running(actuator, monkeypatch):
    if actuator.state.runtime != "docker":
        pytest.skip("processes have none")

    def refuse_it(pid, cores):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(actuator.context.runtime, "_apart", (1,))
    monkeypatch.setattr("deploy.jobs.containers.pin", refuse_it)
    dedup, _ = start_both(actuator)
    assert dedup.instance.pid and dedup.record.attempts == 1
