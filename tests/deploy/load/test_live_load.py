"""Load generator and probe against a real memcached."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deploy.engines import memcached
from deploy.linux import realtime
from deploy.load import keys
from deploy.load.dynamic_load import Client, main
from deploy.load.generator import TICK_S, Connection, arrivals_of
from deploy.load.mix import Mix
from deploy.load.probe import LIMIT_S, Probe
from deploy.load.probe import main as probe_main
from deploy.records import mcperf
from deploy.records.latencies import IntervalLog
from deploy.records.lines import Disk, LineFile
from env.simulator.load import LoadTrace, dynamic_targets

pytestmark = pytest.mark.skipif(not shutil.which("memcached"), reason="no memcached")


@pytest.fixture
def server() -> Iterator[memcached.Memcached]:
    with memcached.running(threads=2) as server:
        yield server


def run(server: memcached.Memcached, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.load", "--memcached", f"127.0.0.1:{server.port}"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)


def wait_for(probe: Probe, until_s: float) -> None:
    """Take in records until all requests due before a moment are known."""
    while probe.known_until_s < until_s:
        assert time.monotonic() < until_s + 10.0
        assert probe.poll()
        time.sleep(0.01)


# --- the load ---------------------------------------------------------------------------------


def test_a_dynamic_run_serves_mcperfs_targets(server: memcached.Memcached) -> None:
    load = ("--qps-min", "5000", "--qps-max", "15000", "--interval", "0.5", "--duration", "2")
    result = run(server, "--trace-seed", "2333", *load)
    assert result.returncode == 0, result.stderr
    targets = dynamic_targets(2333, 5000, 15000, 4).tolist()
    first, *rest = result.stdout.splitlines()
    assert first == f"Total number of intervals = 4 ({', '.join(map(str, targets))})"
    assert rest[0].startswith("Timestamp start: ") and rest[-2].startswith("Timestamp end: ")
    assert rest[1].startswith("#type avg std min p5 p10 p50 p67 p75 p80 p85 p90 p95 p99 p999 p9999")
    rows = mcperf.read_rows(rest)
    assert [row.target_qps for row in rows] == targets
    # What a busy machine cannot serve in one interval is served in the next.
    assert sum(row.qps for row in rows) == pytest.approx(sum(targets), rel=0.2)
    for row in rows:
        assert 0.0 < row.p95_us <= 1e6 * LIMIT_S
        assert row.end_s - row.start_s == pytest.approx(0.5, abs=0.002)


def test_a_scan_rises_step_by_step(server: memcached.Memcached) -> None:
    result = run(server, "--scan", "5000:15000:5000", "--interval", "0.3")
    assert result.returncode == 0, result.stderr
    rows = mcperf.read_rows(result.stdout.splitlines())
    assert [row.target_qps for row in rows] == [5000, 10000, 15000]
    assert "client: generator" in result.stderr


def test_the_load_outlives_a_restart_of_memcached() -> None:
    first = memcached.start(threads=1)
    keys.load_records(first.host, first.port)
    trace = LoadTrace.explicit([6000] * 4, 0.5)
    client = Client(first.host, first.port, trace, realtime.last_cpu())
    try:
        rows = [client.row(0)]
        memcached.stop(first)
        rows.append(client.row(1))
        second = memcached.start(threads=1, port=first.port)
        try:
            rows += [client.row(2), client.row(3)]
        finally:
            memcached.stop(second)
    finally:
        client.stop()
    _, gone, _, after = mcperf.read_rows([mcperf.HEADER, *rows])
    assert gone.p95_us == 1e6 * LIMIT_S
    assert gone.qps < 3000
    assert after.qps > 3000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--trace-seed", "0"), "--trace-seed"),
        (("--trace-seed", "1", "--qps-min", "9", "--qps-max", "5"), "qps_max"),
        (("--scan", "5:1"), "--scan wants A:B:STEP: three whole numbers, not '5:1'"),
        (("--scan", "1:x:1"), "--scan wants A:B:STEP: three whole numbers, not '1:x:1'"),
        (("--scan", "1:5:1", "--cpu", "4096"), "--cpu: vCPU 4096"),
        (("--scan", "1:5:1", "--memcached", "nobody"), "HOST:PORT"),
        ((), "--trace-seed --scan"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--memcached", "127.0.0.1:1", *options])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1


def test_nobody_at_the_address_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SystemExit) as stop:
        main(["--memcached", f"127.0.0.1:{port}", "--scan", "1:5:1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"coretide: 127.0.0.1:{port}: memcached cannot be")


def test_the_probe_says_that_nobody_is_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        probe_main(["--memcached", "127.0.0.1:1"])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and "127.0.0.1:1: memcached cannot be reached" in said.err
    assert "[Errno" not in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("more", [(), ("--raw",)])
@pytest.mark.parametrize("cpu", ["4096", "x"])
def test_the_probe_names_a_vcpu_that_does_not_exist(
    cpu: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        probe_main(["--memcached", "127.0.0.1:1", "--cpu", cpu, *more])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "--cpu" in said and cpu in said and len(said.splitlines()) == 1


def test_arrivals_are_poisson() -> None:
    counts = np.array(arrivals_of(np.random.default_rng(1), 40_000.0))
    assert counts.mean() == pytest.approx(40_000 * TICK_S, rel=0.05)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_answers_may_be_cut_anywhere() -> None:
    answer = b"VALUE %s 0 200\r\n%s\r\nEND\r\n" % (b"0" * 30, b"0" * 200)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(*listener.getsockname())
        accepted, _ = listener.accept()
        connection.send(memoryview(keys.get_request(1) * 9), 9)
        heard = 0

        def receive() -> int:
            total = 0
            for _ in range(100):
                total += sum(connection.receive())
                time.sleep(0.0001)
            return total

        # Hits and misses; cut in the middle of a value, of "END", and between two answers.
        stream = answer * 4 + b"END\r\n" * 2 + answer * 3
        cuts = [0, 100, len(answer) - 3, len(answer), 3 * len(answer) - 1, len(stream)]
        for start, end in itertools.pairwise(cuts):
            accepted.sendall(stream[start:end])
            heard += receive()
        assert (heard, connection.outstanding) == (9, 0)
        connection.close()
        accepted.close()


# --- the probe --------------------------------------------------------------------------------


@pytest.fixture
def probe(server: memcached.Memcached) -> Iterator[Probe]:
    probe = Probe(server.host, server.port, realtime.last_cpu(), keep_s=60.0)
    try:
        wait_for(probe, time.monotonic())
        yield probe
    finally:
        probe.stop()


def test_the_probe_asks_a_thousand_times_a_second(probe: Probe) -> None:
    start_s = time.monotonic()
    wait_for(probe, start_s + 1.0)
    latencies = probe.between(start_s, start_s + 1.0)
    assert 850 < len(latencies) < 1150
    assert min(latencies) > 0.0
    seen = probe.latencies(1.0)
    assert seen is not None and seen.p50_us <= seen.p95_us <= seen.p99_us


def test_intervals_are_written_where_the_load_does_not_tell(probe: Probe, tmp_path: Path) -> None:
    log = IntervalLog(probe, LineFile.at(tmp_path / "load.txt", Disk("here")), 0.3)
    start_s, epoch_s = time.monotonic(), time.time()
    while (now_s := time.monotonic()) < start_s + 1.0:
        assert probe.poll()
        log.poll(now_s, requests=1e6 + 5000.0 * (now_s - start_s))
        time.sleep(0.01)
    rows = mcperf.read_rows((tmp_path / "load.txt").read_text().splitlines())
    assert 2 <= len(rows) <= 3
    assert rows[0].start_s == pytest.approx(epoch_s, abs=0.1)
    assert rows[1].start_s == rows[0].end_s
    assert [row.qps for row in rows] == pytest.approx([5000.0] * len(rows), rel=0.01)
    assert 0.0 < rows[0].p95_us <= 1e6 * LIMIT_S


def test_a_stall_is_seen_at_its_full_length(probe: Probe, server: memcached.Memcached) -> None:
    start_s = time.monotonic()
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(0.15)
    os.kill(server.pid, signal.SIGCONT)
    stall_s = time.monotonic() - start_s
    wait_for(probe, start_s + stall_s)
    latencies = probe.between(start_s, start_s + stall_s)
    # Requests due evenly over the stall wait from its full length down to nothing.
    assert len(latencies) > 100
    assert max(latencies) == pytest.approx(stall_s, abs=0.05)
    assert 0.3 * stall_s < float(np.mean(latencies)) < 0.8 * stall_s


def test_a_probe_that_was_late_itself_says_so_and_a_slow_memcached_is_not_blamed_on_it(
    probe: Probe, server: memcached.Memcached
) -> None:
    shares = []
    for stopped in (server.pid, probe.process.pid):
        start_s = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(stopped, signal.SIGCONT)
        wait_for(probe, start_s + 0.5)
        shares.append(probe.own_late(start_s, start_s + 0.5))
        assert max(probe.between(start_s, start_s + 0.3)) > 0.2
    assert shares[0] < 0.5 * shares[1]  # others use this machine, too
    assert 0.5 < shares[1] < 0.8


def test_who_is_silent_is_late_at_once_but_a_probe_that_does_not_run_blames_nobody(
    probe: Probe, server: memcached.Memcached
) -> None:
    late = []
    for stopped in (server.pid, probe.process.pid):
        wait_for(probe, time.monotonic())
        probe.late_lately(0.02)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(0.2)
        assert probe.poll()
        late.append(probe.late_lately(0.02)[1])
        os.kill(stopped, signal.SIGCONT)
    assert 100 < late[0] < 250
    assert late[1] < 50  # others use this machine, too


@contextlib.contextmanager
def half_of_the_connections(behind: memcached.Memcached, late_s: float) -> Iterator[int]:
    """
    A port whose every other connection passes answers on late, as if its worker had no vCPU.

    :param behind: who answers
    :param late_s: by how much [s]
    """

    def serve(caller: socket.socket, pause_s: float) -> None:
        answerer = socket.create_connection((behind.host, behind.port))
        with caller, answerer:
            threading.Thread(target=_pass_on, args=(caller, answerer, 0.0), daemon=True).start()
            _pass_on(answerer, caller, pause_s)

    def accept() -> None:
        for number in itertools.count():
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            pause_s = late_s * (number % 2)
            threading.Thread(target=serve, args=(caller, pause_s), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _pass_on(source: socket.socket, sink: socket.socket, pause_s: float) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            time.sleep(pause_s)
            sink.sendall(part)


def test_a_slow_worker_is_seen_whichever_connection_it_serves(server: memcached.Memcached) -> None:
    """memcached deals connections to its workers in turn; here one of two is slow."""
    with half_of_the_connections(server, 0.1) as port:
        probe = Probe("127.0.0.1", port, realtime.last_cpu(), keep_s=60.0)
        try:
            start_s = time.monotonic() + 0.5
            wait_for(probe, start_s)
            probe.late_lately(0.05)
            wait_for(probe, start_s + 1.0)
            count, late = probe.late_lately(0.05)
            seen = probe.between(start_s, start_s + 1.0)
        finally:
            probe.stop()
    assert 0.4 < sum(one > 0.05 for one in seen) / len(seen) < 0.6
    assert np.quantile(seen, 0.4) < 0.05 < np.quantile(seen, 0.6)
    assert 0.4 < late / count < 0.6


def test_a_late_answer_is_counted_once_before_it_comes(
    probe: Probe, server: memcached.Memcached
) -> None:
    wait_for(probe, time.monotonic())
    probe.late_lately(0.02)
    start_s = probe.known_until_s
    os.kill(server.pid, signal.SIGSTOP)
    try:
        time.sleep(0.15)
        probe.poll()
        count, late = probe.late_lately(0.02)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert late > 100
    wait_for(probe, start_s + 0.5)
    end_s = probe.known_until_s
    more, more_late = probe.late_lately(0.02)
    due = probe.between(start_s, end_s)
    assert late + more_late == pytest.approx(sum(one > 0.02 for one in due), abs=20)
    assert count + more == pytest.approx(len(due), abs=20)


def test_records_keep_coming_while_nobody_accepts_connections() -> None:
    """Each attempt to connect takes its time then, and no answer ever comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with contextlib.ExitStack() as stack:
            for _ in range(4):  # what the kernel takes although nobody accepts
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
            probe = Probe(*address, realtime.last_cpu(), keep_s=60.0)
            try:
                wait_for(probe, time.monotonic())  # a slow machine takes half a second to start it
                wait_for(probe, probe.known_until_s + 1.0)
                start_s = probe.known_until_s - 1.0
                seen = probe.between(start_s, start_s + 0.9)
                assert set(seen) == {LIMIT_S} and len(seen) > 500
                assert not probe.stale
            finally:
                probe.stop()


