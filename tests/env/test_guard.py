"""The SLO guard: how fast it climbs, that it comes down, and whom it does not blame."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.action import CORES, JOB, KIND, edit_table, is_legal, legal_edits
from env.codes import BACKGROUND, KEEP, NORMAL, PAUSED, PENDING, PLACE, RUNNING, SERVICE
from env.control import ControlState
from env.decision import regulate_again
from env.guard import (
    ALONE,
    APART,
    LATE_LIMIT,
    LEVELS,
    LONGEST_REST,
    MOST_BACK_OFF,
    PAUSED_ALL,
    REFUGE,
    REST,
    TRIAL,
    late_by_delay,
    note_late,
    note_stolen,
    step_guard,
)
from env.scenario import Scenario, load_scenario

SCENARIO = load_scenario("cca-2025")
SIBLINGLESS = SCENARIO.with_changes(machine={"smt_siblings": []})
POLL_S = SCENARIO.control.period_s
TWO_VCPUS = SCENARIO.with_changes(
    machine={"vcpus": 2, "smt_siblings": [[0, 1]]}, service={"overflow_cores": []}
)
SHARING, BESIDE, AWAY = 0b0001, 0b0010, 0b1100
"""Where a background job may run beside memcached on vCPU 0, whose sibling is vCPU 1."""


def guarded(scenario: Scenario = SCENARIO, interval_s: float = 10.0) -> ControlState:
    """A machine on which memcached has one vCPU and three jobs run."""
    control = ControlState.initial(scenario, dict.fromkeys(scenario.job_names, 100.0))
    control.interval_s, control.guarded = interval_s, 1
    control.desired_service = 1
    for job, cores in enumerate((SHARING, BESIDE, AWAY)):
        control.job_state[job] = control.desired_state[job] = RUNNING
        control.desired_cores[job], control.desired_weight[job] = cores, 0
    regulate_again(control)
    assert control.state[:3] == [RUNNING] * 3 and control.service == 1
    return control


def poll(control: ControlState, share: float) -> bool:
    control.now_s += POLL_S
    note_late(control, share, POLL_S)
    changed = step_guard(control)
    if changed:
        regulate_again(control)
        control.job_state[:3] = control.state[:3]
    return changed


def polls(control: ControlState, share: float, seconds: float) -> Iterator[int]:
    """The level at each poll of a time in which one share of the requests is late."""
    for _ in range(round(seconds / POLL_S)):
        poll(control, share)
        yield control.guard_level


# --- up ---------------------------------------------------------------------------------------


def test_each_level_keeps_more_from_the_jobs() -> None:
    control = guarded()
    seen = {}
    for level in polls(control, 1.0, 0.5):
        seen.setdefault(level, (control.service, list(control.state[:3]), list(control.cores[:3])))
    assert sorted(seen) == [0, REFUGE, ALONE, APART, PAUSED_ALL]
    assert seen[REFUGE] == (0b0011, [RUNNING] * 3, [SHARING, BESIDE, AWAY])
    assert seen[ALONE] == (0b0011, [RUNNING] * 3, [AWAY, AWAY, AWAY])
    assert seen[APART] == (0b0111, [RUNNING] * 3, [0b1000] * 3)  # memcached overflows its refuge
    assert seen[PAUSED_ALL][1] == [PAUSED] * 3


def test_siblings_of_memcached_are_kept_free_above_alone() -> None:
    scenario = SCENARIO.with_changes(
        machine={"smt_siblings": [[0, 2], [1, 3]]},
        service={"core_choices": [[0]], "overflow_cores": []},
    )
    control = guarded(scenario)
    seen = {}
    for level in polls(control, 1.0, 0.5):
        seen.setdefault(level, list(control.cores[:3]))
    assert seen[ALONE] == [0b1110, BESIDE, AWAY]
    assert seen[APART] == [0b1010, BESIDE, 0b1000]


def test_a_step_acts_whatever_the_dwell_times_say() -> None:
    control = guarded()
    control.moved_at_s[0] = control.paused_at_s[0] = control.now_s
    assert ALONE in polls(control, 1.0, 0.25)
    assert control.cores[0] == AWAY and control.now_s < SCENARIO.regulation.move_dwell_s
    assert PAUSED_ALL in polls(control, 1.0, 0.25)
    assert control.state[0] == PAUSED and control.now_s < SCENARIO.regulation.pause_dwell_s


@pytest.mark.parametrize(("interval_s", "seconds"), [(10.0, 0.55), (2.0, 0.35)])
def test_four_steps_take_as_long_as_they_need_to_act(interval_s: float, seconds: float) -> None:
    control = guarded(interval_s=interval_s)
    steps_s = []
    for _ in range(round(seconds / POLL_S)):
        if poll(control, 1.0):
            steps_s.append(control.now_s)
    assert control.guard_level == PAUSED_ALL
    gaps_s = [after - before for before, after in itertools.pairwise(steps_s)]
    assert min(gaps_s) > 2.5 * POLL_S


def test_a_hiccup_of_two_polls_takes_nothing_from_the_jobs() -> None:
    control = guarded()
    reached = [*polls(control, 1.0, 0.05), *polls(control, 0.01, 5.0)]
    assert max(reached) <= REFUGE
    assert control.cores[:3] == [SHARING, BESIDE, AWAY]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.045])
def test_within_the_budget_it_lets_the_policy_be(share: float) -> None:
    control = guarded()
    assert set(polls(control, share, 60.0)) == {0}


@pytest.mark.parametrize("share", [0.0501, 0.051, 0.052, 0.055, 0.08, 0.3])
def test_a_budget_that_burns_slowly_is_not_overdrawn(share: float) -> None:
    """The guard acts before the interval's budget is gone."""
    control = guarded()
    late_s = 0.0
    while not poll(control, share):
        late_s += share * POLL_S
        assert late_s < LATE_LIMIT * control.interval_s
    assert control.guard_level == REFUGE


