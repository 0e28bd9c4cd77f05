"""A checkpoint's model goes on learning where it stopped, and nothing is unpickled for that."""

import time
import zipfile

import pytest
import torch
from stable_baselines3 import PPO

from agents.checkpoint import CHECKPOINT_FOLDER, read_checkpoint
from agents.general_checkpoint import is_general
from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from training.ppo.masked_policy import parameters
from training.ppo.training_run import LinearSchedule, resumed_model, train
from training.recipe import load_recipe

BEST = CHECKPOINT_FOLDER / "best.zip"
SHIPPED = [path for path in sorted(CHECKPOINT_FOLDER.glob("*.zip")) if not is_general(path)]
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


def test_a_run_of_few_steps_says_that_it_takes_whole_rollouts(tmp_path, capsys):
    """Its only update is as small as the recipe's last, so that the policy stays as good."""
    short = SMALL.model_copy(update={"steps": 100, "learning_rate": 0.3})
    train(load_scenario("cca-2025"), short, 1, tmp_path, resume=BEST)
    steps = read_checkpoint(BEST).metadata["steps"] + 512
    said = capsys.readouterr().out
    assert "training for 512 decisions, whole rollouts (100 asked for)" in said
    assert f"{steps}/{steps}" in said
    last = read_checkpoint(tmp_path / "last.zip").metadata
    assert last["steps"] == steps
    assert last["evaluation"]["makespan_s"] < 600.0


def test_what_is_resumed_stays_the_best_until_it_is_beaten(tmp_path, capsys):
    """An update much too large makes a bad policy of it, which is said."""
    large = SMALL.model_copy(update={"final_learning_rate": 0.3})
    best = train(load_scenario("cca-2025"), large, 1, tmp_path, resume=BEST)
    assert best.makespan_s < 600.0
    assert "last.zip is worse than" in capsys.readouterr().out
    kept, resumed = (read_checkpoint(path) for path in (tmp_path / "best.zip", BEST))
    assert kept.metadata["steps"] == resumed.metadata["steps"]
    assert (kept.layers[0][0] == resumed.layers[0][0]).all()


def test_training_that_is_out_of_time_ends_within_a_rollout(tmp_path):
    """As `training.refine` has it: its three minutes hold on a slow machine, too."""
    many = SMALL.model_copy(update={"steps": 50 * SMALL.n_envs * SMALL.n_steps})
    train(load_scenario("cca-2025"), many, 1, tmp_path, resume=BEST, until_s=time.monotonic())
    begun, ended = (read_checkpoint(path) for path in (BEST, tmp_path / "last.zip"))
    done = ended.metadata["steps"] - begun.metadata["steps"]
    assert 0 < done < SMALL.n_envs * SMALL.n_steps


def test_the_step_size_stays_between_its_ends():
    recipe = SMALL.model_copy(update={"learning_rate": 0.1, "final_learning_rate": 0.01})
    for begun in (0, 10_000):
        step_size = LinearSchedule(recipe, begun)
        assert step_size(1.0) == step_size(step_size.left) == pytest.approx(0.1)
        assert step_size(0.0) == step_size(-64.5) == 0.01
