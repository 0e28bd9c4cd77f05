"""
What starting containers costs memcached, by Docker's control group and by rests between starts.

    sudo .venv/bin/python -m benchmarks.starts

The local scenario's jobs are made one after the other, at background weight, beside memcached under
a constant load, and wait at their gates, which are then opened at once. Docker outside of any
group, as it starts, in its group, in its group with the actuator's rests after each container, and
in a group of the least weight take turns. The experiment behind an entry of docs/decisions.md.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from deploy.engines import daemon, memcached
from deploy.engines.images import ensure_stress_image
from deploy.engines.memcached import Memcached
from deploy.jobs import gate
from deploy.jobs.containers import DockerRuntime, connect
from deploy.jobs.runtimes import Attempt
from deploy.linux import realtime
from deploy.linux.cgroups import LEAST_WEIGHT, JobGroup, find_hierarchy, job_groups_beside, members
from deploy.linux.service_process import pin
from deploy.linux.signals import interrupt_on_stop
from deploy.load.dynamic_load import Client
from deploy.load.keys import load_records
from deploy.loop.actuator import REST
from deploy.records import proof
from deploy.records.mcperf import percentile
from env.allocation import Weight
from env.errors import exit_on_bad_input
from env.inputs.commandline import OneLineParser, whole_number
from env.scenario import Job, load_scenario
from env.simulator.load import LoadTrace
from training.measuring.testbed import require_running

CALM_S = 4.0
"""Of load, before the first container."""

OPENING_S = 1.0
"""From the first gate's opening on: the jobs begin."""

LOAD_S = 60.0
"""Of load in all, which is more than making takes."""


def p95_us(client: Client, start_s: float, end_s: float) -> float:
    """
    p95 of the requests that were due in a stretch of time [µs].

    :param client: loads and probes memcached
    :param start_s: on the monotonic clock [s]
    :param end_s: on the monotonic clock [s]
    """
    return 1e6 * percentile(sorted(client.probe.between(start_s, end_s)), 95.0)


def turn(
    server: Memcached, runtime: DockerRuntime, jobs: Sequence[Job], qps: int, rest: float
) -> str:
    """
    Make and start all jobs once.

    :param server: a running memcached
    :param runtime: who makes them
    :param jobs: what is made
    :param qps: the load meanwhile [requests/s]
    :param rest: pause after each container, in multiples of what it took
    :return: p95 before, while containers are made and while gates are opened, and how long that
        took, in words
    """
    beside = job_groups_beside(find_hierarchy(), server.pid)
    trace = LoadTrace.explicit([qps], LOAD_S)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ct-")))
        client = Client(server.host, server.port, trace, realtime.last_cpu())
        stack.callback(client.stop)
        time.sleep(client.start_s + CALM_S - time.monotonic())
        begun_s = time.monotonic()
        for job in jobs:
            group = beside(f"coretide-starts-{os.getpid()}-{job.name}")
            group.create()
            stack.callback(group.remove)
            place = folder / job.name
            place.mkdir()
            proof.prepare(place)
            gate.make(place)
            asked_s = time.monotonic()
            instance = runtime.start(Attempt(job, 1, place, group), (0, 1), Weight.BACKGROUND)
            require_running(runtime, instance)
            stack.callback(os.close, instance.ended)
            stack.callback(runtime.remove, instance)
            time.sleep(rest * (time.monotonic() - asked_s))
            client.probe.poll()  # its pipe holds four seconds
        made_s = time.monotonic()
        delays_ms = []
        for job in jobs:
            asked_s = time.monotonic()
            gate.await_passage(folder / job.name, job.threads[0])
            delays_ms.append(1e3 * (time.monotonic() - asked_s))
        ended_s = made_s + OPENING_S
        time.sleep(max(0.0, ended_s - time.monotonic()))
        while client.probe.known_until_s < ended_s:
            client.probe.poll()
        calm_us = p95_us(client, begun_s - CALM_S / 2.0, begun_s)
        making_us, opening_us = p95_us(client, begun_s, made_s), p95_us(client, made_s, ended_s)
    return (
        f"p95 {calm_us:.0f} us before, {making_us:.0f} us in {made_s - begun_s:.1f} s of making, "
        f"{opening_us:.0f} us in the second of opening; a gate takes "
        f"{median(delays_ms):.1f} ms, {max(delays_ms):.1f} at most"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.starts", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--qps", type=whole_number(1), default=70_000, help="load [requests/s] (%(default)s)")
    add("--turns", type=whole_number(1), default=3, help="of each (%(default)s)")
    return line


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure all of them in turn.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    jobs = load_scenario("local").jobs
    interrupt_on_stop()
    with exit_on_bad_input(), contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ct-")))
        engine = stack.enter_context(daemon.running(base / "d"))
        client = connect(engine.url)
        stack.callback(client.close)
        ensure_stress_image(client)
        hierarchy = find_hierarchy()
        path = hierarchy.group_of(engine.process.pid)
        pids = members(hierarchy, path)
        own, least = daemon.WEIGHT[hierarchy.version], LEAST_WEIGHT[hierarchy.version]
        ways = [(None, 0.0), (own, 0.0), (own, REST), (least, 0.0)]
        runtime = DockerRuntime(hierarchy, f"starts-{os.getpid()}", engine.url)
        for number in range(arguments.turns):
            for weight, rest in ways[:: -1 if number % 2 else 1]:
                group = JobGroup(hierarchy, path if weight else path.parent, weight or 0)
                if weight:
                    group.set_weight(Weight.NORMAL)
                for pid in pids:
                    group.join(pid)
                with memcached.running(threads=2) as server:
                    pin(server.pid, (0,))
                    load_records(server.host, server.port)
                    said = turn(server, runtime, jobs, arguments.qps, rest)
                where = f"in a group of weight {weight}" if weight else "outside of any group"
                where += ", with rests" if rest else ""
                print(f"Docker {where}: {said}", flush=True)


if __name__ == "__main__":
    main()
