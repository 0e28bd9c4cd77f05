"""A memcached, a Docker daemon and deployments of our own, each gone when its test has ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agents.checkpoint import FORMAT, METADATA_ENTRY, WEIGHTS_ENTRY
from deploy.assembly import group_maker, usable_hierarchy
from deploy.engines import daemon, images, memcached
from deploy.jobs import containers, yielding
from deploy.jobs.containers import DockerRuntime
from deploy.jobs.runtimes import ProcessRuntime
from deploy.linux import service_process
from deploy.linux.cgroups import find_groups
from deploy.linux.readiness import await_readable
from deploy.linux.sensors import VcpuClock
from deploy.loop.actuator import Actuator
from deploy.records.recorder import Recorder
from deploy.records.state import State, StateFolder
from deploy.safety.restore import undo
from env.action import edit_table
from env.observation import VERSION, feature_count
from env.scenario import load_scenario

ROOT = Path(__file__).resolve().parents[2]
JOBS = ("dedup", "radix")
LONG = ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "100000000"]
PATIENCE = float(os.environ.get("CORETIDE_PATIENCE", "1"))
"""How many times longer things may take here than on a real machine (`tests/live/guest`)."""

daemon.START_LIMIT_S *= PATIENCE
yielding.PATIENCE_S *= PATIENCE
containers.CALL_LIMIT_S = round(containers.CALL_LIMIT_S * PATIENCE)

needs_groups = pytest.mark.skipif(
    usable_hierarchy() is None, reason="control groups cannot be written here"
)
needs_docker = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("dockerd") is None or usable_hierarchy() is None,
    reason="no Docker daemon can be started here",
)


@contextlib.contextmanager
def started_as(
    first: Sequence[str] = (), last: Sequence[str] = ()
) -> Iterator[memcached.Memcached]:
    """
    A memcached with two worker threads that is not started as deployments' own engine is.

    :param first: what its command begins with, in front of memcached
    :param last: options of memcached
    """
    port = memcached.free_port()
    own = ("memcached", "-l", memcached.HOST, "-p", str(port), "-t", "2")
    process = subprocess.Popen([*first, *own, *last], stderr=subprocess.PIPE)
    server = memcached.Memcached(memcached.HOST, port, process)
    try:
        memcached.await_answer(process, port)
        yield server
    finally:
        memcached.stop(server)


@pytest.fixture
def server() -> Iterator[memcached.Memcached]:
    """A memcached with two worker threads."""
    with memcached.running(threads=2) as started:
        yield started


@pytest.fixture
def scenario_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a scenario of two vCPUs and the jobs' commands, two short ones if none are given."""

    def write(sharing: bool = True, **commands: list[str]) -> Path:
        jobs = commands or {
            "dedup": ["stress-ng", "--cpu", "{threads}", "--cpu-ops", "200"],
            "radix": ["stress-ng", "--matrix", "{threads}", "--matrix-ops", "100"],
        }
        # Without sharing one vCPU is the jobs' own, and nothing else on the machine starves them.
        choices = [[0], [0, 1]] if sharing else [[0]]
        content = {
            "name": "two",
            "description": "jobs of the machine's own programs",
            "profile": "cca-2025",
            "machine": {"vcpus": 2, "memory_mib": 2048},
            # A hypervisor that runs somebody else makes requests wait for milliseconds.
            "service": {"threads": 2, "slo_us": 10_000, "core_choices": choices},
            "regulation": {"share_service_cores": sharing},
            "jobs": [
                {
                    "name": name,
                    "image": images.STRESS_IMAGE,
                    "command": list(command),  # one list twice would be an alias
                    "threads": [1, 2],
                    "memory_mib": 256,
                }
                for name, command in jobs.items()
            ],
            "load": {"qps_min": 1000, "qps_max": 60000, "interval_s": 5, "duration_s": 60},
            "control": {"period_s": 0.025, "hold_s": 1.0, "wake_qps": 5000},
        }
        path = tmp_path / "two.yaml"
        apart = json.loads(json.dumps(content))  # YAML of ours has no aliases
        path.write_text(yaml.safe_dump(apart), encoding="utf-8")
        return path

    return write


@pytest.fixture
def groups_file(tmp_path: Path) -> Path:
    """threshold-groups for the two jobs: both at once."""
    rule = {
        "rule": "threshold-groups",
        "period_s": 0.1,
        "threshold": 0.6,
        "groups": [[{"job": job, "threads": 1, "cores": 1} for job in JOBS]],
    }
    path = tmp_path / "groups.yaml"
    path.write_text(yaml.safe_dump(rule), encoding="utf-8")
    return path


