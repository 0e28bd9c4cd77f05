"""
The simulator's physics, event by event, and its compiled form against plain Python.

`Rig.walk` runs an episode of random allocations and yields the host before and after every stretch
of constant rates, so that each law is checked against the rates in force, not against itself.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.allocation import Allocation, JobAllocation, JobState, Weight
from env.codes import TRUNCATED
from env.physics.jobs import LAUNCH_OVERHEAD_S, WORK_S
from env.physics.parameters import COST_FIELDS, HOST_FIELDS
from env.physics.service import TAIL_SHAPE, service_state, tail_fraction
from env.scenario import load_scenario
from env.simulator import kernel
from env.simulator.host import MIXTURE
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from env.simulator.profile import Parameter, load_profile
from env.simulator.random import api_latency, two_noises, uniform
from env.simulator.rates import count_requests
from tests.conftest import Rig

PENDING, RUNNING, PAUSED, DONE = JobState
BACKGROUND, NORMAL = Weight

SCENARIO = load_scenario("cca-2025")
FACTORY = EpisodeFactory(SCENARIO)
VARIED = EpisodeFactory(SCENARIO, variation=Variation(physics=1.0, interval_s=(2.0, 20.0)))
SLOW_DOCKER = EpisodeFactory(
    SCENARIO.with_changes(
        delays={name: 1.0 for name in HOST_FIELDS if name.startswith("api_latency")}
    )
)
SMALL = 0.08
"""Scale of the jobs' work in random episodes: about a minute each."""

seeds = st.integers(0, 2**32 - 1)
walks = settings(max_examples=6)


def host_value(name: str) -> float:
    return float(FACTORY.profile.host[name].value)


def walk(seed: int, work: float = SMALL, limit_s: float = 1e9) -> Any:
    """A random episode, on a host whose physics is drawn for every other seed."""
    rig = Rig(VARIED if seed % 2 else FACTORY)
    rig.begin(seed, work=work)
    return rig.walk(seed, limit_s)


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
            if before["true_weight"][job] == NORMAL:  # background work may starve
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


# --- memcached --------------------------------------------------------------------------------


@walks
@given(seeds)
def test_every_request_is_served_or_waits(seed: int) -> None:
    offered = 0.0
    for before, after in walk(seed):
        if after["true_state"].min() == DONE:
            break  # what is counted beyond the end completes the last interval
        step_s = after["now_s"] - before["now_s"]
        offered += before["load_qps"] * step_s
        assert after["requests"] + after["backlog"] == pytest.approx(offered, abs=1.0)
        assert after["requests"] >= before["requests"]
        assert after["service_cpu_s"] >= before["service_cpu_s"]
        assert after["service_wait_s"] >= before["service_wait_s"]
        assert after["backlog"] >= 0.0
        if after["backlog"] > before["backlog"]:
            assert before["load_qps"] > before["capacity_qps"]
        served = after["requests"] - before["requests"]
        assert served <= before["capacity_qps"] * step_s + 1e-6
        if before["backlog"] > 0.0:  # whoever is behind answers as fast as possible
            assert served == pytest.approx(before["capacity_qps"] * step_s, abs=1e-3)


def test_a_backlog_builds_and_drains(rig: Rig) -> None:
    """Ten seconds above what one vCPU serves, then ten far below."""
    rig.begin(1, [20_000.0, 175_000.0, 20_000.0])
    rig.set_desired((0,))
    kernel.advance(rig.row, rig.targets, 9.9)
    assert rig.row["backlog"] == 0.0
    calm_us = float(rig.row["p95_us"])
    capacity = float(rig.row["capacity_qps"])
    assert 20_000.0 < capacity < 175_000.0
    kernel.advance(rig.row, rig.targets, 15.0)
    assert rig.row["backlog"] == pytest.approx((175_000.0 - rig.row["capacity_qps"]) * 5.0)
    plateau_us = float(rig.row["p95_us"])
    assert plateau_us > SCENARIO.service.slo_us > calm_us
    kernel.advance(rig.row, rig.targets, 20.0)
    peak = float(rig.row["backlog"])
    drained_at_s = 20.0 + peak / (rig.row["capacity_qps"] - 20_000.0)
    assert 20.0 < drained_at_s < 30.0
    kernel.advance(rig.row, rig.targets, drained_at_s - 0.01)
    assert 0.0 < rig.row["backlog"] < 0.02 * rig.row["capacity_qps"]
    assert rig.row["p95_us"] == pytest.approx(plateau_us)
    kernel.advance(rig.row, rig.targets, drained_at_s + 0.01)
    assert rig.row["backlog"] == 0.0
    assert rig.row["p95_us"] == pytest.approx(calm_us)
    assert rig.row["requests"] == pytest.approx(
        10.0 * (20_000.0 + 175_000.0) + 20_000.0 * (drained_at_s + 0.01 - 20.0)
    )


