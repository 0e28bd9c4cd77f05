"""FastPPO is stock PPO, only faster."""

from functools import cache

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure

from env.scenario import load_scenario
from env.simulator.vector_env import ColocationVecEnv
from training.ppo import fast_ppo, loss_kernels
from training.ppo.fast_ppo import FastPPO
from training.ppo.masked_policy import MaskedActorCriticPolicy

N_ENVS, N_STEPS = 16, 24


class CountCalls(BaseCallback):
    """Counts the steps, and the infos seen."""

    steps = infos = 0

    def _on_step(self):
        self.steps += 1
        self.infos += len(self.locals["infos"])
        return True


class CutOff(BaseCallback):
    """Notes how many episodes each step has cut off."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut

    def _on_step(self):
        self.cut.append(
            sum(info.get("TimeLimit.truncated", False) for info in self.locals["infos"])
        )
        return True


@cache
def environments():
    return ColocationVecEnv(load_scenario("cca-2025"), N_ENVS, 1.0, seed=3)


def new_model(algorithm, **changes):
    settings = {
        "n_steps": N_STEPS,
        "batch_size": 96,
        "n_epochs": 2,
        "learning_rate": 1e-3,
        "gamma": 1.0,
        "ent_coef": 0.01,
        "policy_kwargs": {"net_arch": [32, 32], "activation_fn": torch.nn.ReLU},
        "device": "cpu",
        "seed": 1,
    }
    return algorithm(MaskedActorCriticPolicy, environments(), **settings | changes)


@pytest.fixture(scope="module")
def learned():
    """A FastPPO model after two rollouts, the last of which is still in its buffer."""
    model = new_model(FastPPO)
    calls = CountCalls()
    model.learn(2 * N_ENVS * N_STEPS, callback=calls)
    model.calls = (calls.steps, calls.infos)
    return model


@pytest.mark.parametrize("count", [32, 64, 96])
def test_sums_are_taken_in_one_order_whoever_compiles(count):
    """Plain Python and the compiler agree to the last bit, so training can be repeated."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        numbers = np.exp(rng.normal(0.0, 6.0, count)).astype(np.float32)
        compiled = loss_kernels.add_up(numbers.copy())
        assert compiled == loss_kernels.add_up.py_func(numbers.copy())
        assert compiled == pytest.approx(numbers.sum(dtype=np.float64), rel=1e-6)


ROLLOUT = ("observations", "actions", "log_probs", "values", "advantages", "returns")


def twins(model, **changes):
    """Stock PPO and FastPPO with a model's weights and rollout."""
    stock, fast = new_model(PPO, **changes), new_model(FastPPO, **changes)
    for twin in (stock, fast):
        twin.policy.load_state_dict(model.policy.state_dict())
    for name in ROLLOUT:
        rollout = getattr(model.rollout_buffer, name)
        setattr(stock.rollout_buffer, name, rollout.copy())
        # Stock PPO numbers decisions machine by machine.
        setattr(fast.rollout_buffer, name, rollout.swapaxes(0, 1).copy())
    stock.rollout_buffer.full = True
    return stock, fast


def logged(model):
    model.set_logger(configure(None, []))
    np.random.seed(7)
    model._current_progress_remaining = 0.5
    model.train()
    return dict(model.logger.name_to_value)


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.policy.parameters()])


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_range": 0.01},
        {"batch_size": 250},
        {"normalize_advantage": False},
        {"max_grad_norm": 1e9},
        {"target_kl": 1e-6},
    ],
    ids=str,
)
def test_update_is_stock_ppos(learned, changes, n_threads, monkeypatch):
    monkeypatch.setattr(fast_ppo, "ROWS_AT_ONCE", 30)
    stock, fast = twins(learned, **changes)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    expected, got = logged(stock), logged(fast)
    assert torch.get_num_threads() == n_threads
    torch.set_num_threads(before)
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for key, weights in stock.policy.state_dict().items():
        torch.testing.assert_close(fast.policy.state_dict()[key], weights, rtol=1e-3, atol=1e-4)


def test_first_gradient_to_float_tolerance(learned):
    changes = {"batch_size": N_ENVS * N_STEPS, "n_epochs": 1, "max_grad_norm": 1e9}
    stock, fast = twins(learned, **changes)
    expected, got = logged(stock), logged(fast)
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradients(fast), gradients(stock), rtol=1e-4, atol=1e-6)


