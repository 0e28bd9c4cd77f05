"""Episodes begin on machines that are drawn from what their profile does not know."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, Variation
from env.simulator.profile import load_profile

SCENARIO = load_scenario("cca-2025")
PROFILE = load_profile("cca-2025").model_copy(update={"siblings_unknown": False})


def pairings(variation: Variation, **changes: Any) -> npt.NDArray[np.int64]:
    """What slows batch work on each vCPU, in 40 episodes: int64[40, vCPUs]."""
    factory = EpisodeFactory(SCENARIO, PROFILE.model_copy(update=changes), variation)
    hosts, targets = factory.new_hosts(40), factory.new_targets(40)
    for index in range(40):
        factory.begin(hosts, targets, index, 1, np.random.default_rng(index))
    own: npt.NDArray[np.int64] = hosts["batch_sibling"]
    return own


def test_siblings_that_are_not_known_are_drawn() -> None:
    """The profile's pairs or the scenario's, which memcached keeps."""
    drawn = pairings(Variation(physics=1.0), siblings_unknown=True)
    found, count = np.unique(drawn, axis=0, return_counts=True)
    assert found.tolist() == [[1, 0, 3, 2], [2, 3, 0, 1]]
    assert count.min() > 10


@pytest.mark.parametrize(
    ("physics", "unknown"), [(0.0, True), (1.0, False)], ids=["the profile's physics", "known"]
)
def test_other_siblings_are_the_profiles(physics: float, unknown: bool) -> None:
    drawn = pairings(Variation(physics=physics), siblings_unknown=unknown)
    assert (drawn == PROFILE.siblings).all()
