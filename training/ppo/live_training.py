"""Training on this machine itself: the live environment, and PPO that goes on learning on it."""

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv

from agents.checkpoint import read_checkpoint
from deploy.linux.machine_lock import runtime_folder
from deploy.live_episodes import LiveBackend
from deploy.settings import Settings
from env.colocation import ColocationEnv
from env.errors import InputError
from env.inputs.commandline import address, require_folder
from env.scenario import Scenario, load_scenario
from env.simulator.profile import load_profile
from training.ppo.callbacks import EpisodeLog
from training.ppo.checkpoint_writing import describe, save_checkpoint
from training.ppo.training_run import announce, new_model, resumed_model
from training.recipe import Recipe

RECENT = 20
"""How many episodes a checkpoint's figures are the means of."""


def live_environment(
    scenario: str | Scenario = "cca-2025",
    gamma: float = 1.0,
    memcached: str = "127.0.0.1:11211",
    runtime: str = "docker",
    docker: str | None = None,
    privileged: bool = False,
    state: Path | str | None = None,
    report: Path | str = "runs/vm",
) -> ColocationEnv:
    """
    This machine as an environment, `coretide/ColocationVM-v0`; see `deploy.live_episodes`.

    memcached must be under load; a step lasts until the next decision, 25 ms to 1 s. An episode
    begins with no job started and ends with the machine as it was found; so do `close` and any
    exception.

    :param scenario: a shipped scenario's name, a YAML file, or a `Scenario`
    :param gamma: the trainer's discount, for the shaping term
    :param memcached: its address, HOST:PORT
    :param runtime: of the jobs: docker or process
    :param docker: address of the Docker daemon; the environment's own if none is given
    :param privileged: whether containers get Docker's default rights
    :param state: folder of what `deploy.py --restore` needs; the same as its own if none is given
    :param report: folder of the episodes' event logs
    :raises InputError: if the scenario or the address is none
    """
    problem = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    try:
        host, port = address(memcached)
    except ArgumentTypeError as error:
        raise InputError(f"memcached: {error}") from error
    settings = Settings(
        host=host,
        port=port,
        runtime=runtime,
        docker=docker,
        privileged=privileged,
        folder=Path(state or runtime_folder()),
        report=Path(report),
    )
    return ColocationEnv(problem, gamma, LiveBackend(problem, settings))


def train_live(
    scenario: Scenario,
    recipe: Recipe,
    seed: int,
    folder: Path,
    settings: Settings,
    resume: Path | None = None,
) -> dict[str, Any]:
    """
    Train on this machine; `last.zip` in `folder` is written after every update.

    An interruption (Ctrl-C) ends the run in good order; the machine is left as it was found.

    :param scenario: the problem
    :param recipe: how to train; one machine, whatever its `n_envs`
    :param seed: of weights and action sampling
    :param folder: of this run
    :param settings: names memcached's address and the jobs' runtime
    :param resume: a checkpoint to go on from, with the recipe's hyperparameters
    :return: figures of the last episodes, measured
    :raises InputError: if the checkpoint or the machine does not fit
    """
    torch.set_num_threads(1)  # the other vCPUs are the machine's that is learned on
    checkpoint = None if resume is None else read_checkpoint(resume)
    if checkpoint is not None:
        checkpoint.require_scenario(scenario)
    environments = DummyVecEnv(
        [lambda: ColocationEnv(scenario, recipe.gamma, LiveBackend(scenario, settings))]
    )
    require_folder(folder)
    if checkpoint is None:
        model = new_model(recipe, environments, seed)
    else:
        model = resumed_model(checkpoint, recipe, environments, seed)
    model.set_logger(configure(str(folder / "tensorboard"), ["tensorboard"]))
    record = LiveRecord(scenario, recipe, folder)
    warm_up(model)
    try:
        announce(model, recipe.steps, folder, " on this machine")
        model.learn(
            recipe.steps,
            callback=CallbackList([EpisodeLog(), record]),
            reset_num_timesteps=resume is None,
        )
        record.save()
    except KeyboardInterrupt:
        print(f"interrupted at {model.num_timesteps} decisions; last.zip has the last update")
    finally:
        environments.close()
    return record.figures()


def warm_up(model: PPO) -> None:
    """
    Have a decision and its gradient compiled now: later, jobs would run undecided meanwhile.

    :param model: the model that will be trained
    """
    shape = model.observation_space.shape
    assert shape is not None
    observation = torch.ones((1, *shape))
    actions, _, _ = model.policy(observation)
    values, log_probs, _ = model.policy.evaluate_actions(observation, actions)
    (values.sum() + log_probs.sum()).backward()
    model.policy.optimizer.zero_grad()


class LiveRecord(BaseCallback):
    """
    Says how each episode went, and keeps the policy.

    :param scenario: the problem
    :param recipe: how it is trained
    :param folder: folder of `last.zip`
    """

    def __init__(self, scenario: Scenario, recipe: Recipe, folder: Path):
        super().__init__()
        self._scenario, self._recipe, self._folder = scenario, recipe, folder
        self._summaries: list[dict[str, Any]] = []

    def figures(self) -> dict[str, Any]:
        """Means over the last episodes, and how many there were."""
        recent = self._summaries[-RECENT:]
        names = ("makespan_s", "violation_ratio", "completed") if recent else ()
        means = {name: float(np.mean([one[name] for one in recent])) for name in names}
        return {"traces": "this machine's load, measured", "episodes": len(recent), **means}

    def save(self) -> None:
        """Write `last.zip`."""
        assert isinstance(self.model, PPO)
        profile = load_profile(self._scenario.profile)
        metadata = describe(self.model, self._scenario, profile, self.figures())
        metadata["recipe"] = self._recipe.model_dump(mode="json")
        save_checkpoint(self.model, self._folder / "last.zip", metadata)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode_summary" in info:
                self._note(info["episode_summary"])
        return True

    def _on_rollout_start(self) -> None:
        # At the start of a rollout the policy is the one the last update left.
        self.save()

    def _note(self, summary: dict[str, Any]) -> None:
        self._summaries.append(summary)
        how = "" if summary["completed"] else ", cut off"
        print(
            f"{self.num_timesteps} decisions: {summary['makespan_s']:.1f} s{how}, "
            f"{summary['violations']} of {summary['intervals']} intervals violated (measured)",
            flush=True,
        )
