"""
What a profile says of the machine, in a few numbers for a network that has never seen it.

Where the machine carries its load, what the load generator takes; what each of memcached's sets
serves within the SLO, alone and beside background work; what sharing costs. What lists come to
follows from all of that, so a network that is not told has to guess.
"""

from dataclasses import dataclass

from env.physics.steady_service import SteadyService, client_share
from env.scenario import Scenario, profile_machine

SHOWN_COSTS = ("smt", "batch_smt", "service_exponent", "service_sibling", "service_pressure",
               "background_capacity")  # fmt: skip
"""The profile's parameters that memcached's token shows as they are."""

MOST_SERVED = 2.0
"""What a set serves is shown up to so many times the largest load."""


@dataclass(frozen=True)
class KnownMachine:
    """
    Numbers of the tokens that follow from the profile.

    :param client_share: what the load generator takes of the last vCPU at the least and at the
        largest load, 0 where it runs elsewhere
    :param straggling: how far a job waits for its slowest thread
    :param costs: by `SHOWN_COSTS`
    :param served: for each of memcached's sets the load that it serves within the SLO over the
        largest load, at most `MOST_SERVED`: alone, and beside background work everywhere
    """

    client_share: tuple[float, float]
    straggling: float
    costs: tuple[float, ...]
    served: tuple[tuple[float, float], ...]


def known_machine(scenario: Scenario) -> KnownMachine:
    """
    What is known of a scenario's machine.

    :param scenario: the problem; its profile is read
    :raises ValueError: if there is no such profile
    """
    traits = {"service_exponent": 1.0} | profile_machine(scenario.profile)
    load, machine, slo_us = scenario.load, scenario.machine, scenario.service.slo_us
    siblings = [machine.sibling_of(vcpu) for vcpu in range(machine.vcpus)]
    service = SteadyService(traits, scenario.service.threads, siblings)

    def served(cores: tuple[int, ...], background: bool) -> float:
        most_qps = MOST_SERVED * load.qps_max
        return service.load_within_us(slo_us, cores, most_qps, background) / load.qps_max

    return KnownMachine(
        client_share=(client_share(load.qps_min, traits), client_share(load.qps_max, traits)),
        straggling=traits["straggling"],
        costs=tuple(traits[name] for name in SHOWN_COSTS),
        served=tuple(
            (served(cores, False), served(cores, True)) for cores in scenario.service.sets
        ),
    )
