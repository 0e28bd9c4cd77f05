"""The scenarios that a general policy learns and is chosen on, each with its schedules."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from env.family.drawing import drawn_names, is_drawn
from env.scenario import FAMILY_ROOM, Scenario, load_scenario
from env.sets.tokens import Layout
from env.simulator.machine import EpisodeFactory, Variation
from training.evaluation.schedule_search import Schedule
from training.general.list_schedules import quick_schedules
from training.general.machines import Setup
from training.processes import process_pool
from training.recipe import Imitation


def drawn_scenarios(purpose: str, seed: int, count: int) -> list[Scenario]:
    """
    Scenarios of the family, from small to large.

    :param purpose: `training` or `selection`
    :param seed: of the draws
    :param count: how many
    """
    drawn = [load_scenario(name) for name in drawn_names(purpose, seed, count)]
    return sorted(drawn, key=lambda one: (len(one.jobs) + 2) * one.machine.vcpus)


def common_layout(scenarios: Sequence[Scenario]) -> Layout:
    """
    Room for the largest of some scenarios.

    :param scenarios: the problems
    """
    return Layout(
        max(len(scenario.jobs) for scenario in scenarios),
        max(scenario.machine.vcpus for scenario in scenarios),
    )


def find_setups(
    scenarios: Sequence[Scenario],
    layout: Layout,
    variation: Variation,
    seed: int,
    imitation: Imitation,
) -> list[Setup]:
    """
    What machines play, with schedules for each, sought by as many processes as torch has threads.

    :param scenarios: several are played on hosts of one size, and so is a drawn one; else hosts
        have the size of the single scenario
    :param layout: room for all of them
    :param variation: how episodes differ; the loads of drawn scenarios differ by themselves
    :param seed: of the schedules' searches
    :param imitation: on how many traces they try a schedule
    :raises InputError: if a scenario does not fit the hosts that several are played on
    """
    room = FAMILY_ROOM if len(scenarios) > 1 else None
    search = partial(_schedules_of, room=room, seed=seed, traces=imitation.search_traces)
    with process_pool(min(torch.get_num_threads(), len(scenarios))) as pool:
        found = list(pool.map(search, scenarios, chunksize=4))
    as_drawn = replace(variation, interval_s=None, least_load=None, most_load=None)
    setups = []
    for scenario, schedules in zip(scenarios, found, strict=True):
        differing = as_drawn if is_drawn(scenario.profile) else variation
        factory = EpisodeFactory(scenario, variation=differing, room=room)
        setups.append(Setup(factory, schedules, layout))
    return setups


def _schedules_of(
    scenario: Scenario, room: tuple[int, int] | None, seed: int, traces: int
) -> list[Schedule]:
    """What a process of the pool finds for one scenario, without drawn physics."""
    return quick_schedules(EpisodeFactory(scenario, room=room), seed, traces)
