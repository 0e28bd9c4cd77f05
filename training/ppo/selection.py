"""Scoring a policy on the selection traces: what decides which checkpoint is the best."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from env.reward import VIOLATION_WEIGHT
from env.simulator import kernel
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, episode_summary

SELECTION_ENTROPY = 20250531
"""Fixed before any training run; report traces come from another class of seeds altogether."""

ACCEPTED_VIOLATION_RATIO = 0.002
"""Violation ratio up to which violations do not count."""

ACCEPTED_VARIED_RATIO = 0.01
"""The same limit where each episode's physics and load interval are drawn as the recipe says."""


class Actor(Protocol):
    """A policy as a function from observations to edits."""

    def act(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """
        Choose an edit in each state.

        :param observation: float32[B, size]
        :return: int64[B], index of each edit
        """


@dataclass(frozen=True, order=True)
class Score:
    """
    Smaller is better: fewest violations, unless they are few enough; then the least cost.

    :param excess: violation ratio, 0 where it is acceptable
    :param cost_s: mean makespan [s], and at the reward's price what is to be expected to violate,
        and what is violated on varied traces, unless that is acceptable. On a slow enough machine
        no policy holds the SLO: to ask for the fewest violations there, whatever they cost, would
        choose policies that are slow everywhere
    :param makespan_s: mean makespan [s]
    :param violation_ratio: mean over the selection traces
    :param expected_violation_ratio: the same where p95 scatter as they were measured
    :param completed: share of the episodes whose jobs got done
    :param varied_violation_ratio: mean over the same traces with drawn physics and intervals
    """

    excess: float
    cost_s: float
    makespan_s: float
    violation_ratio: float
    expected_violation_ratio: float
    completed: float
    varied_violation_ratio: float = 0.0


def run_selection(actor: Actor, factory: EpisodeFactory, episodes: int) -> list[dict[str, Any]]:
    """
    Run a policy once on each selection trace.

    :param actor: the policy, deterministic
    :param factory: what the episodes look like
    :param episodes: how many traces
    :return: the summary of each episode
    """
    hosts, targets = factory.new_hosts(episodes), factory.new_targets(episodes)
    rows = factory.table.rows
    observations = np.zeros((episodes, factory.observation_size), np.float32)
    for index, seed in enumerate(trace_seeds(SELECTION_ENTROPY, episodes, "selection")):
        rng = np.random.default_rng([SELECTION_ENTROPY, seed])
        factory.begin(hosts, targets, index, seed, rng)
        kernel.observe_at(hosts, index, rows, observations[index])
    terms = np.zeros((episodes, hosts["term_sums"].shape[1]))
    rewards, ended = np.zeros(episodes, np.float32), np.zeros(episodes, np.int64)
    going = np.arange(episodes)
    summaries: list[dict[str, Any]] = [{}] * episodes
    while len(going):
        # Ended episodes leave the batch; what remains is stepped as one array.
        batch, observed = hosts[going], observations[going]
        kernel.step_batch(
            batch, rows, targets[going], actor.act(observed), 1.0,
            terms[: len(going)], rewards[: len(going)], ended[: len(going)], observed,
        )  # fmt: skip
        hosts[going], observations[going] = batch, observed
        for position in np.flatnonzero(ended[: len(going)]):
            summaries[going[position]] = episode_summary(hosts[going[position]], factory.scenario)
        going = going[ended[: len(going)] == 0]
    return summaries


def score(summaries: list[dict[str, Any]], varied: list[dict[str, Any]]) -> Score:
    """
    The score of a policy from its episodes.

    :param summaries: with the profile's physics
    :param varied: with drawn physics and intervals; empty if the recipe draws none
    """
    violation_ratio = float(np.mean([summary["violation_ratio"] for summary in summaries]))
    expected_ratio = float(np.mean([one["expected_violation_ratio"] for one in summaries]))
    varied_ratio = float(np.mean([one["violation_ratio"] for one in varied] or [0.0]))
    makespan_s = float(np.mean([summary["makespan_s"] for summary in summaries]))
    priced_ratio = expected_ratio + varied_ratio * (varied_ratio > ACCEPTED_VARIED_RATIO)
    return Score(
        excess=violation_ratio if violation_ratio > ACCEPTED_VIOLATION_RATIO else 0.0,
        cost_s=makespan_s * (1.0 + VIOLATION_WEIGHT * priced_ratio),
        varied_violation_ratio=varied_ratio,
        makespan_s=makespan_s,
        violation_ratio=violation_ratio,
        expected_violation_ratio=expected_ratio,
        completed=float(np.mean([summary["completed"] for summary in summaries])),
    )
