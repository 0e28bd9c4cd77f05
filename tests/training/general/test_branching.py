"""What lists come to from states that were met, and what a network learns of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from env.lists.menu import LIST_SERVED, LISTS, plain_list
from env.scenario import load_scenario
from env.simulator.machine import Variation
from tests.training.general.fresh_model import fresh
from training.general.attention import legal_lists
from training.general.branching import Branches, Explorer
from training.general.price_fitting import TEMPERATURE, fit
from training.general.setups import common_layout, drawn_scenarios, setups_of
from training.recipe import Prices

HOW = Prices(episodes=12, lists=8, epochs=60, batch_size=32, learning_rate=0.003)


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


def test_lists_are_drawn_by_their_scores(explorer: Explorer) -> None:
    scores = np.full((20000, 5), -np.inf, np.float32)
    scores[:, 1:4] = np.log([0.2, 0.5, 0.3])
    found = np.bincount(explorer._drawn(scores), minlength=5) / len(scores)
    assert found == pytest.approx([0.0, 0.2, 0.5, 0.3, 0.0], abs=0.015)