def test_more_vcpus_end_an_overload_at_once(rig: Rig) -> None:
    rig.begin(1, [175_000.0])
    rig.set_desired((0,))
    kernel.advance(rig.row, rig.targets, 2.0)
    behind = float(rig.row["backlog"])
    assert behind > 0.0
    rig.set_desired((0, 1))
    kernel.advance(rig.row, rig.targets, 2.0 + 2 * host_value("fast_latency_s"))
    assert rig.row["capacity_qps"] > 175_000.0
    kernel.advance(rig.row, rig.targets, 2.1)
    assert rig.row["backlog"] < behind


@st.composite
def services(draw: st.DrawFn) -> dict[str, Any]:
    """A load, a set of vCPUs with one more to come, and batch work everywhere else."""
    rig = Rig(VARIED)
    rig.begin(draw(st.integers(0, 200)))
    fraction = st.floats(0.0, 1.0)
    extra = draw(st.integers(0, 3))
    others = [vcpu for vcpu in range(4) if vcpu != extra]
    held = draw(st.sets(st.sampled_from(others), min_size=1))
    background, equal = np.zeros(4), np.zeros(4)
    for vcpu in others:
        background[vcpu] = draw(fraction)
        equal[vcpu] = draw(fraction) * (1.0 - background[vcpu])
    return {
        "qps": draw(st.floats(1.0, 400_000.0)),
        "threads": draw(st.integers(1, 4)),
        "mask": sum(1 << vcpu for vcpu in held),
        "extra": extra,
        "background": background,
        "equal": equal,
        "pressure": draw(st.floats(0.0, 3.0)),
        "sibling": rig.row["sibling"].copy(),
        "params": rig.row["service_params"].copy(),
    }


def answer(case: dict[str, Any], **changes: Any) -> tuple[float, float, float]:
    """p95 [us], capacity [requests/s] and CPU use [vCPUs]."""
    given_ = {**case, **changes}
    names = ("qps", "threads", "mask", "sibling", "background", "equal", "pressure", "params")
    p95_us, capacity_qps, cpu, _ = service_state(*(given_[name] for name in names))
    return p95_us, capacity_qps, cpu


@settings(max_examples=300)
@given(services())
def test_an_idle_vcpu_more_never_raises_p95(case: dict[str, Any]) -> None:
    p95_us, capacity_qps, _ = answer(case)
    more_us, more_qps, _ = answer(case, mask=case["mask"] | 1 << case["extra"])
    assert more_us <= p95_us * (1.0 + 1e-9)
    assert more_qps >= capacity_qps * (1.0 - 1e-9)


@settings(max_examples=200)
@given(services(), st.floats(1.0, 2.0))
def test_more_load_never_lowers_p95(case: dict[str, Any], factor: float) -> None:
    p95_us, capacity_qps, cpu = answer(case)
    more_us, same_qps, more_cpu = answer(case, qps=case["qps"] * factor)
    assert same_qps == capacity_qps
    assert more_us >= p95_us * (1.0 - 1e-9)
    assert more_cpu >= cpu * (1.0 - 1e-9)
    assert 0.0 < cpu <= case["mask"].bit_count()


@settings(max_examples=200)
@given(services(), st.integers(0, 3))
def test_less_batch_work_never_hurts(case: dict[str, Any], vcpu: int) -> None:
    p95_us, capacity_qps, _ = answer(case)
    background, equal = case["background"].copy(), case["equal"].copy()
    background[vcpu] = equal[vcpu] = 0.0
    calm_us, calm_qps, _ = answer(case, background=background, equal=equal)
    assert calm_qps >= capacity_qps * (1.0 - 1e-9)
    assert calm_us <= p95_us * (1.0 + 1e-9)


# --- measurement intervals --------------------------------------------------------------------


