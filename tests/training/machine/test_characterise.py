"""Characterising the real machine with real programs, and what stops it beforehand."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pandas as pd
import pytest
import yaml

from deploy.engines.images import STRESS_IMAGE
from deploy.linux.cgroups import JobGroup, find_hierarchy
from deploy.linux.signals import STOPPING
from env.allocation import Weight
from env.errors import InputError
from env.scenario import Job, Scenario, load_scenario
from env.simulator.profile import load_profile
from tests.training.machine.conftest import CONTENT
from training.analysis.queueing import SATURATED
from training.machine.characterisation import machine_name, main
from training.machine.fit_machine import fit_machine, write_profile
from training.machine.host_speed import yardstick_us
from training.machine.local_load import ROOM
from training.machine.machine_report import Measured, write_report
from training.measuring import actuation
from training.measuring import testbed as testbed_module
from training.measuring.campaign import GRID, Campaign, CampaignPlan
from training.measuring.experiment import Factor
from training.measuring.pressure import Beside, pressure
from training.measuring.rounds import Store
from training.measuring.samples import shortened
from training.measuring.testbed import (
    GROUP,
    Timing,
    end_leftovers,
    open_testbed,
)

heavy = pytest.mark.survival
"""Of a whole campaign, which takes half a minute; what stops one is tested always."""

live = pytest.mark.skipif(
    os.geteuid() != 0
    or not (shutil.which("memcached") and shutil.which("stress-ng"))
    or len(os.sched_getaffinity(0)) < 2,
    reason="needs root, memcached, stress-ng and 2 vCPUs",
)

CONNECTIONS = Factor("connections", (2, 8))
STARTS = 3
"""Of a job, where a campaign of a user's makes more; each is a container made and removed."""

CALM_SERVED = 0.5
"""Of a load far below saturation, at least: less was measured while somebody else had the CPU."""

CALM_BESIDE = 0.4
"""vCPUs that a background job gets at a small load, at least: a slow moment leaves it less."""

TRIES = 4
"""Campaigns at most until one tells: a machine that is stolen from now is calm a minute later."""

TINY = CampaignPlan("tiny", Timing(0.15, 0.05), (1, 1), 0.0, 10.0, 2.0, factors=(CONNECTIONS,))


def left_behind() -> list[str]:
    """Control groups of a characterisation that are still there."""
    mounts = find_hierarchy().mounts.values()
    return [str(p) for mount in set(mounts) for p in mount.glob("coretide-characterise-*")]


# --- on the real machine ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_docker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where Docker can be had, the daemon of all tests is the machine's."""
    with pytest.MonkeyPatch.context() as environment:
        if shutil.which("dockerd"):
            url = request.getfixturevalue("docker_daemon").url
            environment.setenv("DOCKER_HOST", url)
        yield


@pytest.fixture(scope="module")
def measured(
    scenario: Scenario, tmp_path_factory: pytest.TempPathFactory, with_docker: None
) -> Path:
    """A tiny campaign that is interrupted after its second sweep, and then goes on."""
    with pytest.MonkeyPatch.context() as few:
        few.setattr(actuation, "STARTS", STARTS)
        for _ in range(TRIES):
            out = tiny_campaign(scenario, tmp_path_factory.mktemp("campaign"))
            latency = pd.read_csv(out / "latency.csv")
            tells = passed_saturation(latency) and beside_when_calm(latency) > CALM_BESIDE
            if tells and served_when_calm(pd.read_csv(out / "factorial.csv")) > CALM_SERVED:
                break
    return out


def passed_saturation(latency: pd.DataFrame) -> bool:
    """Whether one vCPU's sweep says where its end is; in windows of 0.2 s stolen time hides it."""
    one = latency[(latency["cores"] == 1) & (latency["beside"] == "none")]
    return bool(one["achieved_qps"].max() < SATURATED * one["target_qps"].max())


def beside_when_calm(latency: pd.DataFrame) -> float:
    """vCPUs that the background job got at the load that left it most."""
    beside = latency[latency["beside"] == "cpu (background)"]
    return float(beside["beside_cores"].max())


def served_when_calm(factorial: pd.DataFrame) -> float:
    """Which part of the experiment's smaller load was served: one window of each combination."""
    calm = factorial[factorial["target_qps"] == factorial["target_qps"].min()]
    return float((calm["achieved_qps"] / calm["target_qps"]).median())


