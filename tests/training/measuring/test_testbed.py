"""How the testbed's memcached stands: as it was started, or as a deployment's."""

import os
import shutil
from pathlib import Path

import pytest

from deploy.deployment import usable_hierarchy
from deploy.jobs.precedence import TIDIES
from deploy.linux import standing
from deploy.linux.service_process import thread_ids
from training.measuring.testbed import open_testbed

pytestmark = pytest.mark.skipif(
    usable_hierarchy() is None or os.geteuid() != 0 or not shutil.which("memcached"),
    reason="needs root, control groups and memcached",
)


def classes(pid: int) -> set[int]:
    """The classes of the threads that requests wait for."""
    return {
        os.sched_getscheduler(thread)
        for thread in thread_ids(pid)
        if Path(f"/proc/{thread}/comm").read_bytes() != TIDIES
    }


def test_memcached_goes_first_where_it_is_to(tmp_path: Path) -> None:
    hierarchy = usable_hierarchy()
    assert hierarchy is not None
    with open_testbed(tmp_path / "work", despite_load=True) as testbed:
        with testbed.serving(2, (0,)) as server:
            assert classes(server.pid) == {os.SCHED_OTHER}
        with testbed.serving(2, (0,), first=True) as server:
            found = classes(server.pid)
        if testbed.precedence == "SCHED_RR":
            assert found == {os.SCHED_RR}
        else:
            assert testbed.precedence in ("cpu.shares", "cpu.weight")
            assert found == {os.SCHED_OTHER}
            # Version 2 cannot give a group real-time where the kernel has RT_GROUP_SCHED.
            assert hierarchy.version == 2 or not standing.may_go_first()
