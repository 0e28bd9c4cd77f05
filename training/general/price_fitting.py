"""
Learning what lists come to, in rounds (rollouts: Tesauro, Galperin 1996).

A list's price is what it comes to when it is followed to the end, though the network will choose
anew at each event. In the first round random lists are tried at the start of episodes. From the
second on the network plays, and lists are tried from states that it meets, above all those that it
thinks well of: where it is too hopeful, it is told so. What is fitted is by how much the lists of
one state differ, in logarithms; what they have in common is the state's and the luck's.
"""

import numpy as np
import torch
from torch import Tensor, nn

from training.general.attention_policy import AttentionPolicy
from training.general.branching import Branches, Explorer, together
from training.general.fitting import Fitting, fitting_device
from training.imitation.fit_network import minibatches
from training.recipe import Branching, Recipe

TEMPERATURE = 0.03
"""By how much a list's price is higher, as a logarithm, for its score to be lower by 1. So a list
that takes 3 % longer is drawn a third as often."""

HARD = 0.15
"""Beyond this difference to the best list, as a logarithm, it matters little how bad a list is."""

MOST = 1.1
"""Differences to the best list count as so much at most: three times as long."""


def learn_prices(
    policy: AttentionPolicy, explorer: Explorer, recipe: Recipe, rng: np.random.Generator
) -> None:
    """
    Fit a policy, round by round.

    :param policy: what learns
    :param explorer: plays the scenarios, those of the recipe first
    :param recipe: how long, and with which hyperparameters
    :param rng: of the order of minibatches
    """
    branching = recipe.branching
    assert branching is not None
    print(f"lists: the network is fitted on {fitting_device()}", flush=True)
    rounds: list[Branches] = []
    for turn, epochs in enumerate(branching.epochs):
        playing = explorer.episodes(
            branching.episodes, len(recipe.scenarios), recipe.scenarios_share
        )
        if turn == 0:
            rounds.append(explorer.first_branches(playing, branching.first_lists))
        else:
            rounds += explorer.met_branches(playing, policy, branching.lists)
        rounds = [together(rounds)]
        lost = fit(policy, rounds[0], epochs, rng, branching)
        print(
            f"lists, round {turn + 1}: {len(rounds[0].tokens)} states, the network's lists take "
            f"{100 * lost:.1f} % longer than the best of those tried in the last ones",
            flush=True,
        )


def fit(
    policy: AttentionPolicy,
    branches: Branches,
    epochs: int,
    rng: np.random.Generator,
    branching: Branching,
) -> float:
    """
    Fit the policy to all branches so far.

    :param policy: what learns
    :param branches: what lists came to
    :param epochs: passes over them
    :param rng: of the order
    :param branching: its hyperparameters
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

    def loss(rows: Tensor, scores: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        told = -TEMPERATURE * scores.gather(1, lists[rows])
        errors, weight = told - over[rows], weights[rows]
        errors = errors - (weight * errors).sum(dim=1, keepdim=True)
        taken = over[rows].gather(1, told.argmin(dim=1, keepdim=True))[:, 0]
        return (weight * errors.square()).sum(dim=1) / TEMPERATURE, taken

    optimiser = torch.optim.Adam(fitting.trained, branching.learning_rate)
    batches = list(minibatches(len(lists), epochs, branching.batch_size, rng))
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
