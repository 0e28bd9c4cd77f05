"""Whole deployments: jobs end once, memcached moves, and the machine is left as it was found."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker
import pytest
import yaml

from deploy.jobs.runtimes import PIDS_LIMIT
from deploy.linux import service_process
from deploy.records import run_report
from deploy.records.client_join import read_client
from deploy.records.predicted import Prediction, read_policy
from deploy.records.recorder import (
    EVENTS_FILE,
    PAGE_FILE,
    POLICY_FILE,
    PREDICTION_FILE,
    SAMPLES_FILE,
    SCENARIO_FILE,
    guard_levels,
    read_events,
)
from deploy.records.run_report import read_report
from deploy.records.state import claim
from tests.live.conftest import (
    JOBS,
    LONG,
    PATIENCE,
    assert_as_found,
    needs_docker,
    write_checkpoint,
)

UNPREDICTED = Prediction(profile="", measured=None, replayed=None, free=None, remarks=[])


def jobs_ended(deployment):
    events = read_events(deployment.report)
    return sorted(event.job for event in events if event.what == "end" and event.job in JOBS)


def await_freed(server):
    """The guardian's promise: memcached has its vCPUs back within a second."""
    give_up_s = time.monotonic() + 1.0 * PATIENCE
    while set(service_process.affinities(server.pid).values()) != {(0, 1)}:
        assert time.monotonic() < give_up_s, "memcached is still held"
        time.sleep(0.01)


@pytest.mark.parametrize("policy", ["groups", "checkpoint"])
def test_processes_run_to_their_end_and_leave_no_trace(
    deploy, server, scenario_file, groups_file, tmp_path, policy
):
    scenario = scenario_file(sharing=policy == "groups")
    who = ["--policy", str(groups_file)]
    if policy == "checkpoint":
        who = ["--checkpoint", str(write_checkpoint(tmp_path / "new.zip", scenario))]
    run = deploy(*who, "--scenario", str(scenario), "--runtime", "process")
    assert run.finish() == 0, run.lines
    assert jobs_ended(run) == ["dedup", "radix"]
    assert_as_found(server, run)
    assert not (run.state / "state.json").exists()
    assert not (run.report / PREDICTION_FILE).exists(), "--no-pictures takes no time for it"


@needs_docker
def test_containers_run_to_their_end_and_leave_no_trace(
    deploy, server, scenario_file, groups_file, docker_daemon
):
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario_file())),
        *("--docker", docker_daemon.url),
    )
    assert run.finish() == 0, run.lines
    assert jobs_ended(run) == ["dedup", "radix"]
    assert_as_found(server, run)
    client = docker.DockerClient(base_url=docker_daemon.url)
    assert client.containers.list(all=True) == []
    client.close()


@needs_docker
def test_containers_have_no_network_no_rights_and_nothing_to_write_to(
    deploy, scenario_file, groups_file, docker_daemon
):
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario_file(dedup=LONG, radix=LONG))),
        *("--docker", docker_daemon.url),
    )
    run.expect(r"dedup start \[")
    client = docker.DockerClient(base_url=docker_daemon.url)
    running = client.containers.list()
    container = next((c for c in running if c.name.endswith("-dedup-1")), None)
    assert container is not None, (running, run.lines, run.process.poll())
    settings = container.attrs["HostConfig"]
    assert settings["NetworkMode"] == "none"
    assert settings["ReadonlyRootfs"]
    assert settings["CapDrop"] == ["ALL"]
    assert settings["PidsLimit"] == PIDS_LIMIT
    mounted = {mount["Destination"]: mount["RW"] for mount in container.attrs["Mounts"]}
    assert mounted == {"/proof/exit": True, "/proof/gate": False}
    assert container.exec_run(["stress-ng", "--version"]).exit_code == 0
    assert container.exec_run(["sh", "-c", "echo x > /usr/bin/x"]).exit_code != 0
    client.close()


