"""The latency tap on a real memcached, by the real bpftrace."""

from __future__ import annotations

import csv
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.engines import memcached
from deploy.linux.service_process import stat_fields
from deploy.load.keys import get_request, load_records
from deploy.records.mcperf import read_rows
from deploy.tap import tracer
from deploy.tap.latency_tap import Tap
from tests.live.conftest import PATIENCE, Deployment

pytestmark = pytest.mark.skipif(tracer.why_not() != "", reason=f"no tap: {tracer.why_not()}")

LIMIT_S = 0.02


@pytest.fixture(scope="module")
def server() -> Iterator[memcached.Memcached]:
    """One memcached for all tests: bpftrace takes seconds to start."""
    with memcached.running(threads=2) as started:
        load_records(started.host, started.port)
        yield started


@pytest.fixture(scope="module")
def tap(server: memcached.Memcached) -> Iterator[Tap]:
    """A tap that follows every request."""
    tap = Tap([server.port], [server.pid], LIMIT_S, every=1)
    tap.keep_s = 600.0
    yield tap
    tap.stop()


def just_counted(tap: Tap) -> float:
    """
    A moment after which all that is answered from now on is in readings of later moments.

    A reading bears the time of the row before it, and bpftrace takes it later.
    """
    asked_s = time.monotonic()
    await_that(tap, lambda: tap.known_until_s > asked_s)
    return math.nextafter(tap.known_until_s, math.inf)


def ask(server: memcached.Memcached, count: int) -> None:
    """One GET after another."""
    with socket.create_connection((server.host, server.port)) as connection:
        for _ in range(count):
            connection.sendall(get_request(7))
            assert connection.recv(4096).endswith(b"END\r\n")


def await_that(tap: Tap, condition: Callable[[], bool]) -> None:
    """Poll until something holds."""
    give_up_s = time.monotonic() + 10.0 * PATIENCE
    while not condition():
        assert time.monotonic() < give_up_s
        assert tap.poll()
        time.sleep(0.01)


def stop(server: memcached.Memcached) -> None:
    """Stop memcached, and wait until no thread of it runs: a signal reaches one after another."""
    os.kill(server.pid, signal.SIGSTOP)
    give_up_s = time.monotonic() + 10.0 * PATIENCE
    threads = [int(path.name) for path in Path(f"/proc/{server.pid}/task").iterdir()]
    while {stat_fields(thread)[0] for thread in threads} != {"T"}:
        assert time.monotonic() < give_up_s


def followed(tap: Tap, since_s: float) -> int:
    """How many requests were followed since a moment."""
    return len(tap.between(since_s, math.inf))


def test_every_request_is_seen_and_split(tap: Tap, server: memcached.Memcached) -> None:
    start_s = just_counted(tap)
    ask(server, 500)
    await_that(tap, lambda: followed(tap, start_s) == 500)
    seen = tap.latencies(time.monotonic() - start_s)
    assert seen is not None and seen.count == 500 and not tap.stale
    assert 0.0 < seen.p50_us <= seen.p95_us <= seen.p99_us
    assert seen.wait_us is not None and seen.service_us is not None
    assert max(seen.wait_us, seen.service_us) <= seen.p99_us


def test_others_requests_are_not_followed(tap: Tap) -> None:
    start_s = time.monotonic()
    with memcached.running(threads=1) as other:
        load_records(other.host, other.port)
        ask(other, 200)
    asked_s = time.monotonic()
    await_that(tap, lambda: tap.known_until_s > asked_s)
    assert followed(tap, start_s) == 0


def test_members_of_a_group_are_told_apart(server: memcached.Memcached) -> None:
    with memcached.running(threads=1) as second:
        load_records(second.host, second.port)
        both = (server, second)
        tap = Tap([one.port for one in both], [one.pid for one in both], LIMIT_S, every=1)
        try:
            tap.keep_s = 600.0
            start_s = just_counted(tap)
            ask(server, 100)
            await_that(tap, lambda: followed(tap, start_s) == 100)
            seen = tap.latencies(time.monotonic() - start_s)
            assert seen is not None and seen.members == ((seen.wait_us, seen.service_us), None)
            ask(second, 50)
            await_that(tap, lambda: followed(tap, start_s) == 150)
            seen = tap.latencies(time.monotonic() - start_s)
            assert seen is not None and None not in seen.members
        finally:
            tap.stop()


