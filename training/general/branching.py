"""
What lists come to, from states that a policy has met: branches of one simulated machine.

A simulated machine can be copied. Each of some lists is followed on a copy, by the same load, the
same hiccups and the same random numbers: to the end of the episode, or until the next event, after
which the policy goes on. So what they come to differs by what was decided, and not by luck.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.lists.menu import LISTS
from env.simulator.load import trace_seeds
from env.simulator.thread_pool import ThreadPool
from training.general.attention_policy import AttentionPolicy
from training.general.machines import Machines, Setup
from training.ppo.fast_ppo import one_core, one_core_each

MACHINES_AT_ONCE = 64
"""In one of the pieces that threads share."""

PLAYED_AT_ONCE = 512
"""Machines in a piece where a network chooses, which costs less for many at once."""

COPIES = 16384
"""Machines that are branched at a time, each kept twice, as it was and as it goes on: 0.5 GB."""

WANDERING = 0.2
"""Share of the decisions that are drawn by their scores while a policy is followed, so that states
are met that it would not lead to."""

STATES = 2.0
"""Each state of an episode of J jobs is branched from with the probability STATES / (STATES + J),
so one to two of an episode are, and more where jobs arrive."""


@dataclass(frozen=True)
class Branches:
    """
    What some lists came to from n states, K lists each.

    :param tokens: float32[n, size], what the states showed
    :param lists: int64[n, K]
    :param prices: float32[n, K], logarithm of what each took (`Machines.prices`)
    """

    tokens: npt.NDArray[np.float32]
    lists: npt.NDArray[np.int64]
    prices: npt.NDArray[np.float32]


def together(some: list[Branches]) -> Branches:
    """
    Several branches as one.

    :param some: all with the same number of lists
    """
    return Branches(
        *(
            np.concatenate([getattr(one, name) for one in some])
            for name in ("tokens", "lists", "prices")
        )
    )


def _cut(count: int, size: int) -> list[slice]:
    """Pieces of at most so many that cover 0 to `count`."""
    return [slice(at, at + size) for at in range(0, count, size)]


class Explorer:
    """
    Plays setups and tries lists from what it meets.

    :param setups: the scenarios
    :param unprofiled: share of the episodes in which some of the jobs have no profile
    :param seed: of the traces and of everything else
    :param threads: that play machines
    """

    def __init__(self, setups: list[Setup], unprofiled: float, seed: int, threads: int):
        self.setups, self._unprofiled = setups, unprofiled
        self.layout = setups[0].tokens.layout
        self._rng = np.random.default_rng([seed, len(setups)])
        self._seed, self._traces, self._begun = seed, 0, Machines(setups, 0, unprofiled)
        self._pool = ThreadPool(threads, one_core)

    def episodes(self, count: int, first: int, share: float) -> npt.NDArray[np.int64]:
        """
        What to play next, int64[count]: setups of most interest, and others, each chosen at random.

        :param count: how many episodes
        :param first: how many setups are of most interest, the first ones
        :param share: of the episodes that play one of them; all do if there are no others
        """
        others = len(self.setups) - first
        own = round(share * count) if others else count
        drawn = first + np.resize(self._rng.permutation(others), count - own)
        return np.concatenate([self._rng.integers(first, size=own), drawn])

    def begin(self, playing: npt.NDArray[np.int64]) -> Machines:
        """
        Machines at the start of an episode.

        :param playing: int64[B], the setup of each
        """
        machines = self._begun.more(len(playing))
        first, self._traces = self._traces, self._traces + len(playing)
        seeds = trace_seeds(self._seed, self._traces, "training")[first:]
        for index, (number, seed) in enumerate(zip(playing.tolist(), seeds, strict=True)):
            machines.begin(index, number, seed, self._rng)
        return machines

    def observe(self, machines: Machines) -> npt.NDArray[np.float32]:
        """
        What machines show, float32[B, size].

        :param machines: the machines
        """
        observations = np.zeros((len(machines), self.layout.size), np.float32)
        machines.observe(slice(None), observations)
        return observations

    def follow(self, machines: Machines, lists: npt.NDArray[np.int64], to_the_end: bool) -> None:
        """
        Have machines follow lists, in threads.

        :param machines: the machines
        :param lists: int64[B]
        :param to_the_end: see `Machines.follow`
        """
        self._pool.share(
            lambda some: machines.follow(some, lists[some], to_the_end),
            _cut(len(machines), MACHINES_AT_ONCE),
        )

    def follow_policy(self, machines: Machines, policy: AttentionPolicy) -> None:
        """
        Have machines do what a policy thinks best to the end of their episodes, in threads.

        :param machines: the machines
        :param policy: that chooses
        """
        with one_core_each():
            self._pool.share(
                lambda some: machines.play(some, policy.best), _cut(len(machines), PLAYED_AT_ONCE)
            )

    def branch(
        self,
        machines: Machines,
        lists: npt.NDArray[np.int64],
        policy: AttentionPolicy | None = None,
    ) -> Branches:
        """
        Try lists.

        :param machines: B of them
        :param lists: int64[B, K]
        :param policy: that goes on from the next event; without one a list is followed to the end
        """
        prices = np.empty(lists.shape, np.float32)
        for some in _cut(len(machines), max(1, COPIES // lists.shape[1])):
            begun = machines.chosen(np.repeat(np.arange(len(machines))[some], lists.shape[1]))
            copies = begun.chosen(slice(None))
            self.follow(copies, lists[some].ravel(), to_the_end=policy is None)
            if policy is not None:
                self.follow_policy(copies, policy)
            prices[some] = np.log(copies.prices(begun)).reshape(-1, lists.shape[1])
        return Branches(self.observe(machines), lists, prices)

    def first_branches(self, playing: npt.NDArray[np.int64], count: int) -> Branches:
        """
        Try random lists at the start of episodes, to their end, each once.

        :param playing: int64[B], the setup of each
        :param count: K, how many lists are tried
        """
        machines = self.begin(playing)
        luck = np.where(machines.legal, self._rng.random((len(machines), len(LISTS))), 2.0)
        return self.branch(machines, np.argpartition(luck, count, 1)[:, :count])

    def met_branches(
        self, playing: npt.NDArray[np.int64], policy: AttentionPolicy, count: int
    ) -> Branches:
        """
        Play, and try lists that the policy draws from some of the states that are met.

        :param playing: int64[B], the setup of each machine
        :param policy: that chooses
        :param count: K, how many lists are drawn from each of those states
        """
        machines = self.begin(playing)
        jobs = np.array([len(self.setups[number].scenario.jobs) for number in playing])
        share = STATES / (STATES + jobs)
        found = []
        while len(machines):
            scores = policy.scores(self.observe(machines))
            picked = self._rng.random(len(machines)) < share
            if picked.any():
                drawn = np.column_stack([self._drawn(scores[picked]) for _ in range(count)])
                found.append(self.branch(machines.chosen(picked), drawn, policy))
            lists = scores.argmax(1)
            wander = self._rng.random(len(machines)) < WANDERING
            lists[wander] = self._drawn(scores[wander])
            self.follow(machines, lists, to_the_end=False)
            stay = machines.ended == 0
            machines, share = machines.chosen(stay), share[stay]
        return together(found)

    def _drawn(self, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """A list for each state, drawn by its scores (Gumbel 1954), int64[B]."""
        drawn: npt.NDArray[np.int64] = (scores + self._rng.gumbel(size=scores.shape)).argmax(1)
        return drawn
