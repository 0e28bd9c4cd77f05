"""Scenarios that the tests of this folder explore."""

import pytest

from env.scenario import load_scenario
from env.simulator.machine import Variation
from training.general.branching import Explorer
from training.general.setups import common_layout, drawn_scenarios, setups_of


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """A measured scenario, and eleven drawn ones."""
    scenarios = [load_scenario("cca-2025-exclusive"), *drawn_scenarios("training", 0, 11)]
    setups = setups_of(scenarios, common_layout(scenarios), Variation())
    return Explorer(setups, 0.25, 3, threads=2)
