"""Weight, vCPUs, quota and pause as the kernel carries them out, in both versions of its groups."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from deploy import check
from deploy.assembly import usable_hierarchy
from deploy.jobs import placement
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.placement import GroupPlacement, TaskPlacement
from deploy.jobs.runtimes import Attempt
from deploy.linux.cgroups import LEAST_WEIGHT, JobGroup, job_groups_beside, members
from deploy.records.proof import prepare
from deploy.settings import Settings
from env.allocation import Weight
from env.scenario import load_scenario
from tests.live.conftest import PATIENCE, needs_docker, needs_groups

MEMCACHED_WEIGHT = {1: 512, 2: 39}
"""39 is what Docker makes of its default on version 2."""

VCPU = max(os.sched_getaffinity(0))
SPIN = "while True: pass"


@pytest.fixture
def beside(server):
    """memcached in a group with a weight of its own, and a job's group beside it."""
    hierarchy = usable_hierarchy()
    parent = PurePosixPath(f"/coretide-test-{os.getpid()}")
    slice_, own = JobGroup(hierarchy, parent, 0), JobGroup(hierarchy, parent / "memcached", 0)
    slice_.create()
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
    process = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
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


@needs_groups
def test_a_jobs_group_lies_beside_memcacheds_and_weighs_the_same_or_the_least(beside):
    own, job = beside
    assert job.path.parent == own.path.parent
    for weight, value in (
        (Weight.NORMAL, MEMCACHED_WEIGHT[job.hierarchy.version]),
        (Weight.BACKGROUND, LEAST_WEIGHT[job.hierarchy.version]),
    ):
        job.set_weight(weight)
        assert job.weight() == value


@needs_groups
def test_the_check_tries_the_weights_where_jobs_will_live(beside, server, tmp_path):
    _, job = beside
    settings = Settings(server.host, server.port, "process", None, False, tmp_path, tmp_path)
    found = [finding.found for finding in check._groups(job.hierarchy, settings, server.pid)]
    version = job.hierarchy.version
    weights = f"{LEAST_WEIGHT[version]} against {MEMCACHED_WEIGHT[version]}"
    assert any(said.startswith(weights) for said in found), found


@needs_groups
def test_who_waits_for_a_shared_vcpu_is_the_background_job(beside):
    own, job = beside
    service, batch = spinner(own), spinner(job)
    try:
        job.set_weight(Weight.BACKGROUND)
        time.sleep(0.2)
        (service_s, service_delay_s), (batch_s, batch_delay_s) = over(2.0, service, batch)
        assert batch_s < 0.1 * service_s
        assert service_delay_s < 0.1 * batch_delay_s
        job.set_weight(Weight.NORMAL)
        time.sleep(0.2)
        (service_s, service_delay_s), (batch_s, batch_delay_s) = over(2.0, service, batch)
        assert 0.7 < batch_s / service_s < 1.4
        assert 0.7 < batch_delay_s / service_delay_s < 1.4
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
        placement.set_quota(0.2)
        ((limited_s, _),) = over(2.0, batch)
        assert limited_s < 2.0 * 0.4, version
        assert 0.0 < job.cpu_s() - used_s < 2.0
        placement.set_quota(None)
        ((free_s, _),) = over(2.0, batch)
        assert free_s > 2.0 * limited_s
    finally:
        placement.close()
        batch.kill()
        batch.wait()


@needs_docker
def test_docker_freezes_a_job_and_lets_it_go_on(beside, scenario_file, docker_daemon, tmp_path):
    _, job = beside
    runtime = DockerRuntime(job.hierarchy, f"test{os.getpid()}", docker_daemon.url)
    command = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "100000000"]
    scenario = load_scenario(scenario_file(dedup=command))
    folder = tmp_path / "attempt"
    folder.mkdir(mode=0o777)
    prepare(folder)
    attempt = Attempt(scenario.jobs[0], 1, 1, folder, job)
    instance = runtime.start(attempt, (0,), Weight.BACKGROUND)
    try:
        place = instance.placement
        assert (place.cores(), place.weight()) == ((0,), Weight.BACKGROUND)
        place.set_cores((1,))
        assert place.cores() == (1,)
        until_it_has_used(place, place.cpu_s() + 0.1)
        runtime.pause(instance)
        assert runtime.paused(instance)
        frozen = Path(f"/proc/{instance.pid}/cgroup").read_text().splitlines()
        if job.hierarchy.version == 2:
            group = job.hierarchy.folder(PurePosixPath(frozen[0].split(":", 2)[2]))
            assert (group / "cgroup.freeze").read_text().strip() == "1"
        used_s = place.cpu_s()
        time.sleep(0.5)
        assert place.cpu_s() == used_s
        runtime.resume(instance)
        assert not runtime.paused(instance)
        until_it_has_used(place, used_s + 0.1)
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
