"""
How short a makespan could be at best: no schedule that the regulator allows has a shorter one.

The argument, with its assumptions, is in `docs/bound.md`. In short: give each job's work a price.
Whatever runs beside whatever, the machine earns at most `earnings(load)` a second; the bound is the
shortest stretch of the load in which that adds up to the price of all work. Any prices give a
valid bound; a search picks good ones.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from env.allocation import mask_of
from env.errors import InputError
from env.physics.parameters import (
    CORES_PER_THREAD,
    JOB_SPEED,
    SENSITIVITY,
    SERIAL_FRACTION,
    SERVICE_PRESSURE,
    SERVICE_SIBLING,
    SMT,
    WORK_S,
)
from env.physics.service import service_occupancy
from env.scenario import Scenario
from env.simulator.machine import EpisodeFactory
from training.evaluation.episodes import EpisodeStart
from training.evaluation.schedule_search import EVALUATIONS, best_schedules

FloatArray = npt.NDArray[np.float64]

SEARCH = {"maxfev": 600, "xatol": 1e-3, "fatol": 1e-3}
"""Of prices; see `scipy.optimize.minimize`."""

LEVELS = 200
"""Steps of the load at which earnings are computed; a load earns what the step below it does."""

MOST_SHARED = 6
"""So many of memcached's vCPUs may be shared: the orders in which they fill are enumerated."""


@dataclass(frozen=True)
class Split:
    """
    One way to split memcached's vCPUs at each load level; the others are batch work's.

    :param occupancy: float64[LEVELS, C], share of each vCPU that memcached asks for at least
    :param fill: float64[LEVELS, C], share of each of memcached's that batch work keeps busy
    :param free: bool[C], the vCPUs that are not memcached's
    """

    occupancy: FloatArray
    fill: FloatArray
    free: npt.NDArray[np.bool_]


class LowerBound:
    """
    The bound for one machine, for any load trace.

    :param scenario: the problem
    :param host: a host row of the simulator, which holds the physics
    :raises InputError: if memcached may share too many vCPUs to enumerate
    """

    def __init__(self, scenario: Scenario, host: Any):
        self.scenario, self.host = scenario, host
        machine, load = scenario.machine, scenario.load
        widest = max(map(len, scenario.service.sets))
        if scenario.regulation.share_service_cores and widest > MOST_SHARED:
            raise InputError(
                f"scenario {scenario.name}: the bound is computed where memcached shares up to "
                f"{MOST_SHARED} vCPUs; here it shares up to {widest}"
            )
        self.sibling = host["batch_sibling"][: machine.vcpus]  # a host may have room for more
        numbers = np.arange(machine.vcpus)
        self.first = (self.sibling < 0) | (self.sibling > numbers)  # of its pair, or alone
        self.pair = np.where(self.first, numbers, self.sibling)
        assert self.first[self.pair].all(), "siblings name each other"
        self.levels_qps = np.linspace(0.0, load.qps_max, LEVELS, endpoint=False)
        jobs, speed = host["job_params"][: len(scenario.jobs)], host["host_params"][JOB_SPEED]
        self.lost = 1.0 - jobs[:, SMT]
        serial, wide = jobs[:, SERIAL_FRACTION], float(machine.vcpus)
        demand = 1.0 / (serial + (1.0 - serial) / wide)
        # What a share is worth, against the parallel part alone; see docs/bound.md.
        self.worth = speed / (
            serial * demand * jobs[:, SMT] + jobs[:, CORES_PER_THREAD] * (1.0 - serial * demand)
        )
        self.work_s = jobs[:, WORK_S]
        self.sensitivity = jobs[:, SENSITIVITY]
        threads = np.array([min(max(job.threads), machine.vcpus) for job in scenario.jobs])
        self.alone_s = self.work_s * (serial + (1.0 - serial) / threads) / speed
        self.modes = self._modes()
        self.earned = self.earnings(self._prices())

    def _prices(self) -> FloatArray:
        """
        Prices of a second of each job's work that make the bound large, their sum over the work 1.

        They are chosen for a load that is anywhere in its range equally often.
        """

        def value(log_price: FloatArray) -> float:
            price = np.exp(log_price)
            likely = self.levels_qps >= self.scenario.load.qps_min
            return float(price @ self.work_s / self.earnings(price)[likely].mean())

        # Equal earnings on a vCPU whose sibling is busy are where the search begins.
        start = -np.log(self.worth * np.maximum(1.0, 2.0 * (1.0 - self.lost)))
        found = minimize(lambda price: -value(price), start, method="Nelder-Mead", options=SEARCH)
        price = np.exp(found.x)
        return np.asarray(price / (price @ self.work_s))

    def seconds(self, targets: FloatArray, interval_s: float) -> float:
        """
        No schedule has a shorter makespan, whenever its first job starts [s].

        :param targets: float64[n], the load of each interval [requests/s]
        :param interval_s: how long each lasts [s]
        """
        part = targets / self.scenario.load.qps_max
        level = np.minimum((part * LEVELS).astype(int), LEVELS - 1)
        earned = np.append(0.0, np.cumsum(self.earned[level]) * interval_s)
        if earned[-1] < 1.0:
            return self.scenario.load.duration_s
        edges = interval_s * np.arange(len(earned))
        # A stretch that neither begins nor ends with an interval can be moved until it does one
        # of both and is no longer than before: what it gains and loses is linear in between.
        after = edges[earned + 1.0 <= earned[-1]]
        before = edges[earned >= 1.0]
        shortest = min(
            (np.interp(np.interp(after, edges, earned) + 1.0, earned, edges) - after).min(),
            (before - np.interp(np.interp(before, edges, earned) - 1.0, earned, edges)).min(),
        )
        return max(float(shortest), float(self.alone_s.max()))

    def earnings(self, price: FloatArray) -> FloatArray:
        """
        The most that batch work can earn per second at each load level.

        :param price: float64[J], of a second of each job's work
        :return: float64[LEVELS]
        """
        most = np.zeros(LEVELS)
        pairs = self.pair[:, None] == np.flatnonzero(self.first)
        nobody = np.zeros_like(self.first)
        for mode in self.modes:
            # A vCPU slows down its sibling and nobody else, so what is best is best in each pair:
            # nobody on its free vCPUs, work on one of them, or on both.
            earned = [
                self._earned(price, mode, used & mode.free) @ pairs
                for used in (nobody, self.first, ~self.first, ~nobody)
            ]
            most = np.maximum(most, np.max(earned, axis=0).sum(axis=1))
        return most

    def _earned(self, price: FloatArray, mode: Split, used: npt.NDArray[np.bool_]) -> FloatArray:
        """What batch work earns on each vCPU, float64[LEVELS, C], some of the free ones in use."""
        host = self.host["host_params"]
        fill = np.where(used, 1.0, mode.fill)
        twin = np.where(self.sibling >= 0, self.sibling, 0)
        pressure = host[SERVICE_PRESSURE] * mode.occupancy.sum(axis=1)
        slower = 1.0 + self.sensitivity * pressure[:, None]
        busy = fill[:, twin] + np.minimum(1.0, host[SERVICE_SIBLING] * mode.occupancy[:, twin])
        busy = np.where(self.sibling >= 0, np.minimum(busy, 1.0), 0.0)
        # Each vCPU goes to the job that earns most there.
        rate = (price * self.worth / slower)[:, None, :] * (1.0 - self.lost * busy[:, :, None])
        earned: FloatArray = fill * rate.max(axis=2)
        return earned

    def _modes(self) -> list[Split]:
        """Every choice of memcached's vCPUs, of those it shares, and of the order they fill in."""
        n_vcpus = self.scenario.machine.vcpus
        modes = []
        for choice in self.scenario.service.sets:
            sharable = choice if self.scenario.regulation.share_service_cores else ()
            free = ~np.isin(np.arange(n_vcpus), choice)
            for shared in _subsets(sharable):
                occupancy = self._occupancy(choice, shared)
                room = len(choice) - occupancy.sum(axis=1)
                # Earnings are convex in the shares, so they are largest at a corner.
                for order in itertools.permutations(shared):
                    fill = np.zeros((LEVELS, n_vcpus))
                    left = room.copy()
                    for vcpu in order:
                        fill[:, vcpu] = np.minimum(1.0, left)
                        left -= fill[:, vcpu]
                    modes.append(Split(occupancy, fill, free))
        return modes

    def _occupancy(self, choice: tuple[int, ...], shared: tuple[int, ...]) -> FloatArray:
        """What memcached asks for, no batch work anywhere but on the vCPUs it shares."""
        host = self.host
        n_vcpus = self.scenario.machine.vcpus
        background = np.array([float(vcpu in shared) for vcpu in range(n_vcpus)])
        nobody = np.zeros(n_vcpus)
        asked = [
            service_occupancy(
                qps, host["service_threads"], mask_of(choice), host["sibling"][:n_vcpus],
                background, nobody, nobody, host["service_params"],
            )
            for qps in self.levels_qps
        ]  # fmt: skip
        return np.outer(asked, [float(vcpu in choice) for vcpu in range(n_vcpus)])


