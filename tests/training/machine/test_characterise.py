"""Characterising a machine: on the real one with real programs, and on tables with known truth."""

import dataclasses
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import cast

import numpy as np
import pandas as pd
import pytest
import yaml

from deploy.engines.images import STRESS_IMAGE
from deploy.linux.cgroups import JobGroup, find_hierarchy
from deploy.linux.signals import STOPPING
from env.allocation import Weight
from env.errors import InputError
from env.physics.service import SERVICE_FIELDS, service_state
from env.scenario import Job, Scenario, load_scenario
from env.simulator.profile import Profile, load_profile, save_profile
from training.analysis.curves import knee_qps, trusted
from training.analysis.findings import curves, job_times
from training.machine import testbed as testbed_module
from training.machine.actuation import CHANGES, STARTS
from training.machine.characterisation import machine_name, main
from training.machine.experiment import Factor, combinations, factor, require
from training.machine.fit_machine import fit_machine, local_load, write_profile
from training.machine.fit_pairs import fit_pairs
from training.machine.machine_report import Measured, write_report
from training.machine.measure import (
    FULL,
    GRID,
    MARGIN,
    Campaign,
    CampaignPlan,
    Row,
    Store,
    Task,
    margin,
)
from training.machine.pressure import Beside, pressure
from training.machine.samples import shortened
from training.machine.testbed import (
    GROUP,
    Timing,
    end_leftovers,
    open_testbed,
)

live = pytest.mark.skipif(
    os.geteuid() != 0
    or not (shutil.which("memcached") and shutil.which("stress-ng"))
    or len(os.sched_getaffinity(0)) < 2,
    reason="needs root, memcached, stress-ng and 2 vCPUs",
)

CONNECTIONS = Factor("connections", (2, 8))
TINY = CampaignPlan("tiny", Timing(0.3, 0.1), (1, 1), 0.0, 10.0, factors=(CONNECTIONS,))

