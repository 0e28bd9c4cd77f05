r"""
A load for memcached that jumps as mcperf's dynamic load does, and its p95 in every interval.

    python -m deploy.load --memcached 127.0.0.1:11211 --trace-seed 2333 \
        --qps-min 5000 --qps-max 120000 --interval 2 --duration 60
    python -m deploy.load --memcached 127.0.0.1:11211 --scan 5000:120000:5000 --interval 2
    python -m deploy.load --memcached 127.0.0.1:11211 --clients 16 --think 0.001 --duration 60

The targets are exactly mcperf's (`--qps_seed`). Requests come from `deploy.load.generator`,
latencies from `deploy.load.probe`, both on one vCPU (the last one) with real-time priority. Output
has mcperf's columns and `client_late`: the share of the probe's requests or of the generator's
ticks, whichever is larger, that the client itself was late with. A row is printed when its interval
has ended and its last request was answered. What the client took goes to standard error at the end.

What is asked for is a `deploy.load.mix`; SETs have rows of their own, `update`. With `--clients`
the loop is closed (`deploy.load.closed_loop`), and the clients measure themselves.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Sequence

from deploy.linux import realtime, standing
from deploy.linux.helpers import helper_command
from deploy.linux.readiness import await_readable
from deploy.linux.signals import interrupt_on_stop
from deploy.load.closed_loop import MOST_CLIENTS, Clients
from deploy.load.generator import CONNECTIONS, COUNT, READY, START
from deploy.load.mix import DEFAULT, GET, SET, Mix, add_mix_options, mix_of
from deploy.load.probe import LIMIT_S, RATE_QPS, Probe
from deploy.records import mcperf
from deploy.records.lines import Disk, LineFile
from env.errors import InputError, exit_on_bad_input
from env.inputs.commandline import OneLineParser, address, number, whole_number
from env.simulator.load import LoadTrace

LEAD_S = 0.1
"""From both processes' being ready to the first interval."""

PATIENCE_S = 60.0
"""How late the client's own processes may be, on a machine that is busy with other things."""


