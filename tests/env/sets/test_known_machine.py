"""What a profile says of a machine: the same as the physics, without its compiler."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from env.allocation import mask_of
from env.physics.parameters import SERVICE_EXPONENT
from env.physics.service import service_state
from env.physics.steady_service import CLIENT_MOST, SteadyService, client_share
from env.scenario import Scenario, load_scenario, profile_machine
from env.sets.known_machine import MOST_SERVED, known_machine
from env.sets.tokens import VCPU, Layout, token_table
from env.simulator.kernel import observe_at
from env.simulator.machine import EpisodeFactory
from env.simulator.profile import load_profile

NAMES = ["cca-2025", "cca-2025-exclusive", "local", *(f"family-training-3-{i}" for i in range(24))]


def in_the_physics_us(scenario: Scenario, cores: tuple[int, ...], qps: float, busy: float) -> float:
    """p95 of the same machine, with background work that keeps every vCPU so busy."""
    profile, vcpus = load_profile(scenario.profile), scenario.machine.vcpus
    client = np.zeros(vcpus)
    client[-1] = client_share(qps, profile_machine(scenario.profile))
    siblings = np.array([scenario.machine.sibling_of(vcpu) for vcpu in range(vcpus)])
    state = service_state(
        qps, scenario.service.threads, mask_of(cores), siblings, np.full(vcpus, busy),
        np.zeros(vcpus), client, 0.0, profile.service_array(),
        profile.cost_array()[SERVICE_EXPONENT],
    )  # fmt: skip
    return float(state[0])


def steady(scenario: Scenario) -> SteadyService:
    machine = scenario.machine
    siblings = [machine.sibling_of(vcpu) for vcpu in range(machine.vcpus)]
    return SteadyService(profile_machine(scenario.profile), scenario.service.threads, siblings)


@pytest.mark.parametrize("name", NAMES)
def test_p95_is_that_of_the_physics(name: str) -> None:
    scenario = load_scenario(name)
    service = steady(scenario)
    for cores in scenario.service.sets:
        for part in (0.05, 0.4, 0.8, 1.0, 1.6):
            qps = part * scenario.load.qps_max
            for background in (False, True):
                expected = in_the_physics_us(scenario, cores, qps, float(background))
                found = service.p95_us(cores, qps, background)
                assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_set_serves_is_where_its_p95_meets_the_slo(name: str) -> None:
    scenario = load_scenario(name)
    service, most_qps = steady(scenario), MOST_SERVED * scenario.load.qps_max
    slo_us = scenario.service.slo_us
    for cores in scenario.service.sets:
        for background in (False, True):
            limit = service.load_within_us(slo_us, cores, most_qps, background)
            below, above = (
                service.p95_us(cores, factor * limit, background) for factor in (0.999, 1.001)
            )
            assert below <= slo_us
            assert limit > 0.999 * most_qps or above > slo_us


def test_a_load_generator_takes_what_it_takes_in_the_simulator() -> None:
    scenario = load_scenario("local")
    traits = profile_machine(scenario.profile)
    factory = EpisodeFactory(scenario)
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    factory.begin(hosts, targets, 0, 3, np.random.default_rng(3))
    observe_at(hosts, 0, factory.table.rows, np.zeros(factory.observation_size, np.float32))
    (host,) = hosts
    assert host["client"][-1] == pytest.approx(client_share(host["load_qps"], traits))
    assert client_share(1e12, traits) == CLIENT_MOST
    assert client_share(1e5, profile_machine("cca-2025")) == 0.0


def test_each_vcpu_shows_what_the_set_that_it_names_serves() -> None:
    scenario = load_scenario("cca-2025")  # sets {0}, {0, 1}, {0, 1, 2}
    layout = Layout(7, 4)
    vcpus = token_table(scenario, layout).blank[layout.offsets[3] :][: 4 * VCPU].reshape(4, VCPU)
    shown = vcpus[:, 15:17]
    assert shown[:3] == pytest.approx(np.array(known_machine(scenario).served, np.float32))
    assert shown[0, 0] < shown[1, 0] <= shown[2, 0] <= MOST_SERVED  # a larger set serves more
    assert shown[0, 1] < shown[0, 0]  # beside work less than alone
    assert not shown[3].any()
    assert not vcpus[:, 17].any()  # the load comes from elsewhere
    carried = token_table(load_scenario("local"), layout).blank
    vcpus = carried[layout.offsets[3] :][: 4 * VCPU].reshape(4, VCPU)
    assert (vcpus[:, 17] > 0.0).tolist() == [False, True, False, False]
    assert 0.0 < carried[19] < carried[20] == vcpus[1, 17]


def test_the_live_side_needs_no_compiler_for_it() -> None:
    asked = (
        "import sys; from env.scenario import load_scenario; "
        "from env.sets.known_machine import known_machine; "
        "known_machine(load_scenario('local')); print('numba' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.strip() == "False"
