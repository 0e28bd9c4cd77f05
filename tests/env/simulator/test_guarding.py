"""The SLO guard in the simulator: it acts between decisions, and holds the SLO for any policy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import agents
from env.control import ControlState
from env.guard import ALONE, LATE_LIMIT, PAUSED_ALL, REFUGE, note_late, step_guard
from env.simulator import kernel
from env.simulator.guarding import account, crowding, next_guard_s
from tests.conftest import Rig
from tests.env.simulator.walks import BACKGROUND, FACTORY, RUNNING, SCENARIO
from training.evaluation.episodes import run_episodes, starts_from

POLL_S = SCENARIO.control.period_s
HIGH_QPS = 175_000.0


def climbs(rig: Rig, until_s: float) -> dict[int, float]:
    """When each level was first seen, looking at every poll."""
    seen: dict[int, float] = {}
    while rig.row["now_s"] < until_s - 1e-9:
        kernel.advance(rig.row, rig.targets, rig.row["now_s"] + POLL_S)
        seen.setdefault(int(rig.row["guard_level"]), float(rig.row["now_s"]))
    return seen


def test_an_overload_makes_it_climb_at_once_and_a_calm_time_come_down(rig: Rig) -> None:
    """Nobody decides: the load jumps at 10 s to more than memcached's one vCPU can serve."""
    rig.begin(1, [20_000.0, HIGH_QPS, 20_000.0, 20_000.0])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), BACKGROUND))
    kernel.advance(rig.row, rig.targets, 10.0 + POLL_S)
    gone_s = 0.2 * LATE_LIMIT * 0.5 * rig.row["interval_s"] / rig.row["slow_fraction"]
    seen = climbs(rig, 40.0)
    assert 0.0 < seen[REFUGE] - (10.0 + gone_s) < 2 * POLL_S
    assert rig.row["true_service"] == rig.row["refuge"]
    assert rig.row["guard_level"] == 0
    assert rig.row["violations"] == 0 and rig.row["intervals"] >= 3
    assert 1 <= rig.row["guard_steps"] <= 2 * PAUSED_ALL
    assert 0.0 < rig.row["guard_s"] < 20.0


@pytest.mark.parametrize("late", [0.09, 0.11, 0.13, 0.3])
def test_the_first_step_comes_as_soon_as_at_every_poll(rig: Rig, late: float) -> None:
    """The poll that is foretold is the one at which a guard that looks at each would climb."""
    rig.begin(1, [20_000.0])
    row, live = rig.row, ControlState.initial(SCENARIO, dict.fromkeys(SCENARIO.job_names, 1.0))
    live.interval_s = row["interval_s"] = 1.0
    row["guarded"], row["slow_fraction"], row["late_share"] = 1, late, 0.01
    live.late_share = 0.01
    while live.guard_level < REFUGE:
        live.now_s += POLL_S
        note_late(live, late, POLL_S)
        step_guard(live)
    assert next_guard_s(row) == pytest.approx(live.now_s, abs=1e-6)


def test_what_disturbs_memcached_leaves_its_vcpus(rig: Rig) -> None:
    rig.begin(1, [HIGH_QPS])
    names = SCENARIO.job_names
    rig.set_desired((0, 1), **dict.fromkeys(names, (RUNNING, (0, 1), BACKGROUND)))
    kernel.advance(rig.row, rig.targets, 3.0)
    rig.row["slo_us"] = 0.5 * rig.row["p95_us"]  # the jobs now break the SLO
    kernel.refresh(rig.row)
    before_s = float(rig.row["now_s"])
    while rig.row["guard_level"] < ALONE:
        kernel.advance(rig.row, rig.targets, rig.row["now_s"] + POLL_S)
        assert rig.row["now_s"] < before_s + 2.0
    assert not (rig.row["cores"] & rig.row["service"]).any()
    kernel.advance(rig.row, rig.targets, rig.row["now_s"] + POLL_S)
    assert not (rig.row["true_cores"] & rig.row["true_service"]).any()


def test_calm_time_costs_no_event(rig: Rig) -> None:
    rig.begin(1, [20_000.0])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), BACKGROUND))
    kernel.advance(rig.row, rig.targets, 5.0)  # the container is made, and the job runs
    assert rig.row["guard_at_s"] == math.inf
    assert rig.row["quiet_until_s"] > 9.0


def test_without_the_regulator_there_is_no_guard(rig: Rig) -> None:
    rig.begin(1, [HIGH_QPS])
    rig.set_desired((0,), regulator_on=False, vips=(RUNNING, (0, 1), BACKGROUND))
    kernel.advance(rig.row, rig.targets, 25.0)
    assert rig.row["violations"] == 2
    assert rig.row["guard_steps"] == rig.row["late_share"] == 0


def test_it_is_turned_off_and_on_with_the_regulator(rig: Rig) -> None:
    rig.begin(1, [HIGH_QPS])
    rig.set_desired((0,), vips=(RUNNING, (2, 3), BACKGROUND))
    kernel.advance(rig.row, rig.targets, 0.02)
    assert rig.row["guard_at_s"] < 1.0
    rig.set_desired((0,), regulator_on=False)
    assert rig.row["guard_at_s"] == math.inf
    kernel.advance(rig.row, rig.targets, 1.0)
    assert rig.row["guard_steps"] == 0
    rig.set_desired((0,))
    assert rig.row["guard_at_s"] < 2.0


def test_without_a_probe_it_sees_that_threads_wait_for_one_another(rig: Rig) -> None:
    """Two threads on one vCPU that is full wait for as long as they run."""
    assert crowding(1.0, 2.0) == pytest.approx(1.0) and crowding(1e-9, 2.0) < 1e-6
    assert crowding(0.5, 2.0) < crowding(0.9, 2.0) < 1.0 and crowding(1.0, 1.0) == 0.0
    rig.begin(1, [HIGH_QPS])
    rig.row["probe_runs"] = 0
    rig.set_desired((0,))
    assert REFUGE in climbs(rig, 3.0)
    assert rig.row["true_service"] == rig.row["refuge"]


@pytest.mark.parametrize("cuts", [1, 7, 100])
def test_what_happened_is_the_same_however_often_it_is_looked_at(rig: Rig, cuts: int) -> None:
    rig.begin(1, [60_000.0])
    rig.set_desired((0,))
    for cut in range(cuts):
        kernel.advance(rig.row, rig.targets, 5.0 * (cut + 1) / cuts)
        account(rig.row)
    late = float(rig.row["slow_fraction"])
    window_s = 0.5 * SCENARIO.load.interval_s
    expected = late * (1.0 - math.exp(-5.0 / window_s))
    assert rig.row["late_share"] == pytest.approx(expected, rel=1e-3)
    assert rig.row["peak_qps"] == pytest.approx(60_000.0)
    assert late < LATE_LIMIT


def test_random_holds_the_slo_under_it() -> None:
    starts = starts_from(1, 10)
    ratios = {}
    for name in ("random", "static"):
        runs = run_episodes(agents.make(name), FACTORY, starts)
        assert all(run.completed for run in runs)
        ratios[name] = np.mean([run.violation_ratio for run in runs])
    assert ratios["random"] <= ratios["static"] + 0.02
