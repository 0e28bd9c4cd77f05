"""Training for any scenario: what an episode is worth, and a run from recipe to checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import agents
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, SimulatedMachine
from training.evaluation.episodes import EpisodeStart, run_episode
from training.general.general_run import train_general
from training.general.machines import BASELINE_RETURN, MixedVecEnv
from training.recipe import load_recipe


def test_a_return_is_measured_by_the_baseline() -> None:
    """Where the baseline needs twice as long, a second costs half as much."""
    names = ("cca-2025", "cca-2024")
    machines = MixedVecEnv([load_scenario(name) for name in names], each=2, seed=1)
    machines.reset()
    before_s = [float(group.hosts["now_s"][0]) for group in machines.groups]
    _, rewards, _, _ = machines.step(np.zeros(4, np.int64))
    for number, group in enumerate(machines.groups):
        host = group.hosts[0]
        terms = host["term_sums"].sum()
        share = (host["now_s"] - before_s[number]) / machines._baselines_s[2 * number]
        assert share > 0.0
        expected = terms * 10.0 * BASELINE_RETURN / machines._baselines_s[2 * number]
        assert rewards[2 * number] == pytest.approx(expected, rel=1e-5)


def test_scenarios_of_different_sizes_play_side_by_side() -> None:
    machines = MixedVecEnv([load_scenario("cca-2025"), load_scenario("local")], each=2, seed=1)
    observations = machines.reset()
    vcpus_at, numbers = machines.layout.offsets[3], machines.layout.offsets[4]
    shown = observations[:, vcpus_at::1][:, : 4 * numbers].reshape(4, 4, numbers)[:, :, 0]
    assert shown.sum(axis=1).tolist() == [4, 4, 2, 2]
    for _ in range(20):
        observations, rewards, _, _ = machines.step(np.zeros(4, np.int64))
        assert np.isfinite(observations).all()
        assert np.isfinite(rewards).all()


def test_from_recipe_to_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("general")
    assert recipe.imitation is not None
    imitation = recipe.imitation.model_copy(
        update={"search_traces": 1, "search_evaluations": 6, "n_envs": 8, "n_steps": 60,
                "epochs": (1, 1)}
    )  # fmt: skip
    short = recipe.model_copy(
        update={"scenarios": ("cca-2025", "cca-2025-exclusive"), "imitation": imitation,
                "steps": 512, "n_envs": 16, "n_steps": 32, "batch_size": 256,
                "selection_episodes": 2}
    )  # fmt: skip
    best = train_general(short, 0, tmp_path)
    assert 0.3 < best["over_baseline"] < 5.0
    assert "of the baseline's makespan" in capsys.readouterr().out
    policy = agents.make(tmp_path / "best.zip")
    machine = SimulatedMachine(EpisodeFactory(load_scenario("cca-2024")))
    run = run_episode(machine, policy, EpisodeStart(5, 5))
    assert not run.error
    again = train_general(
        short.model_copy(update={"steps": 32}), 0, tmp_path / "more", tmp_path / "last.zip"
    )
    assert again["over_baseline"] > 0.0