class Client:
    """
    The two processes that load and probe memcached along a trace.

    :param host: memcached's address, a name or an IP address
    :param port: memcached's TCP port
    :param trace: the load; the probe's requests are part of it
    :param cpu: the vCPU of both
    :param connections: of the load; the probe has its own
    :param mix: what both ask for
    :raises InputError: if one of them cannot start
    """

    def __init__(
        self,
        host: str,
        port: int,
        trace: LoadTrace,
        cpu: int,
        connections: int = CONNECTIONS,
        mix: Mix = DEFAULT,
    ):
        self.trace = trace
        self.mix = mix
        self.late_ticks: list[float] = []
        self.served = self.spoiled = 0
        self.cpu_s = 0.0
        self.probe = Probe(host, port, cpu, trace.interval_s + PATIENCE_S, mix)
        rates = [max(1, target - round(RATE_QPS)) for target in trace.targets]
        options = ["--memcached", f"{host}:{port}", "--cpu", str(cpu)]
        options += ["--interval", repr(trace.interval_s), "--connections", str(connections)]
        options += mix.options()
        self.generator = subprocess.Popen(
            helper_command("deploy.load.generator", *options, *map(str, rates)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.start_s = self._begin()
            # Read once: the clock may be set during the run.
            self.epoch_s = time.time() - time.monotonic()
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> float:
        """Wait until both processes are ready, and tell the generator when to start."""
        self._await_probe(time.monotonic())
        self._from_generator(len(READY))
        start_s = time.monotonic() + LEAD_S
        assert self.generator.stdin is not None
        self.generator.stdin.write(START.pack(start_s))
        self.generator.stdin.flush()
        return start_s

    def row(self, index: int) -> str:
        """
        Wait for an interval's end.

        :param index: number of the interval, from 0
        :return: the row of its GETs
        :raises InputError: see `rows`
        """
        return self.rows(index)[GET]

    def rows(self, index: int) -> dict[str, str]:
        """
        Wait for an interval's end.

        :param index: number of the interval, from 0
        :return: its rows by operation
        :raises InputError: if one of the processes has ended
        """
        start_s = self.start_s + index * self.trace.interval_s
        end_s = start_s + self.trace.interval_s
        self._await_probe(end_s)
        probed_s = self.probe.by_operation(start_s, end_s)
        _, read, updated, late, self.cpu_s = COUNT.unpack(self._from_generator(COUNT.size))
        self.late_ticks.append(late)
        late = max(late, self.probe.own_late(start_s, end_s))
        self.spoiled += late > mcperf.SPOILED
        rows = {}
        for operation, answered in ((GET, read), (SET, updated)):
            if share := self.mix.share(operation):
                answered += sum(late_s < LIMIT_S for late_s in probed_s[operation])
                self.served += answered
                rows[operation] = mcperf.format_row(
                    [1e6 * late_s for late_s in probed_s[operation]],
                    answered / self.trace.interval_s,
                    share * self.trace.targets[index],
                    self.epoch_s + start_s,
                    self.epoch_s + end_s,
                    late,
                    operation,
                )
        return rows

    def stop(self) -> None:
        """End both processes."""
        self.probe.stop()
        self.generator.kill()
        self.generator.communicate()

    def _await_probe(self, until_s: float) -> None:
        """Wait until all that was due before a moment was answered or is late."""
        while self.probe.known_until_s < until_s:
            if time.monotonic() > until_s + PATIENCE_S:
                raise InputError("the probe is held up: it may have no real-time priority")
            await_readable([self.probe.file], LIMIT_S)
            if not self.probe.poll():
                raise InputError("the probe has ended; its message is above")
            time.sleep(0.02)  # records come one by one; a few at a time will do

    def _from_generator(self, size: int) -> bytes:
        assert self.generator.stdout is not None
        said = self.generator.stdout.read(size)
        if len(said) < size:
            raise InputError("the load generator has ended; its message is above")
        return said


def serve(client: Client) -> None:
    """
    Print mcperf's output as the run goes on.

    :param client: a running one
    """
    output = LineFile(sys.stdout.fileno(), Disk("the load's output"))
    output.append(f"Timestamp start: {round(1000 * (client.epoch_s + client.start_s))}")
    output.append(mcperf.HEADER)
    for index in range(len(client.trace.targets)):
        for row in client.rows(index).values():
            output.append(row)
    length_s = len(client.trace.targets) * client.trace.interval_s
    output.append(f"Timestamp end: {round(1000 * (client.epoch_s + time.monotonic()))}")
    output.append(f"Total QPS = {client.served / length_s:.1f}")


def serve_closed(clients: Clients, interval_s: float, duration_s: float) -> None:
    """
    Print what clients in a closed loop see, in mcperf's format; nobody asks for a rate.

    :param clients: connected ones
    :param interval_s: length of an interval [s]
    :param duration_s: of the run, the last interval is shorter where it is no multiple [s]
    """
    output = LineFile(sys.stdout.fileno(), Disk("the load's output"))
    epoch_s = time.time() - time.monotonic()
    output.append(f"Timestamp start: {round(1000 * time.time())}")
    output.append(mcperf.HEADER)
    whole, rest_s = divmod(duration_s, interval_s)
    served = 0
    for interval in clients.intervals([interval_s] * int(whole) + [rest_s] * (rest_s > 1e-6)):
        served += interval.count
        for operation, latencies_s in interval.latencies_s.items():
            if latencies_s:
                output.append(
                    mcperf.format_row(
                        [1e6 * each_s for each_s in latencies_s],
                        len(latencies_s) / (interval.end_s - interval.start_s),
                        math.nan,
                        epoch_s + interval.start_s,
                        epoch_s + interval.end_s,
                        interval.late / interval.count,
                        operation,
                    )
                )
    output.append(f"Timestamp end: {round(1000 * time.time())}")
    output.append(f"Total QPS = {served / duration_s:.1f}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    line = OneLineParser(
        prog="python -m deploy.load", description="Load memcached as mcperf's dynamic load does."
    )
    add = line.add_argument
    add("--memcached", type=address, required=True, help="where it listens, HOST:PORT")
    what = line.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace-seed", type=whole_number(1), help="mcperf's --qps_seed")
    what.add_argument("--scan", metavar="A:B:STEP", help="rise from A to B requests/s instead")
    clients = whole_number(1, MOST_CLIENTS)
    what.add_argument("--clients", type=clients, help="so many who wait for their answers instead")
    add("--qps-min", type=whole_number(1), default=5_000, help="smallest target (%(default)s)")
    add("--qps-max", type=whole_number(1), default=100_000, help="largest target (%(default)s)")
    add("--interval", type=number(0.1), default=10.0, help="length of a step [s] (%(default)g)")
    add("--duration", type=number(0.1), default=60.0, help="length of the run [s] (%(default)g)")
    add("--think", type=number(0.0), help="how long a client rests, on average [s] (0)")
    add_mix_options(line)
    add("--cpu", type=whole_number(0), default=realtime.last_cpu(), help="vCPU to run on (last)")
    return line


def trace_of(arguments: argparse.Namespace) -> LoadTrace:
    """
    The trace that the command line asks for.

    :param arguments: what `parser` read
    :raises InputError: if it is none
    """
    try:
        if arguments.scan is None:
            return LoadTrace.dynamic(
                arguments.trace_seed,
                arguments.interval,
                arguments.qps_min,
                arguments.qps_max,
                arguments.duration,
            )
        words = arguments.scan.split(":")
        if len(words) != 3 or not all(map(str.isdecimal, words)):
            raise ValueError(f"three whole numbers, not {arguments.scan!r}")
        start, stop, step = map(int, words)
        return LoadTrace.scan(start, stop, step, arguments.interval)
    except ValueError as error:
        what = "--scan wants A:B:STEP" if arguments.scan else "the load"
        raise InputError(f"{what}: {error}") from error


def close_loop(arguments: argparse.Namespace, mix: Mix) -> None:
    """
    Load memcached with clients that wait for their answers.

    :param arguments: what `parser` read
    :param mix: what they ask for
    :raises InputError: if memcached does not answer
    """
    host, port = arguments.memcached
    mix.load(host, port)
    clients = Clients(host, port, arguments.clients, arguments.think or 0.0, mix)
    if complaint := realtime.hold(arguments.cpu, standing.LOAD):
        print(f"coretide: load: {complaint}", file=sys.stderr)
    try:
        serve_closed(clients, min(arguments.interval, arguments.duration), arguments.duration)
    finally:
        clients.close()


def main(argv: Sequence[str] | None = None) -> None:
    """
    Load memcached from the command line.

    :param argv: command line, the process's own if none is given
    """
    arguments = parser().parse_args(argv)
    interrupt_on_stop()
    with exit_on_bad_input():
        mix = mix_of(arguments)
        if arguments.think is not None and arguments.clients is None:
            raise InputError("--think: only clients of a closed loop think: --clients N")
        realtime.require_cpu(arguments.cpu)
        host, port = arguments.memcached
        try:
            if arguments.clients is not None:
                close_loop(arguments, mix)
                return
            trace = trace_of(arguments)
            mix.load(host, port)
            if arguments.scan is None:
                targets = ", ".join(map(str, trace.targets))
                print(f"Total number of intervals = {len(trace.targets)} ({targets})", flush=True)
            client = Client(host, port, trace, arguments.cpu, mix=mix)
            try:
                serve(client)
            finally:
                client.stop()
        except KeyboardInterrupt as stop:
            sys.exit(128 + int(stop.args[0]))
    length_s = len(trace.targets) * trace.interval_s
    print(
        f"client: generator {100 * client.cpu_s / length_s:.1f} % of vCPU {arguments.cpu}; "
        f"{100 * max(client.late_ticks):.2f} % of ticks more than 1 ms late in the worst interval; "
        f"{client.spoiled} of {len(trace.targets)} intervals spoiled by its own delays",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
