"""A client that holds every answer against what it wrote, while its group loses a member."""

from __future__ import annotations

import itertools
import random
import socket
import time

from deploy.group.group import Group

ERRORS = (b"SERVER_ERROR", b"ERROR", b"CLIENT_ERROR")
BATCH = 50


class Asker:
    """A client that remembers what it wrote, and holds every answer against that."""

    def __init__(self, group: Group, keys: int):
        self._file = socket.create_connection((group.proxy.host, group.proxy.port), 30).makefile(
            "rwb"
        )
        self._keys = [b"key-%05d" % key for key in range(keys)]
        self._serial = itertools.count(1)
        self._random = random.Random(0)
        self.sent: dict[bytes, int] = {}
        self.stored: dict[bytes, int] = {}
        self.asked = self.failed = self.failed_sets = self.hits = self.stores = 0

    def close(self) -> None:
        self._file.close()

    def ask(self, count: int) -> int:
        """Ask for as many SETs as GETs, pipelined; how many failed."""
        before = self.failed
        requests = []
        for _ in range(count):
            key = self._random.choice(self._keys)
            if self._random.random() < 0.5:
                requests.append((key, 0))
                self._file.write(b"get %b\r\n" % key)
            else:
                serial = next(self._serial)
                requests.append((key, serial))
                value = b"%b/%d" % (key, serial)
                self._file.write(b"set %b 0 0 %d\r\n%b\r\n" % (key, len(value), value))
                self.sent[key] = serial
        self._file.flush()
        for key, serial in requests:
            self.asked += 1
            if serial:
                self._hear_set(key, serial)
            else:
                self._hear_get(key)
        return self.failed - before

    def _hear_set(self, key: bytes, serial: int) -> None:
        line = self._file.readline()
        if line == b"STORED\r\n":
            self.stored[key] = serial
            self.stores += 1
        else:
            assert line.startswith(ERRORS), line
            self.failed += 1
            self.failed_sets += 1

    def _hear_get(self, key: bytes) -> None:
        line = self._file.readline()
        if line.startswith(ERRORS):
            self.failed += 1
        elif line != b"END\r\n":
            assert line.startswith(b"VALUE %b 0 " % key), line
            whose, serial = self._file.readline().split(b"/")
            assert self._file.readline() == b"END\r\n"
            # What it got was written, and nothing that was stored since is missing.
            assert whose == key
            assert self.stored.get(key, 0) <= int(serial) <= self.sent[key]
            self.hits += 1


def lose_a_member(group: Group, requests: int) -> None:
    """So many requests, with a member killed after a third of them and back after another."""
    asker = Asker(group, keys=1000)
    for _ in range(requests // 3 // BATCH):
        assert asker.ask(BATCH) == 0
    assert asker.hits > 0

    group.members[1].process.kill()
    group.members[1].process.wait()
    stores = asker.stores
    for _ in range(requests // 3 // BATCH):
        asker.ask(BATCH)
    assert asker.stores == stores, "all replicas cannot have answered"
    failed_gets = asker.failed - asker.failed_sets
    assert 0 < failed_gets < requests / 3 / 2, "the others' keys are still served"

    group.restart(2)
    give_up_s = time.monotonic() + 30.0
    while asker.ask(BATCH):
        assert time.monotonic() < give_up_s, "it is back, but not asked"
    hits = asker.hits
    for _ in range(requests // 3 // BATCH):
        assert asker.ask(BATCH) == 0
    assert asker.hits > hits
    asker.close()

    counted = group.read_proxy()
    assert counted.gets + counted.sets == asker.asked
    assert counted.failed == asker.failed