def test_a_job_that_fails_is_retried_reported_and_given_up_while_others_finish(
    deploy, server, scenario_file, groups_file
):
    scenario = scenario_file(
        dedup=["sh", "-c", "echo no such luck; exit 3"],
        radix=["stress-ng", "--cpu", "{threads}", "--cpu-ops", "200"],
    )
    run = deploy("--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process")
    assert run.finish() == 1
    assert run.count(r"dedup attempt \d failed: exit code 3; last output: no such luck") == 3
    assert run.count("dedup end") == 1
    assert run.count("radix end") == 1
    jobs = read_report(run.report)["jobs"]
    assert (jobs["dedup"]["retries"], jobs["radix"]["retries"]) == (3, 0)
    assert_as_found(server, run)


def test_a_probed_run_shorter_than_an_interval_has_latency_to_report(
    deploy, server, scenario_file, groups_file
):
    quick = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "200"]
    scenario = scenario_file(dedup=quick, radix=quick)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--probe"]
    run = deploy(*options, "--runtime", "process")
    assert run.finish() == 0
    report = read_report(run.report)
    assert len(report["p95_us"]) == 1
    assert report["p95_us"][0] > 0.0
    assert report["reaction_ms"] == {"p50": None, "p99": None}
    assert 0.1 < report["loop"]["cpu_pct"] < 50.0
    decided = read_policy(run.report)
    assert decided.source == str(groups_file) and decided.unchanged


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_it_restores_everything(deploy, server, scenario_file, groups_file, number):
    scenario = scenario_file(dedup=LONG, radix=LONG)
    run = deploy("--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process")
    run.expect(r"dedup start \[")
    run.expect(r"update_cores \[0\]$")
    assert set(service_process.affinities(server.pid).values()) == {(0,)}
    run.process.send_signal(number)
    assert run.finish() == 128 + number
    assert_as_found(server, run)
    report = read_report(run.report)
    assert report["restored"]
    assert report["makespan_s"] is None
    assert {job["exit_code"] for job in report["jobs"].values()} == {None}
    assert report["jobs"]["dedup"]["start_s"] > 0.0


def test_a_killed_loop_is_made_safe_within_a_second_and_resumed(
    deploy, server, scenario_file, groups_file
):
    job = ["sleep", "3"]
    options = ["--policy", str(groups_file), "--scenario", str(scenario_file(dedup=job, radix=job))]
    options += ["--runtime", "process", "--probe"]
    run = deploy(*options)
    run.expect(r"radix start \[")
    run.expect(r"update_cores \[0\]$")
    started = json.loads((run.state / "state.json").read_text())["jobs"]
    run.kill()
    await_freed(server)
    again = deploy(*options, "--resume")
    assert again.finish() == 0, again.lines
    assert jobs_ended(again) == ["dedup", "radix"]
    assert [job["attempts"] for job in started.values()] == [1, 1]
    assert again.count(" start ") == 0, again.lines
    assert_as_found(server, run)
    assert read_report(again.report)["p95_us"]  # what the probe measures is written down again


def test_what_the_loop_fails_to_restore_is_left_to_the_guardian(
    deploy, server, scenario_file, groups_file
):
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options, program=("-m", "tests.live.faults", "restoring-raises"))
    run.expect(r"dedup start \[")
    run.expect(r"update_cores \[0\]$")
    run.process.send_signal(signal.SIGTERM)
    run.expect("guardian: memcached has its vCPUs back")
    assert run.finish() == 1, run.lines
    assert set(service_process.affinities(server.pid).values()) == {(0, 1)}
    assert (run.state / "state.json").exists()


