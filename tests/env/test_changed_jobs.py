"""A control row whose jobs come and go."""

from __future__ import annotations

import math

from env.codes import PENDING, RUNNING
from env.control import JOB_FIELDS, ControlState, carried_over
from env.scenario import Job, Scenario, profile_work_s

STRANGER = Job(name="stranger", command=("true",), threads=(1, 2), memory_mib=64)


def test_jobs_that_stay_keep_what_they_have_and_others_begin(scenario: Scenario) -> None:
    work_s = profile_work_s(scenario.profile)
    row = ControlState.initial(scenario, work_s)
    row.guard_level, row.past_qps, row.now_s = 2, [3.0, 4.0, 5.0], 7.0
    for name in JOB_FIELDS:
        setattr(row, name, [100 * index for index in range(len(scenario.jobs))])
    last, first = scenario.jobs[-1], scenario.jobs[0]
    after = scenario.with_jobs([last, STRANGER, first])
    changed = carried_over(row, scenario, after, work_s)
    assert (changed.guard_level, changed.past_qps, changed.now_s) == (2, [3.0, 4.0, 5.0], 7.0)
    for name in set(JOB_FIELDS) - {"desired_place"}:
        found = getattr(changed, name)
        assert (found[0], found[2]) == (100 * (len(scenario.jobs) - 1), 0), name
    assert changed.desired_place == [-1, -1, -1]  # edits have other numbers now
    assert (changed.state[1], changed.job_known[1], changed.job_memory_mib[1]) == (PENDING, 0, 64)
    assert (changed.threads[1], changed.quota[1]) == (2, math.inf)
    assert changed.settled == 0


def test_a_row_without_jobs_takes_one_and_is_rid_of_it_again(scenario: Scenario) -> None:
    work_s = profile_work_s(scenario.profile)
    empty = scenario.with_jobs(())
    row = ControlState.initial(empty, work_s)
    one = scenario.with_jobs(scenario.jobs[:1])
    fuller = carried_over(row, empty, one, work_s)
    assert fuller.job_known == [1]
    fuller.state = [RUNNING]
    assert vars(carried_over(fuller, one, empty, work_s)) == vars(row)