@walks
@given(seeds)
def test_an_interval_violates_when_more_than_a_twentieth_is_slow(seed: int) -> None:
    sent = slow = 0.0
    ended = False
    for before, after in walk(seed):
        step_s = after["now_s"] - before["now_s"]
        rate = before["capacity_qps"] if before["backlog"] > 0.0 else before["load_qps"]
        count = min(rate, before["capacity_qps"]) * step_s
        sent += count
        slow += count * before["slow_fraction"]
        ended = bool(after["true_state"].min() == DONE)
        if after["interval"] == before["interval"] or ended:
            assert after["violations"] == before["violations"] or ended
            continue
        started = bool((before["start_s"] <= before["interval_ends_s"]).any())
        assert after["intervals"] - before["intervals"] == started
        violated = started and slow > 0.05 * sent
        if abs(slow - 0.05 * sent) > 1e-9 * sent:
            assert after["violations"] - before["violations"] == violated
        sent = slow = 0.0
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
    rig.set_desired((0,))
    kernel.advance(rig.row, rig.targets, 35.0)
    assert kernel.interval_p95(rig.row) > SCENARIO.service.slo_us
    assert rig.row["intervals"] == rig.row["violations"] == 0
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 60.0)
    assert rig.row["intervals"] == rig.row["violations"] == 3


def test_the_interval_that_the_time_cap_cuts_short_counts() -> None:
    """mcperf announces ceil(t / interval) intervals and reports all of them."""
    rig = Rig(EpisodeFactory(SCENARIO.with_changes(load={"interval_s": 7.0, "duration_s": 20.0})))
    rig.begin(1, [175_000.0])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 100.0)
    assert rig.row["now_s"] == pytest.approx(20.0)
    rows, terms = rig.factory.table.rows, np.zeros(4)
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
    rig.set_desired(cores)
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


_RIGS: dict[str, Rig] = {}


@given(st.floats(50.0, 5000.0), st.floats(0.5, 5.0))
def test_a_twentieth_of_the_requests_exceeds_the_p95(p95_us: float, shape: float) -> None:
    assert tail_fraction(p95_us, p95_us, shape) == pytest.approx(0.05)
    assert tail_fraction(2 * p95_us, p95_us, shape) < 0.05 < tail_fraction(50.0, 51.0, shape)


# --- actuation --------------------------------------------------------------------------------


def test_docker_calls_take_what_was_measured(rig: Rig) -> None:
    rig.begin(1)
    quantiles = [host_value(f"api_latency_{name}_s") for name in ("median", "p90", "p99")]
    drawn = np.sort([api_latency(rig.row, *quantiles) for _ in range(20_000)])
    assert np.quantile(drawn, [0.5, 0.9, 0.99]) == pytest.approx(quantiles, rel=0.08)
    assert drawn[0] > 0.2 * quantiles[0]
    assert drawn[-1] < 1.6 * quantiles[2]


def test_the_random_numbers_are_even(rig: Rig) -> None:
    rig.begin(1)
    drawn = np.array([uniform(rig.row) for _ in range(20_000)])
    assert 0.0 < drawn.min() < drawn.max() < 1.0
    assert np.histogram(drawn, 10, (0.0, 1.0))[0] == pytest.approx(2000, rel=0.1)
    readings = np.array([two_noises(rig.row) for _ in range(10_000)]).ravel()
    assert readings.mean() == pytest.approx(0.0, abs=0.03)
    assert readings.std() == pytest.approx(1.0, rel=0.03)


def test_two_noises_are_four_draws_in_a_row(rig: Rig) -> None:
    rig.begin(1)
    for _ in range(1000):
        before = rig.row["random"].copy()
        pair = two_noises(rig.row)
        after = rig.row["random"].copy()
        rig.row["random"] = before
        one, two, three, four = (uniform(rig.row) for _ in range(4))
        assert pair == ((one + two - 1.0) * math.sqrt(6.0), (three + four - 1.0) * math.sqrt(6.0))
        assert rig.row["random"].tolist() == after.tolist()


def test_docker_calls_are_made_one_after_another() -> None:
    rig = Rig(SLOW_DOCKER)
    rig.begin(1, [20_000.0])
    wanted = dict.fromkeys(SCENARIO.job_names, (RUNNING, (2, 3), NORMAL))
    rig.set_desired((0,), **wanted)
    kernel.advance(rig.row, rig.targets, 30.0)
    starts = rig.row["start_s"]
    shortest = 0.25 + host_value("container_start_s")  # a quarter of the median
    assert (np.diff(starts, prepend=0.0) >= shortest - 1e-9).all()
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    assert 30.25 <= rig.row["lands_s"][SCENARIO.job_names.index("vips")] <= 31.5