def test_what_is_never_answered_counts_as_late(probe: Probe, server: memcached.Memcached) -> None:
    start_s = time.monotonic()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_for(probe, start_s + 0.3)
        assert set(probe.between(start_s + 0.01, start_s + 0.3)) == {LIMIT_S}
    finally:
        os.kill(server.pid, signal.SIGCONT)
    # The answers that come after all are not counted a second time.
    again_s = time.monotonic() + 0.3
    wait_for(probe, again_s + 0.2)
    later = probe.between(again_s, again_s + 0.2)
    assert 100 < len(later) < 300
    assert np.median(later) < 0.5 * LIMIT_S


def test_a_set_that_was_cut_off_stores_nothing_and_spoils_no_other(
    server: memcached.Memcached,
) -> None:
    """While memcached stands still, more is due than the socket takes."""
    size, count = 60_000, 5
    mix = Mix(update=1.0, smallest=size, largest=size, keys=count)
    probe = Probe(server.host, server.port, realtime.last_cpu(), keep_s=60.0, mix=mix)
    try:
        wait_for(probe, time.monotonic())
        os.kill(server.pid, signal.SIGSTOP)
        wait_for(probe, time.monotonic() + 0.5)
        os.kill(server.pid, signal.SIGCONT)
        again_s = time.monotonic() + 0.5
        wait_for(probe, again_s + 0.2)
        assert np.median(probe.between(again_s, again_s + 0.2)) < 0.5 * LIMIT_S
    finally:
        os.kill(server.pid, signal.SIGCONT)
        probe.stop()
    with socket.create_connection((server.host, server.port), 10.0) as connection:
        answers = connection.makefile("rb")
        for key in range(count):
            connection.sendall(b"get %0*d\r\n" % (keys.KEY_BYTES, key))
            assert answers.readline().split()[-1] == b"%d" % size
            assert answers.read(size + 2) == b"0" * size + b"\r\n"
            assert answers.readline() == b"END\r\n"