def test_a_level_that_changes_nothing_is_passed_at_once() -> None:
    control = guarded(SIBLINGLESS.with_changes(service={"overflow_cores": []}))
    control.desired_service = control.service = control.refuge
    control.desired_cores[:3] = control.cores[:3] = [AWAY] * 3
    for _ in polls(control, 1.0, 0.2):
        pass
    first_s = control.now_s
    assert control.guard_level == ALONE + 1  # nothing to do but pause, for which it is too early
    assert control.guard_acted_s < 0.0
    while control.guard_level < PAUSED_ALL:
        poll(control, 1.0)
    assert control.now_s - first_s < 0.1


@pytest.mark.parametrize("interval_s", [2.0, 10.0])
def test_a_stolen_moment_takes_nothing_from_the_jobs(interval_s: float) -> None:
    """40 ms in which nobody is served, every 2 s: the machine's doing."""
    control = guarded(interval_s=interval_s)
    for _ in range(20):
        poll(control, 1.0)
        poll(control, 0.6)
        assert max(polls(control, 0.01, 2.0)) <= REFUGE
    assert control.state[:3] == [RUNNING] * 3


def test_a_policy_may_wait_for_it() -> None:
    """All jobs are held: keeping is open, and nothing that the guard would overrule is."""
    control = guarded()
    table = edit_table(SCENARIO)
    sets = {row[CORES]: edit for edit, row in enumerate(table.rows) if row[KIND] == SERVICE}
    control.desired_place[2] = place = next(
        edit for edit, row in enumerate(table.rows) if row[KIND] == PLACE and row[JOB] == 2
    )
    while control.guard_level < PAUSED_ALL:
        poll(control, 1.0)
    control.now_s += 60.0
    legal = [0.0] * len(table)
    legal_edits(control, table.rows, legal)
    assert legal[KEEP] == 1.0 and legal[sets[0b0001]] == legal[sets[0b0011]] == 0.0
    assert legal[place] == 0.0 and is_legal(control, table.rows, KEEP)
    control.guard_level = REFUGE
    legal_edits(control, table.rows, legal)
    assert legal[KEEP] == legal[sets[0b0011]] == 1.0 and legal[sets[0b0001]] == 0.0
    assert sum(legal) > 3.0  # what the jobs are to do when it comes down


