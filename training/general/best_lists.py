"""
A good list for each of many scenarios, by trying: what checkpoints are measured by.

Two of a list's four answers are varied together, or one, then others, for all scenarios at once.
Each scenario has a few training traces, on which all of its lists are tried.
"""

import itertools

import numpy as np
import numpy.typing as npt

from env.lists.menu import MENU, PARTS, numbers_of
from training.general.branching import Explorer

QUESTIONS = ((1, 3), (0, 1), (2,), (3,), (0, 1))
"""Which answers are varied together, in this order."""


def best_lists(explorer: Explorer, traces: int) -> npt.NDArray[np.int64]:
    """
    The best list found for each setup, int64[S].

    :param explorer: plays the setups
    :param traces: that a list is tried on
    """
    count = len(explorer.setups)
    machines = explorer.begin(np.tile(np.arange(count), traces))
    legal = machines.legal[:count]
    best = MENU[machines.tables.baselines]
    prices = np.full(count, np.inf)
    for question in QUESTIONS:
        before = best.copy()
        for answers in itertools.product(*(range(PARTS[part]) for part in question)):
            tried = before.copy()
            tried[:, question] = answers
            lists = numbers_of(tried)
            worth = legal[np.arange(count), lists]
            copies = machines.chosen(np.tile(worth, traces))
            begun = copies.chosen(slice(None))
            explorer.follow(copies, np.tile(lists[worth], traces), to_the_end=True)
            costs = np.full(count, np.inf)
            costs[worth] = copies.prices(begun).reshape(traces, -1).mean(axis=0)
            better = costs < prices
            best[better], prices[better] = tried[better], costs[better]
    return numbers_of(best)
