"""
The regulator keeps its promises to memcached and to the jobs, whatever a policy desires.

Hypothesis makes up machines and sequences of decisions, legal or not. Every sequence runs on a
plain object, as the live loop holds it, and on a NumPy row, as the simulator does.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from env.allocation import Weight
from env.codes import BACKGROUND, DONE, NORMAL, PAUSED, PENDING, RUNNING
from env.control import ControlState, control_fields, initial_values
from env.decision import decide_allocation
from env.regulator import (
    DWELL,
    GUARD,
    HICCUP,
    MEMORY,
    MOVE_FLAP,
    PAUSE_FLAP,
    REASONS,
    SHARING,
    STRANDED,
    note_use,
    was_busier,
)
from env.scenario import Scenario, load_scenario
from env.simulator import kernel
from env.simulator.machine import EpisodeFactory
from tests.conftest import Rig

N_JOBS = 3
_ALL = load_scenario("cca-2025")
SHIPPED = _ALL.model_copy(update={"jobs": _ALL.jobs[-N_JOBS:]})
LONG_AGO = 1e5

PROBLEMS = {
    "shipped": SHIPPED,
    "no sharing": SHIPPED.with_changes(regulation={"share_service_cores": False}),
    "little memory": SHIPPED.with_changes(machine={"memory_mib": 9000}),
    "slow to move": SHIPPED.with_changes(
        regulation={"move_dwell_s": 5.0, "service_dwell_s": 3.0, "pause_dwell_s": 4.0}
    ),
    "three steps": SHIPPED.with_changes(
        service={"core_choices": [[1], [1, 2], [1, 2, 3]], "overflow_cores": []}
    ),
}


@dataclass(frozen=True)
class Desired:
    """What a policy may come up with at one decision, and what happened before it."""

    wait_s: float
    ended: frozenset[int]
    service: int
    states: tuple[int, ...]
    cores: tuple[int, ...]
    weights: tuple[int, ...]
    threads: tuple[int, ...]
    quotas: tuple[float, ...]


def per_job(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*[values] * N_JOBS)


def sequences(service: st.SearchStrategy[int]) -> st.SearchStrategy[list[Desired]]:
    """Sequences of decisions: half of the decisions follow at once, jobs want to run mostly."""
    one = st.builds(
        Desired,
        wait_s=st.sampled_from([0.0, 0.025, 0.025, 0.4, 1.0, 3.0, 30.0]),
        ended=st.sampled_from([frozenset()] * 6 + [frozenset({job}) for job in range(N_JOBS)]),
        service=service,
        states=per_job(st.sampled_from([PENDING, RUNNING, RUNNING, PAUSED])),
        cores=per_job(st.integers(0, 15)),
        weights=per_job(st.sampled_from(Weight)),
        threads=per_job(st.sampled_from([1, 2, 4])),
        quotas=per_job(st.sampled_from([0.01, 1.5, math.inf])),
    )
    return st.lists(one, min_size=1, max_size=10)


# memcached may want nothing at all, but not the whole machine: see the last tests.
any_sequences = sequences(st.integers(0, 7))
problems = st.sampled_from(sorted(PROBLEMS)).map(PROBLEMS.__getitem__)


def fresh(scenario: Scenario) -> ControlState:
    return ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))


def numpy_row(scenario: Scenario) -> Any:
    rows = np.zeros(1, np.dtype(control_fields(len(scenario.jobs), scenario.machine.vcpus)))
    for name, value in initial_values(scenario, dict.fromkeys(scenario.job_names, 100.0)).items():
        rows[name] = value
    return rows.view(np.recarray)[0]


def decide(control: Any, desired: Desired) -> None:
    """One decision as the loop takes it: time passes, sensors show, the policy decides."""
    control.now_s += desired.wait_s
    for job in range(len(desired.states)):
        ended = job in desired.ended and control.state[job] in (RUNNING, PAUSED)
        if ended or control.job_state[job] == DONE:
            control.job_state[job] = DONE
        else:
            control.job_state[job] = int(control.state[job])
        control.desired_state[job] = int(desired.states[job])
        control.desired_cores[job] = desired.cores[job]
        control.desired_weight[job] = int(desired.weights[job])
        control.desired_threads[job] = desired.threads[job]
        control.desired_quota[job] = desired.quotas[job]
    control.desired_service = desired.service
    decide_allocation(control, True)


def in_force(control: Any) -> tuple[Any, ...]:
    jobs = [control.state, control.cores, control.weight, control.threads]
    whole = (tuple(int(value) for value in field) for field in jobs)
    return (int(control.service), *whole, tuple(control.quota))


def steps(scenario: Scenario, sequence: list[Desired]) -> Any:
    """The control state before and after each decision."""
    control = fresh(scenario)
    for desired in sequence:
        before = copy.deepcopy(control)
        decide(control, desired)
        yield desired, before, copy.deepcopy(control)


# --- memcached --------------------------------------------------------------------------------


@given(problems, any_sequences)
def test_memcached_is_never_without_a_vcpu(scenario: Scenario, sequence: list[Desired]) -> None:
    for desired, before, after in steps(scenario, sequence):
        assert after.service & 15 == after.service != 0
        assert bool(after.overruled_reasons & STRANDED) == (desired.service == 0)
        if desired.service == 0:
            assert after.service == before.service


@given(problems, any_sequences)
def test_memcached_grows_at_once(scenario: Scenario, sequence: list[Desired]) -> None:
    for desired, _, after in steps(scenario, sequence):
        assert after.service & desired.service == desired.service


@given(problems, any_sequences)
def test_memcached_shrinks_only_after_the_dwell_time(
    scenario: Scenario, sequence: list[Desired]
) -> None:
    grown_at_s = -LONG_AGO
    for desired, before, after in steps(scenario, sequence):
        rested = after.now_s - grown_at_s >= scenario.regulation.service_dwell_s
        if not rested:
            assert before.service & ~after.service == 0
        elif desired.service:
            assert after.service == desired.service
        if after.service & ~before.service:
            grown_at_s = after.now_s


# --- where jobs run ---------------------------------------------------------------------------


@given(problems, any_sequences)
def test_no_running_job_disturbs_memcached_or_has_no_vcpu(
    scenario: Scenario, sequence: list[Desired]
) -> None:
    sharing = scenario.regulation.share_service_cores
    for _, _, after in steps(scenario, sequence):
        for job in range(N_JOBS):
            if after.state[job] != RUNNING:
                continue
            assert after.cores[job] & 15 == after.cores[job] != 0
            if after.weight[job] == NORMAL or not sharing:
                assert after.cores[job] & after.service == 0


@given(problems, any_sequences)
def test_a_job_moves_at_most_once_a_dwell_time_unless_memcached_drives_it(
    scenario: Scenario, sequence: list[Desired]
) -> None:
    moved_at_s = [-LONG_AGO] * N_JOBS
    sharing = scenario.regulation.share_service_cores
    for _, before, after in steps(scenario, sequence):
        for job in range(N_JOBS):
            if after.cores[job] == before.cores[job]:
                continue
            apart = after.weight[job] == NORMAL or not sharing
            driven = apart and before.cores[job] & after.service != 0
            if before.state[job] == after.state[job] == RUNNING and not driven:
                assert after.now_s - moved_at_s[job] >= scenario.regulation.move_dwell_s
            moved_at_s[job] = after.now_s


# --- what jobs do -----------------------------------------------------------------------------


@given(problems, any_sequences)
def test_no_job_is_paused_twice_within_the_dwell_time(
    scenario: Scenario, sequence: list[Desired]
) -> None:
    paused_at_s = [-LONG_AGO] * N_JOBS
    for _, before, after in steps(scenario, sequence):
        for job in range(N_JOBS):
            if before.state[job] == RUNNING and after.state[job] == PAUSED:
                assert after.now_s - paused_at_s[job] >= scenario.regulation.pause_dwell_s
                paused_at_s[job] = after.now_s


@given(any_sequences)
def test_memory_is_never_exceeded(sequence: list[Desired]) -> None:
    scenario = PROBLEMS["little memory"]  # two of three jobs
    for _, _, after in steps(scenario, sequence):
        held = sum(state in (RUNNING, PAUSED) for state in after.state)
        assert held * 4096 <= scenario.machine.memory_mib


@given(any_sequences)
def test_memory_that_would_suffice_is_not_refused(sequence: list[Desired]) -> None:
    scenario = PROBLEMS["little memory"]
    for _, _, after in steps(scenario, sequence):
        if after.overruled_reasons & MEMORY:
            held = sum(state in (RUNNING, PAUSED) for state in after.state)
            assert (held + 1) * 4096 > scenario.machine.memory_mib


@given(problems, any_sequences)
def test_a_job_goes_its_way_only_forward(scenario: Scenario, sequence: list[Desired]) -> None:
    for _, before, after in steps(scenario, sequence):
        for job in range(N_JOBS):
            was, now = before.state[job], after.state[job]
            assert (now == DONE) == (after.job_state[job] == DONE)
            if was in (RUNNING, PAUSED):
                assert now != PENDING
                assert after.threads[job] == before.threads[job]
            if was == PENDING:
                assert now in (PENDING, RUNNING)
                if now == RUNNING:
                    assert after.threads[job] == after.desired_threads[job]


# --- what it says about itself ----------------------------------------------------------------


@given(problems, any_sequences)
def test_what_is_not_overruled_is_what_was_desired(
    scenario: Scenario, sequence: list[Desired]
) -> None:
    for desired, before, after in steps(scenario, sequence):
        assert (after.overruled > before.overruled) == (after.overruled_reasons != 0)
        assert after.overruled_reasons & ~sum(REASONS) == 0
        reasons = after.overruled_reasons
        if not reasons & (STRANDED | DWELL):
            assert after.service == desired.service
        for job in range(N_JOBS):
            if DONE in (after.job_state[job], before.state[job]) or desired.states[job] == PENDING:
                continue
            if before.state[job] == PENDING and desired.states[job] == PAUSED:
                assert after.state[job] == PENDING  # there is nothing to pause
                continue
            if not reasons & (MEMORY | PAUSE_FLAP):
                assert after.state[job] == desired.states[job]
            if not reasons & (MEMORY | SHARING | MOVE_FLAP) and desired.cores[job]:
                assert after.cores[job] == desired.cores[job]
            if after.state[job] in (RUNNING, PAUSED):
                assert after.weight[job] == desired.weights[job]
                assert after.quota[job] == desired.quotas[job]


@given(problems, any_sequences, st.sampled_from([0.0, 0.025, 100.0]))
def test_what_is_in_force_is_never_overruled(
    scenario: Scenario, sequence: list[Desired], later_s: float
) -> None:
    for _, _, control in steps(scenario, sequence):
        kept = in_force(control)
        again = Desired(later_s, frozenset(), *kept)
        decide(control, again)
        assert in_force(control) == kept
        assert control.overruled_reasons == 0


@given(problems, any_sequences)
def test_plain_object_and_numpy_row_agree(scenario: Scenario, sequence: list[Desired]) -> None:
    plain, row = fresh(scenario), numpy_row(scenario)
    for desired in sequence:
        decide(plain, desired)
        decide(row, desired)
        for name, value in vars(plain).items():
            assert np.array_equal(getattr(row, name), value), name


@settings(max_examples=30)
@given(any_sequences)
def test_plain_object_and_compiled_kernel_agree(
    factory: EpisodeFactory, sequence: list[Desired]
) -> None:
    """Of the shipped scenario's jobs, for which other tests have the kernel compiled as well."""
    rig = Rig(factory)
    rig.begin(1, [50_000.0])
    plain = fresh(_ALL)
    for desired in map(among_all_jobs, sequence):
        decide(plain, desired)
        rig.row["now_s"] = plain.now_s
        fields = ("state", "cores", "weight", "threads", "quota")
        for name in ("job_state", *(f"desired_{field}" for field in fields)):
            rig.row[name] = getattr(plain, name)
        rig.row["desired_service"] = desired.service
        kernel.apply_desired(rig.row, True)
        for name in ("grown_at_s", "paused_at_s", "moved_at_s", "overruled", "overruled_reasons"):
            assert np.array_equal(rig.row[name], getattr(plain, name)), name
        assert in_force(rig.host) == in_force(plain)


