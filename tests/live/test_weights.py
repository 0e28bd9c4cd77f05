"""Weight, vCPUs, quota and pause as the kernel carries them out, in both versions of its groups."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from statistics import median

import pytest

from deploy import check
from deploy.assembly import apart_from_service, usable_hierarchy
from deploy.jobs import gate, placement
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.placement import GroupPlacement, TaskPlacement
from deploy.jobs.runtimes import Attempt
from deploy.jobs.yielding import SPIN, RunDelay, run_delay
from deploy.linux.cgroups import (
    DEFAULT_WEIGHT,
    IDLE_FILE,
    LEAST_WEIGHT,
    Hierarchy,
    JobGroup,
    job_groups_beside,
    members,
)
from deploy.linux.service_process import affinities, identify, pin, stat_fields
from deploy.records.proof import prepare
from deploy.settings import Settings
from env.allocation import Weight
from env.errors import InputError
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE, assert_as_found, needs_docker, needs_groups
from training.measuring.testbed import HEAVIEST

MEMCACHED_WEIGHT = {1: 512, 2: 39}
"""39 is what Docker makes of its default on version 2."""

WEIGHT_OF_IDLE = {1: 3, 2: 0}
"""What the kernel says that an idle group weighs."""

VCPU = max(os.sched_getaffinity(0))
ENDLESS = "while True: pass"


@pytest.fixture
def beside(server):
    """memcached in a group with a weight of its own, and a job's group beside it."""
    hierarchy = usable_hierarchy()
    parent = PurePosixPath(f"/coretide-test-{os.getpid()}")
    slice_, own = JobGroup(hierarchy, parent, 0), JobGroup(hierarchy, parent / "memcached", 0)
    slice_.create()
    slice_.weight_file.write_text(str(HEAVIEST[hierarchy.version]))  # others do not disturb
    own.create()
    own.weight_file.write_text(str(MEMCACHED_WEIGHT[hierarchy.version]))
    join(own, server.pid)
    job = job_groups_beside(hierarchy, server.pid)("job")
    job.create()
    yield own, job
    for group in (job, own):
        for pid in members(hierarchy, group.path):
            if pid != server.pid:
                os.kill(pid, 9)
    server.process.kill()
    server.process.wait()
    end_s = time.monotonic() + 5.0
    while slice_.exists() and time.monotonic() < end_s:  # the dying still count for a moment
        slice_.remove()
    assert not slice_.exists()


def join(group, pid):
    for folder in group.hierarchy.folders(group.path):
        if folder.exists():
            (folder / "cgroup.procs").write_text(str(pid))


def spinner(group, core=VCPU):
    process = subprocess.Popen([sys.executable, "-S", "-c", ENDLESS])
    join(group, process.pid)
    os.sched_setaffinity(process.pid, {core})
    return process


def schedstat(pid):
    """Seconds on a vCPU and seconds waiting for one."""
    used, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(used) * 1e-9, int(waited) * 1e-9


def over(seconds, *processes):
    """CPU time and run delay of processes over a while."""
    before = [schedstat(process.pid) for process in processes]
    time.sleep(seconds)
    after = [schedstat(process.pid) for process in processes]
    return [
        tuple(now - then for now, then in zip(*both, strict=True))
        for both in zip(after, before, strict=True)
    ]


def files_of(group):
    """A group's weight, and whether it is idle, as the kernel says."""
    folder = group.weight_file.parent
    return int(group.weight_file.read_text()), (folder / IDLE_FILE).read_text().strip() == "1"


@needs_groups
def test_a_jobs_group_lies_beside_memcacheds_and_is_idle_or_weighs_the_same(beside):
    own, job = beside
    version = job.hierarchy.version
    same, none = (MEMCACHED_WEIGHT[version], False), (WEIGHT_OF_IDLE[version], True)
    assert job.path.parent == own.path.parent
    assert job.background == IDLE_FILE
    for weight, found in 2 * ((Weight.NORMAL, same), (Weight.BACKGROUND, none)):
        for _ in range(2):  # a second time changes nothing
            job.set_weight(weight)
            assert files_of(job) == found
            assert job.weight() == weight


