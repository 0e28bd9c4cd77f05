"""Who is not root can deploy plain processes, and is told where more rights are needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.assembly import find_service
from deploy.engines import memcached
from deploy.linux.group_sensor import GroupSensor
from deploy.linux.sensors import ServiceSensor
from deploy.linux.service_process import affinities
from deploy.requirements import FAULT, folders, groups
from deploy.settings import Settings
from env.errors import InputError
from tests.live.conftest import JOBS, PATIENCE, ROOT, started_as

SOMEBODY = 65533
"""A user who is neither root nor memcached's own."""

READS_ALL = "-all,+dac_read_search"
"""The repository may be in a folder of root's: somebody may look at it, and nothing more."""

AS_SOMEBODY = (
    *("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups"),
    *(f"--{kind}={READS_ALL}" for kind in ("inh-caps", "ambient-caps", "bounding-set")),
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def settings(server: memcached.Memcached) -> Iterator[Settings]:
    """A deployment whose folders anybody may look at, and only root write to."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(server.host, server.port, "docker", None, False, folder, folder)
    shutil.rmtree(folder)


def told(question: Callable[[], str]) -> str:
    """What somebody is told, by a process that has become somebody."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(SOMEBODY)
            os.setuid(SOMEBODY)
            os.write(writing, question().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def found(settings: Settings) -> str:
    """Which process memcached is, or why it is not known."""
    sensor = GroupSensor([ServiceSensor(settings.host, settings.port)])
    try:
        return f"process {find_service(sensor, time.monotonic())[0].pid}"
    except InputError as error:
        return str(error)
    finally:
        sensor.close()


def test_anothers_memcached_is_not_called_absent(
    server: memcached.Memcached, settings: Settings
) -> None:
    address = f"{server.host}:{server.port}"
    asked = f"{address}: {server.pid} is another user's process: run as root"
    assert told(lambda: found(settings)) == asked
    nobody = replace(settings, port=9)
    assert told(lambda: found(nobody)) == "127.0.0.1:9: no memcached of this machine answers there"
    assert found(settings) == f"process {server.pid}"


def test_a_folder_of_roots_is_refused_for_its_rights_and_not_its_space(settings: Settings) -> None:
    refused = f"{settings.folder}: may not be written by this user"
    assert told(
        lambda: "\n".join(one.found for one in folders(settings) if one.verdict == FAULT)
    ) == "\n".join([refused, refused])
    assert "may not" not in "".join(one.found for one in folders(settings))


def test_control_groups_of_roots_are_refused_with_the_way_out(settings: Settings) -> None:
    assert told(lambda: next(groups(settings)).found).endswith("sudo, or --runtime process")


def test_somebody_deploys_processes_beside_their_own_memcached(
    settings: Settings, scenario_file: Callable[..., Path], groups_file: Path
) -> None:
    os.chown(settings.folder, SOMEBODY, SOMEBODY)
    with started_as(AS_SOMEBODY) as server:
        before = affinities(server.pid)
        command = [*AS_SOMEBODY, sys.executable, str(ROOT / "deploy.py"), "--no-pictures"]
        command += ["--memcached", f"{server.host}:{server.port}", "--runtime", "process"]
        command += ["--policy", str(groups_file), "--scenario", str(scenario_file())]
        command += ["--state", str(settings.folder / "state")]
        command += ["--report", str(settings.folder / "report")]
        here = {"HOME": str(settings.folder), "XDG_RUNTIME_DIR": str(settings.folder)}
        run = subprocess.run(
            command,
            env={**os.environ, **here},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60.0 * PATIENCE,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert affinities(server.pid) == before
    for said in (r"update_cores \[0\]", *(f"{job} end" for job in JOBS), "as it was found"):
        assert re.search(said, run.stdout), run.stdout
    assert not (settings.folder / "state" / "state.json").exists()
