"""
What memcached waits for beside a busy program, by what it goes before other programs by.

    sudo .venv/bin/python -m benchmarks.priority [--json FILE] [--turns N] [--qps N] [--slo-us N]

memcached serves a constant load as it was started (nothing), in a session of more weight (weight),
and in the real-time class (class): on the first vCPU and on the first two, alone and beside jobs in
the background, each with and without a busy program of everybody's weight that begins to run on the
first vCPU. All of them take turns in random order, a second each, because a machine's speed drifts.
The experiment behind `deploy.jobs.precedence`.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from deploy.engines import memcached
from deploy.engines.memcached import Memcached
from deploy.jobs import precedence
from deploy.linux import realtime
from deploy.linux.cgroups import JobGroup, find_hierarchy, job_groups_beside
from deploy.linux.sensors import ThreadClock
from deploy.linux.service_process import Identity, identify, pin
from deploy.linux.signals import interrupt_on_stop
from deploy.load.dynamic_load import Client
from deploy.load.keys import load_records
from deploy.records.mcperf import percentile
from deploy.records.state import Weighing
from env.allocation import Weight
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, number, require_writable, whole_number, write_json
from env.scenario import load_scenario
from env.simulator.load import LoadTrace
from training.measuring import preflight
from training.measuring.pressure import STRESS
from training.measuring.testbed import sleep_until

MEANS = ("nothing", "weight", "class")
JOBS = ("matrix", "cpu", "zlib", "cache")
SLICE_S, WARM_S, MARGIN_S = 1.0, 0.02, 0.05
"""Of a slice the beginning counts, in which a program that begins is most in memcached's way."""

BUSY = (sys.executable, "-S", "-c", "while True: pass")


class Kind(NamedTuple):
    """
    What a slice is of.

    :param means: what memcached goes before others by, one of `MEANS`
    :param vcpus: how many it has
    :param jobs: whether there are jobs in the background
    :param busy: whether a busy program is on its first vCPU
    """

    means: str
    vcpus: int
    jobs: bool
    busy: bool


KINDS = tuple(
    Kind(*each) for each in itertools.product(MEANS, (1, 2), (False, True), (False, True))
)
Figures = dict[str, float]


class Place:
    """
    memcached's place among other programs.

    :param who: memcached
    :raises InputError: if it cannot be put first by both means
    """

    def __init__(self, who: Identity):
        by_class = precedence.by_class(who.pid)
        if by_class is None:
            raise InputError("memcached may have no real-time class here; use sudo, or see --check")
        by_group = precedence.by_group(who.pid, find_hierarchy(), {who.pid})
        self._found: dict[str, Weighing] = {"class": by_class, "weight": by_group}
        self._who = who
        self._now = "nothing"

    def take(self, means: str) -> None:
        """
        Go before others by a means from now on, and by no other.

        :param means: one of `MEANS`
        """
        if means == self._now:
            return
        if self._now in self._found:
            precedence.put_back(self._who, self._found[self._now])
        if means in self._found:
            precedence.put_first(self._who.pid, self._found[means])
        self._now = means


