"""
PPO with less around it: the algorithm of Stable-Baselines3, written out.

Stock PPO spends most of its time between the matrix products. `FastPPO` is the same algorithm
with the same hyperparameters, logs, callbacks and checkpoints, but

* the loss with its gradient is one compiled loop over decisions, as drawing an action is;
* the gradient is carried through the two networks by hand, a layer a line;
* a decision is written once, straight into the rollout buffer;
* each thread takes its part of a minibatch through all layers before it waits for another.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import explained_variance
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from training.kernels import STATISTICS, draw_actions, loss_gradient
from training.masked_policy import MaskedActorCriticPolicy

CACHED_ROWS = 2048
"""Decisions that a thread takes through the networks at once; more would leave its core's cache."""

# --- the two networks ---------------------------------------------------------------------------


class ReluNetwork:
    """
    Linear layers with a ReLU between any two; works on the weights of torch modules.

    :param layers: the modules
    :param gradients: receive the gradients of their weights and biases, in the same order
    """

    def __init__(self, layers: list[nn.Linear], gradients: list[Tensor]):
        self.layers = [(layer.weight.detach().t(), layer.bias.detach()) for layer in layers]
        self.gradients = list(zip(gradients[::2], gradients[1::2], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """float32[B, n_inputs] to float32[B, n_outputs]."""
        self.inputs = [x]
        for weight, bias in self.layers[:-1]:
            x = torch.addmm(bias, x, weight).relu_()
            self.inputs.append(x)
        weight, bias = self.layers[-1]
        return torch.addmm(bias, x, weight)

    def backward(self, slope: Tensor) -> None:
        """
        Add to the gradients.

        :param slope: float32[B, n_outputs], of the loss by what `forward` has returned
        """
        for depth in reversed(range(len(self.layers))):
            weight_gradient, bias_gradient = self.gradients[depth]
            weight_gradient.addmm_(slope.t(), self.inputs[depth])
            bias_gradient.add_(slope.sum(0))
            if depth > 0:
                active = self.inputs[depth].sign()
                slope = torch.mm(slope, self.layers[depth][0].t()).mul_(active)


class ActorCritic:
    """
    A policy's two networks and their gradient; one thread uses it at a time.

    :param policy: whose weights are used
    """

    def __init__(self, policy: MaskedActorCriticPolicy):
        actor, critic = linear_layers(policy)
        self.parameters = [p for layer in actor + critic for p in (layer.weight, layer.bias)]
        sizes = [p.numel() for p in self.parameters]
        self.gradient = torch.zeros(sum(sizes))
        self.gradients = [
            part.view_as(p)
            for part, p in zip(self.gradient.split(sizes), self.parameters, strict=True)
        ]
        self.n_features = policy.features_dim
        self.actor = ReluNetwork(actor, self.gradients[: 2 * len(actor)])
        self.critic = ReluNetwork(critic, self.gradients[2 * len(actor) :])

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logits float32[B, A], not yet masked, and values float32[B, 1]."""
        features = observations[:, : self.n_features]
        return self.actor.forward(features), self.critic.forward(features)


def linear_layers(policy: MaskedActorCriticPolicy) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """The layers of a policy's actor and critic."""
    extractor = policy.mlp_extractor
    towers = (
        [*extractor.policy_net, policy.action_net],
        [*extractor.value_net, policy.value_net],
    )
    actor, critic = ([m for m in tower if isinstance(m, nn.Linear)] for tower in towers)
    return actor, critic


# --- the algorithm ------------------------------------------------------------------------------


@contextmanager
def one_core_each() -> Iterator[None]:
    """
    Let each torch operation of this thread use one core.

    Threads that torch itself would use for one operation wait for each other busily, after every
    layer; where anything else runs on the machine, that costs far more than it saves.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class FastPPO(PPO):
    """
    PPO for `MaskedActorCriticPolicy` on the CPU; everything else is as in Stable-Baselines3.

    It updates on as many threads as torch is set to use.
    """

    policy: MaskedActorCriticPolicy

    def _setup_model(self) -> None:
        super()._setup_model()
        if (
            not isinstance(self.policy, MaskedActorCriticPolicy)
            or self.policy.activation_fn is not nn.ReLU
            or self.device.type != "cpu"
            or self.use_sde
            or self.clip_range_vf is not None
        ):
            raise ValueError(
                "FastPPO needs a MaskedActorCriticPolicy of ReLU layers on the CPU, "
                "without SDE and without value clipping; train others with PPO"
            )

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
    ) -> bool:
        """
        Fill the rollout buffer with decisions of the present policy.

        :param env: the training environments
        :param callback: called at every step
        :param rollout_buffer: receives the decisions
        :param n_rollout_steps: decisions of each environment
        :return: False if the callback has ended training
        """
        self.policy.set_training_mode(False)
        buffer = rollout_buffer
        if buffer.generator_ready:  # somebody has flattened the arrays
            buffer.reset()
        buffer.pos, buffer.full = 0, False
        observations = torch.from_numpy(buffer.observations)
        network = ActorCritic(self.policy)
        callback.on_rollout_start()
        with one_core_each():
            for n_steps in range(n_rollout_steps):
                buffer.observations[n_steps] = self._last_obs
                logits, values = network.forward(observations[n_steps])
                luck = torch.rand(env.num_envs).numpy()
                actions, log_probs = buffer.actions[n_steps, :, 0], buffer.log_probs[n_steps]
                draw_actions(logits.numpy(), buffer.observations[n_steps], luck, actions, log_probs)
                buffer.values[n_steps] = values.numpy()[:, 0]
                new_obs, rewards, dones, infos = env.step(actions)
                self.num_timesteps += env.num_envs

                callback.update_locals(locals())
                if not callback.on_step():
                    return False

                ended = np.flatnonzero(dones)
                self._update_info_buffer([infos[index] for index in ended], dones[ended])
                for index in ended:
                    if infos[index].get("TimeLimit.truncated", False):
                        last = torch.from_numpy(infos[index]["terminal_observation"])
                        rewards[index] += self.gamma * network.forward(last[None])[1].item()
                buffer.rewards[n_steps] = rewards
                buffer.episode_starts[n_steps] = self._last_episode_starts
                self._last_obs, self._last_episode_starts = new_obs, dones  # type: ignore[assignment]

        buffer.pos, buffer.full = n_rollout_steps, True
        _, values = network.forward(torch.from_numpy(new_obs))
        buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def train(self) -> None:
        """Update the policy with the rollout."""
        self.policy.set_training_mode(True)
        optimizer = self.policy.optimizer
        self._update_learning_rate(optimizer)
        clip_range = self.clip_range(self._current_progress_remaining)  # type: ignore[operator]

        buffer = self.rollout_buffer
        observations = torch.from_numpy(buffer.observations).flatten(0, 1)
        # What belongs to one decision lies together, as minibatches pick decisions at random.
        columns = (buffer.actions, buffer.log_probs, buffer.advantages, buffer.returns)
        decisions = torch.from_numpy(np.stack([c.ravel() for c in columns], 1, dtype=np.float32))
        advantages = decisions[:, 2]

        n_threads = torch.get_num_threads()
        networks = [ActorCritic(self.policy) for _ in range(n_threads)]
        gradient = networks[0].gradient
        for parameter, part in zip(networks[0].parameters, networks[0].gradients, strict=True):
            parameter.grad = part

        def differentiate(network: ActorCritic, rows: Tensor) -> np.ndarray:
            """Write the gradient of a thread's part of the minibatch; return its statistics."""
            sums = np.zeros(len(STATISTICS))
            network.gradient.zero_()
            for some in rows.split(CACHED_ROWS):
                seen = observations.index_select(0, some)
                taken = decisions.index_select(0, some)
                logits, values = network.forward(seen)
                loss_gradient(
                    logits.numpy(),
                    values.numpy(),
                    seen.numpy(),
                    taken.numpy(),
                    coefficients,
                    sums,
                )
                network.actor.backward(logits)
                network.critic.backward(values)
            return sums

        statistics: list[np.ndarray] = []
        moved_too_far = False
        pool = ThreadPoolExecutor(n_threads, initializer=lambda: torch.set_num_threads(1))
        with one_core_each(), pool:
            for _ in range(self.n_epochs):
                epoch_began = len(statistics)
                order = torch.from_numpy(np.random.permutation(len(observations)))
                for rows in order.split(self.batch_size):
                    mean, scale = 0.0, 1.0
                    if self.normalize_advantage and len(rows) > 1:
                        std, average = torch.std_mean(advantages.index_select(0, rows))
                        mean, scale = average.item(), 1.0 / (std.item() + 1e-8)
                    coefficients = np.array(
                        [mean, scale, clip_range, self.ent_coef, self.vf_coef, 1.0 / len(rows)],
                        np.float32,
                    )
                    parts = pool.map(differentiate, networks, rows.tensor_split(n_threads))
                    statistics.append(np.sum(list(parts), axis=0))
                    approx_kl = statistics[-1][STATISTICS.index("approx_kl")]
                    if self.target_kl is not None and approx_kl > 1.5 * self.target_kl:
                        moved_too_far = True
                        break
                    for network in networks[1:]:
                        gradient += network.gradient
                    gradient *= min(1.0, self.max_grad_norm / (gradient.norm().item() + 1e-6))
                    optimizer.step()
                self._n_updates += 1
                if moved_too_far:
                    break
        self._log(np.array(statistics), epoch_began, clip_range)

    def _log(self, statistics: np.ndarray, epoch_began: int, clip_range: float) -> None:
        """Record what stock PPO records."""
        for name, values in zip(STATISTICS, statistics.T, strict=True):
            if name == "approx_kl":
                values = values[epoch_began:]
            self.logger.record(f"train/{name}", values.mean())
        policy_loss, value_loss, entropy_loss = statistics[-1, :3]
        loss = policy_loss + self.ent_coef * entropy_loss + self.vf_coef * value_loss
        self.logger.record("train/loss", loss)
        buffer = self.rollout_buffer
        explained = explained_variance(buffer.values.flatten(), buffer.returns.flatten())
        self.logger.record("train/explained_variance", explained)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/clip_range", clip_range)
