"""The Gymnasium environment: spaces, seeds, reward terms, how episodes end, what it imports."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

from env import reward
from env.action import KIND
from env.allocation import JobState
from env.codes import START
from env.colocation import ColocationEnv
from env.physics.parameters import LAUNCH_OVERHEAD_S, WORK_S
from env.reward import TERMS
from env.scenario import Scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine

ID = "env.registration:coretide/Colocation-v0"

Steps = list[tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]]


def make(scenario: Scenario | str = "cca-2025", work: float = 1.0, gamma: float = 1.0) -> Any:
    """An environment whose jobs have a part of their work only, for short episodes."""
    env = ColocationEnv(scenario, gamma)
    machine = env.backend
    assert isinstance(machine, SimulatedMachine)
    begin = machine.begin

    def begin_smaller(trace_seed: int, rng: np.random.Generator) -> None:
        begin(trace_seed, rng)
        machine.host.work_left_s *= work

    machine.begin = begin_smaller  # type: ignore[method-assign]
    return env


def greedy(env: Any) -> int:
    """Start whatever may be started, then wait."""
    legal = np.flatnonzero(env.action_mask())
    starts = legal[env.table.rows[legal, KIND] == START]
    return int(starts[0]) if len(starts) else 0


def play(env: Any, seed: int, limit: int = 10_000, rng: np.random.Generator | None = None) -> Steps:
    """Steps until the episode ends: random legal edits if a generator is given, else greedy."""
    env.reset(seed=seed)
    steps: Steps = []
    for _ in range(limit):
        legal = np.flatnonzero(env.action_mask())
        edit = greedy(env) if rng is None else int(rng.choice(legal) * (rng.random() < 0.7))
        steps.append(env.step(edit))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


# --- the interface ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasium_accepts_it() -> None:
    gymnasium_check(gymnasium.make(ID).unwrapped, skip_render_check=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stable_baselines_accepts_it() -> None:
    sb3_check(gymnasium.make(ID, scenario="cca-2024"))


def test_the_spaces_fit_the_scenario(scenario: Scenario) -> None:
    env = gymnasium.make(ID, scenario=scenario)
    space = env.observation_space
    assert isinstance(space, gymnasium.spaces.Box)
    assert space.shape == (EpisodeFactory(scenario).observation_size,)
    assert space.dtype == np.float32
    assert env.action_space == gymnasium.spaces.Discrete(env.unwrapped.table.rows.shape[0])  # type: ignore[attr-defined]


def test_the_mask_is_the_end_of_the_observation() -> None:
    env = make()
    observation, _ = env.reset(seed=1)
    for edit in (0, 3, 0, 5):
        mask = env.action_mask()
        assert mask.dtype == bool
        assert np.array_equal(mask, observation[-len(mask) :] == 1.0)
        observation = env.step(edit)[0]


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        make().step(0)


@pytest.mark.parametrize("beyond", [True, False])
def test_an_action_outside_the_space_is_refused(beyond: bool) -> None:
    """Compiled code would read past the table."""
    env = make()
    env.reset(seed=1)
    with pytest.raises((ValueError, AssertionError), match=r"action|edit"):
        env.step(int(env.action_space.n) if beyond else -1)


# --- seeds ------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_episode_bit_for_bit() -> None:
    first, second = (play(make(work=0.05), 7, rng=np.random.default_rng(1)) for _ in range(2))
    assert len(first) == len(second) > 50
    for one, other in zip(first, second, strict=True):
        assert one[0].tobytes() == other[0].tobytes()
        assert one[1:] == other[1:]


def test_another_seed_is_another_episode() -> None:
    env = make()
    first, _ = env.reset(seed=7)
    second, _ = env.reset(seed=8)
    third, info = env.reset(seed=7)
    assert first.tobytes() == third.tobytes() != second.tobytes()
    assert env.reset()[1] != info  # the seed also fixes the episodes that follow


def test_a_trace_can_be_asked_for() -> None:
    env = make()
    _, info = env.reset(seed=1, options={"trace_seed": 2333})
    assert info["trace_seed"] == 2333
    assert env.backend.host.load_qps == 8195.0  # mcperf's first target for that seed
    _, other = env.reset(seed=1)
    assert other["trace_seed"] != 2333


# --- the reward -------------------------------------------------------------------------------


def test_the_reward_is_the_sum_of_its_named_terms() -> None:
    rng = np.random.default_rng(3)
    for _, value, _, _, info in play(make(work=0.05), 3, rng=rng):
        terms = info["reward_terms"]
        assert tuple(terms) == TERMS
        assert value == pytest.approx(math.fsum(terms.values()), abs=1e-12)
        assert terms["time"] <= 0.0
        assert terms["slo"] <= 0.0
        assert terms["churn"] <= 0.0


def test_the_terms_of_an_episode_add_up() -> None:
    env = make(work=0.05)
    rng = np.random.default_rng(3)
    env.reset(seed=3)
    machine = env.backend
    work_s = machine.host.work_left_s.sum() + machine.host.job_params[:, LAUNCH_OVERHEAD_S].sum()
    first = reward.potential(work_s, env.scenario.machine.vcpus)
    steps = play(env, 3, rng=rng)
    summary = steps[-1][4]["episode_summary"]
    assert summary["completed"]
    totals = {term: math.fsum(step[4]["reward_terms"][term] for step in steps) for term in TERMS}
    assert summary["reward_terms"] == pytest.approx(totals)
    # Without discount, shaping pays out what the first state lacked, whatever was done.
    assert first < 0.0
    assert totals["shaping"] == pytest.approx(-first)
    assert totals["time"] == pytest.approx(-machine.host.now_s / reward.UNIT_S)
    cost = reward.CHANGE_COST_S * (summary["edits"] + summary["actuations"])
    assert totals["churn"] == pytest.approx(-cost / reward.UNIT_S)
    expected = summary["expected_violation_ratio"] * summary["intervals"]
    violated_s = expected * summary["interval_s"]
    assert violated_s > 0.0
    assert totals["slo"] <= -reward.VIOLATION_WEIGHT * violated_s / reward.UNIT_S


def test_an_episode_that_is_cut_off_keeps_its_potential(scenario: Scenario) -> None:
    env = make(scenario.with_changes(load={"duration_s": 20.0}))
    steps = play(env, 1)
    shaping = math.fsum(step[4]["reward_terms"]["shaping"] for step in steps)
    host = env.backend.host
    left_s = host.work_left_s.sum() + host.overhead_left_s.sum()
    done_s = host.job_params[:, WORK_S].sum() + host.job_params[:, LAUNCH_OVERHEAD_S].sum() - left_s
    assert steps[-1][3]
    assert done_s > 0.0
    assert shaping == pytest.approx(-reward.potential(done_s, 4))


def test_shaping_uses_the_discount() -> None:
    assert reward.shaping_term(0.9, -10.0, -8.0) == pytest.approx(0.9 * -8.0 + 10.0)
    env = make(gamma=0.5)
    env.reset(seed=1)
    terms = env.step(0)[4]["reward_terms"]
    host = env.backend.host
    work_s = host.job_params[:, WORK_S].sum() + host.job_params[:, LAUNCH_OVERHEAD_S].sum()
    assert terms["shaping"] == pytest.approx(-0.5 * reward.potential(work_s, 4))


def test_a_violated_interval_costs_more_than_its_time() -> None:
    env = make()
    env.reset(seed=1, options={"trace_seed": 2333})
    env.step(greedy(env))
    env.backend.host.slo_us = 100.0  # less than memcached takes alone: no guard can help
    lost = calm = 0.0
    while env.backend.host.violations == 0:
        terms = env.step(0)[4]["reward_terms"]
        lost = terms["slo"]
        calm = calm or lost
    length_s = env.scenario.load.interval_s
    assert lost < -reward.VIOLATION_WEIGHT * length_s / reward.UNIT_S < calm
    assert reward.VIOLATION_WEIGHT > 1.0


# --- how episodes end -------------------------------------------------------------------------


def test_a_completed_episode_and_its_summary() -> None:
    env = make(work=0.1)
    steps = play(env, 5)
    assert [step[2] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert not any(step[3] for step in steps)
    assert all("episode_summary" not in step[4] for step in steps[:-1])
    summary = steps[-1][4]["episode_summary"]
    assert set(summary) >= {
        "makespan_s", "completed", "violation_ratio", "expected_violation_ratio", "violations",
        "intervals", "interval_s", "actuations", "overruled", "guard_steps", "guard_s",
        "illegal_edits", "decisions", "reward_terms", "jobs",
    }  # fmt: skip
    assert summary["completed"] is True
    assert summary["decisions"] == len(steps)
    assert summary["illegal_edits"] == 0
    assert summary["violation_ratio"] == summary["violations"] / summary["intervals"]
    jobs = summary["jobs"]
    assert tuple(jobs) == env.scenario.job_names
    begin = min(job["start_s"] for job in jobs.values())
    end = max(job["end_s"] for job in jobs.values())
    assert summary["makespan_s"] == pytest.approx(end - begin)
    for job in jobs.values():
        assert set(job) >= {"start_s", "end_s", "paused_s", "pauses", "threads"}
        assert begin <= job["start_s"] < job["end_s"] <= end
        assert (job["paused_s"], job["pauses"]) == (0.0, 0)
    assert env.backend.host.now_s == pytest.approx(end)
    assert summary["intervals"] == end // 10 - begin // 10 + 1


def test_an_episode_that_is_cut_off(scenario: Scenario) -> None:
    env = make(scenario.with_changes(load={"duration_s": 30.0}))
    steps = play(env, 5)
    assert [step[3] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert not any(step[2] for step in steps)
    summary = steps[-1][4]["episode_summary"]
    assert summary["completed"] is False
    assert summary["makespan_s"] == 30.0
    assert summary["intervals"] == 3
    assert env.backend.host.now_s == pytest.approx(30.0)


def test_an_episode_in_which_nothing_is_started(scenario: Scenario) -> None:
    env = make(scenario.with_changes(load={"duration_s": 20.0}))
    env.reset(seed=1)
    while True:
        _, _, terminated, truncated, info = env.step(0)
        if terminated or truncated:
            break
    summary = info["episode_summary"]
    assert truncated
    assert not summary["completed"]
    assert (summary["makespan_s"], summary["violation_ratio"], summary["intervals"]) == (20, 0, 0)


def test_illegal_edits_and_overrulings_are_reported() -> None:
    env = make(work=0.1)
    env.reset(seed=5)
    pause = next(e for e in range(len(env.table)) if env.table.describe(e).startswith("pause"))
    for _ in range(3):
        env.step(pause)  # nothing runs yet
    while True:
        _, _, terminated, _, info = env.step(greedy(env))
        if terminated:
            break
    assert info["episode_summary"]["illegal_edits"] == 3


# --- telemetry --------------------------------------------------------------------------------


def test_telemetry_shows_what_a_vm_would(scenario: Scenario) -> None:
    machine = SimulatedMachine(EpisodeFactory(scenario))
    machine.begin(2333, np.random.default_rng(1))
    first = machine.telemetry()
    assert first.time_s == first.service.requests == 0.0
    assert first.service.p95_us == pytest.approx(machine.host.p95_us, rel=0.1)
    assert set(first.jobs) == set(scenario.job_names)
    assert first.applied.service_cores == (0, 1)
    assert all(job.state == JobState.PENDING for job in first.applied.jobs.values())
    machine.advance(5.0)
    later = machine.telemetry()
    assert later.time_s == pytest.approx(5.0)
    assert later.service.requests == pytest.approx(5 * 8195)
    assert len(later.vcpu_busy_s) == 4
    assert 0.0 < later.service.cpu_s <= 10.0
    assert later.applied.validate(scenario)


def test_what_the_live_agent_imports_needs_no_training_library() -> None:
    modules = (
        "scenario", "telemetry", "allocation", "control", "regulator", "observation", "action",
        "reward", "errors", "simulator.load",
    )  # fmt: skip
    lines = [f"import env.{module}" for module in modules]
    heavy = ("numba", "gymnasium", "torch", "stable_baselines3", "scipy", "matplotlib")
    lines += ["import sys", f"print([name for name in {heavy} if name in sys.modules])"]
    shown = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert shown.strip() == "[]"