def test_a_resume_that_is_refused_costs_no_job(deploy, server, scenario_file, groups_file):
    scenario = scenario_file(dedup=["sleep", "2"], radix=["sleep", "2"])
    policy = ["--policy", str(groups_file)]
    options = ["--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*policy, *options)
    run.expect(r"radix start \[")
    run.kill()
    refused = deploy(*options, "--checkpoint", "best.zip", "--resume")
    assert refused.finish() == 2
    refused.expect("best.zip: made for scenario cca-2025")
    again = deploy(*policy, *options, "--resume")
    assert again.finish() == 0, again.lines
    assert jobs_ended(again) == ["dedup", "radix"]
    assert again.count(" start ") == 0, again.lines
    assert_as_found(server, run)


def test_a_resume_follows_nobody_else_than_the_memcached_it_knew(
    deploy, server, scenario_file, groups_file, tmp_path
):
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options)
    run.expect(r"radix start \[")
    run.kill()
    server.process.kill()
    server.process.wait()
    stranger = tmp_path / "memcached"
    shutil.copy(shutil.which("memcached"), stranger)
    port = ("-p", str(server.port), "-l", server.host, "-u", "root")
    with subprocess.Popen([str(stranger), *port]) as other:
        try:
            had = set(service_process.affinities(other.pid).values())
            refused = deploy(*options, "--resume")
            assert refused.finish() == 2
            refused.expect(f"not followed: {stranger} of user 0 answers in its place")
            assert set(service_process.affinities(other.pid).values()) == had
        finally:
            other.kill()


def test_a_machine_whose_memcached_has_ended_is_not_reported_as_restored(
    deploy, server, scenario_file, groups_file
):
    commands = {job: ["sleep", "1"] for job in JOBS}
    scenario = scenario_file(**commands)
    run = deploy(
        *("--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process")
    )
    run.expect(r"radix start \[")
    server.process.kill()
    server.process.wait()
    run.finish()
    assert jobs_ended(run) == ["dedup", "radix"]
    run.expect("is gone; all else is as it was found")
    assert read_report(run.report)["restored"] is False


def test_what_the_guard_did_is_in_the_log_and_in_the_report(
    deploy, server, scenario_file, groups_file
):
    path = scenario_file(dedup=LONG, radix=LONG)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["service"]["slo_us"] = 10.0  # no request is so quick
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    options = ("--policy", str(groups_file), "--scenario", str(path), "--probe")
    run = deploy(*options, "--runtime", "process")
    run.expect("guard up to level 4")
    run.process.send_signal(signal.SIGTERM)
    run.finish()
    levels = guard_levels(read_events(run.report))
    guard = read_report(run.report)["guard"]
    assert max(level for _, level in levels) == 4
    assert guard["steps"] >= 4
    assert 0.0 < guard["share_of_time"] <= 1.0


def test_a_killed_deployment_can_be_undone(deploy, server, scenario_file, groups_file):
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options)
    run.expect(r"radix start \[")
    run.kill()
    refused = deploy(*options)
    assert refused.finish() == 2
    assert refused.count("use --resume or --restore") == 1
    undone = deploy("--restore")
    assert undone.finish() == 0
    assert_as_found(server, run)
    names = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run.state) not in names