def tiny_campaign(scenario: Scenario, out: Path) -> Path:
    """The same, into a folder."""

    def interrupt(seconds: float, what: str) -> None:
        if what.endswith("(background)"):
            raise KeyboardInterrupt

    store = Store(out, {"mode": "tiny"})
    with pytest.raises(KeyboardInterrupt), open_testbed(out / "work", despite_load=True) as testbed:
        Campaign(scenario, TINY, store, interrupt).run(testbed)
    assert not left_behind()
    before = store.table("latency")
    assert before["what"].nunique() == 2
    relative = Path(os.path.relpath(out / "work"))
    with open_testbed(relative, despite_load=True) as testbed:
        Campaign(scenario, TINY, store).run(testbed)
    after = store.table("latency")
    pd.testing.assert_frame_equal(after.iloc[: len(before)], before, check_dtype=False)
    assert not left_behind()
    assert not (out / "work").exists()
    return out


@live
@heavy
def test_a_campaign_measures_every_arrangement_once(measured: Path) -> None:
    latency = pd.read_csv(measured / "latency.csv")
    assert set(latency["beside"]) == {"none", "cpu (background)", "cpu (equal)"}
    assert set(latency["cores"]) == {1, 2}
    assert (latency.groupby("what").size() == len(GRID)).all()
    assert (latency["rep"] == 0).all()


@live
@heavy
def test_equal_weight_costs_what_background_weight_does_not(measured: Path) -> None:
    latency = pd.read_csv(measured / "latency.csv")
    # A load that stalls and catches up can pass for three times as much within one short window.
    one = latency[latency["cores"] == 1]
    saturated = one[one["target_qps"] >= one["target_qps"].median()]
    most = saturated.groupby("beside")["achieved_qps"].median()
    assert most["cpu (equal)"] < 0.8 * most["cpu (background)"]
    # At the smallest load most of the vCPU is there for the job, at either weight.
    assert beside_when_calm(latency) > CALM_BESIDE
    assert (latency.loc[latency["beside"] == "none", "beside_cores"] == 0.0).all()


@live
@heavy
def test_a_sampled_job_takes_about_as_long_as_the_whole(measured: Path, scenario: Scenario) -> None:
    jobs = pd.read_csv(measured / "jobs.csv")
    one = jobs[jobs["threads"] == 1].iloc[0]
    assert 0.0 < one["sampled"] < 1.0
    with open_testbed(measured / "work", despite_load=True) as testbed:
        whole = testbed.time_job(scenario.jobs[0], 1, (0,))
    assert one["cpu_s"] == pytest.approx(whole["cpu_s"], rel=0.3)
    assert (jobs["yardstick_us"] > 0.0).all() and yardstick_us(jobs) is not None


@live
@heavy
def test_connections_are_a_factor_of_the_experiment(measured: Path) -> None:
    runs = pd.read_csv(measured / "factorial.csv")
    calm = runs[runs["target_qps"] == runs["target_qps"].min()]
    assert set(calm["connections"]) == {2, 8}
    assert served_when_calm(runs) > CALM_SERVED


@live
@heavy
def test_containers_are_timed_beside_processes_where_there_is_docker(measured: Path) -> None:
    seen = pd.read_csv(measured / "actuation.csv").set_index(["of", "action"])["n"]
    kinds = ("process", "docker") if shutil.which("dockerd") else ("process",)
    for kind in kinds:
        assert seen[kind, "start"] == STARTS
        assert seen[kind, "pause"] == seen[kind, "set_cores"] == STARTS * actuation.CHANGES


@live
@heavy
def test_a_change_costs_work_at_most_what_refills_a_cache(measured: Path) -> None:
    seen = pd.read_csv(measured / "actuation.csv").set_index(["of", "action"])
    for kind in ("move", "resume"):
        assert seen.loc[("work", kind), "n"] > 20
        assert abs(seen.loc[("work", kind), "median_s"]) < 0.005


