import json
import math
import re
from itertools import pairwise

import numpy as np
import pytest

import agents
from agents import checkpoint
from env.allocation import Allocation, JobState, cores_of
from env.physics.parameters import GATE_LATENCY_S
from env.physics.service import BATCH_SMT, CPU_LIMIT, EQUAL_SHARE, VM_SPEED
from env.scenario import load_scenario, scenario_names
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from env.simulator.profile import Scatter, load_profile
from training.evaluation import comparison
from training.evaluation.episodes import EpisodeStart, repeats_of, run_episode, starts_from
from training.evaluation.figures import counted_p95, expected_violations
from training.evaluation.plots import lanes_of, plot_run, spans_on
from training.evaluation.timeline import IntervalRecorder, Span, TimelineRecorder

SEED = 2333


@pytest.fixture(scope="module")
def factory() -> EpisodeFactory:
    return EpisodeFactory(load_scenario("cca-2025"))


@pytest.fixture
def machine(factory) -> SimulatedMachine:
    return SimulatedMachine(factory)


class Faulty:
    """Runs like `concurrent` until its moment comes."""

    name = "faulty"
    wakes, regulated, period_s, probe_window_s = False, True, 1.0, 0.0

    def __init__(self, fault):
        self.fault = fault
        self.inner = agents.make("concurrent")

    def reset(self, scenario):
        self.inner.reset(scenario)

    def decide(self, telemetry):
        return self.fault() if telemetry.time_s > 50.0 else self.inner.decide(telemetry)


def raises():
    raise ZeroDivisionError("as it happens")


def test_starts_are_paired_and_never_published_traces():
    assert starts_from(5, 10) == starts_from(5, 20)[:10]
    assert SEED not in {start.trace_seed for start in starts_from(5, 1000)}
    assert [start.trace_seed for start in repeats_of(SEED, 1, 3)] == [SEED] * 3
    assert len(set(repeats_of(SEED, 1, 3))) == 3


@pytest.mark.parametrize("name", agents.names())
def test_every_shipped_policy_runs_and_repeats(machine, name):
    first = run_episode(machine, agents.make(name), EpisodeStart(SEED, 1))
    again = run_episode(machine, agents.make(name), EpisodeStart(SEED, 1))
    assert first == again
    if "SensorMissingError" in first.error:
        assert not first.completed
        return
    assert not first.error
    if name not in ("random", "heracles", "intel-prm"):
        assert first.completed
        assert 400.0 < first.makespan_s < 1800.0
    assert 0.0 <= first.violation_ratio <= 1.0


def test_other_random_numbers_make_another_run(machine):
    policy = agents.make("threshold-groups")
    assert run_episode(machine, policy, EpisodeStart(SEED, 1)) != run_episode(
        machine, policy, EpisodeStart(SEED, 2)
    )


@pytest.mark.parametrize("name", ["hysteresis-pause", "threshold-groups"])
def test_recording_changes_nothing(machine, name):
    policy, start = agents.make(name), EpisodeStart(SEED, 1)
    unrecorded = run_episode(machine, policy, start)
    for recorder in (TimelineRecorder(machine.scenario), IntervalRecorder()):
        assert run_episode(machine, policy, start, recorder=recorder) == unrecorded


@pytest.mark.parametrize("interval_s", [1.0, 10.0])
def test_the_p95_of_every_interval_that_counts_is_known(scenario, interval_s):
    """A job starts late, VMs of half the speed violate, and a slow policy sleeps over intervals."""
    slow = scenario.with_changes(load={"interval_s": interval_s})
    machine = SimulatedMachine(EpisodeFactory(slow, variation=Variation(vm_speed=(0.5, 0.5))))
    recorder = IntervalRecorder()
    run = run_episode(machine, agents.make("heracles"), EpisodeStart(SEED, 1), recorder=recorder)
    p95_us = counted_p95(recorder.intervals, run)
    assert len(p95_us) == run.summary["intervals"] > 0
    assert (p95_us > slow.service.slo_us).sum() == run.summary["violations"] > 0
    expected = expected_violations([p95_us], slow.service.slo_us, machine.factory.profile.scatter)
    assert run.summary["expected_violation_ratio"] == pytest.approx(expected["mean"])