def write_checkpoint(path: Path, scenario_path: Path, scale: float = 1.0) -> Path:
    """A PPO checkpoint as training exports it, of a network of random weights."""
    scenario = load_scenario(scenario_path)
    table, width = edit_table(scenario), feature_count(scenario)
    metadata = {
        "format": FORMAT,
        "observation_version": VERSION,
        "scenario": scenario.name,
        "features": width,
        "actions": [table.describe(edit) for edit in range(len(table))],
        "job_work_s": dict.fromkeys(scenario.job_names, 10.0),
        "steps": 0,
    }
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {}
    for layer, (inputs, outputs) in enumerate(((width, 32), (32, len(table)))):
        arrays[f"weight_{layer}"] = (scale * rng.normal(size=(outputs, inputs))).astype(np.float32)
        arrays[f"bias_{layer}"] = np.zeros(outputs, np.float32)
    buffer = BytesIO()
    np.savez(buffer, **arrays)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(METADATA_ENTRY, json.dumps(metadata))
        archive.writestr(WEIGHTS_ENTRY, buffer.getvalue())
    return path


class Deployment:
    """`deploy.py` as a process, its lines as they come."""

    def __init__(
        self,
        folder: Path,
        server: memcached.Memcached,
        *options: str,
        program: Sequence[str] = (str(ROOT / "deploy.py"),),
        report: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.state = folder / "state"
        self.report = report or folder / "report"
        self.nonce = ""
        self.lines: list[str] = []
        self._rest = b""
        self.process = subprocess.Popen(
            [
                *(sys.executable, *program),
                *("--memcached", f"{server.host}:{server.port}"),
                *("--state", str(self.state), "--report", str(self.report), "--no-pictures"),
                *options,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )

    def expect(self, pattern: str, limit_s: float = 90.0) -> str:
        """Wait for a line, longer than Docker may hang; fail with everything that came instead."""
        for line in self.lines:
            if re.search(pattern, line):
                return line
        give_up_s = time.monotonic() + limit_s * PATIENCE
        while (left_s := give_up_s - time.monotonic()) > 0 and (found := self._next(left_s)):
            if re.search(pattern, found):
                return found
        raise AssertionError(f"no line with {pattern!r} in:\n" + "\n".join(self.lines))

    def finish(self, limit_s: float = 90.0) -> int:
        """Read to the end; the exit code."""
        give_up_s = time.monotonic() + limit_s * PATIENCE
        while (left_s := give_up_s - time.monotonic()) > 0 and self._next(left_s) is not None:
            pass
        return self.process.wait(max(0.1, give_up_s - time.monotonic()))

    def kill(self) -> None:
        """What no process can prepare for."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, and undo what it did."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15 * PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def count(self, pattern: str) -> int:
        """How many lines have a pattern."""
        return sum(bool(re.search(pattern, line)) for line in self.lines)

    def _next(self, limit_s: float) -> str | None:
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            if not await_readable([self.process.stdout.fileno()], limit_s):
                return None
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                return None
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        if not self.nonce:
            with contextlib.suppress(OSError, ValueError):
                state = json.loads((self.state / "state.json").read_text(encoding="utf-8"))
                self.nonce = state["nonce"]
        self.lines.append(line.decode(errors="replace"))
        return self.lines[-1]


@pytest.fixture
def deploy(tmp_path: Path, server: memcached.Memcached) -> Iterator[Callable[..., Deployment]]:
    """Starts deployments against our memcached; they end with the test."""
    started: list[Deployment] = []

    def start(*options: str, **settings: Any) -> Deployment:
        started.append(Deployment(tmp_path, server, *options, **settings))
        return started[-1]

    yield start
    for deployment in started:
        deployment.close()
    if (tmp_path / "state" / "state.json").exists():
        undo = Deployment(tmp_path, server, "--restore")
        undo.finish()
        undo.close()


def assert_as_found(server: memcached.Memcached, run: Deployment) -> None:
    """memcached may run anywhere again, and no group of the deployment is left."""
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    assert set(service_process.affinities(server.pid).values()) == {everywhere}
    mounts = Path("/sys/fs/cgroup")
    assert run.nonce
    assert find_groups(mounts, f"coretide-{run.nonce}-") == []


@pytest.fixture(
    params=["process", pytest.param("docker", marks=[pytest.mark.survival, needs_docker])]
)
def actuators(server, scenario_file, tmp_path, request):
    """
    Makes actuators of two long jobs beside memcached, under either runtime; undone at the end.

    Each goes on from the state that the one before it has left.
    """
    scenario = load_scenario(scenario_file(dedup=LONG, radix=LONG))
    folder = StateFolder(tmp_path / "state")
    state = State("parts", scenario.name, request.param, "", time.monotonic())
    folder.begin(state)
    recorder = Recorder(tmp_path / "report", scenario, state.started_s)
    hierarchy, runtime = usable_hierarchy(), ProcessRuntime()
    if request.param == "docker":
        url = request.getfixturevalue("docker_daemon").url
        runtime = DockerRuntime(hierarchy, state.nonce, url)
    groups = group_maker(state, hierarchy, [server.pid])
    vcpus, made = VcpuClock(scenario.machine.vcpus, None), []

    def make():
        for earlier in made[-1:]:
            earlier.close()
        made.append(Actuator(scenario, runtime, folder, folder.load(), groups, recorder, vcpus))
        return made[-1]

    yield make
    made[-1].close()
    assert undo(made[-1].state, folder, runtime, hierarchy) == []
    vcpus.close()
    recorder.close()


@pytest.fixture
def actuator(actuators):
    """The only one."""
    return actuators()
