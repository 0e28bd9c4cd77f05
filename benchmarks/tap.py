"""
The latency tap beside clients: what each sees of the same requests, and what the tap costs.

    sudo .venv/bin/python -m benchmarks.tap [--json FILE]

The reference is an open-loop client on a vCPU of its own that never sleeps (`open_loop.c`, built
with cc), one request at most on a connection. It, `deploy.load`, whose batches are pipelined, with
its probe, and libmemcached's memcaslap load a memcached in turn; the tap watches all of them. What
the tap costs is CPU time a request, one at a time, in turns with and without it.
"""

import argparse
import contextlib
import itertools
import json
import re
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from deploy.engines import memcached
from deploy.engines.memcached import Memcached
from deploy.linux import realtime
from deploy.linux.helpers import helper_command
from deploy.linux.sensors import ThreadClock
from deploy.linux.service_process import identify, pin
from deploy.linux.signals import interrupt_on_stop
from deploy.load.dynamic_load import Client
from deploy.load.keys import load_records
from deploy.records.latencies import Latencies
from deploy.records.mcperf import percentile
from deploy.tap.latency_tap import Tap
from deploy.tap.tracer import why_not
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, number, require_writable
from env.simulator.load import LoadTrace

LOADS_QPS = (5_000, 10_000, 20_000, 50_000, 100_000)
LIMIT_S = 1e-3
CONNECTIONS = 64
TURNS, SLICES = 4, 8
"""Turns without and with the tap, and slices of each."""

CLIENT_LATE = 0.01
"""A client that sends more of its requests late is no open loop, and no reference."""


@dataclass(frozen=True)
class Seen:
    """p50, p95 and p99 that somebody has seen [µs], and how many requests a second."""

    qps: float
    p50_us: float
    p95_us: float
    p99_us: float
    late: float = 0.0


class OpenLoop:
    """
    The undisturbed client.

    :param folder: where it is built
    :param port: memcached's
    :param cpu: its vCPU
    :raises InputError: if there is no compiler
    """

    def __init__(self, folder: Path, port: int, cpu: int):
        compiler = shutil.which("cc")
        if compiler is None:
            raise InputError("cc: not found; install it: apt-get install gcc libc6-dev")
        source = Path(__file__).with_name("open_loop.c")
        self._command = ["taskset", "-c", str(cpu), str(folder / "open_loop"), str(port)]
        subprocess.run(
            [compiler, "-O2", "-o", folder / "open_loop", source, "-lm"],
            check=True,
        )

    def run(self, qps: int, length_s: float, connections: int = CONNECTIONS) -> Seen:
        """
        Load memcached.

        :param qps: its rate [requests/s]; 0 for one request after the other
        :param length_s: how long [s]
        :param connections: over how many
        """
        numbers = map(str, (qps, length_s, connections))
        done = subprocess.run(
            [*self._command, *numbers],
            stdout=subprocess.PIPE,
            check=True,
            timeout=length_s + 30.0,
        )
        return Seen(*map(float, done.stdout.split()))


def foreign(port: int, cpu: int, length_s: float) -> Seen:
    """
    memcaslap, in a closed loop: as many requests as memcached can take.

    It counts latencies by powers of two; percentiles are interpolated within them.

    :param port: memcached's
    :param cpu: its vCPU
    :param length_s: how long [s]
    :raises InputError: if it is not installed
    """
    if shutil.which("memcaslap") is None:
        raise InputError("memcaslap: not found; install it: apt-get install libmemcached-tools")
    command = ["taskset", "-c", str(cpu), "memcaslap", "-s", f"127.0.0.1:{port}", "-T", "1"]
    seconds = f"{max(1, round(length_s))}s"
    command += ["-c", str(CONNECTIONS), "-t", seconds, "-S", seconds, "-X", "200"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=length_s + 30.0
    )
    table = done.stdout.partition("Total Statistics (")[2].partition("Log2 Dist:")[2]
    table = table.partition("\n\n")[0]
    counts = [int(word) for row in table.splitlines() if row for word in row.split(":")[1].split()]
    served = re.search(r"TPS: (\d+)", done.stdout)
    assert served is not None, done.stdout
    return Seen(float(served[1]), *(_log2_percentile_us(counts, rank) for rank in (50, 95, 99)))


def _log2_percentile_us(counts: Sequence[int], rank: float) -> float:
    """Where a percentile lies among counts of 0 to 1, 1 to 2, 2 to 4, ... µs."""
    wanted = sum(counts) * rank / 100.0
    for power, (count, total) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
        if total >= wanted:
            return float(2.0**power * 2.0 ** ((wanted - total) / max(1, count)))
    return 0.0


