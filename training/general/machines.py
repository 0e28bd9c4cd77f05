"""
Simulated machines of many scenarios behind one Stable-Baselines3 `VecEnv`.

All show tokens and take slots, so that one network plays on all of them. What an episode is worth
is said in units of what a plain rule needs for it: the same trace, the same machine, the same
random numbers, on a copy of the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from env.allocation import mask_of
from env.codes import DONE, TRUNCATED
from env.reward import TERMS, UNIT_S
from env.scenario import Scenario
from env.sets.pointers import edits_of
from env.sets.token_kernel import step_tokens_batch, write_row_at
from env.sets.tokens import Layout, token_table
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, Variation, episode_summary
from env.simulator.thread_pool import ThreadPool
from env.simulator.vector_env import HOSTS_AT_ONCE
from training.evaluation.schedule_search import in_turn, run_schedule_at

BASELINE_RETURN = 10.0
"""What the baseline's makespan costs: about what a return may be beside the policy's loss."""

AT_ONCE = 3
"""Jobs that the baseline runs side by side, in the background on the whole machine."""

_SEEDS_DRAWN_AT_ONCE = 1024


class Group:
    """
    Machines of one scenario.

    :param factory: the scenario and how its episodes differ
    :param count: number of machines
    :param layout: of the tokens of all groups
    """

    def __init__(self, factory: EpisodeFactory, count: int, layout: Layout):
        self.factory, self.scenario = factory, factory.scenario
        self.tokens = token_table(self.scenario, layout)
        self.edit_of = edits_of(self.tokens.slot_of, layout.slots)
        self.offsets = layout.offsets
        self.hosts, self.targets = factory.new_hosts(count), factory.new_targets(count)
        self._plan = in_turn(self.scenario, AT_ONCE)
        choices = self.scenario.service.core_choices
        self._sets = mask_of(choices[0]), mask_of(choices[-1])

    def begin(self, index: int, seed: int, rng: np.random.Generator, ahead: bool = False) -> None:
        """
        Start an episode.

        :param index: of the machine
        :param seed: of its trace
        :param rng: of everything else
        :param ahead: whether some jobs are done already
        """
        self.factory.begin(self.hosts, self.targets, index, seed, rng)
        if ahead:
            self.factory.head_start(self.hosts[index], rng)

    def baseline_s(self, index: int) -> float:
        """
        What the baseline needs for an episode that has just begun, on a copy of the machine [s].

        :param index: of the machine
        """
        host, plan = self.hosts[index : index + 1].copy(), self._plan
        run_schedule_at(
            host, 0, self.targets[index], plan.jobs, plan.order, plan.late, plan.threshold_qps,
            *self._sets,
        )  # fmt: skip
        done = (host["true_state"] == DONE).all()
        return float(host["now_s" if done else "duration_s"][0])

    def observe(self, index: int, row: npt.NDArray[np.float32]) -> None:
        """
        Write the tokens of a machine.

        :param index: of the machine
        :param row: float32[size], receives them
        """
        table = self.tokens
        write_row_at(self.hosts, index, table.blank, table.sets, table.slot_of, self.offsets, row)

    def step(
        self,
        some: slice,
        chosen: npt.NDArray[np.int64],
        terms: npt.NDArray[np.float64],
        rewards: npt.NDArray[np.float32],
        ended: npt.NDArray[np.int64],
        observations: npt.NDArray[np.float32],
    ) -> None:
        """
        One decision on some of the machines; see `env.sets.token_kernel.step_tokens_batch`.

        :param some: which machines
        :param chosen: int64[n], their slots
        :param terms: float64[n, 4], receives the reward terms
        :param rewards: float32[n], receives their sums
        :param ended: int64[n], receives 0, `TERMINATED` or `TRUNCATED`
        :param observations: float32[n, size], receives the tokens
        """
        table = self.tokens
        step_tokens_batch(
            self.hosts[some], table.edits.rows, self.targets[some], self.edit_of, chosen, 1.0,
            terms, rewards, ended, table.blank, table.sets, table.slot_of, self.offsets,
            observations,
        )  # fmt: skip


def common_layout(scenarios: Sequence[Scenario]) -> Layout:
    """
    Room for the largest of some scenarios.

    :param scenarios: the problems
    """
    return Layout(
        max(len(scenario.jobs) for scenario in scenarios),
        max(scenario.machine.vcpus for scenario in scenarios),
    )


class MixedVecEnv(VecEnv):
    """
    As many machines of each scenario as of the others.

    :param scenarios: the problems
    :param each: number of machines of one scenario
    :param seed: of the training traces and everything else that is random
    :param variation: how episodes differ beyond their trace
    :param layout: of the tokens; room for the largest scenario if none is given
    :param threads: that step the machines
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        each: int,
        seed: int = 0,
        variation: Variation | None = None,
        layout: Layout | None = None,
        threads: int = 1,
    ):
        self.layout = layout or common_layout(scenarios)
        self.render_mode = None
        super().__init__(
            each * len(scenarios),
            spaces.Box(-np.inf, np.inf, (self.layout.size,), np.float32),
            spaces.Discrete(len(self.layout.slots)),
        )
        self.each = each
        self.groups = [
            Group(EpisodeFactory(one, variation=variation), each, self.layout) for one in scenarios
        ]
        count = self.num_envs
        self._observations = [np.zeros((count, self.layout.size), np.float32) for _ in range(2)]
        self._terms = np.zeros((count, len(TERMS)))
        self._ended = np.zeros(count, np.int64)
        self._chosen = np.zeros(count, np.int64)
        self._returns = np.zeros(count)
        self._units = np.ones(count, np.float32)  # what a reward is multiplied with
        self._baselines_s = np.zeros(count)
        self._partial = np.zeros(count, bool)
        self._nothing: dict[str, Any] = {}
        self._pool = ThreadPool(threads)
        piece = min(HOSTS_AT_ONCE, each)
        self._pieces = [
            (group, slice(at, min(at + piece, each)), number * each)
            for number, group in enumerate(self.groups)
            for at in range(0, each, piece)
        ]
        self.seed(seed)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """
        Restart the sequence of episodes; `None` keeps it.

        :param seed: seed of the sequence; None keeps the sequence
        """
        if seed is not None:
            self._entropy = seed
            self._rng = np.random.default_rng([seed, 1])
            self._traces: list[int] = []
            self._traces_drawn = 0
        return [seed] * self.num_envs

    def reset(self) -> npt.NDArray[np.float32]:
        """Start an episode on every machine, in different phases; float32[B, size]."""
        self._returns[:] = 0.0
        self._observations.reverse()
        for index in range(self.num_envs):
            self._begin(index, ahead=True)
        return self._observations[0]

    def step_async(self, actions: npt.NDArray[np.int64]) -> None:
        """
        Remember the slots, int[B].

        :param actions: int64[B], index of each slot
        :raises ValueError: if one is not in the action space; the kernel checks no bounds
        """
        actions = np.asarray(actions)
        if actions.min() < 0 or actions.max() >= len(self.layout.slots):
            raise ValueError(f"slots must lie from 0 to {len(self.layout.slots) - 1}")
        self._chosen[:] = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """Step every machine; ended ones begin a new episode."""
        self._observations.reverse()
        observations = self._observations[0]
        rewards = np.empty(self.num_envs, np.float32)

        def step(piece: tuple[Group, slice, int]) -> None:
            group, some, first = piece
            here = slice(first + some.start, first + some.stop)
            group.step(
                some, self._chosen[here], self._terms[here], rewards[here], self._ended[here],
                observations[here],
            )  # fmt: skip

        self._pool.share(step, self._pieces)
        rewards *= self._units
        self._returns += rewards
        infos = [self._nothing] * self.num_envs
        dones = self._ended != 0
        for index in np.flatnonzero(dones).tolist():
            infos[index] = self._final_info(index, observations)
            self._begin(index)
        return observations, rewards, dones, infos

    def _final_info(self, index: int, observations: npt.NDArray[np.float32]) -> dict[str, Any]:
        info: dict[str, Any] = {
            "terminal_observation": observations[index].copy(),
            "TimeLimit.truncated": bool(self._ended[index] == TRUNCATED),
        }
        if not self._partial[index]:
            group = self.groups[index // self.each]
            summary = episode_summary(group.hosts[index % self.each], group.scenario)
            summary["scenario"] = group.scenario.name
            summary["over_baseline"] = summary["makespan_s"] / self._baselines_s[index]
            info["episode_summary"] = summary
            info["episode"] = {
                "r": float(self._returns[index]),
                "l": summary["decisions"],
                "t": summary["makespan_s"],
            }
        return info

    def _begin(self, index: int, ahead: bool = False) -> None:
        if not self._traces:
            self._traces_drawn += _SEEDS_DRAWN_AT_ONCE
            drawn = trace_seeds(self._entropy, self._traces_drawn, "training")
            self._traces = drawn[-_SEEDS_DRAWN_AT_ONCE:]
        group, own = self.groups[index // self.each], index % self.each
        group.begin(own, self._traces.pop(), self._rng, ahead)
        self._partial[index], self._returns[index] = ahead, 0.0
        self._baselines_s[index] = group.baseline_s(own)
        self._units[index] = BASELINE_RETURN * UNIT_S / max(self._baselines_s[index], UNIT_S)
        group.observe(own, self._observations[0][index])

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
        raise AttributeError(f"MixedVecEnv has no per-machine method {method_name!r}")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """
        Whether each machine is wrapped: none is.

        :param wrapper_class: of no effect
        :param indices: the machines, as Stable-Baselines3 numbers them; None means all
        """
        return [False] * len(list(self._get_indices(indices)))
