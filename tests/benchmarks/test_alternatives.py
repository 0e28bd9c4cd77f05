"""What the comparison of other recipes stands on."""

import numpy as np
import pytest
import torch

from benchmarks.alternatives import PRICES, SLO, PricedVecEnv
from benchmarks.job_network import JobNetwork
from env.observation import GLOBAL_FEATURES, JOB_FEATURES
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory

SCENARIO = load_scenario("cca-2025")
VCPUS, JOBS = SCENARIO.machine.vcpus, len(SCENARIO.jobs)


def sharing_weights(network: JobNetwork, other: JobNetwork) -> None:
    constants = dict(other.named_buffers())
    other.load_state_dict(network.state_dict() | constants)


def test_the_order_of_the_jobs_makes_no_difference_to_the_shared_network() -> None:
    torch.manual_seed(3)
    backwards = SCENARIO.model_copy(update={"jobs": SCENARIO.jobs[::-1]})
    network, other = (JobNetwork(EpisodeFactory(one)) for one in (SCENARIO, backwards))
    sharing_weights(network, other)
    width = JOB_FEATURES + VCPUS
    features = torch.rand(16, GLOBAL_FEATURES + VCPUS + JOBS * width)
    start = features.shape[1] - JOBS * width
    blocks = features[:, start:].reshape(16, JOBS, width).flip(1).reshape(16, -1)
    turned = torch.cat((features[:, :start], blocks), dim=1)
    with torch.no_grad():
        logits, values = network(features)
        turned_logits, turned_values = other(turned)
    names = EpisodeFactory(SCENARIO).table, EpisodeFactory(backwards).table
    there = {names[1].describe(edit): edit for edit in range(len(names[1]))}
    same = [there[names[0].describe(edit)] for edit in range(len(names[0]))]
    assert torch.allclose(logits, turned_logits[:, same], atol=1e-5)
    assert torch.allclose(values, turned_values, atol=1e-5)
    assert logits.std() > 1e-3


def test_the_shared_network_has_the_same_weights_for_fewer_jobs_and_vcpus() -> None:
    small = load_scenario("local")
    assert small.machine.vcpus != VCPUS
    network, other = (JobNetwork(EpisodeFactory(one)) for one in (SCENARIO, small))
    assert {name: x.shape for name, x in network.named_parameters()} == {
        name: x.shape for name, x in other.named_parameters()
    }


@pytest.mark.parametrize("variant", PRICES)
def test_the_price_of_a_broken_slo_moves_from_the_first_to_the_last(variant: str) -> None:
    plain, priced = (PricedVecEnv(SCENARIO, 4, 1.0, seed=5) for _ in range(2))
    priced.prices, priced.steps_in_all = PRICES[variant], 4 * 300
    looks = plain.reset()
    priced.reset()
    seen = []
    for step in range(1, 301):
        # memcached stays on one vCPU, so the SLO breaks.
        edits = looks[:, -len(plain.table) :].argmax(axis=1)
        looks, rewards, *_ = plain.step(edits)
        _, dear, *_ = priced.step(edits)
        first, last = priced.prices
        price = first + (last - first) * step / 300
        term = plain._terms[:, SLO]
        assert dear - rewards == pytest.approx((price - 1.0) * term, abs=1e-4)
        seen.append(np.abs(term).sum())
    assert sum(seen) > 0.0
