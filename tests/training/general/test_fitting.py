"""The network for any scenario as it is fitted: what counts, in threads, and by padded sets."""

import copy

import numpy as np
import pytest
import torch

from env.scenario import load_scenario
from env.simulator.machine import Variation
from tests.training.general.fresh_model import fresh
from training.general.attention_policy import AttentionPolicy
from training.general.branching import Explorer
from training.general.fitting import Fitting, fitting_device
from training.general.setups import common_layout, drawn_scenarios, setups_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """Machines of several sizes."""
    scenarios = [load_scenario("cca-2025"), *drawn_scenarios("training", 0, 7)]
    return Explorer(setups_of(scenarios, common_layout(scenarios), Variation()), 0.0, 1, 1)


@pytest.fixture(scope="module")
def policy(explorer: Explorer) -> AttentionPolicy:
    """One whose every weight counts."""
    policy = fresh(explorer).policy
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return policy


@pytest.fixture(scope="module")
def observations(explorer: Explorer) -> torch.Tensor:
    """Some lists of luck into their episodes."""
    rng = np.random.default_rng(3)
    machines = explorer.begin(np.arange(24) % 8)
    for _ in range(3):
        legal = machines.legal
        explorer.follow(machines, (rng.random(legal.shape) * legal).argmax(1), to_the_end=False)
    return torch.from_numpy(explorer.observe(machines))


def test_padded_sets_come_to_the_same(policy: AttentionPolicy, observations: torch.Tensor) -> None:
    """What a GPU does is held to what the CPU does: scores, and every weight's slope."""
    rows = torch.arange(len(observations))
    ours = Fitting(policy, observations, CPU, padded=False).scores(rows)
    padded = Fitting(policy, observations, CPU, padded=True)
    theirs = padded.scores(rows)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    slopes = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5))
    own = torch.autograd.grad((ours * slopes).sum(), list(policy.network.parameters()))
    other = torch.autograd.grad((theirs * slopes).sum(), padded.trained)
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
    ours = Fitting(policy, observations, CPU, padded=False).scores(rows)
    theirs = Fitting(policy, observations, fitting_device(), True).scores(rows)
    torch.testing.assert_close(theirs.cpu(), ours, atol=1e-3, rtol=1e-3)


def test_threads_share_a_minibatch(policy: AttentionPolicy, observations: torch.Tensor) -> None:
    """The gradient is that of the mean loss, and the same for any number of threads."""
    rows = torch.arange(len(observations)).repeat(9)[:200]  # four pieces, the last one smaller
    weights = torch.rand(len(observations))

    def loss(some: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = scores.gather(1, some[:, None] % 3)[:, 0]
        return weights[some] * own.square(), own

    fitting = Fitting(policy, observations, CPU, padded=False)
    costs, told_of_each = loss(rows, fitting.scores(rows))
    expected = torch.autograd.grad(costs.mean(), fitting.trained)
    before = torch.get_num_threads()
    gradients = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        fitting = Fitting(policy, observations, CPU, padded=False)
        torch.set_num_threads(before)
        told = fitting.differentiate(rows, loss)
        torch.testing.assert_close(told, told_of_each.mean().detach())
        gradients.append([weight.grad for weight in fitting.trained])
    for one, other, whole in zip(*gradients, expected, strict=True):
        assert one is not None
        assert (one == other).all()
        torch.testing.assert_close(one, whole, atol=1e-4, rtol=1e-4)
