"""One training run of a network for any scenario, from recipe to best checkpoint."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure

from agents.general_checkpoint import read_general_checkpoint
from env.scenario import Scenario, load_scenario
from env.simulator.machine import Variation
from training.general.attention_policy import AttentionPolicy
from training.general.best_lists import best_lists
from training.general.branched_ppo import BranchedPPO
from training.general.branching import Explorer
from training.general.fitting import fitting_device
from training.general.general_selection import run_selection
from training.general.machines import VIOLATION_PRICE, Setup
from training.general.price_fitting import fit
from training.general.setups import common_layout, drawn_scenarios, setups_of
from training.general.writing import restore, save_general
from training.ppo.training_run import variation_of
from training.recipe import GeneralRecipe, Prices


def train_general(
    recipe: GeneralRecipe, seed: int, folder: Path, resume: Path | None = None
) -> dict[str, float]:
    """
    Train one network on the scenarios of a recipe, writing TensorBoard and checkpoints.

    A fresh network begins by what random lists come to, if the recipe says so, and goes on by PPO.
    An interruption (Ctrl-C) of PPO ends the run after saving `last.zip`; one before it saves
    nothing.

    :param recipe: how to train, and on what
    :param seed: of everything random
    :param folder: of this run
    :param resume: a checkpoint for any scenario to go on from
    :return: the best checkpoint's figures on the selection traces, see `GeneralEvaluation`
    :raises InputError: if the checkpoint to resume does not fit
    """
    named = [load_scenario(name) for name in recipe.scenarios]
    scenarios = [*named, *drawn_scenarios("training", seed, recipe.family)]
    chosen_by = [*named, *drawn_scenarios("selection", 0, recipe.selection_family)]
    layout = common_layout([*scenarios, *chosen_by])
    judged = measured(setups_of(chosen_by, layout, Variation()), recipe, seed)
    begun = read_general_checkpoint(resume).metadata.get("steps", 0) if resume else 0
    setups = setups_of(scenarios, layout, variation_of(recipe))
    explorer = Explorer(setups, recipe.unprofiled, seed + begun, torch.get_num_threads())
    model = BranchedPPO(explorer=explorer, recipe=recipe, begun=begun, device="cpu", seed=seed)
    evaluation = GeneralEvaluation(judged, named, recipe, folder)
    if resume is not None:
        restore(model, resume)
    elif recipe.prices is not None:
        begin_by_prices(model.policy, explorer, recipe, recipe.prices, seed)
        save_general(model, folder / "fitted.zip", named, {})
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    print(
        f"PPO until {begun + recipe.steps} lists were tried; "
        f"TensorBoard: tensorboard --logdir {folder}",
        flush=True,
    )
    try:
        model.learn(recipe.steps, callback=evaluation, reset_num_timesteps=resume is None)
    except KeyboardInterrupt:
        print(f"interrupted at {model.num_timesteps} lists; saving {folder / 'last.zip'}")
    evaluation.init_callback(model)
    evaluation.evaluate()
    assert evaluation.best is not None
    return evaluation.best


def measured(setups: list[Setup], recipe: GeneralRecipe, seed: int) -> list[Setup]:
    """
    Find a good list for each of some setups, which episodes are measured by.

    :param setups: the scenarios; each setup's `baseline` becomes its list
    :param recipe: on how many traces lists are tried
    :param seed: of those
    """
    print(f"searching for a list for each of {len(setups)} scenarios", flush=True)
    explorer = Explorer(setups, 0.0, seed, torch.get_num_threads())
    for setup, one in zip(setups, best_lists(explorer, recipe.baseline_traces), strict=True):
        setup.baseline = int(one)
    return setups


def begin_by_prices(
    policy: AttentionPolicy, explorer: Explorer, recipe: GeneralRecipe, prices: Prices, seed: int
) -> None:
    """
    Fit a fresh policy to what random lists come to.

    :param policy: what learns
    :param explorer: plays the scenarios, those of the recipe first
    :param recipe: how often those are played
    :param prices: its section
    :param seed: of the order of minibatches
    """
    print(f"trying {prices.lists} lists at the start of {prices.episodes} episodes", flush=True)
    first = len(recipe.scenarios)
    playing = explorer.episodes(prices.episodes, first, recipe.scenarios_share)
    branches = explorer.first_branches(playing, prices.lists)
    print(f"fitting the network on {fitting_device()}", flush=True)
    lost = fit(policy, branches, np.random.default_rng([seed, 1]), prices)
    print(
        f"its lists take {100 * lost:.1f} % longer than the best of those tried "
        "(training traces, simulated)",
        flush=True,
    )


class GeneralEvaluation(BaseCallback):
    """
    Scores the policy on the selection traces of every scenario, and keeps the best.

    Where there are drawn scenarios these alone tell which is the best, by the mean of those whose
    jobs are all there at once and those whose jobs arrive; else the recipe's own do.

    :param setups: the scenarios to choose by; those of the recipe first
    :param named: the recipe's
    :param recipe: how often, and on how many traces
    :param folder: the run's folder
    """

    def __init__(
        self, setups: list[Setup], named: list[Scenario], recipe: GeneralRecipe, folder: Path
    ):
        super().__init__()
        self.setups, self.named = setups, named
        self.recipe, self.folder = recipe, folder
        self.best: dict[str, float] | None = None
        self._due = 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        # At the start of a rollout the policy is the one the last update left.
        if self.num_timesteps >= self._due:
            self._due = self.num_timesteps + self.recipe.evaluate_every
            self.evaluate()

    def evaluate(self) -> None:
        """Score the policy as it is now and save it."""
        model = self.model
        assert isinstance(model, BranchedPPO)
        first, written = len(self.named), {}
        of_named = run_selection(model.policy, self.setups[:first], self.recipe.selection_episodes)
        for scenario, summaries in zip(self.named, of_named, strict=True):
            written[scenario.name] = figures(summaries)
        drawn = self.setups[first:]
        if drawn:
            summaries = [one for (one,) in run_selection(model.policy, drawn, 1)]
            for arrive, name in ((False, "family"), (True, "family, arrivals")):
                of_kind = [
                    one
                    for one, setup in zip(summaries, drawn, strict=True)
                    if setup.scenario.has_arrivals == arrive
                ]
                if of_kind:
                    written[name] = figures(of_kind)
        names = [name for name in written if name.startswith("family")] or list(written)
        found = {
            name: float(np.mean([written[part][name] for part in names]))
            for name in ("over_baseline", "violation_ratio", "completed")
        }
        found["cost"] = found["over_baseline"] + VIOLATION_PRICE * found["violation_ratio"]
        said = "; ".join(
            f"{name} {one['over_baseline']:.3f}, {100 * one['violation_ratio']:.2f} %"
            for name, one in written.items()
        )
        print(
            f"{self.model.num_timesteps} lists tried: time over a good list's and violations: "
            f"{said} (selection traces, simulated)",
            flush=True,
        )
        for name, value in found.items():
            self.logger.record(f"selection/{name}", value)
        self.logger.dump(self.num_timesteps)
        save_general(model, self.folder / "last.zip", self.named, written)
        # Who leaves jobs undone is no choice, however fast elsewhere.
        if self.best is None or rank(found) < rank(self.best):
            self.best = found
            save_general(model, self.folder / "best.zip", self.named, written)


def rank(found: dict[str, float]) -> tuple[float, float]:
    """
    What checkpoints are ordered by, the best first: how many episodes are not done, then the cost.

    :param found: see `GeneralEvaluation`
    """
    return -found["completed"], found["cost"]


def figures(summaries: Iterable[dict[str, Any]]) -> dict[str, float]:
    """
    The mean figures of some episodes; times over the baseline's are averaged geometrically.

    :param summaries: see `training.general.general_selection.run_selection`
    """
    every = list(summaries)
    return {
        "over_baseline": float(np.exp(np.mean([np.log(one["over_baseline"]) for one in every]))),
        "violation_ratio": float(np.mean([one["violation_ratio"] for one in every])),
        "completed": float(np.mean([one["completed"] for one in every])),
    }