def test_expected_violations_are_those_of_all_runs():
    scatter = Scatter(mean=0.0, spread=1e-3)
    runs = [np.full(50, 800.0), np.full(100, 1.0), np.zeros(0)]
    expected = expected_violations(runs, 800.0, scatter)
    assert expected["mean"] == pytest.approx(0.25)
    assert expected["p5"] == 0.0 and 0.5 < expected["p95"] < 0.9
    assert expected_violations(runs, 800.0, None) is None
    assert expected_violations(runs[2:], 800.0, scatter) is None


@pytest.mark.parametrize("name", ["heracles", "latency-aware-prm"])
def test_recording_shows_a_slow_policy_nothing_more(scenario, name):
    """Several intervals in one wait: the probe's reading covers all of it."""
    machine = SimulatedMachine(EpisodeFactory(scenario.with_changes(load={"interval_s": 1.0})))
    recorder = TimelineRecorder(machine.scenario)
    shown = run_episode(
        machine, agents.make(name), EpisodeStart(SEED, 1), recorder=recorder
    ).summary
    plain = run_episode(machine, agents.make(name), EpisodeStart(SEED, 1)).summary
    for figure in ("violations", "actuations", "overruled"):
        assert shown[figure] == plain[figure]
    assert shown["makespan_s"] == pytest.approx(plain["makespan_s"], abs=1e-6)


def test_a_cut_at_a_landing_loses_no_wake(machine):
    """A container's start lands 5 ms after a jump of the load, which is seen a poll later."""
    until_s, ends = 14.0, []
    for advance in (TimelineRecorder(machine.scenario).advance, SimulatedMachine.advance):
        machine.begin(SEED, np.random.default_rng(1))
        host = machine.host
        host.wake_qps = 1.0
        host.sent_state[0], host.lands_s[0] = JobState.RUNNING, host.interval_ends_s + 0.005
        advance(machine, until_s, True)
        ends.append(host.now_s)
    assert ends[0] == ends[1]
    assert ends[0] < 10.1


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_recording_has_the_interval_that_the_time_cap_cuts_short(scenario, spread):
    short = scenario.with_changes(load={"duration_s": 65.0})
    machine = SimulatedMachine(EpisodeFactory(short, variation=Variation(physics=spread)))
    recorder = TimelineRecorder(short)
    run = run_episode(machine, agents.make("static"), EpisodeStart(SEED, 1), recorder=recorder)
    rows = recorder.recording.intervals
    assert len(rows) == run.summary["intervals"] == 7
    assert (rows[0].start_s, rows[-1].end_s) == (0.0, 65.0)
    assert all(before.end_s == after.start_s for before, after in pairwise(rows))


def test_recording_tells_the_run(machine):
    policy = agents.make("hysteresis-pause")
    recorder = TimelineRecorder(machine.scenario)
    run = run_episode(machine, policy, EpisodeStart(SEED, 1), recorder=recorder)
    recording = recorder.recording
    assert len(recording.intervals) == math.ceil(recording.end_s / 10.0)
    slow = sum(row.p95_us > 800.0 for row in recording.intervals)
    assert slow == run.summary["violations"]
    for name, spans in recording.jobs.items():
        job = run.summary["jobs"][name]
        assert spans[0].start_s == pytest.approx(job["start_s"])
        assert spans[-1].end_s == pytest.approx(job["end_s"])
        paused_s = sum(s.end_s - s.start_s for s in spans if s.state == JobState.PAUSED)
        assert paused_s == pytest.approx(job["paused_s"], abs=1e-6)
        for before, after in pairwise(spans):
            assert before.end_s == after.start_s


class Truth(TimelineRecorder):
    """A recorder that also notes what is so whenever a wait is over."""

    def __init__(self, scenario):
        super().__init__(scenario)
        self.seen = []

    def advance(self, machine, until_s, wakes):
        super().advance(machine, until_s, wakes)
        host = machine.host
        places = zip(host.true_state.tolist(), host.true_cores.tolist(), strict=True)
        self.seen.append((host.now_s, cores_of(host.true_service), list(places)))


