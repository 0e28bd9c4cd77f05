"""Training for any scenario: side by side, measured by good lists, from recipe to checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import agents
from agents.general_checkpoint import read_general_checkpoint
from benchmarks.ppo_part import curve
from env.lists.menu import plain_list
from env.scenario import load_scenario
from env.sets.tokens import Layout
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from training.evaluation.episodes import EpisodeStart, run_episode
from training.general.best_lists import best_lists
from training.general.branching import Explorer
from training.general.general_run import train_general
from training.general.machines import figure_s
from training.general.setups import drawn_scenarios, setups_of
from training.recipe import GeneralRecipe, Prices, any_recipe

LAYOUT = Layout(12, 16)
ARRIVING = "family-training-0-21"  # 7 jobs that arrive, on 8 vCPUs


def test_scenarios_of_different_sizes_play_side_by_side() -> None:
    scenarios = [load_scenario("cca-2025"), *drawn_scenarios("training", 0, 6)]
    explorer = Explorer(setups_of(scenarios, LAYOUT, Variation()), 0.5, 1, threads=1)
    machines = explorer.begin(np.arange(14) % 7)
    observations = explorer.observe(machines)
    vcpus_at, numbers = LAYOUT.offsets[3], LAYOUT.offsets[4]
    shown = observations[:, vcpus_at : vcpus_at + 16 * numbers].reshape(14, 16, numbers)[:, :, 0]
    assert shown.sum(axis=1).tolist() == 2 * [one.machine.vcpus for one in scenarios]
    assert len({one.machine.vcpus for one in scenarios}) > 2
    jobs_at, numbers = LAYOUT.offsets[6], LAYOUT.offsets[7]
    jobs = observations[:, jobs_at : jobs_at + 12 * numbers].reshape(14, 12, numbers)
    unknown = (jobs[:, :, 3:6].any(axis=2)) & (jobs[:, :, 6] == 0.0)
    assert unknown.any()
    assert not jobs[unknown][:, 23:31].any()  # nothing of a profile is shown
    while (machines.ended == 0).any():
        explorer.follow(machines, machines.tables.baselines[machines.playing], to_the_end=False)
        assert np.isfinite(explorer.observe(machines)).all()


def test_a_short_search_beats_plain_lists() -> None:
    scenarios = [load_scenario(name) for name in ("family-training-0-4", ARRIVING)]
    setups = setups_of(scenarios, LAYOUT, Variation())
    found = best_lists(Explorer(setups, 0.0, 0, 2), 1)
    explorer = Explorer(setups, 0.0, 5, 2)
    for number, scenario in enumerate(scenarios):
        begun = explorer.begin(np.full(8, number))
        figures = []
        for one in (plain_list(scenario), int(found[number])):
            machines = begun.chosen(slice(None))
            machines.follow(slice(None), np.full(8, one), to_the_end=True)
            figures.append([figure_s(machines.summary(index), scenario) for index in range(8)])
        assert np.mean(figures[1]) < np.mean(figures[0])


def test_from_recipe_to_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = any_recipe("general")
    assert isinstance(recipe, GeneralRecipe)
    prices = Prices(episodes=24, lists=8, epochs=2, batch_size=256, learning_rate=0.001)
    short = recipe.model_copy(
        update={"scenarios": ("cca-2025",), "family": 30, "selection_family": 1,
                "baseline_traces": 1, "prices": prices, "steps": 100, "episodes": 20, "lists": 4,
                "batch_size": 64, "selection_episodes": 2, "evaluate_every": 1000}
    )  # fmt: skip
    best = train_general(short, 0, tmp_path)
    assert 0.3 < best["over_baseline"] < 5.0
    said = capsys.readouterr().out
    assert "its lists take" in said
    assert said.count("time over a good list's") == 2  # at the start and at the end
    assert len(steps := curve(tmp_path)["lists"]) == 2 and steps[0] == 0 and steps[1] >= 100
    fitted, last = (
        read_general_checkpoint(tmp_path / f"{name}.zip") for name in ("fitted", "last")
    )
    assert fitted.metadata["steps"] == 0
    assert last.metadata["steps"] >= 100
    assert any((fitted.arrays[name] != last.arrays[name]).any() for name in fitted.arrays)
    policy = agents.make(tmp_path / "best.zip")
    machine = SimulatedMachine(EpisodeFactory(load_scenario("family-report-0-0")))
    run = run_episode(machine, policy, EpisodeStart(5, 5))
    assert not run.error
    alone = short.model_copy(update={"family": 0, "selection_family": 0, "steps": 32})
    again = train_general(alone, 0, tmp_path / "more", tmp_path / "last.zip")
    assert again["over_baseline"] > 0.0
    assert not (tmp_path / "more" / "fitted.zip").exists()  # it goes on, by PPO alone
    more = read_general_checkpoint(tmp_path / "more" / "last.zip")
    assert more.metadata["steps"] >= last.metadata["steps"] + 32