@needs_groups
def test_a_group_that_competes_with_another_weight_counts_as_the_background(beside):
    _, job = beside
    assert files_of(job) == (DEFAULT_WEIGHT[job.hierarchy.version], False)
    assert job.weight() == Weight.BACKGROUND  # so that it is written anew


@needs_groups
def test_a_group_that_cannot_have_memcacheds_weight_stays_in_the_background(beside):
    _, job = beside
    refused = JobGroup(job.hierarchy, job.path, -1)
    refused.set_weight(Weight.BACKGROUND)
    with pytest.raises(OSError):
        refused.set_weight(Weight.NORMAL)
    assert files_of(job)[1]


@needs_groups
def test_jobs_are_not_put_beside_a_memcached_in_the_background(beside, server):
    own, job = beside
    own.set_weight(Weight.BACKGROUND)
    with pytest.raises(InputError, match=rf"{own.path} is idle"):
        job_groups_beside(job.hierarchy, server.pid)


@pytest.mark.parametrize("version", [1, 2])
def test_a_kernel_without_idle_groups_is_given_the_least_weight(tmp_path, version):
    hierarchy = Hierarchy(version, {"cpu": tmp_path})
    group = JobGroup(hierarchy, PurePosixPath("/job"), MEMCACHED_WEIGHT[version])
    (tmp_path / "job").mkdir()
    group.weight_file.touch()
    assert group.background == group.weight_file.name
    for weight, value in (
        (Weight.NORMAL, MEMCACHED_WEIGHT[version]),
        (Weight.BACKGROUND, LEAST_WEIGHT[version]),
    ):
        group.set_weight(weight)
        assert int(group.weight_file.read_text()[: len(str(value))]) == value
    assert group.weight_file.parent.name == "job"


def check_finds(settings, who, hierarchy):
    return {finding.what: finding for finding in check._background(hierarchy, settings, who)}


@needs_groups
def test_the_check_names_the_mechanism_and_measures_that_memcached_need_not_wait(
    beside, server, tmp_path
):
    _, job = beside
    settings = Settings(server.host, server.port, "process", None, False, tmp_path, tmp_path)
    before = os.sched_getaffinity(0)
    found = check_finds(settings, (identify(server.pid),), job.hierarchy)
    version = job.hierarchy.version
    said = found["background"].verdict, found["background"].found
    assert said == (check.OK, f"{IDLE_FILE} of control groups, version {version}")
    assert re.fullmatch(
        r"\d+\.\d\d s per CPU second alone, \d+\.\d\d beside background work.*",
        found["memcached's run delay"].found,
    )
    assert os.sched_getaffinity(0) == before
    assert not list(job.weight_file.parent.parent.glob("coretide-check-*"))


@pytest.mark.parametrize(
    ("delay", "verdict"),
    [
        (RunDelay(0.06, 0.07), check.OK),
        (RunDelay(0.06, 0.3), check.OK),  # a disturbance, on a vCPU that is hardly used
        (RunDelay(1.2, 1.7), check.OK),
        (RunDelay(0.06, 0.6), check.WARNING),
        (RunDelay(0.4, 0.9), check.WARNING),  # what work of memcached's weight adds at least
    ],
)
def test_the_check_warns_where_background_work_keeps_memcached_waiting(
    monkeypatch, tmp_path, delay, verdict
):
    monkeypatch.setattr(check, "run_delay", lambda *_: delay)
    settings = Settings("127.0.0.1", 11211, "process", None, False, tmp_path, tmp_path)
    found = check_finds(settings, (identify(os.getpid()),), None)
    assert found["memcached's run delay"].verdict == verdict


