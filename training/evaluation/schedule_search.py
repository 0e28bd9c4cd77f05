"""
The best schedule that a long search finds when it knows the whole load trace.

A schedule says, for each job: after which other job it starts, with how many threads, on which
vCPUs at which weight, and on which vCPUs once few jobs are left; and what load memcached's smallest
set serves, so that it gets a larger one ahead of time. It runs in the simulator's own kernel, with
regulator, SLO guard and random numbers; simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983)
improves it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from env import action
from env.allocation import mask_of
from env.codes import BACKGROUND, DONE, NORMAL, NOT_ARRIVED, PENDING, PLACE, RUNNING
from env.physics.compiled import compiled
from env.scenario import Scenario
from env.simulator import kernel
from env.simulator.machine import EpisodeFactory
from env.simulator.rates import SOON_S
from env.simulator.sensing import sense
from training.evaluation.episodes import EpisodeStart

IntArray = npt.NDArray[np.int64]

EVALUATIONS = 1000
"""Schedules tried on each trace, if nobody says how many."""

VIOLATION_COST_S = 50.0
"""What an interval over the SLO costs while the search goes on; its result has none."""

FIRST_TEMPERATURE_S, LAST_TEMPERATURE_S = 15.0, 0.3
LOOK_AHEAD_S = 0.2
"""How long before a load moves memcached gets the vCPUs it will need."""

AFTER, THREADS, CORES, WEIGHT, LATE_CORES, LATE_WEIGHT = range(6)


@dataclass
class Schedule:
    """
    A plan for all jobs.

    :param jobs: int64[J, 6], for each job the one it waits for (-1: none), its threads, its vCPUs
        (bit mask) and weight, and both once `late` jobs or fewer are unfinished
    :param order: int64[J], in which jobs that may start do so; a job waits for earlier ones only
    :param late: number of jobs
    :param threshold_qps: load that memcached's smallest set serves [requests/s]; others serve as
        much more as they are larger
    """

    jobs: IntArray
    order: IntArray
    late: int
    threshold_qps: float

    def copy(self) -> "Schedule":
        """A copy that can be changed."""
        return replace(self, jobs=self.jobs.copy(), order=self.order.copy())


def choices_of(scenario: Scenario) -> IntArray:
    """
    The usual sets of memcached, int64[k, 2]: the bit mask of each and its number of vCPUs.

    :param scenario: the problem
    """
    choices = scenario.service.core_choices
    return np.array([(mask_of(cores), len(cores)) for cores in choices], np.int64)


@compiled
def set_for(choices, qps, threshold_qps):
    """
    The smallest of memcached's sets that serves a load, a bit mask; the largest if none does.

    :param choices: int64[k, 2], see `choices_of`
    :param qps: the load [requests/s]
    :param threshold_qps: see `Schedule`
    """
    last = choices.shape[0] - 1
    for index in range(last):
        if qps * choices[0, 1] <= threshold_qps * choices[index, 1]:
            return choices[index, 0]
    return choices[last, 0]


@compiled
def ready_jobs(h, jobs, order):
    """
    The jobs that a schedule wants to run now, a bit mask.

    Who has begun goes on; of the others those may start that wait for nobody, in their order, as
    far as there is memory.

    :param h: a host row
    :param jobs: int64[J, 6], see `Schedule`, as the next
    :param order: int64[J]
    """
    memory_free = h.memory_mib
    chosen = 0
    for job in range(jobs.shape[0]):
        begun = h.job_state[job] != DONE and h.state[job] != PENDING
        if begun:
            memory_free -= h.job_memory_mib[job]
            chosen |= 1 << job
    for position in range(order.shape[0]):
        job = order[position]
        before = jobs[job, AFTER]
        there = h.job_state[job] != DONE and h.job_state[job] != NOT_ARRIVED
        waits = before >= 0 and h.job_state[before] != DONE
        fits = h.job_memory_mib[job] <= memory_free
        if there and h.state[job] == PENDING and not waits and fits:
            memory_free -= h.job_memory_mib[job]
            chosen |= 1 << job
    return chosen


@compiled
def price_so_far(h, violation_cost_s, violation_weight):
    """
    What an episode costs by now, and so at least in the end [s].

    :param h: a host row
    :param violation_cost_s: of an interval over the SLO [s]
    :param violation_weight: see `Search`
    """
    seconds = 0.0
    if h.count_jct:
        seconds = kernel.present_s(h, 0.0) / h.n_jobs
    else:
        for job in range(h.n_jobs):
            seconds = max(seconds, h.now_s - h.start_s[job])
    expected_s = h.expected_violations * h.interval_s
    return seconds + violation_cost_s * h.violations + violation_weight * expected_s


@compiled
def run_schedule(
    h, targets, jobs, order, late, threshold_qps, choices, violation_cost_s, violation_weight,
    limit_s,
):  # fmt: skip
    """
    Run a schedule to its end, to the time cap, or until it has cost too much.

    :return: what it has cost [s], see `price_so_far`

    :param h: a host row at the start of its episode
    :param targets: float64[n], the load trace [requests/s]
    :param jobs: int64[J, 6], see `Schedule`
    :param order: int64[J]
    :param late: see `Schedule`
    :param threshold_qps: see `Schedule`
    :param choices: int64[k, 2], see `choices_of`
    :param violation_cost_s: of an interval over the SLO [s]
    :param violation_weight: see `Search`
    :param limit_s: what it may cost [s]
    """
    h.wake_on_events = 1
    price_s = 0.0
    while h.now_s < h.duration_s - SOON_S and not kernel.all_done(h) and price_s <= limit_s:
        soon = h.interval_ends_s - LOOK_AHEAD_S
        load = h.due_qps
        if h.now_s >= soon - SOON_S:
            load = max(load, targets[min(h.interval + 1, targets.shape[0] - 1)])
        h.desired_service = set_for(choices, load, threshold_qps)
        unfinished = 0
        for job in range(jobs.shape[0]):
            unfinished += h.true_state[job] != DONE
        for position in range(order.shape[0]):
            job = order[position]
            before = jobs[job, AFTER]
            there = h.true_state[job] != NOT_ARRIVED and h.desired_state[job] != RUNNING
            ready = before < 0 or h.true_state[before] == DONE
            if there and ready:
                h.desired_state[job] = RUNNING
            h.desired_threads[job] = jobs[job, THREADS]
            h.desired_cores[job] = jobs[job, LATE_CORES if unfinished <= late else CORES]
            h.desired_weight[job] = jobs[job, LATE_WEIGHT if unfinished <= late else WEIGHT]
        kernel.apply_desired(h, True)
        until_s = h.now_s + h.hold_s
        if h.now_s < soon - SOON_S:
            until_s = min(until_s, soon)
        kernel.advance(h, targets, until_s)
        sense(h)
        price_s = price_so_far(h, violation_cost_s, violation_weight)
    return price_s


@compiled
def run_schedule_at(
    hosts, b, targets, jobs, order, late, threshold_qps, choices, violation_cost_s,
    violation_weight, limit_s,
):  # fmt: skip
    """See `run_schedule`; on host b."""
    return run_schedule(
        hosts[b], targets, jobs, order, late, threshold_qps, choices, violation_cost_s,
        violation_weight, limit_s,
    )  # fmt: skip


class Search:
    """
    Simulated annealing over schedules, for one episode or for several at once.

    :param factory: what episodes look like
    :param starts: the episodes; a schedule is judged by its mean over them
    :param rng: of the search itself
    :param as_edits: keep to the vCPU sets and weights that `env.action` can express
    :param violation_weight: price of a second of violated interval, as far as one is to be expected
        on a machine; 0: only what the simulator sees violated counts
    """

    def __init__(
        self,
        factory: EpisodeFactory,
        starts: Sequence[EpisodeStart],
        rng: np.random.Generator,
        as_edits: bool = False,
        violation_weight: float = 0.0,
    ):
        self.scenario, self.rng, self.as_edits = factory.scenario, rng, as_edits
        self.violation_weight = violation_weight
        self.before, self.targets = factory.new_hosts(len(starts)), factory.new_targets(len(starts))
        for index, start in enumerate(starts):
            factory.begin(self.before, self.targets, index, start.trace_seed, start.rng())
        self.hosts = self.before.copy()
        self.choices = choices_of(self.scenario)
        rows = factory.table.rows
        places = rows[rows[:, action.KIND] == PLACE]
        self.places = np.unique(places[:, [action.CORES, action.WEIGHT]], axis=0)

    def cost(self, schedule: Schedule, limit_s: float = math.inf) -> tuple[float, int]:
        """
        Mean cost [s] and intervals over the SLO; infinite if jobs do not get done.

        The cost is the makespan (where jobs arrive, their mean completion time) and the price of
        the violations to be expected. A schedule is given up as soon as it is sure to cost too
        much: on a machine with hiccups a bad one would else run to the time cap, in the steps of
        the guard's polls.

        :param schedule: the schedule to try
        :param limit_s: the price above which nobody asks for more [s]
        """
        self.hosts[:] = self.before
        left_s = limit_s * len(self.hosts)
        for index in range(len(self.hosts)):
            left_s -= run_schedule_at(
                self.hosts, index, self.targets[index], schedule.jobs, schedule.order,
                schedule.late, schedule.threshold_qps, self.choices, VIOLATION_COST_S,
                self.violation_weight, left_s,
            )  # fmt: skip
            if left_s < 0.0:
                return math.inf, int(self.hosts["violations"].sum())
        violations = int(self.hosts["violations"].sum())
        if not (self.hosts["true_state"] == DONE).all():
            return math.inf, violations
        if self.scenario.has_arrivals:
            real = slice(len(self.scenario.jobs))
            times = self.hosts["end_s"][:, real] - self.hosts["arrival_s"][:, real]
            seconds = times.mean()
        else:
            seconds = (self.hosts["end_s"].max(axis=1) - self.hosts["start_s"].min(axis=1)).mean()
        expected_s = (self.hosts["expected_violations"] * self.hosts["interval_s"]).mean()
        return float(seconds + self.violation_weight * expected_s), violations

    def anneal(self, schedule: Schedule, evaluations: int) -> tuple[float, Schedule]:
        """
        Improve a schedule.

        :param schedule: the schedule to begin with
        :param evaluations: schedules to try
        :return: the least cost without a violation [s], infinite if none was found, and how
        """
        violation_cost_s = VIOLATION_COST_S / len(self.hosts)
        cost, violations = self.cost(schedule)
        present = cost + violation_cost_s * violations
        best, best_schedule = math.inf if violations else cost, schedule
        cooling = (LAST_TEMPERATURE_S / FIRST_TEMPERATURE_S) ** (1.0 / evaluations)
        temperature = FIRST_TEMPERATURE_S
        for _ in range(evaluations):
            candidate = self.neighbour(schedule)
            # The price that luck lets pass is drawn first, so that what is dearer is not run out.
            limit_s = present - temperature * math.log(1.0 - self.rng.random())
            cost, violations = self.cost(candidate, limit_s)
            price = cost + violation_cost_s * violations
            if price <= limit_s:
                schedule, present = candidate, price
                if violations == 0 and cost < best:
                    best, best_schedule = cost, candidate
            temperature *= cooling
        return best, best_schedule

    def neighbour(self, schedule: Schedule) -> Schedule:
        """
        A schedule that differs in one thing.

        :param schedule: the schedule to vary; it stays as it is
        """
        rng, new = self.rng, schedule.copy()
        n_jobs, everything = len(new.jobs), (1 << self.scenario.machine.vcpus) - 1
        job = int(rng.integers(n_jobs))
        what = int(rng.integers(8))
        if what == 0:
            first, second = rng.integers(n_jobs, size=2)
            new.order[[first, second]] = new.order[[second, first]]
        elif what <= 2:
            position = int(np.flatnonzero(new.order == job)[0])
            earlier = new.order[:position].tolist()
            new.jobs[job, AFTER] = int(rng.choice([-1, *earlier]))
        elif what == 3:
            new.jobs[job, THREADS] = int(rng.choice(self.scenario.jobs[job].threads))
        elif what in (4, 5):
            columns = [CORES, WEIGHT] if what == 4 else [LATE_CORES, LATE_WEIGHT]
            if self.as_edits or rng.random() < 0.7:
                new.jobs[job, columns] = rng.choice(self.places)
            else:
                weight = rng.choice(np.unique(self.places[:, 1]))
                new.jobs[job, columns] = rng.integers(1, everything + 1), weight
        elif what == 6:
            new.late = int(rng.integers(n_jobs))
        else:
            highest = self.scenario.load.qps_max
            new.threshold_qps = 0.0 if rng.random() < 0.3 else highest * rng.random()
        # A job waits for earlier ones only, so that no two wait for each other.
        rank = np.argsort(new.order)
        waits = new.jobs[:, AFTER]
        waits[(waits >= 0) & (rank[waits] >= rank)] = -1
        return new


def in_turn(scenario: Scenario, at_once: int) -> Schedule:
    """
    Where the search begins: every job on all vCPUs, some at a time.

    :param scenario: the problem
    :param at_once: how many jobs run side by side
    """
    n_jobs, everything = len(scenario.jobs), (1 << scenario.machine.vcpus) - 1
    sharing = scenario.regulation.share_service_cores
    weight = BACKGROUND if sharing else NORMAL
    rows = [
        (job - at_once, max(scenario.jobs[job].threads), everything, weight, everything, weight)
        for job in range(n_jobs)
    ]
    jobs = np.array(rows, np.int64)
    jobs[:, AFTER] = np.maximum(jobs[:, AFTER], -1)
    return Schedule(jobs, np.arange(n_jobs), 0, 0.0)


def general_schedule(
    factory: EpisodeFactory,
    starts: Sequence[EpisodeStart],
    evaluations: int,
    rng: np.random.Generator,
    violation_weight: float = 0.0,
) -> tuple[float, Schedule]:
    """
    One schedule for many traces, of vCPU sets and weights that edits can express.

    :param factory: what the episodes look like
    :param starts: the episodes that the schedule is made for
    :param evaluations: schedules to try, in three runs
    :param rng: of the search
    :param violation_weight: see `Search`
    :return: its mean cost [s], infinite if every one found breaks the SLO, and the schedule
    """
    search = Search(factory, starts, rng, as_edits=True, violation_weight=violation_weight)
    begins = [in_turn(factory.scenario, at_once) for at_once in (2, 3, 4)]
    runs = [search.anneal(schedule, evaluations // len(begins)) for schedule in begins]
    return min(runs, key=lambda run: run[0])


def best_schedules(
    factory: EpisodeFactory, starts: Sequence[EpisodeStart], evaluations: int = EVALUATIONS
) -> list[float]:
    """
    What the best schedule found for each trace takes, none of its intervals over the SLO.

    :param factory: what the episodes look like
    :param starts: the episodes to search a schedule for, one each
    :param evaluations: schedules tried on each, beginning from one that is good on twelve of them
    :return: the makespan, or where jobs arrive their mean completion time [s]; infinite where no
        schedule without a violation was found
    """
    rng = np.random.default_rng(starts[0].entropy)
    _, known = general_schedule(factory, starts[:12], 9 * evaluations, rng)
    searches = [Search(factory, [start], rng) for start in starts]
    return [search.anneal(known, evaluations)[0] for search in searches]


def short_search(factory: EpisodeFactory, start: EpisodeStart, evaluations: int) -> float:
    """
    What the best schedule found for one trace takes, from plain schedules on.

    :param factory: what the episode looks like
    :param start: the episode
    :param evaluations: schedules to try
    :return: see `Search.cost`; infinite where no schedule without a violation was found
    """
    search = Search(factory, [start], np.random.default_rng(start.entropy))
    begins = [in_turn(factory.scenario, at_once) for at_once in (1, 2, 3, 4, 6, 10)]

    def price(schedule: Schedule) -> float:
        seconds, violations = search.cost(schedule)
        return seconds + VIOLATION_COST_S * violations

    return search.anneal(min(begins, key=price), evaluations)[0]
