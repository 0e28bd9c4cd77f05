"""
Thousands of simulated machines behind one native Stable-Baselines3 `VecEnv`.

The batch lives in one structured array; one call of the kernel steps all of it, or each thread a
piece at a time. Infos are shared empty dicts except where an episode ends, so that a step costs no
Python per host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from env.codes import TRUNCATED
from env.reward import TERMS
from env.scenario import Scenario
from env.simulator import kernel
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, Variation, episode_summary
from env.simulator.profile import Profile
from env.simulator.thread_pool import ThreadPool

_SEEDS_DRAWN_AT_ONCE = 4096

HOSTS_AT_ONCE = 128
"""Machines in one piece of a step that threads share."""


class ColocationVecEnv(VecEnv):
    """
    B simulated machines with the observation, action and reward of `coretide/Colocation-v0`.

    :param scenario: the problem
    :param n_envs: B, number of machines
    :param gamma: the trainer's discount, for the shaping term
    :param seed: entropy of the training traces and of everything else that is random
    :param profile: fitted parameters; the scenario's own if none is given
    :param variation: how episodes differ beyond their trace
    :param staggered: first episodes begin in different phases, so that one update sees all of them
    :param threads: that step the machines
    """

    def __init__(
        self,
        scenario: Scenario,
        n_envs: int,
        gamma: float,
        seed: int = 0,
        profile: Profile | None = None,
        variation: Variation | None = None,
        staggered: bool = True,
        threads: int = 1,
    ):
        self.factory = EpisodeFactory(scenario, profile, variation)
        self.table = self.factory.table
        size = self.factory.observation_size
        self.render_mode = None
        super().__init__(
            n_envs,
            spaces.Box(-np.inf, np.inf, (size,), np.float32),
            spaces.Discrete(len(self.table)),
        )
        self.scenario = scenario
        self.gamma = gamma
        self.staggered = staggered
        self.hosts = self.factory.new_hosts(n_envs)
        self.targets = self.factory.new_targets(n_envs)
        # Two buffers in turn: Stable-Baselines3 still reads the last observation after a step.
        self._observations = [np.zeros((n_envs, size), np.float32) for _ in range(2)]
        self._actions = np.zeros(n_envs, np.int64)
        self._terms = np.zeros((n_envs, len(TERMS)))
        self._ended = np.zeros(n_envs, np.int64)
        self._returns = np.zeros(n_envs)
        self._partial = np.zeros(n_envs, bool)  # episodes that had a head start
        self._nothing: dict[str, Any] = {}
        self._pool = ThreadPool(threads)
        piece = HOSTS_AT_ONCE if threads > 1 else n_envs
        self._pieces = [slice(at, at + piece) for at in range(0, n_envs, piece)]
        self.seed(seed)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """
        Restart the sequence of episodes; `None` keeps it.

        :param seed: seed of the sequence; None keeps the sequence
        """
        if seed is not None:
            self._entropy = seed
            self._rng = np.random.default_rng([seed, 0])
            self._traces: list[int] = []
            self._traces_drawn = 0
        return [seed] * self.num_envs

    def reset(self) -> npt.NDArray[np.float32]:
        """Start an episode on every machine; float32[B, size]."""
        observations = self._next_buffer()
        for index in range(self.num_envs):
            self._begin(index, observations, ahead=self.staggered)
        return observations

    def step_async(self, actions: npt.NDArray[np.int64]) -> None:
        """
        Remember the actions, int[B].

        :param actions: int64[B], index of each action
        :raises ValueError: if one is not in the action space; the kernel checks no bounds
        """
        actions = np.asarray(actions)
        if actions.min() < 0 or actions.max() >= len(self.table):
            raise ValueError(f"edits must lie from 0 to {len(self.table) - 1}")
        self._actions[:] = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Step every machine; ended ones begin a new episode."""
        observations = self._next_buffer()
        rewards = np.empty(self.num_envs, np.float32)

        def step(some: slice) -> None:
            kernel.step_batch(
                self.hosts[some],
                self.factory.table.rows,
                self.targets[some],
                self._actions[some],
                self.gamma,
                self._terms[some],
                rewards[some],
                self._ended[some],
                observations[some],
            )

        self._pool.share(step, self._pieces)
        self._returns += rewards
        infos = [self._nothing] * self.num_envs
        dones = self._ended != 0
        for index in np.flatnonzero(dones).tolist():
            infos[index] = self._final_info(index, observations)
            self._begin(index, observations)
        return observations, rewards, dones, infos

    def _begin(
        self, index: int, observations: npt.NDArray[np.float32], ahead: bool = False
    ) -> None:
        """Start an episode of a machine, some of whose jobs are done if it has a head start."""
        self._partial[index], self._returns[index] = ahead, 0.0
        self.factory.begin(self.hosts, self.targets, index, self._next_trace(), self._rng)
        if ahead:
            self.factory.head_start(self.hosts[index], self._rng)
        kernel.observe_at(self.hosts, index, self.factory.table.rows, observations[index])

    def _next_buffer(self) -> npt.NDArray[np.float32]:
        self._observations.reverse()
        return self._observations[0]

    def _next_trace(self) -> int:
        """The seed of the next training trace."""
        if not self._traces:
            self._traces_drawn += _SEEDS_DRAWN_AT_ONCE
            drawn = trace_seeds(self._entropy, self._traces_drawn, "training")
            self._traces = drawn[-_SEEDS_DRAWN_AT_ONCE:]
        return self._traces.pop()

    def _final_info(self, index: int, observations: npt.NDArray[np.float32]) -> dict[str, Any]:
        info: dict[str, Any] = {
            "terminal_observation": observations[index].copy(),
            "TimeLimit.truncated": bool(self._ended[index] == TRUNCATED),
        }
        if not self._partial[index]:
            summary = episode_summary(self.hosts[index], self.scenario)
            info["episode_summary"] = summary
            info["episode"] = {
                "r": float(self._returns[index]),
                "l": summary["decisions"],
                "t": summary["makespan_s"],
            }
        return info

    def close(self) -> None:
        """Nothing to close."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """
        An attribute of this batch, once per machine.

        :param attr_name: name of the attribute
        :param indices: the machines, as Stable-Baselines3 numbers them; None means all
        """
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """
        Set an attribute of the whole batch.

        :param attr_name: name of the attribute
        :param value: its value
        :param indices: of no effect: the machines share their attributes
        """
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """
        Refuse: the machines are rows of arrays and have no methods.

        :param method_name: name of the method
        :param args: of no effect, as `indices` and `kwargs`
        :param indices: of no effect
        :param kwargs: of no effect
        :raises AttributeError: always
        """
        raise AttributeError(f"{type(self).__name__} has no per-machine method {method_name!r}")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """
        Whether each machine is wrapped: none is.

        :param wrapper_class: of no effect
        :param indices: the machines, as Stable-Baselines3 numbers them; None means all
        """
        return [False] * len(list(self._get_indices(indices)))