@pytest.mark.survival
@needs_groups
def test_background_work_adds_no_run_delay_where_equal_work_does(beside, server):
    _, job = beside
    pin(server.pid, (VCPU,))
    who, where = identify(server.pid), (server.host, server.port)
    added = {Weight.BACKGROUND: [], Weight.NORMAL: []}
    for weight in 3 * tuple(added):  # in turns: others may disturb one of them
        job.set_weight(weight)
        found = run_delay(who, where, job)
        added[weight].append(found.beside - found.alone)
    assert median(added[Weight.BACKGROUND]) < 0.5 * median(added[Weight.NORMAL])


def spinners():
    """The processes of experiments that run now."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if SPIN.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@needs_groups
@pytest.mark.parametrize(
    ("number", "after_s"),
    [
        *((signal.SIGTERM, 0.0), (signal.SIGKILL, 0.3)),
        pytest.param(signal.SIGHUP, 0.3, marks=pytest.mark.survival),
        pytest.param(signal.SIGINT, 0.0, marks=pytest.mark.survival),
    ],
)
def test_a_check_that_is_ended_leaves_nothing_running(
    deploy, server, scenario_file, number, after_s
):
    before = affinities(server.pid)
    run = deploy("--check", "--runtime", "process", "--scenario", str(scenario_file()))
    end_s = time.monotonic() + 30.0 * PATIENCE
    while not spinners():
        assert run.process.poll() is None and time.monotonic() < end_s
        time.sleep(0.005)
    time.sleep(after_s)
    run.process.send_signal(number)
    assert run.process.wait(10.0 * PATIENCE) != 0
    while spinners():
        assert time.monotonic() < end_s
        time.sleep(0.005)
    if number == signal.SIGKILL:
        undo = deploy("--restore")
        assert undo.finish() == 0, undo.lines
    group = job_groups_beside(usable_hierarchy(), server.pid)(f"coretide-check-{run.process.pid}")
    assert not group.exists()
    assert affinities(server.pid) == before


def await_ratios(least, most, *processes):
    """Wait until CPU time and run delay of the second over those of the first are within limits."""
    give_up_s = time.monotonic() + 10.0 * PATIENCE
    while True:
        first, second = over(2.0, *processes)
        ratios = [b / max(a, 1e-9) for a, b in zip(first, second, strict=True)]
        if all(low < each < high for low, each, high in zip(least, ratios, most, strict=True)):
            return
        assert time.monotonic() < give_up_s, ratios


@needs_groups
def test_who_waits_for_a_shared_vcpu_is_the_background_job(beside):
    own, job = beside
    service, batch = spinner(own), spinner(job)
    try:
        job.set_weight(Weight.BACKGROUND)
        await_ratios((0.0, 10.0), (0.1, float("inf")), service, batch)
        job.set_weight(Weight.NORMAL)
        # Before Linux 6.6 it first pays for its time in the background.
        await_ratios((0.7, 0.7), (1.4, 1.4), service, batch)
    finally:
        for process in (service, batch):
            process.kill()
            process.wait()


@needs_groups
def test_vcpus_and_quota_written_to_a_group_hold_for_its_processes(beside):
    _, job = beside
    version = job.hierarchy.version
    placement = GroupPlacement(job, job.hierarchy.folder(job.path, "cpuset"))
    batch = spinner(job)
    try:
        for cores in ((0,), (1,), (0, 1)):
            placement.set_cores(cores)
            assert placement.cores() == cores
            assert os.sched_getaffinity(batch.pid) <= set(cores)
        used_s = job.cpu_s()
        placement.set_quota(0.1)
        ((limited_s, _),) = over(2.0, batch)
        assert limited_s < 2.0 * 0.2, version
        assert 0.0 < job.cpu_s() - used_s < 2.0
        placement.set_quota(None)
        ((free_s, _),) = over(2.0, batch)
        assert free_s > 2.0 * limited_s
    finally:
        placement.close()
        batch.kill()
        batch.wait()


def attempt_at(folder, scenario, group):
    """The first job's first attempt, with a folder that has its proof and its gate."""
    folder.mkdir(mode=0o777)
    prepare(folder)
    gate.make(folder)
    return Attempt(scenario.jobs[0], 1, folder, group)


