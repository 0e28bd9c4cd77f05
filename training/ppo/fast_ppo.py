"""
PPO with less around it: the algorithm of Stable-Baselines3, written out.

Stock PPO spends most of its time between the matrix products. `FastPPO` is the same algorithm
with the same hyperparameters, logs, callbacks and checkpoints, but

* the loss with its gradient is one compiled loop over decisions, as drawing an action is;
* the gradient is carried through the two networks by hand, a layer a line;
* a decision is written once, straight into the rollout buffer;
* each thread takes a piece of a minibatch through all layers before it takes the next.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import explained_variance
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from env.simulator.thread_pool import ThreadPool
from training.ppo.loss_kernels import STATISTICS, draw_actions, loss_gradient, relu_gradient
from training.ppo.masked_policy import MaskedActorCriticPolicy, linear_layers, parameters

ROWS_AT_ONCE = 1024
"""Decisions that a thread takes through the networks at once; more would leave its core's cache."""

# --- the two networks ---------------------------------------------------------------------------


class ReluNetwork:
    """
    Linear layers with a ReLU between any two; works on the weights of torch modules.

    What it computes stays in its own memory until the next call, so that it stays in the cache.

    :param layers: the modules
    :param n_rows: the most rows of an input
    """

    def __init__(self, layers: list[nn.Linear], n_rows: int):
        self.layers = [(layer.weight.detach().t(), layer.bias.detach()) for layer in layers]
        self._outputs = [torch.empty(n_rows, layer.out_features) for layer in layers]
        self._slopes = [torch.empty(n_rows, layer.in_features) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        """
        The last layer's outputs, float32[B, n_outputs].

        :param x: float32[B, n_inputs]
        """
        n_rows = len(x)
        self.inputs = [x]
        for (weight, bias), output in zip(self.layers[:-1], self._outputs[:-1], strict=True):
            x = torch.addmm(bias, x, weight, out=output[:n_rows]).relu_()
            self.inputs.append(x)
        weight, bias = self.layers[-1]
        return torch.addmm(bias, x, weight, out=self._outputs[-1][:n_rows])

    def backward(self, slope: Tensor, gradients: list[Tensor]) -> None:
        """
        Compute the gradient.

        :param slope: float32[B, n_outputs], of the loss by what `forward` has returned
        :param gradients: receive those of all weights and biases, in the order of the layers
        """
        n_rows = len(slope)
        for depth in reversed(range(len(self.layers))):
            torch.mm(slope.t(), self.inputs[depth], out=gradients[2 * depth])
            torch.sum(slope, 0, out=gradients[2 * depth + 1])
            if depth > 0:
                weight, _ = self.layers[depth]
                slope = torch.mm(slope, weight.t(), out=self._slopes[depth][:n_rows])
                relu_gradient(slope.numpy(), self.inputs[depth].numpy())


class ActorCritic:
    """
    A policy's two networks and their gradient; one thread uses it at a time.

    :param policy: holds the weights
    :param n_rows: the most rows of an input
    """

    def __init__(self, policy: MaskedActorCriticPolicy, n_rows: int):
        actor, critic = linear_layers(policy)
        self.n_features = policy.features_dim
        self._of_actor = 2 * len(actor)
        self.actor = ReluNetwork(actor, n_rows)
        self.critic = ReluNetwork(critic, n_rows)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """
        Logits float32[B, A], not yet masked, and values float32[B, 1].

        :param observations: float32[B, n_features + A]
        """
        self.masks = observations.numpy()
        features = observations[:, : self.n_features]
        return self.actor.forward(features), self.critic.forward(features)

    def backward(self, by_logits: Tensor, by_values: Tensor, gradients: list[Tensor]) -> None:
        """
        Compute the gradient.

        :param by_logits: float32[B, A], slopes of the loss
        :param by_values: float32[B, 1]
        :param gradients: receive those of the `parameters`
        """
        self.actor.backward(by_logits, gradients[: self._of_actor])
        self.critic.backward(by_values, gradients[self._of_actor :])


# --- the algorithm ------------------------------------------------------------------------------


def one_core() -> None:
    """Let each torch operation of this thread use one core."""
    torch.set_num_threads(1)


@contextmanager
def one_core_each() -> Iterator[None]:
    """
    Let each torch operation of this thread use one core.

    Threads that torch itself would use for one operation wait for each other busily, after every
    layer; where anything else runs on the machine, that costs far more than it saves.
    """
    before = torch.get_num_threads()
    one_core()
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
        pool = ThreadPool(torch.get_num_threads(), one_core)
        networks = [ActorCritic(self.policy, ROWS_AT_ONCE) for _ in range(pool.size)]
        piece = min(ROWS_AT_ONCE, -(-env.num_envs // pool.size))
        pieces = [slice(b, b + piece) for b in range(0, env.num_envs, piece)]

        def decide(some: slice) -> None:
            """Fill the part of the buffer's present step that belongs to some machines."""
            network = networks.pop()
            observations = buffer.observations[n_steps, some]
            observations[:] = self._last_obs[some]  # type: ignore[index]
            logits, values = network.forward(torch.from_numpy(observations))
            draw_actions(
                logits.numpy(),
                network.masks,
                luck[some],
                buffer.actions[n_steps, some, 0],
                buffer.log_probs[n_steps, some],
            )
            buffer.values[n_steps, some] = values.numpy()[:, 0]
            networks.append(network)

        callback.on_rollout_start()
        with one_core_each():
            for n_steps in range(n_rollout_steps):
                luck = torch.rand(env.num_envs).numpy()
                pool.share(decide, pieces)
                actions = buffer.actions[n_steps, :, 0]
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
                        rewards[index] += self.gamma * networks[0].forward(last[None])[1].item()
                buffer.rewards[n_steps] = rewards
                buffer.episode_starts[n_steps] = self._last_episode_starts
                self._last_obs, self._last_episode_starts = new_obs, dones  # type: ignore[assignment]

        buffer.pos, buffer.full = n_rollout_steps, True
        values = self.policy.predict_values(torch.from_numpy(new_obs)).detach()
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

        pool = ThreadPool(torch.get_num_threads(), one_core)
        networks = [ActorCritic(self.policy, ROWS_AT_ONCE) for _ in range(pool.size)]
        # Each piece of a minibatch has a gradient of its own: sums do not depend on the threads.
        trained = parameters(self.policy)
        sizes = [p.numel() for p in trained]
        n_pieces = -(-min(self.batch_size, len(observations)) // ROWS_AT_ONCE)
        gradients = torch.empty(n_pieces, sum(sizes))
        sums = np.empty((n_pieces, len(STATISTICS)))
        views = [
            [part.view_as(p) for part, p in zip(row.split(sizes), trained, strict=True)]
            for row in gradients
        ]
        gradient = gradients[0]
        for parameter, part in zip(trained, views[0], strict=True):
            parameter.grad = part

        def differentiate(piece: tuple[int, Tensor]) -> None:
            """Compute the gradient and the statistics of a piece of the minibatch."""
            index, some = piece
            network = networks.pop()
            seen = observations.index_select(0, some)
            taken = decisions.index_select(0, some)
            logits, values = network.forward(seen)
            sums[index] = 0.0
            loss_gradient(
                logits.numpy(),
                values.numpy(),
                network.masks,
                taken.numpy(),
                coefficients,
                sums[index],
            )
            network.backward(logits, values, views[index])
            networks.append(network)

        statistics: list[np.ndarray] = []
        moved_too_far = False
        with one_core_each():
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
                    pieces = list(enumerate(rows.split(ROWS_AT_ONCE)))
                    pool.share(differentiate, pieces)
                    statistics.append(sums[: len(pieces)].sum(axis=0))
                    approx_kl = statistics[-1][STATISTICS.index("approx_kl")]
                    if self.target_kl is not None and approx_kl > 1.5 * self.target_kl:
                        moved_too_far = True
                        break
                    gradient += gradients[1 : len(pieces)].sum(0)
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
