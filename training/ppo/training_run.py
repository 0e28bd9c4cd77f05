"""One training run of PPO in the simulator, from recipe to best checkpoint."""

import math
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from agents.checkpoint import Checkpoint, read_checkpoint
from env.scenario import Scenario
from env.simulator.machine import EpisodeFactory, Variation
from env.simulator.vector_env import ColocationVecEnv
from training.imitation.expert import find_schedule
from training.imitation.fit_network import imitate
from training.ppo.callbacks import EpisodeLog, Evaluation, ProgressLine, TrainingTime
from training.ppo.masked_policy import MaskedActorCriticPolicy
from training.ppo.rollout_buffer import LeanRolloutBuffer
from training.ppo.selection import Score
from training.ppo.training_state import restore
from training.recipe import Imitation, Recipe, Training

SHARED_WITH_PPO = (
    "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range", "ent_coef", "vf_coef",
)  # fmt: skip
"""Fields of a recipe that are arguments of PPO, too."""


def new_model(
    recipe: Recipe,
    environments: VecEnv,
    seed: int,
    algorithm: type[PPO] = PPO,
    begun: int = 0,
) -> PPO:
    """
    A fresh model.

    :param recipe: hyperparameters
    :param environments: what it learns on
    :param seed: of weights and action sampling
    :param algorithm: stock PPO, or a faster class with the same interface
    :param begun: decisions before this run, if it goes on from another
    """
    return algorithm(
        MaskedActorCriticPolicy,
        environments,
        rollout_buffer_class=LeanRolloutBuffer,
        policy_kwargs={"net_arch": list(recipe.hidden), "activation_fn": torch.nn.ReLU},
        device="cpu",
        seed=seed,
        learning_rate=LinearSchedule(recipe, begun),
        **{name: getattr(recipe, name) for name in SHARED_WITH_PPO},
    )


def resumed_model(
    checkpoint: Checkpoint,
    recipe: Recipe,
    environments: VecEnv,
    seed: int,
    algorithm: type[PPO] = PPO,
) -> PPO:
    """
    A checkpoint's model, to go on with.

    It learns as the recipe says, not as it has learned so far, and its first episodes are new ones.

    :param checkpoint: what to go on from
    :param recipe: hyperparameters; the widths of the layers are the checkpoint's
    :param environments: what it learns on
    :param seed: of action sampling and, with the decisions so far, of the environments
    :param algorithm: stock PPO, or a faster class with the same interface
    :raises InputError: if the checkpoint cannot be trained further
    """
    same_layers = recipe.model_copy(update={"hidden": checkpoint.hidden})
    begun = checkpoint.metadata["steps"]
    model = new_model(same_layers, environments, seed, algorithm, begun=begun)
    restore(model, checkpoint)
    environments.seed(seed + model.num_timesteps)
    return model


def variation_of(recipe: Training) -> Variation:
    """
    How the episodes of a recipe differ.

    :param recipe: the recipe of the run
    """
    return Variation(
        physics=recipe.physics,
        interval_s=recipe.interval_s,
        least_load=recipe.least_load,
        most_load=recipe.most_load,
        error=recipe.error,
        error_share=recipe.error_share,
        unprobed=recipe.unprobed,
        stolen=recipe.stolen,
    )


class LinearSchedule:
    """
    Adam's step size, falling linearly over the run; a class, so that it can be pickled.

    :param recipe: the step size at both ends
    :param begun: decisions before this run; Stable-Baselines3 counts them in what remains
    """

    def __init__(self, recipe: Training, begun: int = 0):
        self.first, self.last = recipe.learning_rate, recipe.final_learning_rate
        self.left = recipe.steps / (recipe.steps + begun)

    def __call__(self, remaining: float) -> float:
        """
        The step size of an update.

        :param remaining: the part of all decisions that is still to come, from `left` to 0; less
            where the last rollout goes beyond what the recipe asks for
        """
        remaining = min(max(remaining, 0.0), self.left)
        return self.last + (self.first - self.last) * remaining / self.left