def among_all_jobs(desired: Desired) -> Desired:
    """The same of the last jobs, while nobody wants the others."""
    others = len(_ALL.jobs) - N_JOBS
    return Desired(
        desired.wait_s,
        frozenset(job + others for job in desired.ended),
        desired.service,
        (PENDING,) * others + desired.states,
        (0,) * others + desired.cores,
        (Weight.NORMAL,) * others + desired.weights,
        (1,) * others + desired.threads,
        (math.inf,) * others + desired.quotas,
    )


# --- without the regulator --------------------------------------------------------------------


@given(any_sequences)
def test_switched_off_it_lets_every_allocation_through(sequence: list[Desired]) -> None:
    control = fresh(SHIPPED)
    for desired in sequence:
        before = copy.deepcopy(control)
        decide(copy.deepcopy(control), desired)  # to set the sensors
        control.now_s += desired.wait_s
        control.desired_service = desired.service
        control.desired_state[:] = map(int, desired.states)
        control.desired_cores[:] = desired.cores
        control.desired_weight[:] = map(int, desired.weights)
        control.desired_threads[:] = desired.threads
        control.desired_quota[:] = desired.quotas
        decide_allocation(control, False)
        assert control.service == (desired.service or before.service)
        assert control.overruled == control.overruled_reasons == 0
        for job in range(N_JOBS):
            was, wanted = before.state[job], desired.states[job]
            if wanted == PENDING or (was, wanted) == (PENDING, PAUSED):
                assert control.state[job] == was
                continue
            assert control.state[job] == wanted
            assert control.cores[job] == desired.cores[job]
            assert control.weight[job] == desired.weights[job]
            assert control.quota[job] == desired.quotas[job]
            assert control.threads[job] == (
                desired.threads[job] if was == PENDING else before.threads[job]
            )


