"""The sensors, against a real memcached, impostors and the kernel."""

import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploy.assembly import find_service
from deploy.engines import memcached
from deploy.linux import service_process
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.sensors import RESTING_EVERY_S, ServiceSensor, ThreadClock, VcpuClock
from deploy.linux.stats_connection import StatsConnection
from env.errors import InputError
from tests.live.conftest import PATIENCE

STATS = (
    b"STAT pid 1\r\nSTAT threads 2\r\n"
    b"STAT cmd_get %d\r\nSTAT cmd_set 0\r\nSTAT cmd_touch 0\r\nEND\r\n"
)


def files_open():
    """How many file descriptors this process has, and one to count them with."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


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


def test_a_start_without_file_descriptors_says_so_and_blames_no_memcached(server):
    sensor = ServiceSensor(server.host, server.port)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(InputError, match="it cannot be asked: Too many open files"):
            find_service(GroupSensor([sensor]), time.monotonic())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
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
            assert not service_process.serves(os.getpid(), listener.getsockname()[1])
        finally:
            name.write_bytes(before.strip())


STRANGER = """
import os, socket, sys, threading
open("/proc/self/comm", "w").write("memcached")
for _ in range(300):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
connection, _ = listener.accept()
while connection.recv(100):
    zeros = b"".join(b"STAT cmd_%s 0\\r\\n" % name for name in (b"get", b"set", b"touch"))
    connection.sendall(b"STAT pid %d\\r\\nSTAT threads 2\\r\\n%sEND\\r\\n" % (os.getpid(), zeros))
