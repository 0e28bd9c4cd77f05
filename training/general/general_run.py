"""One training run of a network for any scenario, from recipe to best checkpoint."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure

from env.scenario import Scenario, load_scenario
from training.general.attention_policy import AttentionPolicy, GeneralPPO
from training.general.general_selection import run_selection
from training.general.machines import MixedVecEnv
from training.general.teaching import find_teachers, imitate
from training.general.writing import restore, save_general
from training.ppo.rollout_buffer import LeanRolloutBuffer
from training.ppo.selection import Score, score
from training.ppo.training_run import SHARED_WITH_PPO, LinearSchedule, announce, variation_of
from training.recipe import Recipe


def train_general(
    recipe: Recipe, seed: int, folder: Path, resume: Path | None = None
) -> dict[str, float]:
    """
    Train one network on all scenarios of a recipe, writing TensorBoard and checkpoints.

    An interruption (Ctrl-C) ends the run after saving `last.zip`.

    :param recipe: how to train, and on what
    :param seed: of everything random
    :param folder: of this run
    :param resume: a checkpoint for any scenario to go on from
    :return: the best checkpoint's figures on the selection traces, means over the scenarios
    :raises InputError: if the checkpoint to resume does not fit
    """
    assert recipe.scenarios and recipe.network is not None
    scenarios = [load_scenario(name) for name in recipe.scenarios]
    environments = machines_for(recipe, scenarios, recipe.n_envs, seed)
    model = new_model(recipe, environments, seed)
    if resume is not None:
        restore(model, resume)
        environments.seed(seed + model.num_timesteps)
    elif recipe.imitation is not None:
        print("searching for a schedule to imitate, for each scenario", flush=True)
        players = machines_for(recipe, scenarios, recipe.imitation.n_envs, seed)
        makespans_s, teachers = find_teachers(players, seed, recipe.imitation)
        said = ", ".join(f"{one:.0f} s" for one in makespans_s)
        print(f"imitating schedules of {said} (training traces, simulated)", flush=True)
        imitate(model.policy, players, teachers, seed, recipe.imitation)
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    evaluation = GeneralEvaluation(scenarios, recipe, folder)
    try:
        announce(model, recipe.steps, folder)
        model.learn(recipe.steps, callback=evaluation, reset_num_timesteps=resume is None)
    except KeyboardInterrupt:
        print(f"interrupted at {model.num_timesteps} decisions; saving {folder / 'last.zip'}")
    evaluation.init_callback(model)
    evaluation.evaluate()
    model.logger.dump(model.num_timesteps)
    assert evaluation.best is not None
    return evaluation.best


def machines_for(recipe: Recipe, scenarios: list[Scenario], n_envs: int, seed: int) -> MixedVecEnv:
    """
    The machines of a recipe.

    :param recipe: says how episodes differ
    :param scenarios: the problems
    :param n_envs: number of machines, shared evenly by the scenarios
    :param seed: of everything random
    """
    return MixedVecEnv(
        scenarios,
        max(2, n_envs // len(scenarios)),
        seed,
        variation_of(recipe),
        threads=torch.get_num_threads(),
    )


def new_model(recipe: Recipe, environments: MixedVecEnv, seed: int) -> GeneralPPO:
    """
    A fresh model.

    :param recipe: hyperparameters
    :param environments: what it learns on
    :param seed: of weights and action sampling
    """
    assert recipe.network is not None
    return GeneralPPO(
        AttentionPolicy,
        environments,
        rollout_buffer_class=LeanRolloutBuffer,
        policy_kwargs={"layout": environments.layout, "network": recipe.network.model_dump()},
        device="cpu",
        seed=seed,
        learning_rate=LinearSchedule(recipe),
        **{name: getattr(recipe, name) for name in SHARED_WITH_PPO},
    )


class GeneralEvaluation(BaseCallback):
    """
    Scores the policy on the selection traces of every scenario, and keeps the best.

    :param scenarios: the problems
    :param recipe: how often, and on how many traces
    :param folder: the run's folder
    """

    def __init__(self, scenarios: list[Scenario], recipe: Recipe, folder: Path):
        super().__init__()
        self.scenarios, self.recipe, self.folder = scenarios, recipe, folder
        self.best: dict[str, float] | None = None
        self._due = 0
        self._ended: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode_summary" in info:
                self._ended.append(info["episode_summary"])
        return True

    def _on_rollout_start(self) -> None:
        # At the start of a rollout the policy is the one the last update left.
        if self.num_timesteps >= self._due:
            self._due = self.num_timesteps + self.recipe.evaluate_every
            self.evaluate()

    def _on_rollout_end(self) -> None:
        for name in ("over_baseline", "violation_ratio", "decisions"):
            if self._ended:
                mean = float(np.mean([one[name] for one in self._ended]))
                self.logger.record(f"episode/{name}", mean)
        self._ended.clear()

    def evaluate(self) -> None:
        """Score the policy as it is now and save it."""
        model = self.model
        assert isinstance(model, GeneralPPO)
        scores: dict[str, Score] = {}
        shares = []
        for scenario in self.scenarios:
            episodes = self.recipe.selection_episodes
            summaries = run_selection(model.policy, scenario, model.policy.layout, episodes)
            scores[scenario.name] = found = score(summaries, [])
            baseline_s = float(np.mean([one["baseline_s"] for one in summaries]))
            shares.append(found.cost_s / baseline_s)
            for name in ("makespan_s", "violation_ratio", "completed"):
                self.logger.record(f"selection/{scenario.name}/{name}", getattr(found, name))
        figures = {
            "excess": float(np.mean([one.excess for one in scores.values()])),
            "over_baseline": float(np.exp(np.mean(np.log(shares)))),
            "violation_ratio": float(np.mean([one.violation_ratio for one in scores.values()])),
        }
        said = ", ".join(
            f"{name} {one.makespan_s:.0f} s, {100 * one.violation_ratio:.2f} %"
            for name, one in scores.items()
        )
        print(
            f"{self.num_timesteps} decisions: {figures['over_baseline']:.3f} of the baseline's "
            f"makespan ({said} violations; selection traces, simulated)",
            flush=True,
        )
        written = {name: asdict(one) for name, one in scores.items()} | {"all": figures}
        save_general(model, self.folder / "last.zip", self.scenarios, written)
        order = ("excess", "over_baseline")
        if self.best is None or [figures[one] for one in order] < [self.best[one] for one in order]:
            self.best = figures
            save_general(model, self.folder / "best.zip", self.scenarios, written)
