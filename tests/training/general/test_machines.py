"""Machines of many scenarios: alone and among others they come to the same, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest

from env.codes import DONE
from env.scenario import Scenario, load_scenario
from env.simulator.machine import Variation
from training.general.machines import (
    EXPECTED_PRICE,
    UNDONE_PRICE,
    VIOLATION_PRICE,
    Machines,
    figure_s,
)
from training.general.setups import common_layout, drawn_scenarios, setups_of

TOGETHER = load_scenario("cca-2025")
ARRIVING = load_scenario("family-training-0-21")  # 7 jobs that arrive, on 8 vCPUs


def played(scenarios: list[Scenario], which: list[int]) -> tuple[Machines, Machines]:
    """Machines at the start of an episode, and their copies after a plain list."""
    setups = setups_of(scenarios, common_layout(scenarios), Variation())
    begun = Machines(setups, len(which))
    for index, number in enumerate(which):
        begun.begin(index, number, 100 + number, np.random.default_rng(number))
    after = begun.chosen(slice(None))
    lists = begun.tables.baselines[begun.playing]
    after.follow(slice(None), lists, to_the_end=True)
    return begun, after


def test_among_others_a_machine_comes_to_what_it_does_alone() -> None:
    """Whatever room their tables have for scenarios with more sets, jobs and edits."""
    scenarios = [TOGETHER, ARRIVING, *drawn_scenarios("training", 0, 8)]
    assert len({len(scenario.service.sets) for scenario in scenarios}) > 1
    assert len({len(scenario.jobs) for scenario in scenarios}) > 3
    _, mixed = played(scenarios, list(range(len(scenarios))))
    for number in range(len(scenarios)):
        pair = [scenarios[number], scenarios[number]]  # several are played on hosts of one size
        setups = setups_of(pair, common_layout(pair), Variation())
        alone = Machines(setups, 1)
        alone.begin(0, 0, 100 + number, np.random.default_rng(number))
        alone.follow(slice(None), alone.tables.baselines[:1], to_the_end=True)
        for field in ("now_s", "end_s", "violations", "decisions", "actuations"):
            assert np.array_equal(alone.hosts[field][0], mixed.hosts[field][number]), field


def test_a_price_is_what_counts_and_what_is_violated() -> None:
    begun, after = played([TOGETHER, ARRIVING], [0, 1])
    assert (after.hosts["true_state"] == DONE).all()
    makespan_s = figure_s(after.summary(0), TOGETHER)
    jct_s = figure_s(after.summary(1), ARRIVING) * len(ARRIVING.jobs)
    after.hosts["violations"] = after.hosts["expected_violations"] = 0
    assert after.prices(begun) == pytest.approx([makespan_s, jct_s], rel=1e-3)
    calm = after.prices(begun)
    after.hosts["violations"] = 1
    intervals = after.hosts["intervals"]
    assert after.prices(begun) == pytest.approx(calm * (1.0 + VIOLATION_PRICE / intervals))
    after.hosts["violations"], after.hosts["expected_violations"] = 0, 2.0
    assert after.prices(begun) == pytest.approx(calm * (1.0 + 2.0 * EXPECTED_PRICE / intervals))
    after.hosts["expected_violations"] = 0.0
    after.hosts["true_state"][0, 0] = 1
    assert after.prices(begun)[0] == pytest.approx(UNDONE_PRICE * calm[0])


def test_the_rest_of_an_episode_costs_what_is_left() -> None:
    """A job that is done costs nothing any more, one that is still to come its whole time."""
    begun, after = played([TOGETHER, ARRIVING], [0, 1])
    after.hosts["violations"] = after.hosts["expected_violations"] = 0
    whole = after.prices(begun)
    later = begun.chosen(slice(None))
    moment_s = 0.5 * after.hosts["now_s"]
    later.hosts["now_s"] = moment_s
    rest = after.prices(later)
    assert rest[0] == pytest.approx(whole[0] - moment_s[0] + begun.hosts["now_s"][0], rel=1e-6)
    n_jobs = len(ARRIVING.jobs)
    ended_s, arrival_s = (after.hosts[field][1, :n_jobs] for field in ("end_s", "arrival_s"))
    left_s = np.maximum(ended_s - np.maximum(arrival_s, moment_s[1]), 0.0)
    assert (left_s == 0.0).any()
    assert rest[1] == pytest.approx(left_s.sum())
