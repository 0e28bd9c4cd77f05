"""
What else was tried to make the policy better. The experiment behind a table in docs/policy.md.

Every variant trains the shipped recipe with one thing done otherwise, and is scored like the
ablations: as it ends, on the selection traces.

- `one-lesson`: imitation only watches the expert, and never plays while the expert corrects it;
- `narrow`, `wide`: hidden layers of 64 or of 256;
- `shared-network`: one small network for all jobs (`benchmarks.job_network`);
- `double-price`: a broken SLO costs twice as much;
- `rising-price`: from a third of the price at the start of training to all of it at the end;
- `falling-price`: from three times the price to once;
- `farther-sight`: the advantage estimate looks further ahead (`gae_lambda` 0.99).

    python -m benchmarks.alternatives --json alternatives.json
"""

from collections.abc import Sequence
from typing import Any

import torch
from stable_baselines3 import PPO

from benchmarks.ablations import compare, judge, schedule_for
from benchmarks.job_network import ModelActor, job_network_policy
from env.reward import TERMS
from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from training.imitation.fit_network import imitate
from training.ppo.checkpoint_writing import network_of
from training.ppo.fast_ppo import FastPPO
from training.ppo.selection import Actor
from training.ppo.training_run import new_model, variation_of
from training.recipe import Recipe, load_recipe

RECIPES: dict[str, dict[str, Any]] = {
    "narrow": {"hidden": (64, 64)},
    "wide": {"hidden": (256, 256)},
    "farther-sight": {"gae_lambda": 0.99},
}
PRICES = {"double-price": (2.0, 2.0), "rising-price": (1 / 3, 1.0), "falling-price": (3.0, 1.0)}
"""Factors on the reward's SLO term at the start and at the end of training."""

VARIANTS = ("one-lesson", *RECIPES, *PRICES, "shared-network")
SLO = TERMS.index("slo")


class PricedVecEnv(ColocationVecEnv):
    """Machines on which the price of a broken SLO changes while one trains."""

    prices = (1.0, 1.0)
    steps_in_all = 1
    steps_taken = 0

    def step_wait(self) -> Any:
        """Step every machine."""
        observations, rewards, dones, infos = super().step_wait()
        first, last = self.prices
        self.steps_taken += self.num_envs
        done = min(self.steps_taken / self.steps_in_all, 1.0)
        rewards += (first + (last - first) * done - 1.0) * self._terms[:, SLO]
        return observations, rewards, dones, infos


def train(variant: str, seed: int, steps: int, shipped: Recipe) -> Actor:
    """
    Train one variant on cca-2025.

    :param variant: one of `VARIANTS`
    :param seed: of everything random
    :param steps: decisions
    :param shipped: the recipe in which one thing is done otherwise
    """
    scenario = load_scenario("cca-2025")
    recipe = shipped.model_copy(update=RECIPES.get(variant, {}))

    def environments(count: int, threads: int, prices: tuple[float, float]) -> PricedVecEnv:
        made = PricedVecEnv(
            scenario, count, recipe.gamma, seed, variation=variation_of(recipe), threads=threads
        )
        made.prices, made.steps_in_all = prices, steps
        return made

    prices = PRICES.get(variant, (1.0, 1.0))
    machines = environments(recipe.n_envs, torch.get_num_threads(), prices)
    if variant == "shared-network":
        model = new_model(recipe, machines, seed, PPO, job_network_policy(machines.factory))
    else:
        model = new_model(recipe, machines, seed, FastPPO)
    imitation = recipe.imitation
    assert imitation is not None
    stage = environments(imitation.n_envs, 1, (prices[0], prices[0]))
    schedule = schedule_for(scenario, seed, imitation)
    if variant == "one-lesson":
        imitation = imitation.model_copy(update={"epochs": (sum(imitation.epochs),)})
    imitate(model, stage, schedule, seed, imitation)
    model.learn(steps)
    if variant == "shared-network":
        return ModelActor(model)
    return network_of(model)


def main(argv: Sequence[str] | None = None) -> None:
    """
    Train and judge every variant.

    :param argv: command line, the process's own if none is given
    """
    shipped = load_recipe("best")

    def judged(variant: str, seed: int, steps: int) -> dict[str, float]:
        actor = train(variant, seed, steps, shipped)
        return judge(load_scenario("cca-2025"), actor, shipped)

    compare("benchmarks.alternatives", __doc__.splitlines()[1], VARIANTS, judged, argv)


if __name__ == "__main__":
    main()
