"""
What lists come to, from states that a policy has met: branches of one simulated machine.

A simulated machine can be copied. Each of some lists is followed on a copy, by the same load, the
same hiccups and the same random numbers, to the end of the episode. So what they come to differs by
what was decided, and not by luck.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from env.lists.menu import LISTS
from env.simulator.load import trace_seeds
from env.simulator.thread_pool import ThreadPool
from training.general.attention_policy import AttentionPolicy
from training.general.machines import Machines, Setup, no_terms

MACHINES_AT_ONCE = 64
"""In one piece that threads share."""

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
    Branches from several rounds; where one has fewer lists, some of them come again.

    :param some: the rounds
    """
    most = max(one.lists.shape[1] for one in some)

    def widened(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return np.take(array, np.arange(most) % array.shape[1], axis=1)

    return Branches(
        np.concatenate([one.tokens for one in some]),
        np.concatenate([widened(one.lists) for one in some]),
        np.concatenate([widened(one.prices) for one in some]),
    )


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
        self._rng = np.random.default_rng([seed, len(setups)])
        self._seed, self._traces, self._begun = seed, 0, Machines(setups, 0, unprofiled)
        self._pool = ThreadPool(threads)

    def episodes(self, count: int, first: int, share: float) -> npt.NDArray[np.int64]:
        """
        What to play next: the setups of most interest at random, all others as often, int64[count].

        :param count: how many episodes
        :param first: how many setups are of most interest, the first ones
        :param share: of the episodes that play one of them; all do if there are no others
        """
        others = len(self.setups) - first
        own = (round(share * count) if others else count) if first else 0
        drawn = first + np.resize(self._rng.permutation(others), count - own)
        return np.concatenate([self._rng.integers(max(first, 1), size=own), drawn])

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
        observations = np.zeros((len(machines), machines.layout.size), np.float32)
        machines.observe(slice(None), observations)
        return observations

    def follow(self, machines: Machines, lists: npt.NDArray[np.int64], to_the_end: bool) -> None:
        """
        Have machines follow lists, in threads.

        :param machines: the machines
        :param lists: int64[B]
        :param to_the_end: see `Machines.follow`
        """
        terms = no_terms(len(machines))
        starts = range(0, len(machines), MACHINES_AT_ONCE)
        pieces = [slice(start, start + MACHINES_AT_ONCE) for start in starts]
        self._pool.share(
            lambda some: machines.follow(some, lists[some], terms[some], to_the_end), pieces
        )

    def branch(self, machines: Machines, lists: npt.NDArray[np.int64]) -> Branches:
        """
        Try lists.

        :param machines: B of them
        :param lists: int64[B, K]
        """
        prices = np.empty(lists.shape, np.float32)
        for k in range(lists.shape[1]):
            copies = machines.chosen(slice(None))
            self.follow(copies, lists[:, k], to_the_end=True)
            prices[:, k] = np.log(copies.prices(machines))
        return Branches(self.observe(machines), lists, prices)

    def first_branches(self, playing: npt.NDArray[np.int64], count: int) -> Branches:
        """
        Try random lists at the start of episodes.

        :param playing: int64[B], the setup of each
        :param count: K, how many lists are tried
        """
        machines = self.begin(playing)
        return self.branch(machines, self._drawn(machines, count))

    def met_branches(
        self, playing: npt.NDArray[np.int64], policy: AttentionPolicy, count: int
    ) -> list[Branches]:
        """
        Play, and try lists from some of the states that are met.

        Those are tried that the policy thinks best, others by their scores, and some at random.

        :param playing: int64[B], the setup of each machine
        :param policy: that chooses
        :param count: K, how many lists are tried, at least 4
        """
        machines = self.begin(playing)
        jobs = np.array([len(self.setups[number].scenario.jobs) for number in playing])
        share = STATES / (STATES + jobs)
        found = []
        while len(machines):
            scores = policy.scores(self.observe(machines))
            picked = self._rng.random(len(machines)) < share
            if picked.any():
                states, likely = machines.chosen(picked), scores[picked]
                lists = np.column_stack(
                    [likely.argmax(1), self._by_score(likely, count - 3), self._drawn(states, 2)]
                )
                found.append(self.branch(states, lists))
            lists = scores.argmax(1)
            wander = self._rng.random(len(machines)) < WANDERING
            lists[wander] = self._by_score(scores[wander], 1)[:, 0]
            self.follow(machines, lists, to_the_end=False)
            stay = machines.ended == 0
            machines, share = machines.chosen(stay), share[stay]
        return found

    def _by_score(self, scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
        """Lists drawn by their scores, int64[B, count], each once (Gumbel 1954)."""
        luck = self._rng.gumbel(size=scores.shape)
        drawn: npt.NDArray[np.int64] = np.argpartition(-(scores + luck), count, 1)[:, :count]
        return drawn

    def _drawn(self, machines: Machines, count: int) -> npt.NDArray[np.int64]:
        """Lists at random, of those that mean something, int64[B, count]."""
        luck = np.where(machines.legal, self._rng.random((len(machines), len(LISTS))), 2.0)
        drawn: npt.NDArray[np.int64] = np.argpartition(luck, count, 1)[:, :count]
        return drawn
