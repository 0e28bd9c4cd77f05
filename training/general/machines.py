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

from env.allocation import mask_of
from env.codes import DONE
from env.reward import UNIT_S
from env.scenario import Scenario
from env.sets.pointers import edits_of
from env.sets.token_kernel import step_tokens_batch, write_row_at
from env.sets.tokens import Layout, token_table
from env.simulator.machine import EpisodeFactory, Variation, episode_summary
from env.simulator.thread_pool import ThreadPool
from env.simulator.vector_env import HOSTS_AT_ONCE, HostBatch
from training.evaluation.schedule_search import in_turn, run_schedule_at

BASELINE_RETURN = 10.0
"""What the baseline's makespan costs: about what a return may be beside the policy's loss."""

AT_ONCE = 3
"""Jobs that the baseline runs side by side, in the background on the whole machine."""


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
        :param terms: float64[n, len(TERMS)], receives the reward terms
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


class MixedVecEnv(HostBatch):
    """
    As many machines of each scenario as of the others.

    :param scenarios: the problems
    :param each: number of machines of one scenario
    :param seed: of the training traces and everything else that is random
    :param variation: how episodes differ beyond their trace
    :param layout: of the tokens; room for the largest scenario if none is given
    :param threads: that step the machines
    """

    STREAM = 1

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
        super().__init__(each * len(scenarios), self.layout.size, len(self.layout.slots))
        self.each = each
        self.groups = [
            Group(EpisodeFactory(one, variation=variation), each, self.layout) for one in scenarios
        ]
        count = self.num_envs
        self._chosen = np.zeros(count, np.int64)
        self._units = np.ones(count, np.float32)  # what a reward is multiplied with
        self._baselines_s = np.zeros(count)
        self._pool = ThreadPool(threads)
        piece = min(HOSTS_AT_ONCE, each)
        self._pieces = [
            (group, slice(at, min(at + piece, each)), number * each)
            for number, group in enumerate(self.groups)
            for at in range(0, each, piece)
        ]
        self.seed(seed)

    def reset(self) -> npt.NDArray[np.float32]:
        """Start an episode on every machine, in different phases; float32[B, size]."""
        self._returns[:] = 0.0
        observations = self._next_buffer()
        for index in range(self.num_envs):
            self._begin(index, ahead=True)
        return observations

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
        observations = self._next_buffer()
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

    def _summary(self, index: int) -> dict[str, Any]:
        group = self.groups[index // self.each]
        summary = episode_summary(group.hosts[index % self.each], group.scenario)
        over = summary["makespan_s"] / self._baselines_s[index]
        return summary | {"scenario": group.scenario.name, "over_baseline": over}

    def _begin(self, index: int, ahead: bool = False) -> None:
        group, own = self.groups[index // self.each], index % self.each
        group.begin(own, self._next_trace(), self._rng, ahead)
        self._partial[index], self._returns[index] = ahead, 0.0
        self._baselines_s[index] = group.baseline_s(own)
        self._units[index] = BASELINE_RETURN * UNIT_S / max(self._baselines_s[index], UNIT_S)
        group.observe(own, self._observations[0][index])
