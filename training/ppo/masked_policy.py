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
from torch import nn

from training.ppo.adam import Adam
from training.ppo.loss_kernels import (
    ILLEGAL_LOGIT,
    draw_actions,
    masked_log_probs,
    masked_log_probs_gradient,
)

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
        """
        The features, float32[B, n_features].

        :param observations: float32[B, n_features + n_actions]
        """
        return observations[:, : self.features_dim]


class MaskedLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies under the mask, with their gradient (`masked_log_probs`)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, observations: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The actions' log-probabilities and the distributions' entropies, each float32[B].

        :param ctx: torch's, keeps what `backward` needs
        :param logits: float32[B, A]
        :param observations: float32[B, n_features + A], with the mask at the end
        :param actions: int64[B]
        """
        probabilities = torch.empty_like(logits)
        offsets, log_probs, entropies = torch.empty(3, len(logits)).unbind()
        given = (logits, observations, actions)
        results = (probabilities, offsets, log_probs, entropies)
        masked_log_probs(*(x.detach().numpy() for x in given + results))
        ctx.save_for_backward(logits, probabilities, offsets, entropies, actions)
        return log_probs, entropies

    @staticmethod
    def backward(
        ctx: Any, by_log_probs: torch.Tensor, by_entropies: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        """
        The loss's slopes by the logits, float32[B, A]; the other inputs have none.

        :param ctx: torch's, with what `forward` has kept
        :param by_log_probs: float32[B], the loss's slopes by the log-probabilities
        :param by_entropies: float32[B], by the entropies
        """
        slopes = torch.empty_like(ctx.saved_tensors[0])
        by_results = (by_log_probs.contiguous(), by_entropies.contiguous())
        given = (*ctx.saved_tensors, *by_results, slopes)
        masked_log_probs_gradient(*(x.detach().numpy() for x in given))
        return slopes, None, None


class MaskedActorCriticPolicy(ActorCriticPolicy):
    """
    Stable-Baselines3's actor-critic over `Discrete` actions, with the mask applied.

    :param observation_space: Box of n_features + n_actions
    :param action_space: n_actions
    :param args: Stable-Baselines3's own, as `kwargs`
    :param kwargs: but for the features and the optimizer, which are set here
    """

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
        assert isinstance(self.action_net, nn.Linear)
        with torch.no_grad():
            self.action_net.bias[0] = KEEP_BIAS

    def forward(
        self, obs: torch.Tensor, deterministic: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Actions int64[B], values float32[B, 1] and log-probabilities float32[B], without gradients.

        :param obs: float32[B, n_features + n_actions]
        :param deterministic: take each state's likeliest action and draw none
        """
        if deterministic:
            actions = self.get_distribution(obs).mode()
            return actions, *self.evaluate_actions(obs, actions)[:2]
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        logits = self.action_net(latent_pi)
        actions = torch.empty(len(obs), dtype=torch.int64)
        log_probs = torch.empty(len(obs))
        luck = torch.rand(len(obs))
        draw_actions(*(x.detach().numpy() for x in (logits, obs, luck, actions, log_probs)))
        return actions, self.value_net(latent_vf), log_probs

    def evaluate_actions(
        self, obs: PyTorchObs, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Values float32[B, 1], log-probabilities and entropies float32[B] of given actions.

        :param obs: float32[B, n_features + n_actions]
        :param actions: int64[B]
        """
        assert isinstance(obs, torch.Tensor)
        latent_pi, latent_vf = self.mlp_extractor(self.extract_features(obs))
        log_probs, entropies = MaskedLogProbs.apply(self.action_net(latent_pi), obs, actions)
        return self.value_net(latent_vf), log_probs, entropies

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """
        The distribution over actions.

        :param obs: float32[B, n_features + n_actions]
        """
        assert isinstance(obs, torch.Tensor)
        features = self.extract_features(obs)
        assert isinstance(features, torch.Tensor)
        logits = self.action_net(self.mlp_extractor.forward_actor(features))
        legal = obs[:, self.features_dim :] > 0.5
        logits = torch.where(legal, logits, ILLEGAL_LOGIT)
        return self.action_dist.proba_distribution(action_logits=logits)


def linear_layers(policy: ActorCriticPolicy) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """
    The layers of a policy's actor and critic.

    :param policy: a policy with separate towers for actor and critic
    :return: the actor's layers and the critic's, each from input to output
    """
    extractor = policy.mlp_extractor
    towers = (
        [*extractor.policy_net, policy.action_net],
        [*extractor.value_net, policy.value_net],
    )
    actor, critic = ([m for m in tower if isinstance(m, nn.Linear)] for tower in towers)
    return actor, critic


def parameters(policy: ActorCriticPolicy) -> list[nn.Parameter]:
    """
    Weights and biases of a policy's actor and critic, layer by layer.

    :param policy: a policy with separate towers for actor and critic
    """
    actor, critic = linear_layers(policy)
    return [p for layer in actor + critic for p in layer.parameters()]