CONTENT = {
    "name": "here",
    "description": "two vCPUs",
    "profile": "prior.yaml",
    "machine": {"vcpus": 2, "memory_mib": 2048},
    "service": {"threads": 2, "slo_us": 800, "core_choices": [[0], [0, 1]]},
    "jobs": [
        {
            "name": "matrix",
            "command": ["stress-ng", "--quiet", "--matrix", "{threads}", "--matrix-ops", "20000"],
            "threads": [1, 2],
            "memory_mib": 256,
        }
    ],
    "load": {"qps_min": 5000, "qps_max": 180000, "interval_s": 10, "duration_s": 1800},
    "control": {"period_s": 0.025, "hold_s": 1.0, "wake_qps": 15000},
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    folder = tmp_path_factory.mktemp("scenario")
    base = load_profile("cca-2025")
    jobs = {"matrix": base.jobs["vips"]}
    save_profile(base.model_copy(update={"jobs": jobs, "name": "prior"}), folder / "prior.yaml")
    (folder / "here.yaml").write_text(yaml.safe_dump(CONTENT))
    return load_scenario(folder / "here.yaml")


def left_behind() -> list[str]:
    """Control groups of a characterisation that are still there."""
    mounts = find_hierarchy().mounts.values()
    return [str(p) for mount in set(mounts) for p in mount.glob("coretide-characterise-*")]


# --- on the real machine ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny campaign that is interrupted after its second sweep, and then goes on."""
    out = tmp_path_factory.mktemp("campaign")

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
def test_a_campaign_measures_every_arrangement_once(measured: Path) -> None:
    latency = pd.read_csv(measured / "latency.csv")
    assert set(latency["beside"]) == {"none", "cpu (background)", "cpu (equal)"}
    assert set(latency["cores"]) == {1, 2}
    assert (latency.groupby("what").size() == len(GRID)).all()
    assert (latency["rep"] == 0).all()


@live
def test_equal_weight_costs_what_background_weight_does_not(measured: Path) -> None:
    latency = pd.read_csv(measured / "latency.csv")
    most = latency[latency["cores"] == 1].groupby("beside")["achieved_qps"].max()
    assert most["cpu (equal)"] < 0.8 * most["cpu (background)"]
    # At the smallest load most of the vCPU is there for the job, at either weight.
    calm = latency.groupby("beside")["beside_cores"].max()
    assert calm["cpu (background)"] > 0.4 and calm["none"] == 0.0


@live
def test_a_sampled_job_takes_about_as_long_as_the_whole(measured: Path, scenario: Scenario) -> None:
    jobs = pd.read_csv(measured / "jobs.csv")
    one = jobs[jobs["threads"] == 1].iloc[0]
    assert 0.0 < one["sampled"] < 1.0
    with open_testbed(measured / "work", despite_load=True) as testbed:
        whole = testbed.time_job(scenario.jobs[0], 1, (0,))
    assert one["cpu_s"] == pytest.approx(whole["cpu_s"], rel=0.3)


@live
def test_connections_are_a_factor_of_the_experiment(measured: Path) -> None:
    runs = pd.read_csv(measured / "factorial.csv")
    calm = runs[runs["target_qps"] == runs["target_qps"].min()]
    assert set(calm["connections"]) == {2, 8}
    assert (calm["achieved_qps"] > 0.5 * calm["target_qps"]).all()


@live
def test_containers_are_timed_beside_processes_where_there_is_docker(measured: Path) -> None:
    seen = pd.read_csv(measured / "actuation.csv").set_index(["of", "action"])["n"]
    kinds = ("process", "docker") if shutil.which("dockerd") else ("process",)
    for kind in kinds:
        assert seen[kind, "start"] == STARTS
        assert seen[kind, "pause"] == seen[kind, "set_cores"] == STARTS * CHANGES


@live
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
    assert "SLO" in write_profile(profile, scenario, latency, measured)
    made = load_scenario(measured / "scenario.yaml")
    assert made.load.qps_max > latency["achieved_qps"].max() * 0.3
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
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
def test_another_characterisation_is_not_mixed_in(measured: Path) -> None:
    with pytest.raises(InputError, match="holds another characterisation"):
        Store(measured, {"mode": "full"})


@live
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
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


# --- how often things are measured --------------------------------------------------------------

REPEATED = CampaignPlan("repeated", Timing(1.0, 0.3), (3, 9), math.inf, 10.0)


class Source:
    """A sweep whose points are known to be calm, noisy, or disturbed in the first two rounds."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self._rng = np.random.default_rng(0)

    @property
    def task(self) -> Task:
        return Task("latency", "sweep", "target_qps", (1, 2, 3), "p95_us", 1.0, self.measure)

    def measure(self, testbed: object, points: Sequence[int]) -> list[Row]:
        self.asked.append(list(points))
        return [
            {
                "target_qps": point,
                "p95_us": 100.0 * (1.0 + (0.5 if point == 2 else 0.01) * self._rng.normal()),
                "disturbed": 2.0 * (point == 3 and len(self.asked) <= 2),
            }
            for point in points
        ]


def repeat(source: Source, mode: CampaignPlan, folder: Path, scenario: Scenario) -> pd.DataFrame:
    """The rows of all rounds that a campaign makes."""
    store = Store(folder, {})
    Campaign(scenario, mode, store).repeat(cast(testbed_module.Testbed, None), [source.task])
    return store.rows("latency", "sweep")


def test_points_are_repeated_until_they_are_known_or_often_enough(
    scenario: Scenario, tmp_path: Path
) -> None:
    source = Source()
    rows = repeat(source, REPEATED, tmp_path, scenario)
    assert source.asked[:5] == [[1, 2, 3]] * 3 + [[2, 3]] * 2
    assert source.asked[5:] == [[2]] * 4  # up to nine rounds
    calm = rows[rows["disturbed"] == 0].groupby("target_qps")["p95_us"].apply(list)
    assert margin(calm[1]) < MARGIN and margin(calm[3]) < MARGIN < margin(calm[2])


def test_rounds_that_were_measured_are_not_measured_again(
    scenario: Scenario, tmp_path: Path
) -> None:
    whole, again = Source(), Source()
    repeat(whole, REPEATED, tmp_path, scenario)
    repeat(again, REPEATED, tmp_path, scenario)
    assert again.asked == []


def test_after_its_time_only_the_least_rounds_are_made(scenario: Scenario, tmp_path: Path) -> None:
    source = Source()
    repeat(source, dataclasses.replace(REPEATED, limit_s=0.5), tmp_path, scenario)
    assert source.asked == [[1, 2, 3]] * 3
    more = Source()  # and given more time, it goes on
    repeat(more, REPEATED, tmp_path, scenario)
    assert more.asked[0] == [2, 3]


def test_a_job_that_does_not_end_in_time_is_run_as_rarely_as_possible() -> None:
    task = Task("jobs", "j", "threads", (1,), "real_s", 1.0, lambda testbed, points: [])
    rows = pd.DataFrame({"threads": [1], "real_s": [math.nan], "disturbed": [0.0]})
    assert task.unknown(rows, (1, 9)) == []


def test_every_combination_of_levels_is_run_once() -> None:
    factors = [factor("threads=1,2"), factor("beside=none,cpu")]
    assert combinations(factors) == [
        {"beside": "none", "threads": 1},
        {"beside": "none", "threads": 2},
        {"beside": "cpu", "threads": 1},
        {"beside": "cpu", "threads": 2},
    ]
    assert combinations([]) == []


def test_a_factor_is_varied_once(scenario: Scenario) -> None:
    with pytest.raises(InputError, match="once, not threads, threads"):
        require([factor("threads=1,2"), factor("threads=2,4")], scenario)


# --- tables with known truth ------------------------------------------------------------------


def true_parameters() -> np.ndarray:
    base = load_profile("cca-2025").service_array()
    truth = dict(zip(SERVICE_FIELDS, base, strict=True))
    truth |= {"core_capacity_qps": 400e3, "idle_us": 80.0, "level_us": 110.0, "rise_qps": 90e3}
    truth |= {"queue_us": 30.0, "outstanding": 250.0, "slice_us": 100.0}
    truth |= {"background_capacity": 0.04, "background_latency": 0.02}
    return np.array([truth[name] for name in SERVICE_FIELDS])


def predicted_p95(profile: Profile | None, load_qps: float) -> float:
    """p95 of two threads on one vCPU, by a profile or in truth."""
    params = true_parameters() if profile is None else profile.service_array()
    nobody = np.zeros(2)
    state = service_state(load_qps, 2, 1, np.array([-1, -1]), nobody, nobody, 0.0, params)
    return float(state[0])


def machine_tables(scenario: Scenario) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """What a machine that obeys the physics would be measured to do."""
    params = true_parameters()
    siblings, nobody = np.array([-1, -1]), np.zeros(2)
    rng = np.random.default_rng(0)
    rows = []
    for beside in ("none", "cpu (background)", "cpu (equal)"):
        for cores in (1, 2) if beside == "none" else (1,):
            for target in 400e3 * np.array(GRID):
                used = 0.0 if beside == "none" else max(1.0 - target / 400e3, 0.0)
                equal = np.array([max(used, 0.5), 0.0]) if "equal" in beside else nobody
                background = np.array([used, 0.0]) if "background" in beside else nobody
                p95, capacity, cpu, _ = service_state(
                    target, 2, (1 << cores) - 1, siblings, background, equal, 0.0, params
                )
                for rep in range(3):
                    rows.append(
                        {
                            "threads": 2,
                            "cores": cores,
                            "beside": beside,
                            "rep": rep,
                            "target_qps": target,
                            "achieved_qps": min(target, capacity),
                            "p95_us": p95 * np.exp(0.03 * rng.normal()),
                            "avg_us": 0.6 * p95,
                            "p50_us": 0.5 * p95,
                            "p99_us": 1.5 * p95,
                            "cpu_util_pct": 100.0 * cpu,
                            "beside_cores": float((equal + background)[0]),
                            "client_cores": 0.3,
                            "shares_client": 0.0,
                            "disturbed": 0.0,
                        }
                    )
    jobs = pd.DataFrame(
        {
            "what": f"matrix {threads}",
            "job": "matrix",
            "threads": threads,
            "beside": "none",
            "real_s": 0.5 + 30.0 * (0.1 + 0.9 / threads),
            "overhead_s": 0.5,
            "disturbed": 0.0,
            "rep": rep,
        }
        for threads in (1, 2)
        for rep in range(2)
    )
    actions = [("process", name) for name in ("set_cores", "start", "pause", "resume")]
    actions += [("service", name) for name in ("pin_service", "sensor_noise")]
    times = {"median_s": 0.01, "p90_s": 0.02, "p99_s": 0.03, "n": 9}
    actuation = pd.DataFrame([{"of": of, "action": name} | times for of, name in actions])
    return pd.DataFrame(rows), jobs, actuation


def test_the_fit_finds_the_machine_that_made_the_tables(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    profile = fit_machine(scenario, base, *machine_tables(scenario), "a machine")
    service = profile.service
    assert service["core_capacity_qps"].value == pytest.approx(400e3, rel=0.03)
    # Slice and plateau stand in for each other where all sweeps have two threads on one vCPU.
    assert predicted_p95(profile, 600e3) == pytest.approx(predicted_p95(None, 600e3), rel=0.1)
    assert predicted_p95(profile, 200e3) == pytest.approx(predicted_p95(None, 200e3), rel=0.1)
    assert service["background_capacity"].value < 0.1  # the prior says 0.18
    assert profile.fit_error["in-sample p95 alone, median"] < 0.05
    assert service["core_capacity_qps"].source == "measured here"
    assert service["smt"].source.startswith("prior")  # no siblings here
    job = profile.jobs["matrix"]
    assert job["work_s"].value == pytest.approx(30.0, rel=0.05)
    serial = job["serial_fraction"].value
    two_threads_s = job["work_s"].value * (serial + (1.0 - serial) / 2.0)
    assert two_threads_s == pytest.approx(30.0 * 0.55, rel=0.05)
    assert job["sensitivity"].source.startswith("prior")
    assert profile.host["fast_latency_s"].value == pytest.approx(0.01)


def test_container_times_are_those_of_docker_where_jobs_have_images(scenario: Scenario) -> None:
    base = load_profile(scenario.profile)
    latency, jobs, actuation = machine_tables(scenario)
    boxed = scenario.model_copy(
        update={"jobs": tuple(j.model_copy(update={"image": "i"}) for j in scenario.jobs)}
    )
    host = fit_machine(boxed, base, latency, jobs, actuation, "m").host
    assert host["container_start_s"].source.startswith("prior")
    processes = actuation[actuation["of"] == "process"]
    docker = processes.assign(of="docker", median_s=0.4)
    host = fit_machine(boxed, base, latency, jobs, pd.concat([actuation, docker]), "m").host
    assert host["container_start_s"].value == pytest.approx(0.4)
    assert "docker" in host["api_latency_p99_s"].source


def test_everything_measured_has_a_name_of_its_own(tmp_path: Path) -> None:
    campaign = Campaign(load_scenario("local"), FULL, Store(tmp_path, {}))
    tasks = list(campaign.tasks(1e5, 2))
    assert {"sort T1 beside cpu", "sort T1 beside job cpu"} < {task.key for task in tasks}
    assert len({(task.table, task.key) for task in tasks}) == len(tasks)


def test_pairs_tell_who_slows_whom_down(scenario: Scenario) -> None:
    base = load_profile("cca-2025")
    rng = np.random.default_rng(4)
    truth = {name: 0.1 * 2.0**k for k, name in enumerate(sorted(base.jobs))}  # sensitivity
    rows = [
        {"source": "here", "job": job, "threads": 1, "beside": beside, "rep": rep}
        | {"real_s": 10.0 * (1.0 + (0.5 * truth[job] if beside != "none" else 0.0))}
        for job in truth
        for beside in ("none", *(f"job {other}" for other in truth if other != job))
        for rep in range(3)
    ]
    jobs = pd.DataFrame(rows)
    jobs["real_s"] *= 1.0 + 0.005 * rng.normal(size=len(jobs))
    namesake = jobs[jobs["beside"] == "none"].assign(beside="radix", real_s=30.0)  # a source
    fitted = fit_pairs(base, job_times(pd.concat([jobs, namesake]))).jobs
    for job in truth:
        for other in set(truth) - {job}:
            product = fitted[job]["sensitivity"].value * fitted[other]["pressure"].value
            assert product == pytest.approx(0.5 * truth[job], rel=0.15, abs=0.02)
    most = max(truth, key=truth.__getitem__)
    assert fitted[most]["sensitivity"].source == "measured here, in pairs, with its prior"
    assert fit_pairs(base, job_times(jobs[jobs["beside"] == "none"])) == base


def test_disturbed_rounds_make_up_the_number_that_is_needed() -> None:
    table = pd.DataFrame({"point": [1, 1, 1, 1, 2, 2], "disturbed": [0, 1, 2, 1, 2, 2]})
    assert trusted(table, ["point"]).index.tolist() == [0, 4, 5]
    assert trusted(table, ["point"], least=2).index.tolist() == [0, 1, 3, 4, 5]


def test_the_report_names_what_matters_and_how_well_it_is_known(
    scenario: Scenario, tmp_path: Path
) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    rng = np.random.default_rng(3)
    pressed = [
        {"job": "matrix", "threads": 1, "beside": beside, "rep": rep, "disturbed": 0.0}
        | {"real_s": seconds * (1.0 + 0.01 * rng.normal()), "overhead_s": 0.5}
        for beside, seconds in (("cpu", 61.0), ("membw", 36.6))
        for rep in range(3)
    ]
    runs = [
        {"threads": threads, "connections": connections, "target_qps": target}
        | {"disturbed": float(rep > 0 and threads == connections // 4 == 2)}
        | {"p95_us": 100.0 + rng.normal(), "achieved_qps": 1e5 * threads + 100.0 * rng.normal()}
        for threads in (1, 2)
        for connections in (2, 8)
        for target in (2e5, 7e5)
        for rep in range(3)
    ]
    factors = (factor("threads=1,2"), CONNECTIONS)
    jobs = pd.concat([jobs, pd.DataFrame(pressed)])
    profile = fit_machine(
        scenario, load_profile(scenario.profile), latency, jobs, actuation, "a machine"
    )
    tables = Measured(latency, jobs, actuation, pd.DataFrame(runs), factors)
    _, summary = write_report(scenario, profile, tables, tmp_path)
    by_name = summary.set_index("measured")
    assert by_name.loc["memcached T2C1 alone, p95", "points"] == len(GRID)
    assert by_name.loc["matrix beside something", "rounds"] == 3
    page = (tmp_path / "report.html").read_text()
    assert "3 rounds each, 2 of these runs disturbed: of the variation threads 100%" in page
    load = pd.read_csv(tmp_path / "breaches.csv")["target_qps"].unique().item()
    alone = curves(latency.assign(source="here")).query("beside == 'none' and cores == 1")
    served = alone.query("achieved_qps >= 0.97 * target_qps")
    within = served.loc[served["p95_us"] <= scenario.service.slo_us, "target_qps"]
    assert alone["target_qps"].min() < load == within.max() < alone["target_qps"].max()
    times = pd.read_csv(tmp_path / "job-times.csv").set_index(["beside", "threads"])
    assert times.loc[("cpu", 1), "ratio"] == pytest.approx(2.0, rel=0.02)
    assert 0.0 < times.loc[("cpu", 1), "ratio_ci"] < 0.2
    assert len(pd.read_csv(tmp_path / "speedups.csv")) == 2


def test_load_and_slo_follow_their_rule(scenario: Scenario, tmp_path: Path) -> None:
    latency, _, _ = machine_tables(scenario)
    most, slo_us, text = local_load(latency, 2)
    medians = latency.groupby(["cores", "beside", "target_qps"])["p95_us"].median()
    one = medians[1, "none"]
    assert most == pytest.approx(1.15 * knee_qps(one.index.to_numpy(), one.to_numpy()))
    fast, slow = (
        np.interp(most, medians[curve].index, medians[curve])
        for curve in ((2, "none"), (1, "cpu (equal)"))
    )
    assert fast < slo_us < slow
    assert slo_us == pytest.approx((slow * fast) ** 0.5, rel=0.02)
    assert "geometric mean" in text
    no_knee = (latency["beside"] == "none") & (latency["cores"] == 1)
    most, _, text = local_load(latency.assign(p95_us=latency["p95_us"].mask(no_knee, 900.0)), 2)
    assert most == pytest.approx(1.15 * 400e3, rel=0.02) and "CAUTION" in text
    below = latency[latency["target_qps"] < 300e3]
    with pytest.raises(InputError, match="has no knee"):
        local_load(below, 2)


def test_what_requests_cost_is_measured(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    part = np.minimum(latency["achieved_qps"] / 400e3, 1.0)
    latency["cpu_util_pct"] = 100.0 * part**0.6
    latency["client_cores"] = 0.7 * part**0.4
    base = load_profile(scenario.profile)
    remote = fit_machine(scenario, base, latency, jobs, actuation, "m").costs
    assert remote["service_exponent"].value == pytest.approx(0.6, rel=0.1)
    assert "client_cpu" not in remote  # it takes none of the scenario's vCPUs
    latency["shares_client"] = (latency["cores"] > 1).astype(float)
    local = fit_machine(scenario, base, latency, jobs, actuation, "m").costs
    assert local["client_cpu"].value == pytest.approx(0.7, rel=0.1)
    assert local["client_exponent"].value == pytest.approx(0.4, rel=0.1)


def test_a_job_that_does_not_scale_is_known_as_badly_as_the_law_fits(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    jobs["real_s"] = 20.0  # with two threads as with one; the law allows 0.75 of it
    profile = fit_machine(scenario, load_profile(scenario.profile), latency, jobs, actuation, "m")
    assert 0.02 < profile.jobs["matrix"]["work_s"].spread < 0.5
    assert profile.jobs["matrix"]["serial_fraction"].spread <= 1.0


def test_disturbed_points_do_not_move_the_fit(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    broken = latency[latency["rep"] == 0].assign(disturbed=2.0, p95_us=9e4, achieved_qps=1e3)
    base = load_profile(scenario.profile)
    mixed = fit_machine(scenario, base, pd.concat([latency, broken]), jobs, actuation, "m")
    clean = fit_machine(scenario, base, latency, jobs, actuation, "m")
    assert mixed.service == clean.service


def test_a_job_that_did_not_end_keeps_its_prior_or_is_named(scenario: Scenario) -> None:
    latency, jobs, actuation = machine_tables(scenario)
    jobs["real_s"] = np.nan
    base = load_profile(scenario.profile)
    profile = fit_machine(scenario, base, latency, jobs, actuation, "m")
    assert profile.jobs["matrix"]["work_s"].source.startswith("prior (profile prior)")
    assert profile.jobs["matrix"]["work_s"].value == base.jobs["matrix"]["work_s"].value
    with pytest.raises(InputError, match="job matrix: did not end in time"):
        other = base.model_copy(update={"jobs": {}})
        fit_machine(scenario, other, latency, jobs, actuation, "m")


@pytest.mark.parametrize(
    ("command", "threads", "expected", "part"),
    [
        (("s", "--matrix-ops", "1000"), 1, ("s", "--matrix-ops", "250"), 0.25),
        (("s", "--cpu-ops=8", "-t", "0"), 1, ("s", "--cpu-ops=2", "-t", "0"), 0.25),
        (("s", "--tree-ops", "36"), 2, ("s", "--tree-ops", "8"), 8 / 36),  # four each
        (("s", "--cpu-ops", "1"), 1, ("s", "--cpu-ops", "1"), 1.0),
        (("./run", "-n", "4"), 1, ("./run", "-n", "4"), 1.0),
    ],
)
def test_a_stress_job_is_cut_short_by_its_operations(
    command: tuple[str, ...], threads: int, expected: tuple[str, ...], part: float
) -> None:
    job = Job(name="j", command=command, threads=(1, 2), memory_mib=1)
    cut, really = shortened(job, 0.25, threads)
    assert (cut.command, really) == (expected, pytest.approx(part))
