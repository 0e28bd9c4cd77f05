"""The masked policy's compiled softmax against torch's distributions, and its rollout buffer."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from torch.distributions import Categorical

from training.ppo.loss_kernels import draw_actions
from training.ppo.masked_policy import ILLEGAL_LOGIT, MaskedActorCriticPolicy
from training.ppo.rollout_buffer import LeanRolloutBuffer

N_FEATURES = 5


def observations(n, n_actions, seed=0):
    """Random features and masks with at least one legal action each."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, n_actions)) < 0.3
    mask[np.arange(n), rng.integers(n_actions, size=n)] = True
    features = rng.normal(size=(n, N_FEATURES))
    return torch.from_numpy(np.hstack([features, mask]).astype(np.float32))


def new_policy(n_actions):
    torch.manual_seed(0)
    policy = MaskedActorCriticPolicy(
        spaces.Box(-np.inf, np.inf, (N_FEATURES + n_actions,), np.float32),
        spaces.Discrete(n_actions),
        lambda _: 1e-3,
        net_arch=[16],
    )
    with torch.no_grad():
        policy.action_net.weight *= 300.0  # far from uniform
    return policy


def torchs_distribution(policy, seen):
    features = seen[:, :N_FEATURES]
    logits = policy.action_net(policy.mlp_extractor.forward_actor(features))
    return Categorical(logits=torch.where(seen[:, N_FEATURES:] > 0.5, logits, ILLEGAL_LOGIT))


@pytest.mark.parametrize("n_actions", [2, 31, 32, 33, 87])
def test_log_probabilities_entropies_and_gradients_are_torchs(n_actions):
    policy, seen = new_policy(n_actions), observations(200, n_actions)
    expected = torchs_distribution(policy, seen)
    actions = expected.sample()
    slopes = torch.randn(2, 200)

    results = []
    values, *compiled = policy.evaluate_actions(seen, actions)
    for log_probs, entropies in (compiled, (expected.log_prob(actions), expected.entropy())):
        policy.zero_grad()
        (slopes * torch.stack([log_probs, entropies])).sum().backward(retain_graph=True)
        gradients = [p.grad.clone() for p in policy.action_net.parameters()]
        results.append([log_probs, entropies, *gradients])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, policy.predict_values(seen))


def test_rollout_knows_the_probability_of_what_it_draws():
    policy, seen = new_policy(87), observations(500, 87)
    with torch.no_grad():
        for deterministic in (False, True):
            actions, values, log_probs = policy(seen, deterministic=deterministic)
            expected = policy.evaluate_actions(seen, actions)
            torch.testing.assert_close((values, log_probs), expected[:2])
            assert seen[:, N_FEATURES:].gather(1, actions[:, None]).all()
        assert (actions == torchs_distribution(policy, seen).probs.argmax(1)).all()


@pytest.mark.parametrize("scale", [2.0, 30.0])
def test_actions_are_legal_and_drawn_as_the_logits_say(scale):
    rng = np.random.default_rng(0)
    n, n_actions = 200_000, 7
    logits = np.tile(rng.normal(0.0, scale, n_actions).astype(np.float32), (n, 1))
    masks = np.tile(np.array([0, 1, 1, 0, 1, 1, 0], np.float32), (n, 1))
    logits[:, 0] = 50.0
    luck = rng.random(n, dtype=np.float32)
    luck[:2] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    actions, log_probs = np.zeros(n, np.int64), np.zeros(n, np.float32)
    draw_actions(logits, masks, luck, actions, log_probs)
    assert masks[np.arange(n), actions].all()
    masked = np.where(masks[0] > 0.5, logits[0], -np.inf)
    probabilities = np.exp(masked - masked.max()) / np.exp(masked - masked.max()).sum()
    seen = np.bincount(actions, minlength=n_actions) / n
    np.testing.assert_allclose(seen, probabilities, atol=0.005)
    np.testing.assert_allclose(log_probs, np.log(probabilities[actions]), rtol=1e-4, atol=1e-6)


def test_the_lean_buffer_gives_what_stable_baselines3s_gives():
    size, n_envs, n_features = 4, 3, 2
    spaces_ = (spaces.Box(-1.0, 1.0, (n_features,)), spaces.Discrete(5))
    rng = np.random.default_rng(0)
    buffers = [
        kind(size, *spaces_, "cpu", n_envs=n_envs) for kind in (RolloutBuffer, LeanRolloutBuffer)
    ]
    for _ in range(2):  # the second time over the first
        for buffer in buffers:
            buffer.reset()
        for _ in range(size):
            step = (
                rng.normal(size=(n_envs, n_features)).astype(np.float32),
                rng.integers(5, size=n_envs),
                rng.normal(size=n_envs),
                rng.integers(2, size=n_envs),
                torch.randn(n_envs, 1),
                torch.randn(n_envs),
            )
            for buffer in buffers:
                buffer.add(*step)
        last = torch.randn(n_envs)
        for buffer in buffers:
            buffer.compute_returns_and_advantage(last, np.zeros(n_envs, bool))

        def sorted_rows(buffer):
            parts = list(buffer.get(5))
            assert [len(part.observations) for part in parts] == [5, 5, 2]
            columns = [
                torch.cat(column).reshape(size * n_envs, -1) for column in zip(*parts, strict=True)
            ]
            rows = torch.hstack(columns).double()
            return rows[rows[:, 0].argsort()]

        torch.testing.assert_close(*(sorted_rows(buffer) for buffer in buffers))