def test_a_stalled_memcached_is_late_while_it_stalls(tap: Tap, server: memcached.Memcached) -> None:
    start_s = just_counted(tap)
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(get_request(7))
        assert connection.recv(4096).endswith(b"END\r\n")
        await_that(tap, lambda: followed(tap, start_s) == 1)
        tap.late_lately(LIMIT_S)
        try:
            stop(server)
            connection.sendall(get_request(7))
            await_that(tap, lambda: tap.late_lately(LIMIT_S) == (1, 1))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert connection.recv(4096).endswith(b"END\r\n")
    await_that(tap, lambda: followed(tap, start_s) == 2)
    seen = tap.latencies(time.monotonic() - start_s)
    # What stalled waited; memcached itself was as fast as ever.
    assert seen is not None and seen.p95_us > 1e6 * LIMIT_S
    assert seen.wait_us == pytest.approx(seen.p95_us, rel=0.1)
    assert seen.service_us is not None and seen.service_us < 1e6 * LIMIT_S


@pytest.mark.skipif(not shutil.which("memcaslap"), reason="no libmemcached-tools")
def test_the_tap_keeps_up_with_a_load_that_changes_all_the_time(
    tap: Tap, server: memcached.Memcached
) -> None:
    start_s = time.monotonic()
    command = ["memcaslap", "-s", f"{server.host}:{server.port}", "-T", "1", "-c", "32", "-t", "1s"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
        await_that(tap, lambda: load.poll() is not None)
    await_that(tap, lambda: tap.known_until_s > start_s + 1.0)
    assert followed(tap, start_s) > 5000


def test_what_takes_no_answer_is_not_followed(tap: Tap, server: memcached.Memcached) -> None:
    start_s = just_counted(tap)
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(b"set quiet 0 0 1 noreply\r\n1\r\n")
        with socket.create_connection((server.host, server.port)) as other:
            other.sendall(get_request(7))  # read after it, or at the same time
            assert other.recv(4096).endswith(b"END\r\n")
        time.sleep(2.0 * LIMIT_S)  # would be the time of the answer to what comes next
        connection.sendall(get_request(7))
        assert connection.recv(4096).endswith(b"END\r\n")
    asked_s = time.monotonic()
    await_that(tap, lambda: tap.known_until_s > asked_s)
    assert max(tap.between(start_s, math.inf)) < LIMIT_S


def test_a_tap_that_cannot_be_had_says_why_in_one_line(
    deploy: Callable[..., Deployment],
) -> None:
    run = deploy("--dry-run", "--tap", "--policy", "static", environment={"PATH": ""})
    assert run.finish() == 2
    what = "latency tap: bpftrace: not found; install it: apt-get install bpftrace"
    assert [line.removeprefix("coretide: ") for line in run.lines] == [what]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_tap_ends_with_the_loop_however_that_ends(
    end: signal.Signals, deploy: Callable[..., Deployment]
) -> None:
    run = deploy("--dry-run", "--tap", "--policy", "static")
    run.expect("start")
    found = subprocess.run(
        ["pgrep", "-P", str(run.process.pid), "bpftrace"], capture_output=True, check=True
    )
    run.process.send_signal(end)
    run.process.wait(30.0 * PATIENCE)
    give_up_s = time.monotonic() + 5.0 * PATIENCE
    while Path(f"/proc/{int(found.stdout)}").exists():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_a_deployment_observes_and_records_what_the_tap_shows(
    deploy: Callable[..., Deployment],
    server: memcached.Memcached,
    groups_file: Path,
    scenario_file: Callable[..., Path],
) -> None:
    job = ["stress-ng", "--cpu", "{threads}", "--timeout", "2"]
    scenario = scenario_file(dedup=job, radix=job)
    options = ("--policy", str(groups_file), "--scenario", str(scenario))
    run = deploy(*options, "--runtime", "process", "--tap")
    while run.process.poll() is None:
        ask(server, 100)
    assert run.finish() == 0
    rows = list(csv.DictReader((run.report / "samples.csv").open(encoding="utf-8")))
    shown = [row for row in rows if row["p95_us"]]
    assert shown  # the run takes two seconds, the first readings a part of one
    assert all(float(row["wait_us"]) > 0.0 and float(row["service_us"]) > 0.0 for row in shown)
    (interval, *_) = read_rows((run.report / "load.txt").read_text().splitlines())
    assert interval.p95_us > 0.0 and not interval.spoiled


def test_a_new_memcached_on_the_port_is_followed(tap: Tap, server: memcached.Memcached) -> None:
    memcached.stop(server)
    second = memcached.start(threads=1, port=server.port)
    try:
        load_records(second.host, second.port)
        start_s = just_counted(tap)
        ask(second, 20)
        await_that(tap, lambda: followed(tap, start_s) >= 20)
    finally:
        memcached.stop(second)