@pytest.mark.parametrize("docker_moves", [False, True])
@pytest.mark.parametrize(
    "name", ["hysteresis-pause", "stats-poll-packed", "random", "perfiso", "checkpoints/best.zip"]
)
def test_recording_shows_where_everybody_is(scenario, name, docker_moves):
    """Also where a change is sent before the last one has landed."""
    scenario = scenario.with_changes(delays={"docker_moves": docker_moves})
    machine, recorder = SimulatedMachine(EpisodeFactory(scenario)), Truth(scenario)
    run_episode(machine, agents.make(name), EpisodeStart(SEED, 1), recorder=recorder)
    recording, moved = recorder.recording, 0
    for now_s, held, places in recorder.seen:
        if now_s < recording.end_s:
            assert [cores for at_s, cores in recording.service if at_s <= now_s][-1:] == [held]
        for (job, spans), (state, cores) in zip(recording.jobs.items(), places, strict=True):
            shown = [span for span in spans if span.start_s <= now_s < span.end_s]
            if state in (JobState.RUNNING, JobState.PAUSED) and now_s < recording.end_s:
                assert [(span.state, span.cores) for span in shown] == [(state, cores_of(cores))]
                moved += shown[0].cores != spans[0].cores
            else:
                assert not shown, job
    assert moved > 0


def test_recording_keeps_up_with_a_slow_policy(factory, tmp_path):
    scenario = factory.scenario.with_changes(load={"interval_s": 2.0})
    slow = tmp_path / "slow.yaml"
    slow.write_text("rule: static\nperiod_s: 18.5\n")
    recorder = TimelineRecorder(scenario)
    machine = SimulatedMachine(EpisodeFactory(scenario))
    run_episode(machine, agents.make(slow), EpisodeStart(SEED, 1), recorder=recorder)
    rows = recorder.recording.intervals
    # The first decision comes up to one period late; nothing is recorded before it.
    first = round(rows[0].start_s / 2.0)
    assert [row.start_s for row in rows] == [2.0 * (first + i) for i in range(len(rows))]
    assert rows[-1].end_s >= recorder.recording.end_s


def test_recording_shows_the_load_that_was_drawn(factory):
    varied = EpisodeFactory(
        factory.scenario, variation=Variation(physics=1.0, most_load=(0.4, 0.5))
    )
    machine, recorder = SimulatedMachine(varied), TimelineRecorder(factory.scenario)
    run_episode(machine, agents.make("shared-background"), EpisodeStart(SEED, 1), recorder=recorder)
    rows, load = recorder.recording.intervals, factory.scenario.load
    assert 0.3 * load.qps_max < max(row.qps for row in rows) <= 0.5 * load.qps_max
    late_s = rows[0].end_s - load.interval_s
    assert late_s > 0.0 and rows[0].start_s == 0.0
    assert rows[-1].end_s == pytest.approx(late_s + len(rows) * load.interval_s)


def test_a_run_that_ends_at_its_first_decision_becomes_a_picture(machine, tmp_path):
    policy, recorder = agents.make("static"), TimelineRecorder(machine.scenario)
    policy.decide = None  # raises when it is called
    assert run_episode(machine, policy, EpisodeStart(SEED, 1), recorder=recorder).error
    plot_run(recorder.recording, machine.scenario, "nothing", tmp_path / "run.png")
    assert (tmp_path / "run.png").is_file()


