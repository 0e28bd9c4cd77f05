"""The scenarios that a general policy learns and is chosen on."""

from collections.abc import Sequence
from dataclasses import replace

from env.family.drawing import drawn_names, is_drawn
from env.scenario import FAMILY_ROOM, Scenario, load_scenario
from env.sets.tokens import Layout
from env.simulator.machine import EpisodeFactory, Variation
from training.general.machines import Setup


def drawn_scenarios(purpose: str, seed: int, count: int) -> list[Scenario]:
    """
    Scenarios of the family.

    :param purpose: `training` or `selection`
    :param seed: of the draws
    :param count: how many
    """
    return [load_scenario(name) for name in drawn_names(purpose, seed, count)]


def common_layout(scenarios: Sequence[Scenario]) -> Layout:
    """
    Room for the largest of some scenarios.

    :param scenarios: the problems
    """
    return Layout(
        max(len(scenario.jobs) for scenario in scenarios),
        max(scenario.machine.vcpus for scenario in scenarios),
    )


def setups_of(scenarios: Sequence[Scenario], layout: Layout, variation: Variation) -> list[Setup]:
    """
    What machines play.

    :param scenarios: several are played on hosts of one size, and so is a drawn one; else hosts
        have the size of the single scenario
    :param layout: room for all of them
    :param variation: how episodes differ; the loads of drawn scenarios differ by themselves
    :raises InputError: if a scenario does not fit the hosts that several are played on
    """
    room = FAMILY_ROOM if len(scenarios) > 1 else None
    as_drawn = replace(variation, interval_s=None, least_load=None, most_load=None)
    setups = []
    for scenario in scenarios:
        differing = as_drawn if is_drawn(scenario.profile) else variation
        factory = EpisodeFactory(scenario, variation=differing, room=room)
        setups.append(Setup(factory, layout))
    return setups
