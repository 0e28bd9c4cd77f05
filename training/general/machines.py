"""
Simulated machines that each play one of many scenarios, one episode after the other.

All show tokens and follow list schedules, so that one network plays on all of them. A decision is
which list to follow until a job arrives or ends. A scenario of any size fits every machine (hosts
and tokens have room to spare), and the tables of all scenarios lie in arrays, so that one compiled
call plays machines of different scenarios.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from env.codes import DONE
from env.lists.list_kernel import follow_batch
from env.lists.menu import LIST_SERVED, LISTS, ListTable, list_table, plain_list
from env.reward import TERMS
from env.scenario import Scenario
from env.sets.pointers import NO_EDIT
from env.sets.token_kernel import write_rows
from env.sets.tokens import Layout, TokenTable, token_table
from env.simulator.machine import EpisodeFactory, episode_summary

VIOLATION_PRICE = 10.0
"""What a share of intervals over the SLO costs, as a factor on that share of the whole time. The
best checkpoint is chosen at this price, too."""

EXPECTED_PRICE = 1.0
"""The same of what would be violated on a machine whose p95 scatters as the profile says."""

UNDONE_PRICE = 2.0
"""Factor on what is left to the cap where jobs do not get done."""

SHORTEST_S = 0.1
"""What is left of an episode counts as so much at least [s]."""


class Setup:
    """
    A scenario as machines play it.

    :param factory: the scenario, and how its episodes differ
    :param layout: of the tokens of all setups
    """

    def __init__(self, factory: EpisodeFactory, layout: Layout):
        self.factory, self.scenario = factory, factory.scenario
        self.tokens = token_table(self.scenario, layout)
        self.lists = list_table(self.scenario, self.tokens.edits)
        self.baseline = plain_list(self.scenario)
        """The list that an episode is measured by."""


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


class Tables:
    """
    What machines need to know of all setups, as arrays.

    :param setups: what machines play, of one layout and one size of hosts
    :raises ValueError: if their hosts differ in size
    """

    def __init__(self, setups: Sequence[Setup]):
        if len({setup.factory.size for setup in setups}) > 1:
            raise ValueError("scenarios that are played side by side need hosts of one size")
        self.setups, self.layout = setups, setups[0].tokens.layout
        tokens: list[TokenTable] = [setup.tokens for setup in setups]
        lists: list[ListTable] = [setup.lists for setup in setups]
        self.rows = stacked([table.edits.rows for table in tokens])
        self.arrivals = np.array([setup.scenario.has_arrivals for setup in setups])
        self.to_follow = (
            stacked([table.starts for table in lists]),
            stacked([table.places for table in lists]),
            stacked([table.pauses for table in lists]),
            stacked([table.sets for table in lists]),
            np.array([len(table.sets) for table in lists]),
            np.array([table.usual for table in lists]),
            self.arrivals,
            LISTS,
            LIST_SERVED,
        )
        self.to_write = (
            stacked([table.blank for table in tokens]),
            stacked([table.sets for table in tokens]),
            np.array([len(table.sets) for table in tokens]),
            stacked([table.slot_of for table in tokens], NO_EDIT),
            self.layout.offsets,
        )
        self.legal = np.stack([table.legal for table in lists])
        self.baselines = np.array([setup.baseline for setup in setups])


class Machines:
    """
    Machines side by side.

    :param setups: what they may play
    :param count: B, number of machines
    :param unprofiled: share of the episodes in which some of the jobs have no profile
    """

    def __init__(self, setups: Sequence[Setup], count: int, unprofiled: float = 0.0):
        self.tables, self.unprofiled = Tables(setups), unprofiled
        self.setups, self.layout = setups, self.tables.layout
        self.hosts = setups[0].factory.new_hosts(count)
        longest = max(setup.factory.trace_length for setup in setups)
        self.targets = np.zeros((count, longest))
        self.playing, self.ended = np.zeros((2, count), np.int64)

    def __len__(self) -> int:
        return len(self.hosts)

    def setup(self, index: int) -> Setup:
        """
        What a machine plays.

        :param index: of the machine
        """
        return self.setups[self.playing[index]]

    def begin(self, index: int, number: int, seed: int, rng: np.random.Generator) -> None:
        """
        Start an episode.

        :param index: of the machine
        :param number: of the setup
        :param seed: of its trace
        :param rng: of everything else
        """
        self.playing[index], self.ended[index] = number, 0
        factory, host = self.setups[number].factory, self.hosts[index]
        factory.begin(self.hosts, self.targets, index, seed, rng)
        if self.unprofiled > 0.0 and rng.random() < self.unprofiled:
            n_jobs = len(factory.scenario.jobs)
            host["job_known"][rng.permutation(n_jobs)[: rng.integers(n_jobs) + 1]] = 0

    def chosen(self, some: npt.NDArray[Any] | slice) -> "Machines":
        """
        Copies of some of the machines, which go on by themselves.

        :param some: int64[n], bool[B] or a slice, which
        """
        copies = copy.copy(self)
        copies.hosts, copies.targets = self.hosts[some].copy(), self.targets[some].copy()
        copies.playing, copies.ended = self.playing[some].copy(), self.ended[some].copy()
        return copies

    def more(self, count: int) -> "Machines":
        """
        Other machines for the same setups.

        :param count: number of machines
        """
        machines = copy.copy(self)
        machines.hosts = self.setups[0].factory.new_hosts(count)
        machines.targets = np.zeros((count, self.targets.shape[1]))
        machines.playing, machines.ended = np.zeros((2, count), np.int64)
        return machines

    @property
    def legal(self) -> npt.NDArray[np.bool_]:
        """Which lists mean something on each machine, bool[B, n_lists]."""
        legal: npt.NDArray[np.bool_] = self.tables.legal[self.playing]
        return legal

    def observe(self, some: slice, observations: npt.NDArray[np.float32]) -> None:
        """
        Write the tokens of some machines.

        :param some: which
        :param observations: float32[n, size], receives them
        """
        write_rows(self.hosts[some], self.playing[some], *self.tables.to_write, observations)

    def follow(self, some: slice, lists: npt.NDArray[np.int64], to_the_end: bool = False) -> None:
        """
        Have some machines follow lists until a job arrives or ends; who has ended stays.

        :param some: which machines
        :param lists: int64[n], of each its list
        :param to_the_end: follow them to the end of the episode
        """
        follow_batch(
            self.hosts[some], self.playing[some], self.tables.rows, self.targets[some],
            *self.tables.to_follow, lists, to_the_end, np.zeros(len(TERMS)), self.ended[some],
        )  # fmt: skip

    def play(
        self,
        some: slice,
        choose: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.int64]],
    ) -> None:
        """
        Have some machines follow what is chosen at each event, to the end of their episodes.

        :param some: which machines
        :param choose: of float32[n, size], what n of them show, the lists int64[n]
        """
        ended = self.ended[some]
        observations = np.zeros((len(ended), self.layout.size), np.float32)
        lists = np.zeros(len(ended), np.int64)
        while (going := ended == 0).any():
            self.observe(some, observations)
            lists[going] = choose(observations[going])
            self.follow(some, lists)

    def prices(self, before: "Machines") -> npt.NDArray[np.float64]:
        """
        What the rest of each episode took, which has ended, with what was violated: float64[B].

        The rest of the makespan, or where jobs arrive the sum of what is left of their completion
        times [s].

        :param before: the same machines when the rest began
        """
        since, hosts = before.hosts, self.hosts
        since_s, cap_s = since["now_s"], hosts["duration_s"]
        ended_s = np.minimum(hosts["end_s"], cap_s[:, None])
        from_s = np.maximum(hosts["arrival_s"], since_s[:, None])
        real = np.arange(ended_s.shape[1]) < hosts["n_jobs"][:, None]
        jct_s = np.where(real, np.maximum(ended_s - from_s, 0.0), 0.0).sum(1)
        seconds = np.where(self.tables.arrivals[self.playing], jct_s, hosts["now_s"] - since_s)
        done = (hosts["true_state"] == DONE).all(1)
        intervals = np.maximum(hosts["intervals"] - since["intervals"], 1)
        violated = (hosts["violations"] - since["violations"]) / intervals
        expected = (hosts["expected_violations"] - since["expected_violations"]) / intervals
        safety = 1.0 + VIOLATION_PRICE * violated + EXPECTED_PRICE * expected
        prices: npt.NDArray[np.float64] = np.maximum(seconds, SHORTEST_S)
        return prices * np.where(done, 1.0, UNDONE_PRICE) * safety

    def summary(self, index: int) -> dict[str, Any]:
        """
        The figures of an episode that has ended.

        :param index: of the machine
        """
        return episode_summary(self.hosts[index], self.setup(index).scenario)


def figure_s(summary: dict[str, Any], scenario: Scenario) -> float:
    """
    What counts of an episode: the makespan, or where jobs arrive their mean completion time [s].

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
