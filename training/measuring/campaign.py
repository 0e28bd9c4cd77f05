"""
Measure this machine: what to measure, and how often.

The unit is a *round*: one sweep over the loads of one arrangement, or one run of a job. First
everything is measured `rounds[0]` times. Then the points that are not known yet are measured
again, all of them in turns, until they are known, have been measured `rounds[1]` times, or the
time is used up (`training.measuring.rounds`). Jobs of which no part can be run have a budget of
their own (`training.measuring.samples`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd

from deploy.jobs.runtimes import JobFailedError, RuntimeUnavailableError
from deploy.linux.realtime import last_cpu
from deploy.load.generator import CONNECTIONS
from env.allocation import Weight
from env.errors import InputError
from env.scenario import Job, Scenario
from env.simulator.load import LoadTrace
from training.analysis.findings import ALONE, PAIRED
from training.measuring import samples, steadiness
from training.measuring.actuation import Stopwatch, sensor_noise, time_runtime, time_service
from training.measuring.change_costs import change_costs
from training.measuring.experiment import DEFAULT, Factor, combinations
from training.measuring.pressure import (
    BACKGROUND,
    EQUAL,
    ON_SAME_CORE,
    SOURCES,
    Arrangement,
    Beside,
    Row,
    pressure,
)
from training.measuring.rounds import Store, Task
from training.measuring.samples import (
    PART_LIMIT_S,
    SAMPLE_S,
    SERVING,
    WholeRun,
    choose_part,
    is_cut,
    next_whole_run,
    scaled,
    shortened,
)
from training.measuring.testbed import Testbed, Timing, sleep_until

RISING_QPS = (100_000, 200_000, 300_000, 400_000, 500_000, 600_000, 800_000)
"""Loads that look for one vCPU's largest throughput: far past it, memcached serves less again."""

AGREE = 0.1  # of the larger: how far the two best scans for that throughput may be apart
SCANS = 3  # at most, before the best one is taken for what it is

GRID = (0.05, 0.3, 0.55, 0.75, 0.87, 0.95, 1.03, 1.1, 1.2, 1.3)
"""Loads over the throughput at saturation; the last four lie past it and show the plateau."""

COARSE = (0.05, 0.55, 1.03, 1.3)
"""The same beside work of memcached's weight, which sets the SLO and no more."""

EXPERIMENT = (0.55, 1.75)
"""The same for the factors: one load that all combinations serve, and one that none does."""

SECOND_VCPU = 0.35  # of one vCPU's throughput, that a second one beside the load may add
OVERHEAD_S = 1.5  # of a sweep, for its memcached, records and load
START_ROOM_S = 10.0  # for the start of a container
ACTUATION_S = {"actuation": 8.0, "changes": 6.0, "docker": 20.0}


@dataclass(frozen=True)
class CampaignPlan:
    """
    How thoroughly to measure.

    :param name: of the mode
    :param timing: of a load level
    :param rounds: of everything at least, and of a point that is not known at most
    :param limit_s: no round is added to the least ones after so much time [s]
    :param whole_s: budget of all runs of jobs that cannot be cut [s]
    :param steady_s: how long hiccups are looked for under a steady load [s]
    :param equal_grid: loads beside work of memcached's weight, in parts as `GRID`
    :param sources: pressure sources
    :param thread_counts: of memcached; empty for the scenario's own
    :param pairs: whether jobs are measured beside each other
    :param factors: of the 2^k r experiment; none for no experiment
    """

    name: str
    timing: Timing
    rounds: tuple[int, int]
    limit_s: float
    whole_s: float
    steady_s: float
    equal_grid: tuple[float, ...] = GRID
    sources: tuple[str, ...] = ()
    thread_counts: tuple[int, ...] = ()
    pairs: bool = False
    factors: tuple[Factor, ...] = ()


QUICK = CampaignPlan("quick", Timing(0.6, 0.2), (1, 3), 96.0, 280.0, 10.0, COARSE)
FULL = CampaignPlan(
    *("full", Timing(1.0, 0.3), (3, 12), 1320.0, 1800.0, 60.0),
    sources=tuple(SOURCES),
    thread_counts=(1, 2),
    pairs=True,
    factors=DEFAULT,
)


