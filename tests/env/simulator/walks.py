"""What several tests of the simulator share: its problem, and random walks through it."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from env.allocation import JobState, Weight
from env.physics.parameters import HOST_FIELDS
from env.scenario import load_scenario
from env.simulator.machine import EpisodeFactory, Variation
from tests.conftest import Rig, with_hiccups

PENDING, RUNNING, PAUSED, DONE, _ = JobState
BACKGROUND, NORMAL = Weight
SCENARIO = load_scenario("cca-2025")
ANYHOW = Variation(physics=1.0, interval_s=(2.0, 20.0))
FACTORY = EpisodeFactory(SCENARIO)
CALM = EpisodeFactory(SCENARIO, with_hiccups())
VARIED = EpisodeFactory(SCENARIO, variation=ANYHOW)
RESTLESS = EpisodeFactory(SCENARIO, with_hiccups(0.5, 0.04, 0.5, 0.01), ANYHOW)
SLOW_DOCKER = EpisodeFactory(
    SCENARIO.with_changes(
        delays={
            "starts_ahead": False,
            **{name: 1.0 for name in HOST_FIELDS if name.startswith("api_latency")},
        }
    )
)
SMALL = 0.08
"""Scale of the jobs' work in random episodes: about a minute each."""

seeds = st.integers(0, 2**32 - 1)
walks = settings(max_examples=6)


def host_value(name: str) -> float:
    return float(FACTORY.profile.host[name].value)


def walk(seed: int, work: float = SMALL, limit_s: float = 1e9) -> Any:
    """A random episode, on a host whose physics is drawn, with many hiccups, for half the seeds."""
    rig = Rig(RESTLESS if seed % 2 else FACTORY)
    rig.begin(seed, work=work)
    return rig.walk(seed, limit_s)
