"""
A group of memcacheds behind a proxy: started, read member by member, and stopped.

    with running(GroupSetup(members=3, replicas=3)) as group:
        ...  # clients ask group.proxy.host, group.proxy.port

All of it listens on loopback and runs as nobody. It ends with the block, and with the process that
started it: the kernel sees to that, also after `kill -9`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deploy.engines import memcached
from deploy.engines.memcached import HOST, Memcached
from deploy.engines.nutcracker import find_nutcracker
from deploy.engines.proxy_build import find_proxy
from deploy.linux.service_process import NUTCRACKER, serves, stat_fields
from deploy.linux.signals import end_with, held
from env.errors import InputError, os_reason
from env.scenario import MOST_MEMBERS, Service

ROUTES, NUTCRACKER_SETTINGS = (
    Path(__file__).with_name(name) for name in ("routes.lua", "nutcracker.yaml")
)
ANSWER_LIMIT_S = 2.0


@dataclass(frozen=True)
class GroupSetup:
    """
    What a group is made of.

    :param members: servers, each with a thread of its own
    :param replicas: members that hold a key
    :param proxy_threads: of the proxy
    :param whole: send all GETs of a connection to one member; multi-gets are sharded otherwise
    :param ports: of the proxy, then of the members; free ones where none are given
    :param proxy: memcached's own, or nutcracker, which shards and has one thread
    :raises InputError: one line, if there is no such group
    """

    members: int = 3
    replicas: int = 1
    proxy_threads: int = 1
    whole: bool = False
    ports: tuple[int, ...] = ()
    proxy: Literal["memcached", "nutcracker"] = "memcached"

    def __post_init__(self) -> None:
        if not 1 <= self.members <= MOST_MEMBERS:
            raise InputError(f"members: {self.members}; allowed are 1 to {MOST_MEMBERS}")
        if not 1 <= self.replicas <= self.members:
            raise InputError(f"replicas: {self.replicas} of {self.members} members; 1 to all")
        if self.whole and self.replicas < self.members:
            raise InputError(
                f"whole: a member that is sent a whole multi-get must have every key, but "
                f"{self.replicas} of {self.members} members hold one; replicas must be all"
            )
        if self.proxy == "nutcracker":
            if self.replicas > 1:
                raise InputError(f"replicas: {self.replicas}; nutcracker keeps one of each key")
            if self.whole:
                raise InputError("whole: nutcracker shards all multi-gets")
            if self.proxy_threads > 1:
                raise InputError(f"proxy_threads: {self.proxy_threads}; nutcracker has one")
        if self.ports and len(self.ports) != self.members + 1:
            raise InputError(f"ports: {len(self.ports)}; the proxy and each member take one")
        for port in self.ports:
            if self.ports.count(port) > 1:
                raise InputError(f"ports: {port} is given twice; each must be another's")


@dataclass(frozen=True)
class MemberCounters:
    """
    What a member has done since its start.

    :param gets: keys that it was asked for
    :param misses: of them those that it did not have
    :param sets: values stored
    :param cpu_s: its CPU time [s]
    """

    gets: int
    misses: int
    sets: int
    cpu_s: float


@dataclass(frozen=True)
class ProxyCounters:
    """
    What the proxy has done since its start; a multi-get of k keys counts as k GETs.

    nutcracker counts nothing of it: all but its CPU time is 0.

    :param gets: answered, failed ones included
    :param gets_server_s: how long it waited for members' answers to them, in all [s]
    :param sets: answered, failed ones included
    :param sets_server_s: how long it waited for the last replica's answers to them, in all [s]
    :param failed: GETs and SETs that a member did not answer
    :param cpu_s: its CPU time [s]
    """

    gets: int
    gets_server_s: float
    sets: int
    sets_server_s: float
    failed: int
    cpu_s: float


class Group:
    """
    See the module; made by `running`.

    :param setup: what it is made of
    :param stack: stops in the end what is started
    """

    def __init__(self, setup: GroupSetup, stack: contextlib.ExitStack):
        self.setup = setup
        self._programs = programs_of(setup.proxy)
        self._stack = stack
        self._folder = Path(tempfile.mkdtemp(prefix="coretide-group-"))
        self._folder.rmdir()
        ports = setup.ports or _free_ports(setup.members + 1)
        with self._lending():
            self.members = [self._start_member(port) for port in ports[1:]]
            self.proxy = self._start_proxy(ports[0])

    def restart(self, place: int) -> None:
        """
        Replace a process that has ended by another one on its port, a member by an empty one.

        :param place: 0 for the proxy, from 1 for members
        :raises InputError: if it does not come up
        """
        with self._lending():
            if place == 0:
                memcached.stop(self.proxy)
                self.proxy = self._start_proxy(self.proxy.port)
            else:
                memcached.stop(self.members[place - 1])
                self.members[place - 1] = self._start_member(self.members[place - 1].port)

    def read_members(self) -> list[MemberCounters]:
        """
        The counters of each member.

        :raises InputError: if one does not answer
        """
        found = []
        for place, member in enumerate(self.members):
            stats = read_stats(f"member {place + 1}", member.port, "stats")
            found.append(
                MemberCounters(
                    gets=int(stats["cmd_get"]),
                    misses=int(stats["get_misses"]),
                    sets=int(stats["cmd_set"]),
                    cpu_s=_cpu_s(stats),
                )
            )
        return found

    def read_proxy(self) -> ProxyCounters:
        """
        The proxy's counters.

        :raises InputError: if it does not answer
        """
        if self.setup.proxy == "nutcracker":
            user, system = stat_fields(self.proxy.pid)[11:13]
            ticks = int(user) + int(system)
            return ProxyCounters(0, 0.0, 0, 0.0, 0, ticks / os.sysconf("SC_CLK_TCK"))
        stats = read_stats("the proxy", self.proxy.port, "stats")
        own = read_stats("the proxy", self.proxy.port, "stats proxy")
        return ProxyCounters(
            gets=int(own["user_get"]),
            gets_server_s=1e-6 * int(own["user_get_us"]),
            sets=int(own["user_set"]),
            sets_server_s=1e-6 * int(own["user_set_us"]),
            failed=int(own["user_failed"]),
            cpu_s=_cpu_s(stats),
        )

    @contextlib.contextmanager
    def _lending(self) -> Iterator[None]:
        """Copy for nobody, who may not come to where we are; what has started needs no copy."""
        # Always the same folder: who follows a process wants to see the same program after it.
        self._folder.mkdir(mode=0o700)
        try:
            yield
        finally:
            shutil.rmtree(self._folder)

    def _start_member(self, port: int) -> Memcached:
        return self._start_memcached(self._lend(self._programs[0]), 1, port)

    def _start_proxy(self, port: int) -> Memcached:
        ports = [member.port for member in self.members]
        if self.setup.proxy == "nutcracker":
            return self._start_nutcracker(port, ports)
        own, routes = self._lend(self._programs[1]), self._lend(ROUTES)
        told = f"{'-'.join(map(str, ports))}/{self.setup.replicas}/"
        told += "whole" if self.setup.whole else "sharded"
        options = f"proxy_config={routes},proxy_arg={told}"
        return self._start_memcached(own, self.setup.proxy_threads, port, "-o", options)

    def _start_memcached(self, program: Path, threads: int, port: int, *options: str) -> Memcached:
        command = [str(program), "-l", HOST, "-p", str(port), "-t", str(threads), "-U", "0"]
        server = self._start(port, [*command, "-m", "64", *options])
        memcached.await_answer(server.process, port)
        return server

    def _start_nutcracker(self, port: int, members: Sequence[int]) -> Memcached:
        settings = self._lend(NUTCRACKER_SETTINGS)
        listed = "".join(f"\n    - {HOST}:{member}:1" for member in members)
        text = NUTCRACKER_SETTINGS.read_text(encoding="utf-8")
        settings.write_text(text.format(proxy=f"{HOST}:{port}", members=listed), encoding="utf-8")
        # Errors alone, on stderr; its own counters nobody asks for.
        own = ("-v", "1", "-o", "", "-a", HOST, "-s", str(memcached.free_port()))
        server = self._start(port, [str(self._programs[1]), "-c", str(settings), *own])
        pid = server.pid
        memcached.await_server(
            server.process, port, "nutcracker", lambda: serves(pid, port, NUTCRACKER)
        )
        return server

    def _lend(self, source: Path) -> Path:
        lent = self._folder / source.name
        shutil.copyfile(source, lent.with_suffix(".new"))
        lent.with_suffix(".new").replace(lent)  # what runs cannot be written to
        for path in (self._folder, lent):
            path.chmod(0o755)
        return lent

    def _start(self, port: int, command: Sequence[str]) -> Memcached:
        """Start a process that is not waited for yet."""
        as_nobody: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            as_nobody = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        with held():  # what is started is known before anything may end this program
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                **as_nobody,
                preexec_fn=functools.partial(end_with, os.getpid()),
            )
            server = Memcached(HOST, port, process)
            self._stack.callback(memcached.stop, server)
        return server


def programs_of(proxy: str) -> tuple[Path, Path]:
    """
    What a group's members and its proxy run.

    :param proxy: as in `GroupSetup`
    :raises InputError: if this machine has it not: one line says how to get it
    """
    if proxy == "nutcracker":
        return memcached.find_memcached(), find_nutcracker()
    return find_proxy(), find_proxy()


@contextlib.contextmanager
def running(setup: GroupSetup) -> Iterator[Group]:
    """
    Keep a group for the length of a `with` block.

    :param setup: what it is made of
    :raises InputError: if memcached has no proxy, or a process does not come up: nothing is left
    """
    with contextlib.ExitStack() as stack:
        yield Group(setup, stack)


@contextlib.contextmanager
def serving(service: Service) -> Iterator[list[Memcached]]:
    """
    Keep what a scenario calls its service for the length of a `with` block.

    :param service: of the scenario
    :return: its processes, the one that clients ask first
    :raises InputError: if they cannot be had: nothing is left
    """
    with contextlib.ExitStack() as stack:
        if service.proxy is None:
            threads = service.threads // service.members
            each = [memcached.running(threads) for _ in range(service.members)]
            yield [stack.enter_context(one) for one in each]
        else:
            threads = service.threads - service.members
            setup = GroupSetup(service.members, service.replicas, threads, proxy=service.proxy)
            group = stack.enter_context(running(setup))
            yield [group.proxy, *group.members]


def read_stats(who: str, port: int, command: str) -> dict[str, str]:
    """
    What memcached or its proxy says of itself.

    :param who: for messages
    :param port: its TCP port on loopback
    :param command: `stats` or one of its kind
    :raises InputError: if it does not answer, or not as memcached does
    """
    answer = b""
    try:
        with socket.create_connection((HOST, port), ANSWER_LIMIT_S) as connection:
            connection.sendall(command.encode() + b"\r\n")
            while not answer.endswith(b"END\r\n"):
                part = connection.recv(65536)
                if not part:
                    raise ConnectionResetError("it has closed the connection")
                answer += part
    except OSError as error:
        raise InputError(f"{who}: {HOST}:{port} does not answer: {os_reason(error)}") from error
    lines = (line.split(" ", 2) for line in answer.decode(errors="replace").split("\r\n"))
    return {line[1]: line[2] for line in lines if len(line) == 3}


def _cpu_s(stats: dict[str, str]) -> float:
    return float(stats["rusage_user"]) + float(stats["rusage_system"])


def _free_ports(count: int) -> Sequence[int]:
    """Ports that differ: all are held until the last one is known."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in taken]
