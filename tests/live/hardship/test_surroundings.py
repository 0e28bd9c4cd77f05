"""A deployment from odd surroundings is refused in one line, or runs; it never begins by half."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from deploy.assembly import usable_hierarchy
from deploy.engines import memcached
from deploy.linux.cgroups import PIDS, JobGroup
from deploy.linux.service_process import affinities
from deploy.records.recorder import read_events
from deploy.records.state import LOCK_FILE, STATE_FILE
from tests.live.conftest import PATIENCE, ROOT, Deployment, needs_groups

BEHIND = "import os, sys; {first}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
"""Changes the surroundings, and becomes `deploy.py`."""

LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"
GONE = "import tempfile; here = tempfile.mkdtemp(); os.chdir(here); os.rmdir(here)"

NO_TEXT = os.fsdecode(b"queue\xff\n\x1b[2J")
"""A name that no text can hold, with the letter that dismisses a guardian."""


def after(first: str) -> tuple[str, ...]:
    """The program of a deployment that is started once something has been done."""
    return "-c", BEHIND.format(first=first), str(ROOT / "deploy.py")


def refusal(run: Deployment) -> str:
    """The one line, besides events, with which a deployment is refused."""
    assert run.finish(30.0) == 2, run.lines
    (said,) = (line for line in run.lines if not re.match(r" *[\d.]+ s  scheduler ", line))
    return said


def jobs_of(folder: Path) -> list[str]:
    """Processes that have their proofs in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder / "state" / "attempt-") in (process / "cmdline").read_bytes():
                found.append(process.name)
    return found


@pytest.fixture
def options(scenario_file: Callable[..., Path], groups_file: Path) -> list[str]:
    """Of a deployment of plain processes."""
    scenario = scenario_file(dedup=["sleep", "1000"], radix=["sleep", "1000"])
    given = ["--policy", str(groups_file), "--scenario", str(scenario)]
    return [*given, "--runtime", "process"]


@pytest.mark.parametrize("descriptors", [6, 16, 36, 40, 255])
def test_too_few_descriptors_are_one_line(
    deploy: Callable[..., Deployment], options: list[str], descriptors: int
) -> None:
    run = deploy(*options, program=after(LIMITED.format(descriptors)))
    assert re.search(r"256 are needed$|oo many open files", refusal(run))
    assert not (run.state / STATE_FILE).exists()


@pytest.mark.parametrize("command", ["--check", "--restore", "--dry-run"])
@pytest.mark.parametrize("descriptors", [10, 24])
def test_too_few_descriptors_end_no_command_in_a_traceback(
    deploy: Callable[..., Deployment], options: list[str], command: str, descriptors: int
) -> None:
    run = deploy(*options, command, program=after(LIMITED.format(descriptors)))
    assert run.finish(30.0) in (0, 1, 2), run.lines
    assert not any("Traceback" in line for line in run.lines), run.lines


@needs_groups
@pytest.mark.parametrize(
    ("processes", "more", "says"),
    [
        (1, (), "no guardian can be started: Resource temporarily unavailable"),
        (2, (), "jobs cannot be run: can't start new thread"),
        (2, ("--metrics-port", "0"), "can't start new thread"),
    ],
)
def test_too_few_processes_are_one_line(
    deploy: Callable[..., Deployment],
    options: list[str],
    server: memcached.Memcached,
    processes: int,
    more: tuple[str, ...],
    says: str,
) -> None:
    hierarchy = usable_hierarchy()
    assert hierarchy is not None
    group = JobGroup(hierarchy, PurePosixPath(f"/coretide-test-few-{os.getpid()}"), 1)
    group.create()
    try:
        group.limit_processes(processes)
        members = hierarchy.folder(group.path, PIDS if hierarchy.version == 1 else "cpu")
        join = f"open({str(members / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        run = deploy(*options, *more, program=after(join))
        assert refusal(run).endswith(says)
    finally:
        group.remove()
    assert not (run.state / STATE_FILE).exists()


def test_a_current_folder_that_is_gone_is_one_line(
    deploy: Callable[..., Deployment], options: list[str]
) -> None:
    run = deploy(*options, "--report", "here", program=after(GONE))
    assert refusal(run).endswith("here: the current folder is gone")


def test_what_is_said_goes_to_no_other_file_where_nobody_listens(
    deploy: Callable[..., Deployment], options: list[str], scenario_file: Callable[..., Path]
) -> None:
    """Whoever starts it may have closed its output, whose numbers other files have then."""
    scenario_file(dedup=["sleep", "0.1"], radix=["sleep", "0.1"])
    run = deploy(*options, program=after("os.close(1); os.close(2)"))
    assert run.process.wait(60.0 * PATIENCE) == 0
    assert (run.state / LOCK_FILE).read_text() == ""
    assert [event.what for event in read_events(run.report)].count("end") == 3


def test_a_killed_loop_is_made_safe_whatever_its_folders_are_called(
    deploy: Callable[..., Deployment],
    options: list[str],
    tmp_path: Path,
    server: memcached.Memcached,
) -> None:
    before = affinities(server.pid)
    odd = tmp_path / NO_TEXT
    odd.mkdir()
    rule = odd / "rule.yaml"
    rule.write_bytes((tmp_path / "groups.yaml").read_bytes())
    places = ["--policy", str(rule), "--state", str(odd / "state"), "--report", str(odd / "report")]
    run = deploy(*options, *places)
    run.expect(r"radix start \[")
    run.expect(r"memcached update_cores \[0\]$")
    run.kill()
    give_up_s = time.monotonic() + 5.0 * PATIENCE
    while affinities(server.pid) != before:
        assert time.monotonic() < give_up_s, run.lines
        time.sleep(0.01)
    assert jobs_of(odd)
    assert deploy("--restore", *places).finish() == 0
    assert not (odd / "state" / STATE_FILE).exists() and not jobs_of(odd)