def test_proofs_of_a_deployment_whose_state_is_lost_prove_nothing_to_the_next(
    deploy, server, scenario_file, groups_file, tmp_path
):
    worked = tmp_path / "worked"
    scenario = scenario_file(dedup=["sh", "-c", f"echo once >> {worked}"], radix=["sleep", "2"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    lost = deploy(*options)
    lost.expect("dedup end")
    lost.kill()
    await_freed(server)
    state = lost.state / "state.json"
    content = state.read_text()
    state.unlink()
    run = deploy(*options)
    assert run.finish() == 0, run.lines
    assert worked.read_text() == "once\n" * 2
    assert list(run.state.glob("attempt-*")) == []
    state.write_text(content)  # found again, to undo what else there is of it
    assert deploy("--restore").finish() == 0
    assert_as_found(server, lost)


def test_a_dry_run_touches_nothing(deploy, server, scenario_file, groups_file, tmp_path):
    before = service_process.affinities(server.pid)
    log = tmp_path / "report" / EVENTS_FILE
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    run = deploy("--policy", str(groups_file), "--scenario", str(scenario_file()), "--dry-run")
    run.expect("would start dedup with 1 threads on 1")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 0
    assert service_process.affinities(server.pid) == before
    assert not (run.state / "state.json").exists()
    assert list(log.parent.iterdir()) == [log]
    assert log.read_text() == "of an earlier run\n"


def test_the_probe_runs_on_the_machines_last_vcpu_not_on_the_scenarios(
    deploy, server, scenario_file, groups_file
):
    path = scenario_file()
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["machine"]["vcpus"] = os.cpu_count() + 1
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    run = deploy("--policy", str(groups_file), "--scenario", str(path), "--dry-run", "--probe")
    run.expect("would start")
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")

    def vcpus_of_probes() -> list[set[int]]:
        return [
            os.sched_getaffinity(int(child))
            for child in children.read_text(encoding="utf-8").split()
            if b"deploy.load.probe" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    give_up_s = time.monotonic() + 20.0 * PATIENCE
    while vcpus_of_probes() != [{max(os.sched_getaffinity(0))}]:
        assert time.monotonic() < give_up_s, run.lines
        time.sleep(0.01)


def test_a_dry_run_ends_by_itself(deploy, server, scenario_file, groups_file):
    options = ["--policy", str(groups_file), "--scenario", str(scenario_file()), "--dry-run"]
    run = deploy(*options, program=("-m", "tests.live.faults", "dry-run-is-short"))
    assert run.finish(30.0) == 0
    assert run.count("would start dedup") == 1
    assert run.count("nothing was touched") == 1


def test_without_docker_nothing_is_touched(deploy, server, scenario_file, groups_file, tmp_path):
    before = service_process.affinities(server.pid)
    nowhere = ("--docker", f"unix://{tmp_path}/nobody.sock")
    options = ["--policy", str(groups_file), "--scenario", str(scenario_file())]
    run = deploy(*options, *nowhere)
    assert run.finish(20.0) == 2
    assert len(run.lines) == 1 and "cannot be reached" in run.lines[0]
    assert service_process.affinities(server.pid) == before
    assert not run.state.exists() and not run.report.exists()
    assert deploy("--restore", *nowhere).finish() == 0


def test_a_port_in_use_leaves_nothing(deploy, server, scenario_file, groups_file):
    options = ["--policy", str(groups_file), "--scenario", str(scenario_file())]
    taken = ("--runtime", "process", "--metrics-port", str(server.port))
    run = deploy(*options, *taken)
    assert run.finish(20.0) == 2
    assert len(run.lines) == 1 and "--metrics-port" in run.lines[0]
    assert not run.state.exists() and not run.report.exists()


def test_a_second_loop_is_kept_away(deploy, server, scenario_file, groups_file, tmp_path):
    scenario = scenario_file(dedup=LONG, radix=LONG)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    first = deploy(*options)
    first.expect(r"dedup start \[")
    second = deploy(*options)
    assert second.finish() == 2
    assert second.count("another loop is running") == 1
    elsewhere = deploy(*options, "--state", str(tmp_path / "elsewhere"))
    assert elsewhere.finish() == 2
    assert elsewhere.count("another loop steers this machine already") == 1
    assert {path.name for path in first.report.iterdir()} == {
        EVENTS_FILE,
        SAMPLES_FILE,
        SCENARIO_FILE,
        POLICY_FILE,
    }


def test_a_restarted_memcached_is_followed(tmp_path, scenario_file, groups_file):
    from deploy.engines import memcached
    from tests.live.conftest import Deployment

    scenario = scenario_file(dedup=LONG, radix=LONG)
    first = memcached.start(threads=2)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = Deployment(tmp_path, first, *options)
    try:
        run.expect(r"update_cores \[0\]$")
        memcached.stop(first)
        run.expect("the fallback decides")
        second = memcached.start(threads=2, port=first.port)
        try:
            run.expect(f"memcached process {second.pid}")
            run.expect("decides again")
            give_up_s = time.monotonic() + 5.0 * PATIENCE
            while set(service_process.affinities(second.pid).values()) != {(0,)}:
                assert time.monotonic() < give_up_s, run.lines
                time.sleep(0.02)
            other = Deployment(tmp_path, second, *options, "--state", str(tmp_path / "other"))
            try:
                assert other.finish() == 2
                assert other.count("another loop steers this machine already") == 1
            finally:
                other.close()
            run.process.send_signal(signal.SIGTERM)
            assert run.finish() == 143
            assert_as_found(second, run)
        finally:
            memcached.stop(second)
    finally:
        run.close()


def test_check_says_whether_the_machine_is_fit(deploy, server, scenario_file, tmp_path):
    run = deploy("--check", "--scenario", str(scenario_file()), "--runtime", "process")
    assert run.finish() == 0, run.lines
    run.expect("ok  memcached at .*: process .*, 2 worker threads")
    run.expect("memcached before other programs: ")
    run.expect("ok  background: cpu.idle of control groups, version [12]")
    run.expect("memcached.s run delay: .* alone, .* beside background work")
    with claim():
        beside = deploy("--check", "--scenario", str(scenario_file()), "--runtime", "process")
        assert beside.finish() == 1
        beside.expect("FAIL  nothing can be tried: another loop steers this machine already")
    slow = tmp_path / "slow.yaml"
    slow.write_text(scenario_file().read_text().replace("period_s: 0.025", "period_s: 0.5"))
    open_to_others = tmp_path / "open"
    open_to_others.mkdir()
    open_to_others.chmod(0o755)
    options = ("--memcached", "127.0.0.1:9", "--state", str(open_to_others))
    nobody = deploy("--check", *options, "--scenario", str(slow))
    assert nobody.finish() == 1
    nobody.expect("FAIL  control.period_s: 500 ms, a deployment allows 200")
    nobody.expect("FAIL  127.0.0.1:9: no memcached of this machine answers there")
    nobody.expect("FAIL  folder of the state: .*must be a folder of yours, closed to others")


@pytest.mark.parametrize(
    "wrong",
    [
        *("period", "vcpus", "memcached", "docker", "report", "state", "another loop"),
        *("unfinished", "groups"),
    ],
)
def test_what_the_check_calls_fail_is_refused_with_the_same_line(
    deploy, server, scenario_file, groups_file, tmp_path, wrong
):
    path, before = scenario_file(), service_process.affinities(server.pid)
    changes = {
        "period": ("period_s: 0.025", "period_s: 0.5"),
        "vcpus": ("vcpus: 2\n", "vcpus: 32\n"),
    }
    path.write_text(path.read_text().replace(*changes.get(wrong, ("", ""))))
    (tmp_path / "file").touch()
    options = {
        "memcached": ["--memcached", "127.0.0.1:9"],
        "docker": ["--runtime", "docker", "--docker", "unix:///no/such.sock"],
        "report": ["--report", str(tmp_path / "file")],
        "state": ["--state", str(tmp_path / "file")],
    }
    given = ["--policy", str(groups_file), "--scenario", str(path), "--runtime", "process"]
    given += options.get(wrong, [])
    broken = {"program": ("-m", "tests.live.faults", "groups-cannot-be-made")}
    fault = broken if wrong == "groups" else {}
    if wrong == "unfinished":
        killed = deploy(*given)
        killed.expect(r"update_cores \[0\]$")
        killed.kill()
        await_freed(server)
    with claim() if wrong == "another loop" else contextlib.nullcontext():
        checked = deploy(*given, "--check", **fault)
        assert checked.finish() == 1
        refused = deploy(*given, **fault)
        assert refused.finish() == 2
    failed = [line.split("  ", 1)[1] for line in checked.lines if line.startswith("FAIL")]
    said = refused.lines[-1]
    assert said.removeprefix("coretide: ") in [
        line.removeprefix("nothing can be tried: ") for line in failed
    ]
    assert service_process.affinities(server.pid) == before


def test_a_bare_name_is_found_among_the_shipped_checkpoints(deploy, scenario_file):
    run = deploy("--checkpoint", "best.zip", "--scenario", str(scenario_file()), "--dry-run")
    assert run.finish() == 2
    run.expect("best.zip: made for scenario cca-2025, whose actions differ")


def test_bad_options_are_one_line(deploy, scenario_file, tmp_path):
    two = ["--scenario", str(scenario_file())]
    slow = tmp_path / "slow.yaml"
    slow.write_text(scenario_file().read_text().replace("period_s: 0.025", "period_s: 0.5"))
    nobody = ["--memcached", "127.0.0.1:9", "--policy", "concurrent", *two]
    for options, says in (
        (["--memcached", "here"], "must be HOST:PORT"),
        (["--policy", "no-such"], "unknown policy no-such"),
        (["--scenario", "no-such"], "no-such: cannot be read as a scenario"),
        ([*nobody, "--runtime", "process"], "no memcached of this machine"),
        ([*nobody, "--scenario", str(slow)], "control.period_s: 500 ms, a deployment allows 200"),
        ([*nobody, "--docker", "tcp://10.0.0.1:2375"], "must be at unix:///PATH"),
    ):
        run = deploy(*options)
        assert run.finish() == 2
        assert len(run.lines) == 1
        assert says in run.lines[0]


def test_a_live_picture_can_come_with_the_run_and_ends_with_it(
    deploy, server, scenario_file, groups_file
):
    scenario = scenario_file(dedup=["sleep", "1"], radix=["sleep", "1"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options, "--view")
    assert run.finish() == 0, run.lines
    assert run.count("memcached .*─") >= 1
    assert run.count(r"dedup.*done") >= 1
    assert run.count(r"s  dedup start \[") == 0  # events are in the picture


def as_mcperf_prints(text, ahead_s):
    """Our load's output in mcperf's own form: stamps of the run alone, by a clock that is ahead."""
    lines = text.splitlines()
    stamps = [
        f"{line.rsplit(' ', 1)[0]} {int(line.split()[-1]) + round(1e3 * ahead_s)}"
        for line in lines
        if line.startswith("Timestamp")
    ]
    rows = [line.rsplit(" ", 3)[0] for line in lines if line.startswith(("#type", "read"))]
    return "\n".join([*stamps, "", *rows, "", lines[-1], ""])


@pytest.mark.survival
def test_the_clients_own_figures_are_joined_to_a_run(
    deploy, server, scenario_file, groups_file, tmp_path, monkeypatch, capsys
):
    load = [sys.executable, "-m", "deploy.load", "--memcached", f"{server.host}:{server.port}"]
    load += ["--trace-seed", "42", "--qps-min", "2000", "--qps-max", "30000"]
    load += ["--interval", "1.5", "--duration", "15"]
    scenario = scenario_file(dedup=["sleep", "11"], radix=["sleep", "11"])
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--probe"]
    with subprocess.Popen(load, stdout=subprocess.PIPE, text=True) as client:
        run = deploy(*options, "--runtime", "process")
        assert run.finish() == 0, run.lines
        said = client.communicate(timeout=60.0 * PATIENCE)[0]
    # What is predicted takes a kernel of its own, and tests of its own.
    monkeypatch.setattr(run_report, "predict", lambda folder: UNPREDICTED)

    def report(ahead_s):
        output = tmp_path / "mcperf.txt"
        output.write_text(as_mcperf_prints(said, ahead_s))
        run_report.main([str(run.report), "--mcperf", str(output)])

    report(17.3)
    page, joined = run.report / PAGE_FILE, read_client(run.report)
    assert joined.shift_s == pytest.approx(-17.3, abs=0.1)
    assert joined.margin_s <= 0.1
    whole = [one for one in joined.intervals if one.counted_qps is not None]
    assert len(whole) >= 6
    for one in whole:
        assert one.counted_qps == pytest.approx(one.said_qps + 1000.0, rel=0.1)  # and the probe's
        assert one.probe_p95_us > 0.0
    assert "by the probe" in capsys.readouterr().out
    before = page.read_text()
    assert "client's own figures" in before

    # That of another run changes nothing.
    with pytest.raises(SystemExit) as refused:
        report(5000.0)
    assert refused.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert page.read_text() == before and read_client(run.report) == joined
