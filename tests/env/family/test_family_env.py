"""`coretide/Family-v0`: one pair of spaces for every drawn scenario."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

from env.action import edit_table
from env.colocation import HOST_TRAITS, N_ACTIONS, N_FEATURES, N_TRAITS, slots_of
from env.errors import InputError
from env.family.drawing import drawn_names
from env.scenario import MAX_JOBS, load_scenario

ID = "env.registration:coretide/Family-v0"


def test_both_checkers_pass() -> None:
    env = gymnasium.make(ID).unwrapped
    gymnasium_check(env, skip_render_check=True)
    sb3_check(env, warn=True)


def test_every_drawn_scenario_has_room_for_its_edits() -> None:
    for name in [*drawn_names("training", 2, 60), *drawn_names("report", 2, 60)]:
        slots = slots_of(edit_table(load_scenario(name)))
        assert len(set(slots.tolist())) == len(slots)
        assert slots.max() < N_ACTIONS


def test_another_scenario_comes_in_each_episode_and_its_seed_brings_it_back() -> None:
    env = gymnasium.make(ID).unwrapped
    first, named = env.reset(seed=3)
    assert env.reset()[1]["scenario"] != named["scenario"]
    again, same = env.reset(seed=3)
    assert same == named
    assert np.array_equal(first, again)


def test_legal_edits_act_and_jobs_to_come_are_not_shown() -> None:
    env = gymnasium.make(ID, purpose="report").unwrapped
    name = "family-report-0-3"
    seen, _ = env.reset(seed=0, options={"scenario": name})
    jobs = load_scenario(name).jobs
    traits = seen[N_FEATURES + HOST_TRAITS : N_FEATURES + N_TRAITS].reshape(MAX_JOBS, -1)
    shown = [bool(row.any()) for row in traits]
    assert shown == [job.arrival_s == 0.0 for job in jobs] + [False] * (MAX_JOBS - len(jobs))
    legal = np.flatnonzero(env.action_mask())
    assert np.array_equal(legal, np.flatnonzero(seen[-N_ACTIONS:]))
    after, reward, terminated, truncated, _ = env.step(legal[-1])
    assert not terminated and not truncated and np.isfinite(reward)
    assert np.isfinite(after).all()


def test_a_scenario_that_is_not_drawn_is_refused() -> None:
    env = gymnasium.make(ID).unwrapped
    with pytest.raises(InputError, match="cca-2025 is not drawn; allowed are names like family-"):
        env.reset(options={"scenario": "cca-2025"})