@needs_groups
def test_a_program_that_pins_itself_runs_where_its_group_may_all_the_same(beside):
    _, job = beside
    place = GroupPlacement(job, job.hierarchy.folder(job.path, "cpuset"))
    batch = spinner(job)
    try:
        place.set_cores((0, 1))
        os.sched_setaffinity(batch.pid, {1})
        assert place.unpin() == 1
        for cores in ((0, 1), (0,), (0, 1)):  # and it follows what is written from then on
            place.set_cores(cores)
            assert os.sched_getaffinity(batch.pid) == set(cores)
            assert place.unpin() == 0
    finally:
        place.close()
        batch.kill()
        batch.wait()


@needs_docker
def test_a_container_is_paused_and_goes_on(beside, scenario_file, docker_daemon, tmp_path):
    _, job = beside
    runtime = DockerRuntime(job.hierarchy, f"test{os.getpid()}", docker_daemon.url)
    command = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "100000000"]
    scenario = load_scenario(scenario_file(dedup=command))
    attempt = attempt_at(tmp_path / "attempt", scenario, job)
    instance = runtime.start(attempt, (0,), Weight.BACKGROUND)
    try:
        gate.await_passage(attempt.folder, 1)
        place = instance.placement
        assert (place.cores(), place.weight()) == ((0,), Weight.BACKGROUND)
        place.set_cores((1,))
        assert place.cores() == (1,)
        until_it_has_used(place, place.cpu_s() + 0.1)
        place.set_paused(True)
        assert place.paused()
        time.sleep(0.05)
        used_s = place.cpu_s()
        time.sleep(0.5)
        assert place.cpu_s() == used_s
        place.set_paused(False)
        assert not place.paused()
        until_it_has_used(place, used_s + 0.1)
    finally:
        runtime.remove(instance)
        os.close(instance.ended)


@needs_docker
def test_who_looks_after_a_container_stays_off_memcacheds_vcpus(
    beside, scenario_file, docker_daemon, tmp_path
):
    _, job = beside
    scenario = load_scenario(scenario_file(dedup=["sleep", "100{threads}"]))
    apart = apart_from_service(scenario)
    assert apart and not set(apart) & set(scenario.service.core_choices[0])
    runtime = DockerRuntime(job.hierarchy, f"test{os.getpid()}", docker_daemon.url, apart=apart)
    attempt = attempt_at(tmp_path / "attempt", scenario, job)
    instance = runtime.start(attempt, (0,), Weight.NORMAL)
    try:
        supervisor = int(stat_fields(instance.pid)[1])
        assert set(affinities(supervisor).values()) == {apart}
        assert instance.placement.cores() == (0,)
    finally:
        runtime.remove(instance)
        os.close(instance.ended)


def until_it_has_used(place, cpu_s):
    end_s = time.monotonic() + 10.0 * PATIENCE
    while place.cpu_s() < cpu_s:
        assert time.monotonic() < end_s
        time.sleep(0.01)


# --- without groups ---


@pytest.fixture
def sleepers():
    """Two processes, each in a session of its own."""
    with (
        subprocess.Popen(["sleep", "100"], start_new_session=True) as first,
        subprocess.Popen(["sleep", "100"], start_new_session=True) as second,
    ):
        yield first.pid, second.pid
        first.kill()
        second.kill()


def test_what_a_job_starts_while_it_is_moved_moves_too(sleepers, monkeypatch):
    first, second = sleepers
    listings = iter([[first]])
    monkeypatch.setattr(placement, "session_members", lambda leader: next(listings, [*sleepers]))
    job = TaskPlacement(first)
    job.set_cores((0,))
    assert os.sched_getaffinity(second) == {0}


