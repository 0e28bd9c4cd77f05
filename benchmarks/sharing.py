"""
What a job on memcached's vCPUs costs memcached, by the way in which the job yields to it.

    sudo .venv/bin/python -m benchmarks.sharing [--json FILE] [--turns N] [--load SHARE] [--quick]
        [--not-first]

memcached serves a constant load while jobs run on its vCPUs: not at all (none), in groups of the
least weight (weight), in idle groups (idle), and in groups of memcached's weight (equal). memcached
goes before other programs, as in a deployment (`deploy.jobs.precedence`); with `--not-first` it
does not, which shows what the ways to yield do by themselves. Each way is paired with none, right
before or after it, and the next turn changes that order: a machine's speed drifts. Both memcached's
latency at half of what it serves alone and what it serves at most are measured, beside one job and
beside several, on one vCPU and on two where there is room. Whoever yields gets at most what
memcached leaves; what equal weight gets beyond that with `--not-first`, memcached lacks. So what
yielding costs the jobs there shows at a `--load` for which memcached needs no more than its equal
part of a vCPU: half of it beside one job, a fifth beside four.
"""

import argparse
import contextlib
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deploy.engines.memcached import Memcached
from deploy.linux.cgroups import IDLE_FILE, LEAST_WEIGHT
from deploy.linux.sensors import ThreadClock
from deploy.linux.service_process import identify
from deploy.linux.signals import interrupt_on_stop
from deploy.linux.stats_connection import StatsConnection
from deploy.records.mcperf import percentile
from env.allocation import Weight
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import (
    OneLineParser,
    number,
    require_writable,
    whole_number,
    write_json,
)
from env.scenario import Job
from env.simulator.load import LoadTrace
from training.measuring import preflight
from training.measuring.pressure import STRESS, Beside
from training.measuring.readings import FOREIGN_LIMIT, requests_served
from training.measuring.testbed import Neighbour, Testbed, Timing, open_testbed, sleep_until

MODES = ("none", "weight", "idle", "equal")
REST = "rest"
"""As none, and not measured: the load catches up with what memcached could not serve."""

SERVICE_THREADS = 2
MOST_VCPUS = 2

OVERLOAD_QPS = 1_000_000
"""More than memcached serves."""

OPTIONS = {"matrix": (), "cpu": (), "stream": ("--stream-l3-size", "8M"), "cache": ()}
"""
The jobs, which are stress-ng's, and what each is told besides its threads. By itself `stream` fills
memory several times as large as a host's last cache: seconds in the kernel, where it cannot be
paused.
"""

JOBS = tuple(
    Job(
        name=name,
        command=(*STRESS, f"--{name}", "{threads}", *options),
        threads=(1, 2),
        memory_mib=1024,
    )
    for name, options in OPTIONS.items()
)

