"""The environments of the ablation experiment: one thing is missing, all else is as it was."""

import numpy as np
import pytest

from benchmarks import ablations
from benchmarks.ablations import MEMORY, AblatedVecEnv
from env.scenario import load_scenario
from training.recipe import load_recipe

SCENARIO = load_scenario("cca-2025")


def batch() -> AblatedVecEnv:
    return AblatedVecEnv(SCENARIO, 4, 1.0, seed=5)


def test_a_blind_policy_misses_what_was_and_sees_what_is() -> None:
    seeing, blind = batch(), batch()
    blind.blind = MEMORY
    rest = np.setdiff1d(np.arange(seeing.factory.observation_size), MEMORY)
    observations, dark = seeing.reset(), blind.reset()
    for _ in range(300):
        edits = observations[:, -len(seeing.table) :].argmax(axis=1)
        observations, rewards, *_ = seeing.step(edits)
        dark, same, *_ = blind.step(edits)
        assert (dark[:, MEMORY] == 0.0).all()
        assert (dark[:, rest] == observations[:, rest]).all()
        assert (rewards == same).all()
    assert (observations[:, MEMORY] > 0.0).any(axis=0).all()


def test_without_shaping_the_reward_is_what_the_other_terms_add_up_to() -> None:
    whole, bare = batch(), batch()
    bare.shaped = False
    observations = whole.reset()
    bare.reset()
    paid = 0.0
    for _ in range(200):
        edits = observations[:, -len(whole.table) :].argmax(axis=1)
        observations, rewards, *_ = whole.step(edits)
        _, less, *_ = bare.step(edits)
        shaping = whole._terms[:, ablations.SHAPING]
        assert rewards - less == pytest.approx(shaping, abs=1e-5)
        paid += np.abs(shaping).sum()
    assert paid > 0.0


@pytest.mark.parametrize("variant", ablations.VARIANTS)
def test_every_variant_but_the_full_one_changes_something(variant: str) -> None:
    recipe = load_recipe("best")
    elsewhere = variant in ("no-ppo", "no-history", "no-shaping")
    same = ablations.ablated(recipe, variant) == recipe
    same &= ablations.scenario_without(variant) == SCENARIO
    assert same == (variant == "full" or elsewhere)