@live
@heavy
def test_what_was_measured_becomes_profile_scenario_and_report(
    measured: Path, scenario: Scenario
) -> None:
    store = Store(measured, {"mode": "tiny"})
    names = ("latency", "jobs", "actuation", "factorial")
    latency, jobs, actuation, factorial = (store.table(name) for name in names)
    base = load_profile(scenario.profile)
    profile = fit_machine(scenario, base, latency, jobs, actuation, machine_name())
    assert profile.service["core_capacity_qps"].source == "measured here"
    assert profile.host["service_pressure"].source.startswith("prior (profile prior)")
    assert "SLO" in write_profile(profile, scenario, latency, store.table("capacity"), measured)
    made = load_scenario(measured / "scenario.yaml")
    one = latency[(latency["cores"] == 1) & (latency["beside"] == "none")]
    served = one.loc[one["target_qps"] >= one["target_qps"].median(), "achieved_qps"]
    least_knee = 0.3 * served.median()
    assert least_knee / ROOM < made.load.qps_max < latency["achieved_qps"].max()
    assert load_profile(made.profile).name == "here"
    tables = Measured(latency, jobs, actuation, factorial, TINY.factors)
    lines, summary = write_report(made, profile, tables, measured)
    assert any(line.startswith("bottleneck") for line in lines)
    assert summary["points"].sum() == len(latency) + len(jobs)
    page = (measured / "report.html").read_text()
    for picture in measured.glob("*.png"):
        assert picture.name in page


@live
def test_what_runs_beside_a_job_is_not_foreign_and_keeps_running(
    scenario: Scenario, tmp_path: Path
) -> None:
    job, _ = shortened(scenario.jobs[0], 0.2, 1)
    brief = Job(name="brief", command=("sleep", "0.05"), threads=(1,), memory_mib=1)
    with open_testbed(tmp_path / "work", despite_load=True) as testbed:
        with testbed.beside(pressure("cpu", (0,), Weight.NORMAL)) as source:
            row = testbed.time_job(job, 1, (0,), neighbour=source)
        with testbed.beside(Beside("brief", brief, 1, (1,), Weight.NORMAL)) as again:
            assert again is not None
            first = again.ended
            testbed.time_job(job, 1, (0,), neighbour=again)
            assert not select.select([again.ended], [], [], 0.0)[0] or again.ended != first
    # Counted as foreign, it would be half of the vCPU.
    assert row["foreign_cores"] < 0.4
    assert row["cpu_s"] < 0.8 * row["real_s"]


@live
def test_what_a_killed_characterisation_left_is_ended_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    hierarchy = find_hierarchy()
    group = JobGroup(hierarchy, PurePosixPath(f"/{GROUP}-{gone.pid}"), 1024)
    group.create()
    with subprocess.Popen(["sleep", "60"]) as left:
        for folder in hierarchy.folders(group.path):
            if folder.exists():
                (folder / "cgroup.procs").write_text(str(left.pid))
        end_leftovers(hierarchy)
        assert left.wait(timeout=5.0) == -signal.SIGKILL
    assert not group.exists()


@live
@pytest.mark.skipif(shutil.which("dockerd") is None, reason="needs dockerd")
def test_a_job_that_only_an_image_has_runs_in_a_container(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_docker: None
) -> None:
    monkeypatch.setattr(testbed_module, "needs_docker", lambda job: bool(job.image))
    job, _ = shortened(scenario.jobs[0], 0.2, 1)
    boxed = job.model_copy(update={"image": STRESS_IMAGE})
    with open_testbed(tmp_path / "work", despite_load=True) as testbed:
        testbed.require_images([boxed])
        plain, contained = (testbed.time_job(one, 1, (0,)) for one in (job, boxed))
        with pytest.raises(InputError, match="nor image no-such/image:1 in Docker"):
            testbed.require_images([boxed.model_copy(update={"image": "no-such/image:1"})])
    assert contained["start_s"] > plain["start_s"]
    assert contained["cpu_s"] == pytest.approx(plain["cpu_s"], rel=0.5)
    assert not left_behind()


@live
@pytest.mark.skipif(shutil.which("dockerd") is None, reason="needs dockerd")
def test_a_container_that_ends_at_once_is_reported_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_docker: None
) -> None:
    fails = ("sh", "-c", "echo no such input >&2; exit 3")
    job = Job(name="brief", image=STRESS_IMAGE, command=fails, threads=(1,), memory_mib=64)
    monkeypatch.setattr(testbed_module, "needs_docker", lambda job: True)
    said = "job brief: failed with 3: no such input"
    with open_testbed(tmp_path / "work", despite_load=True) as testbed:
        testbed.require_images([job])
        for _ in range(5):
            with pytest.raises(InputError, match=said):
                testbed.time_job(job, 1, (0,))
    assert not left_behind()


@live
def test_without_docker_it_says_which_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("PATH", "")
    with (
        open_testbed(tmp_path / "work", despite_load=True) as testbed,
        pytest.raises(InputError, match="dockerd: not found; install it"),
    ):
        _ = testbed.containers


@live
@heavy
def test_another_characterisation_is_not_mixed_in(measured: Path) -> None:
    with pytest.raises(InputError, match="holds another characterisation"):
        Store(measured, {"mode": "full"})