def test_a_recorded_run_becomes_a_picture(machine, tmp_path):
    recorder = TimelineRecorder(machine.scenario)
    run_episode(machine, agents.make("shared-background"), EpisodeStart(SEED, 1), recorder=recorder)
    path = tmp_path / "run.png"
    plot_run(recorder.recording, machine.scenario, "a run", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_lanes_never_overlap():
    running = JobState.RUNNING
    presence = {
        "a": [Span(0.0, 10.0, running, (1,))],
        "b": [Span(5.0, 12.0, running, (1,))],
        "c": [Span(10.0, 20.0, running, (1,))],
    }
    assert lanes_of(presence) == {"a": 0, "b": 1, "c": 0}


def test_spans_on_joins_what_only_other_vcpus_cut():
    running = JobState.RUNNING
    spans = [Span(0.0, 5.0, running, (2, 3)), Span(5.0, 9.0, running, (1, 2, 3))]
    assert spans_on(2, spans) == [Span(0.0, 9.0, running, (2, 3))]
    assert spans_on(1, spans) == spans[1:]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raises, "ZeroDivisionError: as it happens"),
        (lambda: Allocation((7,)), r"ValueError: memcached: cores \(7,\) are none of"),
        (lambda: None, "AttributeError"),
    ],
)
def test_a_failing_policy_is_reported_and_not_completed(machine, fault, message):
    run = run_episode(machine, Faulty(fault), EpisodeStart(SEED, 1))
    assert not run.completed
    assert run.makespan_s == 1800.0
    assert run.error.startswith("at 5")
    assert re.search(message, run.error)


def test_a_failing_policy_does_not_stop_the_table(monkeypatch, tmp_path, capsys):
    real = agents.make

    def make(name):
        return Faulty(raises) if name == "faulty" else real(name)

    monkeypatch.setattr(agents, "make", make)
    path = tmp_path / "out.json"
    comparison.main(
        ["--policy", "faulty", "--policy", "concurrent", "--episodes", "2", "--json", str(path)]
    )
    faulty, concurrent = json.loads(path.read_text())["policies"]
    assert (faulty["completed"], concurrent["completed"]) == (0, 2)
    assert [failure["seed"] for failure in faulty["failures"]] == [
        run["seed"] for run in concurrent["runs"]
    ]
    assert "as it happens" in capsys.readouterr().out


def test_json_and_table(tmp_path, capsys):
    path, plots = tmp_path / "deep" / "out.json", tmp_path / "plots"
    line = "--policy sequential --policy static --scenario cca-2025 --interval 5 --episodes 3"
    comparison.main([*line.split(), "--seed", "4", "--json", str(path), "--plots", str(plots)])
    content = json.loads(path.read_text())
    assert (content["scenario"], content["interval_s"], content["episodes"]) == ("cca-2025", 5.0, 3)
    assert set(content["profile"]) == {"name", "hash", "fit_error"}
    for entry in content["policies"]:
        makespans = [run["makespan_s"] for run in entry["runs"]]
        ratios = [run["violation_ratio"] for run in entry["runs"]]
        assert entry["makespan_s"]["mean"] == pytest.approx(np.mean(makespans))
        assert entry["makespan_s"]["ci95"] == pytest.approx(
            4.302653 * np.std(makespans, ddof=1) / math.sqrt(3)
        )
        assert entry["violation_ratio"] == {
            "mean": pytest.approx(np.mean(ratios)),
            "max": max(ratios),
        }
        expected = entry["expected_violations"]
        assert 0.0 <= expected["p5"] <= expected["mean"] <= expected["p95"] <= 1.0
        assert entry["completed"] == 3
        assert set(entry["runs"][0]) == {"seed", "makespan_s", "violation_ratio"}
    seeds = [[run["seed"] for run in entry["runs"]] for entry in content["policies"]]
    assert seeds[0] == seeds[1]
    shown = capsys.readouterr().out
    assert "SIMULATED" in shown
    assert re.search(
        r"static: on a machine [\d.]+ % violations are to be expected, [\d.]+ to", shown
    )
    assert content["profile"]["hash"][:12] in shown
    assert len(list(plots.glob("*.png"))) == 2


def test_a_named_trace(tmp_path):
    path = tmp_path / "out.json"
    comparison.main(["--policy", "static", "--trace-seed", "2333", "--json", str(path)])
    content = json.loads(path.read_text())
    assert content["episodes"] == 1
    assert content["policies"][0]["runs"][0]["seed"] == SEED
    assert content["policies"][0]["makespan_s"]["ci95"] is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cca-2025", ["checkpoints/best.zip", *comparison.REFERENCES]),
        ("cca-2024", ["checkpoints/cca-2024.zip", *comparison.REFERENCES]),
        ("local", ["checkpoints/local.zip", *comparison.REFERENCES]),
    ],
)
def test_without_a_policy_the_trained_one_meets_the_references(name, expected, capsys):
    assert comparison.default_policies(load_scenario(name)) == expected
    left_out = 4 - len(expected)
    assert capsys.readouterr().err.count("left out: ") == left_out


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_has_policies_to_compare(name):
    scenario = load_scenario(name)
    for policy in comparison.default_policies(scenario):
        agents.make(policy).reset(scenario)


