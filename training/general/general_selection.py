"""How a policy does on the selection traces of many scenarios, all at once."""

from typing import Any

import numpy as np

from env.simulator.load import trace_seeds
from training.general.attention_policy import AttentionPolicy
from training.general.machines import Machines, Setup, figure_s, no_terms
from training.ppo.selection import SELECTION_ENTROPY


def run_selection(
    policy: AttentionPolicy, setups: list[Setup], episodes: int
) -> list[list[dict[str, Any]]]:
    """
    Run a policy once on each selection trace of each setup, deterministically.

    :param policy: who decides
    :param setups: of the policy's layout
    :param episodes: how many traces
    :return: for each setup the summary of each episode, with what counts over the baseline's
    """
    machines = Machines(setups, len(setups) * episodes)
    observations = np.zeros((len(machines.hosts), machines.layout.size), np.float32)
    figures_s = []
    seeds = trace_seeds(SELECTION_ENTROPY, episodes, "selection")
    for index in range(len(observations)):
        number, seed = index // episodes, seeds[index % episodes]
        machines.begin(index, number, seed, np.random.default_rng([SELECTION_ENTROPY, seed]))
        figures_s.append(machines.baseline(index).figure_s(setups[number].scenario))
        machines.observe(index, observations[index])
    going = np.arange(len(observations))
    summaries: list[list[dict[str, Any]]] = [[{}] * episodes for _ in setups]
    while len(going):
        terms, ended = no_terms(len(going)), np.zeros(len(going), np.int64)
        chosen = policy.best(observations)
        machines.step(slice(None), chosen, terms, ended, observations)
        for own in np.flatnonzero(ended).tolist():
            number, episode = divmod(int(going[own]), episodes)
            summary = machines.summary(own)
            over = figure_s(summary, setups[number].scenario) / figures_s[going[own]]
            summaries[number][episode] = summary | {"over_baseline": over}
        if ended.any():
            stay = ended == 0
            machines.keep(stay)
            going, observations = going[stay], observations[stay]
    return summaries
