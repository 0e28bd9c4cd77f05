"""A group of real memcacheds behind memcached's own proxy: where keys go, what a death costs."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.engines.proxy_build import find_proxy
from deploy.group import group as group_module
from deploy.group.group import Group, GroupSetup, running
from deploy.linux.readiness import await_readable
from env.errors import InputError
from tests.deploy.group.asker import Asker, lose_a_member
from tests.deploy.group.needs import needs_nutcracker, needs_proxy

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def group_of_three() -> Iterator[Group]:
    with running(GroupSetup(members=3, replicas=3)) as group:
        yield group


@needs_proxy
def test_a_lost_member_costs_failures_that_are_said_and_no_wrong_answer(
    group_of_three: Group,
) -> None:
    lose_a_member(group_of_three, 3000)


@needs_proxy
def test_keys_are_spread_and_held_by_as_many_members_as_asked() -> None:
    with running(GroupSetup(members=3, replicas=2)) as group:
        asker = Asker(group, keys=300)
        assert asker.ask(2000) == 0
        asker.close()
        members, proxy = group.read_members(), group.read_proxy()
    assert sum(member.sets for member in members) == 2 * proxy.sets
    assert sum(member.gets for member in members) == proxy.gets
    assert all(0.2 < member.gets / proxy.gets < 0.5 for member in members)
    assert proxy.gets_server_s > 0.0 and proxy.sets_server_s > 0.0 and proxy.cpu_s > 0.0


@needs_proxy
@pytest.mark.parametrize(("whole", "asked"), [(False, 3), (True, 1)])
def test_a_multi_get_is_sharded_or_sent_to_one_member(whole: bool, asked: int) -> None:
    keys = [b"key-%d" % key for key in range(30)]
    with running(GroupSetup(members=3, replicas=3, whole=whole)) as group:
        with socket.create_connection((group.proxy.host, group.proxy.port), 10) as connection:
            file = connection.makefile("rwb")
            for key in keys:
                file.write(b"set %b 0 0 1\r\nx\r\n" % key)
                file.flush()
                assert file.readline() == b"STORED\r\n"
            file.write(b"get %b\r\n" % b" ".join(keys))
            file.flush()
            answer = b"".join(iter(file.readline, b"END\r\n"))
        members = group.read_members()
    assert answer == b"".join(b"VALUE %b 0 1\r\nx\r\n" % key for key in keys)
    assert [member.sets for member in members] == [30, 30, 30]
    assert sum(member.gets > 0 for member in members) == asked
    assert sum(member.gets for member in members) == 30


@needs_nutcracker
def test_nutcracker_spreads_keys_and_says_what_a_lost_member_costs() -> None:
    with running(GroupSetup(members=3, proxy="nutcracker")) as group:
        asker = Asker(group, keys=300)
        assert asker.ask(2000) == 0 and asker.hits > 0
        gets = [member.gets for member in group.read_members()]
        assert sum(gets) > 0 and all(0.2 < each / sum(gets) < 0.5 for each in gets)
        group.members[1].process.kill()
        group.members[1].process.wait()
        failed = asker.ask(2000)
        assert 0.2 < failed / 2000 < 0.5, "its keys are nobody else's"
        asker.close()
        assert group.read_proxy().cpu_s > 0.0


@needs_proxy
def test_a_member_that_does_not_answer_is_named(group_of_three: Group) -> None:
    group_of_three.members[2].process.kill()
    group_of_three.members[2].process.wait()
    with pytest.raises(InputError, match=r"member 3: 127\.0\.0\.1:\d+ does not answer"):
        group_of_three.read_members()


@needs_proxy
def test_a_port_that_is_taken_is_said_and_nothing_is_left(group_of_three: Group) -> None:
    proxy = group_of_three.proxy
    with socket.create_server((proxy.host, 0)) as free:
        ports = (free.getsockname()[1], proxy.port)
    with pytest.raises(InputError, match=str(proxy.port)), running(GroupSetup(1, ports=ports)):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((proxy.host, ports[0]), 1.0)


@needs_proxy
@pytest.mark.skipif(os.geteuid() != 0, reason="there is no right to give up")
def test_a_group_has_no_right_that_nobody_has(group_of_three: Group) -> None:
    nobody = pwd.getpwnam("nobody")
    for each in (*group_of_three.members, group_of_three.proxy):
        status = Path(f"/proc/{each.pid}/status").read_text()
        fields = {line.split(":")[0]: line.split()[1:] for line in status.splitlines()}
        assert set(fields["Uid"]) == {str(nobody.pw_uid)}
        assert set(fields["Gid"]) == {str(nobody.pw_gid)}
        assert not fields["Groups"]


OWNER = """
import signal
from deploy.group.group import GroupSetup, running
with running(GroupSetup(members=2)) as group:
    print(*(each.pid for each in (*group.members, group.proxy)), flush=True)
    signal.pause()
"""


@needs_proxy
def test_a_group_starts_from_files_that_only_their_owner_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkout by a root whose umask is 077 has them."""
    routes, program = tmp_path / "routes.lua", tmp_path / "memcached"
    for own, source in ((routes, group_module.ROUTES), (program, find_proxy())):
        shutil.copyfile(source, own)
        own.chmod(0o700)
    monkeypatch.setattr(group_module, "ROUTES", routes)
    monkeypatch.setattr(group_module, "find_proxy", lambda: program)
    with running(GroupSetup(members=1)) as group:
        assert group.read_proxy().sets == 0


@needs_proxy
def test_a_group_ends_with_its_owner_even_by_kill() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    ended = [os.pidfd_open(pid) for pid in pids]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert len(ended) == 3
    for each in ended:
        assert await_readable([each], 10.0), "it runs on without its owner"
        os.close(each)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"members": 0}, "members: 0; allowed are 1 to 16"),
        ({"members": 2, "replicas": 3}, "replicas: 3 of 2 members; 1 to all"),
        ({"members": 2, "ports": (1, 2, 2)}, "ports: 2 is given twice"),
        ({"members": 2, "ports": (1, 2)}, "ports: 2; the proxy and each member take one"),
        ({"members": 2, "replicas": 2, "proxy": "nutcracker"}, "nutcracker keeps one of each key"),
        ({"members": 1, "whole": True, "proxy": "nutcracker"}, "nutcracker shards all"),
        ({"proxy_threads": 2, "proxy": "nutcracker"}, "proxy_threads: 2; nutcracker has one"),
        ({"members": 2, "whole": True}, "1 of 2 members hold one; replicas must be all"),
    ],
)
def test_a_group_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        GroupSetup(**fields)
