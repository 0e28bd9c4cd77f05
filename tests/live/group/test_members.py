"""A deployment whose service is a group: its processes are sensed, moved and restored together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from deploy.assembly import find_service, group_maker, usable_hierarchy
from deploy.engines import memcached
from deploy.engines.memcached import Memcached
from deploy.group.group import GroupSetup, running
from deploy.linux.cgroups import job_groups_beside
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.sensors import ServiceSensor
from deploy.linux.service_process import identify
from deploy.records.recorder import read_samples
from deploy.records.run_report import read_report
from deploy.records.state import State
from deploy.requirements import FAULT, OK, addresses, descriptors
from deploy.settings import Settings
from env.errors import InputError
from env.scenario import load_scenario
from tests.deploy.group.needs import needs_nutcracker, needs_proxy
from tests.live.conftest import PATIENCE, Deployment, needs_groups
from tests.live.group.conftest import EVERYWHERE, LONG, await_on, others


@pytest.fixture
def second(server: Memcached) -> Iterator[Memcached]:
    """A memcached beside the first one, for clients that know both."""
    with memcached.running(threads=1) as started:
        yield started


def store(server: Memcached, keys: int) -> bool:
    """So many items; False for who goes on until something else holds."""
    with socket.create_connection((server.host, server.port)) as connection:
        file = connection.makefile("rwb")
        for key in range(keys):
            file.write(b"set key-%d 0 0 1\r\nx\r\n" % key)
            file.flush()
            assert file.readline() == b"STORED\r\n"
    return False


def await_counted(run: Deployment, requests: int) -> None:
    """Wait until a deployment has recorded that so many were asked."""
    give_up_s = time.monotonic() + 30.0 * PATIENCE
    while not any(one.requests >= requests for one in read_samples(run.report)):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def count(sensor: GroupSensor) -> int:
    """The requests counted so far; -1 before there is a count."""
    return -1 if sensor.requests is None else sensor.requests.count


def polled(sensor: GroupSensor, until: Callable[[], bool]) -> None:
    """Ask and receive until something holds."""
    give_up_s = time.monotonic() + 10.0 * PATIENCE
    while not until():
        assert time.monotonic() < give_up_s
        sensor.ask(time.monotonic())
        time.sleep(0.002)
        sensor.receive(time.monotonic())


def test_what_members_do_adds_up_and_a_death_costs_the_others_nothing(
    server: Memcached, second: Memcached
) -> None:
    sensor = GroupSensor([ServiceSensor(one.host, one.port) for one in (server, second)])
    polled(sensor, lambda: count(sensor) == 0 and sensor.cpu is not None)
    assert sensor.who == (identify(server.pid), identify(second.pid))
    store(server, 20)
    store(second, 10)
    polled(sensor, lambda: count(sensor) >= 30)
    assert count(sensor) == 30 and not sensor.news
    assert sensor.cpu is not None
    before = sensor.cpu.cpu_s

    second.process.kill()
    second.process.wait()
    polled(sensor, lambda: bool(sensor.news))
    (said,) = sensor.news
    ended = f"member 2: process {second.pid} has ended; it last told of 10 items, 0.0 MiB"
    assert said == f"{ended}; other replicas: 0"
    sensor.news.clear()
    store(server, 1)
    polled(sensor, lambda: count(sensor) == 31)
    assert sensor.age_s(time.monotonic()) < 0.5 * PATIENCE, "the other one's readings go on"
    assert sensor.cpu.cpu_s >= before

    again = memcached.start(threads=1, port=second.port)
    try:
        polled(sensor, lambda: sensor.who == (identify(server.pid), identify(again.pid)))
        polled(sensor, lambda: store(again, 1) or count(sensor) > 31)
        assert not sensor.news
    finally:
        memcached.stop(again)
        sensor.close()


def test_members_are_moved_followed_and_restored_together(
    deploy: Callable[..., Deployment],
    server: Memcached,
    second: Memcached,
    group_file: Callable[..., Path],
    groups_file: Path,
) -> None:
    scenario = group_file({"dedup": LONG, "radix": LONG})
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options, *others([second]))
    await_on([server, second], (0,))

    second.process.kill()
    second.process.wait()
    run.expect(f"memcached member 2: process {second.pid} has ended; it last told of 0 items")
    again = memcached.start(threads=1, port=second.port)
    try:
        run.expect(rf"memcached member 2: process {again.pid}$")
        await_on([server, again], (0,))

        run.kill()  # the guardian makes both safe
        await_on([server, again], EVERYWHERE)
        resumed = deploy(*options, *others([again]), "--resume")
        await_on([server, again], (0,))
        resumed.kill()
        undo = deploy("--restore")
        assert undo.finish() == 0, undo.lines
        undo.expect("the machine is as it was found")
        await_on([server, again], EVERYWHERE)
    finally:
        memcached.stop(again)


def test_a_group_of_which_a_member_is_gone_is_not_reported_as_restored(
    deploy: Callable[..., Deployment],
    server: Memcached,
    second: Memcached,
    group_file: Callable[..., Path],
    groups_file: Path,
) -> None:
    scenario = group_file({"dedup": ["sleep", "1"], "radix": ["sleep", "1"]})
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    run = deploy(*options, *others([second]))
    run.expect(r"radix start \[")
    second.process.kill()
    second.process.wait()
    run.finish()
    run.expect(f"memcached {second.pid} is gone; all else is as it was found")
    assert run.count("the fallback decides") == 0, "the other one is still sensed"
    assert read_report(run.report)["restored"] is False
    await_on([server], EVERYWHERE)


def test_a_check_looks_at_every_process(
    deploy: Callable[..., Deployment],
    server: Memcached,
    second: Memcached,
    group_file: Callable[..., Path],
) -> None:
    options = ("--scenario", str(group_file({})), "--policy", "static", "--runtime", "process")
    run = deploy(*options, *others([second]), "--check")
    run.finish()
    run.expect(f"ok  memcached at .*:{server.port}, .*:{second.port}: process {server.pid}, 2 ")
    run.expect("ok  memcached's vCPUs: can be set")
    await_on([server, second], EVERYWHERE)


@pytest.mark.parametrize(
    ("proxy", "how"),
    [
        ("memcached", "no proxy of memcached's answers there; make memcached-proxy builds one"),
        ("nutcracker", "no nutcracker of this machine answers there; apt-get install nutcracker"),
    ],
)
def test_where_there_is_no_proxy_one_line_says_how_to_get_one(
    proxy: str,
    how: str,
    deploy: Callable[..., Deployment],
    second: Memcached,
    group_file: Callable[..., Path],
) -> None:
    scenario = str(group_file({}, proxy=proxy))
    members = [*others([second]), "--member", f"127.0.0.1:{memcached.free_port()}"]
    options = ("--scenario", scenario, "--policy", "static", "--runtime", "process")
    run = deploy(*options, *members, "--dry-run")
    assert run.finish() == 2
    (said,) = run.lines
    assert how in said


def test_a_member_that_does_not_answer_is_named(server: Memcached) -> None:
    port = memcached.free_port()
    sensors = [ServiceSensor(server.host, server.port), ServiceSensor(server.host, port)]
    with contextlib.closing(GroupSensor(sensors)) as sensor:
        what = f"127.0.0.1:{port}: no memcached of this machine answers there, the .* member 2$"
        with pytest.raises(InputError, match=what):
            find_service(sensor, time.monotonic())


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        ((2,), "1 --member given; two has 2 members: its proxy's is --memcached, each other one's"),
        ((2, 1), "127.0.0.1:1 is given twice; each must be another's"),
    ],
)
def test_addresses_that_are_none_of_a_group_are_refused(
    ports: tuple[int, ...], said: str, group_file: Callable[..., Path], tmp_path: Path
) -> None:
    scenario = load_scenario(group_file({}, proxy="memcached"))
    settings = Settings("127.0.0.1", 1, "process", None, False, tmp_path, tmp_path)
    settings = replace(settings, members=tuple(("127.0.0.1", port) for port in ports))
    (finding,) = addresses(scenario, settings)
    assert finding.verdict == FAULT and finding.found.startswith(said)


@pytest.mark.parametrize(
    ("service", "allowed", "verdict"),
    [
        ({"members": 1}, 256, OK),
        ({"members": 2}, 271, FAULT),
        ({"members": 2, "proxy": "memcached"}, 288, OK),
    ],
)
def test_a_group_takes_more_descriptors(
    service: dict[str, Any],
    allowed: int,
    verdict: str,
    group_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (allowed, allowed))
    (finding,) = descriptors(load_scenario(group_file({}, **service)))
    assert finding.verdict == verdict


@needs_groups
def test_a_group_in_two_places_is_refused(server: Memcached, tmp_path: Path) -> None:
    hierarchy = usable_hierarchy()
    assert hierarchy is not None
    below = job_groups_beside(hierarchy, server.pid)(f"coretide-place-{os.getpid()}")
    below.create()
    try:
        apart = replace(below, path=below.path / "below")
        apart.create()
        with subprocess.Popen(["sleep", "100"]) as other:
            apart.join(other.pid)
            state = State("0" * 12, "two", "process", "", 0.0)
            try:
                with pytest.raises(InputError, match="it must be one place"):
                    group_maker(state, hierarchy, [server.pid, other.pid])
            finally:
                other.kill()
                other.wait()
        apart.remove()
    finally:
        below.remove()


@pytest.mark.parametrize(
    ("proxy", "replicas"),
    [
        pytest.param("memcached", 2, marks=needs_proxy),
        pytest.param("nutcracker", 1, marks=needs_nutcracker),
    ],
)
def test_a_proxy_and_its_members_are_one_service(
    proxy: Literal["memcached", "nutcracker"],
    replicas: int,
    tmp_path: Path,
    group_file: Callable[..., Path],
    groups_file: Path,
) -> None:
    scenario = group_file({"dedup": LONG, "radix": LONG}, proxy=proxy, replicas=replicas)
    options = ["--policy", str(groups_file), "--scenario", str(scenario), "--runtime", "process"]
    with running(GroupSetup(2, replicas, proxy=proxy)) as group:
        run = Deployment(tmp_path, group.proxy, *options, *others(group.members))
        try:
            await_on([group.proxy, *group.members], (0,))
            store(group.proxy, 100)
            await_counted(run, 100)
            dead = group.members[0]
            dead.process.kill()
            dead.process.wait()
            ended = f"member 1: process {dead.pid} has ended; it last told of "
            run.expect(rf"{ended}.*replicas: {replicas - 1}$")
            group.restart(1)
            run.expect(rf"memcached member 1: process {group.members[0].pid}$")
            await_on([group.proxy, *group.members], (0,))
            run.process.send_signal(signal.SIGTERM)
            run.finish()
            run.expect("the machine is as it was found")
        finally:
            run.close()
        await_on([group.proxy, *group.members], EVERYWHERE)
    last = read_samples(run.report)[-1]
    assert 100 <= last.requests < 200 + 40 * last.time_s, "not each replica's"


@needs_nutcracker
def test_a_nutcracker_that_restarts_is_followed() -> None:
    with running(GroupSetup(2, proxy="nutcracker")) as group:
        each = [ServiceSensor(one.host, one.port) for one in (group.proxy, *group.members)]
        with contextlib.closing(GroupSensor(each, "nutcracker")) as sensor:
            polled(sensor, lambda: count(sensor) == 0 and sensor.cpu is not None)
            store(group.proxy, 30)
            polled(sensor, lambda: count(sensor) == 30)
            lost = group.proxy
            lost.process.kill()
            lost.process.wait()
            polled(sensor, lambda: bool(sensor.news))
            said = sensor.news.popleft()
            assert said == f"proxy: process {lost.pid} has ended; its members hold what they held"
            group.restart(0)
            polled(sensor, lambda: sensor.who[:1] == (identify(group.proxy.pid),))
            store(group.proxy, 5)
            polled(sensor, lambda: count(sensor) == 35)
