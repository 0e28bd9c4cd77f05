"""Writing checkpoints: a Stable-Baselines3 zip that the live agent can read without torch."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from agents.array_archive import Arrays
from agents.checkpoint import FORMAT, METADATA_ENTRY, TRAINING_ENTRY, WEIGHTS_ENTRY
from agents.ppo.network import MaskedNetwork
from env.action import edit_table
from env.observation import VERSION, feature_count
from env.physics.parameters import WORK_S
from env.scenario import Scenario
from env.simulator.profile import Profile
from training.ppo.masked_policy import linear_layers
from training.ppo.training_state import layer_arrays, training_arrays


def network_of(model: PPO) -> MaskedNetwork:
    """
    The policy as the live agent will run it.

    :param model: the trained model
    """
    actor, _ = linear_layers(model.policy)
    return MaskedNetwork([(x.weight.detach().numpy(), x.bias.detach().numpy()) for x in actor])


def describe(
    model: PPO, scenario: Scenario, profile: Profile, evaluation: dict[str, Any]
) -> dict[str, Any]:
    """
    The metadata of a checkpoint.

    :param model: the trained model
    :param scenario: what it was trained on
    :param profile: the physics it was trained on
    :param evaluation: figures on the selection traces
    """
    table = edit_table(scenario)
    work = profile.job_array(scenario.job_names)[:, WORK_S]
    return {
        "format": FORMAT,
        "observation_version": VERSION,
        "scenario": scenario.name,
        "scenario_content": scenario.model_dump(mode="json"),
        "features": feature_count(scenario),
        "actions": [table.describe(edit) for edit in range(len(table))],
        "job_work_s": dict(zip(scenario.job_names, work.tolist(), strict=True)),
        "profile": {"name": profile.name, "hash": profile.hash, "fit_error": profile.fit_error},
        "steps": int(model.num_timesteps),
        "seed": model.seed,
        "evaluation": evaluation,
    }


def save_checkpoint(model: PPO, path: Path, metadata: dict[str, Any]) -> None:
    """
    Write a checkpoint so that a crash or a full disk never leaves half of one behind.

    :param model: the trained model
    :param path: the file; an older checkpoint there is replaced in one step
    :param metadata: see `describe`
    :raises OSError: if it cannot be written; what was there before is untouched
    """
    actor, _ = linear_layers(model.policy)
    write(model, path, metadata, layer_arrays(actor), training_arrays(model))


def write(
    model: BaseAlgorithm, path: Path, metadata: dict[str, Any], weights: Arrays, training: Arrays
) -> None:
    """
    Write a checkpoint's file, as `save_checkpoint` does, of whatever network.

    :param model: the trained model
    :param path: the file
    :param metadata: what it was trained for
    :param weights: of the policy
    :param training: what else is needed to go on
    :raises OSError: if it cannot be written; what was there before is untouched
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w+b") as file:
            model.save(file, exclude=("_last_obs", "_last_episode_starts"))  # 1 MB, never read
            with zipfile.ZipFile(file, "a") as archive:
                archive.writestr(METADATA_ENTRY, json.dumps(metadata, indent=1))
                archive.writestr(WEIGHTS_ENTRY, _npz(weights))
                archive.writestr(TRAINING_ENTRY, _npz(training))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _npz(arrays: Arrays) -> bytes:
    """The content of a `.npz` file."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()
