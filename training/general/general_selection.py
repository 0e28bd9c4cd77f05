"""How a policy does on the selection traces of many scenarios."""

from typing import Any

import numpy as np

from env.reward import TERMS
from env.scenario import Scenario
from env.sets.tokens import Layout
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory, Variation, episode_summary
from training.general.attention_policy import AttentionPolicy
from training.general.machines import Group
from training.ppo.selection import SELECTION_ENTROPY


def run_selection(
    policy: AttentionPolicy,
    scenario: Scenario,
    layout: Layout,
    episodes: int,
    variation: Variation | None = None,
) -> list[dict[str, Any]]:
    """
    Run a policy once on each selection trace, deterministically.

    :param policy: who decides
    :param scenario: the problem
    :param layout: of the policy's tokens
    :param episodes: how many traces
    :param variation: how episodes differ beyond their trace
    :return: the summary of each episode, with the baseline's makespan [s]
    """
    group = Group(EpisodeFactory(scenario, variation=variation), episodes, layout)
    observations = np.zeros((episodes, layout.size), np.float32)
    baselines_s = []
    for index, seed in enumerate(trace_seeds(SELECTION_ENTROPY, episodes, "selection")):
        group.begin(index, seed, np.random.default_rng([SELECTION_ENTROPY, seed]))
        baselines_s.append(group.baseline_s(index))
        group.observe(index, observations[index])
    terms = np.zeros((1, len(TERMS)))
    rewards, ended = np.zeros(1, np.float32), np.zeros(1, np.int64)
    going = np.arange(episodes)
    summaries: list[dict[str, Any]] = [{}] * episodes
    while len(going):
        chosen = policy.best(observations[going])
        over = []
        for slot, index in zip(chosen, going.tolist(), strict=True):
            here = slice(index, index + 1)
            group.step(here, np.array([slot]), terms, rewards, ended, observations[here])
            if ended[0]:
                summaries[index] = episode_summary(group.hosts[index], scenario) | {
                    "baseline_s": baselines_s[index]
                }
                over.append(index)
        going = np.setdiff1d(going, over)
    return summaries