# --- memcached on the whole machine -----------------------------------------------------------


@given(sequences(st.integers(0, 15)))
def test_where_memcached_takes_all_only_background_jobs_run(sequence: list[Desired]) -> None:
    for _, before, after in steps(SHIPPED, sequence):
        for job in range(N_JOBS):
            if after.state[job] == RUNNING and after.weight[job] == NORMAL:
                assert after.cores[job] & after.service == 0
            if before.state[job] == PENDING and after.service == 15:
                assert after.state[job] == PENDING or after.weight[job] == BACKGROUND


@given(sequences(st.just(15)))
def test_where_memcached_takes_all_whoever_shares_runs_beside_it(sequence: list[Desired]) -> None:
    """Whatever weight was wished for: in the background, on the set that was wished for."""
    for desired, before, after in steps(SHIPPED, sequence):
        for job in range(N_JOBS):
            was, wished = before.state[job], desired.states[job]
            if after.service != 15 or after.job_state[job] == DONE or was == PENDING:
                continue
            if wished == RUNNING:
                assert (after.state[job], after.weight[job]) == (RUNNING, BACKGROUND)
                rested = after.now_s - before.moved_at_s[job] >= SHIPPED.regulation.move_dwell_s
                if rested:
                    assert after.cores[job] == (desired.cores[job] or 15)
            if wished == PAUSED and desired.weights[job] == NORMAL:
                assert after.state[job] == PAUSED