def test_a_program_without_groups_that_pins_itself_is_let_go(sleepers):
    leader, _ = sleepers
    job = TaskPlacement(leader)
    assert job.unpin() == 0  # it was given no vCPUs yet
    job.set_cores((0, 1))
    os.sched_setaffinity(leader, {1})
    assert job.unpin() == 1
    assert os.sched_getaffinity(leader) == {0, 1}
    assert job.unpin() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="not everybody may leave the background")
def test_a_job_without_groups_yields_to_its_own_session_and_to_the_others(sleepers):
    leader, _ = sleepers
    job, session = TaskPlacement(leader), Path(f"/proc/{leader}/autogroup")
    for weight, policy, nice in 2 * (
        (Weight.BACKGROUND, os.SCHED_IDLE, 19),
        (Weight.NORMAL, os.SCHED_OTHER, 0),
    ):
        job.set_weight(weight)
        assert (job.weight(), os.sched_getscheduler(leader)) == (weight, policy)
        if session.exists():
            assert session.read_text().split()[-1] == str(nice)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_every_session_of_another_user_gets_out_of_the_way_in_the_end():
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel makes no group of a session")
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            with contextlib.ExitStack() as stack:
                started = [
                    stack.enter_context(subprocess.Popen(["sleep", "10"], start_new_session=True))
                    for _ in range(3)
                ]
                jobs = [TaskPlacement(process.pid) for process in started]
                files = [Path(f"/proc/{process.pid}/autogroup") for process in started]
                give_up_s = time.monotonic() + 3.0 * PATIENCE
                # Until it has replaced its program, a child of who changed users is root's.
                while not all(os.access(file, os.W_OK) for file in files):
                    assert time.monotonic() < give_up_s
                for job in jobs:
                    job.set_weight(Weight.BACKGROUND)
                nice: list[str] = []
                while set(nice) != {"19"} and time.monotonic() < give_up_s:
                    for job in jobs:
                        job.cpu_s()
                    nice = [file.read_text().split()[-1] for file in files]
                for process in started:
                    process.kill()
            os._exit(set(nice) != {"19"})
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_whoever_may_not_take_a_job_out_of_the_background_can_still_move_it():
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
            with subprocess.Popen(["sleep", "10"], start_new_session=True) as process:
                job = TaskPlacement(process.pid)
                job.set_weight(Weight.BACKGROUND)
                job.set_weight(Weight.NORMAL)
                job.set_cores((0,))
                found = job.weight(), job.cores(), check._normal_weight().verdict
                process.kill()
            os._exit(found != (Weight.BACKGROUND, (0,), check.WARNING))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@needs_groups
@pytest.mark.parametrize("runtime", ["process", pytest.param("docker", marks=needs_docker)])
def test_jobs_of_a_memcached_in_the_root_group_get_groups_of_their_own_below_it(
    deploy, server, scenario_file, groups_file, docker_daemon, runtime
):
    hierarchy, root = usable_hierarchy(), PurePosixPath("/")
    join(JobGroup(hierarchy, root, 0), server.pid)
    endless = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "100000000"]
    scenario = scenario_file(sharing=False, dedup=endless, radix=endless)
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario)),
        *("--runtime", runtime, "--docker", docker_daemon.url),
    )
    run.expect(r"dedup start \[")
    run.expect(r"radix start \[")
    for name in ("dedup", "radix"):
        group = job_groups_beside(hierarchy, server.pid)(f"coretide-{run.nonce}-{name}")
        assert group.path.parent == root
        assert group.normal_weight == DEFAULT_WEIGHT[hierarchy.version]
        assert members(hierarchy, group.path)
        assert group.weight() == Weight.NORMAL
        group.set_weight(Weight.BACKGROUND)
        assert files_of(group) == (WEIGHT_OF_IDLE[hierarchy.version], True)
        assert hierarchy.group_of(server.pid) == root
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    assert_as_found(server, run)