def test_a_killed_parent_takes_its_probe_and_load_along(server: memcached.Memcached) -> None:
    program = (
        "import sys; from deploy.load.dynamic_load import Client\n"
        "from env.simulator.load import LoadTrace\n"
        "from deploy.linux import realtime\n"
        "c = Client('127.0.0.1', int(sys.argv[1]), LoadTrace.explicit([9000], 60.0),"
        " realtime.last_cpu())\n"
        "print(c.probe.process.pid, c.generator.pid, flush=True); c.row(0)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(server.port)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    children = [int(word) for word in parent.stdout.readline().split()]
    files = [os.pidfd_open(child) for child in children]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for file in files:
        assert select.select([file], [], [], 30.0)[0]
        os.close(file)


# --- mcperf's output --------------------------------------------------------------------------


def test_mcperfs_own_output_is_read() -> None:
    output = """\
Total number of intervals = 2 (8195, 158594)
Timestamp start: 1745000000000
Timestamp end: 1745000020000
#type  avg  std  min  p5  p10  p50  p67  p75  p80  p85  p90  p95  p99  p999  p9999  QPS  target
read 250.1 70.2 100.0 180 190 240 260 270 280 290 300 320.5 420 900 1200 8190.4 8195
read 350.1 70.2 100.0 180 190 240 260 270 280 290 300 512.5 420 900 1200 158000.1 158594
Total QPS = 83000.0 (1660000 / 20.0s)
read 1 2
"""
    rows = mcperf.read_rows(output.splitlines())
    assert [(row.p95_us, row.qps, row.target_qps) for row in rows] == [
        (320.5, 8190.4, 8195.0),
        (512.5, 158000.1, 158594.0),
    ]
    assert [(row.start_s, row.end_s) for row in rows] == [
        (1745000000.0, 1745000010.0),
        (1745000010.0, 1745000020.0),
    ]
    without = [line for line in output.splitlines() if "Timestamp" not in line]
    assert math.isnan(mcperf.read_rows(without)[0].start_s)


def test_a_row_holds_the_percentiles() -> None:
    row = mcperf.format_row([float(i) for i in range(1, 1001)], 9e3, 9000, 1.5, 2.5, 0.02)
    words = dict(zip(mcperf.HEADER.split()[1:], row.split()[1:], strict=True))
    assert (words["p50"], words["p95"], words["p999"]) == ("500.0", "950.0", "999.0")
    assert (words["avg"], words["min"]) == ("500.5", "1.0")
    assert (words["ts_start"], words["ts_end"], words["client_late"]) == ("1500", "2500", "0.0200")
