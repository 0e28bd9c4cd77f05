"""
A quick schedule for any scenario, and others that are as good.

It is the teacher that every drawn scenario has, and what its episodes are measured by: a list of
jobs. Which list is best (how many jobs side by side, how many of them at normal weight while the
others fill the background, with how many threads, and when memcached gets another vCPU) is tried in
the simulator, one question after the other. Often another answer would do as well; who imitates may
give that one, too, as nobody can tell from what a machine shows which of them happened to win.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from env.codes import NORMAL
from env.physics.parameters import WORK_S
from env.scenario import MAX_JOBS, Scenario
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory
from training.evaluation.episodes import EpisodeStart
from training.evaluation.schedule_search import Schedule, Search

VIOLATION_PRICE = 10.0
"""What a share of intervals over the SLO costs, as a factor on that share of the whole time. The
best checkpoint is chosen at this price, too."""

WORTHWHILE = 0.997
"""A change must cost less than this share of what was; the rest would be chance."""

AS_GOOD = 1.015
"""What a list may cost that is taught beside the best, as a factor on that one's."""

MOST_AS_GOOD = 8
"""How many lists of a scenario are taught at most."""

PATIENCE = 3.0
"""Schedules that take so many times as long as the best so far are not run to their end."""


@dataclass(frozen=True)
class ListChoice:
    """
    What makes a list schedule.

    :param at_once: jobs side by side
    :param front: of those, how many run at normal weight, where memcached is not; the others are in
        the background, on memcached's vCPUs, too, and behind those in front
    :param threads: most threads of a job, as a share of the vCPUs
    :param served: load that memcached's smallest set serves, as a share of the largest load
    """

    at_once: int = 3
    front: int = 0
    threads: float = 1.0
    served: float = 0.0


def write_out(choice: ListChoice, scenario: Scenario, work_s: np.ndarray) -> Schedule:
    """
    The schedule of a list.

    Where the makespan counts, the longest jobs come first (Graham 1969); where completion times do,
    those with the least work left, and they interrupt those with more (Schrage 1968). Which order
    wins on a few traces is mostly chance, and whoever imitates could not tell why.

    :param choice: what makes it
    :param scenario: the problem
    :param work_s: float64[J], of each job alone on one vCPU [s]
    """
    jobs, vcpus, interrupts = scenario.jobs, scenario.machine.vcpus, scenario.has_arrivals
    order = np.argsort(work_s if interrupts else -work_s, kind="stable")
    everything = (1 << vcpus) - 1
    most = max(1, round(choice.threads * vcpus))
    rows = np.zeros((len(jobs), 6), np.int64)
    for row, job in zip(rows, jobs, strict=True):
        fitting = [count for count in job.threads if count <= most]
        threads = max(fitting, default=min(job.threads))
        row[:] = -1, threads, everything, NORMAL, everything, NORMAL
    threshold_qps = choice.served * scenario.load.qps_max
    return Schedule(rows, order, 0, threshold_qps, choice.at_once, choice.front, interrupts)


def questions(scenario: Scenario) -> list[list[dict[str, Any]]]:
    """
    What is asked about a list: for each question, how its answers change the list.

    :param scenario: the problem
    """
    n_jobs, sharing = len(scenario.jobs), scenario.regulation.share_service_cores
    loads = (0.0, 0.35, 0.5, 0.7, 1.0)
    at_once = sorted({min(count, n_jobs) for count in (1, 2, 3, 4, 6, 8, n_jobs)})
    fronts = (0, 1, 2, 3, 4) if sharing else ()
    beside_memcached = [
        {"front": front, "served": load}
        for front in ((0, MAX_JOBS) if sharing else (MAX_JOBS,))
        for load in loads
    ]
    side_by_side = [
        {"at_once": count, "front": front}
        for count in at_once
        for front in (*(some for some in fronts if some < count), MAX_JOBS)
    ]
    return [
        beside_memcached,
        side_by_side,
        [{"threads": share} for share in (0.25, 0.5, 0.75, 1.0)],
        [{"served": load} for load in loads],
    ]


class QuickSearch:
    """
    The search for a scenario's schedule.

    :param factory: the scenario, without drawn physics
    :param seed: of its training traces
    :param traces: that a schedule is tried on
    """

    def __init__(self, factory: EpisodeFactory, seed: int, traces: int):
        starts = [EpisodeStart(trace, seed) for trace in trace_seeds(seed, traces, "training")]
        self._scenario = factory.scenario
        self._search = Search(factory, starts, np.random.default_rng(seed))
        self._work_s = factory.profile.job_array(factory.scenario.job_names)[:, WORK_S]

    def price(self, schedule: Schedule) -> float:
        """
        What a schedule takes, with what it violates [s].

        :param schedule: to be tried
        """
        seconds, violations = self._search.cost(schedule)
        intervals = max(1, int(self._search.hosts["intervals"].sum()))
        return seconds * (1.0 + VIOLATION_PRICE * violations / intervals)

    def best(self) -> ListChoice:
        """The best list: each question is asked once, and the second again at the end."""
        best, asked = ListChoice(), questions(self._scenario)
        price = math.inf
        for question in (*asked, asked[1]):
            before = best
            for answer in question:
                choice = replace(before, **answer)
                costs = self.price(self.written(choice))
                if costs < WORTHWHILE * price:
                    best, price = choice, costs
                    self._lose_patience()
        return best

    def as_good(self, best: ListChoice) -> list[Schedule]:
        """
        The schedules of a list and of those as good that answer one question in another way.

        Of answers that come to the same, one is enough.

        :param best: the list; its schedule comes first
        """
        found = [self.written(best)]
        prices = [self.price(found[0])]
        if not math.isfinite(prices[0]):
            return found  # nobody finishes: all are as bad
        others: list[tuple[float, int, Schedule]] = []
        for question in questions(self._scenario):
            for answer in question:
                choice = replace(best, **answer)
                schedule = self.written(choice)
                costs = self.price(schedule)
                if costs <= AS_GOOD * prices[0] and costs not in prices:
                    prices.append(costs)
                    others.append((costs, len(others), schedule))
        return [*found, *(schedule for _, _, schedule in sorted(others)[: MOST_AS_GOOD - 1])]

    def written(self, choice: ListChoice) -> Schedule:
        """
        The schedule of a list.

        :param choice: what makes it
        """
        return write_out(choice, self._scenario, self._work_s)

    def _lose_patience(self) -> None:
        """Cut episodes off that are far behind the schedule tried last, the best so far."""
        caps_s = self._search.before["duration_s"]
        caps_s[:] = np.minimum(caps_s, PATIENCE * self._search.hosts["now_s"].max())


def quick_schedules(factory: EpisodeFactory, seed: int, traces: int) -> list[Schedule]:
    """
    A good schedule of a scenario and others as good, found in a fraction of a second.

    :param factory: the scenario, without drawn physics
    :param seed: of its training traces
    :param traces: that a schedule is tried on
    """
    search = QuickSearch(factory, seed, traces)
    return search.as_good(search.best())
