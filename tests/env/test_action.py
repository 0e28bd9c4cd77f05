"""Edits: what the mask allows is carried out, what it forbids changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env import action
from env.action import KIND, Edit, EditTable, edit_table
from env.codes import (
    BACKGROUND,
    DONE,
    KEEP,
    NORMAL,
    PAUSE,
    PAUSED,
    PENDING,
    PLACE,
    RUNNING,
    SERVICE,
    START,
)
from env.control import ControlState
from env.decision import decide_edit
from env.regulator import DWELL, MOVE_FLAP
from env.scenario import Scenario, load_scenario

CCA = load_scenario("cca-2025")

PROBLEMS = {
    "cca-2025": CCA,
    "no sharing": CCA.with_changes(regulation={"share_service_cores": False}),
    "little memory": CCA.with_changes(machine={"memory_mib": 9000}),
    "two vCPUs": CCA.with_changes(
        machine={"vcpus": 2, "smt_siblings": []},
        service={"core_choices": [[0]], "overflow_cores": []},
    ),
    "eight cores": CCA.with_changes(
        machine={"vcpus": 8, "smt_siblings": []},
        service={"core_choices": [[0], [0, 1, 2]], "overflow_cores": []},
    ),
}
PROBLEMS["all for memcached"] = PROBLEMS["two vCPUs"].with_changes(
    service={"core_choices": [[0], [0, 1]], "overflow_cores": []}
)
PROBLEMS["all for memcached, no sharing"] = PROBLEMS["all for memcached"].with_changes(
    regulation={"share_service_cores": False}
)
TABLES = {name: edit_table(scenario) for name, scenario in PROBLEMS.items()}
all_names = st.sampled_from(sorted(PROBLEMS))
names = st.sampled_from(sorted(name for name in PROBLEMS if not name.startswith("all")))
seeds = st.integers(0, 2**32 - 1)


def mask(control: ControlState, table: EditTable) -> list[float]:
    legal = [-1.0] * len(table)
    action.legal_edits(control, table.rows, legal)
    return legal


def decide(control: ControlState, table: EditTable, edit: int) -> None:
    """One decision, regulated whether or not it keeps."""
    control.settled = 0
    decide_edit(control, table.rows, edit)


def wander(scenario: Scenario, table: EditTable, seed: int, decisions: int = 60) -> Any:
    """A machine under random legal edits; yields the state, the mask and a draw to go on with."""
    rng = np.random.default_rng(seed)
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    for _ in range(decisions):
        control.now_s += float(rng.choice([0.025, 0.025, 0.5, 1.0, 40.0]))
        for job in range(len(control.state)):
            if control.job_state[job] != DONE:
                ends = control.state[job] == RUNNING and rng.random() < 0.02
                control.job_state[job] = DONE if ends else control.state[job]
        legal = np.flatnonzero(mask(control, table))
        yield control, legal, rng
        kinds = table.rows[legal, KIND]
        decide(control, table, int(rng.choice(legal[kinds == rng.choice(np.unique(kinds))])))


# --- the table --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_every_edit_reads_differently(name: str) -> None:
    table = TABLES[name]
    words = [table.describe(edit) for edit in range(len(table))]
    assert len(set(words)) == len(table)
    assert words[0] == "keep"


def test_an_edit_in_words() -> None:
    table = TABLES["cca-2025"]
    words = {table.describe(edit) for edit in range(len(table))}
    assert {
        "service 0",
        "service 0,1",
        "start radix 0,1,2,3 background 4 threads",
        "place vips 2,3 normal",
        "pause canneal",
    } <= words


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_the_table_asks_for_nothing_the_scenario_forbids(name: str) -> None:
    scenario, table = PROBLEMS[name], TABLES[name]
    everything = (1 << scenario.machine.vcpus) - 1
    assert table[0] == Edit(KEEP)
    for kind, job, cores, weight, threads in list(table)[1:]:
        if kind != PAUSE:
            assert cores & everything == cores != 0
        if kind == START:
            assert threads in scenario.jobs[job].threads
        if not scenario.regulation.share_service_cores and kind in (START, PLACE):
            assert weight == NORMAL
    kinds = [edit.kind for edit in table]
    assert kinds.count(SERVICE) == len(scenario.service.sets)
    assert kinds.count(PAUSE) == len(scenario.jobs)


def test_a_job_may_start_with_each_count_it_allows(scenario: Scenario) -> None:
    table = edit_table(scenario)
    for index, job in enumerate(scenario.jobs):
        starts = [edit for edit in table if edit.kind == START and edit.job == index]
        assert [edit.threads for edit in starts] == list(job.threads)


# --- legal edits ------------------------------------------------------------------------------


def expected_cores(control: ControlState, cores: int, weight: int) -> int:
    """The documented rule: a normal job uses what memcached leaves of its set, else of all."""
    left = ((1 << control.n_vcpus) - 1) & ~control.service
    if weight == BACKGROUND:
        return cores
    return cores & left or left


@given(names, seeds)
def test_a_legal_edit_is_carried_out(name: str, seed: int) -> None:
    scenario, table = PROBLEMS[name], TABLES[name]
    for control, legal, _ in wander(scenario, table, seed, decisions=12):
        for edit in legal.tolist():
            kind, job, cores, weight, threads = table[edit]
            after = copy.deepcopy(control)
            decide(after, table, edit)
            assert after.illegal_edits == 0
            assert after.kept == (kind == KEEP)
            # Only time may stand in the way: what just changed is kept for the dwell time.
            assert after.overruled_reasons & ~(DWELL | MOVE_FLAP) == 0
            if kind == SERVICE:
                assert after.service & cores == cores
                if not after.overruled_reasons & DWELL:
                    assert after.service == cores
            elif kind in (START, PLACE):
                assert (after.state[job], after.weight[job]) == (RUNNING, weight)
                if not after.overruled_reasons & MOVE_FLAP:
                    assert after.cores[job] == expected_cores(after, cores, weight)
                if kind == START:
                    assert after.threads[job] == threads
            elif kind == PAUSE:
                assert after.state[job] == PAUSED
            for other in range(len(after.state)):
                if other != job:
                    expected = DONE if after.job_state[other] == DONE else control.state[other]
                    assert after.state[other] == expected
                    assert after.threads[other] == control.threads[other]


@given(names, seeds)
def test_what_time_held_back_comes_about(name: str, seed: int) -> None:
    scenario, table = PROBLEMS[name], TABLES[name]
    rules = scenario.regulation
    for control, legal, rng in wander(scenario, table, seed, decisions=12):
        edit = int(rng.choice(legal))
        kind, job, cores, weight, _ = table[edit]
        after = copy.deepcopy(control)
        decide(after, table, edit)
        for _ in range(2):  # memcached's vCPUs first, the jobs that follow it next
            after.now_s += max(rules.service_dwell_s, rules.move_dwell_s)
            decide(after, table, 0)
        assert after.overruled_reasons == 0
        if kind == SERVICE:
            assert after.service == cores
        if kind in (START, PLACE) and after.job_state[job] != DONE:
            assert after.cores[job] == expected_cores(after, cores, weight)


@given(names, seeds)
def test_normal_jobs_follow_memcached(name: str, seed: int) -> None:
    scenario, table = PROBLEMS[name], TABLES[name]
    for control, _, _ in wander(scenario, table, seed, decisions=30):
        for job in range(len(control.state)):
            if control.state[job] == RUNNING and control.weight[job] == NORMAL:
                assert control.cores[job] & control.service == 0
                assert control.cores[job] != 0


# --- the mask ---------------------------------------------------------------------------------


@given(all_names, seeds)
def test_the_mask_says_what_the_state_allows(name: str, seed: int) -> None:
    scenario, table = PROBLEMS[name], TABLES[name]
    for control, _, _ in wander(scenario, table, seed):
        legal = mask(control, table)
        assert set(legal) <= {0.0, 1.0}
        held = sum(
            job.memory_mib
            for index, job in enumerate(scenario.jobs)
            if control.state[index] in (RUNNING, PAUSED) and control.job_state[index] != DONE
        )
        none_left = control.service == (1 << control.n_vcpus) - 1
        none_left &= not scenario.regulation.share_service_cores
        for edit, (kind, job, cores, weight, _) in enumerate(table):
            if kind == KEEP:
                live = [
                    control.state[index]
                    for index in range(len(scenario.jobs))
                    if control.job_state[index] != DONE
                ]
                fitting = [
                    job
                    for index, job in enumerate(scenario.jobs)
                    if control.state[index] == PENDING
                    and control.job_state[index] != DONE
                    and held + job.memory_mib <= scenario.machine.memory_mib
                ]
                expected = RUNNING in live or not (PAUSED in live or fitting)
                held_back = any(
                    control.state[index] == PAUSED and control.desired_state[index] == RUNNING
                    for index in range(len(scenario.jobs))
                    if control.job_state[index] != DONE
                )
                expected |= held_back or none_left
            elif kind == SERVICE:
                early = control.now_s - control.grown_at_s < scenario.regulation.service_dwell_s
                shrinks = control.service & ~cores != 0
                expected = cores != control.desired_service and not (shrinks and early)
            elif control.job_state[job] == DONE:
                expected = False
            elif kind == START:
                fits = held + scenario.jobs[job].memory_mib <= scenario.machine.memory_mib
                expected = control.state[job] == PENDING and fits
                expected &= not none_left
            elif kind == PLACE:
                same = (control.desired_set[job], control.desired_weight[job]) == (cores, weight)
                rested = control.now_s - control.moved_at_s[job]
                expected = control.state[job] == PAUSED or (
                    control.state[job] == RUNNING
                    and not same
                    and rested >= scenario.regulation.move_dwell_s
                )
                expected &= not none_left
            else:
                rested = control.now_s - control.paused_at_s[job]
                expected = (
                    control.state[job] == RUNNING and rested >= scenario.regulation.pause_dwell_s
                )
            assert legal[edit] == expected, table.describe(edit)


def test_memory_is_free_again_as_soon_as_a_job_has_ended() -> None:
    scenario, table = PROBLEMS["little memory"], TABLES["little memory"]
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    starts = np.flatnonzero(table.rows[:, KIND] == START).tolist()
    for job in (0, 1):
        decide(control, table, next(e for e in starts if table[e].job == job))
    third = next(e for e in starts if table[e].job == 2)
    assert mask(control, table)[third] == 0.0
    control.job_state[0] = DONE
    assert mask(control, table)[third] == 1.0
    decide(control, table, third)
    assert control.state[:3] == [DONE, RUNNING, RUNNING]
    assert control.overruled == 0


# --- illegal edits ----------------------------------------------------------------------------


@settings(max_examples=20)
@given(all_names, seeds)
def test_an_illegal_edit_changes_nothing_and_is_counted(name: str, seed: int) -> None:
    scenario, table = PROBLEMS[name], TABLES[name]
    for control, legal, _ in wander(scenario, table, seed, decisions=12):
        kept = copy.deepcopy(control)
        decide(kept, table, 0)
        for edit in set(range(len(table))) - set(legal.tolist()):
            after = copy.deepcopy(control)
            decide(after, table, edit)
            assert after.illegal_edits == control.illegal_edits + 1
            after.illegal_edits = kept.illegal_edits
            assert after == kept