def _subsets(vcpus: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every subset of a set of vCPUs."""
    return [
        subset for size in range(len(vcpus) + 1) for subset in itertools.combinations(vcpus, size)
    ]


def lower_bounds(factory: EpisodeFactory, starts: Sequence[EpisodeStart]) -> list[float]:
    """
    How short a makespan can be at best, for each trace [s].

    :param factory: what the episodes look like; all of one physics
    :param starts: the episodes to bound
    """
    hosts, targets = factory.new_hosts(1), factory.new_targets(1)
    seconds = []
    bound = None
    for start in starts:
        factory.begin(hosts, targets, 0, start.trace_seed, start.rng())
        bound = bound or LowerBound(factory.scenario, hosts[0])
        seconds.append(bound.seconds(targets[0], float(hosts[0]["interval_s"])))
    return seconds


def bound_report(
    factory: EpisodeFactory,
    starts: Sequence[EpisodeStart],
    searched: int | None = None,
    evaluations: int = EVALUATIONS,
) -> dict[str, Any]:
    """
    How far the best possible is, on average; see `docs/bound.md`.

    The bound is of the makespan, the search for what counts, see
    `training.evaluation.schedule_search.best_schedules`.

    :param factory: what the episodes look like
    :param starts: the episodes to bound
    :param searched: so many of them, the first, get the search, which takes seconds each
    :param evaluations: schedules tried on each; see
        `training.evaluation.schedule_search.best_schedules`
    :raises InputError: if memcached may share too many vCPUs, or the physics differs by episode
    """
    variation = factory.variation
    if variation.physics or variation.error or variation.vm_speed:
        raise InputError("the bound is for one physics; leave the profile as it is")
    tried = starts[:searched]
    searches = best_schedules(factory, tried, evaluations)
    found = [seconds for seconds in searches if math.isfinite(seconds)]
    return {
        "lower_s": {"mean": float(np.mean(lower_bounds(factory, starts)))},
        "search_s": {
            "mean": float(np.mean(found)) if found else None,
            "found": len(found),
            "tried": len(tried),
        },
    }