def test_who_waits_for_the_guard_waits_for_jobs_that_it_holds() -> None:
    """Nothing runs: at a level that lets a job run, one has to be started."""
    control, table = guarded(), edit_table(SCENARIO)
    for job in range(3):
        control.job_state[job] = control.state[job] = control.desired_state[job] = PENDING
    for level in (0, REFUGE, ALONE, APART):
        control.guard_level = level
        assert not is_legal(control, table.rows, KEEP)
    control.guard_level = PAUSED_ALL
    assert is_legal(control, table.rows, KEEP)


@pytest.mark.parametrize("interval_s", [10.0, 2.0])
def test_jobs_are_not_held_for_stolen_time(interval_s: float) -> None:
    """A twentieth to a third of the time is stolen, and everybody waits who comes meanwhile."""
    control = guarded(interval_s=interval_s)
    for every in (20, 10, 3):
        for number in range(round(20.0 / POLL_S)):
            stolen = 1.0 if number % every == 0 else 0.0
            note_stolen(control, stolen, POLL_S)
            poll(control, max(stolen, 0.2 if number % every == 1 else 0.0))
            assert control.guard_level <= REFUGE


def test_stolen_time_hides_nobody_who_disturbs() -> None:
    control = guarded()
    for number in range(round(1.0 / POLL_S)):
        note_stolen(control, 0.4 if number % 20 == 0 else 0.0, POLL_S)
        poll(control, 0.6)
    assert control.guard_level == PAUSED_ALL


def test_stolen_time_acquits_nobody_who_disturbs() -> None:
    """Most are late whenever a job runs, and all while a vCPU is stolen: jobs stay paused."""
    control = guarded()
    while control.guard_level < PAUSED_ALL:
        poll(control, 0.6)
    for number in range(round(20.0 / POLL_S)):
        stolen = 1.0 if number % 7 == 0 else 0.0
        note_stolen(control, stolen, POLL_S)
        poll(control, max(stolen, 0.6 if RUNNING in control.state[:3] else 0.0))
        assert control.guard_acquitted_s < control.now_s


def test_stolen_time_makes_no_later_disturbance_last_longer() -> None:
    control = guarded()
    for _ in range(5):
        for _ in range(round(5.0 / POLL_S)):
            note_stolen(control, 0.3, POLL_S)
            poll(control, 0.6)
        assert control.guard_level == REFUGE
        for _ in range(round(5.0 / POLL_S)):
            note_stolen(control, 0.0, POLL_S)
            poll(control, 0.0)
        assert control.guard_level == 0
    assert control.guard_back_off == 1.0


# --- down -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.04, 0.2, 1.0]), st.integers(1, 80)), max_size=25))
def test_it_always_comes_down_a_level_at_a_time(stretches: list[tuple[float, int]]) -> None:
    control, before = guarded(), 0
    for share, count in stretches:
        for level in polls(control, share, count * POLL_S):
            assert max(0, before - 1) <= level <= PAUSED_ALL
            assert control.service != 0
            assert level < REFUGE or control.service in (control.refuge, control.overflow)
            assert level < APART or control.service == control.overflow
            assert 1.0 <= control.guard_back_off <= MOST_BACK_OFF
            before = level
    down_s = (APART * LONGEST_REST + REST * MOST_BACK_OFF) * control.interval_s + 1.0
    *_, last = polls(control, 0.0, down_s)
    assert last == 0
    assert control.state[:3] == [RUNNING] * 3


def test_the_time_at_a_level_is_counted() -> None:
    control = guarded()
    levels = [*polls(control, 1.0, 0.3), *polls(control, 0.0, 10.0)]
    assert levels[-1] == 0 and control.guard_steps == max(levels) == PAUSED_ALL
    up = sum(level > 0 for level in levels)
    assert control.guard_s == pytest.approx(up * POLL_S, abs=2 * POLL_S)


