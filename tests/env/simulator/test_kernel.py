"""
The simulator's physics, event by event, and its compiled form against plain Python.

`Rig.walk` runs an episode of random allocations and yields the host before and after every stretch
of constant rates, so that each law is checked against the rates in force, not against itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.allocation import Allocation, JobAllocation
from env.codes import STEAL, TRUNCATED
from env.physics.parameters import COST_FIELDS, HOST_FIELDS, LAUNCH_OVERHEAD_S, WORK_S
from env.physics.service import TAIL_SHAPE, tail_fraction
from env.reward import TERMS
from env.scenario import load_scenario
from env.simulator import kernel
from env.simulator.host import MIXTURE
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from env.simulator.profile import Parameter, load_profile
from env.simulator.rates import count_requests
from env.simulator.scatter import violation_chance
from tests.conftest import Rig
from tests.env.simulator.walks import (
    BACKGROUND,
    DONE,
    FACTORY,
    NORMAL,
    PAUSED,
    RESTLESS,
    RUNNING,
    SCENARIO,
    SMALL,
    VARIED,
    host_value,
    seeds,
    walk,
    walks,
)

# --- jobs -------------------------------------------------------------------------------------


@walks
@given(seeds)
def test_work_is_conserved(seed: int) -> None:
    rig = Rig(VARIED if seed % 2 else FACTORY)
    rig.begin(seed, work=SMALL)
    host_params = rig.row["host_params"]
    resume_cost = host_params[HOST_FIELDS.index("resume_cost_s")]
    migration_cost = host_params[HOST_FIELDS.index("migration_cost_s")]
    jobs = range(len(SCENARIO.jobs))
    owed = rig.row["work_left_s"].copy()
    done = np.zeros_like(owed)
    moves = resumes = 0
    for before, after in rig.walk(seed):
        step_s = after["now_s"] - before["now_s"]
        for job in jobs:
            was = before["true_state"][job]
            if was == RUNNING:
                launching = min(step_s, before["overhead_left_s"][job])
                done[job] += before["speed"][job] * (step_s - launching)
            now = after["true_state"][job]
            if was in (RUNNING, PAUSED) and now != DONE:
                if (was, now) == (PAUSED, RUNNING):
                    owed[job] += resume_cost
                    resumes += 1
                elif before["true_cores"][job] != after["true_cores"][job]:
                    free = (
                        was == PAUSED and after["work_left_s"][job] < owed[job] - done[job] + 1e-6
                    )
                    owed[job] += 0.0 if free else migration_cost  # caches may be cold anyway
                    moves += 1
            assert after["work_left_s"][job] == pytest.approx(owed[job] - done[job], abs=1e-6)
    assert rig.done
    assert done == pytest.approx(owed, abs=1e-6)
    assert moves > 0
    assert resumes > 0


@walks
@given(seeds)
def test_progress_is_never_negative_and_stops_in_a_pause(seed: int) -> None:
    paused = 0
    for before, after in walk(seed):
        step_s = after["now_s"] - before["now_s"]
        assert step_s >= 0.0
        assert (before["speed"] >= 0.0).all()
        assert (after["work_left_s"] >= -1e-9).all()
        for job in np.flatnonzero(before["true_state"] != RUNNING):
            assert before["speed"][job] == 0.0
            assert not before["used"][job].any()
            assert after["job_cpu_s"][job] == before["job_cpu_s"][job]
            if before["true_state"][job] == PAUSED:
                waited_s = after["paused_s"][job] - before["paused_s"][job]
                assert waited_s == pytest.approx(step_s, abs=1e-9)
                paused += 1
        for job in np.flatnonzero(before["true_state"] == RUNNING):
            assert after["paused_s"][job] == before["paused_s"][job]
            # Background work may starve, and without vCPUs nobody gets on.
            if before["true_weight"][job] == NORMAL and before["hiccup"] != STEAL:
                assert before["speed"][job] > 0.0
    assert paused > 0


@walks
@given(seeds)
def test_no_vcpu_is_shared_out_more_than_once(seed: int) -> None:
    for before, after in walk(seed):
        step_s = after["now_s"] - before["now_s"]
        used = before["used"]
        assert (used >= 0.0).all()
        assert (used.sum(axis=0) <= 1.0 + 1e-9).all()
        assert (used.sum(axis=1) <= before["true_quota"] + 1e-9).all()
        outside = [
            used[job, vcpu]
            for job in range(used.shape[0])
            for vcpu in range(used.shape[1])
            if not int(before["true_cores"][job]) >> vcpu & 1
        ]
        assert not any(outside)
        busy_s = after["vcpu_busy_s"] - before["vcpu_busy_s"]
        if after["true_state"].min() < DONE:  # else the last interval was completed as well
            assert (busy_s >= used.sum(axis=0) * step_s - 1e-9).all()
            assert (busy_s <= step_s + 1e-9).all()
        cpu_s = after["job_cpu_s"] - before["job_cpu_s"]
        assert cpu_s == pytest.approx(used.sum(axis=1) * step_s, abs=1e-9)


def test_a_job_alone_takes_its_launch_and_its_work(rig: Rig) -> None:
    """A job with one thread on an idle core needs what the profile says it needs alone."""
    rig.begin(1, [1.0])
    job = SCENARIO.job_names.index("radix")
    rig.row["desired_threads"][job] = 1
    rig.row["desired_state"][job] = RUNNING
    rig.row["desired_cores"][job] = 0b0100
    kernel.apply_desired(rig.row, True)
    while rig.row["true_state"][job] != DONE:
        kernel.advance(rig.row, rig.targets, rig.row["now_s"] + 10.0)
    took_s = rig.row["end_s"][job] - rig.row["start_s"][job]
    params = rig.row["job_params"][job]
    speed = rig.row["host_params"][HOST_FIELDS.index("job_speed")]
    expected = params[LAUNCH_OVERHEAD_S] + params[WORK_S] / speed
    assert took_s == pytest.approx(expected, rel=0.01)


def test_pausing_and_resuming_a_job(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 12.0)
    left = rig.row["work_left_s"][job]
    kernel.advance(rig.row, rig.targets, 30.0)
    assert rig.row["true_state"][job] == PAUSED
    assert rig.row["work_left_s"][job] == left
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    while rig.row["true_state"][job] == PAUSED:
        kernel.advance(rig.row, rig.targets, rig.row["lands_s"][job])
    assert rig.row["work_left_s"][job] == pytest.approx(left + host_value("resume_cost_s"))
    assert rig.row["pauses"][job] == 1
    assert 18.0 < rig.row["paused_s"][job] < 22.0
    kernel.advance(rig.row, rig.targets, rig.row["now_s"] + 1.0)
    assert rig.row["work_left_s"][job] < left


# --- measurement intervals --------------------------------------------------------------------


@walks
@given(seeds)
def test_an_interval_violates_when_more_than_a_twentieth_is_slow(seed: int) -> None:
    sent = slow = stolen = 0.0
    ended = False
    for before, after in walk(seed):
        step_s = after["now_s"] - before["now_s"]
        rate = before["capacity_qps"] if before["backlog"] > 0.0 else before["load_qps"]
        count = min(rate, before["capacity_qps"]) * step_s
        count -= min(count, before["counted"])
        ends = after["interval"] != before["interval"]
        if before["hiccup"] == STEAL:  # counted when it ends, or with the next interval
            stolen += before["due_qps"] * step_s
            if after["hiccup"] != STEAL and not ends:
                count, stolen = stolen, 0.0
        sent += count
        slow += count * before["slow_fraction"]
        ended = bool(after["true_state"].min() == DONE)
        if not ends or ended:
            assert after["violations"] == before["violations"] or ended
            continue
        started = bool((before["start_s"] <= before["interval_ends_s"]).any())
        assert after["intervals"] - before["intervals"] == started
        violated = started and slow > 0.05 * sent
        if abs(slow - 0.05 * sent) > 1e-9 * sent:
            assert after["violations"] - before["violations"] == violated
        sent, slow, stolen = stolen, stolen * before["slow_fraction"], 0.0
    assert ended


@walks
@given(seeds)
def test_the_intervals_of_the_batch_window_count(seed: int) -> None:
    """From the one in which the first job starts to the one in which the last job ends."""
    last: Any = None
    for _, after in walk(seed):
        last = after
    length_s = last["interval_s"]
    late_s = last["interval_ends_s"] - (last["interval"] + 1) * length_s  # the load's own delay
    first = max(0, (last["start_s"].min() - late_s) // length_s)
    final = max(0, (last["end_s"].max() - late_s) // length_s)
    assert last["intervals"] == final - first + 1
    assert last["violations"] <= last["intervals"]


def test_intervals_before_the_first_job_do_not_count(rig: Rig) -> None:
    rig.begin(1, [175_000.0])
    rig.set_desired((0,), regulator_on=False)
    kernel.advance(rig.row, rig.targets, 35.0)
    assert kernel.interval_p95(rig.row) > SCENARIO.service.slo_us
    assert rig.row["intervals"] == rig.row["violations"] == 0
    rig.set_desired((0,), regulator_on=False, vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 60.0)
    assert rig.row["intervals"] == rig.row["violations"] == 3


def test_the_interval_that_the_time_cap_cuts_short_counts() -> None:
    """mcperf announces ceil(t / interval) intervals and reports all of them."""
    rig = Rig(EpisodeFactory(SCENARIO.with_changes(load={"interval_s": 7.0, "duration_s": 20.0})))
    rig.begin(1, [175_000.0])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 100.0)
    assert rig.row["now_s"] == pytest.approx(20.0)
    rows, terms = rig.factory.table.rows, np.zeros(len(TERMS))
    rig.begin(1, [175_000.0])
    start = next(e for e in range(len(rows)) if rig.factory.table.describe(e).startswith("start"))
    ended = kernel.step(rig.row, rows, rig.targets, start, 1.0, terms)
    while not ended:
        ended = kernel.step(rig.row, rows, rig.targets, 0, 1.0, terms)
    assert ended == TRUNCATED
    assert rig.row["intervals"] == 3


def test_memcached_has_its_refuge_back_when_the_last_job_is_done(rig: Rig) -> None:
    """The load jumps and the last job ends before anybody has reacted."""
    rig.begin(1, [20_000.0, 175_000.0])
    others = np.arange(len(SCENARIO.jobs)) != SCENARIO.job_names.index("vips")
    for name in ("true_state", "sent_state", "state"):
        rig.row[name][others] = DONE
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.01)
    rig.row["work_left_s"][~others] = 0.01
    kernel.advance(rig.row, rig.targets, 20.0)
    assert rig.done
    assert rig.row["end_s"][~others] == pytest.approx(10.02, abs=0.02)
    assert rig.row["true_service"] == rig.row["refuge"]
    assert rig.row["intervals"] == 2
    assert rig.row["violations"] == 0


@pytest.mark.parametrize("cores", [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
def test_memcached_keeps_no_more_vcpus_busy_than_it_has_threads(
    rig: Rig, cores: tuple[int, ...]
) -> None:
    rig.begin(1, [250_000.0])
    rig.set_desired(cores, regulator_on=False)
    kernel.advance(rig.row, rig.targets, 5.0)
    most = min(SCENARIO.service.threads, len(cores))
    assert 0.9 * most < rig.row["occupancy"].sum() <= most + 1e-9


def test_what_memcached_moves_away_from_batch_work_is_busy_elsewhere(rig: Rig) -> None:
    rig.begin(1, [50_000.0])
    rig.set_desired((0, 1), freqmine=(RUNNING, (0,), BACKGROUND))
    kernel.advance(rig.row, rig.targets, 5.0)
    taken = rig.row["occupancy"].sum() + rig.row["used"].sum()
    assert rig.row["occupancy"][0] + rig.row["used"][:, 0].sum() > 1.1
    assert rig.row["busy"].sum() == pytest.approx(taken)
    assert (rig.row["busy"] <= 1.0).all()


@given(
    st.lists(st.tuples(st.floats(100.0, 3000.0), st.floats(1.0, 1e6)), min_size=1, max_size=MIXTURE)
)
def test_the_p95_of_a_mixture_agrees_with_the_count(levels: list[tuple[float, float]]) -> None:
    """p95 over the interval lies above the SLO exactly when more than 5 % of requests do."""
    rig = _RIGS.setdefault("plain", Rig(FACTORY))
    rig.begin(1, [50_000.0])
    rig.row["start_s"][0] = 0.0
    shape, slo_us = rig.row["service_params"][TAIL_SHAPE], SCENARIO.service.slo_us
    slow = sent = 0.0
    for p95_us, count in levels:
        rig.row["p95_us"] = p95_us
        rig.row["tail_shape"] = shape
        rig.row["slow_fraction"] = tail_fraction(slo_us, p95_us, shape)
        count_requests(rig.row, count)
        sent += count
        slow += count * rig.row["slow_fraction"]
    kernel.end_interval(rig.row)
    assert rig.row["intervals"] == 1
    assert rig.row["sent_requests"] == rig.row["slow_requests"] == 0
    assert rig.row["mix_count"][rig.row["mixing"]] == 0
    p95_us = kernel.interval_p95(rig.row)
    lowest, highest = min(levels)[0], max(levels)[0]
    assert lowest * (1 - 1e-9) <= p95_us <= highest * (1 + 1e-9)
    if abs(slow / sent - 0.05) > 1e-6:
        assert rig.row["violations"] == (slow > 0.05 * sent)
        assert (p95_us > slo_us) == (slow > 0.05 * sent)
    scatter = FACTORY.profile.scatter
    chance = violation_chance(p95_us, slo_us, scatter.mean, scatter.spread)
    assert rig.row["expected_violations"] == pytest.approx(chance)
    assert rig.row["violated_s"] == pytest.approx(chance * rig.row["interval_s"])


@pytest.mark.parametrize("qps", [20_000.0, 175_000.0])
def test_where_no_scatter_is_known_the_verdict_is_what_is_expected(rig: Rig, qps: float) -> None:
    rig.begin(1, [qps])
    rig.row["scatter_spread"] = 0.0
    rig.set_desired((0,), regulator_on=False, vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 25.0)
    assert rig.row["violations"] == (2 if qps > 100_000.0 else 0)
    assert rig.row["expected_violations"] == rig.row["violations"]
    assert rig.row["violated_s"] == rig.row["violations"] * rig.row["interval_s"]


_RIGS: dict[str, Rig] = {}


@given(st.floats(50.0, 5000.0), st.floats(0.5, 5.0))
def test_a_twentieth_of_the_requests_exceeds_the_p95(p95_us: float, shape: float) -> None:
    assert tail_fraction(p95_us, p95_us, shape) == pytest.approx(0.05)
    assert tail_fraction(2 * p95_us, p95_us, shape) < 0.05 < tail_fraction(50.0, 51.0, shape)


# --- waking -----------------------------------------------------------------------------------


def asleep(targets: list[float], first_s: float) -> SimulatedMachine:
    """A machine with one job whose policy decides at `first_s` and then sleeps."""
    machine = SimulatedMachine(FACTORY)
    machine.begin(1, np.random.default_rng(1))
    machine.follow(np.array(targets))
    machine.host.work_left_s *= 0.1
    machine.advance(first_s)
    row = machine.host
    row.desired_state[SCENARIO.job_names.index("radix")] = RUNNING
    machine.apply(machine.telemetry().applied)
    return machine


@pytest.mark.parametrize("first_s", [0.0, 0.3, 9.999, 0.0123])
def test_a_load_move_wakes_at_the_first_poll_that_lies_after_it(first_s: float) -> None:
    machine = asleep([20_000.0, 60_000.0], first_s)
    period_s = SCENARIO.control.period_s
    while machine.host.now_s < 9.5 and first_s < 9.0:
        machine.advance(9.5, wake=True)
    machine.host.decided_at_s = first_s
    machine.advance(11.0, wake=True)
    woken_s = float(machine.host.now_s)
    polls = (woken_s - first_s) / period_s
    assert polls == pytest.approx(round(polls), abs=1e-6)
    # The poll's whole window lies after the move at 10 s, and no earlier poll's does.
    assert 10.0 + period_s - 1e-9 <= woken_s < 10.0 + 2 * period_s
    assert machine.telemetry().service.qps == pytest.approx(60_000.0, rel=0.6)


@pytest.mark.parametrize(("more", "woken_s"), [(0.0, 12.0), (1.0, 10.025)])
def test_only_a_load_move_past_the_threshold_wakes(more: float, woken_s: float) -> None:
    machine = SimulatedMachine(FACTORY)
    machine.begin(1, np.random.default_rng(1))
    machine.follow(np.array([20_000.0, 20_000.0 + SCENARIO.control.wake_qps + more]))
    machine.advance(12.0, wake=True)
    assert machine.host.now_s == pytest.approx(woken_s)


def test_a_machine_that_followed_a_trace_begins_anew() -> None:
    machine = SimulatedMachine(FACTORY)
    machine.begin(2333, np.random.default_rng(1))
    fresh = machine.telemetry()
    machine.follow(np.array([20_000.0, 60_000.0]))
    machine.advance(15.0)
    machine.begin(2333, np.random.default_rng(1))
    assert machine.telemetry() == fresh


@pytest.mark.parametrize("wake", [True, False])
def test_a_job_that_ends_wakes_at_the_next_poll(rig: Rig, wake: bool) -> None:
    rig.begin(1, [20_000.0], work=0.1)
    job = SCENARIO.job_names.index("radix")
    rig.set_desired((0,), radix=(RUNNING, (2, 3), NORMAL))
    rig.row["wake_on_events"] = wake
    kernel.advance(rig.row, rig.targets, 60.0)
    ended_s, now_s = float(rig.row["end_s"][job]), float(rig.row["now_s"])
    assert rig.row["true_state"][job] == DONE
    if not wake:
        assert now_s == pytest.approx(60.0)
        return
    assert ended_s <= now_s < ended_s + SCENARIO.control.period_s + 1e-9
    polls = now_s / SCENARIO.control.period_s
    assert polls == pytest.approx(round(polls), abs=1e-6)


def test_after_an_edit_a_period_passes_and_after_keep_the_hold_time(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    rig.step(int(rig.legal()[1]))
    assert rig.row["now_s"] == pytest.approx(SCENARIO.control.period_s)
    rig.step(0)
    assert rig.row["now_s"] == pytest.approx(SCENARIO.control.period_s + SCENARIO.control.hold_s)


# --- what a step leaves out ---


@pytest.mark.parametrize("seed", range(4))
def test_what_a_step_leaves_out_would_have_changed_nothing(seed: int) -> None:
    """Nothing to regulate and nothing to wait for: the long way leads to the same host."""
    rig = Rig(VARIED)
    rng = np.random.default_rng(seed)
    rig.begin(seed, work=0.2)
    rows, left_out = rig.factory.table.rows, {"settled": 0, "quiet_until_s": 0}
    compared = [name for name in rig.hosts.dtype.names if name != "quiet_until_s"]
    for _ in range(DECISIONS):
        edit = 0 if rng.random() < 0.7 else int(rng.choice(rig.legal()))
        whole, until_s = rig.hosts.copy(), rig.row["now_s"] + SCENARIO.control.hold_s
        left_out["settled"] += edit == 0 and bool(rig.row["settled"])
        left_out["quiet_until_s"] += edit == 0 and until_s < rig.row["quiet_until_s"]
        for name in left_out:
            whole[name] = 0
        terms = np.zeros(len(TERMS))
        ended = kernel.step(whole[0], rows, rig.targets, edit, 1.0, terms)
        same, same_terms = rig.step(edit)
        assert (ended, terms.tolist()) == (same, same_terms.tolist())
        for name in compared:
            assert whole[name].tobytes() == rig.hosts[name].tobytes(), name
        if ended:
            break
    assert min(left_out.values()) > 50


# --- compiled against plain Python ------------------------------------------------------------

DECISIONS = 300

REPLAY = """
import json, sys
import numpy as np
from tests.env.simulator.test_kernel import replay
seed, path = int(sys.argv[1]), sys.argv[2]
np.save(path, replay(seed, json.loads(sys.argv[3]))[1])
"""


def replay(seed: int, edits: list[int] | None = None) -> tuple[list[int], Any]:
    """
    An episode of the given edits, or of random legal ones.

    :return: the edits, and the host after each of them
    """
    rig = Rig(RESTLESS)
    rng = np.random.default_rng(seed)
    rig.begin(seed, work=0.05)
    taken, hosts = [], []
    for decision in range(DECISIONS):
        if edits is None:
            edit = 0 if rng.random() < 0.3 else int(rng.choice(rig.legal()))
        elif decision < len(edits):
            edit = edits[decision]
        else:
            break
        ended, _ = rig.step(edit, gamma=0.999)
        taken.append(edit)
        hosts.append(rig.hosts.copy())
        if ended:
            break
    return taken, np.concatenate(hosts)


def test_the_compiled_kernel_is_the_plain_python_it_was_compiled_from(tmp_path: Path) -> None:
    """Every field of the host, bit for bit, after every decision of a random episode."""
    edits, compiled = replay(11)
    assert compiled["true_state"][-1].tolist().count(DONE) > 2
    assert len(set(compiled["hiccup_s"].tolist())) > 5
    path = tmp_path / "plain.npy"
    subprocess.run(
        [sys.executable, "-c", REPLAY, "11", str(path), json.dumps(edits)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=120,
    )
    plain = np.load(path)
    assert len(plain) == len(edits)
    for name in compiled.dtype.names:
        assert compiled[name].tobytes() == plain[name].tobytes(), name


def test_the_profile_in_use_is_the_shipped_one() -> None:
    assert FACTORY.profile == load_profile("cca-2025")


def test_requests_of_a_load_on_the_machine_cost_the_jobs_time() -> None:
    scenario = load_scenario("local")
    plain = load_profile("local")
    here = Parameter(value=0.5, spread=0.1, source="a test")
    tenth = here.model_copy(update={"value": 0.1})
    costs = dict.fromkeys((name for name in COST_FIELDS if name != "agent_cpu"), here)
    loaded = plain.model_copy(update={"costs": costs})
    scheduled = plain.model_copy(update={"costs": costs | {"agent_cpu": tenth}})
    plain = plain.model_copy(update={"costs": {}})
    done, busy = [], []
    for profile in (plain, loaded, scheduled):
        machine = SimulatedMachine(EpisodeFactory(scenario, profile))
        machine.begin(1, np.random.default_rng(0))
        machine.follow(np.full(30, profile.service["core_capacity_qps"].value / 4.0))
        jobs = {"cpu": JobAllocation(RUNNING, (0, 1), BACKGROUND, 2)}
        machine.apply(Allocation((0,), jobs))
        machine.advance(0.5)
        done.append(float(machine.host.used.sum()))
        busy.append(machine.host.busy.copy())
        assert (machine.host.busy <= 1.0 + 1e-9).all()
    # Each at a power of 0.5: memcached uses half of its vCPU, the client half of 0.5 of the other.
    assert done[0] == pytest.approx(1.75, abs=0.02)
    assert done[1] == pytest.approx(0.5 + 0.75, abs=0.02)
    assert done[2] == pytest.approx(done[1] - 0.1, abs=0.001), "loop and probe take a tenth of it"
    assert busy[1] == pytest.approx([1.0, 1.0], abs=0.02)
