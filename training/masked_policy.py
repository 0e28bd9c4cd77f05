"""
An actor-critic whose illegal actions have probability zero.

The action mask is the last part of the observation, so stock PPO carries it through its rollout
buffer without knowing: sampling and evaluation see the same mask.
"""

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs

from training.adam import Adam

ILLEGAL_LOGIT = -1e8

KEEP_BIAS = 3.0
"""First logit of `keep` (action 0). Without it a fresh policy edits at almost every poll and time
hardly passes, so that it would see no episode end."""


class FeaturesWithoutMask(BaseFeaturesExtractor):
    """
    The observation without the action mask at its end.

    :param observation_space: Box of n_features + n_actions
    :param n_actions: length of the mask
    """

    def __init__(self, observation_space: spaces.Box, n_actions: int):
        super().__init__(observation_space, observation_space.shape[0] - n_actions)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """float32[B, n_features + n_actions] to float32[B, n_features]."""
        return observations[:, : self.features_dim]


class MaskedActorCriticPolicy(ActorCriticPolicy):
    """Stable-Baselines3's actor-critic over `Discrete` actions, with the mask applied."""

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Discrete,
        *args: Any,
        **kwargs: Any,
    ):
        kwargs["features_extractor_class"] = FeaturesWithoutMask
        kwargs["features_extractor_kwargs"] = {"n_actions": int(action_space.n)}
        kwargs["optimizer_class"] = Adam
        super().__init__(observation_space, action_space, *args, **kwargs)
        assert isinstance(self.action_net, torch.nn.Linear)
        with torch.no_grad():
            self.action_net.bias[0] = KEEP_BIAS

    def _masked(self, latent_pi: torch.Tensor, observations: torch.Tensor) -> Distribution:
        legal = observations[:, self.features_dim :] > 0.5
        logits = torch.where(legal, self.action_net(latent_pi), ILLEGAL_LOGIT)
        return self.action_dist.proba_distribution(action_logits=logits)

    def forward(
        self, obs: torch.Tensor, deterministic: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions, values and log-probabilities."""
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        distribution = self._masked(latent_pi, obs)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.value_net(latent_vf), distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: PyTorchObs, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values, log-probabilities and entropy of given actions."""
        assert isinstance(obs, torch.Tensor)
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        distribution = self._masked(latent_pi, obs)
        return self.value_net(latent_vf), distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """The distribution over actions."""
        assert isinstance(obs, torch.Tensor)
        features = self.extract_features(obs)
        assert isinstance(features, torch.Tensor)
        return self._masked(self.mlp_extractor.forward_actor(features), obs)
