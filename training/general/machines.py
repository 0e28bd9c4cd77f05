"""
Simulated machines that each play one of many scenarios, one episode after the other.

All show tokens and take slots, so that one network plays on all of them. A scenario of any size
fits every machine (hosts and tokens have room to spare), and the tables of all scenarios lie in
arrays, so that one compiled call steps machines of different scenarios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from env.allocation import mask_of
from env.codes import DONE
from env.reward import TERMS
from env.scenario import Scenario
from env.sets.pointers import NO_EDIT, edits_of
from env.sets.token_kernel import step_tokens_batch, write_row_at
from env.sets.tokens import Layout, TokenTable, token_table
from env.simulator.machine import EpisodeFactory, episode_summary
from training.evaluation.schedule_search import Schedule, choices_of, run_schedule_at


class Setup:
    """
    A scenario as machines play it.

    :param factory: the scenario, and how its episodes differ
    :param schedules: good ones; what an episode comes to is measured by the first
    :param layout: of the tokens of all setups
    """

    def __init__(self, factory: EpisodeFactory, schedules: Sequence[Schedule], layout: Layout):
        self.factory, self.scenario, self.schedules = factory, factory.scenario, schedules
        self.tokens = token_table(self.scenario, layout)
        self.edit_of = edits_of(self.tokens.slot_of, layout.slots)
        self.choices = choices_of(self.scenario)
        self.overflow = mask_of(self.scenario.service.sets[-1])


@dataclass(frozen=True)
class Baseline:
    """
    What the setup's first schedule comes to in one episode.

    :param makespan_s: from the beginning to the last job's end, or to the cap
    :param jct_s: float64[J], each job's time from its arrival to its end, or to the cap
    """

    makespan_s: float
    jct_s: npt.NDArray[np.float64]

    def figure_s(self, scenario: Scenario) -> float:
        """
        What counts: the makespan, or where jobs arrive their mean completion time.

        :param scenario: the problem
        """
        return float(self.jct_s.mean()) if scenario.has_arrivals else self.makespan_s


def figure_s(summary: dict[str, Any], scenario: Scenario) -> float:
    """
    The same of an episode that a policy has played.

    :param summary: see `env.simulator.machine.episode_summary`
    :param scenario: the problem
    """
    if not scenario.has_arrivals:
        return float(summary["makespan_s"])
    cap_s = summary["duration_s"]
    ended = [
        (cap_s if job["end_s"] is None else job["end_s"]) - job["arrival_s"]
        for job in summary["jobs"].values()
    ]
    return float(np.mean(ended))


def stacked(arrays: Sequence[npt.NDArray[Any]], fill: int = 0) -> npt.NDArray[Any]:
    """
    Arrays of different lengths in one, filled up at their ends.

    :param arrays: of one type, equal in all but their first length
    :param fill: what it is filled up with
    """
    longest = max(map(len, arrays))
    shape = (len(arrays), longest, *arrays[0].shape[1:])
    stack = np.full(shape, fill, arrays[0].dtype)
    for row, array in zip(stack, arrays, strict=True):
        row[: len(array)] = array
    return stack


class Machines:
    """
    Machines side by side.

    :param setups: what they may play, of one layout and one size of hosts
    :param count: B, number of machines
    :param unprofiled: share of the episodes in which some of the jobs have no profile
    :raises ValueError: if their hosts differ in size
    """

    def __init__(self, setups: Sequence[Setup], count: int, unprofiled: float = 0.0):
        if len({setup.factory.size for setup in setups}) > 1:
            raise ValueError("scenarios that are played side by side need hosts of one size")
        self.setups, self.unprofiled = setups, unprofiled
        self.layout = setups[0].tokens.layout
        self.hosts = setups[0].factory.new_hosts(count)
        longest = max(setup.factory.trace_length for setup in setups)
        self.targets = np.zeros((count, longest))
        self.playing = np.zeros(count, np.int64)
        tables: list[TokenTable] = [setup.tokens for setup in setups]
        self.rows = stacked([table.edits.rows for table in tables])
        self.n_edits = np.array([len(table.edits) for table in tables])
        self._blank = stacked([table.blank for table in tables])
        self._sets = stacked([table.sets for table in tables])
        self._n_sets = np.array([len(table.sets) for table in tables])
        self.slot_of = stacked([table.slot_of for table in tables], NO_EDIT)
        self.edit_of = stacked([setup.edit_of for setup in setups])

    def setup(self, index: int) -> Setup:
        """
        What a machine plays.

        :param index: of the machine
        """
        return self.setups[self.playing[index]]

    def begin(
        self, index: int, number: int, seed: int, rng: np.random.Generator, ahead: bool = False
    ) -> None:
        """
        Start an episode.

        :param index: of the machine
        :param number: of the setup
        :param seed: of its trace
        :param rng: of everything else
        :param ahead: whether some jobs are done already
        """
        self.playing[index] = number
        factory, host = self.setups[number].factory, self.hosts[index]
        factory.begin(self.hosts, self.targets, index, seed, rng)
        if ahead:
            factory.head_start(host, rng)
        if self.unprofiled > 0.0 and rng.random() < self.unprofiled:
            n_jobs = len(factory.scenario.jobs)
            host["job_known"][rng.permutation(n_jobs)[: rng.integers(n_jobs) + 1]] = 0

    def baseline(self, index: int) -> Baseline:
        """
        What the first schedule comes to in an episode that has just begun, on a copy of the host.

        :param index: of the machine
        """
        setup, host = self.setup(index), self.hosts[index : index + 1].copy()
        plan = setup.schedules[0]
        run_schedule_at(
            host, 0, self.targets[index], plan.jobs, plan.order, plan.late, plan.threshold_qps,
            plan.at_once, plan.front, plan.interrupts, setup.choices, 0.0, 0.0, math.inf,
        )  # fmt: skip
        n_jobs, cap_s = len(setup.scenario.jobs), float(host["duration_s"][0])
        ended_s = np.minimum(host["end_s"][0, :n_jobs], cap_s)
        done = (host["true_state"] == DONE).all()
        # What a head start has done ended before it could arrive.
        jct_s = np.maximum(ended_s - host["arrival_s"][0, :n_jobs], 0.0)
        return Baseline(float(host["now_s"][0]) if done else cap_s, jct_s)

    def observe(self, index: int, row: npt.NDArray[np.float32]) -> None:
        """
        Write the tokens of a machine.

        :param index: of the machine
        :param row: float32[size], receives them
        """
        table = self.setup(index).tokens
        write_row_at(
            self.hosts, index, table.blank, table.sets, table.slot_of, self.layout.offsets, row
        )

    def step(
        self,
        some: slice,
        chosen: npt.NDArray[np.int64],
        terms: npt.NDArray[np.float64],
        ended: npt.NDArray[np.int64],
        observations: npt.NDArray[np.float32],
    ) -> None:
        """
        One decision on some of the machines; see `env.sets.token_kernel.step_tokens_batch`.

        :param some: which machines
        :param chosen: int64[n], their slots
        :param terms: float64[n, len(TERMS)], receives the reward terms
        :param ended: int64[n], receives 0, `TERMINATED` or `TRUNCATED`
        :param observations: float32[n, size], receives the tokens
        """
        step_tokens_batch(
            self.hosts[some], self.playing[some], self.rows, self.targets[some], self.edit_of,
            chosen, 1.0, terms, ended, self._blank, self._sets, self._n_sets, self.slot_of,
            self.layout.offsets, observations,
        )  # fmt: skip

    def keep(self, some: npt.NDArray[np.bool_]) -> None:
        """
        Drop the other machines.

        :param some: bool[B], which stay
        """
        self.hosts, self.targets = self.hosts[some], self.targets[some]
        self.playing = self.playing[some]

    def summary(self, index: int) -> dict[str, Any]:
        """
        The figures of an episode that has ended.

        :param index: of the machine
        """
        return episode_summary(self.hosts[index], self.setup(index).scenario)


def no_terms(count: int) -> npt.NDArray[np.float64]:
    """
    Room for reward terms, float64[count, len(TERMS)].

    :param count: number of machines
    """
    return np.zeros((count, len(TERMS)))