def test_without_a_trained_policy_the_references_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    comparison.main(["--trace-seed", "2333", "--json", "results.json"])
    shown = json.loads((tmp_path / "results.json").read_text())["policies"]
    assert [entry["name"] for entry in shown] == ["sequential", "concurrent", "threshold-groups"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--policy nope", "unknown policy nope; known are"),
        ("--policy nope.zip", "nope.zip"),
        ("--policy static --scenario nope", "nope: cannot be read as a scenario"),
        ("--policy static --interval 0", "argument --interval: must be a number"),
        ("--policy static --interval nan", "argument --interval: must be a number"),
        ("--policy static --interval 1801", "interval_s 1801.0 is longer"),
        ("--policy static --episodes 0", "argument --episodes: must be a whole number"),
        ("--policy static --trace-seed 0", "argument --trace-seed: must be a whole number from 1"),
        ("--policy static --profile nope", "unknown profile 'nope'; known profiles"),
        ("--policy static --json /proc/no/such.json", "cannot be written"),
        ("--policy static --plots /proc/no", "cannot be written"),
    ],
)
def test_bad_input_is_one_line(line, message, capsys):
    with pytest.raises(SystemExit) as end:
        comparison.main(line.split())
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_checkpoint_of_another_scenario_runs_with_a_word_of_caution(tmp_path, capsys):
    line = f"--policy best.zip --episodes 1 --interval 10 --json {tmp_path / 'r.json'} --scenario"
    comparison.main([*line.split(), "cca-2024"])
    (said,) = capsys.readouterr().err.splitlines()
    assert "best.zip: trained for scenario cca-2025, profile" in said
    assert "; this is scenario cca-2024, profile" in said
    comparison.main([*line.split(), "cca-2025"])
    assert capsys.readouterr().err == ""


def test_a_wrong_simulator_is_wrong_in_every_parameter(factory):
    wrong = EpisodeFactory(factory.scenario, variation=Variation(error=0.2))
    right, hosts = factory.new_hosts(1), wrong.new_hosts(1)
    start = starts_from(3, 1)[0]
    factory.begin(right, factory.new_targets(1), 0, start.trace_seed, start.rng())
    wrong.begin(hosts, wrong.new_targets(1), 0, start.trace_seed, start.rng())
    for name, free in (
        ("host_params", ()),
        ("service_params", (VM_SPEED, BATCH_SMT, CPU_LIMIT, EQUAL_SHARE)),
    ):
        ratio = np.delete(hosts[name] / right[name], free)
        assert set(np.round(ratio, 6)) == {0.8, 1.2}
    assert hosts["service_params"][0, VM_SPEED] == 1.0


def episodes_of(scenario, variation, count=200):
    """Freshly begun hosts."""
    factory = EpisodeFactory(scenario, variation=variation)
    hosts, targets = factory.new_hosts(count), factory.new_targets(count)
    for index, start in enumerate(starts_from(3, count)):
        factory.begin(hosts, targets, index, start.trace_seed, start.rng())
    return hosts


def test_where_physics_are_drawn_the_load_is_late_by_its_own_delay(factory):
    def late_s(physics):
        hosts = episodes_of(factory.scenario, Variation(physics=physics))
        return hosts["interval_ends_s"] - hosts["interval_s"]

    assert set(late_s(0.0)) == {0.0}
    drawn = late_s(1.0)
    assert len(set(drawn)) == len(drawn)
    assert 0.3 < drawn.min() < 0.45 and 0.65 < drawn.max() < 0.9


