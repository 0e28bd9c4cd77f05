"""One decision: what the shortcut leaves out would change nothing, and who makes it forget."""

import copy

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from env.action import edit_table, legal_edits
from env.allocation import Allocation
from env.codes import DONE, KEEP, RUNNING
from env.control import ControlState, set_desired
from env.decision import decide_allocation, decide_edit
from env.scenario import load_scenario

SCENARIO = load_scenario("cca-2025")
TABLE = edit_table(SCENARIO)


def fresh() -> ControlState:
    return ControlState.initial(SCENARIO, dict.fromkeys(SCENARIO.job_names, 100.0))


@given(st.integers(0, 2**32 - 1))
def test_a_settled_row_that_keeps_is_what_regulating_would_make_of_it(seed: int) -> None:
    rng, control, legal = np.random.default_rng(seed), fresh(), [0.0] * len(TABLE)
    for _ in range(60):
        control.now_s += float(rng.choice([0.025, 0.5, 40.0]))
        for job in range(len(control.state)):
            ends = control.state[job] == RUNNING and rng.random() < 0.02
            state = DONE if ends or control.job_state[job] == DONE else control.state[job]
            if state != control.job_state[job]:
                control.job_state[job], control.settled = state, 0
        legal_edits(control, TABLE.rows, legal)
        edit = int(rng.choice(np.flatnonzero(legal)))
        if legal[KEEP] and rng.random() < 0.7:
            edit = KEEP
        twin, settled = copy.deepcopy(control), control.settled
        twin.settled = 0
        assert decide_edit(control, TABLE.rows, edit) == (edit != KEEP or not settled)
        assert decide_edit(twin, TABLE.rows, edit)
        assert vars(control) == vars(twin)


def test_what_was_overruled_is_regulated_again() -> None:
    control = fresh()
    decide_edit(control, TABLE.rows, KEEP)
    control.desired_service, control.grown_at_s = 1, control.now_s
    control.settled = 0
    assert decide_edit(control, TABLE.rows, KEEP) and control.overruled_reasons
    assert decide_edit(control, TABLE.rows, KEEP)
    control.now_s += SCENARIO.regulation.service_dwell_s
    assert decide_edit(control, TABLE.rows, KEEP) and control.service == 1
    assert not decide_edit(control, TABLE.rows, KEEP)


def test_an_allocation_makes_the_next_edit_regulate() -> None:
    control = fresh()
    decide_edit(control, TABLE.rows, KEEP)
    assert control.settled
    set_desired(control, Allocation((0,)), SCENARIO)
    decide_allocation(control, True)
    assert control.service == 1 and decide_edit(control, TABLE.rows, KEEP)


def test_switched_off_the_regulator_lets_an_allocation_through() -> None:
    control = fresh()
    control.grown_at_s = control.now_s
    set_desired(control, Allocation((0,)), SCENARIO)
    decide_allocation(control, True)
    assert control.service == control.refuge
    decide_allocation(control, False)
    assert control.service == 1
