"""`coretide/Family-v0`: one pair of spaces for every drawn scenario, and an example that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

from env.errors import InputError
from env.scenario import load_scenario
from env.sets.family_env import LAYOUT, FamilyEnv
from env.sets.tokens import JOB

ID = "env.registration:coretide/Family-v0"
README = Path(__file__).resolve().parents[3] / "README.md"


def make(**options: Any) -> FamilyEnv:
    made = gymnasium.make(ID, **options).unwrapped
    assert isinstance(made, FamilyEnv)
    return made


def job_tokens(seen: np.ndarray) -> np.ndarray:
    *_, jobs_at, _, cores_at = LAYOUT.offsets
    return seen[jobs_at:cores_at].reshape(LAYOUT.jobs, JOB)


def test_both_checkers_pass() -> None:
    env = make()
    gymnasium_check(env, skip_render_check=True)
    sb3_check(env, warn=True)


def test_the_shapes_are_those_that_are_stated() -> None:
    env = make()
    stated = [
        int(number)
        for number in re.findall(r"\((\d+)\)|\[(\d+)\]", FamilyEnv.__doc__ or "")[0]
        if number
    ]
    assert stated == [LAYOUT.size]
    assert env.observation_space.shape == (LAYOUT.size,)
    assert f"Discrete({len(LAYOUT.slots)})" in (FamilyEnv.__doc__ or "")
    assert env.action_space == gymnasium.spaces.Discrete(len(LAYOUT.slots))


def test_another_scenario_comes_in_each_episode_and_its_seed_brings_it_back() -> None:
    env = make()
    first, named = env.reset(seed=3)
    assert env.reset()[1]["scenario"] != named["scenario"]
    again, same = env.reset(seed=3)
    assert same == named
    assert np.array_equal(first, again)


def test_legal_slots_act_and_jobs_to_come_are_not_shown() -> None:
    env = make(purpose="report")
    name = "family-report-0-3"
    seen, _ = env.reset(seed=0, options={"scenario": name})
    jobs = load_scenario(name).jobs
    shown = [bool(row.any()) for row in job_tokens(seen)]
    absent = [False] * (LAYOUT.jobs - len(jobs))
    assert shown == [job.arrival_s == 0.0 for job in jobs] + absent
    legal = np.flatnonzero(env.action_mask())
    starts = legal[legal >= LAYOUT.slots.first_job]
    after, reward, terminated, truncated, info = env.step(starts[-1])
    assert not terminated and not truncated
    assert reward == pytest.approx(sum(info["reward_terms"].values()))
    job = (starts[-1] - LAYOUT.slots.first_job) // LAYOUT.slots.per_job
    assert job_tokens(seen)[job, 3:6].tolist() == [1.0, 0.0, 0.0]  # pending
    assert job_tokens(after)[job, 3:6].tolist() == [0.0, 1.0, 0.0]  # running


def test_an_episode_of_legal_slots_ends_with_its_figures() -> None:
    env, rng = make(), np.random.default_rng(1)
    env.reset(seed=5)
    for _ in range(50_000):
        legal = np.flatnonzero(env.action_mask())
        keeps = legal[0] == 0 and rng.random() < 0.9
        _, _, terminated, truncated, info = env.step(0 if keeps else int(rng.choice(legal)))
        if terminated or truncated:
            break
    assert info["episode_summary"]["illegal_edits"] == 0
    assert info["episode_summary"]["completed"] == terminated


def test_what_cannot_be_is_refused() -> None:
    env = make()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    with pytest.raises(InputError, match="cca-2025 is not drawn; allowed are names like family-"):
        env.reset(options={"scenario": "cca-2025"})
    env.reset(seed=1)
    for action in (-1, len(LAYOUT.slots)):
        with pytest.raises(ValueError, match=f"action {action} is not one of"):
            env.step(action)


def test_the_example_of_the_readme_trains_stock_ppo() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "PPO" in block]
    assert len(example.splitlines()) <= 10
    shorter, changed = re.subn(r"learn\([\d_]+\)", "learn(64)", example)
    shorter = re.sub(r"n_envs=\d+", "n_envs=2", shorter)
    shorter = re.sub(r"(n_steps|batch_size)=\d+", r"\1=32", shorter)
    assert changed == 1
    names: dict[str, Any] = {}
    exec(compile(shorter, "README.md", "exec"), names)
    assert names["model"].num_timesteps == 64
    assert names["observation"].shape == (LAYOUT.size,)