def test_the_back_off_grows_where_it_had_to_climb_again_and_fades() -> None:
    """A neighbour that disturbs whenever it is let back: it comes back less and less often."""
    control = guarded()
    back_s = []
    while control.now_s < 120.0:
        disturbs = bool(control.cores[0] & control.service) or control.service == 1
        before = control.guard_level
        poll(control, 0.5 if disturbs else 0.0)
        if control.guard_level < before:
            back_s.append(control.now_s)
    assert control.guard_back_off == MOST_BACK_OFF
    assert len([at_s for at_s in back_s if at_s > 80.0]) < len(
        [at_s for at_s in back_s if at_s < 40.0]
    )
    for _ in polls(control, 0.0, 400.0):
        pass
    while not poll(control, 1.0):
        pass
    assert control.guard_back_off < 0.5 * MOST_BACK_OFF


def test_jobs_are_not_paused_for_what_they_do_not_cause() -> None:
    """The load alone breaks the SLO: jobs run most of the time, and memcached has its refuge."""
    control = guarded()
    levels = list(polls(control, 1.0, 600.0))
    ran = sum(level < ALONE for level in levels)
    assert ran / len(levels) > 0.9
    assert control.service == control.refuge


def test_an_acquittal_gives_jobs_back_level_by_level() -> None:
    """The back-off doubles once for each: jobs are left alone for twice as long as before."""
    control = guarded()
    spans, back_offs = [], []
    before = 0
    for level in polls(control, 1.0, 150.0):
        assert level >= before - 1
        if (before, level) == (PAUSED_ALL, APART):
            spans.append(control.guard_acquitted_s - control.now_s)
            back_offs.append(control.guard_back_off)
        before = level
    assert back_offs == pytest.approx([1.0, 2.0, 4.0, 8.0], rel=0.1)
    assert spans == pytest.approx([control.interval_s * many for many in back_offs])


def test_jobs_are_acquitted_once_they_have_been_paused_for_a_while() -> None:
    """Docker takes its time: while a job is still seen to run, it may be the cause."""
    control = guarded()
    while control.guard_level < PAUSED_ALL:
        poll(control, 1.0)
    control.job_state[1] = RUNNING
    assert set(polls(control, 1.0, 2 * TRIAL * control.interval_s)) == {PAUSED_ALL}
    control.job_state[1] = PAUSED
    levels = list(polls(control, 1.0, TRIAL * control.interval_s + POLL_S))
    assert set(levels[:-2]) == {PAUSED_ALL} and levels[-1] == APART


def hiccups(control: ControlState, every_s: float, seconds: float) -> Iterator[int]:
    """The level at each poll of a time in which 20 ms are late now and then."""
    for poll_number in range(round(seconds / POLL_S)):
        poll(control, 0.8 if poll_number % round(every_s / POLL_S) == 0 else 0.0)
        yield control.guard_level


def test_hiccups_that_leave_half_of_the_budget_do_not_keep_it_up() -> None:
    control = guarded()
    control.guard_back_off = MOST_BACK_OFF
    assert max(polls(control, 1.0, 1.0)) == PAUSED_ALL
    *_, last = hiccups(control, 3.0, 8.0 * control.interval_s)
    assert last == 0


def test_a_level_that_changed_nothing_stands_for_a_rest_all_the_same() -> None:
    """memcached has its refuge already, and less than half of the budget is gone."""
    control = guarded()
    control.desired_service = control.service = control.refuge
    while control.guard_level < REFUGE:
        poll(control, 0.8)
    assert set(polls(control, 0.06, 0.9 * REST * control.interval_s)) == {REFUGE}


def test_a_hiccup_acquits_nobody() -> None:
    """It comes at the end of a trial in which the pause has helped."""
    control = guarded()
    control.guard_back_off = MOST_BACK_OFF
    while control.guard_level < PAUSED_ALL:
        poll(control, 1.0)
    assert set(polls(control, 0.0, TRIAL * control.interval_s)) == {PAUSED_ALL}
    assert set(polls(control, 1.0, 2 * POLL_S)) == {PAUSED_ALL}
    assert control.guard_acquitted_s < 0.0