@contextlib.contextmanager
def crowd(server: Memcached) -> Iterator[JobGroup]:
    """
    Jobs in the background of every vCPU, which do not run yet.

    :param server: a running memcached
    :return: their control group
    """
    group = job_groups_beside(find_hierarchy(), server.pid)(f"coretide-precedence-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        group.create()
        stack.callback(group.remove)
        group.set_weight(Weight.BACKGROUND)
        for job in JOBS:
            process = subprocess.Popen([*STRESS, f"--{job}", "1"], process_group=0)
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            stack.callback(group.set_weight, Weight.NORMAL)  # an idle group may not get to die
            stack.callback(group.set_frozen, False)
            group.join(process.pid)
        group.set_frozen(True)
        yield group


@contextlib.contextmanager
def busy_program(vcpu: int) -> Iterator[Callable[[bool], None]]:
    """
    A busy program of everybody's weight, in a session of its own.

    :param vcpu: the vCPU that it keeps to
    :return: lets it run, or stops it
    """
    with subprocess.Popen(BUSY, start_new_session=True) as process:
        try:
            os.sched_setaffinity(process.pid, {vcpu})
            process.send_signal(signal.SIGSTOP)
            yield lambda runs: process.send_signal(signal.SIGCONT if runs else signal.SIGSTOP)
        finally:
            process.kill()


def slices(server: Memcached, qps: int, turns: int, slo_us: float) -> list[tuple[Kind, Figures]]:
    """
    Measure every kind once a turn.

    :param server: a running memcached
    :param qps: the load [requests/s]
    :param turns: how many
    :param slo_us: what is later is late [us]
    :return: in the order of the slices: p95 [us], late share, run delay [s a second], the jobs'
        vCPUs
    """
    vcpus, draws = sorted(os.sched_getaffinity(0)), random.Random(0)
    order = [kind for _ in range(turns) for kind in draws.sample(KINDS, len(KINDS))]
    trace, found = LoadTrace.explicit([qps] * (len(order) + 2), SLICE_S), []
    with contextlib.ExitStack() as stack:
        jobs = stack.enter_context(crowd(server))
        let_run = stack.enter_context(busy_program(vcpus[0]))
        who = identify(server.pid)
        place = Place(who)
        stack.callback(place.take, "nothing")
        clock = ThreadClock(who, time.monotonic())
        stack.callback(clock.close)
        client = Client(server.host, server.port, trace, realtime.last_cpu())
        stack.callback(client.stop)
        client.row(0)
        for index, kind in enumerate(order, start=1):
            let_run(False)
            place.take(kind.means)
            pin(server.pid, vcpus[: kind.vcpus])
            jobs.set_frozen(not kind.jobs)
            start_s = client.start_s + index * SLICE_S
            sleep_until(start_s + WARM_S)
            let_run(kind.busy)
            begun_s = time.monotonic()
            before, jobs_s = clock.read(begun_s), jobs.cpu_s()
            sleep_until(start_s + SLICE_S - MARGIN_S)
            ended_s = time.monotonic()
            after, length_s = clock.read(ended_s), ended_s - begun_s
            jobs_then_s = jobs.cpu_s()
            client.row(index)
            latencies = sorted(client.probe.between(begun_s, ended_s))
            if not latencies:
                raise InputError("the probe stood still for a whole slice; is the machine busy?")
            figures = {
                "p95_us": 1e6 * percentile(latencies, 95.0),
                "late": sum(1e6 * one > slo_us for one in latencies) / len(latencies),
                "run_delay": (after.run_delay_s - before.run_delay_s) / length_s,
                "job_vcpus": (jobs_then_s - jobs_s) / length_s,
            }
            found.append((kind, figures))
    return found


def summary(found: Sequence[tuple[Kind, Figures]]) -> list[dict[str, Any]]:
    """
    One entry a kind: medians over its slices, the mean of their late shares, and the largest p95.

    :param found: see `slices`
    """
    entries = []
    for kind in KINDS:
        rows = [figures for each, figures in found if each == kind]
        entry = kind._asdict() | {name: median(row[name] for row in rows) for name in rows[0]}
        entry["late"] = sum(row["late"] for row in rows) / len(rows)
        entry["highest_p95_us"] = max(row["p95_us"] for row in rows)
        entries.append(entry)
    return entries


def table(entries: Sequence[dict[str, Any]], title: str) -> Table:
    """
    The kinds for the terminal.

    :param entries: see `summary`
    :param title: what was measured
    """
    view = Table(box=box.SIMPLE_HEAD, title=title, show_edge=False)
    for column in ("first by", "vCPUs", "jobs", "busy"):
        view.add_column(column)
    for column in ("p95 us", "highest", "late", "run delay", "jobs' vCPUs"):
        view.add_column(column, justify="right")
    for one in entries:
        view.add_row(
            *(one["means"], str(one["vcpus"])),
            *("idle class" if one["jobs"] else "-", "yes" if one["busy"] else "-"),
            *(f"{one['p95_us']:,.0f}", f"{one['highest_p95_us']:,.0f}"),
            *(f"{one['late']:.1%}", f"{one['run_delay']:.2f}", f"{one['job_vcpus']:.2f}"),
        )
    return view


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.priority", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--json", type=Path, help="write the figures there")
    add("--turns", type=whole_number(1), default=8, help="slices of each kind (%(default)s)")
    add("--qps", type=whole_number(1), default=90_000, help="load [requests/s] (%(default)s)")
    slo_us = load_scenario("local").service.slo_us
    add("--slo-us", type=number(1.0), default=slo_us, help="what is later is late (%(default)g us)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure and compare.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    interrupt_on_stop()
    with exit_on_bad_input("stopped; nothing is left running"):
        require_writable(arguments.json)
        preflight.require_machine()
        with memcached.running(threads=2) as server:
            load_records(server.host, server.port)
            found = slices(server, arguments.qps, arguments.turns, arguments.slo_us)
        entries = summary(found)
        given = {name: getattr(arguments, name) for name in ("qps", "turns", "slo_us")}
        title = f"{arguments.qps:,} requests/s, late after {arguments.slo_us:g} us"
        Console().print(table(entries, title))
        if arguments.json:
            write_json(given | {"kinds": entries}, arguments.json)


if __name__ == "__main__":
    main()