def batches(server: Memcached, cpu: int, qps: int, length_s: float) -> Seen:
    """
    `deploy.load`, as its probe sees it.

    :param server: memcached
    :param cpu: the vCPU of both
    :param qps: the load [requests/s]
    :param length_s: how long [s]
    """
    client = Client(server.host, server.port, LoadTrace.explicit([qps], length_s), cpu)
    try:
        client.row(0)
        since_s = client.start_s
        ordered = sorted(
            1e6 * late_s for late_s in client.probe.between(since_s, since_s + length_s)
        )
    finally:
        client.stop()
    return Seen(qps, *(percentile(ordered, rank) for rank in (50.0, 95.0, 99.0)))


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    """A busy process of memcached's weight on memcached's vCPU, half of the time."""
    command = ["taskset", "-c", "0", *helper_command("benchmarks.neighbour")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


class Watch:
    """
    A tap that is read as often as the loop reads it, and what that costs.

    :param server: memcached
    :param keep_s: how long what it shows is kept [s]
    """

    def __init__(self, server: Memcached, keep_s: float = 1.0):
        self._before_kib = _rss_kib()
        self.tap = Tap([server.port], [server.pid], LIMIT_S)
        self.tap.keep_s = keep_s
        self.reader_s = 0.0
        self._clock = ThreadClock(identify(self.tap.process.pid), 0.0)
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> "Watch":
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._reader.join()
        self._clock.close()
        self.tap.stop()

    def tracer_s(self) -> float:
        """CPU time of bpftrace so far [s]."""
        return self._clock.read(0.0).cpu_s

    def rss_mib(self) -> float:
        """By how much this process has grown since the tap was started [MiB]."""
        return (_rss_kib() - self._before_kib) / 1024.0

    def since(self, start_s: float) -> Latencies:
        """
        What the tap has seen since a moment.

        :param start_s: on the monotonic clock [s]
        :raises InputError: if it has seen nothing
        """
        until_s = time.monotonic()
        while self.tap.known_until_s < until_s:
            if time.monotonic() > until_s + 30.0:
                raise InputError("the latency tap says nothing any more")
            time.sleep(0.02)
        seen = self.tap.latencies(time.monotonic() - start_s)
        if seen is None:
            raise InputError("the latency tap has seen no request")
        return seen

    def _read(self) -> None:
        while not self._over.wait(0.025) and self.tap.poll():
            self.tap.late_lately(LIMIT_S)
            self.reader_s = time.thread_time()


def _rss_kib() -> int:
    """Memory that this process holds now [KiB]."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


def us_per_request(client: OpenLoop, server: Memcached, length_s: float) -> float:
    """
    What the tap adds to the CPU time of a request, client's and memcached's together [µs].

    One request at a time on one vCPU, so nothing is shared between requests and nobody is woken on
    another; without and with the tap in turns. Others on the machine only ever add: the least
    costs of both count. The client's sockets are tapped as memcached's are; memcached's own part,
    printed beside, is what remains where clients are elsewhere.

    :param client: asks, on memcached's vCPU
    :param server: memcached
    :param length_s: of a slice of a turn [s]
    """
    with contextlib.closing(ThreadClock(identify(server.pid), 0.0)) as clock:

        def costs_us() -> tuple[float, float]:
            """Of both together, and of memcached alone."""
            server_before_s, client_before_s = clock.read(0.0).cpu_s, _children_s()
            seen = client.run(0, length_s, connections=1)
            server_s = clock.read(0.0).cpu_s - server_before_s
            client_s = _children_s() - client_before_s
            us = 1e6 / (seen.qps * length_s)
            return (server_s + client_s) * us, server_s * us

        costs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for turn in range(2 * TURNS):
            tapped = turn % 2 == 1
            with contextlib.ExitStack() as stack:
                if tapped:
                    stack.enter_context(Watch(server))
                costs[tapped] += [costs_us() for _ in range(SLICES)]
    without_us, with_us = np.min(costs[False], axis=0), np.min(costs[True], axis=0)
    added_us, server_us = with_us - without_us
    print(
        f"CPU of a request: {without_us[0]:.2f} us, with the tap {with_us[0]:.2f}: "
        f"{added_us:.2f} more, {server_us:.2f} of it memcached's"
    )
    return float(added_us)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(prog="python -m benchmarks.tap", description=__doc__.splitlines()[1])
    add = line.add_argument
    add("--seconds", type=number(1.0), default=8.0, help="length of a measurement (%(default)g)")
    add("--json", type=Path, help="write the figures here")
    return line


HEADING = (
    f"{'':36} {'qps':>7} {'p50':>7} {'p95':>7} {'p99':>7} {'late %':>6} | {'tap p50':>7} "
    f"{'p95':>7} {'p99':>7} {'wait95':>7} {'serve95':>7} | {'bpftrace %':>10} {'reader %':>8}"
)


@dataclass(frozen=True)
class SideBySide:
    """What a client and the tap have seen of a load, and the vCPUs that the tap has taken."""

    client: Seen
    tap: Latencies
    vcpus: float

    @property
    def p95_error(self) -> float:
        """By which part of the client's p95 the tap's differs from it."""
        return abs(self.tap.p95_us / self.client.p95_us - 1.0)


def row(watch: Watch, what: str, run: Callable[[], Seen]) -> SideBySide:
    """
    Have a client load memcached, and print what it and the tap see.

    :param watch: a running tap
    :param what: is measured
    :param run: the client
    """
    start_s, tracer_s, reader_s = time.monotonic(), watch.tracer_s(), watch.reader_s
    seen = run()
    took_s = time.monotonic() - start_s
    tap = watch.since(start_s)
    tracer, reader = watch.tracer_s() - tracer_s, watch.reader_s - reader_s
    client = f"{seen.qps:7.0f} {seen.p50_us:7.1f} {seen.p95_us:7.1f} {seen.p99_us:7.1f}"
    tapped = (tap.p50_us, tap.p95_us, tap.p99_us, tap.wait_us or 0.0, tap.service_us or 0.0)
    print(
        f"{what:36} {client} {100 * seen.late:6.2f} |",
        *(f"{latency_us:7.1f}" for latency_us in tapped),
        f"| {100 * tracer / took_s:10.2f} {100 * reader / took_s:8.2f}",
        flush=True,
    )
    return SideBySide(seen, tap, (tracer + reader) / took_s)


def measure(length_s: float, folder: Path) -> dict[str, float]:
    """
    Measure everything, and print it as it comes.

    :param length_s: of a measurement [s]
    :param folder: for what is built
    :return: the figures for `--json`
    :raises InputError: if something that it takes is not there
    """
    cpu, errors = realtime.last_cpu(), []
    print(HEADING)
    with memcached.running(threads=2) as server, Watch(server, 2.0 * length_s + 10.0) as watch:
        load_records(server.host, server.port)
        client = OpenLoop(folder, server.port, cpu)
        for cores in (tuple(range(cpu + 1)), (0,)):
            pin(server.pid, cores)
            for qps in LOADS_QPS:
                what = f"open loop, {len(cores)} vCPU, {qps}"
                seen = row(watch, what, partial(client.run, qps, length_s))
                if seen.client.qps > 0.95 * qps and seen.client.late <= CLIENT_LATE:
                    errors.append(seen.p95_error)
        watching = seen.vcpus  # bpftrace's and the reader's, at 100 000 requests a second
        with neighbour():
            run = partial(client.run, 20_000, length_s)
            row(watch, "open loop, 1 vCPU, neighbour, 20000", run)
        for qps in (20_000, 100_000):
            run = partial(batches, server, cpu, qps, length_s)
            row(watch, f"deploy.load and probe, 1 vCPU, {qps}", run)
        row(watch, "memcaslap, 1 vCPU", partial(foreign, server.port, cpu, length_s))
        rss_mib = watch.rss_mib()
    if not errors:
        raise InputError("every open-loop client was late itself: the machine is too busy")
    with memcached.running(threads=1) as server:
        load_records(server.host, server.port)
        pin(server.pid, (0,))
        added_us = us_per_request(OpenLoop(folder, server.port, 0), server, length_s / 16.0)
    return {
        "p95_error": max(errors),
        "us_per_request": added_us,
        "vcpus_at_100k": watching,
        "rss_mib": rss_mib,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """
    Measure from the command line.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    interrupt_on_stop()
    with exit_on_bad_input(), tempfile.TemporaryDirectory(prefix="ct-") as folder:
        require_writable(arguments.json)
        if reason := why_not():
            raise InputError(f"latency tap: {reason}")
        figures = measure(arguments.seconds, Path(folder))
        print(json.dumps(figures))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