def _whole_rollouts(model: PPO, steps: int) -> int:
    """How many decisions training for `steps` takes: as many as the rollouts that hold them."""
    rollout = model.n_steps * model.n_envs
    return -(-steps // rollout) * rollout


def announce(model: PPO, steps: int, folder: Path, where: str = "") -> None:
    """
    Say on one line that training begins, how long it takes and where to watch it.

    :param model: what is trained
    :param steps: decisions that were asked for
    :param folder: of the run
    :param where: which machine it learns on, if that needs saying
    """
    decisions = _whole_rollouts(model, steps)
    rounded = "" if decisions == steps else f", whole rollouts ({steps} asked for)"
    print(
        f"training for {decisions} decisions{where}{rounded}; "
        f"TensorBoard: tensorboard --logdir {folder}",
        flush=True,
    )


def begin_by_imitating(
    model: PPO, factory: EpisodeFactory, recipe: Recipe, imitation: Imitation, seed: int
) -> None:
    """
    Find a schedule and fit a fresh model to the expert that follows it.

    :param model: what learns
    :param factory: the problem as the profile has it
    :param recipe: says how the machines differ on which the expert demonstrates
    :param imitation: the recipe's section
    :param seed: of everything random
    """
    print("searching for a schedule to imitate", flush=True)
    cost_s, schedule = find_schedule(factory, seed, imitation)
    print(
        f"imitating a schedule that costs {cost_s:.0f} s (training traces, simulated)", flush=True
    )
    environments = ColocationVecEnv(
        factory.scenario,
        imitation.n_envs,
        recipe.gamma,
        seed=seed,
        variation=variation_of(recipe),
    )
    imitate(model, environments, schedule, seed, imitation)


def train(
    scenario: Scenario,
    recipe: Recipe,
    seed: int,
    folder: Path,
    resume: Path | None = None,
    fast: bool = False,
    until_s: float = math.inf,
) -> Score:
    """
    Train, writing TensorBoard files and checkpoints into `folder`.

    An interruption (Ctrl-C) ends the run after saving `last.zip`.

    :param scenario: the problem
    :param recipe: how to train
    :param seed: of everything random
    :param folder: of this run
    :param resume: a checkpoint to go on from
    :param fast: train with `FastPPO`
    :param until_s: when to end in any case, on the monotonic clock [s]
    :return: the best score on the selection traces
    :raises InputError: if the checkpoint to resume does not fit
    """
    algorithm: type[PPO] = PPO
    if fast:
        from training.ppo.fast_ppo import FastPPO

        algorithm = FastPPO
    variation = variation_of(recipe)
    environments = ColocationVecEnv(
        scenario,
        recipe.n_envs,
        recipe.gamma,
        seed=seed,
        variation=variation,
        threads=torch.get_num_threads(),
    )
    plain = EpisodeFactory(scenario)
    varied = None if variation == Variation() else EpisodeFactory(scenario, variation=variation)
    if resume is not None:
        checkpoint = read_checkpoint(resume)
        checkpoint.require_scenario(scenario)
        model = resumed_model(checkpoint, recipe, environments, seed, algorithm)
    else:
        model = new_model(recipe, environments, seed, algorithm)
        if recipe.imitation is not None:
            begin_by_imitating(model, plain, recipe, recipe.imitation, seed)
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    warm = recipe.imitation is not None or resume is not None
    evaluation = Evaluation(plain, varied, recipe, folder, warm)
    if resume is not None:
        evaluation.keep(folder / "best.zip")
    end = model.num_timesteps + _whole_rollouts(model, recipe.steps)
    progress = ProgressLine(evaluation, end)
    try:
        announce(model, recipe.steps, folder)
        model.learn(
            recipe.steps,
            callback=CallbackList([EpisodeLog(), evaluation, progress, TrainingTime(until_s)]),
            reset_num_timesteps=resume is None,
        )
    except KeyboardInterrupt:
        progress.close()
        evaluation.init_callback(model)
        print(f"interrupted at {model.num_timesteps} decisions; saving {folder / 'last.zip'}")
    last = evaluation.evaluate()
    model.logger.dump(model.num_timesteps)
    best = evaluation.best or last
    if best < last:
        print(f"{folder / 'last.zip'} is worse than {folder / 'best.zip'}, which stays")
    return best
