"""
Measure this machine: what to measure, how often, and a store that remembers what is done.

The unit is a *round*: one sweep over all loads of one arrangement, or one run of a job. A round is
written when it has ended, so an interrupted characterisation goes on with the next one. Rounds are
repeated until every point's 95 % interval is under 5 % of its mean, or a stated limit is reached;
rounds that other processes disturbed are repeated once more, up to a limit of their own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from env.allocation import Weight
from env.errors import InputError
from env.scenario import Job, Scenario
from training.actuation import Stopwatch, sensor_noise, time_actuation, time_service
from training.curves import average, trusted
from training.findings import ALONE
from training.workbench import ON_SAME_CORE, SOURCES, Beside, Timing, Workbench, pressure

MARGIN = 0.05  # half the width of a 95 % interval over the mean, at which a point is known
RISING_QPS = (100_000, 200_000, 300_000, 400_000, 500_000, 600_000, 800_000)
"""Loads that look for one vCPU's largest throughput: far past it, memcached serves less again."""

AGREE = 0.1  # of the larger: how far the two best scans for that throughput may be apart
SCANS = 6  # at most, before the best one is taken for what it is

GRID = (0.05, 0.3, 0.55, 0.75, 0.87, 0.95, 1.03, 1.1, 1.2, 1.3)
"""Loads over the throughput at saturation; the last four lie past it and show the plateau."""

BACKGROUND, EQUAL = "background", "equal"
OPS = re.compile(r"--[a-z0-9-]+-ops(=\d+)?$")
SAMPLE_S = 2.0  # how long a sampled job is meant to run
SHORT_SAMPLE = 0.1  # of that: a second, shorter one, to tell the start from the work


@dataclass(frozen=True)
class Mode:
    """
    How thoroughly to measure.

    :param name: of the mode
    :param timing: of a load level
    :param rounds: at least, and at most
    :param disturbed_rounds: how many more at most, if some were disturbed
    :param sample_jobs: run a part of each job that can be cut short, and scale it up
    :param job_limit_s: a job that takes longer is not measured
    :param sources: pressure sources
    :param thread_counts: of memcached; empty for the scenario's own
    :param pairs: whether jobs are measured beside each other
    """

    name: str
    timing: Timing
    rounds: tuple[int, int]
    disturbed_rounds: int
    sample_jobs: bool
    job_limit_s: float
    sources: tuple[str, ...]
    thread_counts: tuple[int, ...]
    pairs: bool


QUICK = Mode("quick", Timing(0.6, 0.2), (2, 2), 1, True, 20.0, (), (), False)
FULL = Mode("full", Timing(1.0, 0.3), (3, 8), 2, False, 900.0, tuple(SOURCES), (1, 2), True)


@dataclass(frozen=True)
class Arrangement:
    """
    Memcached with some threads on some vCPUs, with or without something beside it.

    :param threads: memcached's worker threads
    :param cores: its vCPUs
    :param beside: a pressure source, or `none`
    :param weight: of what is beside: `background`, `equal`, or empty
    """

    threads: int
    cores: tuple[int, ...]
    beside: str = ALONE
    weight: str = ""

    @property
    def columns(self) -> dict[str, object]:
        """What tells its rows from others."""
        return {
            "threads": self.threads,
            "cores": len(self.cores),
            "beside": f"{self.beside} ({self.weight})" if self.weight else self.beside,
        }


