"""What lists come to from states that were met, and what a network learns of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import configure

from env.lists.menu import LIST_SERVED, LISTS, plain_list
from env.scenario import load_scenario
from env.simulator.machine import Variation
from training.general.attention import legal_lists
from training.general.branched_ppo import MOST, BranchedPPO, advantages_of
from training.general.branching import Branches, Explorer
from training.general.price_fitting import TEMPERATURE, fit
from training.general.setups import common_layout, drawn_scenarios, setups_of
from training.recipe import GeneralRecipe, Prices, any_recipe

HOW = Prices(episodes=12, lists=8, epochs=60, batch_size=32, learning_rate=0.003)


def fresh(explorer: Explorer, **changes: Any) -> BranchedPPO:
    recipe = any_recipe("general").model_copy(update=changes)
    assert isinstance(recipe, GeneralRecipe)
    return BranchedPPO(explorer=explorer, recipe=recipe, device="cpu", seed=0)


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


def test_what_is_tried_means_something(explorer: Explorer) -> None:
    playing = np.arange(12)
    met = explorer.met_branches(playing, fresh(explorer).policy, 6)
    assert len(met.tokens) >= 12
    assert legal_lists(met.tokens)[np.arange(len(met.lists))[:, None], met.lists].all()
    first = explorer.first_branches(playing, 8)
    assert all(len(set(row)) == 8 for row in first.lists.tolist())
    tables = np.stack([setup.lists.legal for setup in explorer.setups])
    assert (legal_lists(first.tokens) == tables).all()


def test_where_memcached_may_hold_every_vcpu_alone_it_gives_some_back() -> None:
    """Else no job would ever run; the tokens tell, as the scenario does."""
    scenario = load_scenario("cca-2025-exclusive")
    vcpus = tuple(range(scenario.machine.vcpus))
    full = scenario.with_changes(service={"core_choices": [[0], list(vcpus)], "overflow_cores": []})
    setups = setups_of([scenario, full], common_layout([scenario]), Variation())
    explorer = Explorer(setups, 0.0, 0, 1)
    legal = legal_lists(explorer.observe(explorer.begin(np.arange(2))))
    assert (legal == np.stack([setup.lists.legal for setup in setups])).all()
    assert (LIST_SERVED[legal[0]] == 0.0).any()
    assert (LIST_SERVED[legal[1]] > 0.0).all()
    assert legal[1, plain_list(full)]


def test_after_a_list_the_policy_goes_on_as_it_would_by_itself(explorer: Explorer) -> None:
    """Who tries the list that the policy chooses anyway comes to what the policy comes to."""
    policy, playing = fresh(explorer).policy, np.arange(12)
    begun = explorer.begin(playing)
    chosen = policy.best(explorer.observe(begun))
    alone = begun.chosen(slice(None))
    explorer.follow_policy(alone, policy)
    followed = explorer.branch(begun, np.column_stack([chosen, chosen]), policy)
    assert followed.prices[:, 0] == pytest.approx(np.log(alone.prices(begun)), rel=1e-6)
    to_the_end = explorer.branch(begun, chosen[:, None])
    assert (to_the_end.prices[:, 0] != followed.prices[:, 0]).any()


def test_every_scenario_is_played_and_those_of_interest_more_often(explorer: Explorer) -> None:
    playing = explorer.episodes(110, 1, 0.5)
    counts = np.bincount(playing, minlength=12)
    assert counts[0] == 55
    assert (counts[1:] == 5).all()
    assert np.bincount(explorer.episodes(110, 12, 0.5), minlength=12).min() > 0


def test_a_network_learns_which_list_is_best_where(explorer: Explorer) -> None:
    """Half of the scenarios like one list, the others another; only the tokens tell which."""
    model = fresh(explorer)
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
    over = fit(model.policy, Branches(tokens, lists, prices), rng, HOW)
    assert over < 0.02
    scores = model.policy.scores(tokens)
    rows = np.arange(len(playing))
    worse = legal[np.where(playing % 2 == 0, 70, 3)]
    better = TEMPERATURE * (scores[rows, liked] - scores[rows, worse])
    assert 0.1 < better.mean() < 0.3
    assert (better > 0.0).mean() > 0.95
    assert scores.shape == (len(playing), len(LISTS))


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


def test_lists_are_drawn_by_their_scores(explorer: Explorer) -> None:
    scores = np.full((20000, 5), -np.inf, np.float32)
    scores[:, 1:4] = np.log([0.2, 0.5, 0.3])
    found = np.bincount(explorer._drawn(scores), minlength=5) / len(scores)
    assert found == pytest.approx([0.0, 0.2, 0.5, 0.3, 0.0], abs=0.015)
