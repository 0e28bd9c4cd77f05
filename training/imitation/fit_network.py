"""
The fit: a fresh network learns the expert's edits, and from their outcome what a state is worth.

In the first round the network only watches. From the second on it plays, and the expert says what
it should have done: so it learns the states that its own slips lead to (DAgger: Ross, Gordon,
Bagnell 2011). PPO then improves on both.
"""

from collections.abc import Iterator

import numpy as np
import torch
from stable_baselines3 import PPO
from torch import nn

from env.simulator.vector_env import ColocationVecEnv
from training.evaluation.schedule_search import Schedule
from training.imitation.demonstrations import Demonstrations
from training.recipe import Imitation


def imitate(
    model: PPO,
    environments: ColocationVecEnv,
    schedule: Schedule,
    seed: int,
    imitation: Imitation,
) -> None:
    """
    Fit a fresh model to an expert, round by round.

    :param model: what learns
    :param environments: the machines that the expert demonstrates on, and the model tries
    :param schedule: what the expert follows
    :param seed: of the expert's slips and the order of the minibatches
    :param imitation: how long, and with which hyperparameters
    """
    rng = np.random.default_rng([seed, imitation.n_steps])
    demonstrations = Demonstrations(environments, imitation)
    for turn, epochs in enumerate(imitation.epochs):
        demonstrations.demonstrate(schedule, rng, model if turn else None)
        if turn == 0:
            with torch.no_grad():
                mean_return = float(np.nanmean(demonstrations.dataset()[2]))
                model.policy.value_net.bias.fill_(mean_return)
        fit(model, demonstrations, epochs, rng)


def fit(model: PPO, demonstrations: Demonstrations, epochs: int, rng: np.random.Generator) -> None:
    """
    Fit a model to all demonstrations so far.

    :param model: its policy to the edits, its value to the returns
    :param demonstrations: what was shown
    :param epochs: passes over the demonstrations
    :param rng: of the order of the minibatches
    """
    observations, edits, returns = map(torch.from_numpy, demonstrations.dataset())
    policy, imitation = model.policy, demonstrations.imitation
    optimiser = torch.optim.Adam(policy.parameters(), imitation.learning_rate)
    batches = list(minibatches(len(edits), epochs, imitation.batch_size, rng))
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, len(batches))
    policy.set_training_mode(True)
    for rows in batches:
        values, log_prob, _ = policy.evaluate_actions(observations[rows], edits[rows])
        known = ~returns[rows].isnan()
        value_loss = nn.functional.mse_loss(values.flatten()[known], returns[rows][known])
        loss = model.vf_coef * value_loss - log_prob.mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), model.max_grad_norm)
        optimiser.step()
        decay.step()


def minibatches(
    count: int, epochs: int, batch_size: int, rng: np.random.Generator
) -> Iterator[torch.Tensor]:
    """
    Indices of all minibatches of all epochs.

    :param count: number of samples
    :param epochs: number of passes over the samples
    :param batch_size: samples of a minibatch; the last of an epoch may be smaller
    :param rng: source of the order
    """
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(count))
        yield from order.split(batch_size)
