"""The Gymnasium environment: scheduling decisions on one machine, simulated or real."""

from typing import Any, Protocol

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from env.action import EditTable, edit_table
from env.codes import TERMINATED, TRUNCATED
from env.errors import InputError
from env.observation import feature_count
from env.scenario import Scenario, load_scenario
from env.simulator.load import trace_seeds


class Backend(Protocol):
    """
    A machine that an environment can run episodes on.

    `makes_load` says whether the machine makes its own load. If not, somebody else loads it, and
    trace seeds have no effect.
    """

    makes_load: bool

    def begin(self, trace_seed: int, rng: np.random.Generator) -> None:
        """
        Start an episode.

        :param trace_seed: seed of mcperf's load
        :param rng: draws everything else that is random
        """

    def step(self, edit: int, gamma: float) -> tuple[int, dict[str, float]]:
        """
        Take one decision.

        :param edit: index of the edit
        :param gamma: the trainer's discount, for the shaping term
        :return: 0, `TERMINATED` or `TRUNCATED`, and the reward terms by name
        """

    def observe(self, row: npt.NDArray[np.float32]) -> None:
        """
        Write the observation.

        :param row: float32[n_features + n_edits], receives features and action mask
        """

    def summary(self) -> dict[str, Any]:
        """The figures of the episode so far."""

    def close(self) -> None:
        """End the episode; whatever was done to a real machine is undone."""


class ColocationEnv(gymnasium.Env[npt.NDArray[np.float32], np.int64]):
    """
    Schedule batch jobs beside memcached so that they end early and the SLO holds.

    STATE:
        float32[n_features + n_edits]: load, memcached's CPU use, load history and timing, who
        holds which vCPU, each job's state, progress, threads, weight and vCPUs, all in fixed
        scales (`env.observation` lists them with their units); then the action mask, 1 where an
        edit is legal now. For `cca-2025`: 97 + 87.

    ACTIONS:
        Discrete(n_edits): keep the allocation, or edit one thing in it: memcached's vCPUs, or
        one job's start (threads, weight), place (vCPU set, weight) or pause (`env.action`). An
        edit that the mask forbids changes nothing. After an edit the next decision follows one
        polling period later (25 ms), after `keep` when a job ends, when the load moves, or when
        the hold time (1 s) is over.

    REWARDS:
        minus the seconds passed, minus the cost of breaking the SLO, plus potential-based
        shaping, in units of 10 s (`env.reward`); `info["reward_terms"]` has each term.

    REFERENCE:
        the load is mcperf's dynamic trace; the physics is fitted to measured runs (the profile).

    An episode terminates when all jobs are done and is truncated at the load's duration. Its
    last `info["episode_summary"]` has makespan, violation ratio, per-job times and actuations.

    :param scenario: a shipped scenario's name, a YAML file, or a `Scenario`
    :param gamma: the trainer's discount, for the shaping term
    :param backend: the machine; a simulated one with the scenario's profile if none is given
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as the base class has it

    def __init__(
        self,
        scenario: str | Scenario = "cca-2025",
        gamma: float = 1.0,
        backend: Backend | None = None,
    ):
        self.scenario = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
        self.gamma = gamma
        self.backend = backend or _simulated(self.scenario)
        self.table: EditTable = edit_table(self.scenario)
        self._size = feature_count(self.scenario) + len(self.table)
        self._begun = False
        self.observation_space = spaces.Box(-np.inf, np.inf, (self._size,), np.float32)
        self.action_space = spaces.Discrete(len(self.table))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """
        Start an episode.

        :param seed: fixes everything that is random in this and the following episodes
        :param options: `{"trace_seed": n}` asks for a certain mcperf trace, n from 1 to 2^31 - 1
        :raises InputError: if a trace is asked for where somebody else makes the load, or a real
            machine is not as it must be
        :raises ValueError: if the trace seed is none of mcperf's
        """
        super().reset(seed=seed)
        trace_seed = (options or {}).get("trace_seed")
        if trace_seed is not None and not self.backend.makes_load:
            raise InputError("trace_seed: this machine's load is made by somebody else")
        if trace_seed is None:
            entropy = int(self.np_random.integers(2**31))
            (trace_seed,) = trace_seeds(entropy, 1, "training")
        self.backend.begin(trace_seed, self.np_random)
        self._begun = True
        return self._observe(), {"trace_seed": trace_seed} if self.backend.makes_load else {}

    def step(
        self, action: np.int64 | int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """
        Take one decision; see the class for what it does.

        :param action: index of the edit
        :raises ValueError: if the action is not in the action space
        :raises ResetNeeded: before the first `reset`
        """
        if not self._begun:
            raise ResetNeeded("call reset before the first step")
        if not 0 <= int(action) < len(self.table):
            raise ValueError(f"action {action} is not one of 0 to {len(self.table) - 1}")
        ended, terms = self.backend.step(int(action), self.gamma)
        info: dict[str, Any] = {"reward_terms": terms}
        if ended:
            info["episode_summary"] = self.backend.summary()
        reward = sum(terms.values())
        return self._observe(), reward, ended == TERMINATED, ended == TRUNCATED, info

    def action_mask(self) -> npt.NDArray[np.bool_]:
        """bool[n_edits]: which edits are legal now; the end of the observation says the same."""
        return self._observe()[-len(self.table) :] > 0.5

    def close(self) -> None:
        """End the episode; a real machine is left as it was found."""
        self.backend.close()

    def _observe(self) -> npt.NDArray[np.float32]:
        row = np.empty(self._size, np.float32)
        self.backend.observe(row)
        return row


def _simulated(scenario: Scenario) -> Backend:
    # Imported here: an environment over a real machine needs no compiled simulator.
    from env.simulator.machine import EpisodeFactory, SimulatedMachine

    return SimulatedMachine(EpisodeFactory(scenario))
