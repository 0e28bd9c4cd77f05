"""A checkpoint's model goes on learning where it stopped, and nothing is unpickled for that."""

import zipfile

import pytest
import torch
from stable_baselines3 import PPO

from agents.checkpoint import CHECKPOINT_FOLDER, read_checkpoint
from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from training.ppo.masked_policy import parameters
from training.ppo.training_run import resumed_model, train
from training.recipe import load_recipe

SHIPPED = sorted(CHECKPOINT_FOLDER.glob("*.zip"))
SMALL = load_recipe("default").model_copy(
    update={
        "n_envs": 16,
        "n_steps": 32,
        "batch_size": 256,
        "steps": 512,
        "selection_episodes": 1,
    }
)


def resumed(path):
    checkpoint = read_checkpoint(path)
    scenario = load_scenario(checkpoint.metadata["scenario"])
    environments = ColocationVecEnv(scenario, SMALL.n_envs, SMALL.gamma, seed=1)
    return resumed_model(checkpoint, SMALL, environments, 1)


def learning_state(model):
    """Every weight, and Adam's moments and steps for it."""
    for parameter in parameters(model.policy):
        yield parameter.detach()
        yield from model.policy.optimizer.state[parameter].values()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_checkpoint_goes_on_learning(path, tmp_path):
    metadata = read_checkpoint(path).metadata
    train(load_scenario(metadata["scenario"]), SMALL, 1, tmp_path, resume=path)
    assert read_checkpoint(tmp_path / "last.zip").metadata["steps"] == metadata["steps"] + 512


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_resumed_is_what_stable_baselines3_would_load(path):
    ours, theirs = resumed(path), PPO.load(path, device="cpu")
    assert ours.num_timesteps == theirs.num_timesteps
    if ours.num_timesteps:
        torch.testing.assert_close(
            list(learning_state(ours)), list(learning_state(theirs)), rtol=0.0, atol=0.0
        )


def test_a_new_checkpoint_keeps_adams_state(tmp_path):
    train(load_scenario("cca-2025"), SMALL, 1, tmp_path)
    first = resumed(tmp_path / "last.zip")
    assert float(first.policy.optimizer.state[parameters(first.policy)[0]]["step"]) > 0.0
    ours, theirs = list(learning_state(first)), PPO.load(tmp_path / "last.zip", device="cpu")
    torch.testing.assert_close(ours, list(learning_state(theirs)), rtol=0.0, atol=0.0)


def test_resuming_reads_nothing_that_could_be_a_pickle(tmp_path):
    path = tmp_path / "half.zip"
    with zipfile.ZipFile(SHIPPED[0]) as whole, zipfile.ZipFile(path, "w") as half:
        for name in whole.namelist():
            ours = name.startswith("coretide/")
            half.writestr(name, whole.read(name) if ours else b"\x80\x04cos\nabort\n(tR.")
    expected, got = learning_state(resumed(SHIPPED[0])), learning_state(resumed(path))
    torch.testing.assert_close(list(got), list(expected), rtol=0.0, atol=0.0)