def test_vcpus_and_weights_are_written_directly(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    fast_s = host_value("fast_latency_s")
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    before = int(rig.row["actuations"])
    rig.set_desired((0, 1), vips=(RUNNING, (1, 2), BACKGROUND))
    assert rig.row["actuations"] == before + 3  # memcached's vCPUs, the job's, its weight
    kernel.advance(rig.row, rig.targets, 10.0 + 0.5 * fast_s)
    assert (rig.row["true_service"], rig.row["true_cores"][job]) == (0b0001, 0b1100)
    kernel.advance(rig.row, rig.targets, 10.0 + 1.5 * fast_s)
    assert (rig.row["true_service"], rig.row["true_cores"][job]) == (0b0011, 0b0110)
    assert rig.row["true_weight"][job] == BACKGROUND
    rig.set_desired((0, 1))
    assert rig.row["actuations"] == before + 3  # nothing that is already true


def test_published_controllers_move_jobs_by_calls_to_docker() -> None:
    slow = EpisodeFactory(
        SCENARIO.with_changes(
            delays={
                "docker_moves": True,
                **{name: 1.0 for name in HOST_FIELDS if name.startswith("api_latency")},
            }
        )
    )
    rig = Rig(slow)
    rig.begin(1, [20_000.0])
    wanted = dict.fromkeys(("ferret", "vips"), (RUNNING, (1, 2, 3), NORMAL))
    rig.set_desired((0,), **wanted)
    kernel.advance(rig.row, rig.targets, 10.0)
    rig.set_desired((0, 1), **dict.fromkeys(wanted, (RUNNING, (2, 3), NORMAL)))
    kernel.advance(rig.row, rig.targets, 10.1)
    jobs = [SCENARIO.job_names.index(name) for name in wanted]
    assert rig.row["true_service"] == 0b0011  # memcached's own move is direct
    assert (rig.row["true_cores"][jobs] == 0b1110).all()  # and the jobs are still there
    first, second = rig.row["move_lands_s"][jobs]
    assert second - first >= 0.25  # one call after the other, a quarter of the median at least
    kernel.advance(rig.row, rig.targets, 14.0)
    assert (rig.row["true_cores"][jobs] == 0b1100).all()


def test_a_job_has_one_call_to_docker_at_a_time() -> None:
    """What is decided while a call is under way is sent when that one has landed."""
    rig = Rig(SLOW_DOCKER)
    rig.begin(1, [20_000.0])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    job, before = SCENARIO.job_names.index("vips"), int(rig.row["actuations"])
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    lands_s = float(rig.row["lands_s"][job])
    kernel.advance(rig.row, rig.targets, 10.1)
    rig.set_desired((0,), vips=(RUNNING, (1, 2, 3), NORMAL))
    assert rig.row["lands_s"][job] == lands_s  # the pause is not called back
    kernel.advance(rig.row, rig.targets, lands_s + 0.01)
    assert rig.row["true_state"][job] == PAUSED
    assert lands_s < rig.row["lands_s"][job] < math.inf
    kernel.advance(rig.row, rig.targets, lands_s + 20.0)
    assert rig.row["true_state"][job] == RUNNING
    assert rig.row["true_cores"][job] == 0b1110
    assert rig.row["pauses"][job] == 1
    assert rig.row["actuations"] == before + 3


def test_quotas_are_written_directly_and_come_with_the_launch(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.row["desired_quota"][job] = 0.5
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    assert rig.row["used"][job].sum() == pytest.approx(0.5)
    before, cpu_s = int(rig.row["actuations"]), float(rig.row["job_cpu_s"][job])
    rig.row["desired_quota"][job] = 1.5
    rig.set_desired((0,))
    assert rig.row["actuations"] == before + 1
    kernel.advance(rig.row, rig.targets, 20.0)
    assert rig.row["used"][job].sum() == pytest.approx(1.5)
    assert rig.row["job_cpu_s"][job] - cpu_s == pytest.approx(15.0, rel=0.01)
    rig.set_desired((0,), vips=(PAUSED, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 30.0)
    assert not rig.row["used"][job].any()
    rig.row["desired_quota"][job] = np.inf
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 40.0)
    assert rig.row["used"][job].sum() > 1.5


# --- the latency probe ------------------------------------------------------------------------


def probing(window_s: float, targets: list[float]) -> SimulatedMachine:
    machine = SimulatedMachine(FACTORY)
    machine.begin(1, np.random.default_rng(1))
    machine.follow(np.array(targets))
    machine.probe(window_s)
    return machine


def test_nobody_asks_nothing_is_shown() -> None:
    machine = SimulatedMachine(FACTORY)
    machine.begin(1, np.random.default_rng(1))
    machine.probe(0.0)
    machine.advance(5.0)
    assert machine.telemetry().service.p95_us is None
    assert machine.telemetry().service.cpi is None


def test_the_probe_scatters_about_the_p95_as_its_samples_do() -> None:
    shape = float(FACTORY.profile.service["tail_shape"].value)
    for window_s in (1.0, 4.0):
        machine = probing(window_s, [20_000.0] * 1000)
        readings = []
        for second in range(1, 400):
            machine.advance(window_s * second)
            readings.append(machine.telemetry().service.p95_us / machine.host.p95_us)
        assert np.mean(readings) == pytest.approx(1.0, abs=0.01)
        # The spread of a log-logistic sample's own 95th percentile, drawn 1000 a second.
        rng = np.random.default_rng(0)
        uniform_ = rng.random((2000, int(1000 * window_s)))
        drawn = np.quantile((uniform_ / (1.0 - uniform_) / 19.0) ** (1.0 / shape), 0.95, axis=1)
        assert np.std(readings) == pytest.approx(drawn.std(), rel=0.2)


def test_a_reading_stands_until_its_window_has_passed() -> None:
    machine = probing(1.0, [20_000.0, 250_000.0])
    readings = []
    for poll in range(1, 42):  # the load moves at 10 s
        machine.advance(8.75 + 0.1 * poll)
        readings.append(machine.telemetry().service.p95_us)
    assert len(set(readings)) == 5
    first, moved = readings[11], readings[33]
    assert machine.scenario.service.slo_us > first
    assert moved > 1.3 * first  # the window that saw the load move only


def test_a_slow_reader_sees_all_since_his_last_look() -> None:
    machine = probing(1.0, [20_000.0, 20_000.0, 250_000.0, 20_000.0])
    machine.advance(20.0)
    calm = machine.telemetry().service.p95_us
    machine.advance(38.5)  # 10 s of overload, 8.5 s calm
    assert machine.host.p95_us < 1.2 * calm
    assert machine.telemetry().service.p95_us > 1.3 * calm


def test_batch_work_stretches_cycles_per_instruction() -> None:
    machine = probing(1.0, [20_000.0])
    machine.advance(5.0)
    alone = machine.telemetry().service.cpi
    jobs = {
        name: JobAllocation(RUNNING, (1, 2, 3), threads=4)
        for name in ("canneal", "ferret", "radix")
    }
    machine.apply(Allocation((0,), jobs))
    machine.advance(30.0)
    assert alone == pytest.approx(1.0, abs=0.2)
    assert machine.host.stretch > 1.02
    assert machine.telemetry().service.cpi != alone


def test_vcpus_do_not_wait_for_a_docker_call_under_way() -> None:
    """memcached takes a vCPU from a job that is about to be paused: it gets it at once."""
    rig = Rig(SLOW_DOCKER)
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (1, 2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.0)
    rig.set_desired((0,), vips=(PAUSED, (1, 2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.025)
    rig.set_desired((0, 1), vips=(PAUSED, (2, 3), NORMAL))
    kernel.advance(rig.row, rig.targets, 10.05)
    assert rig.row["true_state"][job] == RUNNING  # Docker takes a quarter of a second at least
    assert rig.row["true_service"] == 0b0011
    assert rig.row["true_cores"][job] == 0b1100


def test_threads_are_fixed_at_launch(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    job = SCENARIO.job_names.index("vips")
    rig.set_desired((0,), vips=(RUNNING, (2, 3), NORMAL))
    rig.row["desired_threads"][job] = 1
    kernel.apply_desired(rig.row, True)
    assert rig.row["threads"][job] == 4


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
        terms = np.zeros(4)
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
    rig = Rig(VARIED)
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
    loaded = plain.model_copy(update={"costs": dict.fromkeys(COST_FIELDS, here)})
    plain = plain.model_copy(update={"costs": {}})
    done, busy = [], []
    for profile in (plain, loaded):
        machine = SimulatedMachine(EpisodeFactory(scenario, profile))
        machine.begin(1, np.random.default_rng(0))
        machine.follow(np.full(30, profile.service["core_capacity_qps"].value / 4.0))
        jobs = {"cpu": JobAllocation(RUNNING, (0, 1), BACKGROUND, 2)}
        machine.apply(Allocation((0,), jobs))
        machine.advance(2.0)
        done.append(float(machine.host.used.sum()))
        busy.append(machine.host.busy.copy())
        assert (machine.host.busy <= 1.0 + 1e-9).all()
    # Each at a power of 0.5: memcached uses half of its vCPU, the client half of 0.5 of the other.
    assert done[0] == pytest.approx(1.75, abs=0.02)
    assert done[1] == pytest.approx(0.5 + 0.75, abs=0.02)
    assert busy[1] == pytest.approx([1.0, 1.0], abs=0.02)
