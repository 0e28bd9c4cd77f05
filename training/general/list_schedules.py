"""
A quick schedule for any scenario: lists of jobs first, a short search after.

It is the teacher that every drawn scenario has, and what its episodes are measured by. Which list
is best (how many jobs side by side, in which order, with how many threads, beside memcached or on
its vCPUs in the background, and when memcached gets another one) is tried in the simulator, one
question after the other; then single things are changed as long as that helps.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from env.codes import BACKGROUND, NORMAL
from env.physics.jobs import WORK_S
from env.scenario import Scenario
from env.simulator.load import trace_seeds
from env.simulator.machine import EpisodeFactory
from training.evaluation.episodes import EpisodeStart
from training.evaluation.schedule_search import AFTER, Schedule, Search

VIOLATION_PRICE = 10.0
"""What a share of intervals over the SLO costs, as a factor on that share of the whole time. The
best checkpoint is chosen at this price, too."""

WORTHWHILE = 0.997
"""A change must cost less than this share of what was; the rest would be chance, and is hard to
imitate."""

PATIENCE = 3.0
"""Schedules that take so many times as long as the best so far are not run to their end."""


@dataclass(frozen=True)
class ListChoice:
    """
    What makes a list schedule.

    :param order: of the jobs: by `longest`, by `shortest` work, or by `arrival`
    :param at_once: jobs side by side
    :param threads: most threads of a job, as a share of the vCPUs
    :param background: whether jobs use memcached's vCPUs, too
    :param served: load that memcached's smallest set serves, as a share of the largest load
    """

    order: str = "longest"
    at_once: int = 3
    threads: float = 1.0
    background: bool = True
    served: float = 0.0


def write_out(choice: ListChoice, scenario: Scenario, work_s: np.ndarray) -> Schedule:
    """
    The schedule of a list.

    :param choice: what makes it
    :param scenario: the problem
    :param work_s: float64[J], of each job alone on one vCPU [s]
    """
    jobs, vcpus = scenario.jobs, scenario.machine.vcpus
    arrival_s = np.array([job.arrival_s for job in jobs])
    keys = {"longest": -work_s, "shortest": work_s, "arrival": arrival_s}
    order = np.lexsort((-work_s, keys[choice.order]))
    everything, weight = (1 << vcpus) - 1, BACKGROUND if choice.background else NORMAL
    most = max(1, round(choice.threads * vcpus))
    rows = np.zeros((len(jobs), 6), np.int64)
    for row, job in zip(rows, jobs, strict=True):
        fitting = [count for count in job.threads if count <= most]
        threads = max(fitting, default=min(job.threads))
        row[:] = -1, threads, everything, weight, everything, weight
    return Schedule(rows, order, 0, choice.served * scenario.load.qps_max, choice.at_once)


def questions(scenario: Scenario) -> list[list[dict[str, Any]]]:
    """
    What is asked, one question after the other: for each, how its answers change a list.

    :param scenario: the problem
    """
    n_jobs = len(scenario.jobs)
    at_once = sorted({min(count, n_jobs) for count in (1, 2, 3, 4, 6, 8, n_jobs)})
    beside_memcached = [
        {"background": background, "served": share}
        for background in ((True, False) if scenario.regulation.share_service_cores else (False,))
        for share in (0.0, 0.35, 0.5, 0.7, 1.0)
    ]
    return [
        beside_memcached,
        [
            {"order": order, "at_once": count}
            for order in ("longest", "shortest", "arrival")
            for count in at_once
        ],
        [{"threads": share} for share in (0.25, 0.5, 0.75)],
        beside_memcached,
        [{"at_once": count} for count in at_once],
    ]


class QuickSearch:
    """
    The search for a scenario's schedule.

    :param factory: the scenario, without drawn physics
    :param seed: of its training traces and the search
    :param traces: that a schedule is tried on
    """

    def __init__(self, factory: EpisodeFactory, seed: int, traces: int):
        starts = [EpisodeStart(trace, seed) for trace in trace_seeds(seed, traces, "training")]
        self._scenario = factory.scenario
        self._search = Search(factory, starts, np.random.default_rng(seed), as_edits=True)
        self._work_s = factory.profile.job_array(factory.scenario.job_names)[:, WORK_S]

    def price(self, schedule: Schedule) -> float:
        """
        What a schedule takes, with what it violates [s].

        :param schedule: to be tried
        """
        seconds, violations = self._search.cost(schedule)
        intervals = max(1, int(self._search.hosts["intervals"].sum()))
        return seconds * (1.0 + VIOLATION_PRICE * violations / intervals)

    def best_list(self) -> tuple[float, Schedule]:
        """The price of the best list schedule [s], and the schedule."""
        best, price = ListChoice(), math.inf
        found = write_out(best, self._scenario, self._work_s)
        for question in questions(self._scenario):
            asked = best
            for answer in question:
                choice = replace(asked, **answer)
                schedule = write_out(choice, self._scenario, self._work_s)
                costs = self.price(schedule)
                if costs < WORTHWHILE * price:
                    best, found, price = choice, schedule, costs
                    self._lose_patience(price)
        return price, found

    def _lose_patience(self, price: float) -> None:
        """Cut episodes off that are far behind a price [s]."""
        last_s = max(job.arrival_s for job in self._scenario.jobs)
        caps_s = self._search.before["duration_s"]
        caps_s[:] = np.minimum(caps_s, last_s + PATIENCE * price)

    def improve(self, price: float, schedule: Schedule, evaluations: int) -> tuple[float, Schedule]:
        """
        Change single things of a schedule as long as that is worthwhile.

        :param price: of the schedule [s]
        :param schedule: to begin with
        :param evaluations: changes to try
        """
        for _ in range(evaluations):
            changed = self._neighbour(schedule)
            costs = self.price(changed)
            if costs < WORTHWHILE * price:
                price, schedule = costs, changed
                self._lose_patience(price)
        return price, schedule

    def _neighbour(self, schedule: Schedule) -> Schedule:
        """A list that differs in one thing; where one job would wait for another, in `at_once`."""
        changed = self._search.neighbour(schedule)
        if (changed.jobs[:, AFTER] >= 0).any():
            changed.jobs[:, AFTER] = -1
            changed.at_once = int(self._search.rng.integers(len(changed.jobs))) + 1
        return changed


def quick_schedule(factory: EpisodeFactory, seed: int, traces: int, evaluations: int) -> Schedule:
    """
    A good schedule of a scenario, found in a fraction of a second.

    :param factory: the scenario, without drawn physics
    :param seed: of its training traces and the search
    :param traces: that a schedule is tried on
    :param evaluations: changes to try after the lists
    """
    search = QuickSearch(factory, seed, traces)
    return search.improve(*search.best_list(), evaluations)[1]
