"""Tokens: as many numbers as documented, within bounds, hiding what is not known."""

from __future__ import annotations

import re

import numpy as np
import pytest

from env.allocation import JobState
from env.control import HISTORY, ControlState
from env.scenario import Scenario, load_scenario
from env.sets import tokens
from env.sets.known_machine import SHOWN_COSTS
from env.sets.tokens import (
    HOST,
    JOB,
    SERVICE,
    VCPU,
    Layout,
    note_use_of_jobs,
    token_table,
    write_tokens,
)

LAYOUT = Layout(7, 4)


def control_of(scenario: Scenario) -> ControlState:
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    control.vcpu_busy_s = [0.0] * scenario.machine.vcpus
    return control


def row_of(control: ControlState, scenario: Scenario) -> np.ndarray:
    table = token_table(scenario, LAYOUT)
    row = table.blank.copy()
    write_tokens(control, table.sets, table.slot_of, LAYOUT.offsets, row)
    return row


def job_of(row: np.ndarray, job: int) -> np.ndarray:
    at = LAYOUT.offsets[6] + job * JOB
    return row[at : at + JOB]


def test_the_parts_add_up() -> None:
    size = HOST + SERVICE + 4 * (VCPU + 1) + 7 * (JOB + 4 + 1)
    assert LAYOUT.size == size
    assert 19 + HISTORY + len(SHOWN_COSTS) == SERVICE


def test_time_on_its_scale() -> None:
    assert [tokens.lg(s) for s in (0.0, 1.0, 100.0, 1e9)] == pytest.approx([-1.0, 0.0, 1.0, 2.0])


def test_a_job_that_is_done_or_not_there_has_no_token(scenario: Scenario) -> None:
    control = control_of(scenario)
    for state in (JobState.DONE, 4):
        control.job_state[2] = int(state)
        row = row_of(control, scenario)
        assert not job_of(row, 2).any()
        assert job_of(row, 1).any()


def test_a_job_without_a_profile_shows_its_run_only(scenario: Scenario) -> None:
    control = control_of(scenario)
    control.state[3], control.cores[3], control.threads[3] = int(JobState.RUNNING), 0b1100, 2
    control.job_cpu_s[2], control.job_cpu_s[3] = 20.0, 10.0
    known = job_of(row_of(control, scenario), 3)
    control.job_known[3] = 0
    unknown = job_of(row_of(control, scenario), 3)
    differ = set(np.flatnonzero(known != unknown).tolist())
    assert differ == {6, 7, 8, 20, 21, *range(23, 30)}  # of these jobs no interruption is known
    assert not unknown[sorted(differ)].any()
    assert unknown[9] == pytest.approx(0.5)  # lg of the CPU time


def test_jobs_with_a_profile_are_ranked_by_the_work_that_is_left(scenario: Scenario) -> None:
    control = control_of(scenario)
    control.job_cpu_s = [10.0, 40.0, 0.0, 90.0, 0.0, 0.0, 0.0]  # of 100 s each
    control.job_known[1] = 0
    control.job_state[4] = int(JobState.DONE)
    row = row_of(control, scenario)
    ranks = [[round(2.0 ** (4.0 * x)) - 1 for x in job_of(row, job)[20:22]] for job in range(7)]
    # Of equals, the first counts as shorter; who has no profile, or is done, does not count.
    assert ranks == [[1, 3], [0, 0], [2, 2], [0, 4], [0, 0], [3, 1], [4, 0]]


def test_the_host_counts_who_runs(scenario: Scenario) -> None:
    control = control_of(scenario)
    for job, state in ((0, JobState.RUNNING), (1, JobState.RUNNING), (5, JobState.PAUSED)):
        control.state[job], control.cores[job], control.threads[job] = int(state), 0b1100, 2
    row = row_of(control, scenario)
    assert [2.0 ** (4.0 * x) - 1.0 for x in row[15:18]] == pytest.approx([2.0, 1.0, 4.0 / 4.0])


def test_it_shows_whether_completion_times_count() -> None:
    """A network that cannot tell starts the longest first where the shortest should."""
    together, arriving = map(load_scenario, ("cca-2025", "family-training-0-21"))
    assert token_table(together, LAYOUT).blank[18] == 0.0
    assert token_table(arriving, Layout(7, 8)).blank[18] == 1.0
    assert token_table(together, LAYOUT, arrivals=True).blank[18] == 1.0  # those of a queue


def test_use_of_cpu_fades_and_remembers_its_most(scenario: Scenario) -> None:
    control = control_of(scenario)
    control.state[0], control.cores[0], control.threads[0] = int(JobState.RUNNING), 0b1100, 2
    for _ in range(100):
        control.now_s += 1.0
        control.job_cpu_s[0] += 2.0
        control.vcpu_busy_s = [b + 0.5 for b in control.vcpu_busy_s]
        note_use_of_jobs(control)
    assert control.job_use[0] == pytest.approx(2.0, rel=1e-3)
    assert control.vcpu_use == pytest.approx([0.5] * 4, rel=1e-3)
    for _ in range(100):
        control.now_s += 1.0
        control.job_cpu_s[0] += 1.0
        note_use_of_jobs(control)
    shown = job_of(row_of(control, scenario), 0)
    assert shown[14:17] == pytest.approx([0.5, 0.5, 0.5], rel=1e-3)
    assert shown[17] == pytest.approx(tokens.lg(200.0), rel=1e-6)


def test_the_same_jobs_look_the_same_on_either_load() -> None:
    """What a scenario's name or order of jobs says is nowhere in the tokens."""
    rows = [row_of(control_of(one), one) for one in map(load_scenario, ("cca-2025", "cca-2024"))]
    first, second = (job_of(row, 5) for row in rows)
    assert first[-16:].tolist() == second[-16:].tolist()
    assert re.search("load's maximum", tokens.__doc__ or "")