COLUMNS = ("p50 us", "p95 us", "p99 us", "run delay", "jobs/left", "most/s")
CAPTION = (
    "jobs/left: vCPUs that the jobs got, and that memcached left; in brackets: in times of none"
)
COMPARED = ("p50_us", "p95_us", "p99_us", "run_delay", "max_qps")
"""What is also given in times of what it is without any job."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """
    How long is measured.

    :param turns: of each arrangement
    :param latency: of a slice at the usual load
    :param throughput: of a slice at more than memcached serves
    :param load: the usual one, in times of what memcached alone serves at most
    :param first: whether memcached goes before other programs
    """

    turns: int
    latency: Timing
    throughput: Timing
    load: float = 0.5
    first: bool = True


FULL = Plan(3, Timing(1.2, 0.25), Timing(0.6, 0.2))
QUICK = Plan(1, Timing(0.8, 0.2), Timing(0.5, 0.15))


@dataclass(frozen=True)
class Colocation:
    """
    One case: memcached and some jobs share some vCPUs.

    :param cores: memcached's vCPUs and the jobs'
    :param jobs: one or several, each with a thread per vCPU
    """

    cores: tuple[int, ...]
    jobs: tuple[Job, ...]

    def __str__(self) -> str:
        vcpus, jobs = len(self.cores), len(self.jobs)
        return f"memcached on {vcpus} vCPU{'s'[: vcpus > 1]}, {jobs} job{'s'[: jobs > 1]}"


class Crowd:
    """
    The jobs beside memcached, which all yield in the same way.

    :param neighbours: the jobs
    """

    def __init__(self, neighbours: Sequence[Neighbour]):
        self._neighbours = neighbours
        self._rests = False

    def yield_as(self, mode: str) -> None:
        """
        Yield in another way from now on.

        :param mode: one of `MODES`, or `REST`
        """
        rests = mode in ("none", REST)
        for neighbour in self._neighbours:
            group = neighbour.group
            # Whoever is to pause must get to run for it, and an idle group refuses a weight.
            group.set_weight(Weight.BACKGROUND if mode == "idle" else Weight.NORMAL)
            if mode == "weight":
                group.weight_file.write_text(str(LEAST_WEIGHT[group.hierarchy.version]))
            if rests and not self._rests:
                neighbour.pause()
            if self._rests and not rests:
                neighbour.resume()
        self._rests = rests

    def cpu_s(self) -> float:
        """CPU seconds that all of them have used."""
        return sum(neighbour.group.cpu_s() for neighbour in self._neighbours)


def arrangements(vcpus: Sequence[int]) -> list[Colocation]:
    """
    The cases measured on a machine; the first has most vCPUs, and one job.

    :param vcpus: the machine's; the last is the load's
    """
    counts = range(min(MOST_VCPUS, len(vcpus) - 1), 0, -1)
    return [Colocation(tuple(vcpus[:count]), jobs) for count in counts for jobs in (JOBS[:1], JOBS)]


def order(turn: int, modes: Sequence[str]) -> list[str]:
    """
    The modes of a turn's slices, in order.

    :param turn: its number: the pairs of every other one are the other way round
    :param modes: all that are measured
    :return: pairs of none and another, one after the other, with a rest after each equal
    """
    pairs = [("none", mode) for mode in modes if mode != "none"]
    sequence = [mode for pair in pairs for mode in pair[:: -1 if turn % 2 else 1]]
    return [each for mode in sequence for each in (mode, REST)[: 1 + (mode == "equal")]]


def slices(
    bench: Testbed, server: Memcached, crowd: Crowd, modes: Sequence[str], qps: int, timing: Timing
) -> list[Figures]:
    """
    Measure memcached in one slice of time after the other, under a constant load.

    :param bench: the testbed to measure on
    :param server: a running memcached
    :param crowd: the jobs beside it
    :param modes: of each slice
    :param qps: the load [requests/s]
    :param timing: of each slice
    :return: latencies, run delay [s per CPU second], throughput, memcached's vCPUs and the jobs' in
        each slice that is no rest
    """
    # A slice more at each end: the client may start late, and it ends with its last one.
    trace = LoadTrace.explicit([qps] * (len(modes) + 2), timing.step_s)
    crowd.yield_as(REST)
    with contextlib.ExitStack() as stack:
        client = bench.client(server, trace)
        stack.callback(client.stop)
        stats = StatsConnection(server.host, server.port)
        stack.callback(stats.close)
        clock = ThreadClock(identify(server.pid), time.monotonic())
        stack.callback(clock.close)
        client.row(0)
        found = []
        for index, mode in enumerate(modes, start=1):
            crowd.yield_as(mode)
            start_s = client.start_s + index * timing.step_s
            sleep_until(start_s + timing.warm_s)
            begun_s, served = requests_served(stats)
            before, job_s = clock.read(begun_s), crowd.cpu_s()
            sleep_until(start_s + timing.step_s - 0.01)
            ended_s, served_then = requests_served(stats)
            after, job_then_s = clock.read(ended_s), crowd.cpu_s()
            client.row(index)
            if mode == REST:
                continue
            latencies = sorted(client.probe.between(begun_s, ended_s))
            if not latencies:
                raise InputError("the probe stood still for a whole slice; is the machine busy?")
            length_s, cpu_s = ended_s - begun_s, after.cpu_s - before.cpu_s
            found.append(
                {f"p{rank}_us": 1e6 * percentile(latencies, float(rank)) for rank in (50, 95, 99)}
                | {
                    "run_delay": (after.run_delay_s - before.run_delay_s) / max(1e-9, cpu_s),
                    "memcached_vcpus": cpu_s / length_s,
                    "job_vcpus": (job_then_s - job_s) / length_s,
                    "qps": (served_then - served) / length_s,
                }
            )
    return found


def medians(rows: Sequence[Figures]) -> Figures:
    """
    The median of each figure.

    :param rows: at least one row, all of the same figures
    """
    return {name: median(row[name] for row in rows) for name in rows[0]}


def median_ratios(pairs: Sequence[Figures]) -> dict[str, float | None]:
    """
    The median of each ratio.

    :param pairs: the ratios of each pair, without those to a figure of zero
    :return: one value for each of `COMPARED`; None where no pair has a ratio
    """
    known = {name: [pair[name] for pair in pairs if name in pair] for name in COMPARED}
    return {name: median(values) if values else None for name, values in known.items()}


def measure(bench: Testbed, what: Colocation, plan: Plan, modes: Sequence[str]) -> dict[str, Any]:
    """
    Measure one arrangement.

    :param bench: the testbed to measure on
    :param what: the arrangement to measure
    :param plan: how long each slice is measured, and how many turns
    :param modes: the ways to yield that this kernel has
    :return: `modes` with the medians over the turns, `ratios` to none with those of the pairs,
        `turns` with every turn's figures, and the load
    """
    sequence = [mode for turn in range(plan.turns) for mode in order(turn, modes)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bench.serving(SERVICE_THREADS, what.cores, plan.first))
        beside = (
            Beside(job.name, job, len(what.cores), what.cores, Weight.NORMAL) for job in what.jobs
        )
        crowd = Crowd(list(filter(None, map(stack.enter_context, map(bench.beside, beside)))))
        most = slices(bench, server, crowd, sequence, OVERLOAD_QPS, plan.throughput)
        measured = [mode for mode in sequence if mode != REST]
        alone = [row["qps"] for row, mode in zip(most, measured, strict=True) if mode == "none"]
        load_qps = round(plan.load * median(alone))
        rows = slices(bench, server, crowd, sequence, load_qps, plan.latency)
    for row, limit in zip(rows, most, strict=True):
        del row["qps"]
        row["max_qps"] = limit["qps"]
        row["left_vcpus"] = len(what.cores) - row.pop("memcached_vcpus")
    return {"load_qps": load_qps} | summary(measured, rows, plan.turns)


def summary(sequence: Sequence[str], rows: Sequence[Figures], turns: int) -> dict[str, Any]:
    """
    What the slices say.

    :param sequence: the mode of each slice, in pairs with none
    :param rows: the figures of each slice
    :param turns: number of turns that the slices make
    """
    by_mode: dict[str, list[Figures]] = {mode: [] for mode in MODES if mode in sequence}
    ratios: dict[str, list[Figures]] = {mode: [] for mode in by_mode if mode != "none"}
    for mode, row in zip(sequence, rows, strict=True):
        by_mode[mode].append(row)
    for first in range(0, len(rows), 2):
        pair = dict(zip(sequence[first : first + 2], rows[first : first + 2], strict=True))
        none = pair.pop("none")
        mode, row = pair.popitem()
        ratios[mode].append({name: row[name] / none[name] for name in COMPARED if none[name]})
    of_turns = []
    for turn in range(turns):
        parts = {mode: len(found) // turns for mode, found in by_mode.items()}
        of_turns.append(
            {
                mode: medians(found[turn * parts[mode] : (turn + 1) * parts[mode]])
                for mode, found in by_mode.items()
            }
        )
    return {
        "modes": {mode: medians(found) for mode, found in by_mode.items()},
        "ratios": {mode: median_ratios(pairs) for mode, pairs in ratios.items()},
        "turns": of_turns,
    }


def table(what: Colocation, measured: dict[str, Any]) -> Table:
    """
    One arrangement for the terminal: medians, in brackets over none, and each turn below.

    :param what: the arrangement that was measured
    :param measured: see `measure`
    """
    title = f"{what}, {measured['load_qps']:,} requests/s"
    view = Table(
        box=box.SIMPLE_HEAD, title=title, caption=CAPTION, show_edge=False, padding=(0, 1, 0, 0)
    )
    view.add_column("jobs", no_wrap=True)
    for column in COLUMNS:
        view.add_column(column, justify="right", no_wrap=True)
    for mode, figures in measured["modes"].items():
        view.add_row(mode, *cells(figures, measured["ratios"].get(mode, {})), style="bold")
        for index, turn in enumerate(measured["turns"], start=1):
            view.add_row(f"turn {index}", *cells(turn[mode], {}))
    return view


def cells(figures: Figures, ratios: Mapping[str, float | None]) -> list[str]:
    """
    The cells of a row of the table.

    :param figures: see `slices`
    :param ratios: the same in times of none, where that is to be shown
    """

    def cell(name: str, shown: str) -> str:
        ratio = ratios.get(name)
        return shown if ratio is None else f"{shown} ({ratio:.{2 if ratio < 10 else 0}f})"

    return [
        f"{figures['p50_us']:,.0f}",
        cell("p95_us", f"{figures['p95_us']:,.0f}"),
        f"{figures['p99_us']:,.0f}",
        cell("run_delay", f"{figures['run_delay']:.2f}"),
        f"{figures['job_vcpus']:.2f}/{figures['left_vcpus']:.2f}",
        cell("max_qps", f"{figures['max_qps'] / 1e3:,.0f}K"),
    ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.sharing", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--json", type=Path, help="write the figures there")
    add("--turns", type=whole_number(1), help="of each arrangement (3, with --quick 1)")
    add(
        "--load",
        type=number(0.01),
        default=FULL.load,
        help="the load, in times of what memcached alone serves at most (%(default)s)",
    )
    add("--not-first", action="store_true", help="memcached does not go before others")
    add("--quick", action="store_true", help="shorter slices: all of it within a minute")
    return line


def run(plan: Plan) -> dict[str, Any]:
    """
    Measure all arrangements, and show each.

    :param plan: how long each slice is measured, and how many turns
    :return: what `--json` writes
    :raises InputError: if this machine cannot be measured
    """
    preflight.require_machine()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ct-")))
        bench = stack.enter_context(open_testbed(folder / "work", despite_load=True))
        mechanism = bench.background
        modes = [mode for mode in MODES if mode != "idle" or mechanism == IDLE_FILE]
        foreign = bench.foreign_share()
        first = bench.precedence if plan.first else "nothing"
        print(
            f"Linux {platform.release()}; in the background deployments use {mechanism}; memcached "
            f"goes first by {first}"
        )
        if foreign > FOREIGN_LIMIT:
            print(f"other processes use {foreign:.0%} of this machine's CPU: figures are disturbed")
        found: list[dict[str, Any]] = []
        for what in arrangements(sorted(os.sched_getaffinity(0))):
            measured = measure(bench, what, plan, modes)
            Console().print(table(what, measured))
            place = {"service_vcpus": len(what.cores), "jobs": [job.name for job in what.jobs]}
            found.append(place | measured)
    machine = {
        "kernel": platform.release(),
        "mechanism": mechanism,
        "precedence": first,
        "foreign": foreign,
    }
    return {"modes": found[0]["modes"], **machine, "arrangements": found}


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure and compare.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    plan = QUICK if arguments.quick else FULL
    turns, first = arguments.turns or plan.turns, not arguments.not_first
    plan = replace(plan, turns=turns, load=arguments.load, first=first)
    interrupt_on_stop()
    with exit_on_bad_input("stopped; nothing is left running"):
        require_writable(arguments.json)
        result = run(plan)
        if arguments.json:
            write_json(result, arguments.json)


if __name__ == "__main__":
    main()