class Store:
    """
    Tables in a folder that grow round by round.

    :param folder: made if it is not there
    :param purpose: what the tables are of; a folder with another purpose is refused
    :raises InputError: if the folder cannot be used
    """

    def __init__(self, folder: Path, purpose: dict[str, object]):
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plan = folder / "plan.json"
            if plan.exists() and json.loads(plan.read_text(encoding="utf-8")) != purpose:
                raise InputError(
                    f"{folder}: holds another characterisation (scenario, mode or machine differ "
                    "from its plan.json); give another folder"
                )
            plan.write_text(json.dumps(purpose, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{folder}: cannot be used: {error}") from error

    def table(self, name: str) -> pd.DataFrame:
        """A table as far as it is filled."""
        path = self.folder / f"{name}.csv"
        return pd.read_csv(path) if path.exists() else pd.DataFrame({"what": [], "rep": []})

    def rounds(self, name: str, key: str) -> int:
        """How many rounds of one thing a table has."""
        return int(self.rows(name, key)["rep"].nunique())

    def rows(self, name: str, key: str) -> pd.DataFrame:
        """The rows of all rounds of one thing."""
        table = self.table(name)
        return table[table["what"] == key]

    def add(self, name: str, key: str, rows: Sequence[dict[str, object]]) -> None:
        """
        Write a round; a file is replaced whole, so that it never holds a part of one.

        :param name: of the table
        :param key: what the round is of
        :param rows: its rows
        """
        number = self.rounds(name, key)
        new = pd.DataFrame([{"what": key, "rep": number} | row for row in rows])
        old = self.table(name)
        table = new if old.empty else pd.concat([old, new], ignore_index=True)
        path = self.folder / f"{name}.csv"
        part = path.with_suffix(".part")
        table.to_csv(part, index=False, float_format="%.7g")
        part.replace(path)


@dataclass
class Task:
    """
    Something to measure, in rounds.

    :param table: where its rows go
    :param key: names it
    :param seconds: what a round takes, about
    :param most: rounds at most
    :param run: measures one round
    """

    table: str
    key: str
    seconds: float
    most: int
    run: Callable[[Workbench], list[dict[str, object]]] = field(repr=False)


class Campaign:
    """
    All that is measured on this machine.

    :param scenario: gives memcached's threads, its vCPUs, and the jobs
    :param mode: how thoroughly
    :param store: where it goes
    :param advance: told the seconds of work that are done or need not be done
    """

    def __init__(
        self,
        scenario: Scenario,
        mode: Mode,
        store: Store,
        advance: Callable[[float, str], None] = lambda seconds, what: None,
    ):
        self.scenario = scenario
        self.mode = mode
        self.store = store
        self._advance = advance

    def run(self, bench: Workbench) -> None:
        """
        Measure everything that the store does not have.

        :param bench: where
        :raises InputError: if something fails that a user can mend
        """
        capacity = self._capacity(bench)
        for task in [*self.latency_tasks(capacity), *self.job_tasks(bench)]:
            self._repeat(bench, task)
        self._repeat(bench, Task("actuation", "actuation", 8.0, 1, self._actuation))

    def expected_s(self, vcpus: int) -> float:
        """About how long it takes, at most."""
        tasks = [*self.latency_tasks(1e5), *self._job_tasks(vcpus)]
        return sum(task.seconds * task.most for task in tasks) + 12.0

    def arrangements(self) -> Iterator[Arrangement]:
        """What memcached is measured in, the most important first."""
        own = self.scenario.service.threads
        choices = self.scenario.service.core_choices
        one = self._one_core()
        counts = [own, *(threads for threads in self.mode.thread_counts if threads != own)]
        for threads in counts:
            yield Arrangement(threads, one)
            yield Arrangement(threads, one, "cpu", BACKGROUND)
            yield Arrangement(threads, one, "cpu", EQUAL)
        for threads in counts:
            for cores in choices:
                if len(cores) > 1:
                    yield Arrangement(threads, cores)
        for source in self.mode.sources:
            if source != "cpu":
                yield Arrangement(own, one, source, EQUAL)

    def latency_tasks(self, capacity: float) -> Iterator[Task]:
        """
        Sweeps.

        :param capacity: throughput of one vCPU at saturation, which the loads are chosen by
        """
        targets = sorted({max(1000, round(capacity * part, -3)) for part in GRID})
        length_s = (len(targets) + 1) * self.mode.timing.step_s + 1.0
        for arrangement in self.arrangements():
            # More vCPUs may saturate later.
            width = min(arrangement.threads, len(arrangement.cores))
            loads = [int(round(q * (1 + 0.35 * (width - 1)), -3)) for q in targets]
            yield Task(
                "latency",
                " ".join(str(value) for value in arrangement.columns.values()),
                length_s,
                self.mode.rounds[1],
                self._sweep_of(arrangement, loads),
            )

    def job_tasks(self, bench: Workbench) -> Iterator[Task]:
        """Jobs alone, then under pressure, then in pairs."""
        yield from self._job_tasks(bench.vcpus)

    def _job_tasks(self, vcpus: int) -> Iterator[Task]:
        length_s = 1.3 * SAMPLE_S if self.mode.sample_jobs else 30.0
        most = 1 if self.mode.sample_jobs else self.mode.rounds[1]
        for job in self.scenario.jobs:
            for threads in [n for n in job.threads if n <= vcpus]:
                cores = tuple(range(threads))
                yield Task(
                    "jobs",
                    f"{job.name} {threads} {ALONE}",
                    length_s,
                    most,
                    self._job_of(job, threads, cores, None),
                )
        for job in self.scenario.jobs:
            for source in self.mode.sources:
                where = (0,) if source in ON_SAME_CORE else (1,)
                beside = pressure(source, where, Weight.NORMAL)
                yield self._job_beside(job, beside, length_s, most)
            if self.mode.pairs:
                for other in self.scenario.jobs:
                    if other.name != job.name:
                        beside = Beside(other.name, other, other.threads[0], (1,), Weight.NORMAL)
                        yield self._job_beside(job, beside, length_s, most)

    def _job_beside(self, job: Job, beside: Beside, length_s: float, most: int) -> Task:
        threads = job.threads[0]
        return Task(
            "jobs",
            f"{job.name} {threads} {beside.name}",
            length_s,
            most,
            self._job_of(job, threads, (0,), beside),
        )

    def _capacity(self, bench: Workbench) -> float:
        """
        Throughput of one vCPU at saturation, by short scans, before loads can be chosen.

        Whatever disturbs a scan makes it too small, and loads chosen by it would all be served: so
        one is believed when a second agrees with it.
        """
        one = Arrangement(self.scenario.service.threads, self._one_core())
        scan = self._sweep_of(one, list(RISING_QPS))
        while not (best := self._best_scans()) or best[1] < (1 - AGREE) * best[0]:
            if self.store.rounds("capacity", "capacity") == SCANS:
                break
            self.store.add("capacity", "capacity", scan(bench))
        self._advance(2 * ((len(RISING_QPS) + 1) * self.mode.timing.step_s + 1.0), "capacity")
        return best[0]

    def _best_scans(self) -> list[float]:
        """The two largest throughputs of the scans [1/s], empty before there are two."""
        scans = self.store.table("capacity")
        if self.store.rounds("capacity", "capacity") < 2:
            return []
        return sorted(scans.groupby("rep")["achieved_qps"].max(), reverse=True)[:2]

    def _one_core(self) -> tuple[int, ...]:
        return self.scenario.service.core_choices[0][:1]

    def _repeat(self, bench: Workbench, task: Task) -> None:
        """Measure rounds of a task until it is known well enough, or often enough."""
        spare = self.mode.disturbed_rounds
        done = self.store.rounds(task.table, task.key)
        while done < task.most + spare:
            if done >= min(self.mode.rounds[0], task.most) and self._known(task):
                break
            if done >= task.most and not self._disturbed(task):
                break
            self.store.add(task.table, task.key, task.run(bench))
            done += 1
            self._advance(task.seconds if done <= task.most else 0.0, task.key)
        self._advance(task.seconds * max(task.most - done, 0), task.key)

    def _disturbed(self, task: Task) -> bool:
        rows = self.store.rows(task.table, task.key)
        return "disturbed" in rows and bool((rows["disturbed"] > 0).any())

    def _known(self, task: Task) -> bool:
        rows = self.store.rows(task.table, task.key)
        if self._disturbed(task):
            return False
        if task.table == "latency":
            points = average(trusted(rows, ["target_qps"]), ["target_qps"])
            return bool((points["p95_us_ci"] <= MARGIN * points["p95_us"]).all())
        if task.table == "jobs" and len(rows) > 1:
            times = rows["real_s"].to_numpy()
            return bool(2.0 * times.std(ddof=1) / math.sqrt(len(times)) <= MARGIN * times.mean())
        return task.most == 1

    def _sweep_of(
        self, arrangement: Arrangement, targets: Sequence[int]
    ) -> Callable[[Workbench], list[dict[str, object]]]:
        def run(bench: Workbench) -> list[dict[str, object]]:
            beside = None
            if arrangement.beside != ALONE:
                same = arrangement.beside in ON_SAME_CORE
                where = arrangement.cores if same else (bench.client_cpu,)
                weight = Weight.BACKGROUND if arrangement.weight == BACKGROUND else Weight.NORMAL
                beside = pressure(arrangement.beside, where, weight)
            with (
                bench.serving(arrangement.threads, arrangement.cores) as server,
                bench.beside(beside) as neighbour,
            ):
                timing, cores = self.mode.timing, arrangement.cores
                rows = bench.sweep(server, targets, timing, cores, neighbour)
            return [arrangement.columns | row for row in rows]

        return run

    def _job_of(
        self, job: Job, threads: int, cores: tuple[int, ...], beside: Beside | None
    ) -> Callable[[Workbench], list[dict[str, object]]]:
        def run(bench: Workbench) -> list[dict[str, object]]:
            with bench.beside(beside):
                if self.mode.sample_jobs and shortened(job, 0.5, threads):
                    row = self._sampled(bench, job, threads, cores)
                else:
                    row = bench.time_job(job, threads, cores, self.mode.job_limit_s)
                    row |= {"sampled": 1.0, "overhead_s": row["start_s"]}
            name = beside.name if beside else ALONE
            return [{"job": job.name, "threads": threads, "beside": name} | row]

        return run

    def _sampled(
        self, bench: Workbench, job: Job, threads: int, cores: tuple[int, ...]
    ) -> dict[str, float]:
        """Time of a whole job from two short parts: the start is paid once, the rest scales."""
        part, row = 0.005, {}
        while part < 1.0:
            cut, part = self._part(job, part, threads)
            row = bench.time_job(cut, threads, cores, self.mode.job_limit_s)
            if row["real_s"] >= SHORT_SAMPLE * SAMPLE_S or math.isnan(row["real_s"]):
                break
            part *= 4.0
        first, first_part = row, min(part, 1.0)
        part = min(1.0, first_part * max(2.0, SAMPLE_S / first["real_s"]))
        cut, part = self._part(job, part, threads)
        row = bench.time_job(cut, threads, cores, self.mode.job_limit_s)
        rate = (row["real_s"] - first["real_s"]) / (part - first_part) if part > first_part else 0.0
        overhead_s = max(first["real_s"] - rate * first_part, row["start_s"])
        whole = {"real_s": overhead_s + rate, "cpu_s": row["cpu_s"] / part}
        return row | whole | {"sampled": part, "overhead_s": overhead_s}

    @staticmethod
    def _part(job: Job, part: float, threads: int) -> tuple[Job, float]:
        cut = shortened(job, part, threads)
        assert cut is not None
        return cut

    def _actuation(self, bench: Workbench) -> list[dict[str, object]]:
        """How long it takes to change things and to read them, one row a kind."""
        watch, one = Stopwatch(), self._one_core()
        time_actuation(bench, watch)
        with bench.serving(self.scenario.service.threads, one) as server:
            time_service(bench, server, watch)
            noise = sensor_noise(bench, server, one, 0.5 * self._capacity(bench))
        return [*watch.rows(), {"action": "sensor_noise", "median_s": noise, "n": 1}]


def shortened(job: Job, part: float, threads: int) -> tuple[Job, float] | None:
    """
    A job that does a part of its work, where its command says how much that is.

    :param job: a stress-ng job with a number of operations (`--matrix-ops 1000`)
    :param part: of the operations
    :param threads: its thread count: each does the same whole number of operations
    :return: the job and the part that it does; none if the command does not say
    """
    command = list(job.command)
    for k, word in enumerate(command):
        if OPS.match(word):
            name, _, said = word.partition("=")
            if not said and k + 1 < len(command):
                said = command[k + 1]
            if not said.isdigit():
                continue
            whole = int(said)
            count = min(whole, threads * max(1, round(whole * part / threads)))
            if "=" in word:
                command[k] = f"{name}={count}"
            else:
                command[k + 1] = str(count)
            return job.model_copy(update={"command": tuple(command)}), count / whole
    return None