sys.stdin.read()
"""


def test_who_takes_the_port_of_a_memcached_that_restarts_is_not_followed(server):
    """It has memcached's name and many threads; the real one is found once it is back."""
    sensor, again = ServiceSensor(server.host, server.port), None
    polled(sensor, 2.0, lambda: sensor.requests is not None)
    known, counted, open_files = sensor.who, sensor.requests.count, files_open()
    memcached.stop(server)
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(server.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert stranger.stdout.readline() == b"ready\n"
        polled(sensor, 5.0, lambda: sensor.news)
        polled(sensor, 0.1)
        assert sensor.who == known
        assert sensor.requests.count == counted
        (said,) = sensor.news
        assert said.startswith("not followed: ")
        assert "python" in said and f"user {os.geteuid()}" in said
        assert files_open() <= open_files
        stranger.kill()
        stranger.wait()
        again = memcached.start(2, server.port)
        polled(sensor, 5.0, lambda: sensor.who != known and sensor.age_s(time.monotonic()) < 0.5)
        assert sensor.who == service_process.identify(again.pid)
    finally:
        stranger.kill()
        stranger.communicate()
        if again is not None:
            memcached.stop(again)
        sensor.close()


def test_a_stranger_that_names_the_successor_is_not_believed(server):
    """It had the port for a moment, and kept our connection."""
    sensor, again = ServiceSensor(server.host, server.port), None
    polled(sensor, 2.0, lambda: sensor.requests is not None)
    memcached.stop(server)
    listener = socket.create_server((server.host, server.port))
    polled(sensor, 1.0, lambda: sensor.stats._socket is not None and sensor.stats._asked_s)
    kept, _ = listener.accept()
    listener.close()
    try:
        again = memcached.start(2, server.port)
        known = STATS.replace(b"pid 1\r", b"pid %d\r" % again.pid)
        kept.sendall(known % 1000)
        polled(sensor, 5.0, lambda: sensor.age_s(time.monotonic()) < 0.1)
        assert sensor.who == service_process.identify(again.pid)
        assert kept.recv(1000).startswith(b"stats")
        assert kept.recv(1000) == b""
        assert sensor.requests.count < 1000
    finally:
        kept.close()
        if again is not None:
            memcached.stop(again)
        sensor.close()


def test_a_successor_must_have_the_user_of_the_one_before(server, monkeypatch):
    sensor = ServiceSensor(server.host, server.port)
    polled(sensor, 2.0, lambda: sensor.requests is not None)
    users = sensor._program.users
    sensor._program = service_process.Program((12345,) * 4, sensor._program.path)
    sensor.clock.close()
    sensor.clock = None  # as if it had restarted
    polled(sensor, 5.0, lambda: sensor.news)
    assert sensor.clock is None
    assert sensor.news.popleft().endswith(f"memcached of user {users[1]} answers in its place")
    sensor.close()


@pytest.fixture
def no_file_left():
    """Takes every file descriptor there is, and gives them back."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []

    def take():
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_open(), limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    yield take
    for file in taken:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_memcached_is_not_taken_for_dead_for_want_of_a_file(server, no_file_left):
    sensor = ServiceSensor(server.host, server.port)
    polled(sensor, 2.0, lambda: sensor.requests is not None)
    no_file_left()
    polled(sensor, 1.3)  # its threads are listed once a second
    assert service_process.is_alive(sensor.who)
    assert sensor.age_s(time.monotonic()) < 0.5 * PATIENCE
    sensor.stats.close()
    no_file_left()
    polled(sensor, 0.5)
    assert time.monotonic() - sensor.cpu.time_s < 0.5 * PATIENCE
    assert list(sensor.news) == [
        "its new threads are not seen: Too many open files",
        "it cannot be asked: Too many open files",
    ]
    sensor.close()


def test_a_crowd_of_threads_is_followed_in_part_and_that_is_said():
    end = threading.Event()
    crowd = [threading.Thread(target=end.wait) for _ in range(service_process.MOST_THREADS + 1)]
    open_files = files_open()
    try:
        for thread in crowd:
            thread.start()
        clock = ThreadClock(service_process.identify(os.getpid()), 0.0)
        assert clock.threads == service_process.MOST_THREADS
        assert clock.complaint == f"only {service_process.MOST_THREADS} of its threads are followed"
        clock.close()
    finally:
        end.set()
        for thread in crowd:
            thread.join()
    assert files_open() == open_files


def test_a_thread_that_rested_is_seen_again_when_resting_ones_are_read():
    wake, done, end = threading.Event(), threading.Event(), threading.Event()

    def work():
        wake.wait()
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < 0.05:
            pass
        done.set()
        end.wait()

    rested = threading.Thread(target=work)
    rested.start()
    clock = ThreadClock(service_process.identify(os.getpid()), 0.0)
    try:
        for turn in range(5):  # by the last one it has come to rest
            before = clock.read(2.0 * turn * RESTING_EVERY_S)
        wake.set()
        assert done.wait(10.0)
        soon = clock.read(8.5 * RESTING_EVERY_S)
        later = clock.read(10.0 * RESTING_EVERY_S)
    finally:
        wake.set()
        end.set()
        rested.join()
        clock.close()
    assert later.cpu_s - before.cpu_s >= 0.05
    assert later.cpu_s - soon.cpu_s >= 0.05


def test_a_clock_that_cannot_open_all_it_wants_keeps_nothing_open(monkeypatch):
    end, open_, left = threading.Event(), os.open, [3]

    def few(path, flags):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(24, "Too many open files")
        return open_(path, flags)

    crowd = [threading.Thread(target=end.wait) for _ in range(5)]
    open_files = files_open()
    try:
        for thread in crowd:
            thread.start()
        monkeypatch.setattr(os, "open", few)
        with pytest.raises(OSError, match="Too many open files"):
            ThreadClock(service_process.identify(os.getpid()), 0.0)
    finally:
        monkeypatch.undo()
        end.set()
        for thread in crowd:
            thread.join()
    assert files_open() == open_files


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


def reset(client, gets):
    """Have memcached forget what it has counted, and count anew."""
    client.sendall(b"stats reset\r\n")
    assert client.recv(100) == b"RESET\r\n"
    for _ in range(gets):
        client.sendall(b"get nothing\r\n")
        client.recv(100)


def test_counters_that_a_client_has_reset_are_named_once(server):
    sensor = ServiceSensor(server.host, server.port)
    with socket.create_connection((server.host, server.port)) as client:
        reset(client, 100)
        polled(sensor, 2.0, lambda: sensor.requests is not None)
        reset(client, 50)
        polled(sensor, 2.0, lambda: sensor.news)
        polled(sensor, 0.2)
        assert sensor.age_s(time.monotonic()) < 0.5 * PATIENCE
    (said,) = sensor.news
    assert said.startswith("its counters fell from ") and said.endswith(": they were reset")
    sensor.close()


def test_counters_that_are_reset_all_the_time_are_not_believed(server):
    """They would make the load look small, which takes memcached's vCPUs away."""
    sensor = ServiceSensor(server.host, server.port)
    with socket.create_connection((server.host, server.port)) as client:
        reset(client, 100)
        polled(sensor, 2.0, lambda: sensor.requests is not None)

        gets = itertools.cycle((50, 10))

        def old():
            reset(client, next(gets))
            return sensor.age_s(time.monotonic()) > 0.5

        polled(sensor, 5.0, old)
    assert sensor.age_s(time.monotonic()) > 0.5
    assert len(sensor.news) == 2
    assert sensor.news[1] == "its counters are reset all the time: they are not believed"
    polled(sensor, 5.0, lambda: sensor.age_s(time.monotonic()) < 0.5)
    assert sensor.age_s(time.monotonic()) < 0.5
    sensor.close()


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