def test_rollout_is_the_policys(learned):
    model = new_model(FastPPO)
    calls = CountCalls()
    _, callback = model._setup_learn(1, calls)
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, N_STEPS)
    buffer = model.rollout_buffer
    observations = torch.from_numpy(buffer.observations).flatten(0, 1)
    actions = torch.from_numpy(buffer.actions).flatten()
    with torch.no_grad():
        values, log_probs, _ = model.policy.evaluate_actions(observations, actions)
    np.testing.assert_allclose(buffer.values.ravel(), values.flatten(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(buffer.log_probs.ravel(), log_probs, rtol=1e-4, atol=1e-5)
    stock, _ = twins(model)
    stock.rollout_buffer.rewards = buffer.rewards
    stock.rollout_buffer.episode_starts = buffer.episode_starts
    last = model.policy.predict_values(torch.from_numpy(model._last_obs)).detach()
    stock.rollout_buffer.compute_returns_and_advantage(last, model._last_episode_starts)
    np.testing.assert_allclose(
        stock.rollout_buffer.advantages, buffer.advantages, rtol=1e-4, atol=1e-4
    )


def test_a_rollout_with_episodes_cut_off_is_stock_ppos():
    """The same actions, rewards with what is expected after the cut, and starts of episodes."""
    scenario = load_scenario("cca-2025").with_changes(load={"duration_s": 3.0, "interval_s": 1.0})
    buffers, cut = [], []
    for algorithm in (PPO, FastPPO):
        environments = ColocationVecEnv(scenario, N_ENVS, 0.9, seed=3, staggered=False)
        policy = {"net_arch": [32, 32], "activation_fn": torch.nn.ReLU}
        model = algorithm(
            MaskedActorCriticPolicy, environments, gamma=0.9, n_steps=N_STEPS, batch_size=96,
            policy_kwargs=policy, device="cpu", seed=1,
        )  # fmt: skip
        with torch.no_grad():
            model.policy.value_net.bias += 5.0  # what is expected after a cut shows
        _, callback = model._setup_learn(1, CutOff(cut))
        assert model.collect_rollouts(model.env, callback, model.rollout_buffer, N_STEPS)
        buffers.append(model.rollout_buffer)
    stock, fast = buffers
    assert sum(cut) >= 2 * N_ENVS
    np.testing.assert_array_equal(fast.actions, stock.actions)
    np.testing.assert_array_equal(fast.episode_starts, stock.episode_starts)
    assert stock.rewards.max() > 3.0
    for name in ("rewards", "advantages", "returns"):
        np.testing.assert_allclose(
            getattr(fast, name), getattr(stock, name), rtol=1e-4, atol=1e-4, err_msg=name
        )


def test_learning_runs_and_calls_back_each_step(learned):
    assert learned.num_timesteps == 2 * N_ENVS * N_STEPS
    assert learned.calls == (2 * N_STEPS, 2 * N_STEPS * N_ENVS)
    assert all(torch.isfinite(p).all() for p in learned.policy.parameters())


def test_stock_ppo_loads_it_and_goes_on(learned, tmp_path):
    learned.save(tmp_path / "model.zip")
    stock = PPO.load(tmp_path / "model.zip", env=learned.env, device="cpu")
    assert type(stock) is PPO
    observations = learned.rollout_buffer.observations[-1]
    for deterministic in (True, False):
        torch.manual_seed(0)
        expected = learned.policy.predict(observations, deterministic=deterministic)[0]
        torch.manual_seed(0)
        assert (stock.predict(observations, deterministic=deterministic)[0] == expected).all()
    stock.learn(N_ENVS * N_STEPS)
    FastPPO.load(tmp_path / "model.zip", env=learned.env, device="cpu").learn(N_ENVS * N_STEPS)


def test_refuses_what_it_does_not_compute():
    with pytest.raises(ValueError, match="ReLU"):
        new_model(FastPPO, policy_kwargs={"net_arch": [8], "activation_fn": torch.nn.Tanh})
    with pytest.raises(ValueError, match="value clipping"):
        new_model(FastPPO, clip_range_vf=0.2)