def test_no_job_waits_for_longer_than_an_interval_until_the_machine_is_calm() -> None:
    control = guarded()
    control.guard_back_off = MOST_BACK_OFF
    while control.guard_level < PAUSED_ALL:
        poll(control, 1.0)
    levels = list(hiccups(control, 2.0, 1.2 * control.interval_s))
    assert (
        levels[round(0.9 * control.interval_s / POLL_S)] == PAUSED_ALL and levels[-1] < PAUSED_ALL
    )


def test_jobs_that_the_policy_has_only_just_paused_are_tried_all_the_same() -> None:
    control = guarded(SIBLINGLESS.with_changes(service={"overflow_cores": []}))
    control.now_s += 60.0
    control.desired_service, control.desired_state[:3] = control.refuge, [PAUSED] * 3
    regulate_again(control)
    control.job_state[:3] = control.state[:3]
    while control.guard_level < PAUSED_ALL:
        poll(control, 1.0)
    assert set(polls(control, 1.0, 0.9 * TRIAL * control.interval_s)) == {PAUSED_ALL}


def test_levels_that_leave_the_jobs_nothing_are_passed_at_once() -> None:
    """So that the trial begins when the jobs stop."""
    control = guarded(TWO_VCPUS)
    assert set(polls(control, 1.0, 0.5)) == {0, REFUGE, PAUSED_ALL}
    assert control.guard_steps == PAUSED_ALL  # those that are skipped were climbed, too


def test_levels_that_leave_the_jobs_nothing_are_given_back_at_once() -> None:
    """On two vCPUs without a spare one, all levels from ALONE on pause every job."""
    control = guarded(TWO_VCPUS)
    assert max(polls(control, 1.0, 0.5)) == PAUSED_ALL
    came = [level for level in polls(control, 0.0, 5.0) if level < PAUSED_ALL]
    assert came[0] == REFUGE


def test_jobs_share_the_refuge_where_it_is_the_whole_machine() -> None:
    """A job of normal weight runs in the background until memcached gives a vCPU back."""
    control = guarded(TWO_VCPUS)
    control.desired_cores[1], control.desired_weight[1] = 0b10, NORMAL
    regulate_again(control)
    assert (control.cores[1], control.weight[1]) == (0b10, NORMAL)
    while control.guard_level < REFUGE:
        poll(control, 1.0)
    assert control.service == 0b11
    assert (control.state[1], control.cores[1], control.weight[1]) == (RUNNING, 0b10, BACKGROUND)
    while control.guard_level > 0:
        poll(control, 0.0)
    control.now_s += 10.0
    regulate_again(control)
    assert (control.state[1], control.cores[1], control.weight[1]) == (RUNNING, 0b10, NORMAL)


def test_jobs_that_share_nothing_run_where_the_refuge_is_the_whole_machine() -> None:
    """The load alone breaks the SLO, and at any level above 0 no vCPU is left to the jobs."""
    control = guarded()
    control.refuge = (1 << control.n_vcpus) - 1
    control.desired_service, control.share_service_cores = 1, 0
    ran = [control.state[0] == RUNNING for _ in polls(control, 1.0, 600.0)]
    assert sum(ran) / len(ran) > 0.9


def test_without_a_probe_the_run_delay_tells() -> None:
    """Figures of a VM with 16 vCPUs: 0.06 to 0.07 s a CPU second alone, 0.3 to 0.5 disturbed."""
    assert late_by_delay(0.07, 0.06) == late_by_delay(0.1, 0.06) == 0.0
    assert late_by_delay(0.3, 0.06) > 4 * LATE_LIMIT
    assert late_by_delay(5.0, 0.06) == 1.0


def test_every_level_has_its_words() -> None:
    assert len(set(LEVELS)) == len(LEVELS) == PAUSED_ALL + 1
