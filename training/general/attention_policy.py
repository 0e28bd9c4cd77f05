"""The attention network as a Stable-Baselines3 policy, and its part in `FastPPO`."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from env.sets.tokens import Layout
from training.general.attention import AttentionNetwork, Sets
from training.ppo.adam import Adam
from training.ppo.fast_ppo import FastPPO
from training.ppo.loss_kernels import ILLEGAL_LOGIT, draw_actions
from training.ppo.masked_policy import MaskedLogProbs


class AttentionPolicy(ActorCriticPolicy):
    """
    An actor-critic over list schedules, of which only legal ones are taken; the tokens say which.

    :param observation_space: Box of the layout's size
    :param action_space: Discrete of the lists
    :param lr_schedule: Adam's step size
    :param layout: of the tokens
    :param network: widths, see `AttentionNetwork`
    :param kwargs: Stable-Baselines3's own
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        layout: Layout,
        network: dict[str, int] | None = None,
        **kwargs: Any,
    ):
        self.layout, self.widths = layout, network or {}
        kwargs["optimizer_class"] = Adam
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        self.network = AttentionNetwork(**self.widths)
        self.optimizer = Adam(self.network.parameters(), lr_schedule(1))

    def _sets(self, obs: PyTorchObs) -> Sets:
        assert isinstance(obs, Tensor)
        return Sets(obs.numpy(), self.layout)

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """
        Lists int64[B], values float32[B, 1] and log-probabilities float32[B], without gradients.

        :param obs: float32[B, size]
        :param deterministic: take each state's likeliest list and draw none
        """
        if deterministic:
            with torch.no_grad():
                actions = self.get_distribution(obs).mode()
                return actions, *self.evaluate_actions(obs, actions)[:2]
        sets = self._sets(obs)
        with torch.no_grad():
            logits, values = self.network(sets)
        actions, log_probs = torch.empty(len(obs), dtype=torch.int64), torch.empty(len(obs))
        luck = torch.rand(len(obs)).numpy()
        draw_actions(logits.numpy(), sets.legal, luck, actions.numpy(), log_probs.numpy())
        return actions, values, log_probs

    def evaluate_actions(
        self, obs: PyTorchObs, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """
        Values float32[B, 1], log-probabilities and entropies float32[B] of given lists.

        :param obs: float32[B, size]
        :param actions: int64[B]
        """
        sets = self._sets(obs)
        logits, values = self.network(sets)
        legal = torch.from_numpy(sets.legal)
        log_probs, entropies = MaskedLogProbs.apply(logits, legal, actions)
        return values, log_probs, entropies

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """
        The distribution over lists.

        :param obs: float32[B, size]
        """
        sets = self._sets(obs)
        logits, _ = self.network(sets)
        legal = torch.from_numpy(sets.legal) > 0.5
        return self.action_dist.proba_distribution(torch.where(legal, logits, ILLEGAL_LOGIT))

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """
        Values float32[B, 1].

        :param obs: float32[B, size]
        """
        values: Tensor = self.network(self._sets(obs))[1]
        return values

    def scores(self, observations: np.ndarray) -> np.ndarray:
        """
        The scores of all lists, float32[B, n_lists]; -inf for those that mean nothing.

        :param observations: float32[B, size]
        """
        sets = Sets(observations, self.layout)
        with torch.no_grad():
            scores, _ = self.network(sets)
        return np.where(sets.legal > 0.5, scores.numpy(), -np.inf)

    def best(self, observations: np.ndarray) -> np.ndarray:
        """
        The lists that the deployed network would choose, int64[B].

        :param observations: float32[B, size]
        """
        best: np.ndarray = self.scores(observations).argmax(1)
        return best


class AttentionWorker:
    """
    The network as one thread of `FastPPO` uses it.

    :param policy: holds the weights
    """

    def __init__(self, policy: AttentionPolicy):
        self._policy = policy
        self._trained = list(policy.network.parameters())
        self.masks = np.empty((0, 0), np.float32)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """
        Logits float32[B, A], not yet masked, and values float32[B, 1].

        :param observations: float32[B, size]
        """
        sets = Sets(observations.numpy(), self._policy.layout)
        with torch.set_grad_enabled(self._policy.training):
            self._outputs = self._policy.network(sets)
        self.masks = sets.legal
        logits, values = self._outputs
        return logits.detach(), values.detach()

    def backward(self, by_logits: Tensor, by_values: Tensor, gradients: list[Tensor]) -> None:
        """
        Compute the gradient.

        :param by_logits: float32[B, A], slopes of the loss
        :param by_values: float32[B, 1]
        :param gradients: receive those of all weights and biases
        """
        found = torch.autograd.grad(self._outputs, self._trained, (by_logits, by_values))
        for gradient, one in zip(gradients, found, strict=True):
            gradient.copy_(one)


class GeneralPPO(FastPPO):
    """`FastPPO` for an `AttentionPolicy`."""

    # Stable-Baselines3 has no wider type that both networks share, nor have their workers one.
    policy: AttentionPolicy  # type: ignore[assignment]

    def _suits(self) -> bool:
        return isinstance(self.policy, AttentionPolicy)

    def _worker(self) -> AttentionWorker:  # type: ignore[override]
        return AttentionWorker(self.policy)

    def _trained(self) -> list[torch.nn.Parameter]:
        return list(self.policy.network.parameters())