WHOLE_COLUMNS = ("job", "threads", "beside", "real_s", "cpu_s", "cycles")
TABLES = ("capacity", "latency", "jobs", "factorial", "actuation")
WHOLE = "whole"
"""The table of the runs that have a budget of their own."""


class Campaign:
    """
    All that is measured on this machine.

    :param scenario: gives memcached's threads, its vCPUs, and the jobs
    :param mode: how thoroughly
    :param store: the store that receives the measurements
    :param advance: told the seconds that something took, and what it was
    """

    def __init__(
        self,
        scenario: Scenario,
        mode: CampaignPlan,
        store: Store,
        advance: Callable[[float, str], None] = lambda seconds, what: None,
    ):
        self.scenario = scenario
        self.mode = mode
        self.store = store
        self._advance = advance
        self._spent_s = store.spent_s(TABLES)
        self._timed: dict[str, dict[str, float]] = {}  # runs by which parts were chosen

    def run(self, testbed: Testbed) -> None:
        """
        Measure everything that the store does not have.

        :param testbed: the testbed to measure on
        :raises InputError: if something fails that a user can mend
        """
        self._advance(self._spent_s, "done before")
        capacity = self._capacity(testbed)
        for name, measure in (
            ("actuation", self._actuation),
            ("changes", self._changes),
            ("docker", self._docker),
            ("hiccups", self._hiccups),
        ):
            if self.store.rows("actuation", name).empty:
                self._add("actuation", name, partial(measure, testbed, capacity))
        self.repeat(testbed, list(self.tasks(capacity, testbed.vcpus)))
        self.run_whole_jobs(testbed, capacity)

    def run_whole_jobs(self, testbed: Testbed, capacity: float) -> None:
        """
        Run the jobs that cannot be cut, as far as their budget goes.

        :param testbed: the testbed to measure on
        :param capacity: throughput of one vCPU at saturation
        """
        jobs = [job for job in self.scenario.jobs if not is_cut(job)]

        def following() -> WholeRun | None:
            left_s = self.mode.whole_s - self.store.spent_s([WHOLE])
            rows = self.store.table(WHOLE).reindex(columns=WHOLE_COLUMNS)
            return next_whole_run(jobs, testbed.vcpus, rows, left_s, self.mode.rounds[1])

        while (run := following()) is not None:
            self._add(WHOLE, run.key, partial(self._whole, testbed, run, capacity))

    def _whole(self, testbed: Testbed, run: WholeRun, capacity: float) -> list[Row]:
        columns: Row = {"job": run.job.name, "threads": run.threads, "beside": run.beside}
        if run.beside == SERVING:
            with self._served(testbed, capacity, run.limit_s + PART_LIMIT_S) as cores:
                row = testbed.time_job(
                    run.job, run.threads, cores, run.limit_s, weight=Weight.BACKGROUND
                )
        else:
            row = testbed.time_job(run.job, run.threads, tuple(range(run.threads)), run.limit_s)
        return [columns | scaled(row, 1.0, 0.0)]

    def repeat(self, testbed: Testbed, tasks: Sequence[Task]) -> None:
        """
        Measure rounds of all tasks in turns, as the module says.

        :param testbed: the testbed to measure on
        :param tasks: the tasks to measure
        """
        least, most = self.mode.rounds
        for number in range(most):
            for task in tasks:
                rows = self.store.rows(task.table, task.key)
                if rows["rep"].nunique() > number:  # measured before an interruption
                    continue
                if number < least:
                    points = list(task.points)
                else:
                    points = task.unknown(rows, self.mode.rounds)
                    if points and self._spent_s + task.seconds > self.mode.limit_s:
                        return
                if points:
                    self._add(task.table, task.key, partial(task.run, testbed, points))

    def expected_s(self, vcpus: int) -> float:
        """
        About how long the campaign takes, at most.

        :param vcpus: number of vCPUs of this machine
        :return: seconds
        """
        scan_s = self._sweep_s(len(RISING_QPS))
        once_s = 2.0 * scan_s + sum(ACTUATION_S.values()) + self.mode.steady_s + OVERHEAD_S
        round_s = sum(task.seconds for task in self.tasks(1e5, vcpus))
        whole_s = 0.0 if all(map(is_cut, self.scenario.jobs)) else self.mode.whole_s
        return max(once_s + self.mode.rounds[0] * round_s, self.mode.limit_s) + whole_s

    def tasks(self, capacity: float, vcpus: int) -> Iterator[Task]:
        """
        All that is measured in rounds, the most important first.

        :param capacity: throughput of one vCPU at saturation, which loads are chosen by
        :param vcpus: how many the machine has
        """
        for arrangement in self.arrangements():
            # More vCPUs may saturate later.
            width = min(arrangement.threads, len(arrangement.cores))
            most = capacity * (1.0 + SECOND_VCPU * (width - 1))
            parts = self.mode.equal_grid if arrangement.weight == EQUAL else GRID
            yield self._sweep("latency", arrangement, _loads(most, parts))
        yield from self._jobs(capacity, vcpus)
        for arrangement in self.experiment():
            yield self._sweep("factorial", arrangement, _loads(capacity, EXPERIMENT))

    def arrangements(self) -> Iterator[Arrangement]:
        """What memcached is measured in, the most important first."""
        own = self.scenario.service.threads
        choices = self.scenario.service.candidates
        one = self._cores(1)
        counts = [own, *(threads for threads in self.mode.thread_counts if threads != own)]
        for threads in counts:
            yield Arrangement(threads, one)
            yield Arrangement(threads, one, "cpu", BACKGROUND)
            yield Arrangement(threads, one, "cpu", EQUAL)
        for threads in counts:
            for cores in choices:
                if len(cores) > 1:
                    yield Arrangement(threads, cores)
                    yield Arrangement(threads, cores, "cpu", BACKGROUND)
        for source in self.mode.sources:
            if source != "cpu":
                yield Arrangement(own, one, source, EQUAL)

    def experiment(self) -> Iterator[Arrangement]:
        """Every combination of the factors' levels; what is no factor is as the scenario says."""
        service = self.scenario.service
        for levels in combinations(self.mode.factors):
            beside = str(levels.get("beside", ALONE))
            yield Arrangement(
                int(levels.get("threads", service.threads)),
                self._cores(int(levels.get("cores", 1))),
                beside,
                "" if beside == ALONE else EQUAL,
                int(levels.get("connections", CONNECTIONS)),
            )

    def _jobs(self, capacity: float, vcpus: int) -> Iterator[Task]:
        """The jobs that can be cut: alone, under load, under pressure, and in pairs."""
        jobs = [job for job in self.scenario.jobs if job.threads[0] <= vcpus and is_cut(job)]
        for job in jobs:
            for threads in [n for n in job.threads if n <= vcpus]:
                yield self._job(job, threads, tuple(range(threads)), None)
        if jobs:
            yield self._under_load(jobs, capacity)
        here, there = (0,), self._apart((0,), vcpus)
        for job in jobs:
            for source in self.mode.sources:
                where = here if source in ON_SAME_CORE else there
                yield self._job(job, job.threads[0], here, pressure(source, where, Weight.NORMAL))
            if self.mode.pairs:
                for other in jobs:
                    if other.name != job.name:
                        beside = Beside(
                            PAIRED + other.name, other, other.threads[0], there, Weight.NORMAL
                        )
                        yield self._job(job, job.threads[0], here, beside)

    def _sweep(self, table: str, arrangement: Arrangement, loads: tuple[int, ...]) -> Task:
        def run(testbed: Testbed, targets: Sequence[int]) -> list[Row]:
            beside = None
            if arrangement.beside != ALONE:
                same = arrangement.beside in ON_SAME_CORE
                where = arrangement.cores if same else self._apart(arrangement.cores, testbed.vcpus)
                weight = Weight.BACKGROUND if arrangement.weight == BACKGROUND else Weight.NORMAL
                beside = pressure(arrangement.beside, where, weight)
            with (
                testbed.serving(arrangement.threads, arrangement.cores) as server,
                testbed.beside(beside) as neighbour,
            ):
                cores, count = arrangement.cores, arrangement.connections
                rows = testbed.sweep(server, targets, self.mode.timing, cores, neighbour, count)
            return [arrangement.columns | row for row in rows]

        name, seconds = arrangement.name, self._sweep_s(len(loads))
        return Task(table, name, "target_qps", loads, "p95_us", seconds, run)

    def _under_load(self, jobs: Sequence[Job], capacity: float) -> Task:
        """What a job's work costs in the background of a memcached, and of its load generator."""
        met = list(samples.company(self.scenario, self._cores(1), last_cpu()).items())

        def run(testbed: Testbed, points: Sequence[int]) -> list[Row]:
            rows: list[Row] = []
            lasts_s = (START_ROOM_S + PART_LIMIT_S) * len(places)
            with self._served(testbed, capacity, lasts_s):
                for point in points:
                    # Both right after each other: a host may be half as fast a minute later.
                    job, (beside, cores) = jobs[point // len(met)], met[point % len(met)]
                    threads = job.threads[0]
                    part, overhead_s = self._part(testbed, job)
                    cut, part = shortened(job, samples.SERVED_PART * part, threads)
                    yields = Weight.BACKGROUND
                    row = testbed.time_job(cut, threads, cores, PART_LIMIT_S, weight=yields)
                    if beside == samples.LOADED:  # which takes its vCPU as others would
                        row["disturbed"] = 0.0
                    columns: Row = {"place": point, "job": job.name, "threads": threads}
                    columns |= {"beside": beside, "load_qps": samples.SERVED * capacity}
                    rows.append(columns | scaled(row, part, overhead_s))
            return rows

        places = tuple(range(len(met) * len(jobs)))
        seconds = OVERHEAD_S + SAMPLE_S * len(places)
        return Task("jobs", "jobs under load", "place", places, "real_s", seconds, run)

    @contextlib.contextmanager
    def _served(
        self, testbed: Testbed, capacity: float, lasts_s: float
    ) -> Iterator[tuple[int, ...]]:
        """Keep memcached under load on its smallest set; gives that set's vCPUs."""
        cores = self._cores(1)
        trace = LoadTrace.explicit([int(samples.SERVED * capacity)], lasts_s)
        with testbed.serving(self.scenario.service.threads, cores) as server:
            client = testbed.client(server, trace)
            try:
                sleep_until(client.start_s + steadiness.SETTLE_S)
                yield cores
            finally:
                client.stop()

    def _job(self, job: Job, threads: int, cores: tuple[int, ...], beside: Beside | None) -> Task:
        def run(testbed: Testbed, points: Sequence[int]) -> list[Row]:
            part, overhead_s = self._part(testbed, job)
            if (row := self._timed.pop(key, None)) is None:
                cut = shortened(job, part, threads)[0]
                with testbed.beside(beside) as neighbour:
                    row = testbed.time_job(cut, threads, cores, PART_LIMIT_S, neighbour)
            columns: Row = {"job": job.name, "threads": threads, "beside": name}
            return [columns | scaled(row, part, overhead_s)]

        name = beside.name if beside else ALONE
        key = f"{job.name} T{threads} {f'beside {name}' if beside else 'alone'}"
        share = 2.0 if beside and beside.cores == cores else 1.0
        return Task("jobs", key, "threads", (threads,), "real_s", share * SAMPLE_S + 0.2, run)

    def _part(self, testbed: Testbed, job: Job) -> tuple[float, float]:
        """The part of a job that is run for the whole, and what a start costs: chosen once."""
        if self.store.rows("parts", job.name).empty:
            threads, begun_s = job.threads[0], time.monotonic()
            part, overhead_s, run = choose_part(testbed, job, threads, tuple(range(threads)))
            self._timed[f"{job.name} T{threads} alone"] = run
            took_s = time.monotonic() - begun_s
            self.store.add("parts", job.name, [{"part": part, "overhead_s": overhead_s}], took_s)
        row = self.store.rows("parts", job.name).iloc[0]
        return float(row["part"]), float(row["overhead_s"])

    def _add(self, table: str, key: str, measure: Callable[[], list[Row]]) -> None:
        """Measure a round and write it."""
        begun_s = time.monotonic()
        rows = measure()
        took_s = time.monotonic() - begun_s
        self.store.add(table, key, rows, took_s)
        self._spent_s += took_s
        self._advance(took_s, key)

    def _capacity(self, testbed: Testbed) -> float:
        """
        Throughput of one vCPU at saturation, by short scans, before loads can be chosen.

        Whatever disturbs a scan makes it too small, and loads chosen by it would all be served: so
        one is believed when a second agrees with it.
        """
        one = Arrangement(self.scenario.service.threads, self._cores(1))
        scan = self._sweep("capacity", one, RISING_QPS)
        while len(best := self._best_scans()) < 2 or best[1] < (1 - AGREE) * best[0]:
            if len(best) == SCANS:
                break
            self._add("capacity", scan.key, partial(scan.run, testbed, RISING_QPS))
        return best[0]

    def _best_scans(self) -> list[float]:
        """The largest throughputs of all scans [1/s], the largest first."""
        scans = self.store.table("capacity")
        best = [] if scans.empty else scans.groupby("rep")["achieved_qps"].max()
        return sorted(best, reverse=True)

    def _actuation(self, testbed: Testbed, capacity: float) -> list[Row]:
        """How long it takes to change processes and to read memcached, one row a kind."""
        processes, service, one = Stopwatch("process"), Stopwatch("service"), self._cores(1)
        time_runtime(testbed, testbed.processes, processes)
        with testbed.serving(self.scenario.service.threads, one) as server:
            time_service(testbed, server, service)
            period_s = self.scenario.control.period_s
            noise = sensor_noise(testbed, server, one, 0.5 * capacity, period_s)
        last: Row = {"of": "service", "action": "sensor_noise", "median_s": noise, "n": 1}
        return [*processes.rows(), *service.rows(), last]

    def _changes(self, testbed: Testbed, _: float) -> list[Row]:
        """What changes cost a job's work."""
        return change_costs(testbed)

    def _docker(self, testbed: Testbed, _: float) -> list[Row]:
        """The same of containers; where there is no Docker, a row that says why."""
        watch = Stopwatch("docker")
        try:
            time_runtime(testbed, testbed.containers, watch)
        except (InputError, JobFailedError, RuntimeUnavailableError) as error:
            return [{"of": "docker", "action": f"not measured: {error}", "n": 0}]
        return watch.rows()

    def _hiccups(self, testbed: Testbed, capacity: float) -> list[Row]:
        """How often the load stalls and vCPUs are stolen, while memcached is alone."""
        one, watch_s = self._cores(1), self.mode.steady_s
        trace = LoadTrace.explicit([int(0.5 * capacity)], watch_s + 2.0 * steadiness.SETTLE_S)
        with testbed.serving(self.scenario.service.threads, one) as server:
            client = testbed.client(server, trace)
            try:
                readings = steadiness.watch(testbed, server, one, client, watch_s)
            finally:
                client.stop()
        return steadiness.rows(readings)

    def _apart(self, cores: tuple[int, ...], vcpus: int) -> tuple[int, ...]:
        """A vCPU of another core: not the load's, the last one, where there is a choice."""
        siblings = {self.scenario.machine.sibling_of(vcpu) for vcpu in cores}
        free = [vcpu for vcpu in range(vcpus) if vcpu not in siblings and vcpu not in cores]
        return (free[0] if free else vcpus - 1,)

    def _cores(self, number: int) -> tuple[int, ...]:
        """The first vCPU, or the vCPU set of the scenario that has so many."""
        choices = self.scenario.service.candidates
        return next((c for c in choices if len(c) == number), choices[0][:1])

    def _sweep_s(self, loads: int) -> float:
        return (loads + 1) * self.mode.timing.step_s + OVERHEAD_S


def job_runs(store: Store) -> pd.DataFrame:
    """
    All runs of jobs, of parts and whole.

    :param store: a campaign's
    """
    tables = [store.table(name) for name in ("jobs", WHOLE)]
    return pd.concat([table for table in tables if len(table)], ignore_index=True)


def _loads(capacity: float, parts: Sequence[float]) -> tuple[int, ...]:
    """Loads in rising order, in whole thousands [1/s]."""
    return tuple(sorted({1000 * max(1, round(capacity * part / 1000.0)) for part in parts}))
