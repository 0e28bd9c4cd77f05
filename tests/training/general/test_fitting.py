"""The network for any scenario as it is fitted: what counts, in threads, and by padded sets."""

import copy

import numpy as np
import pytest
import torch

from env.scenario import load_scenario
from env.simulator.machine import Variation
from training.general.attention_policy import AttentionPolicy
from training.general.fitting import Fitting, fitting_device
from training.general.general_run import new_model
from training.general.mixed_env import MixedVecEnv
from training.general.setups import common_layout, drawn_scenarios, setups_of
from training.recipe import load_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def environments() -> MixedVecEnv:
    """Machines of several sizes."""
    scenarios = [load_scenario("cca-2025"), *drawn_scenarios("training", 0, 7)]
    layout = common_layout(scenarios)
    return MixedVecEnv(setups_of(scenarios, layout, Variation()), 24, seed=1)


@pytest.fixture(scope="module")
def policy(environments: MixedVecEnv) -> AttentionPolicy:
    """One whose every weight counts."""
    policy = new_model(load_recipe("general"), environments, 0).policy
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return policy


@pytest.fixture(scope="module")
def observations(environments: MixedVecEnv) -> torch.Tensor:
    """Some steps of luck into their episodes."""
    rng = np.random.default_rng(3)
    seen = environments.reset()
    for _ in range(6):
        legal = environments.machines.legal
        lists = (rng.random(legal.shape) * legal).argmax(1)
        seen = environments.step(lists)[0]
    return torch.from_numpy(seen.copy())


def test_padded_sets_come_to_the_same(policy: AttentionPolicy, observations: torch.Tensor) -> None:
    """What a GPU does is held to what the CPU does: scores, values, and every weight's slope."""
    rows = torch.arange(len(observations))
    ours, our_values = Fitting(policy, observations, CPU, padded=False).scores(rows)
    padded = Fitting(policy, observations, CPU, padded=True)
    theirs, their_values = padded.scores(rows)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(their_values, our_values, atol=1e-4, rtol=1e-4)
    slopes = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5))
    own = torch.autograd.grad(
        (ours * slopes).sum() + our_values.sum(), list(policy.network.parameters())
    )
    other = torch.autograd.grad((theirs * slopes).sum() + their_values.sum(), padded.trained)
    names = [name for name, _ in policy.network.named_parameters()]
    for name, one, slope in zip(names, own, other, strict=True):
        if name == "biases.0":  # of the last layer only host and memcached are read
            assert one.abs().sum(0).min() > 0.0  # every relation occurs
        torch.testing.assert_close(slope, one, atol=1e-4 * float(one.abs().max()), rtol=1e-3)


def test_with_padded_sets_the_policy_learns_when_it_is_told(
    policy: AttentionPolicy, observations: torch.Tensor
) -> None:
    before = copy.deepcopy(policy.network.state_dict())
    fitting = Fitting(policy, observations, CPU, padded=True)
    with torch.no_grad():
        for weight in fitting.trained:
            weight += 1.0
    assert all((now == before[name]).all() for name, now in policy.network.state_dict().items())
    fitting.hand_back()
    assert all((now != before[name]).all() for name, now in policy.network.state_dict().items())
    policy.network.load_state_dict(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_comes_to_the_same(policy: AttentionPolicy, observations: torch.Tensor) -> None:
    rows = torch.arange(len(observations))
    ours, our_values = Fitting(policy, observations, CPU, padded=False).scores(rows)
    theirs, their_values = Fitting(policy, observations, fitting_device(), True).scores(rows)
    torch.testing.assert_close(theirs.cpu(), ours, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(their_values.cpu(), our_values, atol=1e-3, rtol=1e-3)


def test_threads_share_a_minibatch(policy: AttentionPolicy, observations: torch.Tensor) -> None:
    """The gradient is that of the mean loss, and the same for any number of threads."""
    rows = torch.arange(len(observations)).repeat(9)[:200]  # four pieces, the last one smaller
    weights = torch.rand(len(observations))

    def loss(
        some: torch.Tensor, scores: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return weights[some] * (values - scores.gather(1, some[:, None] % 3)[:, 0]), values

    fitting = Fitting(policy, observations, CPU, padded=False)
    costs, values = loss(rows, *fitting.scores(rows))
    expected = torch.autograd.grad(costs.mean(), fitting.trained)
    before = torch.get_num_threads()
    gradients = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        fitting = Fitting(policy, observations, CPU, padded=False)
        torch.set_num_threads(before)
        told = fitting.differentiate(rows, loss)
        torch.testing.assert_close(told, values.mean().detach())
        gradients.append([weight.grad for weight in fitting.trained])
    for one, other, whole in zip(*gradients, expected, strict=True):
        assert one is not None
        assert (one == other).all()
        torch.testing.assert_close(one, whole, atol=1e-4, rtol=1e-4)
