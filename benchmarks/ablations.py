"""
What each part of the training recipe is worth. The experiment behind a table in docs/policy.md.

Every variant trains the shipped recipe without one part, and is scored as it ends, on the selection
traces: with the profile's physics, with the recipe's drawn physics and load intervals,
and with every parameter wrong by 20 %.

- `full`: nothing is left out;
- `no-imitation`: PPO from random weights;
- `no-ppo`: imitation alone;
- `no-history`: no earlier loads, no times since the load moved, no worst readings of the probe;
- `no-probe`: no latency probe in any episode;
- `no-overflow`: memcached never gets more than its refuge;
- `no-randomisation`: the profile's physics and the scenario's load in every episode;
- `no-shaping`: reward without the potential-based term;
- `no-sharing`: no batch work on memcached's vCPUs.

    python -m benchmarks.ablations --json ablations.json
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO

from env.control import HISTORY
from env.errors import exit_on_bad_input
from env.inputs.commandline import OneLineParser, require_writable, whole_number, write_json
from env.reward import TERMS
from env.scenario import Scenario, load_scenario
from env.simulator.machine import EpisodeFactory, Variation
from env.simulator.vector_env import ColocationVecEnv
from training.evaluation.schedule_search import Schedule
from training.imitation.expert import find_schedule
from training.imitation.fit_network import imitate
from training.ppo.checkpoint_writing import network_of
from training.ppo.fast_ppo import FastPPO
from training.ppo.masked_policy import linear_layers
from training.ppo.selection import Actor, run_selection, score
from training.ppo.training_run import new_model, variation_of
from training.recipe import Imitation, Recipe, load_recipe

VARIANTS = (
    "full",
    "no-imitation",
    "no-ppo",
    "no-history",
    "no-probe",
    "no-overflow",
    "no-randomisation",
    "no-shaping",
    "no-sharing",
)

MEMORY = (*range(3, 5 + HISTORY), 10 + HISTORY, 11 + HISTORY)
"""Features (`env.observation`) that say what was, not what is."""

SHAPING = TERMS.index("shaping")
WRONG = 0.2
"""Fraction by which every parameter is wrong in the setting `wrong`."""


class AblatedVecEnv(ColocationVecEnv):
    """Machines whose policy does not see some features, or is not paid the shaping term."""

    blind: tuple[int, ...] = ()
    shaped = True

    def reset(self) -> Any:
        """Start an episode on every machine; float32[B, size]."""
        observations = super().reset()
        observations[:, list(self.blind)] = 0.0
        return observations

    def step_wait(self) -> Any:
        """Step every machine."""
        observations, rewards, dones, infos = super().step_wait()
        observations[:, list(self.blind)] = 0.0
        if not self.shaped:
            rewards -= self._terms[:, SHAPING]
        for index in np.flatnonzero(dones):
            infos[index]["terminal_observation"][list(self.blind)] = 0.0
        return observations, rewards, dones, infos


def ablated(recipe: Recipe, variant: str) -> Recipe:
    """
    A recipe without one part, where the part is the recipe's.

    :param recipe: the whole recipe
    :param variant: one of `VARIANTS`
    """
    changes: dict[str, dict[str, Any]] = {
        "no-imitation": {"imitation": None},
        "no-probe": {"unprobed": 1.0},
        "no-randomisation": dict.fromkeys(("interval_s", "least_load", "most_load"))
        | {"physics": 0.0, "error": 0.0},
    }
    return recipe.model_copy(update=changes.get(variant, {}))


def scenario_without(variant: str) -> Scenario:
    """
    The scenario without one part, where the part is the scenario's.

    :param variant: one of `VARIANTS`
    """
    if variant == "no-sharing":
        return load_scenario("cca-2025-exclusive")
    scenario = load_scenario("cca-2025")
    if variant == "no-overflow":
        return scenario.with_changes(service={"overflow_cores": []})
    return scenario


@cache
def _schedule_for(scenario: Scenario, seed: int, imitation: Imitation) -> Schedule:
    """What is imitated; the same for all variants of a scenario."""
    return find_schedule(EpisodeFactory(scenario), seed, imitation)[1]


def train(variant: str, seed: int, steps: int, whole: Recipe) -> tuple[Scenario, PPO]:
    """
    Train one variant.

    :param variant: one of `VARIANTS`
    :param seed: of everything random
    :param steps: decisions
    :param whole: the recipe that a part is taken from
    :return: its scenario, and the trained model
    """
    scenario = scenario_without(variant)
    recipe = ablated(whole, variant)

    def environments(count: int, threads: int) -> AblatedVecEnv:
        made = AblatedVecEnv(
            scenario, count, recipe.gamma, seed, variation=variation_of(recipe), threads=threads
        )
        made.blind = MEMORY if variant == "no-history" else ()
        made.shaped = variant != "no-shaping"
        return made

    model = new_model(recipe, environments(recipe.n_envs, torch.get_num_threads()), seed, FastPPO)
    if recipe.imitation:
        stage = environments(recipe.imitation.n_envs, 1)
        schedule = _schedule_for(scenario, seed, recipe.imitation)
        imitate(model, stage, schedule, seed, recipe.imitation)
    if variant != "no-ppo":
        model.learn(steps)
    if variant == "no-history":  # it never saw them
        with torch.no_grad():
            actor, _ = linear_layers(model.policy)
            actor[0].weight[:, list(MEMORY)] = 0.0
    return scenario, model


def selection_figures(scenario: Scenario, actor: Actor, whole: Recipe) -> dict[str, float]:
    """
    Play the selection traces in three settings.

    :param scenario: what is played
    :param actor: who decides
    :param whole: the recipe, which says how physics and intervals are drawn
    :return: makespan [s] and violation ratio by setting
    """
    figures = {}
    for name, variation in (
        ("plain", Variation()),
        ("drawn", Variation(whole.physics, whole.interval_s)),
        ("wrong", Variation(error=WRONG)),
    ):
        factory = EpisodeFactory(scenario, variation=variation)
        runs = run_selection(actor, factory, whole.selection_episodes)
        result = score(runs, [])
        figures[f"{name}_makespan_s"] = result.makespan_s
        figures[f"{name}_violation_ratio"] = result.violation_ratio
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """
    Train and score every variant, and write what came out.

    :param argv: command line, the process's own if none is given
    """
    line = OneLineParser(prog="python -m benchmarks.ablations", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--steps", type=whole_number(1), default=3_000_000, help="decisions of a run (%(default)s)")
    add("--seeds", type=whole_number(1), default=1, help="runs of each variant (%(default)s)")
    add("--variant", choices=VARIANTS, action="append", help="only this one; repeat it")
    add("--json", type=Path, help="write the figures here")
    arguments = line.parse_args(argv)
    whole = load_recipe("best")
    with exit_on_bad_input():
        require_writable(arguments.json)
        results = []
        for seed in range(arguments.seeds):
            for variant in arguments.variant or VARIANTS:
                scenario, model = train(variant, seed, arguments.steps, whole)
                figures = selection_figures(scenario, network_of(model), whole)
                results.append({"variant": variant, "seed": seed, **figures})
                print(json.dumps(results[-1]), flush=True)
        if arguments.json:
            write_json(results, arguments.json)


if __name__ == "__main__":
    main()
