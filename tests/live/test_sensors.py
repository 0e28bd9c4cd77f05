"""The sensors, against a real memcached, impostors and the kernel."""

import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from deploy.linux import service_process
from deploy.linux.sensors import ServiceSensor, StatsConnection, VcpuClock
from tests.live.conftest import PATIENCE

STATS = (
    b"STAT pid 1\r\nSTAT threads 2\r\n"
    b"STAT cmd_get %d\r\nSTAT cmd_set 0\r\nSTAT cmd_touch 0\r\nEND\r\n"
)


def polled(sensor, seconds, until=lambda: False):
    """Ask and receive for a while, a few times a period."""
    end_s = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < end_s and not until():
        sensor.ask(time.monotonic())
        time.sleep(0.004)
        sensor.receive(time.monotonic())


def test_the_sensor_counts_requests_and_cpu_time(server):
    sensor = ServiceSensor(server.host, server.port)
    polled(sensor, 2.0, lambda: sensor.requests is not None)
    with socket.create_connection((server.host, server.port)) as client:
        for _ in range(300):
            client.sendall(b"get nothing\r\n")
            client.recv(100)
    polled(sensor, 2.0, lambda: sensor.requests.count >= 300)
    assert sensor.who == service_process.identify(server.pid)
    assert sensor.requests.count == 300
    assert 0.0 < sensor.cpu.cpu_s < 1.0 * PATIENCE
    assert sensor.age_s(time.monotonic()) < 0.5
    sensor.close()


class Impostor:
    """Listens like memcached and answers as it is told."""

    def __init__(self, *answers):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._answers = list(answers)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                while connection.recv(100):
                    connection.sendall(self._answers.pop(0) if self._answers else b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff garbage",
        b"STAT pid none\r\nSTAT threads 2\r\nSTAT cmd_get x\r\nEND\r\n",
        b"END\r\n",
        STATS % 5,
        b"x" * 100_000,
    ],
)
def test_an_answer_that_makes_no_sense_or_never_comes_is_no_reading(answer):
    """A pid that is no memcached of this port is not believed either."""
    impostor = Impostor(*[answer] * 100)
    sensor = ServiceSensor("127.0.0.1", impostor.port)
    polled(sensor, 0.3)
    assert sensor.who is None
    assert sensor.age_s(time.monotonic()) == float("inf")
    sensor.close()
    impostor.listener.close()


def test_whoever_listens_there_under_a_name_that_is_no_text_is_no_memcached():
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            name.write_bytes(b"\xff")
            assert not service_process.is_memcached(os.getpid(), listener.getsockname()[1])
        finally:
            name.write_bytes(before.strip())


def test_a_counter_that_goes_back_gives_no_rate():
    impostor = Impostor(*[STATS % count for count in (1000, 1500, 20, 70)])
    sensor = ServiceSensor("127.0.0.1", impostor.port)
    counts, rates = [], []
    for _ in range(300):
        sensor.stats.ask(time.monotonic())
        time.sleep(0.004)
        reading = sensor.stats.receive()
        if reading is not None:
            sensor._count(reading)
            counts.append(sensor.requests.count)
            rates.append(sensor.qps)
        if len(counts) == 4:
            break
    assert counts == [0, 500, 500, 550]
    assert min(rates) >= 0.0
    sensor.close()
    impostor.listener.close()


def test_a_clock_that_goes_back_or_leaps_is_counted_on_from_the_last_good_reading(
    server, monkeypatch
):
    sensor = ServiceSensor(server.host, server.port)
    polled(sensor, 2.0, lambda: sensor.cpu is not None)
    read, shown, now_s = os.pread, [], time.monotonic()
    for lie in (b"7 7 7", b"%d 7 7" % 10**30, None):
        if lie is None:
            monkeypatch.setattr(os, "pread", read)
        else:
            monkeypatch.setattr(os, "pread", lambda *_, lie=lie: lie)
        for _ in range(3):
            now_s += 0.025  # in windows of microseconds a thread's clock may leap by itself
            sensor.ask(now_s)
            shown.append(sensor.cpu.cpu_s)
    assert shown == sorted(shown)
    assert shown[-1] - shown[0] < 0.5
    assert 0.0 <= sensor.cpu_cores < 2.0
    sensor.close()


def test_reading_waits_no_longer_than_it_is_told(server):
    """memcached that is stopped answers nothing, and what it answers later is not lost."""
    connection = StatsConnection(server.host, server.port)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        worst = 0.0
        for _ in range(50):
            before = time.perf_counter()
            connection.ask(time.monotonic())
            assert connection.receive(0.002) is None
            worst = max(worst, time.perf_counter() - before)
        assert worst < 0.1 * PATIENCE
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert connection.receive(2.0 * PATIENCE) is not None
    connection.close()


def test_a_sensor_works_with_more_files_open_than_select_can_name(server):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    connection = StatsConnection(server.host, server.port)
    try:
        connection.ask(time.monotonic())
        connection.ask(time.monotonic())
        assert connection.receive(2.0 * PATIENCE) is not None
    finally:
        connection.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_busy_time_of_the_vcpus_grows_with_work():
    clock = VcpuClock(1, None)
    before = sum(clock.read())
    end_s = time.monotonic() + 0.2
    while time.monotonic() < end_s:
        pass
    assert sum(clock.read()) >= before
    clock.close()


def test_busy_time_is_read_to_the_last_vcpu_if_the_kernel_gives_a_line_at_a_time(monkeypatch):
    clock, read = VcpuClock(2, None), os.pread

    def line(file, size, offset):
        whole = read(file, 64 << 10, 0)
        return whole[offset : whole.find(b"\n", offset) + 1 or None][:size]

    monkeypatch.setattr(os, "pread", line)
    assert sum(clock.read()) > 0.0
    assert clock.bad_since_s == float("inf")
    clock.close()


@pytest.mark.parametrize("lie", [b"", b"cpu0 1", b"cpu0 " + b"9" * 400, b"cpu0 " + b"0 " * 9])
def test_busy_time_that_makes_no_sense_is_no_reading(monkeypatch, lie):
    clock = VcpuClock(1, None)
    before, read = clock.read(), os.pread
    monkeypatch.setattr(os, "pread", lambda *_: lie)
    assert clock.read() == before
    bad_since_s = clock.bad_since_s
    assert clock.read() == before
    assert clock.bad_since_s == bad_since_s < time.monotonic()
    monkeypatch.setattr(os, "pread", read)
    assert sum(clock.read()) >= sum(before)
    assert clock.bad_since_s == float("inf")
    clock.close()
