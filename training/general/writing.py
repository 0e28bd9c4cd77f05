"""Writing and restoring checkpoints of a network for any scenario."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.array_archive import Arrays, read_arrays
from agents.checkpoint import FORMAT, MAX_ARRAY_BYTES, TRAINING_ENTRY, opened
from agents.general_checkpoint import read_general_checkpoint
from env.errors import InputError
from env.lists import menu
from env.scenario import Scenario, profile_hash
from env.sets.tokens import VERSION
from training.general.attention_policy import AttentionPolicy
from training.general.branched_ppo import BranchedPPO
from training.ppo.checkpoint_writing import write


def save_general(
    model: BranchedPPO, path: Path, scenarios: Sequence[Scenario], evaluation: dict[str, Any]
) -> None:
    """
    Write a checkpoint that `agents.general_checkpoint` reads.

    :param model: the trained model
    :param path: the file
    :param scenarios: what it was trained on
    :param evaluation: figures on the selection traces, by scenario
    :raises OSError: if it cannot be written; what was there before is untouched
    """
    metadata = {
        "format": FORMAT,
        "tokens_version": VERSION,
        "menu_version": menu.VERSION,
        "network": model.policy.widths,
        "scenarios": {one.name: profile_hash(one.profile) for one in scenarios},
        "steps": int(model.num_timesteps),
        "seed": model.seed,
        "evaluation": evaluation,
    }
    write(model, path, metadata, model.policy.network.arrays(), training_arrays(model.policy))


def training_arrays(policy: AttentionPolicy) -> Arrays:
    """
    Adam's moments and number of steps (0 before the first).

    :param policy: what is trained
    """
    arrays: Arrays = {}
    for name, parameter in policy.network.named_parameters():
        state = policy.optimizer.state.get(parameter)
        for kind, moment in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
            found = torch.zeros_like(parameter) if state is None else state[moment]
            arrays[f"adam_{kind}_{name.replace('.', '_')}"] = found.detach().numpy()
        arrays["adam_steps"] = np.array(0.0 if state is None else float(state["step"]), np.float32)
    return arrays


def restore(model: BranchedPPO, path: Path) -> None:
    """
    Continue where a checkpoint stopped: its weights, Adam's state, how many lists were tried.

    :param model: a new one of the same widths
    :param path: what to go on from
    :raises InputError: if the checkpoint does not fit
    """
    checkpoint = read_general_checkpoint(path)
    with opened(checkpoint.path) as archive:
        arrays = read_arrays(archive, TRAINING_ENTRY, MAX_ARRAY_BYTES) | checkpoint.arrays
    policy = model.policy
    expected = {name: one.shape for name, one in training_arrays(policy).items()}
    expected |= {name: one.shape for name, one in policy.network.arrays().items()}
    if {name: one.shape for name, one in arrays.items()} != expected:
        raise InputError(f"{path}: its network is not as wide as the recipe's")
    with torch.no_grad():
        for name, parameter in policy.network.named_parameters():
            plain = name.replace(".", "_")
            parameter.copy_(torch.from_numpy(arrays[plain]))
            policy.optimizer.state[parameter] = {
                "step": torch.tensor(float(arrays["adam_steps"])),
                "exp_avg": torch.from_numpy(arrays[f"adam_mean_{plain}"]),
                "exp_avg_sq": torch.from_numpy(arrays[f"adam_square_{plain}"]),
            }
    model.num_timesteps = int(checkpoint.metadata.get("steps", 0))
