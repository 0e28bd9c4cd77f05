"""
How a fresh network begins: it learns what random lists come to.

Random lists are tried at the start of many episodes and followed to the end, a short search in each
scenario. What is fitted is by how much the lists of one state differ, in logarithms; what they have
in common is the scenario's and the luck's.
"""

import numpy as np
import torch
from torch import Tensor, nn

from training.general.attention_policy import AttentionPolicy
from training.general.branching import Branches
from training.general.fitting import Fitting, fitting_device
from training.imitation.fit_network import minibatches
from training.recipe import Prices

TEMPERATURE = 0.03
"""By how much a list's price is higher, as a logarithm, for its score to be lower by 1. So a list
that takes 3 % longer is drawn a third as often."""

HARD = 0.15
"""Beyond this difference to the best list, as a logarithm, it matters little how bad a list is."""

MOST = 1.1
"""Differences to the best list count as so much at most: three times as long."""


def fit(
    policy: AttentionPolicy, branches: Branches, rng: np.random.Generator, prices: Prices
) -> float:
    """
    Fit a policy to what lists came to.

    :param policy: what learns
    :param branches: what lists came to
    :param rng: of the order of minibatches
    :param prices: hyperparameters
    :return: what the best-scored list of each state took over the best, of those tried, a mean
        logarithm over the last minibatches
    """
    device = fitting_device()
    lists = torch.from_numpy(branches.lists).to(device)
    over = torch.from_numpy(branches.prices).to(device)
    over = (over - over.min(dim=1, keepdim=True).values).clamp(max=MOST)
    weights = torch.exp(-over / HARD) + 0.1
    weights /= weights.sum(dim=1, keepdim=True)
    tokens = torch.from_numpy(branches.tokens)
    fitting = Fitting(policy, tokens, device, padded=device.type != "cpu")

    def loss(rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        told = -TEMPERATURE * scores.gather(1, lists[rows])
        errors, weight = told - over[rows], weights[rows]
        errors = errors - (weight * errors).sum(dim=1, keepdim=True)
        taken = over[rows].gather(1, told.argmin(dim=1, keepdim=True))[:, 0]
        return (weight * errors.square()).sum(dim=1) / TEMPERATURE, taken

    optimiser = torch.optim.Adam(fitting.trained, prices.learning_rate)
    batches = list(minibatches(len(lists), prices.epochs, prices.batch_size, rng))
    decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, len(batches))
    policy.set_training_mode(True)
    taken: list[Tensor] = []
    for rows in batches:
        taken.append(fitting.differentiate(rows, loss))
        nn.utils.clip_grad_norm_(fitting.trained, 1.0)
        optimiser.step()
        decay.step()
    fitting.hand_back()
    policy.set_training_mode(False)
    return float(torch.stack(taken[-50:]).mean())
