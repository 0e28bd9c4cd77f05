"""Training for any scenario: what an episode is worth, and a run from recipe to checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import agents
from env.lists.menu import LISTS, plain_list
from env.reward import TERMS, UNIT_S
from env.scenario import FAMILY_ROOM, load_scenario
from env.sets.tokens import Layout
from env.simulator.machine import EpisodeFactory, SimulatedMachine, Variation
from training.evaluation.episodes import EpisodeStart, run_episode
from training.general.best_lists import best_lists
from training.general.branching import Explorer
from training.general.general_run import train_general
from training.general.machines import Setup, figure_s
from training.general.mixed_env import BASELINE_RETURN, MixedVecEnv
from training.general.setups import drawn_scenarios, setups_of
from training.recipe import load_recipe

LAYOUT = Layout(12, 16)
ARRIVING = "family-training-0-21"  # 7 jobs that arrive, on 8 vCPUs


def mixed(names: list[str], count: int, unprofiled: float = 0.0) -> MixedVecEnv:
    """Machines that play some scenarios, measured by plain lists."""
    setups = [
        Setup(EpisodeFactory(scenario, room=FAMILY_ROOM), LAYOUT)
        for scenario in map(load_scenario, names)
    ]
    return MixedVecEnv(setups, count, seed=1, unprofiled=unprofiled)


def plain_lists(environments: MixedVecEnv) -> np.ndarray:
    """What the baseline of each machine follows."""
    machines = environments.machines
    return machines.tables.baselines[machines.playing]


def test_a_return_is_measured_by_the_baseline() -> None:
    """Where the baseline needs twice as long, a second costs half as much."""
    environments = mixed(["cca-2025", "cca-2024"], 8)
    environments.reset()
    before_s = environments.machines.hosts["now_s"].copy()
    _, rewards, dones, _ = environments.step(plain_lists(environments))
    for index, host in enumerate(environments.machines.hosts):
        if dones[index]:
            continue
        baseline_s = environments._baseline_s[index]
        assert host["now_s"] > before_s[index]
        expected = host["term_sums"].sum() * UNIT_S * BASELINE_RETURN / baseline_s
        assert rewards[index] == pytest.approx(expected, rel=1e-5)


def test_who_follows_the_baseline_comes_to_what_it_does() -> None:
    environments = mixed(["cca-2025", ARRIVING], 6)
    environments.reset()
    followed: list[float] = []
    while len(followed) < 8:
        _, _, dones, infos = environments.step(plain_lists(environments))
        followed += [
            infos[index]["episode_summary"]["over_baseline"]
            for index in dones.nonzero()[0]
            if "episode_summary" in infos[index]
        ]
    assert followed == pytest.approx([1.0] * len(followed))


def test_where_jobs_arrive_the_baseline_itself_would_get_nothing() -> None:
    """Each job costs its completion time and is credited the baseline's when it arrives."""
    environments = mixed([ARRIVING], 1)
    observations = environments.reset()
    environments._begin(0, observations)
    n_jobs = len(load_scenario(ARRIVING).jobs)
    arrival_s = environments.machines.hosts["arrival_s"][0, :n_jobs].copy()
    credited, weights = environments._credits[0, :n_jobs].copy(), environments._weights[0].copy()
    assert 0 < (arrival_s > 0.0).sum() < n_jobs
    assert credited.sum() == pytest.approx(BASELINE_RETURN)
    total, earned, ended = 0.0, np.zeros(len(TERMS)), False
    while not ended:
        _, rewards, dones, _ = environments.step(plain_lists(environments))
        earned += environments._terms[0]
        total, ended = total + float(rewards[0]), bool(dones[0])
    assert total - earned @ weights == pytest.approx(credited[arrival_s > 0.0].sum(), rel=1e-3)
    completion = earned[TERMS.index("jct")] * weights[TERMS.index("jct")]
    assert completion == pytest.approx(-BASELINE_RETURN, rel=0.05)


def test_scenarios_of_different_sizes_play_side_by_side() -> None:
    names = ["cca-2025", *(scenario.name for scenario in drawn_scenarios("training", 0, 6))]
    environments = mixed(names, 12, unprofiled=0.5)
    observations = environments.reset()
    vcpus_at, numbers = LAYOUT.offsets[3], LAYOUT.offsets[4]
    shown = observations[:, vcpus_at : vcpus_at + 16 * numbers].reshape(12, 16, numbers)[:, :, 0]
    playing = [environments.machines.setup(index).scenario for index in range(12)]
    assert shown.sum(axis=1).tolist() == [scenario.machine.vcpus for scenario in playing]
    assert len({scenario.machine.vcpus for scenario in playing}) > 2
    jobs_at, numbers = LAYOUT.offsets[6], LAYOUT.offsets[7]
    jobs = observations[:, jobs_at : jobs_at + 12 * numbers].reshape(12, 12, numbers)
    unknown = (jobs[:, :, 3:6].any(axis=2)) & (jobs[:, :, 6] == 0.0)
    assert unknown.any()
    assert not jobs[unknown][:, 23:31].any()  # nothing of a profile is shown
    for _ in range(20):
        observations, rewards, _, _ = environments.step(plain_lists(environments))
        assert np.isfinite(observations).all()
        assert np.isfinite(rewards).all()


def test_a_short_search_beats_plain_lists() -> None:
    scenarios = [load_scenario(name) for name in ("family-training-0-4", ARRIVING)]
    setups = setups_of(scenarios, LAYOUT, Variation())
    found = best_lists(Explorer(setups, 0.0, 0, 2), 1)
    for number, scenario in enumerate(scenarios):
        figures = []
        for one in (plain_list(scenario), int(found[number])):
            setups[number].baseline = one
            environments = MixedVecEnv([setups[number]], 8, seed=2)
            machines = environments.machines
            for index in range(8):
                machines.begin(index, 0, 100 + index, np.random.default_rng(index))
            machines.follow(
                slice(None), np.full(8, one), np.zeros((8, len(TERMS))), to_the_end=True
            )
            figures.append([figure_s(machines.summary(index), scenario) for index in range(8)])
        assert np.mean(figures[1]) < np.mean(figures[0])


def test_from_recipe_to_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe("general")
    assert recipe.branching is not None
    branching = recipe.branching.model_copy(
        update={"traces": 1, "episodes": 24, "first_lists": 8, "lists": 4, "epochs": (2, 1)}
    )
    short = recipe.model_copy(
        update={"scenarios": ("cca-2025",), "family": 30, "selection_family": 1,
                "branching": branching, "steps": 512, "n_envs": 16, "n_steps": 32,
                "batch_size": 256, "selection_episodes": 2}
    )  # fmt: skip
    best = train_general(short, 0, tmp_path)
    assert 0.3 < best["over_baseline"] < 5.0
    said = capsys.readouterr().out
    assert "time over a good list's" in said
    assert "lists, round 2: " in said
    policy = agents.make(tmp_path / "best.zip")
    machine = SimulatedMachine(EpisodeFactory(load_scenario("family-report-0-0")))
    run = run_episode(machine, policy, EpisodeStart(5, 5))
    assert not run.error
    alone = short.model_copy(update={"family": 0, "selection_family": 0, "steps": 32})
    again = train_general(alone, 0, tmp_path / "more", tmp_path / "last.zip")
    assert again["over_baseline"] > 0.0
    assert len(LISTS) == 840