def test_every_reason_has_its_words() -> None:
    assert set(REASONS) == {
        *(STRANDED, DWELL, SHARING, MEMORY, PAUSE_FLAP, MOVE_FLAP, HICCUP, GUARD)
    }
    assert all(flag.bit_count() == 1 for flag in REASONS)
    assert len(set(REASONS.values())) == len(REASONS)


# --- readings that forgive a hiccup -----------------------------------------------------------

POLL_S = SHIPPED.control.period_s
STEADY = 1.25  # memcached's CPU use at the load that stalls


def follow_load(
    control: ControlState, qps: float, cpu_cores: float, seconds: float, noise: Any = None
) -> list[bool]:
    """At each poll, whether memcached could do with one vCPU now."""
    allowed = []
    for _ in range(max(1, round(seconds / POLL_S))):
        control.now_s += POLL_S
        scatter = 1.0 if noise is None else noise.uniform(0.9, 1.1)
        control.qps, control.cpu_cores = qps * scatter, cpu_cores * scatter
        note_use(control, control.qps, control.cpu_cores, POLL_S)
        allowed.append(not was_busier(control, 1))
    return allowed


@given(st.integers(1, 20), st.floats(0.0, 0.6), st.integers(0, 2**32 - 1))
def test_a_load_that_stalls_and_catches_up_is_not_a_lower_load(
    polls: int, left: float, seed: int
) -> None:
    control, noise = fresh(SHIPPED), np.random.default_rng(seed)
    follow_load(control, 165_000.0, STEADY, 5.0, noise)
    stalled = follow_load(control, left * 165_000.0, left * STEADY, polls * POLL_S, noise)
    caught_up = follow_load(control, 278_000.0, 1.7, POLL_S, noise)
    assert not any(stalled + caught_up)


@given(
    st.floats(40_000.0, 180_000.0), st.floats(0.0, 1.9), st.floats(0.0, 0.5),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_load_that_falls_is_followed_after_a_second(
    qps: float, cpu_cores: float, left: float, seed: int
) -> None:
    control, noise = fresh(SHIPPED), np.random.default_rng(seed)
    follow_load(control, qps, cpu_cores, 5.0, noise)
    allowed = follow_load(control, left * qps, 0.4 * cpu_cores, 4.0, noise)
    assert all(allowed[round(2.0 / POLL_S) :])
    moved = (1.0 - 0.1) * 0.95 * qps - 1.1 * left * qps > SHIPPED.control.wake_qps
    if moved:
        assert not any(allowed[: round(0.9 / POLL_S)])


@given(st.floats(5_000.0, 180_000.0), st.floats(0.0, 0.85), st.integers(0, 2**32 - 1))
def test_noise_holds_no_vcpus(qps: float, cpu_cores: float, seed: int) -> None:
    control, noise = fresh(SHIPPED), np.random.default_rng(seed)
    assert all(follow_load(control, qps, cpu_cores, 10.0, noise)[4:])


def test_memcached_keeps_what_it_needed_within_the_last_second() -> None:
    control = fresh(SHIPPED)
    follow_load(control, 165_000.0, STEADY, 5.0)
    follow_load(control, 45_000.0, 0.3, POLL_S)
    control.desired_service = 1
    decide_allocation(control, True)
    assert control.service == control.refuge and control.overruled_reasons == HICCUP
    follow_load(control, 45_000.0, 0.3, 2.0)
    decide_allocation(control, True)
    assert control.service == 1 and control.overruled_reasons == 0
