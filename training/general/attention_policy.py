"""The attention network as a Stable-Baselines3 policy."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from env.sets.tokens import Layout
from training.general.attention import AttentionNetwork, Sets
from training.ppo.adam import Adam


class AttentionPolicy(BasePolicy):
    """
    Chooses among list schedules those that mean something; the tokens say which do.

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
        super().__init__(observation_space, action_space, **kwargs)
        self.layout, self.widths = layout, network or {}
        self.network = AttentionNetwork(**self.widths)
        self.optimizer = Adam(self.network.parameters(), lr_schedule(1))

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        assert isinstance(observation, Tensor)
        scores = self.scores(observation.numpy())
        if not deterministic:
            scores += -torch.empty(scores.shape).exponential_().log().numpy()  # Gumbel's luck
        return torch.from_numpy(scores.argmax(1))

    def scores(self, observations: np.ndarray) -> np.ndarray:
        """
        The scores of all lists, float32[B, n_lists]; -inf for those that mean nothing.

        :param observations: float32[B, size]
        """
        sets = Sets(observations, self.layout)
        with torch.no_grad():
            scores = self.network(sets)
        return np.where(sets.legal > 0.5, scores.numpy(), -np.inf)

    def best(self, observations: np.ndarray) -> np.ndarray:
        """
        The lists that the deployed network would choose, int64[B].

        :param observations: float32[B, size]
        """
        best: np.ndarray = self.scores(observations).argmax(1)
        return best
