"""
The network while it is fitted to what lists came to: on a GPU where there is one, else on the CPU.

A GPU is given padded sets (`training.general.padded_network`); on the CPU, where packed ones cost
less, threads share each minibatch.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from env.simulator.thread_pool import ThreadPool
from training.general.attention import Sets
from training.general.attention_policy import AttentionPolicy
from training.general.padded_network import padded_scores
from training.ppo.fast_ppo import one_core, one_core_each

ROWS_A_THREAD = 64
"""States that a thread takes through the network at once. Fewer cost more in Python's calls than a
further thread brings; a minibatch of 128 keeps two threads busy."""

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of decisions int64[B] and their scores (`Fitting.scores`): what each costs, float32[B], and
something else of each to be told the mean of."""


def fitting_device() -> torch.device:
    """Where networks are fitted: on CUDA's first GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Fitting:
    """
    A policy's network and the decisions that it is fitted to.

    :param policy: what learns; with padded sets it does when `hand_back` is called
    :param observations: float32[n, size], of the decisions
    :param device: where
    :param padded: whether sets are padded, as a GPU likes them; else the CPU's packed kernels work
    """

    def __init__(
        self, policy: AttentionPolicy, observations: Tensor, device: torch.device, padded: bool
    ):
        self.policy, self.device, self._observations = policy, device, observations
        self._padded = padded
        self.network = copy.deepcopy(policy.network).to(device) if padded else policy.network
        self.trained = list(self.network.parameters())
        self._pool = ThreadPool(1 if padded else torch.get_num_threads(), one_core)

    def scores(self, rows: Tensor) -> Tensor:
        """
        Scores float32[B, n_lists], not yet masked.

        :param rows: int64[B], some of the decisions
        """
        observations = self._observations[rows]
        if self._padded:
            layout = self.policy.layout
            return padded_scores(self.network, observations.to(self.device), layout)
        scores: Tensor = self.network(Sets(observations.numpy(), self.policy.layout))
        return scores

    def differentiate(self, rows: Tensor, loss: Loss) -> Tensor:
        """
        Compute the gradient of some decisions' mean loss, into the weights' `grad`.

        On the CPU, threads share the decisions. How they are cut does not depend on the threads,
        so neither do the sums.

        :param rows: int64[B], which decisions
        :param loss: what each of them costs
        :return: the mean of what `loss` tells beside that
        """
        pieces = [rows] if self._padded else rows.split(ROWS_A_THREAD)
        gradients: list[tuple[Tensor, ...]] = [()] * len(pieces)
        told = torch.zeros(len(pieces), device=self.device)

        def of_piece(number: int) -> None:
            losses, also = loss(pieces[number], self.scores(pieces[number]))
            gradients[number] = torch.autograd.grad(losses.sum() / len(rows), self.trained)
            told[number] = also.detach().sum() / len(rows)

        with one_core_each():
            self._pool.share(of_piece, range(len(pieces)))
        for weight, *parts in zip(self.trained, *gradients, strict=True):
            weight.grad = torch.stack(parts).sum(0)
        return told.sum()

    def hand_back(self) -> None:
        """Give the policy what was learned."""
        if self._padded:
            self.policy.network.load_state_dict(self.network.state_dict())