def test_some_episodes_have_no_probe_and_some_are_wrong(factory):
    hosts = episodes_of(factory.scenario, Variation(error=0.2, error_share=0.5, unprobed=0.25))
    unprobed = hosts["probed_p95_us"] == 0.0
    assert (unprobed == (hosts["probe_window_s"] == 0.0)).all()
    assert np.mean(unprobed) == pytest.approx(0.25, abs=0.08)
    right = np.median(episodes_of(factory.scenario, Variation(), 1)["host_params"], axis=0)
    wrong = (np.abs(hosts["host_params"] / right - 1.0) > 0.1).all(axis=1)
    assert np.mean(wrong) == pytest.approx(0.5, abs=0.1)
    assert (hosts["host_params"][~wrong] == right).all()


def test_without_a_probe_who_needs_it_is_stopped_and_who_does_not_goes_on(factory):
    (start,) = starts_from(3, 1)
    machine = SimulatedMachine(factory)
    stopped = run_episode(machine, agents.make("parties"), start, probed=False)
    assert "no probe runs" in stopped.error and not stopped.completed
    assert run_episode(machine, agents.make("best.zip"), start, probed=False).completed


def test_the_loads_minimum_and_maximum_are_drawn_from_their_ranges(factory):
    variation = Variation(least_load=(0.2, 6.0), most_load=(0.6, 1.0))
    drawn = EpisodeFactory(factory.scenario, variation=variation)
    hosts, targets = drawn.new_hosts(1), drawn.new_targets(1)
    load, ends = factory.scenario.load, []
    for start in starts_from(3, 40):
        drawn.begin(hosts, targets, 0, start.trace_seed, start.rng())
        ends.append((targets.min(), targets.max()))
    least, most = np.array(ends).T
    assert 0.2 * load.qps_min <= least.min() < 0.5 * load.qps_min
    assert 3.0 * load.qps_min < least.max()
    assert 0.58 * load.qps_max < most.min() < 0.7 * load.qps_max
    assert 0.9 * load.qps_max < most.max() <= load.qps_max


def test_a_drawn_minimum_stays_below_the_maximum(factory):
    narrow = EpisodeFactory(factory.scenario, variation=Variation(least_load=(50.0, 100.0)))
    hosts, targets = narrow.new_hosts(1), narrow.new_targets(1)
    narrow.begin(hosts, targets, 0, 9, np.random.default_rng(0))
    assert set(targets[0]) == {factory.scenario.load.qps_max}


def test_the_vms_speed_is_drawn_from_its_range(factory):
    slow = EpisodeFactory(factory.scenario, variation=Variation(vm_speed=(0.75, 0.8)))
    hosts, speeds = slow.new_hosts(1), set()
    for start in starts_from(3, 20):
        slow.begin(hosts, slow.new_targets(1), 0, start.trace_seed, start.rng())
        speeds.add(float(hosts["service_params"][0, VM_SPEED]))
    assert len(speeds) == 20 and 0.75 <= min(speeds) < max(speeds) <= 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--error", "1"], "--error: must be below 1"),
        (["--vm-speed", "1.2", "0.8"], "--vm-speed: LOW must be"),
        (["--least-load", "0", "0.8"], "--least-load: LOW must be"),
        (["--most-load", "1.2", "0.8"], "--most-load: LOW must be"),
        (["--most-load", "0.8", "1.2"], "--most-load: HIGH must be at most 1, not 1.2"),
        (["--bound", "--error", "0.2"], "one physics"),
    ],
)
def test_impossible_variations_are_refused_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        comparison.main(["--policy", "concurrent", "--episodes", "1", *options])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_recording_goes_on_where_a_gate_opens_at_once():
    """A profile may know no latency of a gate."""
    scenario, known = load_scenario("local"), load_profile("local")
    host = {name: it for name, it in known.host.items() if name != "gate_latency_s"}
    profile = known.model_copy(update={"host": host})
    machine = SimulatedMachine(EpisodeFactory(scenario, profile))
    assert machine.factory.profile.host_array()[GATE_LATENCY_S] == 0.0
    run = run_episode(
        machine,
        agents.make("checkpoints/local.zip"),
        EpisodeStart(SEED, 1),
        recorder=TimelineRecorder(scenario),
    )
    assert run.summary["completed"]