@live
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=heavy)])
def test_a_signal_stops_what_was_started(
    scenario: Scenario, tmp_path: Path, number: signal.Signals
) -> None:
    source = Path(scenario.profile).with_name("here.yaml")
    command = [sys.executable, "-m", "training.characterise", "--scenario", str(source)]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out"), "--quick", "--despite-load"],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        give_up_s = time.monotonic() + 180.0  # a busy machine imports slowly
        while not (servers := memcached_of(process.pid)):
            assert process.poll() is None and time.monotonic() < give_up_s
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=30.0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "the same command goes on" in said.decode()
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers)
    assert not [path for path in left_behind() if path.endswith(f"-{process.pid}")]


def memcached_of(parent: int) -> list[int]:
    """The memcached processes below a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name == "memcached" and int(rest.split()[1]) == parent:
            found.append(int(stat.parent.name))
    return found


# --- what stops it before anything is started -------------------------------------------------


@pytest.fixture
def command(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    source = Path(scenario.profile).with_name("here.yaml")
    monkeypatch.setattr(testbed_module.memcached, "running", lambda threads: pytest.fail("started"))
    kept = [signal.getsignal(number) for number in STOPPING]
    yield ["--scenario", str(source), "--out", str(tmp_path / "out"), "--quick"]
    for number, handler in zip(STOPPING, kept, strict=True):
        signal.signal(number, handler)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on standard error, in one line, when it exits with code 2."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    return said


def test_nobody_else_may_write_to_what_a_characterisation_makes(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0)
    try:
        refused([*command, "--scenario", "/nowhere"], capsys)
    finally:
        used = os.umask(before)
    assert used == 0o022


def test_a_missing_program_names_its_package(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(testbed_module.shutil, "which", lambda name: None)
    assert "apt-get install memcached" in refused(command, capsys)


@live
def test_one_vcpu_is_too_few(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(testbed_module.os, "sched_getaffinity", lambda pid: {0})
    assert "one vCPU; it takes 2" in refused(command, capsys)


@live
def test_without_permission_it_says_so(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(group: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(testbed_module.JobGroup, "create", forbid)
    assert "run as root" in refused(command, capsys)


@live
def test_a_busy_machine_is_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(testbed_module.Testbed, "foreign_share", lambda self: 0.9)
    assert "the machine is busy: other processes use 90%" in refused(command, capsys)
    assert not left_behind()


@live
def test_vcpus_that_are_not_there_are_named(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    content = CONTENT | {
        "machine": {"vcpus": 62, "memory_mib": 2048},
        "service": {"threads": 2, "slo_us": 800, "core_choices": [[0], [0, 61]]},
    }
    Path(command[1]).with_name("wide.yaml").write_text(yaml.safe_dump(content))
    command[1] = str(Path(command[1]).with_name("wide.yaml"))
    assert "wants vCPU 61; this machine lets 0, 1" in refused(command, capsys)


@live
def test_a_job_whose_program_is_nowhere_is_named(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    content = CONTENT | {"jobs": [CONTENT["jobs"][0] | {"command": ["no-such-program"]}]}
    Path(command[1]).with_name("without.yaml").write_text(yaml.safe_dump(content))
    command[1] = str(Path(command[1]).with_name("without.yaml"))
    assert "job matrix: no-such-program: not found" in refused(command, capsys)


@live
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cores=1,4", "gives memcached 1, 2 vCPUs"),
        ("cores=1", "NAME=LOW,HIGH"),
        ("speed=1,2", "threads, cores, connections, beside"),
        ("threads=2,1", "two rising whole numbers"),
        ("connections=1,1000", "from 1 to 256"),
        ("beside=none,noise", "beside is one of none, cpu"),
    ],
)
def test_a_factor_that_cannot_be_varied_is_named(
    command: list[str], given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused([*command, "--factors", given], capsys)


def test_a_scenario_that_is_none_is_named(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command[1] = "nope.yaml"
    assert "nope.yaml" in refused(command, capsys)


def test_ctrl_c_while_it_starts_ends_it_without_a_word(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training.characterise", "--scenario", "local"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE
    ) as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            while "numpy" not in maps.read_text():  # it imports what takes seconds
                assert process.poll() is None
                time.sleep(0.001)
            process.send_signal(signal.SIGINT)
            assert process.wait(20.0) == -signal.SIGINT
            assert process.stderr is not None and process.stderr.read() == b""
        finally:
            process.kill()  # or it would measure on, for minutes
