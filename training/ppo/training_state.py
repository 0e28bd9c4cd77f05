"""
What a model needs to go on learning, besides its policy, as plain arrays.

`training_arrays` takes it from a model, `restore` puts it into a new one; the arrays are those of
`Checkpoint.read_training_arrays`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from stable_baselines3 import PPO
from torch import nn

from agents.array_archive import Arrays
from agents.checkpoint import Checkpoint
from training.ppo.masked_policy import linear_layers, parameters


def layer_arrays(layers: Sequence[nn.Linear], prefix: str = "") -> Arrays:
    """
    Weights and biases by name.

    :param layers: those of a network
    :param prefix: what the names begin with
    :return: `weight_i` float32[out, in] and `bias_i` float32[out] of each layer
    """
    arrays = {}
    for index, layer in enumerate(layers):
        arrays[f"{prefix}weight_{index}"] = layer.weight.detach().numpy()
        arrays[f"{prefix}bias_{index}"] = layer.bias.detach().numpy()
    return arrays


def training_arrays(model: PPO) -> Arrays:
    """
    The value network, and Adam's moments and number of steps (0 before the first).

    :param model: the model that is trained
    """
    _, critic = linear_layers(model.policy)
    trained, states = parameters(model.policy), model.policy.optimizer.state
    arrays = layer_arrays(critic, "value_")
    for name, moment in (("adam_mean", "exp_avg"), ("adam_square", "exp_avg_sq")):
        moments = [states[p][moment] if p in states else torch.zeros_like(p) for p in trained]
        arrays[name] = torch.cat([one.detach().flatten() for one in moments]).numpy()
    steps = [float(states[p]["step"]) for p in trained if p in states]
    arrays["adam_steps"] = np.array(max(steps, default=0.0), np.float32)
    return arrays


def restore(model: PPO, checkpoint: Checkpoint) -> None:
    """
    Continue where a checkpoint stopped: its weights, Adam's state, its number of decisions.

    :param model: a new one with layers of the checkpoint's widths
    :param checkpoint: what to go on from
    :raises InputError: if the checkpoint cannot be trained further
    """
    arrays = checkpoint.read_training_arrays()
    n_layers = len(checkpoint.layers)
    critic = [(arrays[f"value_weight_{i}"], arrays[f"value_bias_{i}"]) for i in range(n_layers)]
    weights = [array for layer in checkpoint.layers + critic for array in layer]
    trained = parameters(model.policy)
    with torch.no_grad():
        for parameter, array in zip(trained, weights, strict=True):
            parameter.copy_(torch.from_numpy(array))
    sizes = [p.numel() for p in trained]
    means, squares = (
        torch.from_numpy(arrays[name]).split(sizes) for name in ("adam_mean", "adam_square")
    )
    for parameter, mean, square in zip(trained, means, squares, strict=True):
        model.policy.optimizer.state[parameter] = {
            "step": torch.tensor(float(arrays["adam_steps"])),
            "exp_avg": mean.view_as(parameter).clone(),
            "exp_avg_sq": square.view_as(parameter).clone(),
        }
    model.num_timesteps = checkpoint.metadata["steps"]
