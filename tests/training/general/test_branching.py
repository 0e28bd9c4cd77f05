"""What lists come to from states that were met, and what a network learns of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from env.lists.menu import LISTS
from env.scenario import load_scenario
from env.simulator.machine import Variation
from training.general.attention import legal_lists
from training.general.branching import Branches, Explorer, together
from training.general.general_run import new_model
from training.general.mixed_env import MixedVecEnv
from training.general.price_fitting import TEMPERATURE, fit
from training.general.setups import common_layout, drawn_scenarios, setups_of
from training.recipe import Branching, load_recipe

HOW = Branching(
    traces=1, episodes=12, first_lists=8, lists=4, epochs=(1,), batch_size=32, learning_rate=0.003
)


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    scenarios = [load_scenario("cca-2025-exclusive"), *drawn_scenarios("training", 0, 11)]
    setups = setups_of(scenarios, common_layout(scenarios), Variation())
    return Explorer(setups, 0.25, 3, threads=2)


def test_branches_differ_by_what_was_decided_and_by_nothing_else(explorer: Explorer) -> None:
    machines = explorer.begin(np.arange(12))
    before = machines.hosts.copy()
    one = np.full(12, explorer.setups[0].baseline)
    other = explorer.first_branches(np.arange(12), 3).lists[:, 0]
    found = explorer.branch(machines, np.column_stack([one, one, other]))
    assert (machines.hosts == before).all()
    assert (found.prices[:, 0] == found.prices[:, 1]).all()
    assert (found.prices[:, 0] != found.prices[:, 2]).any()
    assert np.isfinite(found.prices).all()
    assert found.tokens.shape == (12, machines.layout.size)


def test_in_threads_machines_come_to_the_same() -> None:
    scenarios = drawn_scenarios("training", 0, 5)
    setups = setups_of(scenarios, common_layout(scenarios), Variation())
    playing = np.arange(200) % 5
    found = [Explorer(setups, 0.5, 3, n).first_branches(playing, 2) for n in (1, 3)]
    assert (found[0].prices == found[1].prices).all()
    assert (found[0].tokens == found[1].tokens).all()


def test_what_is_tried_means_something_and_comes_once(explorer: Explorer) -> None:
    model = new_model(load_recipe("general"), MixedVecEnv(explorer.setups, 2), 0)
    playing = np.arange(12)
    met = together(explorer.met_branches(playing, model.policy, 6))
    assert len(met.tokens) >= 12
    assert legal_lists(met.tokens)[np.arange(len(met.lists))[:, None], met.lists].all()
    first = explorer.first_branches(playing, 8)
    assert all(len(set(row)) == 8 for row in first.lists.tolist())
    tables = np.stack([setup.lists.legal for setup in explorer.setups])
    assert (legal_lists(first.tokens) == tables).all()


def test_every_scenario_is_played_and_those_of_interest_more_often(explorer: Explorer) -> None:
    playing = explorer.episodes(110, 1, 0.5)
    counts = np.bincount(playing, minlength=12)
    assert counts[0] == 55
    assert (counts[1:] == 5).all()
    assert np.bincount(explorer.episodes(110, 12, 0.5), minlength=12).min() > 0
    assert (np.bincount(explorer.episodes(24, 0, 0.5)) == 2).all()


def test_rounds_of_different_widths_go_together() -> None:
    wide = Branches(np.zeros((2, 5), np.float32), np.arange(8).reshape(2, 4), np.ones((2, 4)))
    narrow = Branches(np.ones((1, 5), np.float32), np.array([[3, 1]]), np.array([[0.1, 0.2]]))
    both = together([wide, narrow])
    assert both.tokens.shape == (3, 5)
    assert both.lists.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [3, 1, 3, 1]]
    assert both.prices[2].tolist() == [0.1, 0.2, 0.1, 0.2]


def test_a_network_learns_which_list_is_best_where(explorer: Explorer) -> None:
    """Half of the scenarios like one list, the others another; only the tokens tell which."""
    model = new_model(load_recipe("general"), MixedVecEnv(explorer.setups, 2), 0)
    playing = np.tile(np.arange(12), 20)
    tokens = explorer.observe(explorer.begin(playing))
    legal = np.flatnonzero(explorer.setups[0].lists.legal)
    liked = legal[np.where(playing % 2 == 0, 3, 70)]
    rng = np.random.default_rng(0)
    lists = rng.choice(legal, size=(len(playing), 12))
    lists[:, 0] = liked
    luck = rng.normal(3.0, 1.0, size=(len(playing), 1))  # what a state's lists have in common
    prices = (luck + np.where(lists == liked[:, None], 0.0, 0.2)).astype(np.float32)
    torch.manual_seed(0)
    over = fit(model.policy, Branches(tokens, lists, prices), 60, rng, HOW)
    assert over < 0.02
    scores = model.policy.scores(tokens)
    rows = np.arange(len(playing))
    worse = legal[np.where(playing % 2 == 0, 70, 3)]
    better = TEMPERATURE * (scores[rows, liked] - scores[rows, worse])
    assert 0.1 < better.mean() < 0.3
    assert (better > 0.0).mean() > 0.95
    assert scores.shape == (len(playing), len(LISTS))
