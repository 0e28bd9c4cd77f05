"""
Machines of many scenarios behind one Stable-Baselines3 `VecEnv`, for PPO.

A step follows a list until a job arrives or ends (an option: Sutton, Precup, Singh 1999).

What an episode is worth is said in units of what a plain list (`env.lists.menu.plain_list`) comes
to: the same trace, the same machine, the same random numbers, on a copy of the host. So scenarios
of minutes and of seconds count the same, and so do calm and busy loads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from env.lists.menu import LISTS
from env.reward import TERMS, UNIT_S
from env.simulator.vector_env import HostBatch
from training.general.machines import Machines, Setup, figure_s, no_terms

BASELINE_RETURN = 10.0
"""What the baseline costs: about what a return may be beside the policy's loss."""

_TIME, _SHAPING, _JCT = (TERMS.index(name) for name in ("time", "shaping", "jct"))


class MixedVecEnv(HostBatch):
    """
    Machines that draw another scenario for each episode.

    Where jobs arrive, what counts is their mean completion time: neither the time that passes nor
    the work that is still to come, which nobody sees, is rewarded. The share of a job is measured
    against the baseline's from its arrival on, so that what arrives later is no news of what was
    decided.

    :param setups: the scenarios, those of most interest first
    :param count: B, number of machines
    :param seed: of the training traces and everything else that is random
    :param first: how many of the setups are of most interest
    :param first_share: share of the episodes that play one of them
    :param unprofiled: share of the episodes in which some of the jobs have no profile
    :param threads: that step the machines
    """

    STREAM = 1
    ACTIONS = "lists"

    def __init__(
        self,
        setups: Sequence[Setup],
        count: int,
        seed: int = 0,
        first: int = 0,
        first_share: float = 0.0,
        unprofiled: float = 0.0,
        threads: int = 1,
    ):
        self.machines = Machines(setups, count, unprofiled)
        self.layout = self.machines.layout
        super().__init__(count, self.layout.size, len(LISTS), threads)
        self._first, self._first_share = first, first_share
        self._weights = np.zeros((count, len(TERMS)))
        room = self.machines.hosts["arrival_s"].shape[1]
        self._credits = np.zeros((count, room))
        self._baseline_s = np.ones(count)
        self.seed(seed)

    def reset(self) -> npt.NDArray[np.float32]:
        """Start an episode on every machine, in different phases; float32[B, size]."""
        observations = self._next_buffer()
        for index in range(self.num_envs):
            self._begin(index, observations, ahead=True)
        return observations

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Step every machine; ended ones begin a new episode."""
        observations, hosts = self._next_buffer(), self.machines.hosts
        began_s = hosts["now_s"][:, None].copy()

        def step(some: slice) -> None:
            self.machines.follow(some, self._actions[some], self._terms[some])
            self.machines.observe(some, observations[some])

        self._pool.share(step, self._pieces)
        self._ended[:] = self.machines.ended
        arrival_s = hosts["arrival_s"]
        arrived = (arrival_s > began_s) & (arrival_s <= hosts["now_s"][:, None])
        rewards = np.einsum("bt,bt->b", self._terms, self._weights)
        rewards += np.einsum("bj,bj->b", self._credits, arrived)
        self._returns += rewards
        dones, infos = self._end_episodes(observations)
        return observations, rewards.astype(np.float32), dones, infos

    def _summary(self, index: int) -> dict[str, Any]:
        scenario = self.machines.setup(index).scenario
        summary = self.machines.summary(index)
        over = figure_s(summary, scenario) / self._baseline_s[index]
        return summary | {"scenario": scenario.name, "over_baseline": over}

    def _begin(
        self, index: int, observations: npt.NDArray[np.float32], ahead: bool = False
    ) -> None:
        rng, machines = self._rng, self.machines
        among = self._first if rng.random() < self._first_share else len(machines.setups)
        machines.begin(index, int(rng.integers(among)), self._next_trace(), rng, ahead)
        self._partial[index], self._returns[index] = ahead, 0.0
        self._weigh(index)
        one = slice(index, index + 1)
        machines.observe(one, observations[one])

    def _weigh(self, index: int) -> None:
        """What the terms of the reward count in the episode that has just begun."""
        setup, baseline = self.machines.setup(index), self.machines.chosen(np.array([index]))
        baseline.follow(slice(None), np.array([setup.baseline]), no_terms(1), to_the_end=True)
        scenario, host = setup.scenario, baseline.hosts[0]
        self._baseline_s[index] = figure_s(baseline.summary(0), scenario)
        weights, credited = self._weights[index], self._credits[index]
        makespan_s = float(host["now_s"])
        weights[:] = BASELINE_RETURN * UNIT_S / max(makespan_s, UNIT_S)
        credited[:] = 0.0
        if scenario.has_arrivals:
            n_jobs = len(scenario.jobs)
            ended_s = np.minimum(host["end_s"][:n_jobs], host["duration_s"])
            # What a head start has done ended before it could arrive.
            jct_s = np.maximum(ended_s - host["arrival_s"][:n_jobs], 0.0)
            weights[[_TIME, _SHAPING]] = 0.0
            weights[_JCT] = BASELINE_RETURN * UNIT_S / max(float(jct_s.mean()), 1.0)
            credited[:n_jobs] = weights[_JCT] * jct_s / (UNIT_S * n_jobs)
