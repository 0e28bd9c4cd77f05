"""How a policy does on the selection traces of many scenarios, all at once."""

from typing import Any

import numpy as np

from env.simulator.load import trace_seeds
from training.general.attention_policy import AttentionPolicy
from training.general.machines import Machines, Setup, figure_s
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
    seeds = trace_seeds(SELECTION_ENTROPY, episodes, "selection")
    for index in range(len(machines)):
        number, seed = index // episodes, seeds[index % episodes]
        machines.begin(index, number, seed, np.random.default_rng([SELECTION_ENTROPY, seed]))
    baselines = machines.chosen(slice(None))
    everything = slice(None)
    lists = machines.tables.baselines[machines.playing]
    baselines.follow(everything, lists, to_the_end=True)
    machines.play(everything, policy.best)
    summaries: list[list[dict[str, Any]]] = [[] for _ in setups]
    for index in range(len(machines)):
        scenario, summary = machines.setup(index).scenario, machines.summary(index)
        over = figure_s(summary, scenario) / figure_s(baselines.summary(index), scenario)
        summaries[index // episodes].append(summary | {"over_baseline": over})
    return summaries
