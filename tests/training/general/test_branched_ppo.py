"""PPO by branches: what an advantage is, what is taken up, and how far one update goes."""

from __future__ import annotations

import numpy as np
import pytest
from stable_baselines3.common.logger import configure

from tests.training.general.fresh_model import fresh
from training.general.branched_ppo import MOST, BranchedPPO, advantages_of
from training.general.branching import Branches, Explorer
from training.general.price_fitting import TEMPERATURE


def test_an_advantage_is_what_a_list_is_better_by_than_others_of_its_state() -> None:
    prices = np.log(np.array([[100.0, 103.0], [7.0, 7.0], [1.0, 50.0]], np.float32))
    advantages = advantages_of(prices)
    half = 0.5 * np.log(1.03) / TEMPERATURE
    assert advantages[0] == pytest.approx([half, -half], rel=1e-3)
    assert not advantages[1].any()  # the lists of a state that all come to the same teach nothing
    assert np.abs(advantages[2]).max() == MOST


def chances(model: BranchedPPO, tokens: np.ndarray, lists: np.ndarray) -> np.ndarray:
    """The probabilities of one list a state."""
    scores = model.policy.scores(tokens)
    odds = np.exp(scores - scores.max(1, keepdims=True))
    found: np.ndarray = odds[np.arange(len(lists)), lists] / odds.sum(1)
    return found


def test_ppo_takes_up_the_list_that_turned_out_best(explorer: Explorer) -> None:
    """From equal chances, half of the scenarios towards one list, the others towards another."""
    model = fresh(explorer)
    model.set_logger(configure(None, []))
    playing = np.tile(np.arange(12), 20)
    tokens = explorer.observe(explorer.begin(playing))
    legal = np.flatnonzero(explorer.setups[0].lists.legal)
    liked = legal[np.where(playing % 2 == 0, 3, 70)]
    before, rng = chances(model, tokens, liked), np.random.default_rng(0)
    for _ in range(25):
        lists = rng.choice(legal, size=(len(playing), 8))
        lists[:, 0] = liked  # as if it were drawn more often than it is
        prices = np.where(lists == liked[:, None], 1.0, 1.05).astype(np.float32)
        model.train(Branches(tokens, lists, prices), model.recipe)
    assert chances(model, tokens, liked).mean() > 10.0 * before.mean()


def test_one_update_moves_no_probability_far(explorer: Explorer) -> None:
    """However often the same lists are gone through: beyond the clip nothing is gained."""
    tokens = explorer.observe(explorer.begin(np.arange(12)))
    legal = np.flatnonzero(explorer.setups[0].lists.legal)
    lists = np.tile(legal[[3, 70]], (12, 1))
    prices = np.tile(np.array([1.0, 1.05], np.float32), (12, 1))
    moved = []
    for clip_range in (0.2, 1000.0):
        model = fresh(explorer, clip_range=clip_range, n_epochs=40)
        model.set_logger(configure(None, []))
        before = chances(model, tokens, lists[:, 0])
        model.train(Branches(tokens, lists, prices), model.recipe)
        moved.append(float((chances(model, tokens, lists[:, 0]) / before).mean()))
    assert 1.1 < moved[0] < 5.0  # Adam goes on for a few steps where nothing is gained
    assert moved[1] > 50.0
