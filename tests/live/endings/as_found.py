"""Everything of a machine that a command may change, and a comparison of before and after."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.linux import machine_lock
from deploy.linux.cgroups import DEFAULT_WEIGHT, JobGroup, find_groups
from deploy.linux.service_process import affinities
from deploy.records.state import LOCK_FILE
from env.allocation import Weight
from tests.live.conftest import PATIENCE

MARK = "CORETIDE_TEST_MARK"
SETTLE_S = 2.0
"""Until what was killed has ended and what it held is closed."""

LOCKS = (LOCK_FILE, machine_lock.LOCK_FILE)
"""Files that stay, and that hold nothing."""

WEIGHTS = ("cpu.shares", "cpu.weight", "cpu.idle", "cpu.cfs_quota_us", "cpu.max", "cpuset.cpus")

Snapshot = dict[str, Any]


class Machine:
    """
    A memcached in a control group of its own, so that the groups beside it are its deployments',
    and all processes that are started with our mark in their environment.

    :param folder: holds the commands' files
    :param temporary: holds those that do not outlive a command
    :param server: memcached
    :param outer: the group that memcached's own is in
    :param containers: lists the containers there are
    """

    def __init__(
        self,
        folder: Path,
        temporary: Path,
        server: memcached.Memcached,
        outer: JobGroup,
        containers: Callable[[], list[str]],
    ):
        self.server = server
        self.state, self.report = folder / "state", folder / "report"
        self.temporary = temporary
        self._outer = outer
        self._containers = containers
        self._mark = secrets.token_hex(8)

    @property
    def environment(self) -> Mapping[str, str]:
        """What a command and all that it starts are known by."""
        ours = {MARK: self._mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **ours}

    def processes(self) -> dict[int, str]:
        """Those that carry our mark and live."""
        found = {}
        wanted = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace")
        return found

    def snapshot(self) -> Snapshot:
        """All that a command may have changed."""
        threads = {}
        for thread, cores in affinities(self.server.pid).items():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                slack = Path(f"/proc/{thread}/timerslack_ns").read_text()
                threads[thread] = (cores, os.sched_getscheduler(thread), nice, slack)
        groups = {}
        for top in self._outer.hierarchy.folders(self._outer.path):
            for group in (top, *find_groups(top, "")):
                files = [group / name for name in WEIGHTS]
                groups[str(group)] = [file.read_text() for file in files if file.exists()]
        kept = (self.state, self.temporary, machine_lock.runtime_folder())
        files = [path for folder in kept for path in folder.rglob("*")]
        return {
            "memcached's threads": threads,
            "control groups": groups,
            "processes": self.processes(),
            "containers": self._containers(),
            "files": sorted(str(path) for path in files if path.name not in LOCKS),
        }

    def difference(self, before: Snapshot) -> dict[str, tuple[Any, Any]]:
        """
        What is not as it was, once what is ending has ended.

        :param before: as it was
        """
        give_up_s = time.monotonic() + SETTLE_S * PATIENCE
        while True:
            now = self.snapshot()
            found = {what: (before[what], now[what]) for what in now if now[what] != before[what]}
            if not found or time.monotonic() > give_up_s:
                return found
            time.sleep(0.01)

    def end_processes(self) -> None:
        """What a failed test leaves is no concern of the next one."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def machine(folder: Path, containers: Callable[[], list[str]]) -> Iterator[Machine]:
    """
    A memcached whose surroundings can be compared.

    :param folder: for the commands' files
    :param containers: lists the containers there are
    """
    hierarchy = usable_hierarchy()
    assert hierarchy is not None
    normal = DEFAULT_WEIGHT[hierarchy.version]
    path = PurePosixPath(f"/coretide-test-{os.getpid()}")
    outer, own = JobGroup(hierarchy, path, normal), JobGroup(hierarchy, path / "memcached", normal)
    with contextlib.ExitStack() as stack:
        for group in (outer, own):
            stack.callback(group.remove)
            group.create()
            group.set_weight(Weight.NORMAL)
        server = stack.enter_context(memcached.running(threads=2))
        own.join(server.pid)
        # A short path: Docker's sockets may be in there.
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp"))
        found = Machine(folder, Path(temporary), server, outer, containers)
        stack.callback(found.end_processes)
        yield found
